"""What is recorded of runs when they are measured: one flat row of numbers for each, read from the device at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search import Search
from espalier.search.cost_bounds import most_expensive
from espalier.space import Space
from espalier.train.gradients import Gated

Row = dict[str, Any]
Columns = dict[str, Tensor]


class Shares:
    """Shares of the full network that masks keep: of its gates, of its weights, and of the cost searched against.

    full_cost: what counts as all of that cost; None for that of all gates open and the dearest options.
    """

    def __init__(self, gated: Gated, cost: Cost, full_cost: Tensor | None, device: torch.device) -> None:
        space = gated.space
        self.costs = {"unit_share": gated.cost("units"), "weight_share": gated.cost("weights"), "cost_share": cost}
        self.full = {
            name: counted(most_expensive(space, counted, device).float()) for name, counted in self.costs.items()
        }
        if full_cost is not None:
            self.full["cost_share"] = full_cost

    def __call__(self, masks: Tensor) -> Columns:
        """masks: ``(*batch, d)``; shares ``(*batch)``, NaN where there is nothing to share."""
        return {name: cost(masks) / self.full[name] for name, cost in self.costs.items()}


def structure(search: Search) -> Columns:
    """What theta says, ``(*batch)`` each; the distance to a target is NaN where there is none."""
    expected = search.expected_cost()
    return {
        "selected_share": search.usage(),
        "expected_share": expected / search.full_cost,
        "expected_cost": expected,
        "penalty": search.penalty,
        "entropy": entropy(search.space, search.theta),
        "distance_to_target": expected * torch.nan if search.target is None else search.gap(),
    }


def entropy(space: Space, theta: Tensor) -> Tensor:
    """The mean entropy of a variable in bits: 1 for bits at 0.5, 0 when the structure is decided. theta: ``(*, d)``."""
    total: Tensor = torch.special.entr(theta).sum(-1)
    for _, where in space.bits:
        total = total + torch.special.entr(1 - theta[..., where]).sum(-1)
    return total / math.log(2) / space.n


def rows(columns: Mapping[str, Tensor]) -> list[Row]:
    """columns: ``(R)`` each. A row for each run; what is not finite is None, as JSON has no word for it."""
    table = torch.stack([column.to(torch.float64).reshape(-1) for column in columns.values()], -1).tolist()
    return [dict(zip(columns, map(known, row), strict=True)) for row in table]


def known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def clean(row: Mapping[str, Any]) -> Row:
    """The row with what JSON has no word for (infinities, NaN) as None."""
    return {key: known(value) if isinstance(value, float) else value for key, value in row.items()}


class Thinned:
    """Theta over time: at most ``most`` snapshots, every second one dropped whenever they are too many."""

    def __init__(self, most: int = 128) -> None:
        self.most, self.stride = most, 1
        self.updates: list[int] = []
        self.snapshots: list[Tensor] = []
        self.offered = 0

    def offer(self, update: int, theta: Tensor) -> None:
        """theta: ``(R, d)``; kept as float32 on the CPU."""
        if self.offered % self.stride == 0:
            self.updates.append(update)
            self.snapshots.append(theta.detach().to("cpu", torch.float32, copy=True))
        self.offered += 1
        if len(self.updates) > self.most:
            self.updates, self.snapshots, self.stride = self.updates[::2], self.snapshots[::2], 2 * self.stride

    def table(self, run: int) -> dict[str, Tensor]:
        """Of one run: ``theta`` ``(snapshots, d)`` float32 and ``updates`` ``(snapshots)`` int64."""
        snapshots = [snapshot[run] for snapshot in self.snapshots]
        theta = torch.stack(snapshots) if snapshots else torch.empty(0, 0)
        return {"theta": theta, "updates": torch.tensor(self.updates, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        table = torch.stack(self.snapshots) if self.snapshots else torch.empty(0, 0, 0)
        return {"stride": self.stride, "updates": self.updates, "offered": self.offered, "table": table}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stride, self.updates, self.offered = state["stride"], list(state["updates"]), state["offered"]
        self.snapshots = list(state["table"].unbind()) if self.updates else []
