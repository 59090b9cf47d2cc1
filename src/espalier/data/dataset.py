"""A dataset: training and test inputs as they are stored, their labels, how to turn inputs into floats; fixed splits.

A split, a held-out part or stratified folds, is by seed: the same on every machine and in every version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from espalier.data.batches import check_integer, standardise
from espalier.space import BadInput, BadType, first_line

Index = NDArray[np.int64]
CLASSES = 1 << 20  # the most: a network gives a score for each


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs ``(n, *shape)``, uint8 or floating; labels ``(n,)``, int64, from 0 to ``len(classes) - 1``.

    A network reads ``(input * scale - mean) / std``; ``mean`` and ``std`` are float64 and broadcast over one input.
    ``standard``: the published files, byte for byte (a report may then be called a result on that set).

    >>> data = from_arrays(([[0.0, 2.0], [4.0, 6.0]], [0, 1]), ([[2.0, 4.0]], [1]))
    >>> data.shape, len(data.classes), data.as_floats().train[0].tolist()
    ((2,), 2, [[0.0, 2.0], [4.0, 6.0]])
    >>> data
    Dataset('arrays', 2 + 1 of shape (2,), 2 classes)
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    scale: float
    mean: Tensor
    std: Tensor
    standard: bool = False

    def __repr__(self) -> str:
        parts = f"{len(self.train_labels):,} + {len(self.test_labels):,} of shape {tuple(self.shape)}"
        return f"Dataset({self.name!r}, {parts}, {len(self.classes)} classes)"

    def __post_init__(self) -> None:
        for part, (inputs, labels) in (("training", self.train), ("test", self.test)):
            _check_form(part, inputs, labels)
        if self.train_inputs.shape[1:] != self.test_inputs.shape[1:]:
            raise BadInput(
                f"training inputs are of shape {tuple(self.shape)}, test inputs of {tuple(self.test_inputs.shape[1:])}"
            )
        for name, value in (("mean", self.mean), ("std", self.std)):
            try:
                value.expand(self.shape)
            except RuntimeError:
                wrong = f"{name} of shape {tuple(value.shape)} does not spread over inputs {self.shape}"
                raise BadInput(wrong) from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train_inputs.shape[1:])

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the training part, as they are stored."""
        return self.train_inputs, self.train_labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the test part, as they are stored."""
        return self.test_inputs, self.test_labels

    @property
    def prepared(self) -> str:
        """What is done to stored inputs before a network reads them, in words."""
        words = ["the stored numbers"]
        if self.scale != 1:
            words.append(f"times {self.scale:.9g}")
        if bool((self.mean != 0).any()) or bool((self.std != 1).any()):
            mean, std = ([round(v, 6) for v in part.flatten().tolist()] for part in (self.mean, self.std))
            words.append(f"less the mean {mean}, over the deviation {std}" if len(mean) <= 16 else "standardised")
        return " ".join(words) if len(words) > 1 else "as they are"

    def affine(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """``(gain, shift)`` for :func:`espalier.data.standardise`: ``input * gain + shift`` is what a network reads."""
        gain = self.scale / self.std
        return gain.to(dtype), (-self.mean / self.std).to(dtype)

    def as_floats(self, dtype: torch.dtype = torch.float32) -> Dataset:
        """The same data with the inputs turned into what a network reads; four times the memory of uint8."""
        gain, shift = self.affine(dtype)
        return replace(
            self,
            train_inputs=standardise(self.train_inputs, gain, shift),
            test_inputs=standardise(self.test_inputs, gain, shift),
            scale=1.0,
            mean=torch.zeros_like(self.mean),
            std=torch.ones_like(self.std),
        )

    def flatten(self) -> Dataset:
        """The same data with every input a vector, for networks that read one."""

        def vector(one: Tensor) -> Tensor:
            return one.reshape(1) if one.numel() == 1 else one.expand(self.shape).reshape(-1)

        return replace(
            self,
            train_inputs=self.train_inputs.flatten(1),
            test_inputs=self.test_inputs.flatten(1),
            mean=vector(self.mean),
            std=vector(self.std),
        )

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def standardised(self) -> Dataset:
        """The same data, read with the mean and deviation of its own training part.

        One of each per channel for images ``(C, H, W)``, one per feature otherwise; a feature that never changes is
        only centred.
        """
        inputs = self.train_inputs.to(torch.float64) * self.scale
        over = (0, 2, 3) if inputs.ndim == 4 else (0,)
        std, mean = torch.std_mean(inputs, over, correction=0)
        std = torch.where(std > 0, std, torch.ones_like(std))
        spread = (-1, 1, 1) if inputs.ndim == 4 else mean.shape
        return replace(self, mean=mean.reshape(spread), std=std.reshape(spread))

    def take(self, train: Sequence[int] | np.ndarray | Tensor, test: Sequence[int] | np.ndarray | Tensor) -> Dataset:
        """A dataset made of this one's training part: both parts are given as indices into it, ``(n,)`` each."""
        parts: dict[str, Any] = {"standard": False}
        for name, indices in (("train", train), ("test", test)):
            index = torch.as_tensor(np.asarray(indices), dtype=torch.int64).to(self.train_labels.device)
            parts |= {f"{name}_inputs": self.train_inputs[index], f"{name}_labels": self.train_labels[index]}
        return replace(self, **parts)

    def hold_out(self, count: int = 10_000, seed: int = 0) -> Dataset:
        """The training part alone, cut in two: ``count`` of its examples, by class, become the test part.

        Tune settings on it: the real test part is not in it.
        """
        left, held = held_out(self.train_labels.cpu().numpy(), count, seed)
        return replace(self.take(left, held), name=f"{self.name} (validation: {count} held out, seed {seed})")

    def fingerprint(self) -> str:
        """SHA-256 over all values, for run directories: two datasets with the same one are the same data."""
        digest = hashlib.sha256()
        for tensor in (*self.train, *self.test, self.mean, self.std):
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digest.update(f"{self.scale!r} {len(self.classes)}".encode())
        return digest.hexdigest()


