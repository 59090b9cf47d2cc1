"""The sets known by name: their published files, where these lie on a machine, and the arrays in them.

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

from espalier.space import BadInput, BadType, Corrupt

Bytes = NDArray[np.uint8]
Folder = str | os.PathLike[str]
Part = tuple[Bytes, Bytes]  # images (n, *shape) and labels (n,)

VARIABLE = "ESPALIER_DATA"
# A header that lies about its size, or a file that unpacks without end, must not fill the memory.
LIMIT = 1 << 30
RECORD = 1 + 3 * 32 * 32  # CIFAR-10: the label, then the red, green and blue planes
IDX = {  # the files of an MNIST-like set, and their lengths
    "train-images-idx3-ubyte": 16 + 784 * 60_000,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 784 * 10_000,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}


# ---- what was published ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """One standard file, unpacked: how long it is and its SHA-256, whatever it was packed in."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Download:
    """One file to fetch: its checksum as pooch writes it, and the addresses to try in turn."""

    name: str
    checksum: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """A set with standard files.

    ``files``: what must be there. ``folders``: where people keep them below a data folder; the first is where a
    download goes. ``archive``: a tar that holds all the files, read in place. ``mean``, ``std``: per channel, of the
    scaled training inputs; 0 and 1 leave them as they are.
    """

    name: str
    title: str
    files: tuple[File, ...]
    folders: tuple[str, ...]
    downloads: tuple[Download, ...]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    archive: str | None = None


def _idx_set(
    name: str,
    title: str,
    folders: tuple[str, ...],
    bases: tuple[str, ...],
    classes: tuple[str, ...],
    plain: tuple[str, ...],
    packed: tuple[str, ...],
) -> Known:
    """An MNIST-like set; ``plain`` and ``packed``: the SHA-256 of each file, and of its gzipped form as published."""
    files = tuple(File(file, size, sha256) for (file, size), sha256 in zip(IDX.items(), plain, strict=True))
    downloads = tuple(
        Download(f"{file}.gz", f"sha256:{sha256}", tuple(f"{base}{file}.gz" for base in bases))
        for file, sha256 in zip(IDX, packed, strict=True)
    )
    # The pixels are divided by 255 and no more, as the paper's inputs are.
    return Known(name, title, files, folders, downloads, (1, 28, 28), classes, 1 / 255, (0.0,), (1.0,))


MNIST = _idx_set(
    "mnist",
    "MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grey (LeCun, Cortes, Burges)",
    ("mnist", "mnist/raw", "MNIST/raw", "MNIST", "raw", "."),
    ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    tuple("0123456789"),
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)

