"""What the unit-selection study runs: its settings, checked once, and the list of runs they stand for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from espalier.space import BadInput

METHODS = ("search", "fixed", "dropout")
PENALTIES = (2**-6, 2**-7, 2**-8, 2**-9, 0.0, -(2**-3), -1.0)
SIZES = (0.066, 0.13, 0.261, 0.578, 0.777, 1.0)  # where the paper's Table 1 has its search, and one between
PAIR = 2  # masks compared in the paper; what "epochs" and "batch_size" are given for


@dataclass(frozen=True)
class RunSpec:
    """One run. method: "search" under a penalty, "fixed" with a share of the units of each layer, or "dropout"."""

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
        for name in ("methods", "penalties", "sizes"):
            values = getattr(self, name)
            if not values:
                raise BadInput(f"{name} is empty, so there is nothing to run")
            if len(set(values)) != len(values):
                raise BadInput(f"{name} holds a value twice: {', '.join(map(str, values))}")
        if unknown := [m for m in self.methods if m not in METHODS]:
            raise BadInput(f"unknown method {unknown[0]!r}; methods are {', '.join(METHODS)}")
        if bad := [p for p in self.penalties if not math.isfinite(p)]:
            raise BadInput(f"a penalty is a finite number, not {bad[0]}")
        if bad := [s for s in self.sizes if not 0 < s <= 1]:
            raise BadInput(f"a size is a share of the units in (0, 1], not {bad[0]}")
        for name in ("trials", "epochs", "batch_size", "points"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is at least 1, not {getattr(self, name)}")
        if self.samples < 2 or (PAIR * self.batch_size) % self.samples:
            raise BadInput(
                f"samples={self.samples} masks share {PAIR * self.batch_size} examples equally in an update; "
                "give a divisor of that of at least 2"
            )
        if not 0 <= self.settle < 1:
            raise BadInput(f"settle is a share of the run in [0, 1), not {self.settle}")
        if not 0 < self.dropout < 1:
            raise BadInput(f"dropout is a rate in (0, 1), not {self.dropout}")
        if self.cost not in ("units", "weights"):
            raise BadInput(f"cost is 'units' or 'weights', not {self.cost!r}")
        if self.hidden is not None and (not self.hidden or min(self.hidden) < 1):
            raise BadInput(f"hidden layers have at least one unit each, not {self.hidden}")
        if self.first_seed < 0 or self.held_out < 0:
            raise BadInput(f"seeds and held_out are at least 0, not {self.first_seed} and {self.held_out}")

    @property
    def variant(self) -> str:
        """The name of this form of the search: "search" is the paper's, what differs is added."""
        parts = ["search"]
        if self.settle:
            parts.append(f"settle_{self.settle:g}")
        if self.cost != "units":
            parts.append(f"cost_{self.cost}")
        if self.adaptive:
            parts.append("adaptive")
        if self.samples != PAIR:
            parts.append(f"samples_{self.samples}")
        if self.theta_rate is not None:
            parts.append(f"theta_{self.theta_rate:g}")
        if self.permuted:
            parts.append("permuted")
        return "+".join(parts)

    @property
    def evaluated_on(self) -> str:
        return f"{self.held_out} held-out training images" if self.held_out else "test set"

    @property
    def folder(self) -> str:
        """Runs on other data, or of another length, are kept apart."""
        held = "-held_out" if self.held_out else ""
        return f"{self.dataset}{held}-{self.epochs}_epochs"

    def updates(self, examples: int) -> int:
        return self.epochs * examples // self.batch_size

    def describe(self, method: str) -> dict[str, Any]:
        """What a run of this method depends on, JSON-able: equal for runs that may stand in one table."""
        shared = ("dataset", "epochs", "batch_size", "learning_rate", "momentum", "weight_decay")
        shown: dict[str, Any] = {name: getattr(self, name) for name in (*shared, "held_out", "points", "precision")}
        if method == "search":
            own = ("samples", "theta_rate", "initial", "settle", "cost", "adaptive", "permuted")
            shown |= {name: getattr(self, name) for name in own}
        return shown

    def runs(self, method: str) -> list[RunSpec]:
        """The runs of one method: every setting with every seed, settings outermost."""
        seeds = range(self.first_seed, self.first_seed + self.trials)
        match method:
            case "search":
                return [RunSpec(method, self.variant, s, penalty=p) for p in self.penalties for s in seeds]
            case "fixed":
                return [RunSpec(method, method, s, size=size) for size in self.sizes for s in seeds]
        return [RunSpec(method, method, s, rate=self.dropout) for s in seeds]
