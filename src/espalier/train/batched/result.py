"""What each run of a sweep gives: the compact model, its mask, theta, and the history of how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from espalier.space import Space
from espalier.train.batched.measure import Row
from espalier.train.batched.runs import Run


@dataclass(frozen=True, eq=False)
class SweepResult:
    """model: compact, in eval mode, on the CPU. mask: ``(d)`` float32, canonical, what the model was cut to.
    theta: ``(d)`` float64, None where masks were given. history: one row for each epoch.

    finished: False where a time limit stopped the sweep: the model is what would ship now, and the same call goes on.
    share_before: share of the cost that the most probable mask keeps; share_after: the mask that ships.
    shares: of gates, weights and cost that the canonical mask keeps. validation_loss, validation_error: of the compact
    model. diverged: the first update without a finite loss, or None. skipped: updates at which the weights stayed.
    """

    run: Run
    model: nn.Module
    mask: Tensor
    theta: Tensor | None
    history: list[Row]
    finished: bool
    share_before: float | None
    share_after: float | None
    shares: dict[str, float | None]
    validation_loss: float | None
    validation_error: float | None
    penalty: float | None
    updates: int
    seconds: float
    diverged: int | None
    skipped: int
    space: Space = field(repr=False)

    @property
    def target(self) -> float | None:
        return self.run.target

    def summary(self) -> dict[str, Any]:
        """The result as JSON-able numbers, for ``result.json``."""
        kept = {
            name: [int(self.mask[where].sum()), where.stop - where.start] for name, where in self.space.slices.items()
        }
        return {
            "finished": self.finished,
            "target": self.target,
            "share_before": self.share_before,
            "share_after": self.share_after,
            **self.shares,
            "penalty": self.penalty,
            "validation_loss": self.validation_loss,
            "validation_error": self.validation_error,
            "kept": kept,
            "updates": self.updates,
            "seconds": round(self.seconds, 3),
            "diverged": self.diverged,
            "skipped": self.skipped,
        }
