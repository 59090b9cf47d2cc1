"""Files that are put in place complete or not at all, their manifests, and values that JSON can hold."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier import schema
from espalier.space import BadInput, Corrupt, EspalierError

PARTIAL, MANIFEST = ".partial", "manifest.json"
_MANIFEST = schema.record({"files": schema.table(schema.text("[0-9a-f]{64}"))})


class NotSaved(EspalierError, OSError):
    """A file could not be written; what was there before is intact."""


def write(path: Path, data: bytes | str) -> Path:
    """Write beside the path, flush to the disk, rename, flush the folder. Its folder is made where there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(write_beside(path, data.encode() if isinstance(data, str) else data), path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else error.strerror or str(error)
        kept = "What was saved before is intact; make room, or choose another folder, and run the same call again"
        lost = "Choose a folder that can be made and written to"
        raise NotSaved(error.errno, f"{path} could not be written: {why}. {kept if full else lost}") from error
    return path


def below(root: Path, path: Path) -> Path:
    """The path, which lies below a root that somebody named. Refused where it, or a folder on the way to it, is a link:
    what is written would lie elsewhere. The root may be one."""
    for part in (path, *path.parents):
        if part == root:
            break
        if part.is_symlink():
            raise BadInput(f"{part} is a link, and nothing is written outside of {root}; put a folder in its place")
    return path


def write_beside(path: Path, data: bytes) -> Path:
    """The data in a file beside the path, on the disk. Its name cannot be foreseen, and no link is followed to it: who
    may write to the folder cannot lead it elsewhere."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return partial


def put_in_place(partial: Path, path: Path) -> None:
    """Rename what was written beside the path, and flush the folder."""
    try:
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A rename is only on the disk when its folder is."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- manifests -------------------------------------------------------------------------------------------------------


def seal(folder: Path, names: Iterable[str]) -> None:
    """Write the manifest of a folder that is complete: the SHA-256 of those of these files that are there."""
    there = [folder / name for name in names if (folder / name).is_file()]
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in there}
    write(folder / MANIFEST, schema.sealed({"format": 2, "files": digests}, indent=1))


def unseal(folder: Path) -> None:
    """Before files of the folder change: it has no manifest until it is complete again."""
    try:
        (folder / MANIFEST).unlink()
    except FileNotFoundError:
        return
    _sync_folder(folder)


def manifest(folder: Path, way_out: str = "") -> dict[str, str]:
    """The SHA-256 of each file, by its name; empty where the folder has no manifest: one that is written to, or old."""
    try:
        digests: dict[str, str] = schema.read(folder / MANIFEST, _MANIFEST, newest=2, way_out=way_out)["files"]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return digests


def check(folder: Path, name: str, way_out: str = "") -> None:
    """Refuse a file that is not the one its folder's manifest tells of; without a manifest nothing is known."""
    digest = manifest(folder, way_out).get(name)
    if digest is not None and not ((folder / name).is_file() and _digest(folder / name) == digest):
        after = f". {way_out}" if way_out else ""
        raise Corrupt(f"{folder / name} is damaged: its checksum is not the one in {MANIFEST}{after}")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clean(value: Any, digits: int | None = None) -> Any:
    """A value as JSON: infinities and NaN, for which it has no word, as None; mappings as dict, sequences as list.

    digits: significant digits that numbers are rounded to; None: as they are.

    >>> clean({"loss": float("nan"), "shares": (0.123456789, 1)}, digits=3)
    {'loss': None, 'shares': [0.123, 1]}
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: clean(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item, digits) for item in value]
    return value
