"""The exact expectation of a multilinear cost, and its gradient, by segment sums.

The expectation of a product of linear forms in independent bits is the sum, over all partitions of the forms into
blocks, of the products of the blocks' joint cumulants; the joint cumulant of forms a, b, .. is
``sum_i a_i b_i .. kappa_n(theta_i)``, with ``kappa_1 = theta`` and ``kappa_{n+1} = theta (1 - theta) dkappa_n/dtheta``.
Forms that share no entry have none beyond the first, so the usual product of two layers' widths is one term. At a mask
every ``kappa_n``, n >= 2, is exactly 0, and what remains is the plain product. Options of one choice multiply to
``m_j m_k = 0``, which is applied before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from espalier.space import Space

if TYPE_CHECKING:
    from espalier.cost.cost import Form


Terms = Sequence[tuple[float, "tuple[Form, ...]"]]
Key = tuple[int, bytes, float]
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Factor:
    """``constant + sum_s row_s K_s``, K_s the sum of ``kappa_order(theta_i)`` over segment s."""

    order: int
    row: Array
    constant: float

    @property
    def key(self) -> Key:
        return self.order, self.row.tobytes(), self.constant


@dataclass(frozen=True, eq=False)
class Expectation:
    """A cost laid out for evaluation: segments of equal weights, factors, and terms of factors."""

    d: int
    segments: Segments
    constant: float
    linear: Tensor  # (S): all terms of degree one, added up
    rows: tuple[Tensor, ...]  # per order n = 1, 2, ..: (factors of that order, S)
    constants: Tensor  # (factors + 1): the last one stands for "no further factor" and is 1
    scales: Tensor  # (terms)
    factors: Tensor  # (terms, degree): which factors each term multiplies

    @classmethod
    def build(cls, d: int, terms: Terms, space: Space | None, device: torch.device) -> Expectation:
        bounds, owner = _segments(d, terms, space)
        constant, linear = 0.0, np.zeros(len(bounds) - 1)
        table: dict[Key, Factor] = {}
        products: dict[tuple[Key, ...], float] = {}
        for scale, forms in terms:
            rows = [(_row(form, bounds), form.constant) for form in forms]
            for weight, factors in _expand(rows, owner):
                if not factors:
                    constant += scale * weight
                elif len(factors) == 1 and factors[0].order == 1:
                    linear += scale * weight * factors[0].row
                    constant += scale * weight * factors[0].constant
                else:
                    for factor in factors:
                        table.setdefault(factor.key, factor)
                    name = tuple(sorted(factor.key for factor in factors))
                    products[name] = products.get(name, 0.0) + scale * weight

        ordered = sorted(table.values(), key=lambda f: f.order)
        index = {factor.key: i for i, factor in enumerate(ordered)}
        degree = max((len(name) for name in products), default=0)
        pad = len(ordered)
        listed = [[*(index[key] for key in name), *[pad] * (degree - len(name))] for name in products]
        highest = max((f.order for f in ordered), default=0)

        def tensor(values: object, shape: tuple[int, ...]) -> Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.float64).reshape(shape), device=device)

        segments = len(bounds) - 1
        by_order = [[f.row for f in ordered if f.order == n] for n in range(1, highest + 1)]
        return cls(
            d=d,
            segments=Segments(bounds, device),
            constant=constant,
            linear=tensor(linear, (segments,)),
            rows=tuple(tensor(rows, (len(rows), segments)) for rows in by_order),
            constants=tensor([*(f.constant for f in ordered), 1.0], (pad + 1,)),
            scales=tensor(list(products.values()), (len(products),)),
            factors=torch.tensor(listed, dtype=torch.int64, device=device).reshape(len(products), degree),
        )

    def value(self, theta: Tensor) -> Tensor:
        """theta: ``(*B, d)`` float64. Returns ``(*B)``."""
        cost = self.segments.sum(theta) @ self.linear + self.constant
        if len(self.scales):
            cost = cost + self._factor_values(theta)[..., self.factors].prod(-1) @ self.scales
        return cost

    def gradient(self, theta: Tensor) -> Tensor:
        """theta: ``(*B, d)`` float64. Returns ``(*B, d)``; a view without memory of its own where it is constant."""
        if not len(self.scales):
            return self.segments.spread(self.linear).expand(theta.shape)
        values = self._factor_values(theta)
        slopes = torch.zeros_like(values)
        taken = values[..., self.factors]  # (*B, terms, degree)
        for j in range(taken.shape[-1]):
            others = torch.cat([taken[..., :j], taken[..., j + 1 :]], -1).prod(-1)
            slopes.index_add_(-1, self.factors[:, j], others * self.scales)
        total, first = self.linear, 0
        gradient = torch.zeros((), dtype=torch.float64, device=theta.device)
        for n, rows in enumerate(self.rows, start=1):
            part = slopes[..., first : first + len(rows)] @ rows
            first += len(rows)
            if n == 1:
                gradient = self.segments.spread(part + total)
            else:
                gradient = gradient + self.segments.spread(part) * _cumulant_slope(n, theta)
        return gradient.expand(theta.shape)

    def _factor_values(self, theta: Tensor) -> Tensor:
        parts = [self.segments.sum(_cumulant(n, theta)) @ rows.T for n, rows in enumerate(self.rows, start=1)]
        parts.append(theta.new_zeros(*theta.shape[:-1], 1))
        return torch.cat(parts, -1) + self.constants


class Segments:
    """Runs of consecutive entries: sums over them, and one value per run spread back over its entries."""

    def __init__(self, bounds: Array, device: torch.device) -> None:
        self.bounds = [int(b) for b in bounds]
        self.count, self.d = len(bounds) - 1, self.bounds[-1]
        lengths = np.diff(bounds)
        self.even = bool((lengths == lengths[0]).all())
        # A gather padded to the longest run is one kernel for any number of runs; a loop reads less where the runs are
        # long or uneven.
        longest = int(lengths.max())
        self.gather: Tensor | None = None
        if not self.even and self.count > 8 and longest < 65_536 and self.count * longest <= 4 * self.d:
            index = np.minimum(bounds[:-1, None] + np.arange(longest), self.d - 1)
            index[np.arange(longest) >= lengths[:, None]] = self.d  # a zero is appended there
            self.gather = torch.as_tensor(index, device=device)
        self.owner: Tensor | None = None
        if 1 < self.count < self.d:
            self.owner = torch.as_tensor(np.repeat(np.arange(self.count), lengths), device=device)

    def sum(self, x: Tensor) -> Tensor:
        """x: ``(*B, d)``. Returns ``(*B, S)``."""
        if self.count == self.d:
            return x
        if self.even:
            return x.reshape(*x.shape[:-1], self.count, -1).sum(-1)
        if self.gather is not None:
            return torch.nn.functional.pad(x, (0, 1))[..., self.gather].sum(-1)
        return torch.stack([x[..., a:b].sum(-1) for a, b in itertools.pairwise(self.bounds)], -1)

    def spread(self, x: Tensor) -> Tensor:
        """x: ``(*B, S)``. Returns ``(*B, d)``, or ``(*B, 1)`` where there is one run."""
        return x if self.owner is None else x[..., self.owner]


def _cumulant(n: int, theta: Any) -> Any:
    """The n-th cumulant of a bit, for a tensor or an array of them: theta for n = 1, then a product with theta
    (1 - theta), exactly 0 at 0 and at 1."""
    return theta if n == 1 else theta * (1 - theta) * _cumulant_slope(n - 1, theta)


def _cumulant_slope(n: int, theta: Any) -> Any:
    """The derivative of the n-th cumulant, of a tensor or an array; a number where it is constant."""
    *lower, slope = _slope_coefficients(n)
    for coefficient in reversed(lower):
        slope = slope * theta + coefficient
    return slope


@functools.cache
def _slope_coefficients(n: int) -> tuple[float, ...]:
    """Of the polynomial in theta that is the derivative of the n-th cumulant, the lowest first."""
    kappa = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n - 1):
        kappa = np.polynomial.Polynomial([0.0, 1.0, -1.0]) * kappa.deriv()
    return tuple(float(c) for c in kappa.deriv().coef)


def _segments(d: int, terms: Terms, space: Space | None) -> tuple[Array, Array]:
    """Bounds ``(S + 1)`` of runs with equal weights in every form, and for each run its choice's number or -1."""
    cuts = {0, d}
    for _, forms in terms:
        for form in forms:
            for start, stop, weights in form.pieces:
                cuts |= {start, stop}
                if isinstance(weights, Array):
                    cuts.update((start + 1 + np.flatnonzero(np.diff(weights))).tolist())
    choices = [] if space is None else [where for _, where in space.choices]
    for where in choices:
        cuts |= {where.start, where.stop}
    bounds = np.array(sorted(cuts), dtype=np.int64)
    owner = np.full(len(bounds) - 1, -1)
    for number, where in enumerate(choices):
        owner[(bounds[:-1] >= where.start) & (bounds[:-1] < where.stop)] = number
    return bounds, owner


