"""Costs that are functions of widths: exact in expectation by the distribution of a sum of independent bits.

The width W of a layer is the number of its open gates. For independent bits it has the Poisson binomial distribution,
whose generating polynomial is ``prod_i (1 - theta_i + theta_i x)``. Blocks of bits are multiplied one by one, then pair
by pair up a tree. Layers that share no gate are independent, so the expectation of a product of their functions is the
product of the expectations.

The gradient is ``E[f(W + 1) - f(W)]``, W without the bit itself. Down the same tree runs ``h -> E[h(k + the bits of the
other half)]``, from ``h(w) = f(w + 1) - f(w)`` at the top to one number for each bit. Nothing is ever subtracted, so
nothing cancels; at a mask every sum has one term, and the value is that of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.space import BadInput, BadType, Bits, Space

BLOCK = 8  # bits multiplied one by one before the tree begins
WINDOWS = 1 << 22  # numbers copied at a time where polynomials are multiplied: 32 MB
Table = Callable[[int], float] | Sequence[float] | np.ndarray | Tensor
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class WidthFunction:
    """A non-decreasing function of how many gates in some runs of entries are open: ``table`` of 0, 1, .. of them."""

    runs: Runs
    table: np.ndarray

    @classmethod
    def read(cls, space: Space, names: object, table: Table) -> WidthFunction:
        """names: a group of bits, or a tuple of groups whose widths add. table: a function of the width, or its values
        at 0, 1, .. up to all open."""
        listed = names if isinstance(names, tuple) else (names,)
        for name in listed:
            group = next((g for g in space.groups if g.name == name), None)
            if group is None:
                known = ", ".join(repr(bits.name) for bits, _ in space.bits)
                raise BadInput(f"there is no group {name!r} whose width could cost anything, only {known}")
            if not isinstance(group, Bits):
                raise BadInput(f"{name!r} is a choice, which has no width; its cost is a linear form")
        if len(set(listed)) < len(listed):
            raise BadInput(f"the width of {names!r} counts a gate twice; name every group once")
        runs = tuple((space.slices[str(name)].start, space.slices[str(name)].stop) for name in listed)
        return cls(runs, _values(table, sum(stop - start for start, stop in runs), names))

    @property
    def size(self) -> int:
        """The number of gates that are counted."""
        return len(self.table) - 1

    @property
    def mean_step(self) -> float:
        """What a gate adds on the average over all widths."""
        return float(self.table[-1] - self.table[0]) / self.size


WidthTerms = tuple[tuple[float, tuple[WidthFunction, ...]], ...]


def check_apart(names: Iterable[object], factors: Sequence[WidthFunction]) -> None:
    """Refuse factors that share a gate: the expectation of their product is not that of the factors."""
    seen: dict[tuple[int, int], object] = {}
    for name, factor in zip(names, factors):
        for run in factor.runs:
            if run in seen:
                raise BadInput(
                    f"the widths {seen[run]!r} and {name!r} share gates, so the expectation of their product would not "
                    "be exact; multiply functions of layers that share none, or give one function of the joint width"
                )
            seen[run] = name


def _values(table: Table, size: int, names: object) -> np.ndarray:
    """A table of ``size + 1`` costs, checked."""
    what = f"the cost of the width of {names!r}"
    try:
        if isinstance(table, Tensor):
            table = table.detach().cpu().double().numpy()
        listed = [table(width) for width in range(size + 1)] if callable(table) else table
        values = np.array(listed, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadType(f"{what} is a function of an integer, or a list of numbers: {error}") from None
    if values.shape != (size + 1,):
        raise BadInput(f"{what} is given for widths 0 to {size}, {size + 1} numbers, not in shape {values.shape}")
    check_weights(values, what)
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        at = int(falls[0])
        raise BadInput(
            f"{what} falls from {values[at]:g} at width {at} to {values[at + 1]:g} at {at + 1}; to open a gate never "
            "makes a network cheaper. Give the running maximum of what was measured"
        )
    return values


def check_weights(values: np.ndarray, what: str) -> None:
    wrong = values[~(np.isfinite(values) & (values >= 0))]
    if wrong.size:
        raise BadInput(f"{what} is finite and not negative, not {float(wrong.flat[0])!r}")


class WidthExpectation:
    """The width terms of a cost, laid out for evaluation on a device."""

    def __init__(self, d: int, terms: WidthTerms, device: torch.device) -> None:
        layers = list(dict.fromkeys(factor.runs for _, factors in terms for factor in factors))
        self.buckets: list[_Bucket] = []
        place: dict[Runs, tuple[int, int]] = {}
        by_shape: dict[tuple[int, int], list[Runs]] = {}
        for runs in layers:
            by_shape.setdefault(_tree_shape(sum(stop - start for start, stop in runs)), []).append(runs)
        for (leaves, block), members in by_shape.items():
            place |= {runs: (len(self.buckets), row) for row, runs in enumerate(members)}
            self.buckets.append(_Bucket(d, members, leaves, block, device))
        self.terms = []
        for scale, factors in terms:
            listed = []
            for factor in factors:
                bucket, row = place[factor.runs]
                table = np.pad(factor.table, (0, self.buckets[bucket].width - factor.size), mode="edge")
                listed.append((bucket, row, torch.as_tensor(table, device=device)))
            self.terms.append((scale, listed))

    def value(self, theta: Tensor) -> Tensor:
        """theta: ``(*B, d)`` float64. Returns ``(*B)``."""
        distributions = [bucket.distribution(theta)[-1][..., 0, :] for bucket in self.buckets]
        total = theta.new_zeros(theta.shape[:-1])
        for scale, values in self._means(distributions):
            total = total + scale * torch.stack(values).prod(0)
        return total

    def gradient(self, theta: Tensor) -> Tensor:
        """theta: ``(*B, d)`` float64. Returns ``(*B, d)``."""
        trees = [bucket.distribution(theta) for bucket in self.buckets]
        steps = [torch.zeros_like(tree[-1][..., 0, :-1]) for tree in trees]  # per bucket: (*B, layers, width)
        means = self._means([tree[-1][..., 0, :] for tree in trees])
        for (scale, values), (_, factors) in zip(means, self.terms):
            for j, (number, row, table) in enumerate(factors):
                others = [value for i, value in enumerate(values) if i != j]
                weight = scale * torch.stack(others).prod(0) if others else torch.full_like(values[j], scale)
                steps[number][..., row, :] += weight.unsqueeze(-1) * table.diff()
        gradient = torch.zeros_like(theta)
        for bucket, tree, step in zip(self.buckets, trees, steps):
            gradient = bucket.add_gradient(gradient, theta, tree, step)
        return gradient

    def _means(self, distributions: list[Tensor]) -> list[tuple[float, list[Tensor]]]:
        """For each term its scale and the expectations ``(*B)`` of its factors."""
        return [
            (scale, [distributions[bucket][..., row, :] @ table for bucket, row, table in factors])
            for scale, factors in self.terms
        ]


def _tree_shape(size: int) -> tuple[int, int]:
    """The number of blocks, a power of two, and the bits of a block, so that they hold ``size`` bits."""
    leaves = 1
    while leaves * BLOCK < size:
        leaves *= 2
    return leaves, -(-size // leaves)


class _Bucket:
    """Layers of about the same width, evaluated together: ``leaves`` blocks of ``block`` bits each.

    What a layer has too few of are bits that are never open.
    """

    def __init__(self, d: int, layers: list[Runs], leaves: int, block: int, device: torch.device) -> None:
        self.block, self.width = block, leaves * block
        index = np.full((len(layers), self.width), d)  # a zero is appended there
        for row, runs in enumerate(layers):
            own = np.concatenate([np.arange(start, stop) for start, stop in runs])
            index[row, : len(own)] = own
        self.index = torch.as_tensor(index.reshape(len(layers), leaves, block), device=device)

    def distribution(self, theta: Tensor) -> list[Tensor]:
        """theta: ``(*B, d)``. The distribution of the width of each node, level by level: first of the first 0, 1, ..
        bits of each block ``(*B, layers, leaves, block + 1)``, then of pairs, at the end ``(*B, layers, 1, width + 1)``
        """
        bits = self._bits(theta)
        levels = [torch.nn.functional.pad(torch.ones_like(bits[..., :1]), (0, self.block))]
        for i in range(self.block):
            t, last = bits[..., i : i + 1], levels[-1]
            levels.append((1 - t) * last + t * torch.nn.functional.pad(last[..., :-1], (1, 0)))
        while levels[-1].shape[-2] > 1:
            levels.append(_product(levels[-1][..., ::2, :], levels[-1][..., 1::2, :]))
        return levels

    def add_gradient(self, gradient: Tensor, theta: Tensor, levels: list[Tensor], step: Tensor) -> Tensor:
        """gradient ``(*B, d)`` plus that of ``E[h(W)]`` for each layer, whose differences are ``step`` ``(*B, layers,
        width)``."""
        outside = torch.nn.functional.pad(step, (0, 1)).unsqueeze(-2)  # (*B, layers, nodes, bits of a node + 1)
        for level in reversed(levels[self.block : -1]):
            left, right = level[..., ::2, :], level[..., 1::2, :]
            outside = torch.stack([_slide(outside, right), _slide(outside, left)], -2).flatten(-3, -2)
        bits, slopes = self._bits(theta), []
        for i in reversed(range(self.block)):  # the bits after this one are in `outside`, those before it in the level
            t = bits[..., i : i + 1]
            slopes.append((levels[i] * outside).sum(-1))
            outside = (1 - t) * outside + t * torch.nn.functional.pad(outside[..., 1:], (0, 1))
        flat = torch.stack(slopes[::-1], -1).flatten(-3)
        padded = torch.nn.functional.pad(gradient, (0, 1))
        return padded.index_add(-1, self.index.flatten(), flat)[..., :-1]

    def _bits(self, theta: Tensor) -> Tensor:
        return torch.nn.functional.pad(theta, (0, 1))[..., self.index]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two polynomials with n + 1 coefficients each: ``(.., n + 1)`` to ``(.., 2 n + 1)``."""
    n = a.shape[-1] - 1
    return _slide(torch.nn.functional.pad(b, (n, n)), a.flip(-1))


def _slide(long: Tensor, short: Tensor) -> Tensor:
    """``sum_j long_{k + j} short_j`` for every k, by rows: ``(.., a)`` and ``(.., b)`` to ``(.., a - b + 1)``.

    Of a function h and the distribution of a width W it is ``E[h(k + W)]``.
    """
    windows = long.flatten(0, -2).unfold(-1, short.shape[-1], 1)
    vectors = short.flatten(0, -2).unsqueeze(-1)
    rows = max(WINDOWS // windows[0].numel(), 1)
    parts = [w @ v for w, v in zip(torch.split(windows, rows), torch.split(vectors, rows))]
    return torch.cat(parts).reshape(*short.shape[:-1], -1)
