"""The data of a run: a set known by name, arrays in an ``.npz`` file, or what a function of the user's gives."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.data import Dataset, load, names
from espalier.data.dataset import CLASSES, from_arrays
from espalier.ship import import_spec
from espalier.space import BadInput, EspalierError
from espalier.train import feed, fingerprint
from espalier.train.setting import near

PART = tuple[Any, Any]  # inputs, targets
WORDS = {  # of an .npz file: the arrays of its parts, by the names in use
    "train": (("train_inputs", "train_targets"), ("x_train", "y_train"), ("inputs", "targets"), ("x", "y")),
    "test": (("test_inputs", "test_targets"), ("x_test", "y_test")),
}
LARGE, PACKED = 1 << 30, 50  # bytes that any file may unpack to; times its size, that a larger one may
SPLIT = 0  # the seed of what is held out: runs of different seeds are compared on the same examples


@dataclass(frozen=True, eq=False)
class Source:
    """train: what is trained on, as :func:`espalier.fit` reads it. validation: what a run is judged by while it trains,
    or None; judged_on: that in words. test: what was not touched, where something else is the validation.
    factor: what the inputs of a file were multiplied by."""

    train: Any
    validation: Any
    judged_on: str
    test: Any = None
    factor: float = 1.0

    @property
    def dataset(self) -> Dataset | None:
        """What the data were given as, if it is one. Without a validation its tensors alone are trained on."""
        return next((part for part in (self.train, self.test) if isinstance(part, Dataset)), None)

    @property
    def prepared(self) -> str:
        """What is done to inputs as they are stored before the network reads them."""
        if self.dataset is not None:
            return self.dataset.prepared
        return "as they are" if self.factor == 1 else f"the stored numbers times {self.factor:.9g}"

    @property
    def pair(self) -> PART | None:
        """Inputs and targets of training where they are two tensors; as they are stored."""
        part = self.train.train if isinstance(self.train, Dataset) else self.train
        return part if _is_pair(part) and isinstance(part[0], Tensor) else None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one input, for networks known by name."""
        return None if self.pair is None else tuple(self.pair[0].shape[1:])

    @property
    def outputs(self) -> int | None:
        """How many numbers a network gives: the classes, or as many as the targets have."""
        if self.dataset is not None:
            return len(self.dataset.classes)
        if self.pair is None:
            return None
        targets = self.pair[1]
        if targets.is_floating_point():
            return int(targets.shape[1]) if targets.ndim == 2 else None
        if targets.ndim == 1 and int(targets.max()) >= CLASSES:
            raise BadInput(f"there is a class {int(targets.max())}: classes count from 0, and {CLASSES} are the most")
        return int(targets.max()) + 1 if targets.ndim == 1 else None


def read(
    given: str,
    *,
    data_dir: Path | None = None,
    validation: str = "",
    flatten: bool = False,
    scale: float | None = None,
) -> Source:
    """given: a name, a file, or a reference. validation: "" (the test part, or else a tenth), "test", "none", or a
    share of the training part. flatten: every input a vector. scale: what uint8 inputs of a file are multiplied by."""
    factor, arrays = 1.0, given.endswith(".npz") and not import_spec.is_reference(Path(given).name)
    before = _stamp(given) if arrays else None
    if scale is not None and not arrays:
        raise BadInput(f"--scale {scale:g} is for the inputs of a file.npz; {given} is read by a scale of its own")
    if scale is not None and not 0 < abs(scale) < math.inf:
        raise BadInput(f"--scale is a finite number other than 0, not {scale:g}")
    if given in names():
        train: Any = load(given, data_dir)
        test: Any = train
    elif arrays:
        train, test, factor = _arrays(Path(given), scale)
    elif import_spec.is_reference(given):
        train, test = _parts(import_spec.call(import_spec.function(given, "--data"), {}, given, "--data"), given)
    else:
        raise BadInput(
            f"there are no data {given!r}; known are {', '.join(names())}; your own are a file.npz of arrays, or "
            f"package.module:function or file.py:function{near(given, names())}"
        )
    if flatten:
        train, test = (_flat(part, given) for part in (train, test))
    source = replace(_judged(train, test, validation), factor=factor)
    if before is not None and _stamp(given) == before:  # nobody wrote to it while it was read
        for name, part in (("train", source.train), ("validation", source.validation)):
            for number, tensor in enumerate(part or ()):
                how = [validation, flatten, scale, name, number, fingerprint.versions()]
                fingerprint.mark(tensor, json.dumps([before, *how]))
    return source


