"""What is recorded of a run after every epoch, as one flat row of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search import Search
from espalier.space import Space
from espalier.train.step import Gated

Row = dict[str, Any]


class Shares:
    """Shares of the full network that a mask keeps: of its gates, of its weights, and of the cost searched against."""

    def __init__(self, gated: Gated, cost: Cost, full_cost: Tensor, device: torch.device) -> None:
        ones = torch.ones(gated.space.d, device=device)
        self.costs = {"unit_share": gated.cost("units"), "weight_share": gated.cost("weights"), "cost_share": cost}
        self.full = {name: float(counted(ones)) for name, counted in self.costs.items()}
        self.full["cost_share"] = float(full_cost)

    def __call__(self, mask: Tensor) -> dict[str, float | None]:
        """mask: ``(d)``. A share is None where there is nothing to share (a network without such weights)."""
        return {
            name: float(cost(mask)) / self.full[name] if self.full[name] else None for name, cost in self.costs.items()
        }


def entropy(space: Space, theta: Tensor) -> float:
    """The mean entropy of a variable, in bits: 1 for bits at 0.5, 0 when the structure is decided. theta: ``(d)``."""
    surprise = torch.special.entr(theta)
    total = surprise.sum()
    for _, where in space.bits:
        total = total + torch.special.entr(1 - theta[where]).sum()
    return float(total) / math.log(2) / space.n


def structure_row(search: Search, gated: Gated, shares: Shares) -> Row:
    """The state of the search: shares of the mask that would ship now, and what theta says."""
    selected = search.select()
    row: Row = dict(shares(gated.canonical(selected)))
    row["selected_share"] = float(search.usage())
    row["expected_share"] = float(search.expected_cost() / search.full_cost)
    row["expected_cost"] = float(search.expected_cost())
    row["penalty"] = float(search.penalty)
    row["entropy"] = entropy(search.space, search.theta)
    row["distance_to_target"] = None if search.target is None else float(search.gap())
    row["settled"] = search.settled
    return row


def clean(row: Mapping[str, Any]) -> Row:
    """The row with what JSON has no word for (infinities, NaN) as None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class Thinned:
    """Theta over time: at most ``most`` snapshots, every second one dropped whenever they are too many."""

    def __init__(self, most: int = 128) -> None:
        self.most, self.stride = most, 1
        self.updates: list[int] = []
        self.snapshots: list[Tensor] = []
        self.offered = 0

    def offer(self, update: int, theta: Tensor) -> None:
        """theta: ``(d)``; kept as float32 on the CPU."""
        if self.offered % self.stride == 0:
            self.updates.append(update)
            self.snapshots.append(theta.detach().to("cpu", torch.float32, copy=True))
        self.offered += 1
        if len(self.updates) > self.most:
            self.updates, self.snapshots, self.stride = self.updates[::2], self.snapshots[::2], 2 * self.stride

    def table(self) -> Tensor:
        """``(snapshots, d)`` float32."""
        return torch.stack(self.snapshots) if self.snapshots else torch.empty(0, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"stride": self.stride, "updates": self.updates, "offered": self.offered, "table": self.table()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stride, self.updates, self.offered = state["stride"], list(state["updates"]), state["offered"]
        self.snapshots = list(state["table"].unbind()) if self.updates else []
