"""How weights descend: the optimisers of stacked tensors, and the learning rate over a run.

The optimisers are torch.optim's arithmetic, in place, with one learning rate for each run. A schedule is a factor,
computed from the update counter where the counter lives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from espalier.space import BadInput, BadType

Weight = float | Tensor
Each = Sequence[Tensor]  # one for each parameter, (R, ...)


def fused(parameters: Sequence[Tensor]) -> bool | None:
    """On a GPU: one kernel for all parameters, which also leaves them alone where it is told to."""
    return True if parameters and all(parameter.is_cuda for parameter in parameters) else None


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with (Nesterov) momentum and weight decay, as torch.optim.SGD computes it."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = True

    def __post_init__(self) -> None:
        _check(self.lr > 0, "lr", self.lr, "positive")
        _check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        if self.nesterov and not self.momentum:
            raise BadInput("nesterov needs a momentum above 0; give nesterov=False for plain descent")

    @property
    def slots(self) -> int:
        """How many tensors like the parameter each parameter is accompanied by; they start at 0, and the caller holds
        them."""
        return 1 if self.momentum else 0

    def torch(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """torch's own optimiser of these settings."""
        parameters = list(parameters)
        return torch.optim.SGD(parameters, **asdict(self), fused=fused(parameters))

    def pace(self, lr: Tensor, step: Tensor) -> Tensor:
        """What depends on the number of the step alone, ``(k, R)``. lr, step: ``(R)``; steps are counted from 1."""
        return lr.unsqueeze(0)

    def move(self, params: Each, grads: Each, slots: Sequence[Each], pace: Tensor, ok: Tensor | None) -> None:
        """Change params and slots in place; the gradients may be used up.

        params, grads: ``(R, ...)`` each; slots: one list like params for each slot; ok: ``(R)`` bool, the runs that
        move, None for all. A run that does not move may have any gradient, also NaN, and keeps its parameters and slots
        bit for bit.
        """
        rate = pace[0] if ok is None else torch.where(ok, pace[0], 0.0)
        for i, (p, g) in enumerate(zip(params, grads)):
            if self.weight_decay:
                g = g.add_(p, alpha=self.weight_decay)
            decay: Weight = self.momentum
            if ok is not None:
                g = torch.where(_like(ok, p), g, 0.0)
                decay = _either(ok, self.momentum, 1.0, p)
            if self.momentum:
                velocity = slots[0][i].mul_(decay).add_(g)
                g = g.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
            p.addcmul_(g, _like(rate, p), value=-1.0)


@dataclass(frozen=True)
class Adam:
    """Adam, as torch.optim.Adam computes it; ``decoupled=True`` decays the weights as torch.optim.AdamW does."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check(self.lr > 0, "lr", self.lr, "positive")
        _check(self.eps > 0, "eps", self.eps, "positive")
        _check(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "in [0, 1)")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")

    @property
    def slots(self) -> int:
        return 2

    def torch(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        parameters = list(parameters)
        return kind(parameters, self.lr, self.betas, self.eps, self.weight_decay, fused=fused(parameters))

    def pace(self, lr: Tensor, step: Tensor) -> Tensor:
        """Learning rate and root of the second moment, each with its bias correction; between them the decay."""
        first, second = ((1 - beta ** step.to(torch.float64)).to(lr.dtype) for beta in self.betas)
        return torch.stack([lr / first, 1 - lr * self.weight_decay, second.rsqrt()])

    def move(self, params: Each, grads: Each, slots: Sequence[Each], pace: Tensor, ok: Tensor | None) -> None:
        rate, decay, grow = pace
        if ok is not None:
            rate, decay = torch.where(ok, rate, 0.0), torch.where(ok, decay, 1.0)
        for p, g, mean, square in zip(params, grads, *slots):
            if self.weight_decay and not self.decoupled:
                g = g.add_(p, alpha=self.weight_decay)
            weights: list[Weight] = [1 - b for b in self.betas]
            if ok is not None:
                g = torch.where(_like(ok, p), g, 0.0)
                weights = [_either(ok, 1 - b, 0.0, p) for b in self.betas]
            if self.decoupled and self.weight_decay:
                p.mul_(_like(decay, p))
            mean.lerp_(g, weights[0])
            square.lerp_(g * g, weights[1])
            spread = (square.sqrt() * _like(grow, p)).add_(self.eps)
            p.addcmul_(mean / spread, _like(rate, p), value=-1.0)


Optimizer = SGD | Adam


def AdamW(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> Adam:
    """Adam with decoupled weight decay."""
    return Adam(lr, betas, eps, weight_decay, decoupled=True)


def read_optimizer(given: object) -> Optimizer:
    """Settings as they are, or those of the torch optimiser that a function gives of parameters."""
    if isinstance(given, Optimizer):
        return given
    example = "such as SGD(lr=0.1) of espalier.train.batched, or lambda p: torch.optim.AdamW(p, lr=1e-3)"
    if isinstance(given, torch.optim.Optimizer) or not callable(given):
        raise BadType(f"optimizer is settings, or a function that is given the parameters, {example}, not {given!r}")
    theirs = given([torch.zeros(1, requires_grad=True)])
    if type(theirs) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise BadInput(f"a sweep moves many runs at once, by SGD, Adam or AdamW, not by {type(theirs).__name__}")
    numbers = theirs.param_groups[0]
    if numbers.get("maximize") or numbers.get("amsgrad") or numbers.get("dampening"):
        raise BadInput("a sweep knows no maximize, amsgrad or dampening of an optimizer")
    if isinstance(theirs, torch.optim.SGD):
        return SGD(numbers["lr"], numbers["momentum"], numbers["weight_decay"], numbers["nesterov"])
    decoupled = isinstance(theirs, torch.optim.AdamW)
    return Adam(numbers["lr"], numbers["betas"], numbers["eps"], numbers["weight_decay"], decoupled)


def _like(per_run: Tensor, p: Tensor) -> Tensor:
    """``(R)`` shaped to broadcast over ``(R, ...)``."""
    return per_run.view(-1, *[1] * (p.ndim - 1))


def _either(ok: Tensor, moves: float, stays: float, p: Tensor) -> Tensor:
    """One number for the runs that move and one for the others, in the precision of p: plain ones would be float32."""
    there = torch.full((), moves, dtype=p.dtype, device=p.device)
    return _like(torch.where(ok, there, torch.full_like(there, stays)), p)


def _check(holds: bool, name: str, value: object, range_: str) -> None:
    if not holds:
        raise BadInput(f"{name} of an optimizer is {range_}, not {value!r}")


# ---- the learning rate over a run ------------------------------------------------------------------------------------


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


def read_schedule(schedule: str | Schedule | None, usual: Schedule, optimizer: object) -> Schedule:
    """A schedule by name, or as it is. None: the usual one, but for an optimizer that is a function: torch's, and what
    is registered on it, may move its rate by itself."""
    if schedule is None:
        return usual if optimizer is None or isinstance(optimizer, Optimizer) else Constant()
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


def follow(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Let groups that were added to the optimiser follow what :func:`of_torch` gave, too: they come with the rate that
    they would have had at the beginning of the run."""
    steps, by_function = torch.optim.lr_scheduler.MultiStepLR, torch.optim.lr_scheduler.LambdaLR
    if not isinstance(scheduler, (steps, by_function)):
        return
    first, *others = scheduler.optimizer.param_groups
    for group in others[len(scheduler.base_lrs) - 1 :]:
        scheduler.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        group["lr"] = group["initial_lr"] * (first["lr"] / first["initial_lr"])
        if isinstance(scheduler, by_function):
            scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
