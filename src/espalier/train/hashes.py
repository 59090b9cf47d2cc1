"""Hashes of data that were read from files, kept in the folder of a run: a file that has not changed since, by its size
and its times, is not hashed again.

A tensor knows its file by a mark (:func:`mark`), which what is made of the tensor does not have. The file
``hashes.json`` carries a checksum; where a bit of it differs, or it is not there, all data are hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from espalier import files, schema
from espalier.space import Corrupt
from espalier.train import fingerprint

HASHES, FORMAT = "hashes.json", 2
RECENT = 2.0  # seconds: a file that changed so lately may change again and keep its time
_TABLE = schema.table(schema.text("[0-9a-f]{32}"), keys="[0-9a-f]{64}")
_SCHEMA = schema.record({"hashes": _TABLE, schema.CHECKSUM: schema.text()})


def stamp(path: Path) -> str | None:
    """Which file it is, as it is now: its place, size and times (of its content, and of anything about it: a content
    whose time was set back counts as changed). None where it has changed just now."""
    about = path.stat()
    if time.time() - max(about.st_mtime, about.st_ctime) < RECENT:
        return None
    return json.dumps([str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns])


def mark(tensor: Tensor, origin: str) -> None:
    """Note that a tensor is what was read from a file. origin: the file's stamp, how it was read, and by what."""
    tensor.espalier_origin = (origin, tensor._version)  # type: ignore[attr-defined]


def _origin(tensor: Tensor) -> str | None:
    """None of tensors that are of no file, or were changed since."""
    origin, version = getattr(tensor, "espalier_origin", (None, None))
    return origin if origin is not None and version == tensor._version else None


class Hashes:
    """Those of one folder; None: nothing is known or kept."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / HASHES
        self.known, self.asked, self.ours = dict[str, str](), dict[str, str](), True
        with contextlib.suppress(OSError, Corrupt):
            data = b"" if self.path is None else schema.content(self.path)
            self.ours = not data or schema.CHECKSUM.encode() in data
            with contextlib.suppress(schema.Mismatch):
                self.known = schema.parse(data, _SCHEMA, newest=FORMAT)["hashes"]

    def tensors(self, given: Iterable[Tensor]) -> str:
        """As :func:`espalier.train.fingerprint.tensors`; not computed where it is known."""
        given = list(given)
        origins = [(_origin(tensor), str(tensor.dtype), *tensor.shape) for tensor in given]
        if self.path is None or any(origin is None for origin, *_ in origins):
            return fingerprint.tensors(given)
        key = hashlib.sha256(json.dumps(origins).encode()).hexdigest()
        self.asked[key] = self.known.get(key) or self.asked.get(key) or fingerprint.tensors(given)
        return self.asked[key]

    def keep(self) -> None:
        """Write those that were asked for, by the process that holds the folder. A file of another kind stays, and a
        disk that is full has more important things to refuse."""
        if self.path is not None and self.ours and self.asked != self.known:
            with contextlib.suppress(files.NotSaved):
                files.write(self.path, schema.sealed({"format": FORMAT, "hashes": self.asked}, indent=1))
            self.known = dict(self.asked)
