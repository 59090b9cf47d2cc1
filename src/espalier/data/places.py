"""Where a set's files lie: the folders looked in, in order, and which of the files each of them holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from espalier.data.catalogue import Known
from espalier.space import BadInput, BadType

VARIABLE = "ESPALIER_DATA"


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
