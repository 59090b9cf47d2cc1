"""The files of a known set: where they lie, their bytes, whether these are the published ones, and the arrays in them.

Nothing is trusted: every length is checked against what the file says of itself, and what is wrong is said.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from espalier.data.catalogue import KNOWN, Known
from espalier.space import BadInput, BadType, Corrupt

Bytes = NDArray[np.uint8]

VARIABLE = "ESPALIER_DATA"
# A header that lies about its size, or a file that unpacks without end, must not fill the memory.
LIMIT = 1 << 30
RECORD = 1 + 3 * 32 * 32  # CIFAR-10: the label, then the red, green and blue planes


# ---- where they lie --------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The user's cache folder, where downloads go when no other is named."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "espalier" / "data"


def data_folders(data_dir: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Data folders in the order they are looked in: the argument, ``ESPALIER_DATA``, the cache."""
    named: list[tuple[str, str | os.PathLike[str]]] = []
    if data_dir is not None:
        if not isinstance(data_dir, (str, os.PathLike)):
            raise BadType(f"data_dir is a path, not {data_dir!r}")
        named.append(("data_dir", data_dir))
    if os.environ.get(VARIABLE):
        named.append((VARIABLE, os.environ[VARIABLE]))
    folders = []
    for origin, value in named:
        folder = Path(value).expanduser()
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{origin} is the folder that holds the datasets; {folder} is a file")
        folders.append(folder)
    return (*folders, cache_folder())


@dataclass(frozen=True)
class Place:
    """A folder and what it holds of a set: ``files`` maps standard names to paths (all to one path: an archive)."""

    folder: Path
    files: dict[str, Path]
    archive: Path | None = None

    def lacks(self, known: Known) -> tuple[str, ...]:
        """The standard names that are not here."""
        return tuple(file.name for file in known.files if file.name not in self.files)


def find(known: Known, data_dir: str | os.PathLike[str] | None = None) -> Place | None:
    """The first place that holds the whole set; if none does, the one that holds most of it; None: nothing at all."""
    best: Place | None = None
    for folder in candidates(known, data_dir):
        place = look(known, folder)
        if not place.lacks(known):
            return place
        if place.files and (best is None or len(place.files) > len(best.files)):
            best = place
    return best


