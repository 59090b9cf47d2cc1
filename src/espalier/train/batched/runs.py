"""What a sweep is asked for: its runs, a seed each and where their masks come from, and what they have in common."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search.signal import SLOPES
from espalier.space import BadInput, BadType, Space, whole_number
from espalier.train import checks, fingerprint, targets
from espalier.train.batched.step import Gradient
from espalier.train.descent import Optimizer, Schedule
from espalier.train.recipes import Phases, Recipe

Numbers = Sequence[float] | None


@dataclass(frozen=True, eq=False)
class Run:
    """One run. Its masks are searched for, under a penalty or towards a target, or given: ``mask`` ``(d)``.

    found: the target of the search that found the given mask, for reports.
    seed: of the initial weights and of the order of the data; runs of equal seed share both, so that settings are
    compared on equal terms. dropout: the rate at which gates of the given mask (all open, if there is none) are dropped
    for each example. permuted: the control, a search that is told its losses, or its slopes, in random order.
    learning_rate: of the weights before the schedule, None for the optimiser's.
    """

    seed: int = 0
    penalty: float | None = None
    target: Any = None  # a share, or what espalier.train.targets reads
    mask: Tensor | None = None
    found: float | None = None
    dropout: float | None = None
    all_open: bool = False
    permuted: bool = False
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        kinds = {
            "penalty": self.penalty is not None,
            "target": self.target is not None,
            "mask or all_open": self.mask is not None or self.all_open,
        }
        for name in ("seed", "penalty", "target", "found", "dropout", "learning_rate"):
            value = getattr(self, name)
            if name == "target" and isinstance(value, (str, Mapping)):
                continue
            if value is not None and (isinstance(value, bool) or not _number(value)):
                raise BadType(f"{name} of a run is a number, not {value!r}")
            if value is not None and name != "seed" and not isinstance(value, (int, float)):
                object.__setattr__(self, name, float(value))  # of an array or a tensor, a plain number
        try:
            object.__setattr__(self, "seed", operator.index(self.seed))
        except TypeError:
            raise BadType(f"seed of a run is an integer, not {self.seed!r}") from None
        given = [name for name, there in kinds.items() if there]
        if len(given) > 1:
            raise BadInput(f"a run has one source of masks, not {' and '.join(given)}")
        if self.found is not None and self.mask is None:
            raise BadInput("found is of a run with a given mask")
        if self.dropout is not None:
            if not 0 <= self.dropout < 1:
                raise BadInput(f"dropout is a rate in [0, 1), not {self.dropout!r}")
            if self.penalty is not None or self.target is not None:
                raise BadInput("dropout is for runs with a given mask; a search draws masks of its own")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise BadInput(f"learning_rate of a run is positive, not {self.learning_rate!r}")
        if self.permuted and not self.searches:
            raise BadInput("permuted is a control for a search; this run has a given mask")

    @property
    def searches(self) -> bool:
        return self.mask is None and self.dropout is None and not self.all_open

    @property
    def shape(self) -> str:
        """Runs of equal shape can be one batch."""
        if not self.searches:
            return "given"
        if self.target is None:
            return "penalty"
        return " ".join(("target", *targets.kinds_of(self.target)))

    def describe(self) -> dict[str, Any]:
        """The run in JSON-able words."""
        words: dict[str, Any] = {"seed": self.seed}
        for name in ("penalty", "target", "found", "dropout", "learning_rate"):
            value = getattr(self, name)
            if value is not None:
                words[name] = value if isinstance(value, (str, Mapping)) else float(value)
        if self.mask is not None:
            words["mask"] = "".join("1" if bit else "0" for bit in self.mask.flatten().tolist())
        for name in ("all_open", "permuted"):
            if getattr(self, name):
                words[name] = True
        return words


def _number(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.ndim and value.dtype != torch.bool
    return isinstance(value, (int, float, np.number))


def listed(
    runs: Sequence[Run] | None,
    seeds: Sequence[int],
    penalties: Numbers,
    wanted: Sequence[Any] | None,
    masks: Sequence[Tensor] | Tensor | None,
    dropouts: Numbers,
) -> list[Run]:
    """The runs asked for: those given, or every setting with every seed, settings outermost."""
    names = {"penalties": "penalty", "targets": "target", "masks": "mask", "dropouts": "dropout"}
    lists: list[Any] = [penalties, wanted, masks, dropouts]
    asked = {name: values for name, values in zip(names, lists, strict=True) if values is not None}
    if runs is not None:
        if asked:
            raise BadInput(f"give either runs or {' and '.join(asked)}, not both")
        if not runs:
            raise BadInput("runs is empty, so there is nothing to run")
        return list(runs)
    asked = asked or {"penalties": [0.0]}
    for name, values in {**asked, "seeds": seeds}.items():
        if isinstance(values, str) or not isinstance(values, (Sequence, Tensor, np.ndarray)):
            raise BadType(f"{name} is a list, as {name}=[{values!r}], not {type(values).__name__}")
        if not len(values):
            raise BadInput(f"{name} is empty, so there is nothing to run")
    return [
        Run(seed=seed, **{names[name]: value}) for name, values in asked.items() for value in values for seed in seeds
    ]


def batches(runs: Sequence[Run], at_once: int | None) -> list[list[int]]:
    """Indices of runs of equal shape, at most so many together, in their order."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(run.shape, []).append(i)
    size = at_once or len(runs)
    return [group[a : a + size] for group in groups.values() for a in range(0, len(group), size)]