def _stamp(given: str) -> str | None:
    try:
        return fingerprint.stamp(Path(given))
    except (OSError, ValueError):
        return None


def _judged(train: Any, test: Any, validation: str) -> Source:
    """What the run is judged by, as it was asked for."""
    splits = isinstance(train, Dataset) or _is_pair(train)
    if not validation:
        validation = "test" if test is not None else "0.1" if splits else "none"
    if validation == "none":  # of a Dataset, fit would take the test part
        return Source(train.as_floats().train if isinstance(train, Dataset) else train, None, "nothing", test)
    if validation == "test":
        if test is None:
            raise BadInput("--validation test: these data have no test part; give a share to hold out, such as 0.1")
        labels = test.test_labels if isinstance(test, Dataset) else test[1] if _is_pair(test) else None
        return Source(train, test, "the test part" + ("" if labels is None else f", {len(labels)} examples"))
    try:
        share = float(validation)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise BadInput(f"--validation is test, none, or a share in (0, 1) such as 0.1, not {validation!r}")
    if not splits:
        raise BadInput("--validation: only tensors can be held out of; let the function give training and test data")
    examples = len(train.train_labels) if isinstance(train, Dataset) else len(train[1])
    count = round(share * examples)
    if not 0 < count < examples:
        raise BadInput(f"--validation {validation}: that is {count} of {examples} examples; hold out some, not all")
    kept, out = feed.split_off(train, share, SPLIT)
    return Source(kept, out, f"{count} examples held out of the training part", test)


def _arrays(path: Path, scale: float | None) -> tuple[PART, PART | None, float]:
    """Training and test arrays of a file as tensors, and what its inputs were multiplied by."""
    try:
        if path.exists() and not zipfile.is_zipfile(path):  # numpy would advise to load it as a pickle
            raise BadInput(f"{path} is not an .npz file of arrays, such as numpy.savez writes")
        if path.exists():
            _check_size(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except EspalierError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, SyntaxError, OverflowError) as error:
        raise BadInput(f"{path} cannot be read as arrays: {error}") from None
    parts = {
        part: next(((arrays[a], arrays[b]) for a, b in words if a in arrays and b in arrays), None)
        for part, words in WORDS.items()
    }
    if parts["train"] is None:
        raise BadInput(
            f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; it should hold x and y, or x_train, y_train and "
            "x_test, y_test (also inputs and targets, train_inputs, ..)"
        )
    pixels = parts["train"][0].dtype == np.uint8
    factor = scale if scale is not None else 1 / 255 if pixels else None
    train, test = (None if p is None else (_inputs(p[0], path, factor), _targets(p[1], path)) for p in parts.values())
    assert train is not None
    for name, part in (("training", train), ("test", test)):
        if part is not None and len(part[0]) != len(part[1]):
            raise BadInput(f"{path}: {len(part[0])} {name} inputs, but {len(part[1])} targets")
        if part is not None and not len(part[0]):
            raise BadInput(f"{path}: there are no {name} examples in it")
    return train, test, 1.0 if factor is None else factor


def _check_size(path: Path) -> None:
    """What a packed file holds is bounded before any of it is unpacked."""
    with zipfile.ZipFile(path) as file:
        size = sum(part.file_size for part in file.infolist())
    if size > LARGE and size > PACKED * path.stat().st_size:
        raise BadInput(f"{path} unpacks to {size} bytes, more than {PACKED} times its size; write it by numpy.savez")


def _inputs(array: Any, path: Path, scale: float | None) -> Tensor:
    inputs = _tensor(array, path, "inputs", "numbers, examples first")
    return inputs if scale is None else inputs.float() * np.float32(scale).item()