def candidates(known: Known, data_dir: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Every folder the set may lie in: the layouts people have, below each data folder."""
    return tuple(dict.fromkeys(base / inner for base in data_folders(data_dir) for inner in known.folders))


def look(known: Known, folder: Path) -> Place:
    """What one folder holds of a set. Unpacked files go before packed ones: they load faster."""
    files = {}
    for file in known.files:
        for name in _spellings(file.name):
            if (folder / name).is_file():
                files[file.name] = folder / name
                break
    if len(files) < len(known.files) and known.archive is not None and (folder / known.archive).is_file():
        archive = folder / known.archive
        return Place(folder, {file.name: archive for file in known.files}, archive)
    return Place(folder, files)


def _spellings(name: str) -> tuple[str, ...]:
    """The names a file goes by: some unpackers write `train-images.idx3-ubyte`."""
    dotted = name.replace("-idx", ".idx")
    return tuple(dict.fromkeys((name, dotted, f"{name}.gz", f"{dotted}.gz")))


# ---- their bytes -----------------------------------------------------------------------------------------------------


def remedy(known: Known) -> str:
    """What to do about a bad file; the end of every message about one."""
    return f"Delete it and get it again: `espalier data get {known.name}`"


def read(known: Known, place: Place) -> dict[str, bytes]:
    """Standard file name to unpacked bytes, for a place that holds the whole set."""
    if place.archive is not None:
        return _members(known, place.archive)
    return {file.name: _file(known, place.files[file.name]) for file in known.files}


@contextmanager
def _unpacked(known: Known, path: Path) -> Iterator[None]:
    """What a file cannot be unpacked or read for, said with its path."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise Corrupt(f"{path} does not unpack ({error}). {remedy(known)}") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error


def _file(known: Known, path: Path) -> bytes:
    with _unpacked(known, path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        return _bounded(stream, path)


def _bounded(stream: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = stream.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise Corrupt(f"{path} unpacks to more than {LIMIT} bytes; no known set has such a file")
    return data


def _members(known: Known, archive: Path) -> dict[str, bytes]:
    """The files of a set out of its tar, in one pass and into memory: nothing it names is written anywhere."""
    wanted = {file.name for file in known.files}
    members: dict[str, bytes] = {}
    with _unpacked(known, archive), tarfile.open(archive, "r|*") as tar:
        for member in tar:
            name = member.name.rsplit("/", 1)[-1]
            if name in wanted and member.isfile() and (stream := tar.extractfile(member)) is not None:
                members[name] = _bounded(stream, archive)
    if missing := sorted(wanted - set(members)):
        raise Corrupt(f"{archive} lacks {', '.join(missing)}: it is cut short. {remedy(known)}")
    return members


def published(known: Known, place: Place, data: dict[str, bytes]) -> bool:
    """Whether every file is the published one, byte for byte.

    A file of another length may be a smaller set in the same format, and is no error here. One as long as the
    published file that differs from it is: the data were altered, or belong to another set.
    """
    same = True
    for file in known.files:
        sha256 = hashlib.sha256(data[file.name]).hexdigest()
        if sha256 == file.sha256:
            continue
        same = False
        path = place.files[file.name]
        if other := _owner(sha256):
            raise Corrupt(f"{path} is {other}'s, not {known.name}'s; keep the sets in folders of their own names")
        if len(data[file.name]) == file.size:
            raise Corrupt(
                f"{path}: {file.name} is as long as {known.name}'s but differs (SHA-256 {sha256[:12]}..., not "
                f"{file.sha256[:12]}...). {remedy(known)}; for data of your own use espalier.data.from_arrays"
            )
    return same


def _owner(sha256: str) -> str | None:
    """The known set a file belongs to."""
    return next((known.name for known in KNOWN.values() for file in known.files if file.sha256 == sha256), None)


# ---- the arrays in them: IDX, as MNIST and its like have, and the binary records of CIFAR-10 -------------------------


def idx(data: bytes, what: str, dims: int) -> Bytes:
    """The array in an IDX file of unsigned bytes with ``dims`` dimensions; ``what`` names the file in errors.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels", 1).tolist()
    [7, 9]
    """
    head = 4 + 4 * dims
    if len(data) < head:
        raise Corrupt(f"{what}: {len(data)} bytes are too few for an IDX header of {head}: the file is cut short")
    if data[:4] != bytes([0, 0, 8, dims]):
        expected = bytes([0, 0, 8, dims]).hex()
        raise Corrupt(
            f"{what}: starts with {data[:4].hex()}, an IDX file of bytes in {dims} dimensions with {expected}"
        )
    shape = struct.unpack(f">{dims}I", data[4:head])
    count = math.prod(shape)
    if len(data) - head != count:
        verdict = "the file is cut short" if len(data) - head < count else "something follows its end"
        raise Corrupt(f"{what}: holds {len(data) - head} bytes where its header {shape} asks for {count}: {verdict}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def images_and_labels(
    images: tuple[str, bytes], labels: tuple[str, bytes], shape: tuple[int, int, int], classes: int
) -> tuple[Bytes, Bytes]:
    """An IDX pair, each given as (name for errors, bytes): images ``(n, *shape)`` and their labels ``(n,)``."""
    pixels = idx(images[1], images[0], 3)
    values = idx(labels[1], labels[0], 1)
    if pixels.shape[1:] != shape[1:]:
        rows, columns = pixels.shape[1:]
        raise Corrupt(f"{images[0]}: images of {rows} x {columns}; they are {shape[1]} x {shape[2]} in this set")
    if len(pixels) != len(values):
        raise Corrupt(f"{images[0]}: {len(pixels)} images, but {len(values)} labels in {labels[0]}")
    _check_labels(values, labels[0], classes)
    return pixels.reshape(-1, *shape), values


def records(data: bytes, what: str, classes: int) -> tuple[Bytes, Bytes]:
    """A CIFAR-10 batch: images ``(n, 3, 32, 32)`` and labels ``(n,)``."""
    if len(data) % RECORD:
        raise Corrupt(
            f"{what}: {len(data)} bytes are not whole records of {RECORD}: {len(data) // RECORD} images and "
            f"{len(data) % RECORD} bytes more; the file is cut short or is something else"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    _check_labels(rows[:, 0], what, classes)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _check_labels(labels: Bytes, what: str, classes: int) -> None:
    if not len(labels):
        raise Corrupt(f"{what}: holds no examples")
    worst = int(labels.max())
    if worst >= classes:
        first = int(np.argmax(labels >= classes))
        raise Corrupt(f"{what}: example {first} has label {int(labels[first])}; labels are 0 to {classes - 1}")
