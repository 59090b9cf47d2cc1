"""A dataset by name: found or downloaded, checked and loaded; and what is here, for `espalier data`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from espalier.data.catalogue import DIGITS, Known, known, names
from espalier.data.contents import published, read, remedy
from espalier.data.dataset import Dataset
from espalier.data.digits import digits
from espalier.data.fetch import Progress, fetch, missing, show
from espalier.data.formats import Bytes, images_and_labels, records
from espalier.data.places import Place, find
from espalier.space import BadInput, Corrupt

State = Literal["embedded", "here", "incomplete", "missing", "verified", "other", "corrupt"]
Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Status:
    """How a set stands on this machine.

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
        """Whether :func:`load` would get by without a download."""
        return self.state in ("embedded", "here", "verified", "other")


def load(
    name: str = DIGITS, data_dir: Folder | None = None, *, download: bool = True, progress: Progress = show
) -> Dataset:
    """A dataset by name: looked for under ``data_dir``, ``ESPALIER_DATA`` and the cache, else downloaded.

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
    """Have a set on this machine, sound: verify it, and download it where it is missing or incomplete."""
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
    """How every set known by name stands here; looks for files, not into them."""
    return tuple(_status(name, data_dir) for name in names())


def verify(name: str, data_dir: Folder | None = None) -> Status:
    """How a set stands here, every byte checked. A bad file is a state, not an error."""
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


Part = tuple[Bytes, Bytes]


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
    whole = max(sizes[name] for name in batches)
    for file in source.files:
        full = whole if file.name in batches else file.size if whole == file.size else sizes[test]
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
