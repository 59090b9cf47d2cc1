"""The learning rate of the weights over a run: a factor computed from the update counter where the counter lives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from espalier.space import BadInput


@runtime_checkable
class Schedule(Protocol):
    """A learning rate over a run, as a factor of the first one."""

    def factor(self, done: Tensor, total: int) -> Tensor:
        """done: updates done so far, a scalar int64 tensor. Returns the factor of the next update, float64."""
        ...


@dataclass(frozen=True)
class Steps:
    """Divided by ``by`` at each of these shares of the run; the paper's schedule by default.

    >>> Steps().factor(torch.tensor(500), 1000).item()
    0.1
    """

    at: tuple[float, ...] = (0.5, 0.75)
    by: float = 10.0

    def __post_init__(self) -> None:
        if not all(0 < share < 1 for share in self.at):
            raise BadInput(f"the learning rate drops at shares of the run in (0, 1), not at {self.at!r}")
        if not self.by > 0:
            raise BadInput(f"the learning rate is divided by a positive number, not by {self.by!r}")

    def factor(self, done: Tensor, total: int) -> Tensor:
        factor = torch.ones((), dtype=torch.float64, device=done.device)
        for drops, share in enumerate(sorted(self.at), start=1):
            factor = torch.where(done >= share * total, self.by**-drops, factor)
        return factor


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to ``end``.

    >>> round(Cosine().factor(torch.tensor(500), 1000).item(), 6)
    0.5
    """

    end: float = 0.0

    def factor(self, done: Tensor, total: int) -> Tensor:
        return self.end + (1 - self.end) * 0.5 * (1 + torch.cos(done.to(torch.float64) * (math.pi / total)))


@dataclass(frozen=True)
class Linear:
    """Up in a straight line over the first ``warm`` of the run, then down in one to 0.

    >>> Linear().factor(torch.tensor(525), 1000).item()
    0.5
    """

    warm: float = 0.05

    def factor(self, done: Tensor, total: int) -> Tensor:
        first, update = max(round(self.warm * total), 1), done.to(torch.float64)
        return torch.minimum((update + 1) / (first + 1), (total - update) / max(total - first, 1)).clamp(max=1.0)


@dataclass(frozen=True)
class Constant:
    """The same throughout."""

    def factor(self, done: Tensor, total: int) -> Tensor:
        return torch.ones((), dtype=torch.float64, device=done.device)


NAMED: dict[str, Schedule] = {"steps": Steps(), "cosine": Cosine(), "linear": Linear(), "constant": Constant()}


def read(schedule: str | Schedule | None, usual: Schedule, optimizer: object) -> Schedule:
    """A schedule by name, or as it is. None: the usual one, but for an optimizer that is a function: torch's, and what
    is registered on it, may move its rate by itself."""
    if schedule is None:
        return usual if optimizer is None or hasattr(optimizer, "pace") else Constant()
    named = NAMED.get(schedule) if isinstance(schedule, str) else schedule
    if isinstance(named, type) or not isinstance(named, Schedule):
        raise BadInput(f"schedule is one of {sorted(NAMED)} or an object with `factor`, not {schedule!r}")
    return named


def of_torch(
    schedule: Schedule, optimizer: torch.optim.Optimizer, updates: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """A torch scheduler, to be stepped after every update of a run of so many."""
    if isinstance(schedule, Steps):
        milestones = [math.ceil(share * updates) for share in schedule.at]
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=1 / schedule.by)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: float(schedule.factor(torch.tensor(min(update, updates)), updates))
    )
