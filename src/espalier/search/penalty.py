"""What cost counts for: a fixed penalty, or the one that leads the expected cost along a ramp to its target.

A step ``theta += lr (U - eps F^-1 g)`` with g = dcost/dtheta changes the expected cost, to first order, by
``lr (g.U - eps g.F^-1 g)``. Both products are known exactly before the step is taken, so with a target eps is solved
for, instead of being found by trial as an integral controller would: the loss moves theta along the surface of equal
expected cost (a projection in the Fisher metric), and the ramp alone moves it across. See docs/target.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search import selection
from espalier.space import BadInput, Space, Unreachable

FLATTEST = 0.25  # of the mean slope of a function of widths: where it is flatter, a step goes no further than for that
FAR = 1e6  # times the full cost: no step goes there
NOTHING = 1e-12  # the largest share of the scale that is taken for rounding


class Penalty:
    """What cost counts for in each run. Holds ``value`` ``(*B)``, the eps' in force; the rest never changes."""

    def __init__(self, space: Space, cost: Cost, value: Tensor, target: Tensor | None, even: float = 0.0) -> None:
        self.space, self.cost, self.value, self.target, self.even = space, cost, value, target, even
        self.tightened = 1.0  # a further factor on the budget of what ships, after a measurement above the prediction
        # Of functions of widths the straight line between their ends: a staircase has no slope of its own to go by.
        self.chord = cost.chord() if cost.width_terms else None
        self.full = selection.most_expensive(space, cost, value.device)  # (d)
        self.smallest = selection.cheapest(space, cost, value.device)  # (d)
        self.full_cost, self.smallest_cost = cost(self.full), cost(self.smallest)
        # eps = eps' / s, s the most that one variable changes: the paper's eps' / max(c).
        self.scale = selection.spread(space, (self.chord or cost).gradient(self.full))
        if not bool(self.scale > 0):
            raise BadInput("no gate changes this cost, so nothing would be controlled; give another cost")
        self.counts = target is not None or bool((value != 0).any())
        if target is not None:
            smallest = (self.smallest_cost / self.full_cost).item()
            if bool((target < smallest).any()):
                digit = 10.0 ** (math.floor(math.log10(smallest)) - 5)
                shown = math.ceil(smallest / digit) * digit  # six digits, up: the number shown can be met
                raise Unreachable(
                    f"target {target[target < smallest].flatten()[0].item():.6g} is below the smallest reachable share "
                    f"{shown:.6g}; targets from {shown:.6g} to 1 can be met (what no gate cuts always stays)"
                )

    @property
    def budget(self) -> Tensor:
        """What the cost may be at most ``(*B)``, of what has a target."""
        assert self.target is not None
        return self.target * self.full_cost

    def mean_slopes(self, theta: Tensor, slopes: Tensor) -> Tensor:
        """The slopes ``(*B, d)`` by which a run is led to its target: those of the cost, or where it has functions of
        widths, those of the straight lines between their ends. On a step of a staircase the former are as good as 0."""
        return slopes if self.chord is None or self.target is None else self.chord.gradient(theta)

    def pull(self, slopes: Tensor) -> Tensor:
        """The slopes ``(*B, d)`` that the step goes down, of the cost's (mean) slopes; eps makes up for their size.

        Down the cost itself the dearest gates go first, whatever they are worth, wherever the losses cannot tell yet:
        the first layer of a network that reads many inputs ends as its bottleneck. ``even`` takes that out, fully at
        1: then all gates that cost anything move alike (in log-odds), and the losses alone tell them apart.
        """
        if self.target is None or not self.even:
            return slopes
        for _, where in self.space.choices:  # only what an option costs above the cheapest one can be saved
            slopes = slopes.clone()
            slopes[..., where] -= slopes[..., where].amin(-1, keepdim=True)
        share = slopes / self.scale
        return self.scale * torch.where(share > NOTHING, share.clamp(min=1e-30) ** (1 - self.even), 0.0)

    def start_ramp(
        self, theta: Tensor, bound: Callable[[Tensor], Tensor], ramp: int | Tensor, limit: bool = False
    ) -> None:
        """From the expected cost of theta ``(*B, d)`` to the target.

        bound: holds theta inside its bounds. With everything closed and everything open there it has the least and the
        largest expectation: one beyond these would be asked for in vain.
        ramp: a number of updates for a straight way, or the share of the way that is gone after 0, 1, .. updates,
        ``(horizon + 1, *B)``.
        limit: what is below it may grow up to it, and one that no theta exceeds is out of the way of every step.
        """
        closed = self.smallest.clone()
        for _, where in self.space.bits:
            closed[where] = 0.0
        least, most = (self._extreme(bound, mask, sign) for mask, sign in ((closed, -1.0), (self.full, 1.0)))
        self.start, self.end, self.ramp = self.cost(theta), self.budget.clamp(min=least), ramp
        if limit:
            self.end = torch.where(self.budget < most, self.end, FAR * self.full_cost)
            self.start = torch.maximum(self.start, self.end)
        else:
            self.end = self.end.clamp(max=most)

    def _extreme(self, bound: Callable[[Tensor], Tensor], mask: Tensor, sign: float) -> Tensor:
        """The largest expectation, times sign, of the options of mask ``(d)`` or any others, inside the bounds."""
        masks = selection.combinations(self.space, mask) if self.space.choices else None
        return self.cost(bound(mask)) if masks is None else sign * (sign * self.cost(bound(masks))).max()

    def wanted(self, updates: Tensor) -> Tensor:
        """The expected cost that the ramp asks for after so many updates ``(*B)``."""
        if isinstance(self.ramp, Tensor):  # looked up on the device
            gone = self.ramp.gather(0, updates.clamp(max=len(self.ramp) - 1).unsqueeze(0)).squeeze(0)
        else:
            gone = (updates.to(torch.float64) / self.ramp).clamp(max=1.0)
        return self.start + (self.end - self.start) * gone

    def solve(self, theta: Tensor, updates: Tensor, lr: Tensor, drift: Tensor, grip: Tensor) -> Tensor:
        """The eps ``(*B)`` after whose step the expected cost is what the ramp asks for.

        drift: ``g.U``, what the loss alone changes per unit of lr; grip: ``g.F^-1 pull(g)``, what eps = 1 takes off.
        """
        # Without grip (every gate with a cost at 0 or 1, possible only with margin 0) or without a step there is
        # nothing to solve; 1 keeps the division finite and the step that uses it is 0.
        moves = lr > 0
        missing = self.wanted(updates + 1) - self.cost(theta)
        eps = (drift - missing / torch.where(moves, lr, 1.0)) / torch.where(grip > 0, grip, 1.0)
        # What is reported is a running mean over about a hundred updates: a single one holds the noise of the losses.
        weight = torch.where(moves, (1 / (updates.to(torch.float64) + 1)).clamp(min=0.01), 0.0)
        self.value.lerp_(eps * self.scale, weight)
        return eps


