"""What is known of each run at the end of an epoch: one row of numbers for each, read from the device at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search import Search
from espalier.train.batched.batch import Batch
from espalier.train.batched.stack import Gated


class Measure:
    """Turns the state of a batch into metrics. cost: what the search counts, None where masks are given."""

    def __init__(
        self, gated: Gated, batch: Batch, search: Search | None, validation: tuple[Tensor, Tensor] | None
    ) -> None:
        self.gated, self.batch, self.search, self.validation = gated, batch, search, validation
        self.units, self.weights = gated.cost("units"), gated.cost("weights")

    def share(self, cost: Cost, masks: Tensor) -> Tensor:
        return cost(masks) / cost(torch.ones_like(masks[:1]))

    def rows(self, epoch: int, masks: Tensor, seconds: float) -> list[dict[str, Any]]:
        """masks ``(R, d)``: canonical, what would ship now. One row for each run."""
        columns: dict[str, Tensor] = {
            "loss": self.batch.mean_loss(),
            "unit_share": self.share(self.units, masks),
            "weight_share": self.share(self.weights, masks),
        }
        if self.validation is not None:
            columns["validation_loss"], columns["error"] = self.batch.evaluate(masks, *self.validation)
        if self.search is not None:
            search, theta = self.search, self.search.theta
            columns["expected_cost"] = search.expected_cost() / search.full_cost
            columns["penalty"] = search.penalty
            columns["entropy"] = (torch.special.entr(theta) + torch.special.entr(1 - theta)).mean(-1) / math.log(2)
            if search.target is not None:
                columns["distance"] = search.expected_cost() / search.full_cost - search.target
        table = torch.stack([column.to(torch.float64) for column in columns.values()], -1).tolist()
        head = {"epoch": epoch, "updates": self.batch.done, "seconds": seconds}
        # JSON has no NaN: what is not known, or not a number, is None.
        return [head | {k: v if math.isfinite(v) else None for k, v in zip(columns, row, strict=True)} for row in table]