@dataclass(frozen=True)
class Plan:
    """How every run of a sweep trains: what its runs have in common, checked once.

    optimizer: None for what is usual. search: arguments of :class:`espalier.Search` that replace the recipe's. updates:
    of each run; None for those of its epochs. points: so many measurements, evenly spaced; None for one after every
    epoch. calibrate: examples that BatchNorm's statistics are estimated on in the middle of a run. gradient: how the
    network computes its own. how: more for ``attach``. seeded_by: JSON-able, what the seed of the masks is made of.
    metrics: by name, of the validation.
    """

    epochs: int
    batch_size: int
    samples: int
    loss: Callable[[Tensor, Tensor], Tensor]
    cost: str | Cost | Tensor
    recipe: Recipe
    schedule: Schedule
    optimizer: Optimizer | None = None
    search: Mapping[str, Any] | None = None
    pad: int = 0
    updates: int | None = None
    points: int | None = None
    calibrate: int = 1024
    gradient: Gradient | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    seeded_by: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fewest = 1 if self.recipe.signal in SLOPES else 2  # losses are compared with each other, slopes are not
        for name, least in (("epochs", 1), ("batch_size", 1), ("samples", fewest), ("pad", 0)):
            if whole_number(getattr(self, name), name, least) >= 1 << 31:
                raise BadInput(f"{name} is {getattr(self, name)}, more than there can be; use a smaller number")
        if self.points is not None and whole_number(self.points, "points", 1) > 1 << 20:
            raise BadInput(f"points is {self.points}, more than there can be; use a smaller number")
        checks.loss(self.loss)
        known = {"learning_rate", "adaptive", "ramp", "even", "initial", "margin"}
        if unknown := set(self.search or {}) - known:
            raise BadInput(f"search holds some of {sorted(known)}, not {sorted(unknown)}")

    def search_arguments(self, space: Space, phases: Phases, targets: Sequence[float | None] | None) -> dict[str, Any]:
        """targets: of the runs. A ramp that is given is in the recipe, as a share of the run."""
        given = {name: value for name, value in (self.search or {}).items() if name != "ramp"}
        return self.recipe.search_arguments(space, phases, targets) | {"samples": self.samples} | given

    def describe(self) -> dict[str, Any]:
        """JSON-able: what two calls are compared by before one goes on with the other's checkpoint."""
        shown: dict[str, Any] = {name: getattr(self, name) for name in ("epochs", "batch_size", "samples", "pad")}
        shown |= {} if self.points is None else {"points": self.points}
        shown["loss"] = fingerprint.function(self.loss)
        shown["cost"] = self.cost if isinstance(self.cost, str) else "given"
        shown["recipe"] = asdict(self.recipe)
        shown |= {"optimizer": repr(self.optimizer), "schedule": repr(self.schedule)}
        shown["search"] = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in (self.search or {}).items()}
        return shown
