"""What a run gives: the compact model, its mask, theta, and the history of how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from espalier.search import Search
from espalier.train.metrics import Row
from espalier.train.score import Score
from espalier.train.step import Gated


@dataclass(frozen=True, eq=False)
class Result:
    """model: compact, in eval mode, on the device it was trained on. mask: ``(d)`` float32, canonical, what the model
    was cut to. theta: ``(d)`` float64. history: one row for each epoch.

    finished: False where a time limit stopped the run: the model is what would ship now, and the same call goes on.
    target: the share of the full cost that was asked for, if one was. share_before: of the most probable mask, before
    the selection; share_after: of the mask that ships.
    shares: of gates, weights and cost that the canonical mask keeps. validation: of the compact model.
    search: the search as it ended. gated: the gates, where ``fit`` was given them; those it attached by itself it has
    taken off again.
    """

    model: nn.Module
    mask: Tensor
    theta: Tensor
    history: list[Row]
    finished: bool
    target: float | None
    share_before: float
    share_after: float
    shares: dict[str, float | None]
    validation: Score | None
    updates: int
    seconds: float
    search: Search = field(repr=False)
    gated: Gated | None = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """The result as JSON-able numbers, for ``result.json``."""
        groups = {
            name: [int(self.mask[where].sum()), where.stop - where.start]
            for name, where in self.search.space.slices.items()
        }
        return {
            "finished": self.finished,
            "target": self.target,
            "share_before": self.share_before,
            "share_after": self.share_after,
            **self.shares,
            "penalty": float(self.search.penalty),
            "validation_loss": None if self.validation is None else self.validation.loss,
            "validation_error": None if self.validation is None else self.validation.error,
            "kept": groups,
            "updates": self.updates,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        wanted = "" if self.target is None else f"target {self.target:.2%} of the cost, "
        weights = self.shares["weight_share"]
        text = f"{wanted}reached {self.share_before:.2%} before the selection and {self.share_after:.2%} after it"
        if weights is not None:
            text += f"; {weights:.2%} of the weights are kept"
        if self.validation is not None and self.validation.error is not None:
            text += f", validation error {self.validation.error:.2%}"
        if not bool(self.mask.any()):
            text += ". No gate is left: nothing leads from inputs to outputs; use a larger target, or train longer"
        return text