Array = Sequence[object] | np.ndarray | Tensor


def from_arrays(
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    *,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    scale: float = 1.0,
) -> Dataset:
    """Your own data: ``(inputs, labels)`` twice, as arrays, tensors or lists.

    Inputs ``(n, *shape)`` are uint8 or floating and finite, labels integers from 0. Names of the classes are their
    numbers unless given. Call ``.standardised()`` on the result to read it with its own mean and deviation.
    """
    for part, given in (("train", train), ("test", test)):
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise BadType(
                f"{part} is a pair (inputs, labels), not {type(given).__name__}: from_arrays((x, y), (test_x, test_y))"
            )
    if classes is not None and not (isinstance(classes, Sequence) and all(isinstance(name, str) for name in classes)):
        raise BadType(f"classes are the names of the classes, not {classes!r}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise BadType(f"scale is a finite number, not {scale!r}")
    parts = [_part("training", *train), _part("test", *test)]
    most = max(int(labels.max()) for _, labels in parts)
    if classes is None and most >= CLASSES:
        raise BadInput(f"there is a label {most}: labels number the classes from 0, and {CLASSES} are the most")
    named = tuple(classes) if classes is not None else tuple(str(k) for k in range(most + 1))
    if most >= len(named):
        raise BadInput(f"there is a label {most}, but {len(named)} classes; labels are 0 to {len(named) - 1}")
    mean = torch.zeros((1,) * (parts[0][0].ndim - 1), dtype=torch.float64)
    return Dataset(name, *parts[0], *parts[1], named, float(scale), mean, torch.ones_like(mean))


def _part(part: str, inputs: Array, labels: Array) -> tuple[Tensor, Tensor]:
    try:
        x, y = (one if isinstance(one, Tensor) else torch.as_tensor(np.array(one)) for one in (inputs, labels))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadType(f"{part} data are arrays of numbers: {first_line(error)}") from None
    if x.layout is not torch.strided or y.layout is not torch.strided:
        raise BadType(f"{part} data are dense tensors; use .to_dense()")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise BadType(f"{part} labels are integers, not {y.dtype}")
    y = y.to(torch.int64)
    _check_form(part, x, y)
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise BadInput(f"{part} input {row} is not finite; fill or drop such examples first")
    if int(y.min()) < 0:
        raise BadInput(f"{part} labels count from 0; there is a {int(y.min())}")
    return x, y


def _check_form(part: str, inputs: Tensor, labels: Tensor) -> None:
    if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
        raise BadType(f"{part} inputs are uint8 or floating, not {inputs.dtype}; use inputs.astype('float32')")
    if labels.dtype != torch.int64:
        raise BadType(f"{part} labels are int64, not {labels.dtype}")
    if inputs.ndim < 2 or labels.ndim != 1:
        raise BadInput(
            f"{part} data are inputs (n, *shape) and labels (n,), "
            f"not of shapes {tuple(inputs.shape)} and {tuple(labels.shape)}"
        )
    if len(inputs) != len(labels):
        raise BadInput(f"{part} data: {len(inputs)} inputs, but {len(labels)} labels")
    if not inputs.numel():
        raise BadInput(f"the {part} part is empty: inputs of shape {tuple(inputs.shape)}")


# ---- splits ----------------------------------------------------------------------------------------------------------


def shuffled(n: int, seed: int) -> Index:
    """A fixed permutation of ``range(n)``.

    From the raw words of a bit generator: NumPy promises that these never change, and does not promise it of
    `Generator.permutation`.
    """
    check_integer("seed", seed, 0)
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable").astype(np.int64)


def held_out(labels: ArrayLike, count: int, seed: int = 0) -> tuple[Index, Index]:
    """Indices ``(kept, held)`` with ``count`` held out, each class by its share (largest remainders make up the sum).

    labels: ``(n,)`` integers.

    >>> kept, held = held_out([0, 0, 0, 0, 1, 1], 3)
    >>> len(kept), len(held), int(sum(held < 4))
    (3, 3, 2)
    """
    y = _labels(labels)
    check_integer("the number held out", count, 1)
    if count >= len(y):
        raise BadInput(f"{count} examples cannot be held out of {len(y)}; at least one must be left to train on")
    classes, sizes = np.unique(y, return_counts=True)
    quota, rest = np.divmod(count * sizes, len(y))
    quota[np.argsort(-rest, kind="stable")[: count - quota.sum()]] += 1
    order = shuffled(len(y), seed)
    mine = [order[y[order] == label][:share] for label, share in zip(classes, quota)]
    held = np.sort(np.concatenate(mine))
    return np.setdiff1d(np.arange(len(y), dtype=np.int64), held, assume_unique=True), held


def folds(labels: ArrayLike, k: int, seed: int = 0) -> list[tuple[Index, Index]]:
    """``k`` pairs ``(kept, held)``: every example is held exactly once; classes and folds are level to one example.

    >>> [held.tolist() for _, held in folds([0, 1, 0, 1], 2)]
    [[2, 3], [0, 1]]
    """
    y = _labels(labels)
    check_integer("the number of folds", k, 2)
    classes, sizes = np.unique(y, return_counts=True)
    if k > sizes.min():
        rare = classes[sizes.argmin()]
        raise BadInput(f"class {rare} has {sizes.min()} examples, too few to be in each of {k} folds")
    order = shuffled(len(y), seed)
    order = order[np.argsort(y[order], kind="stable")]
    # Dealt like cards, class after class without starting anew: that levels the classes and the folds at once.
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % k
    return [(np.flatnonzero(fold != i), np.flatnonzero(fold == i)) for i in range(k)]


def _labels(labels: ArrayLike) -> NDArray[np.integer]:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise BadType(f"a split is by labels (n,) of integers, not {y.dtype} of shape {y.shape}")
    return y
