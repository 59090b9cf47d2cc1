"""A dataset by name: found or downloaded, checked and loaded; and what is here, for `espalier data`.

A download takes each file from the first address that has it, and checks it before it gets its name.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import torch

from espalier.data.catalogue import DIGITS, Download, Known, known, names
from espalier.data.dataset import Dataset
from espalier.data.digits import digits
from espalier.data.known_files import (
    VARIABLE,
    Bytes,
    Place,
    candidates,
    data_folders,
    find,
    images_and_labels,
    published,
    read,
    records,
    remedy,
)
from espalier.space import BadInput, Corrupt

State = Literal["embedded", "here", "incomplete", "missing", "verified", "other", "corrupt"]
Folder = str | os.PathLike[str]
Part = tuple[Bytes, Bytes]
Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0: not known)
TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two pieces


def show(file: str, done: int, total: int) -> None:
    """One line on a terminal, rewritten as the file arrives; nothing when the output goes elsewhere."""
    if sys.stderr.isatty():
        share = f"{100 * done // total}% of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
        print(f"\r{file}: {share}", end="\n" if total and done >= total else "", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Status:
    """The state of a set on this machine.

    ``embedded``: in the package. ``here``: every file is there, not looked into. ``incomplete``, ``missing``: some or
    all are not. After :func:`verify` also: ``verified``, the published files byte for byte; ``other``, sound files of
    the right format that hold other data; ``corrupt``. ``detail``: one line for a person.
    """

    name: str
    title: str
    state: State
    folder: Path | None
    detail: str

    @property
    def usable(self) -> bool:
        """Whether :func:`load` needs no download."""
        return self.state in ("embedded", "here", "verified", "other")


def load(
    name: str = DIGITS, data_dir: Folder | None = None, *, download: bool = True, progress: Progress = show
) -> Dataset:
    """A dataset by name. It is looked for under ``data_dir``, ``ESPALIER_DATA`` and the cache, and else downloaded.

    >>> digits = load()
    >>> digits.train_inputs.shape, digits.test_inputs.shape
    (torch.Size([1347, 1, 8, 8]), torch.Size([450, 1, 8, 8]))
    """
    source = known(name)
    if source is None:
        return digits()
    place = find(source, data_dir)
    if place is None or place.lacks(source):
        if not download:
            raise BadInput(missing(source, data_dir, f"`espalier data get {name}` downloads it"))
        fetch(source, data_dir, progress)
        place = find(source, data_dir)
        if place is None or place.lacks(source):
            raise BadInput(missing(source, data_dir, "the download went, and is not there"))
    return _decode(source, place)


def get(name: str, data_dir: Folder | None = None, *, progress: Progress = show) -> Status:
    """Fetch a set: verify it, and download it where it is missing or incomplete."""
    status = verify(name, data_dir)
    if status.state in ("missing", "incomplete"):
        source = known(name)
        assert source is not None
        fetch(source, data_dir, progress)
        status = verify(name, data_dir)
    if status.state == "corrupt":
        raise Corrupt(status.detail)
    return status


def available(data_dir: Folder | None = None) -> tuple[Status, ...]:
    """The state of every set known by name. It looks for files, not into them."""
    return tuple(_status(name, data_dir) for name in names())


def verify(name: str, data_dir: Folder | None = None) -> Status:
    """The state of a set, with every byte checked. A bad file is a state, not an error."""
    status = _status(name, data_dir)
    source = known(name)
    if source is None:
        digits()
        return status
    if status.state != "here":
        return status
    place = find(source, data_dir)
    assert place is not None
    try:
        data = _decode(source, place)
    except Corrupt as error:
        return Status(name, source.title, "corrupt", place.folder, str(error))
    count = f"{len(data.train_labels)} + {len(data.test_labels)} examples in {place.folder}"
    if data.standard:
        return Status(name, source.title, "verified", place.folder, f"{count}, as published")
    return Status(name, source.title, "other", place.folder, f"{count}: sound files, but not the published data")


def _status(name: str, data_dir: Folder | None) -> Status:
    source = known(name)
    if source is None:
        title = "digits: 1,347 + 450 handwritten digits, 8 x 8 grey (scikit-learn's; UCI, CC BY 4.0)"
        return Status(name, title, "embedded", None, "in the package")
    place = find(source, data_dir)
    if place is None:
        return Status(name, source.title, "missing", None, f"`espalier data get {name}` downloads it")
    if lacks := place.lacks(source):
        return Status(name, source.title, "incomplete", place.folder, f"{place.folder} lacks {', '.join(lacks)}")
    return Status(name, source.title, "here", place.folder, f"in {place.archive or place.folder}")


def _decode(source: Known, place: Place) -> Dataset:
    """The dataset in a place that holds the whole set; whatever is wrong with a file is said with its path."""
    data = read(source, place)
    standard = published(source, place, data)
    try:
        train, test = _records(source, place, data) if source.archive else _idx(source, place, data)
    except Corrupt as error:
        raise Corrupt(f"{error}. {remedy(source)}") from None
    channels = (-1, *[1] * (len(source.shape) - 1))
    return Dataset(
        source.name,
        torch.tensor(train[0]),
        torch.tensor(train[1], dtype=torch.int64),
        torch.tensor(test[0]),
        torch.tensor(test[1], dtype=torch.int64),
        source.classes,
        source.scale,
        torch.tensor(source.mean, dtype=torch.float64).reshape(channels),
        torch.tensor(source.std, dtype=torch.float64).reshape(channels),
        standard,
    )


def _idx(source: Known, place: Place, data: dict[str, bytes]) -> tuple[Part, Part]:
    def pair(images: str, labels: str) -> Part:
        return images_and_labels(
            (str(place.files[images]), data[images]),
            (str(place.files[labels]), data[labels]),
            source.shape,
            len(source.classes),
        )

    first, second, third, fourth = (file.name for file in source.files)
    return pair(first, second), pair(third, fourth)


def _records(source: Known, place: Place, data: dict[str, bytes]) -> tuple[Part, Part]:
    sizes = {file.name: len(data[file.name]) for file in source.files}
    *batches, test = sizes
    # A batch has no header that says how long it is: the others tell when it was cut between two images.
    longest = max(sizes[name] for name in batches)
    for file in source.files:
        full = longest if file.name in batches else file.size if longest == file.size else sizes[test]
        if sizes[file.name] != full:
            raise Corrupt(
                f"{_where(place, file.name)}: {sizes[file.name]} bytes where its like have {full}: "
                "the file is cut short, or the files are of two different sets"
            )
    parts = {name: records(data[name], _where(place, name), len(source.classes)) for name in sizes}
    images = np.concatenate([parts[name][0] for name in batches])
    labels = np.concatenate([parts[name][1] for name in batches])
    return (images, labels), parts[test]


def _where(place: Place, name: str) -> str:
    return f"{place.archive} ({name})" if place.archive else str(place.files[name])


# ---- downloading -----------------------------------------------------------------------------------------------------


def fetch(known: Known, data_dir: str | os.PathLike[str] | None = None, progress: Progress = show) -> Path:
    """Download what is missing of a set below the first data folder. Returns the folder it lies in."""
    folder = data_folders(data_dir)[0] / known.folders[0]
    try:
        import pooch
    except ImportError:
        raise BadInput(
            missing(
                known, data_dir, "it is not downloaded because pooch is not installed: pip install 'espalier[data]'"
            )
        ) from None
    with _quiet(pooch.get_logger()):
        for file in known.downloads:
            _download(pooch, known, file, folder, data_dir, progress)
    return folder


def missing(known: Known, data_dir: str | os.PathLike[str] | None, why: str) -> str:
    """The message for a set that is not here: what is missing, where it was looked for, and how to get it."""
    place = find(known, data_dir)
    if place is None:
        lacks = "none of its files is here: " + ", ".join(file.name for file in known.files)
    else:
        lacks = f"{place.folder} lacks {', '.join(place.lacks(known))}"
    looked = " and ".join(str(folder) for folder in data_folders(data_dir))
    # The addresses of a set's files differ in the last part alone: one folder says it all.
    base, _, only = known.downloads[0].urls[0].rpartition("/")
    source = f"{base}/{only}" if len(known.downloads) == 1 else f"the {len(known.downloads)} files of {base}/"
    return (
        f"{known.name}: {lacks}. Looked in {looked}, and there in {', '.join(known.folders[:3])} and the like; {why}. "
        f"Put {source} into {candidates(known, data_dir)[0]}, "
        f"or name the folder that holds the set with data_dir or {VARIABLE}{_pickled(known, data_dir)}"
    )


def _pickled(known: Known, data_dir: str | os.PathLike[str] | None) -> str:
    """Many people have CIFAR-10 in the form that is loaded by pickle; say why it does not count."""
    if known.archive is None:
        return ""
    for folder in candidates(known, data_dir):
        for name in ("cifar-10-batches-py", "cifar-10-python.tar.gz"):
            if (folder / name).exists():
                return (
                    f". {folder / name} is the Python version, which needs pickle and is not read: get the binary one"
                )
    return ""


def _download(
    pooch: Any, known: Known, file: Download, folder: Path, data_dir: str | os.PathLike[str] | None, progress: Progress
) -> None:
    import requests  # pooch needs it, so it is there

    target = folder / file.name
    if target.exists() and not pooch.hashes.hash_matches(target, file.checksum):
        raise BadInput(
            f"{target} is there and is not {known.name}'s as published ({file.checksum}), so the download would "
            "overwrite it; move or delete it first"
        )
    failures: list[str] = []
    altered = False
    most = (1 << 20) + 2 * sum(part.size for part in known.files)  # what does not end is not what was published
    for url in file.urls:
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(file.name, progress, most), chunk_size=1 << 16, timeout=TIMEOUT
        )
        try:
            pooch.retrieve(url, known_hash=file.checksum, fname=file.name, path=folder, downloader=downloader)
            return
        except requests.RequestException as error:
            failures.append(_reason(url, error))
        except ValueError:
            altered = True
            failures.append(f"{url} gives a file with another checksum than {file.checksum}")
        except OSError as error:
            raise BadInput(
                f"{file.name} cannot be written to {folder} ({error.strerror or error}); "
                f"name another folder with data_dir or {VARIABLE}"
            ) from error
    why = f"{file.name} could not be downloaded: {'; '.join(failures)}"
    if altered:
        raise Corrupt(f"{why}. Nothing was kept; try again later, or through another network")
    raise BadInput(missing(known, data_dir, why))


def _reason(url: str, error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"{url} answers {response.status_code}"
    return f"no connection to {urlsplit(url).netloc} ({type(error).__name__})"


class _Bar:
    """What pooch wants of a progress bar, passed on to a function."""

    def __init__(self, file: str, progress: Progress, most: int) -> None:
        self.file, self.progress, self.most = file, progress, most
        self.total = 0  # pooch sets it when the answer has come
        self.done = 0

    def update(self, count: int) -> None:
        self.done += count
        if self.done > self.most:
            raise Corrupt(f"{self.file} has more than {self.most} bytes")
        self.progress(self.file, min(self.done, self.total) if self.total else self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """pooch logs every download to stderr; the progress already says it."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