FASHION_MNIST = _idx_set(
    "fashion-mnist",
    "Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28 x 28 grey (Zalando SE, MIT licence)",
    ("fashion-mnist", "fashion-mnist/raw", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist", "fashion", "raw", "."),
    (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

CIFAR10 = Known(
    name="cifar10",
    title="CIFAR-10: 50,000 + 10,000 photographs, 32 x 32 colour (Krizhevsky, 2009)",
    files=tuple(
        File(name, 10_000 * 3073, sha256)
        for name, sha256 in (
            ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        )
    ),
    folders=tuple(
        folder + inner
        for inner in ("", "/cifar-10-batches-bin")
        for folder in ("cifar10", "cifar-10", "CIFAR10", "CIFAR-10", ".")
    ),
    downloads=(
        Download(
            "cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ),
    ),
    shape=(3, 32, 32),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    scale=1 / 255,
    # Of the 50,000 training images; over all pixels of a channel, not the mean of the images' own deviations.
    mean=(0.4913996786151961, 0.4821584083946078, 0.4465309144454657),
    std=(0.2470322324632820, 0.2434851280000556, 0.2615878417279645),
    archive="cifar-10-binary.tar.gz",
)

KNOWN: dict[str, Known] = {known.name: known for known in (MNIST, FASHION_MNIST, CIFAR10)}
DIGITS = "digits"  # embedded: it has no files to look for


def names() -> tuple[str, ...]:
    """Every set that can be loaded by name, the embedded one first.

    >>> names()
    ('digits', 'mnist', 'fashion-mnist', 'cifar10')
    """
    return (DIGITS, *KNOWN)


def known(name: str) -> Known | None:
    """The set of that name; None is the embedded digits."""
    if not isinstance(name, str):
        raise BadType(f"a dataset is named by a string, one of {', '.join(names())}, not by {name!r}")
    if name == DIGITS:
        return None
    if name not in KNOWN:
        raise BadInput(
            f"no dataset is named {name!r}; there are {', '.join(names())}, "
            "and your own arrays with espalier.data.from_arrays"
        )
    return KNOWN[name]


# ---- where they lie --------------------------------------------------------------------------------------------------


def data_folders(data_dir: Folder | None = None) -> tuple[Path, ...]:
    """Data folders in the order they are looked in: the argument, ``ESPALIER_DATA``, the user's cache."""
    folders = list[Path]()
    for origin, value in {"data_dir": data_dir, VARIABLE: os.environ.get(VARIABLE) or None}.items():
        if value is None:
            continue
        if not isinstance(value, (str, os.PathLike)):
            raise BadType(f"{origin} is a path, not {value!r}")
        folders.append(Path(value).expanduser())
        if folders[-1].exists() and not folders[-1].is_dir():
            raise BadInput(f"{origin} is the folder that holds the datasets; {folders[-1]} is a file")
    windows = os.name == "nt"
    cache = os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME")
    cache = cache or ("~/AppData/Local" if windows else "~/.cache")
    return (*folders, Path(cache).expanduser() / "espalier" / "data")


@dataclass(frozen=True)
class Place:
    """A folder and what it holds of a set: ``files`` maps standard names to paths (all to one path: an archive)."""

    known: Known
    folder: Path
    files: dict[str, Path]
    archive: Path | None = None

    @property
    def lacks(self) -> tuple[str, ...]:
        """The standard names that are not here."""
        return tuple(file.name for file in self.known.files if file.name not in self.files)

    def where(self, name: str) -> str:
        """A standard file, for errors."""
        return f"{self.archive} ({name})" if self.archive else str(self.files[name])


def find(known: Known, data_dir: Folder | None = None) -> Place:
    """The first place that holds the whole set; if none does, the one that holds most of it, be it nothing."""
    return max((look(known, folder) for folder in candidates(known, data_dir)), key=lambda place: len(place.files))


def candidates(known: Known, data_dir: Folder | None = None) -> tuple[Path, ...]:
    """Every folder the set may lie in: the layouts people have, below each data folder."""
    return tuple(dict.fromkeys(base / inner for base in data_folders(data_dir) for inner in known.folders))


def look(known: Known, folder: Path) -> Place:
    """What one folder holds of a set. Unpacked files go before packed ones: they load faster."""
    files = dict[str, Path]()
    for name in (file.name for file in known.files):
        dotted = name.replace("-idx", ".idx")  # some unpackers write `train-images.idx3-ubyte`
        paths = (folder / spelling for spelling in (name, dotted, f"{name}.gz", f"{dotted}.gz"))
        if path := next((path for path in paths if path.is_file()), None):
            files[name] = path
    if len(files) < len(known.files) and known.archive is not None and (folder / known.archive).is_file():
        archive = folder / known.archive
        return Place(known, folder, {file.name: archive for file in known.files}, archive)
    return Place(known, folder, files)


# ---- their bytes -----------------------------------------------------------------------------------------------------


def remedy(known: Known) -> str:
    """What to do about a bad file; the end of every message about one."""
    return f"Delete it and get it again: `espalier data get {known.name}`"


def read(place: Place) -> tuple[Part, Part, bool]:
    """The training and the test part in a place that holds the whole set, and whether they are the published data."""
    known = place.known
    data = _members(place, place.archive) if place.archive is not None else _files(place)
    standard = published(place, data)
    try:
        train, test = _records(place, data) if known.archive else _idx(place, data)
    except Corrupt as error:
        raise Corrupt(f"{error}. {remedy(known)}") from None
    return train, test, standard


@contextmanager
def _unpacked(place: Place, path: Path) -> Iterator[None]:
    """What a file cannot be unpacked or read for, said with its path."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise Corrupt(f"{path} does not unpack ({error}). {remedy(place.known)}") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error


def _files(place: Place) -> dict[str, bytes]:
    """Standard file name to unpacked bytes."""
    data = dict[str, bytes]()
    for name, path in place.files.items():
        with _unpacked(place, path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data[name] = _bounded(stream, path)
    return data


def _bounded(stream: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = stream.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise Corrupt(f"{path} unpacks to more than {LIMIT} bytes; no known set has such a file")
    return data


def _members(place: Place, archive: Path) -> dict[str, bytes]:
    """The files of a set out of its tar, in one pass and into memory: nothing it names is written anywhere."""
    members = dict[str, bytes]()
    with _unpacked(place, archive), tarfile.open(archive, "r|*") as tar:
        for member in tar:
            name = member.name.rsplit("/", 1)[-1]
            if name in place.files and member.isfile() and (stream := tar.extractfile(member)) is not None:
                members[name] = _bounded(stream, archive)
    if missing := sorted(place.files.keys() - members):
        raise Corrupt(f"{archive} lacks {', '.join(missing)}: it is cut short. {remedy(place.known)}")
    return members


def published(place: Place, data: dict[str, bytes]) -> bool:
    """Whether every file is the published one, byte for byte.

    A file of another length may be a smaller set in the same format, and is no error here. One as long as the
    published file that differs from it is: the data were altered, or belong to another set.
    """
    known, same = place.known, True
    owners = {file.sha256: one.name for one in KNOWN.values() for file in one.files}
    for file in known.files:
        sha256 = hashlib.sha256(data[file.name]).hexdigest()
        if sha256 == file.sha256:
            continue
        same = False
        path = place.files[file.name]
        if sha256 in owners:
            raise Corrupt(
                f"{path} is {owners[sha256]}'s, not {known.name}'s; keep the sets in folders of their own names"
            )
        if len(data[file.name]) == file.size:
            raise Corrupt(
                f"{path}: {file.name} is as long as {known.name}'s but differs (SHA-256 {sha256[:12]}..., not "
                f"{file.sha256[:12]}...). {remedy(known)}; for data of your own use espalier.data.from_arrays"
            )
    return same


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


def _idx(place: Place, data: dict[str, bytes]) -> tuple[Part, Part]:
    """Training and test part of pairs of IDX files."""

    def pair(images: str, labels: str) -> Part:
        known, where = place.known, {name: str(place.files[name]) for name in (images, labels)}
        pixels, values = idx(data[images], where[images], 3), idx(data[labels], where[labels], 1)
        if pixels.shape[1:] != known.shape[1:]:
            here, usual = (f"{rows} x {columns}" for rows, columns in (pixels.shape[1:], known.shape[1:]))
            raise Corrupt(f"{where[images]}: images of {here}; they are {usual} in this set")
        if len(pixels) != len(values):
            raise Corrupt(f"{where[images]}: {len(pixels)} images, but {len(values)} labels in {where[labels]}")
        _check_labels(values, where[labels], len(known.classes))
        return pixels.reshape(-1, *known.shape), values

    first, second, third, fourth = (file.name for file in place.known.files)
    return pair(first, second), pair(third, fourth)


def _records(place: Place, data: dict[str, bytes]) -> tuple[Part, Part]:
    """Training and test part of CIFAR-10's batches."""
    *batches, _ = (file.name for file in place.known.files)
    # A batch has no header that says how long it is: the others tell when it was cut between two images.
    longest = max(len(data[name]) for name in batches)
    parts = list[Part]()
    for file in place.known.files:
        content, where = data[file.name], place.where(file.name)
        full = longest if file.name in batches else file.size if longest == file.size else len(content)
        if len(content) != full:
            raise Corrupt(
                f"{where}: {len(content)} bytes where its like have {full}: "
                "the file is cut short, or the files are of two different sets"
            )
        if len(content) % RECORD:
            raise Corrupt(
                f"{where}: {len(content)} bytes are not whole records of {RECORD}: {len(content) // RECORD} images and "
                f"{len(content) % RECORD} bytes more; the file is cut short or is something else"
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
        _check_labels(rows[:, 0], where, len(place.known.classes))
        parts.append((rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]))
    images, labels = (np.concatenate(some) for some in zip(*parts[:-1]))
    return (images, labels), parts[-1]


def _check_labels(labels: Bytes, what: str, classes: int) -> None:
    if not len(labels):
        raise Corrupt(f"{what}: holds no examples")
    worst = int(labels.max())
    if worst >= classes:
        first = int(np.argmax(labels >= classes))
        raise Corrupt(f"{what}: example {first} has label {int(labels[first])}; labels are 0 to {classes - 1}")