def _targets(array: Any, path: Path) -> Tensor:
    targets = _tensor(array, path, "targets", "classes or numbers")
    column = not targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] == 1
    return targets[:, 0] if column else targets


def _tensor(array: Any, path: Path, what: str, are: str) -> Tensor:
    """Whole numbers as int64, others as float32."""
    whole = array.dtype.kind in "iu"
    if not whole and (array.dtype.kind != "f" or not array.ndim):
        raise BadInput(f"{path}: {what} are {are}, not {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise BadInput(f"{path}: some {what} are not finite; fill or drop such examples first")
    return torch.from_numpy(array.astype(np.int64 if whole else np.float32))


def _parts(given: Any, reference: str) -> tuple[Any, Any]:
    """What a function gave: a Dataset; data as fit reads them; two such, for training and test; or these in a dict."""
    if isinstance(given, Dataset):
        return given, given
    if isinstance(given, Mapping):
        if not {"train"} <= set(given) <= {"train", "test"}:
            raise BadInput(f"--data {reference!r} gives a dict of {sorted(map(str, given))}; it holds train and test")
        return _part(given["train"]), _part(given["test"]) if "test" in given else None
    parts = [_part(given), None]
    if isinstance(given, (tuple, list)) and len(given) == 2 and not _is_pair(parts[0]):
        parts = [_part(given[0]), _part(given[1])]
    for part in parts:
        if part is not None and not _readable(part):
            raise BadInput(
                f"--data {reference!r} gives a {type(given).__name__} {_shown(given)}; it should give (inputs, "
                "targets) as tensors or arrays, a DataLoader or a Dataset, or two of them, for training and test"
            )
    return parts[0], parts[1]


def _readable(part: Any) -> bool:
    """Whether fit can read it: tensors, a Dataset, or something to go through that gives pairs."""
    if isinstance(part, Dataset) or _is_pair(part):
        return True
    if isinstance(part, (list, tuple)):
        pairs = bool(part) and all(isinstance(one, (tuple, list)) and len(one) == 2 for one in part)
        return pairs and any(isinstance(one, Tensor) for one in part[0])
    return not isinstance(part, (Tensor, str, dict)) and (hasattr(part, "__iter__") or hasattr(part, "__getitem__"))


def _shown(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"of shape {tuple(given.shape)}"
    return f"of {', '.join(type(one).__name__ for one in given[:4])}" if isinstance(given, (list, tuple)) else ""


def _part(given: Any) -> Any:
    """Tensors for arrays, and a tuple for a list of inputs and targets."""
    value = feed.as_tensors(given)
    pair = isinstance(value, list) and len(value) == 2 and isinstance(value[1], Tensor)
    return tuple(value) if pair else value


def _is_pair(part: Any) -> bool:
    """One part: inputs and targets, the targets a tensor."""
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], Tensor)


def _flat(part: Any, given: str) -> Any:
    if part is None:
        return None
    if isinstance(part, Dataset):
        return part.flatten()
    if _is_pair(part) and isinstance(part[0], Tensor):
        return part[0].flatten(1), part[1]
    raise BadInput(f"--flatten is for data in tensors; let {given} give vectors")


def as_dataset(given: str, **about: Any) -> Dataset:
    """Data of one's own as a study of classes reads them: a training and a test part, or a tenth held out. Its name is
    part of the names of folders."""
    source = read(given, **about)
    if isinstance(source.train, Dataset):
        return replace(source.train, name=name_of(source.train.name))
    pair, test = source.pair, source.validation
    if pair is None or pair[1].is_floating_point() or test is None:
        raise BadInput(f"--data {given}: a study reads inputs and integer classes, in one tensor each")
    return from_arrays(pair, test, name=name_of(given))


def name_of(given: str) -> str:
    """What data are called in the names of folders.

    >>> name_of("mnist"), name_of("data/my arrays.npz"), name_of("net.py:parts")
    ('mnist', 'my_arrays', 'net-parts')
    """
    if given in names():
        return given
    where, _, function = given.partition(":")
    stem = Path(where).name.removesuffix(".npz").removesuffix(".py")
    words = f"{stem}-{function}" if function else stem
    return "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in words)
