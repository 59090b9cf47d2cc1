"""What the runs of a sweep are: a seed each, and where their masks come from."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.space import BadInput, BadType
from espalier.train import targets

Numbers = Sequence[float] | None


@dataclass(frozen=True, eq=False)
class Run:
    """One run. Its masks are searched for, under a penalty or towards a target, or given: ``mask`` ``(d)``.

    seed: of the initial weights and of the order of the data; runs of equal seed share both, so that settings are
    compared on equal terms. dropout: the rate at which gates of the given mask (all open, if there is none) are dropped
    for each example. permuted: the control, a search that is told its losses, or its slopes, in random order.
    learning_rate: of the weights before the schedule, None for the optimiser's.
    """

    seed: int = 0
    penalty: float | None = None
    target: Any = None  # a share, or what espalier.train.targets reads
    mask: Tensor | None = None
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
        for name in ("seed", "penalty", "target", "dropout", "learning_rate"):
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
        for name in ("penalty", "target", "dropout", "learning_rate"):
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
    asked = {
        name: value
        for name, value in (("penalties", penalties), ("targets", wanted), ("masks", masks), ("dropouts", dropouts))
        if value is not None
    }
    if runs is not None:
        if asked:
            raise BadInput(f"give either runs or {' and '.join(asked)}, not both")
        found = list(runs)
    else:
        if not asked:
            asked = {"penalties": [0.0]}
        lists: dict[str, object] = {**asked, "seeds": seeds}
        for name, given in lists.items():
            if isinstance(given, str) or not isinstance(given, (Sequence, Tensor, np.ndarray)):
                raise BadType(f"{name} is a list, as {name}=[{given!r}], not {type(given).__name__}")
        for name, values in asked.items():
            if not len(values):
                raise BadInput(f"{name} is empty, so there is nothing to run")
        names = {"penalties": "penalty", "targets": "target", "masks": "mask", "dropouts": "dropout"}
        found = [
            Run(seed=seed, **{names[name]: value})  # type: ignore[arg-type]
            for name, values in asked.items()
            for value in values
            for seed in seeds
        ]
    if not found:
        raise BadInput("there are no runs; give at least one seed")
    return found


def batches(runs: Sequence[Run], at_once: int | None) -> list[list[int]]:
    """Indices of runs of equal shape, at most so many together, in their order."""
    if at_once is not None and at_once < 1:
        raise BadInput(f"at_once is at least 1, not {at_once}")
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(run.shape, []).append(i)
    size = at_once or len(runs)
    return [group[a : a + size] for group in groups.values() for a in range(0, len(group), size)]
