"""What is known of each run at the end of an epoch: one row of numbers for each, read from the device at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search import Search
from espalier.space import Space
from espalier.train.batched.batch import Batch
from espalier.train.batched.feed import HeldOut
from espalier.train.batched.stack import Gated

Row = dict[str, Any]


class Measure:
    """Turns the state of a batch into rows, with the names that the rows of :func:`espalier.fit` have.

    search: None where masks are given; cost: what is searched against, or would be.
    """

    def __init__(
        self, gated: Gated, batch: Batch, search: Search | None, cost: Cost, validation: HeldOut | None
    ) -> None:
        self.batch, self.search, self.validation = batch, search, validation
        self.costs = {"unit_share": gated.cost("units"), "weight_share": gated.cost("weights"), "cost_share": cost}
        ones = torch.ones(gated.space.d, device=batch.device)
        self.full = {name: cost(ones) for name, cost in self.costs.items()}
        if search is not None:
            self.full["cost_share"] = search.full_cost

    def shares(self, masks: Tensor) -> dict[str, Tensor]:
        """masks ``(R, d)``. Shares of gates, weights and cost that they keep, ``(R)`` each; NaN of a full cost of 0."""
        return {name: cost(masks) / self.full[name] for name, cost in self.costs.items()}

    def rows(self, epoch: int, masks: Tensor, seconds: float) -> list[Row]:
        """masks ``(R, d)``: canonical, what would ship now. One row for each run."""
        loss, error = self.batch.read_sums()
        columns = {"loss": loss, "error": error} | self.shares(masks)
        if self.search is not None:
            columns |= structure(self.search)
        if self.validation is not None:
            held = self.validation
            loss, error = self.batch.evaluate(masks, held.inputs, held.targets, read=held.read)
            columns |= {"validation_loss": loss, "validation_error": error}
        columns["learning_rate"] = self.batch.learning_rates()
        table = torch.stack([column.to(torch.float64) for column in columns.values()], -1).tolist()
        settled = self.search is None or self.search.settled
        head: Row = {"epoch": epoch, "update": self.batch.done, "begun": self.batch.begun, "settled": settled}
        head["seconds"] = round(seconds, 3)
        return [head | {name: known(value) for name, value in zip(columns, row, strict=True)} for row in table]


def structure(search: Search) -> dict[str, Tensor]:
    """What theta says, ``(R)`` each."""
    expected = search.expected_cost()
    columns = {
        "selected_share": search.usage(),
        "expected_share": expected / search.full_cost,
        "expected_cost": expected,
        "penalty": search.penalty,
        "entropy": entropy(search.space, search.theta),
    }
    if search.target is not None:
        columns["distance_to_target"] = search.gap()
    return columns


def entropy(space: Space, theta: Tensor) -> Tensor:
    """The mean entropy of a variable in bits ``(R)``. theta: ``(R, d)``."""
    total: Tensor = torch.special.entr(theta).sum(-1)
    for _, where in space.bits:
        total = total + torch.special.entr(1 - theta[:, where]).sum(-1)
    return total / (math.log(2) * space.n)


def known(value: float) -> float | None:
    """JSON has no word for what is not a number."""
    return value if math.isfinite(value) else None
