"""The numbers a run needs beyond what the user gives, all in one place, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from espalier.search.arguments import real
from espalier.space import BadInput, BadType, Space
from espalier.train import pytree
from espalier.train.descent import SGD, Adam, AdamW, Linear, Schedule, Steps, fused
from espalier.train.pytree import Nested
from espalier.train.setting import near

FEWEST = 20  # updates of a ramp by slopes that begins with the run, as far as half of it has them


@dataclass(frozen=True)
class Phases:
    """The updates of a run. Before ``begin`` the whole network trains, from there on masks are compared and theta
    learns, and from ``settle`` to the ``end`` the weights train under what was found. ``ramp``: how many of those in
    between lead to the target."""

    begin: int
    ramp: int
    settle: int
    end: int

    @property
    def compared(self) -> range:
        """The updates whose masks share one mini-batch."""
        return range(self.begin, self.settle)


@dataclass(frozen=True)
class Recipe:
    """How structure and weights are trained. The defaults are those of ``fit``.

    theta_rate: theta's learning rate is at least this over the degrees of freedom; 1 is the paper's, which needs
        hundreds of updates per gate.
    theta_way: and at least this over the updates of the search: how far theta can go in the whole of it. In a short
        run a small rate would leave theta where it started, and the selection to chance.
    theta_cap: and never more than this.
    initial: theta at the start.
    begin: the share of the run, at its start, before the search begins: all gates are open and theta rests.
    adaptive: ASNG instead of a fixed rate (theta_rate is then its delta).
    signal: what theta learns from, "ranked" losses or "slopes" of the gates; see :class:`espalier.Search`.
    samples: masks per update. Losses are ranked among at least two; slopes are read under one, so that an update costs
        what a plain one costs.
    ramp: the share of the run over which the expected cost is led to the target.
    ramp_updates: and no fewer than so many updates, where the search can begin earlier for it.
    even: from which gates the ramp takes: 0 from each in proportion to its cost, 1 from all alike. By cost the layers
        that read most end as bottlenecks: what a gate costs is known exactly, what it is worth only from noise.
    settle: the share of the run, at its end, in which the structure is fixed. It begins as the ramp ends, while the
        weights' learning rate is still high, so that they can follow.
    weights_learning_rate, momentum, weight_decay: of SGD with Nesterov momentum, unless an optimizer is given.
    drops: the shares of the run after which that rate is divided by ten, unless an optimizer or scheduler is given.
        None: it falls in a straight line to 0, after a warm-up over the first twentieth of the run.

    How the defaults were found, and what they are worth: docs/recipe.md.
    """

    theta_rate: float = 1.0
    theta_way: float = 200.0
    theta_cap: float = 0.2
    initial: float = 0.95
    adaptive: bool = False
    signal: str = "ranked"
    samples: int = 2
    begin: float = 0.35
    ramp: float = 0.15
    ramp_updates: int = 2000
    even: float = 1.0
    settle: float = 0.5
    weights_learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4
    drops: tuple[float, ...] | None = (0.75, 0.9)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("adaptive", "signal", "drops"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise BadInput(f"{field.name} of a recipe is a finite number from 0 up, not {value!r}")
        if not 0 < self.ramp <= 1:
            raise BadInput(
                f"ramp of a recipe is a share of the run in (0, 1], not {self.ramp!r}: it ends inside the run"
            )
        for name in ("begin", "settle"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"{name} of a recipe is a share of the run in [0, 1), not {getattr(self, name)!r}")
        for name in ("initial", "even"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"{name} of a recipe is in [0, 1], not {getattr(self, name)!r}")
        if not all(0 < share < 1 for share in self.drops or ()):
            raise BadInput(f"drops of a recipe are shares of the run in (0, 1), not {self.drops!r}")

    def step_of_theta(self, space: Space, updates: int) -> float:
        """Theta's learning rate for a space and so many updates of search; the delta of ASNG where that is used."""
        if self.adaptive:
            return self.theta_rate
        rate = max(self.theta_rate / space.freedom, self.theta_way / max(updates, 1))
        return max(min(rate, self.theta_cap), min(self.theta_rate, 1.0) / space.freedom)

    def phases(self, updates: int, target: object) -> Phases:
        """Of a run of so many updates; without a target there is no ramp to wait for."""
        if self.begin + self.settle >= 1:
            raise BadInput(
                f"begin={self.begin:g} and settle={self.settle:g} of the run leave nothing of it to search in; "
                "give numbers whose sum is below 1"
            )
        if target is not None and self.begin + self.ramp + self.settle > 1 + 1e-9:
            before = f"the search begins at {self.begin:g} of the run, " if self.begin else ""
            room = 1 - self.begin - self.ramp
            less = f"settle of at most {room:g}, or " if room > 0 else ""
            sooner = " or that begins earlier" if self.begin else ""
            raise BadInput(
                f"{before}the ramp to the target takes {self.ramp:g} of the run and settle={self.settle:g} fixes the "
                f"structure before it ends; use {less}a recipe with a shorter ramp{sooner}"
            )
        earlier = min(max(self.ramp_updates / updates - self.ramp, 0.0), self.begin)
        begin = min(round((self.begin - earlier) * updates), updates - 1)
        # Slopes of a few updates are too noisy to choose by: a search that begins at once settles later for more.
        fewest = 1 if self.begin or self.signal == "ranked" else max(min(FEWEST, updates // 2), 1)
        ramp = min(max(round(min(self.ramp + earlier, 1.0) * updates), fewest), updates - begin)
        settle = updates - round(self.settle * updates)
        if target is not None:
            settle = max(settle, begin + ramp)  # halves are rounded to both sides
        return Phases(begin, ramp, max(settle, begin + 1), updates)

    def search_arguments(self, space: Space, phases: Phases, target: object = None) -> dict[str, Any]:
        """What :class:`espalier.Search` is given; target: a number, or one for each run, or None."""
        horizon = phases.end - phases.begin
        own: dict[str, Any] = {
            "learning_rate": self.step_of_theta(space, len(phases.compared)),
            "initial": self.initial,
            "adaptive": self.adaptive,
            "signal": self.signal,
            "even": self.even,
            "ramp": phases.ramp / horizon,
        }
        return own if target is None else own | {"target": target, "horizon": horizon}

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.SGD(
            parameters,
            lr=self.weights_learning_rate,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
            fused=fused(parameters),
        )

    @property
    def sgd(self) -> SGD:
        """The settings of that optimiser."""
        return SGD(self.weights_learning_rate, self.momentum, self.weight_decay, nesterov=self.momentum > 0)

    @property
    def schedule(self) -> Schedule:
        """Of the weights' learning rate."""
        return Linear() if self.drops is None else Steps(self.drops)


# The paper's own settings. With `samples=2` and `batch_size=32` they are its experiment A; B has a rate of 0.1.
PAPER = Recipe(
    theta_rate=1.0,
    theta_way=0.0,
    theta_cap=1.0,
    initial=0.5,
    begin=0.0,
    settle=0.0,
    ramp=0.5,
    even=0.0,
    weights_learning_rate=0.01,
    drops=(0.5, 0.75),
)

# Slopes tell every gate apart at every update, also with all of them open: masks need not be far from the whole
# network, and half of the run is left for what ships.
SLOPES = Recipe(
    signal="slopes",
    samples=1,
    initial=0.99,
    begin=0.1,
    ramp=0.4,
    ramp_updates=0,
    even=0.5,
    weights_learning_rate=0.1,
    weight_decay=5e-4,
    drops=None,
)

# For a network that is already trained: as above from the first update on, with smaller steps of the weights, to keep
# what they know. Slopes say at once what its gates are worth, so the ramp is short, and what is left of the run belongs
# to what ships.
FINETUNE = replace(SLOPES, begin=0.0, ramp=0.1, settle=0.9, weights_learning_rate=0.05)

PRESETS: dict[str, Recipe] = {"default": SLOPES, "ranked": Recipe(), "paper": PAPER, "finetune": FINETUNE}
"""The recipes known by name."""

# AdamW's rate over that of the recipe's SGD. Chosen on held-out data of many tasks; see docs/recipe.md.
OTHERS, NORMED = 0.1, 0.03
WORDS = ("LayerNorm", "RMSNorm", "Attention")  # layers of other libraries are known by their names

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def chosen(recipe: str | Recipe | None, settle: float | None, penalised: bool) -> Recipe:
    """The recipe of a call, with this share of the run settled.

    penalised: whether a run has a penalty. Its numbers are the paper's: they weigh cost against ranked losses.
    """
    if recipe is None and penalised:
        recipe = "ranked"
    return settled(read(recipe), settle)


def read(recipe: str | Recipe | None) -> Recipe:
    """A recipe by name, as it is, or the default."""
    if recipe is None:
        return PRESETS["default"]
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise BadType(f"recipe is a name or an espalier.train.Recipe, not {recipe!r}")
    if recipe not in PRESETS:
        raise BadInput(f"there is no recipe {recipe!r}, only {sorted(PRESETS)}{near(recipe, PRESETS)}")
    return PRESETS[recipe]


def settled(recipe: Recipe, share: float | None) -> Recipe:
    """The recipe with this share of the run settled instead of its own; what comes before is shortened to fit."""
    if share is None:
        return recipe
    if not 0 <= real(share, "settle", "a share of the run") < 1:
        raise BadInput(f"settle is a share of the run in [0, 1), not {share!r}: what is settled has been searched for")
    fits = min((1 - share) / (recipe.begin + recipe.ramp), 1.0)
    return replace(recipe, settle=share, begin=recipe.begin * fits, ramp=recipe.ramp * fits)


def ramped(recipe: Recipe, share: float) -> Recipe:
    """The recipe with this share of the run as its ramp instead of its own; where that does not fit between what comes
    before and what settles, the search begins earlier."""
    changed = replace(recipe, ramp=share)
    return replace(changed, begin=max(min(recipe.begin, 1 - recipe.settle - share), 0.0))


def usual_optimizer(recipe: Recipe, model: nn.Module, targets: Nested = None) -> Adam | None:
    """AdamW's settings for a run of these targets; None: the recipe's own SGD.

    SGD is for classes and networks without LayerNorm, attention or recurrent layers. A recipe with numbers of one's own
    for the weights, and the paper's, are taken as they are. targets: None where they are not known.
    """
    if not any(_numbers(recipe) == _numbers(known) for name, known in PRESETS.items() if name != "paper"):
        return None
    layers = list(model.modules())
    if any(any(word in type(layer).__name__ for word in WORDS) for layer in layers):
        return AdamW(round(NORMED * recipe.weights_learning_rate, 12))
    numbers = targets is not None and any(tensor.is_floating_point() for tensor in pytree.tensors(targets))
    if numbers or any(isinstance(layer, nn.RNNBase) for layer in layers):
        return AdamW(round(OTHERS * recipe.weights_learning_rate, 12))
    return None


def _numbers(recipe: Recipe) -> tuple[object, ...]:
    return recipe.weights_learning_rate, recipe.momentum, recipe.weight_decay, recipe.drops