def _row(form: Form, bounds: Array) -> Array:
    row = np.zeros(len(bounds) - 1)
    for start, stop, weights in form.pieces:
        first, last = np.searchsorted(bounds, [start, stop])
        row[first:last] += weights if not isinstance(weights, Array) else weights[bounds[first:last] - start]
    return row


def _expand(rows: list[tuple[Array, float]], owner: Array) -> Iterator[tuple[float, list[Factor]]]:
    """The expectation of one product of forms, as (weight, factors) terms."""
    parts = []
    for row, constant in rows:
        bits = np.where(owner < 0, row, 0.0)
        of_choices = [(int(c), np.where(owner == c, row, 0.0)) for c in np.unique(owner[(owner >= 0) & (row != 0)])]
        parts.append([(-1, bits, constant), *((c, part, 0.0) for c, part in of_choices)])
    for combination in itertools.product(*parts):
        weight, forms, chosen = 1.0, list[tuple[Array, float]](), dict[int, Array]()
        for number, row, constant in combination:
            if number >= 0:  # m_j m_k = 0 and m_k m_k = m_k: two forms in one choice multiply entry by entry
                chosen[number] = chosen[number] * row if number in chosen else row
            elif row.any():
                forms.append((row, constant))
            else:
                weight *= constant
        if weight == 0.0 or any(not row.any() for row in chosen.values()):
            continue
        options = [Factor(1, row, 0.0) for row in chosen.values()]
        for blocks in _partitions(list(range(len(forms)))):
            factors = [_block([forms[i] for i in block]) for block in blocks]
            if all(factor.row.any() for factor in factors):
                yield weight, options + factors


