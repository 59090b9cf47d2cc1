"""The bytes of a set's files, unpacked, and whether they are the published ones."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import IO

from espalier.data.catalogue import KNOWN, Known
from espalier.data.places import Place
from espalier.space import BadInput, Corrupt

# A header that lies about its size, or a file that unpacks without end, must not fill the memory.
LIMIT = 1 << 30
CHUNK = 1 << 20


def remedy(known: Known) -> str:
    """What to do about a bad file; the end of every message about one."""
    return f"Delete it and get it again: `espalier data get {known.name}`"


def read(known: Known, place: Place) -> dict[str, bytes]:
    """Standard file name to unpacked bytes, for a place that holds the whole set."""
    if place.archive is not None:
        return _members(known, place.archive)
    return {file.name: _file(known, place.files[file.name]) for file in known.files}


def _file(known: Known, path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _bounded(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupt(f"{path} does not unpack ({error}). {remedy(known)}") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error


def _bounded(stream: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = bytearray()
    while chunk := stream.read(CHUNK):
        data += chunk
        if len(data) > LIMIT:
            raise Corrupt(f"{path} unpacks to more than {LIMIT} bytes; no known set has such a file")
    return bytes(data)


def _members(known: Known, archive: Path) -> dict[str, bytes]:
    """The files of a set out of its tar, in one pass and into memory: nothing it names is written anywhere."""
    wanted = {file.name for file in known.files}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                if name in wanted and member.isfile():
                    stream = tar.extractfile(member)
                    if stream is not None:
                        found[name] = _bounded(stream, archive)
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise Corrupt(f"{archive} does not unpack ({error}). {remedy(known)}") from error
    except OSError as error:
        raise BadInput(f"{archive} cannot be read ({error.strerror or error}); check its permissions") from error
    if missing := sorted(wanted - set(found)):
        raise Corrupt(f"{archive} lacks {', '.join(missing)}: it is cut short. {remedy(known)}")
    return found


def published(known: Known, place: Place, data: dict[str, bytes]) -> bool:
    """Whether every file is the published one, byte for byte.

    A file of another length may be a smaller set in the same format, and is no error here. One as long as the
    published file that differs from it is: the data were altered, or belong to another set.
    """
    same = True
    for file in known.files:
        found = hashlib.sha256(data[file.name]).hexdigest()
        if found == file.sha256:
            continue
        same = False
        path = place.files[file.name]
        if other := _owner(found):
            raise Corrupt(f"{path} is {other}'s, not {known.name}'s; keep the sets in folders of their own names")
        if len(data[file.name]) == file.size:
            raise Corrupt(
                f"{path}: {file.name} is as long as {known.name}'s but differs (SHA-256 {found[:12]}..., not "
                f"{file.sha256[:12]}...). {remedy(known)}; for data of your own use espalier.data.from_arrays"
            )
    return same


def _owner(sha256: str) -> str | None:
    """The known set a file belongs to."""
    return next((known.name for known in KNOWN.values() for file in known.files if file.sha256 == sha256), None)
