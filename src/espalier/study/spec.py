"""What a study runs: one run's own setting, what all settings have in common, and those of unit selection."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from espalier.space import BadInput

if TYPE_CHECKING:
    from espalier.study.subject import Plan

METHODS = ("search", "fixed", "dropout")
PENALTIES = (2**-6, 2**-7, 2**-8, 2**-9, 0.0, -(2**-3), -1.0)
SIZES = (0.066, 0.13, 0.261, 0.578, 0.777, 1.0)  # where the paper's Table 1 has its search, and one between
PAIR = 2  # masks compared in the paper; what "epochs" and "batch_size" are given for


@dataclass(frozen=True)
class RunSpec:
    """One run. method: "search" under a penalty, "dropout" at a rate, or with a given mask of this size: "fixed", a
    share of the units of each layer; "random", a share of the weights; "full", all of it."""

    method: str
    variant: str
    seed: int
    penalty: float | None = None
    size: float | None = None
    rate: float | None = None

    @property
    def setting(self) -> str:
        """The run's own setting, for file names and messages."""
        if self.penalty is not None:
            return f"penalty_{self.penalty}"
        return f"share_{self.size}" if self.size is not None else f"rate_{self.rate}"

    def describe(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Settings:
    """The paper's settings by default; fields that shrink or vary the study are the command's flags.

    hidden: units of each hidden layer, None for three layers as wide as the input. sizes: shares of the units of every
    layer in fixed networks. epochs, batch_size: of the search with two masks; every method makes
    ``epochs * examples // batch_size`` updates of ``2 * batch_size`` examples (with more masks each reads fewer).
    settle: share of the run, at its end, under the structure found. cost: "units" (the paper's) or "weights".
    adaptive: the step size of theta adapts itself (ASNG). permuted: the control, losses shuffled before ranking.
    held_out: so many training images stand in for the test set, which is then not touched; 0 reports on the test set.
    """

    dataset: str = "mnist"
    methods: tuple[str, ...] = METHODS
    penalties: tuple[float, ...] = PENALTIES
    sizes: tuple[float, ...] = SIZES
    dropout: float = 0.5
    trials: int = 5
    first_seed: int = 0
    epochs: int = 500
    batch_size: int = 32
    samples: int = 2
    hidden: tuple[int, ...] | None = None
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    theta_rate: float | None = None
    initial: float = 0.5
    settle: float = 0.0
    cost: str = "units"
    adaptive: bool = False
    permuted: bool = False
    held_out: int = 0
    points: int = 20
    precision: str = "float32"

    def __post_init__(self) -> None:
        check(self, METHODS, ("units", "weights"), ("methods", "penalties", "sizes"))
        check_penalties(self.penalties)
        if bad := [s for s in self.sizes if not 0 < s <= 1]:
            raise BadInput(f"a size is a share of the units in (0, 1], not {bad[0]}")
        if not 0 < self.dropout < 1:
            raise BadInput(f"dropout is a rate in (0, 1), not {self.dropout}")
        if self.hidden is not None and (not self.hidden or min(self.hidden) < 1):
            raise BadInput(f"hidden layers have at least one unit each, not {self.hidden}")

    pad = 0

    @property
    def variant(self) -> str:
        """The name of this form of the search: "search" is the paper's, what differs is added."""
        return variant(self, "units")

    @property
    def evaluated_on(self) -> str:
        return evaluated_on(self)

    @property
    def folder(self) -> str:
        """Runs on other data, or of another length, are kept apart."""
        return folder(self)

    def updates(self, examples: int) -> int:
        return self.epochs * examples // self.batch_size

    def describe(self, method: str) -> dict[str, Any]:
        """What a run of this method depends on, JSON-able: equal for runs that may stand in one table."""
        return describe(self, method)

    def runs(self, method: str) -> list[RunSpec]:
        """The runs of one method: every setting with every seed, settings outermost."""
        seeds = range(self.first_seed, self.first_seed + self.trials)
        match method:
            case "search":
                return [RunSpec(method, self.variant, s, penalty=p) for p in self.penalties for s in seeds]
            case "fixed":
                return [RunSpec(method, method, s, size=size) for size in self.sizes for s in seeds]
        return [RunSpec(method, method, s, rate=self.dropout) for s in seeds]


def check(plan: Plan, methods: tuple[str, ...], costs: tuple[str, ...], lists: tuple[str, ...]) -> None:
    """What holds for the settings of every experiment. lists: fields of which no value may come twice."""
    for name in lists:
        values = getattr(plan, name)
        if not values:
            raise BadInput(f"{name} is empty, so there is nothing to run")
        if len(set(values)) != len(values):
            raise BadInput(f"{name} holds a value twice: {', '.join(map(str, values))}")
    if unknown := [m for m in plan.methods if m not in methods]:
        raise BadInput(f"unknown method {unknown[0]!r}; methods are {', '.join(methods)}")
    for name, least in (("trials", 1), ("epochs", 1), ("batch_size", 1), ("points", 1), ("first_seed", 0)):
        if getattr(plan, name) < least:
            raise BadInput(f"{name} is at least {least}, not {getattr(plan, name)}")
    if plan.held_out < 0:
        raise BadInput(f"held_out is a number of images, at least 0, not {plan.held_out}")
    if plan.samples < 2 or (PAIR * plan.batch_size) % plan.samples:
        raise BadInput(
            f"samples={plan.samples} masks share {PAIR * plan.batch_size} examples equally in an update; "
            "give a divisor of that of at least 2"
        )
    if not 0 <= plan.settle < 1:
        raise BadInput(f"settle is a share of the run in [0, 1), not {plan.settle}")
    if plan.cost not in costs:
        raise BadInput(f"cost is {' or '.join(map(repr, costs))}, not {plan.cost!r}")


def check_penalties(penalties: tuple[float, ...]) -> None:
    if bad := [p for p in penalties if not math.isfinite(p)]:
        raise BadInput(f"a penalty is a finite number, not {bad[0]}")


def variant(plan: Plan, cost: str) -> str:
    """The name of a form of the search: "search" is the paper's, with this cost; what differs is added."""
    parts = ["search"]
    if plan.settle:
        parts.append(f"settle_{plan.settle:g}")
    if plan.cost != cost:
        parts.append(f"cost_{plan.cost}")
    if plan.adaptive:
        parts.append("adaptive")
    if plan.samples != PAIR:
        parts.append(f"samples_{plan.samples}")
    if plan.theta_rate is not None:
        parts.append(f"theta_{plan.theta_rate:g}")
    if plan.permuted:
        parts.append("permuted")
    return "+".join(parts)


def evaluated_on(plan: Plan) -> str:
    return f"{plan.held_out} held-out training images" if plan.held_out else "test set"


def folder(plan: Plan) -> str:
    held = "-held_out" if plan.held_out else ""
    return f"{plan.dataset}{held}-{plan.epochs}_epochs"


def describe(plan: Plan, method: str) -> dict[str, Any]:
    """What a run of this method depends on, JSON-able: equal for runs that may stand in one table."""
    shared = ("dataset", "epochs", "batch_size", "learning_rate", "momentum", "weight_decay")
    shown: dict[str, Any] = {name: getattr(plan, name) for name in (*shared, "held_out", "points", "precision")}
    if method == "search":
        own = ("samples", "theta_rate", "initial", "settle", "cost", "adaptive", "permuted")
        shown |= {name: getattr(plan, name) for name in own}
    return shown
