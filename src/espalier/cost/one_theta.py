"""A multilinear cost and its gradient at one theta on a CPU, both at once, with few operations.

The numbers are those of ``Expectation``, to the last bit: sums and matrix products are torch's, in the same shapes;
what is done entry by entry is NumPy's, whose operations take a third of the time on vectors this short.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from espalier.cost.expectation import Array, Expectation, slope_coefficients


class OneTheta:
    """cost: on a CPU, of terms with at most two factors each."""

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
            parts.append(rows.mv(self._sums(bits * (1 - bits) * _slope(n - 1, bits))).numpy())
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
            gradient = self._spread(part + self.linear) if n == 1 else gradient + self._spread(part) * _slope(n, bits)
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


def _slope(n: int, theta: Array) -> Array:
    """The derivative of the n-th cumulant, as ``expectation._cumulant_slope`` gives it."""
    *lower, highest = slope_coefficients(n)
    slope = np.full_like(theta, highest)
    for coefficient in reversed(lower):
        slope = slope * theta + coefficient
    return slope
