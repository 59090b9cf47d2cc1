"""Files that are put in place complete or not at all, and values that JSON can hold. Every layer may use it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.space.errors import EspalierError

PARTIAL = ".partial"


class NotSaved(EspalierError, OSError):
    """A file could not be written; what was there before is intact."""


def write(path: Path, data: bytes | str) -> Path:
    """Write beside the path, flush to the disk, rename, flush the folder. Its folder is made where there is none."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else error.strerror or str(error)
        kept = "What was saved before is intact; make room, or choose another folder, and run the same call again"
        lost = "Choose a folder that can be made and written to"
        raise NotSaved(error.errno, f"{path} could not be written: {why}. {kept if full else lost}") from error
    return path


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
