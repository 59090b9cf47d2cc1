"""How every run of a sweep trains: what its runs have in common, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from torch import Tensor

from espalier.cost import Cost
from espalier.space import BadInput
from espalier.train.batched.optimizers import Optimizer
from espalier.train.batched.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """How every run of a sweep trains."""

    epochs: int
    batch_size: int
    samples: int
    loss: Callable[[Tensor, Tensor], Tensor]
    cost: str | Cost | Tensor
    optimizer: Optimizer
    schedule: Schedule
    search: Mapping[str, Any]
    settle: float
    pad: int

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("samples", 2), ("pad", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BadInput(f"{name} is an integer of at least {least}, not {value!r}")
        if not 0 <= self.settle < 1:
            raise BadInput(f"settle is a share of the run in [0, 1), not {self.settle!r}")
        known = {"learning_rate", "adaptive", "ramp", "initial", "margin"}
        if unknown := set(self.search) - known:
            raise BadInput(f"search holds {sorted(known)}, not {sorted(unknown)}")

    def describe(self) -> dict[str, Any]:
        """JSON-able, for the comparison of checkpoints."""
        shown: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size, "samples": self.samples}
        shown |= {
            "settle": self.settle,
            "pad": self.pad,
            "loss": getattr(self.loss, "__name__", type(self.loss).__name__),
        }
        shown["cost"] = self.cost if isinstance(self.cost, str) else "given"
        for name in ("optimizer", "schedule"):
            part = getattr(self, name)
            words = asdict(part) if is_dataclass(part) and not isinstance(part, type) else repr(part)
            shown[name] = {type(part).__name__: words}
        shown["search"] = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in self.search.items()}
        return shown
