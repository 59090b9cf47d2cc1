"""How every run of a sweep trains: what its runs have in common, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from espalier.cost import Cost
from espalier.search.signal import SLOPES
from espalier.space import BadInput, Space
from espalier.train import checks, fingerprint
from espalier.train.batched.optimizers import SGD, Optimizer
from espalier.train.batched.step import Own
from espalier.train.recipes import Phases, Recipe
from espalier.train.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """optimizer, schedule: None for the recipe's. search: arguments of :class:`espalier.Search` that replace the
    recipe's. updates: of each run; None for those of its epochs. points: so many measurements, evenly spaced; None for
    one after every epoch. calibrate: examples that BatchNorm's statistics are estimated on in the middle of a run.
    gradient: how the network computes its own. check: try out every gate. how: more for ``attach``. seeded_by:
    JSON-able, what the seed of the masks is made of. metrics: by name, of the validation.
    """

    epochs: int
    batch_size: int
    samples: int
    loss: Callable[[Tensor, Tensor], Tensor]
    cost: str | Cost | Tensor | Callable[[Any], Cost]  # a function is given the gated model
    recipe: Recipe
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    search: Mapping[str, Any] | None = None
    pad: int = 0
    updates: int | None = None
    points: int | None = None
    calibrate: int = 1024
    gradient: Own | None = None
    check: bool = True
    how: Mapping[str, Any] = field(default_factory=dict)
    seeded_by: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fewest = 1 if self.recipe.signal in SLOPES else 2  # losses are compared with each other, slopes are not
        counts = (("epochs", 1), ("batch_size", 1), ("samples", fewest), ("pad", 0), ("points", 1))
        for name, least in counts:
            value = getattr(self, name)
            if name == "points" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BadInput(f"{name} is an integer of at least {least}, not {value!r}")
            if value >= 1 << 31 or (name == "points" and value > 1 << 20):
                raise BadInput(f"{name} is {value}, more than there can be; use a smaller number")
        checks.loss(self.loss)
        known = {"learning_rate", "adaptive", "ramp", "even", "initial", "margin"}
        if unknown := set(self.search or {}) - known:
            raise BadInput(f"search holds some of {sorted(known)}, not {sorted(unknown)}")

    @property
    def descent(self) -> Optimizer:
        recipe = self.recipe
        ready = SGD(recipe.weights_learning_rate, recipe.momentum, recipe.weight_decay, nesterov=recipe.momentum > 0)
        return self.optimizer or ready

    @property
    def rates(self) -> Schedule:
        return self.schedule or self.recipe.schedule

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
        for name, part in (("optimizer", self.descent), ("schedule", self.rates)):
            shown[name] = repr(part)
        shown["search"] = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in (self.search or {}).items()}
        return shown
