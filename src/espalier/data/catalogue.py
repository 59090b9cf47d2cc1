"""The sets known by name: their standard files, checksums, folders and addresses, and what is in them."""

from __future__ import annotations

from dataclasses import dataclass

from espalier.space import BadInput, BadType


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
    checksums: dict[str, tuple[str, str]],
) -> Known:
    """An MNIST-like set; ``checksums``: file name to the SHA-256 of the file and of its gzipped form as published."""
    count = {"train": 60_000, "t10k": 10_000}
    files = tuple(
        File(file, 16 + 784 * count[file.split("-")[0]] if "images" in file else 8 + count[file.split("-")[0]], plain)
        for file, (plain, _) in checksums.items()
    )
    downloads = tuple(
        Download(f"{file}.gz", f"sha256:{packed}", tuple(f"{base}{file}.gz" for base in bases))
        for file, (_, packed) in checksums.items()
    )
    # The pixels are divided by 255 and no more, as the paper's inputs are.
    return Known(name, title, files, folders, downloads, (1, 28, 28), classes, 1 / 255, (0.0,), (1.0,))


MNIST = _idx_set(
    "mnist",
    "MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grey (LeCun, Cortes, Burges)",
    ("mnist", "mnist/raw", "MNIST/raw", "MNIST", "raw", "."),
    ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    tuple("0123456789"),
    {
        "train-images-idx3-ubyte": (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        "train-labels-idx1-ubyte": (
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        "t10k-images-idx3-ubyte": (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        "t10k-labels-idx1-ubyte": (
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    },
)

FASHION_MNIST = _idx_set(
    "fashion-mnist",
    "Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28 x 28 grey (Zalando SE, MIT licence)",
    (
        "fashion-mnist",
        "fashion-mnist/raw",
        "FashionMNIST/raw",
        "FashionMNIST",
        "fashion_mnist",
        "fashion",
        "raw",
        ".",
    ),
    (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    {
        "train-images-idx3-ubyte": (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        "train-labels-idx1-ubyte": (
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        "t10k-images-idx3-ubyte": (
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        "t10k-labels-idx1-ubyte": (
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    },
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
