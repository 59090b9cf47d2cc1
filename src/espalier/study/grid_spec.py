"""What a grid study runs: its settings, checked once, and the list of runs they stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from espalier.space import BadInput
from espalier.train.presets import PAPER, Recipe

METHODS = ("search", "scratch", "found", "permuted", "penalty")
TARGETS = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75)
PENALTIES = (2**-4, 2**-6, 2**-8)
BATCH_SIZE = 32
PAIR = 2  # masks; "epochs" and "batch_size" are given for so many, whatever `samples` is
COSTS = ("weights", "macs", "units", "parameters")


@dataclass(frozen=True)
class GridRun:
    """One run. units: the widths of the hidden layers of a network that is trained as it is, None for a search."""

    method: str
    seed: int
    fold: int | None = None
    target: float | None = None
    penalty: float | None = None
    units: tuple[int, ...] | None = None

    @property
    def searches(self) -> bool:
        return self.units is None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the runs of one study apart."""
        return self.method, self.fold, self.target, self.penalty, self.seed

    def describe(self) -> dict[str, Any]:
        words = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}
        return {"method": self.method, "variant": self.method} | words


@dataclass(frozen=True)
class GridSettings:
    """hidden: units of each hidden layer, None for three layers as wide as the input.

    methods: "search" with every target; "permuted", the same with its losses shuffled before they are ranked;
    "scratch", networks of equal layers with at most the search's target; "found", networks of the widths that the
    search found, from scratch; "penalty", the plain method with every penalty.
    epochs, batch_size: of a search with two masks. Every run of every method makes ``epochs * (examples //
    batch_size)`` updates, and each update takes the gradient of ``2 * batch_size`` examples: of the same mini-batch
    under each of the masks while masks are compared, of as many distinct examples under one mask otherwise.
    folds: cross-validation over all examples of the set; 0 for its own test part. held_out: for tuning, so many
    training examples (with folds: every fold of the training part in turn) stand in for the test part, which is not
    touched. trials: seeds first_seed, first_seed + 1, ..
    """

    dataset: str = "digits"
    methods: tuple[str, ...] = METHODS[:4]
    targets: tuple[float, ...] = TARGETS
    penalties: tuple[float, ...] = PENALTIES
    hidden: tuple[int, ...] | None = None
    trials: int = 5
    first_seed: int = 0
    folds: int = 0
    held_out: int = 0
    epochs: int = 20
    batch_size: int = BATCH_SIZE
    samples: int = 2
    cost: str = "weights"
    recipe: Recipe = field(default_factory=Recipe)
    points: int = 8
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("methods", "targets", "penalties"):
            values = getattr(self, name)
            if not values:
                raise BadInput(f"{name} is empty, so there is nothing to run")
            if len(set(values)) != len(values):
                raise BadInput(f"{name} holds a value twice: {', '.join(map(str, values))}")
        if unknown := [m for m in self.methods if m not in METHODS]:
            raise BadInput(f"unknown method {unknown[0]!r}; methods are {', '.join(METHODS)}")
        if "found" in self.methods and "search" not in self.methods:
            raise BadInput("'found' trains the networks that 'search' finds; give both methods")
        if bad := [t for t in self.targets if not 0 < t <= 1]:
            raise BadInput(f"a target is a share of the full cost in (0, 1], not {bad[0]}")
        if bad := [p for p in self.penalties if not math.isfinite(p)]:
            raise BadInput(f"a penalty is a finite number, not {bad[0]}")
        for name in ("trials", "epochs", "batch_size", "points"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is at least 1, not {getattr(self, name)}")
        for name in ("first_seed", "held_out", "folds"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} is at least 0, not {getattr(self, name)}")
        if self.folds == 1:
            raise BadInput("folds is at least 2, or 0 for the set's own test part")
        if self.samples < 2 or (PAIR * self.batch_size) % self.samples:
            raise BadInput(
                f"samples={self.samples} masks share {PAIR * self.batch_size} examples equally in an update; "
                "give a divisor of that of at least 2"
            )
        if self.cost not in COSTS:
            raise BadInput(f"cost is one of {', '.join(COSTS)}, not {self.cost!r}")
        if self.hidden is not None and (not self.hidden or min(self.hidden) < 1):
            raise BadInput(f"hidden layers have at least one unit each, not {self.hidden}")

    @property
    def folder(self) -> str:
        """Runs on other data, of another length, batch or rate of the weights are kept apart. The usual is unnamed."""
        held = "-held_out" if self.held_out else ""
        rate = "" if self.recipe.learning_rate == Recipe().learning_rate else f"-rate_{self.recipe.learning_rate:g}"
        batch = "" if self.batch_size == BATCH_SIZE else f"-batch_{self.batch_size}"
        return f"{self.dataset}{held}{rate}{batch}-{self.epochs}_epochs"

    @property
    def evaluated_on(self) -> str:
        if self.held_out:
            parts = f"{self.folds} folds of the training part" if self.folds else f"{self.held_out} training images"
            return f"held-out training images ({parts})"
        return f"{self.folds}-fold cross-validation" if self.folds else "test set"

    @property
    def parts(self) -> list[int | None]:
        """The folds, or one None."""
        return list(range(self.folds)) if self.folds else [None]

    def recipe_of(self, method: str) -> Recipe:
        """The plain method under a penalty is the paper's, with the weights' schedule of all the others."""
        own = self.recipe
        if method != "penalty":
            return own
        weights = {name: getattr(own, name) for name in ("learning_rate", "momentum", "weight_decay", "drops")}
        return Recipe(**(asdict(PAPER) | weights))

    def updates(self, examples: int) -> int:
        return self.epochs * (examples // self.batch_size)

    def describe(self, method: str) -> dict[str, Any]:
        """What a run of this method depends on, JSON-able: equal for runs that may stand in one table."""
        names = ("dataset", "epochs", "batch_size", "folds", "held_out", "points", "precision", "cost")
        shown: dict[str, Any] = {name: getattr(self, name) for name in names}
        recipe = asdict(self.recipe_of(method))
        weights = ("learning_rate", "momentum", "weight_decay", "drops")
        recipe["drops"] = None if recipe["drops"] is None else list(recipe["drops"])
        shown |= {name: recipe[name] for name in weights}
        if method not in ("scratch", "found"):
            shown |= {"samples": self.samples}
            shown |= {name: value for name, value in recipe.items() if name not in weights}
            if recipe["signal"] == "ranked":  # as all earlier runs were
                del shown["signal"]
            if not recipe["begin"]:  # without it there is nothing to begin earlier; and earlier runs are as good
                del shown["begin"], shown["ramp_updates"]
        return shown

    def runs(self, method: str, fold: int | None, found: Mapping[tuple[Any, ...], Sequence[int]]) -> list[GridRun]:
        """The runs of one method on one fold: every setting with every seed, settings outermost.

        found: the widths of hidden layers by key of the run of the search, for "found" and (by target) "scratch".
        """
        seeds = range(self.first_seed, self.first_seed + self.trials)
        if method == "penalty":
            return [GridRun(method, s, fold, penalty=p) for p in self.penalties for s in seeds]
        if method in ("search", "permuted"):
            return [GridRun(method, s, fold, target=t) for t in self.targets for s in seeds]
        runs = list[GridRun]()
        for target in self.targets:
            for seed in seeds:
                key = ("search", fold, target, None, seed) if method == "found" else (target,)
                if key in found:
                    runs.append(GridRun(method, seed, fold, target, units=tuple(found[key])))
        return runs


def even_widths(widths: Sequence[int], share: float, cost: str = "weights") -> tuple[int, ...]:
    """Hidden widths of the network of equal layers with at most this share of the full cost, topped up.

    widths: inputs, hidden layers, classes, of the full network. Where a further unit still fits it is added, to the
    last layers first, so that what is left of the budget by rounding is small; no two layers differ by more than one
    unit unless the full network's do. At least one unit in each layer.

    >>> even_widths((64, 64, 64, 64, 10), 0.06)
    (8, 9, 9)
    """
    inputs, *hidden, classes = widths
    limit = share * size(widths, cost) * (1 + 1e-9)

    def fits(units: Sequence[int]) -> bool:
        within = all(u <= most for u, most in zip(units, hidden))
        return within and size((inputs, *units, classes), cost) <= limit

    scale = max(hidden)
    units = [1] * len(hidden)
    for step in range(1, scale + 1):
        wider = [max(round(step * most / scale), 1) for most in hidden]
        if fits(wider):
            units = wider
    for i in reversed(range(len(units))):
        wider = [u + (i == k) for k, u in enumerate(units)]
        units = wider if fits(wider) else units
    return tuple(units)


def size(widths: Sequence[int], cost: str = "weights") -> int:
    """What a fully-connected network costs: its weights (as many multiplications), parameters or hidden units."""
    if cost == "units":
        return sum(widths[1:-1])
    weights = sum(a * b for a, b in pairwise(widths))
    return weights + sum(widths[1:]) if cost == "parameters" else weights