def _block(forms: list[tuple[Array, float]]) -> Factor:
    """The joint cumulant of a block of forms in bits; a constant shifts the mean alone."""
    row = np.prod([row for row, _ in forms], axis=0)
    return Factor(len(forms), row, forms[0][1] if len(forms) == 1 else 0.0)


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to split the items into non-empty blocks."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for blocks in _partitions(rest):
        yield [[first], *blocks]
        for i, block in enumerate(blocks):
            yield [*blocks[:i], [first, *block], *blocks[i + 1 :]]


class OneTheta:
    """A cost and its gradient at one theta on a CPU, both at once, with few operations: of terms with at most two
    factors each.

    The numbers are those of :class:`Expectation`, to the last bit: sums and matrix products are torch's, in the same
    shapes; what is done entry by entry is NumPy's, whose operations take a third of the time on vectors this short.
    """

    def __init__(self, cost: Expectation) -> None:
        self.cost, owner = cost, cost.segments.owner
        self.linear, self.constants = cost.linear.numpy(), cost.constants.numpy()
        self.owner = None if owner is None else owner.numpy()
        # Of every factor of every term, first factors and then second ones: which it is, and the term's scale.
        self.factors = cost.factors.numpy().T.flatten()
        self.scales = np.tile(cost.scales.numpy(), cost.factors.shape[1])
        self.padded = torch.zeros(cost.d + 1, dtype=torch.float64)  # the last entry stays 0

    @staticmethod
    def knows(cost: Expectation) -> bool:
        return cost.factors.shape[1] <= 2 and cost.linear.device.type == "cpu"

    def __call__(self, theta: Tensor) -> tuple[float, Array]:
        """theta: ``(d)`` float64. Returns the cost, and its gradient as an array ``(d)``, or ``(1)`` for all."""
        cost, bits = self.cost, theta.numpy()
        sums, terms = self._sums(bits), len(cost.scales)
        value = sums.dot(cost.linear).item() + cost.constant
        if not terms:
            return value, self._spread(self.linear)
        parts = [cost.rows[0].mv(sums).numpy()]
        for n, rows in enumerate(cost.rows[1:], start=2):
            parts.append(rows.mv(self._sums(_cumulant(n, bits))).numpy())
        factors = (np.concatenate([*parts, np.zeros(1)]) + self.constants)[self.factors]
        first, second = factors[:terms], factors[terms:]
        products, others = (first * second, [second, first]) if len(second) else (first, [np.ones(terms)])
        value += torch.from_numpy(products).dot(cost.scales).item()
        # One after the other, as index_add_ adds them.
        added = np.bincount(self.factors, np.concatenate(others) * self.scales, len(self.constants))
        slopes, start, gradient = torch.from_numpy(added), 0, self.linear
        for n, rows in enumerate(cost.rows, start=1):
            part = rows.T.mv(slopes[start : start + len(rows)]).numpy()
            start += len(rows)
            if n == 1:
                gradient = self._spread(part + self.linear)
            else:
                gradient = gradient + self._spread(part) * _cumulant_slope(n, bits)
        return value, gradient

    def _sums(self, x: Array) -> Tensor:
        """Over each segment, of x ``(d)``: those of ``Segments.sum``."""
        segments = self.cost.segments
        if segments.gather is None:
            return segments.sum(torch.from_numpy(x))
        self.padded.numpy()[:-1] = x
        return self.padded[segments.gather].sum(-1)

    def _spread(self, x: Array) -> Array:
        return x if self.owner is None else x[self.owner]
