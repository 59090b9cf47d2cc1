"""Files that are put in place complete or not at all, and values that JSON can hold. Every layer may use it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.space.errors import EspalierError

PARTIAL = ".partial"


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
