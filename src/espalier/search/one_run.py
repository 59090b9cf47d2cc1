"""The update of theta of one run on a CPU, from the slopes under one mask: what ``Search`` computes, with less work.

For a small network theta's arithmetic takes as long as its own update: some hundred operations on short vectors and
single numbers. Here numbers are Python's, what is done entry by entry is NumPy's, in the same order, and sums are
torch's. So theta is the same to the last bit, which ``tests/search/test_search_one_run.py`` checks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.cost.expectation import Array, OneTheta
from espalier.search.penalty import NOTHING
from espalier.search.signal import LARGEST, Signal, sized

if TYPE_CHECKING:
    from espalier.search.penalty import Penalty
    from espalier.search.search import Search


class OneRun:
    """Made by :meth:`of`; called with the loss, the slopes ``(1, d)`` and, where known, the spreads of one mask."""

    def __init__(self, search: Search, signal: Signal, penalty: Penalty) -> None:
        self.search, self.signal, self.penalty = search, signal, penalty
        self.theta = search.theta.numpy()
        self.low, self.high = search._distribution.margin, 1 - search._distribution.margin
        self.cost = OneTheta(penalty.cost.on(search.device)[0])
        self.start, self.way = float(penalty.start), float(penalty.end - penalty.start)
        self.scale = float(penalty.scale)
        # Single numbers that torch reads; written through NumPy, which is cheaper.
        self.weight, self.number = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self.updates = search.updates.numpy()

    @classmethod
    def of(cls, search: Search) -> OneRun | None:
        """None where this search needs the general update."""
        signal, penalty = search._signal, search._penalty
        if signal is None or signal.worth is not sized or search.samples > 1 or search._adaptation is not None:
            return None
        if search.batch or search.device.type != "cpu" or not search.space.is_bits or len(search._parts) > 1:
            return None
        if penalty is None or penalty.target is None or search._limits or not isinstance(penalty.ramp, int):
            return None
        forms, widths = penalty.cost.on(search.device)
        return cls(search, signal, penalty) if widths is None and OneTheta.knows(forms) else None

    def __call__(self, loss: float, slopes: Tensor, spreads: Tensor | None) -> bool:
        """One update. Returns whether loss, slopes and spreads were finite; if not, theta stays."""
        g = slopes.detach().double().numpy()[0]
        size = abs(g) if spreads is None else spreads.detach().double().numpy()[0]
        if not (math.isfinite(loss) and math.isfinite(g.sum()) and math.isfinite(size.sum())):
            self.search.diverged.fill_(True)
            return False
        updates, lr = self.updates.item(), self.search.learning_rate.item()
        self.weight.numpy()[...] = max(1 / (updates + 1), 0.01)
        worth = self._worth(size - g / 2)
        spread = self.theta * (1 - self.theta)
        direction = spread * worth
        cost, slope = self.cost(self.search.theta)
        pull = spread * self._pull(slope)
        drift, grip = _sum(slope * direction), _sum(slope * pull)
        missing = self.start + self.way * min((updates + 1) / self.penalty.ramp, 1.0) - cost
        eps = (drift - missing / lr) / (grip if grip > 0 else 1.0)
        self.number.numpy()[...] = eps * self.scale
        self.penalty.value.lerp_(self.number, self.weight)
        moved = self.theta + lr * (direction - eps * pull)
        moved.clip(self.low, self.high, out=self.theta)
        self.updates += 1
        return True

    def _worth(self, worth: Array) -> Array:
        """In units of its running mean size, as ``Signal.values``."""
        mean = self.signal.size.item()
        if mean > 0:
            most = LARGEST * mean
            worth.clip(-most, most, out=worth)
        self.number.numpy()[...] = _sum(abs(worth)) / len(worth)
        self.signal.size.lerp_(self.number, self.weight)
        mean = self.signal.size.item()
        return worth / mean if mean > 0 else worth

    def _pull(self, slopes: Array) -> Array:
        """As ``Penalty.pull``."""
        even = self.penalty.even
        if not even:
            return slopes
        share = slopes / self.scale
        power = torch.from_numpy(share.clip(1e-30)).pow(1 - even).numpy()
        return self.scale * (power * (share > NOTHING))


def _sum(x: Array) -> float:
    return torch.from_numpy(x).sum().item()
