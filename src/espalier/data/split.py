"""Fixed splits: a held-out part and stratified folds, by seed, the same on every machine and in every version."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from espalier.data.checks import check_whole
from espalier.space import BadInput, BadType

Index = NDArray[np.int64]


def shuffled(n: int, seed: int) -> Index:
    """A fixed permutation of ``range(n)``.

    From the raw words of a bit generator: NumPy promises that these never change, and does not promise it of
    `Generator.permutation`.
    """
    check_whole("seed", seed, 0)
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable").astype(np.int64)


def held_out(labels: ArrayLike, count: int, seed: int = 0) -> tuple[Index, Index]:
    """Indices ``(kept, held)`` with ``count`` held out, each class by its share (largest remainders make up the sum).

    labels: ``(n,)`` integers.

    >>> kept, held = held_out([0, 0, 0, 0, 1, 1], 3)
    >>> len(kept), len(held), int(sum(held < 4))
    (3, 3, 2)
    """
    y = _labels(labels)
    check_whole("the number held out", count, 1)
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
    check_whole("the number of folds", k, 2)
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