def shared(grips: Tensor, over: Tensor, sets: Tensor) -> Tensor:
    """How far a step is pulled at each of n costs ``(*B, n)``: no cost is left over, and none is pulled at beyond that.

    grips: ``(*B, n, n)``, what pulling at the second takes off the first; over: ``(*B, n)``, what there is to take off;
    sets: ``(2^n, n)`` bool, the costs that are pulled at, fewest first. Each set is solved, and the first taken that
    leaves nothing over and pulls at nothing backwards. Without a solver, which would wait for a GPU: n is two or three.
    """
    n = over.shape[-1]
    both = sets.unsqueeze(-1) & sets.unsqueeze(-2)
    one = torch.eye(n, dtype=over.dtype, device=over.device)
    system = torch.where(both, grips.unsqueeze(-3), one)
    rows = torch.cat([system, torch.where(sets, over.unsqueeze(-2), 0.0).unsqueeze(-1)], -1)  # (*B, 2^n, n, n + 1)
    for i in range(n):  # Gauss and Jordan; costs that are alike end in what is no number, and one of them is enough
        row = rows[..., i : i + 1, :] / rows[..., i : i + 1, i : i + 1]
        rows = torch.where(one[:, i : i + 1] > 0, row, rows - rows[..., i : i + 1] * row)
    shares = rows[..., -1]
    left = over.unsqueeze(-2) - (grips.unsqueeze(-3) @ shares.unsqueeze(-1)).squeeze(-1)
    backwards = -shares * grips.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    wrong = torch.maximum(left, backwards).amax(-1).clamp(min=0.0).nan_to_num(torch.inf)
    best = wrong.argmin(-1, keepdim=True).unsqueeze(-1).expand(*wrong.shape[:-1], 1, n)
    return shares.gather(-2, best).squeeze(-2).clamp(min=0.0)
