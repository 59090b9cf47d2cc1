"""Files of a report: each is put there whole or not at all, and what was there before stays until then."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from espalier.space import EspalierError

PARTIAL = ".partial"


class NotWritten(EspalierError):
    """A file of a report could not be written; what was there before is intact."""


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Whatever cannot be written within, as one clear line."""
    try:
        yield
    except OSError as error:
        raise NotWritten(_why(Path(error.filename or "a file of the report"), error)) from error


def put(path: Path, data: bytes | str) -> Path:
    """Write beside it, flush to the disk, rename."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise NotWritten(_why(path, error)) from error
    return path


def _why(path: Path, error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "the disk is full" if full else error.strerror or str(error)
    way = "make room" if full else "make its folder one that can be written to"
    return f"{path} could not be written: {why}. The runs are intact; {way}, and ask for the report again"
