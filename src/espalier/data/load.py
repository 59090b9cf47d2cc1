"""A dataset by name: embedded, found or downloaded, checked and loaded; and what is here, for `espalier data`.

The embedded set are scikit-learn's digits, the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of
Handwritten Digits" (UCI, CC BY 4.0). ``digits.npz`` holds `load_digits().images` and `.target` as unsigned bytes,
compressed. A download takes each file from the first address that has it, and checks it before it gets its name.
"""

from __future__ import annotations

import io
import logging
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import torch

from espalier.data import known_files
from espalier.data.dataset import Dataset, from_arrays, held_out
from espalier.data.known_files import (
    DIGITS,
    VARIABLE,
    Download,
    Folder,
    Known,
    Place,
    candidates,
    data_folders,
    find,
    known,
    names,
)
from espalier.space import BadInput, Corrupt

State = Literal["embedded", "here", "incomplete", "missing", "verified", "other", "corrupt"]
Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0: not known)
TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two pieces
COUNT, LEVELS = 1797, 16  # of the digits: images; the darkest pixel
TEST, SPLIT_SEED = 450, 0  # a quarter of them is held out, by class, always the same quarter


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
    if find(source, data_dir).lacks:
        if not download:
            raise BadInput(missing(source, data_dir, f"`espalier data get {name}` downloads it"))
        fetch(source, data_dir, progress)
    place = find(source, data_dir)
    if place.lacks:
        raise BadInput(missing(source, data_dir, "the download went, and is not there"))
    return _decoded(place)


def get(name: str, data_dir: Folder | None = None, *, progress: Progress = show) -> Status:
    """Fetch a set: verify it, and download it where it is missing or incomplete."""
    status, source = verify(name, data_dir), known(name)
    if source is not None and not status.usable and status.state != "corrupt":
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
    status, source = _status(name, data_dir), known(name)
    if source is None:
        digits()
    if source is None or status.state != "here":
        return status
    try:
        data = _decoded(find(source, data_dir))
    except Corrupt as error:
        return replace(status, state="corrupt", detail=str(error))
    count = f"{len(data.train_labels)} + {len(data.test_labels)} examples in {status.folder}"
    if data.standard:
        return replace(status, state="verified", detail=f"{count}, as published")
    return replace(status, state="other", detail=f"{count}: sound files, but not the published data")


def _status(name: str, data_dir: Folder | None) -> Status:
    source = known(name)
    if source is None:
        title = "digits: 1,347 + 450 handwritten digits, 8 x 8 grey (scikit-learn's; UCI, CC BY 4.0)"
        return Status(name, title, "embedded", None, "in the package")
    place = find(source, data_dir)
    if not place.files:
        return Status(name, source.title, "missing", None, f"`espalier data get {name}` downloads it")
    if place.lacks:
        detail = f"{place.folder} lacks {', '.join(place.lacks)}"
        return Status(name, source.title, "incomplete", place.folder, detail)
    return Status(name, source.title, "here", place.folder, f"in {place.archive or place.folder}")


def _decoded(place: Place) -> Dataset:
    """The dataset in a place that holds the whole set; whatever is wrong with a file is said with its path."""
    source, (train, test, standard) = place.known, known_files.read(place)
    data = from_arrays(train, test, name=source.name, classes=source.classes, scale=source.scale)
    mean, std = (torch.tensor(one, dtype=torch.float64).reshape(-1, 1, 1) for one in (source.mean, source.std))
    return replace(data, mean=mean, std=std, standard=standard)


# ---- the embedded set ------------------------------------------------------------------------------------------------


@cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images ``(1797, 1, 8, 8)`` and labels ``(1797,)``, uint8."""
    source = files("espalier.data") / "digits.npz"
    try:
        with np.load(io.BytesIO(source.read_bytes()), allow_pickle=False) as stored:
            images, labels = stored["images"], stored["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Corrupt(f"{source} cannot be read ({error}); install espalier again") from error
    if images.shape != (COUNT, 8, 8) or labels.shape != (COUNT,) or images.max() != LEVELS or labels.max() != 9:
        raise Corrupt(f"{source} does not hold the {COUNT} digits; install espalier again")
    return images[:, None], labels


def digits() -> Dataset:
    """1,347 training and 450 test images ``(1, 8, 8)``, pixels from 0 to 16, read as 0 to 1."""
    images, labels = _arrays()
    parts = [(images[some], labels[some]) for some in held_out(labels, TEST, SPLIT_SEED)]
    return replace(from_arrays(*parts, name=DIGITS, classes=tuple("0123456789"), scale=1 / LEVELS), standard=True)


def all_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All 1,797 images ``(1797, 1, 8, 8)`` uint8 in their stored order, and labels ``(1797,)`` int64: for folds."""
    images, labels = _arrays()
    return torch.tensor(images), torch.tensor(labels, dtype=torch.int64)


# ---- downloading -----------------------------------------------------------------------------------------------------


def fetch(known: Known, data_dir: Folder | None = None, progress: Progress = show) -> Path:
    """Download what is missing of a set below the first data folder. Returns the folder it lies in."""
    folder = data_folders(data_dir)[0] / known.folders[0]
    try:
        import pooch
    except ImportError:
        why = "it is not downloaded because pooch is not installed: pip install 'espalier[data]'"
        raise BadInput(missing(known, data_dir, why)) from None
    with _quiet(pooch.get_logger()):
        for file in known.downloads:
            _download(pooch, known, file, folder, data_dir, progress)
    return folder


def missing(known: Known, data_dir: Folder | None, why: str) -> str:
    """The message for a set that is not here: what is missing, where it was looked for, and how to get it."""
    place = find(known, data_dir)
    lacks = f"{place.folder} lacks" if place.files else "none of its files is here:"
    lacks += f" {', '.join(place.lacks)}"
    looked = " and ".join(str(folder) for folder in data_folders(data_dir))
    # The addresses of a set's files differ in the last part alone: one folder says it all.
    base, _, only = known.downloads[0].urls[0].rpartition("/")
    source = f"{base}/{only}" if len(known.downloads) == 1 else f"the {len(known.downloads)} files of {base}/"
    return (
        f"{known.name}: {lacks}. Looked in {looked}, and there in {', '.join(known.folders[:3])} and the like; {why}. "
        f"Put {source} into {candidates(known, data_dir)[0]}, "
        f"or name the folder that holds the set with data_dir or {VARIABLE}{_pickled(known, data_dir)}"
    )


def _pickled(known: Known, data_dir: Folder | None) -> str:
    """Many people have CIFAR-10 in the form that is loaded by pickle; say why it does not count."""
    others = ("cifar-10-batches-py", "cifar-10-python.tar.gz") if known.archive else ()
    for path in (folder / name for folder in candidates(known, data_dir) for name in others):
        if path.exists():
            return f". {path} is the Python version, which needs pickle and is not read: get the binary one"
    return ""


def _download(
    pooch: Any, known: Known, file: Download, folder: Path, data_dir: Folder | None, progress: Progress
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
            answer = getattr(error, "response", None)
            lost = f"no connection to {urlsplit(url).netloc} ({type(error).__name__})"
            failures.append(lost if answer is None else f"{url} answers {answer.status_code}")
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
