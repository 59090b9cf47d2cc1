"""Downloading a known set: each file from the first address that has it, checked before it gets its name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from espalier.data.catalogue import Download, Known
from espalier.data.places import VARIABLE, candidates, data_folders, find
from espalier.space import BadInput, Corrupt

Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0: not known)
TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two pieces


def show(file: str, done: int, total: int) -> None:
    """One line on a terminal, rewritten as the file arrives; nothing when the output goes elsewhere."""
    if sys.stderr.isatty():
        share = f"{100 * done // total}% of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
        print(f"\r{file}: {share}", end="\n" if total and done >= total else "", file=sys.stderr, flush=True)


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
    for url in file.urls:
        downloader = pooch.HTTPDownloader(progressbar=_Bar(file.name, progress), chunk_size=1 << 16, timeout=TIMEOUT)
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

    def __init__(self, file: str, progress: Progress) -> None:
        self.file, self.progress = file, progress
        self.total = 0  # pooch sets it when the answer has come
        self.done = 0

    def update(self, count: int) -> None:
        self.done += count
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
