"""What the connection-selection study runs: its settings, checked once, and the list of runs they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from espalier.space import BadInput
from espalier.study import spec
from espalier.study.spec import RunSpec

METHODS = ("search", "random", "full")
PENALTIES = (2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 0.0, -(2**-3), -1.0)
SHARES = (0.16, 0.24, 0.42, 0.675, 0.80)  # where the paper's Table 2 has its search
STEPS = ("readable", "fast")


@dataclass(frozen=True)
class ConnectionSettings:
    """The paper's settings by default; fields that shrink or vary the study are the command's flags.

    layers: in each of the three blocks. shares: of the weights, of random selections. epochs, batch_size: of the search
    with two masks; every method makes ``epochs * examples // batch_size`` updates of ``2 * batch_size`` images (with
    more masks each reads fewer). pad: images are padded by so much, cropped back and mirrored at random. settle, cost,
    adaptive, permuted, held_out: as in unit selection; cost is "weights" (the paper's) or "macs". step: "readable", the
    network as it is defined, or "fast", the same function computed for many runs at once.
    """

    dataset: str = "cifar10"
    methods: tuple[str, ...] = METHODS
    penalties: tuple[float, ...] = PENALTIES
    shares: tuple[float, ...] = SHARES
    trials: int = 5
    first_seed: int = 0
    epochs: int = 300
    batch_size: int = 32
    samples: int = 2
    layers: int = 12
    growth: int = 12
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    pad: int = 4
    theta_rate: float | None = None
    initial: float = 0.5
    settle: float = 0.0
    cost: str = "weights"
    adaptive: bool = False
    permuted: bool = False
    held_out: int = 0
    points: int = 12
    precision: str = "float32"
    step: str = "readable"

    def __post_init__(self) -> None:
        spec.check(self, METHODS, ("weights", "macs"), ("methods", "penalties", "shares"))
        spec.check_penalties(self.penalties)
        if bad := [s for s in self.shares if not 0 < s < 1]:
            raise BadInput(f"a share of random selection is in (0, 1), not {bad[0]}; the whole network is 'full'")
        for name, least in (("layers", 1), ("growth", 1), ("pad", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is at least {least}, not {getattr(self, name)}")
        if self.step not in STEPS:
            raise BadInput(f"step is {' or '.join(map(repr, STEPS))}, not {self.step!r}")

    @property
    def depth(self) -> int:
        """Layers on the longest path: stem, three blocks, two transitions, classifier."""
        return 4 + 3 * self.layers

    @property
    def variant(self) -> str:
        return spec.variant(self, "weights")

    @property
    def evaluated_on(self) -> str:
        return spec.evaluated_on(self)

    @property
    def folder(self) -> str:
        """Runs on other data, of another length or of another network are kept apart."""
        usual = (self.layers, self.growth) == (12, 12)
        return spec.folder(self) + ("" if usual else f"-depth_{self.depth}-growth_{self.growth}")

    def updates(self, examples: int) -> int:
        return self.epochs * examples // self.batch_size

    def describe(self, method: str) -> dict[str, Any]:
        """What a run of this method depends on; not the step, which computes the same."""
        return spec.describe(self, method) | {"pad": self.pad}

    def runs(self, method: str) -> list[RunSpec]:
        """The runs of one method: every setting with every seed, settings outermost."""
        seeds = range(self.first_seed, self.first_seed + self.trials)
        match method:
            case "search":
                return [RunSpec(method, self.variant, s, penalty=p) for p in self.penalties for s in seeds]
            case "random":
                return [RunSpec(method, method, s, size=share) for share in self.shares for s in seeds]
        return [RunSpec(method, method, s, size=1.0) for s in seeds]
