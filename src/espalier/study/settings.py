"""The settings of the studies, each defined once, and the runs that they stand for.

What the three studies have in common is in :class:`StudySettings`, what the paper's two have in :class:`PaperSettings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from espalier.space import BadInput
from espalier.train.recipes import PAPER, SLOPES, Recipe
from espalier.train.setting import check, declared, setting, share

UNIT_METHODS = ("search", "fixed", "dropout")
CONNECTION_METHODS = ("search", "random", "full")
RECIPE = "recipe"  # the method that asks for a target instead of a penalty
GRID_METHODS = ("search", "scratch", "found", "permuted", "penalty")
COSTS = ("weights", "macs", "units", "parameters")
BATCH_SIZE = 32
WEIGHTS = ("weights_learning_rate", "momentum", "weight_decay", "drops")  # what a recipe says of the weights
KEY = ("method", "fold", "target", "penalty", "size", "rate", "seed")
PAIR = 2  # masks compared in the paper; what "epochs" and "batch_size" are given for, whatever `samples` is


@dataclass(frozen=True)
class RunSpec:
    """One run of a study. method: a search under a penalty or to a target; "dropout" at a rate; or with a given mask.
    size: of that: "fixed", a share of the units of each layer; "random", a share of the weights; "full", all of it.
    units: the widths of the hidden layers of a network that is trained as it is."""

    method: str
    variant: str
    seed: int
    fold: int | None = None
    target: float | None = None
    penalty: float | None = None
    size: float | None = None
    rate: float | None = None
    units: tuple[int, ...] | None = None

    @property
    def searches(self) -> bool:
        return self.size is None and self.rate is None and self.units is None

    @property
    def setting(self) -> str:
        """The run's own setting, for file names and messages."""
        words = {"target": self.target, "penalty": self.penalty, "share": self.size, "rate": self.rate}
        return next(f"{name}_{value}" for name, value in words.items() if value is not None)

    @property
    def label(self) -> str:
        """For messages: the method and what was asked for."""
        return f"{self.method} {self.setting.replace('_', ' ') if self.target is None else f'{self.target:.0%}'}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the runs of one study and variant apart."""
        return tuple(getattr(self, name) for name in KEY)

    def describe(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class StudySettings:
    """What every study has. study: its name in run files. epochs, batch_size: of the search with two masks, whatever
    the number of masks is."""

    study: ClassVar[str]
    sharing: ClassVar[tuple[tuple[str, ...], ...]]  # methods whose runs have one shape, and may be one batch
    dataset: str = setting("digits", "digits, mnist or fashion-mnist.", flag="data", old="dataset", recorded="always")
    methods: tuple[str, ...] = setting((), "What is run.")
    penalties: tuple[float, ...] = setting((), "For example 2^-6,0,-2^-3.")
    trials: int = setting(5, "Runs of each setting; trial k has the seed first-seed + k.", least=1)
    first_seed: int = setting(0, "Seed of the first trial.", least=0)
    epochs: int = setting(
        20, "Of the search; the others make as many updates of as many examples.", least=1, recorded="always"
    )
    batch_size: int = setting(
        BATCH_SIZE, "Of the search, under each of two masks; the others read twice as many.", least=1, recorded="always"
    )
    held_out: int = setting(
        0, "For tuning: so many training images stand in for the test set.", least=0, recorded="always"
    )
    points: int = setting(8, "Measurements over a run.", least=1, recorded="always")
    precision: str = setting(
        "float32", "float32, tf32 or bf16 matrix products; default: tf32 on cuda.", on_cuda="tf32", recorded="always"
    )
    samples: int = setting(
        PAIR, "Masks compared in one update, at equal examples per update; two or more.", least=2, recorded="search"
    )
    cost: str = setting("weights", "What is counted.", recorded="search")

    def __post_init__(self) -> None:
        for one in declared(type(self)):
            values = getattr(self, one.name)
            if not one.several or one.repeated or values is None:
                continue
            if not values and one.type is one.kind:
                raise BadInput(f"{one.name} is empty, so there is nothing to run")
            if one.type is one.kind and len(set(values)) != len(values):
                raise BadInput(f"{one.name} holds a value twice: {', '.join(map(str, values))}")
        check(self)
        if bad := [p for p in self.penalties if not math.isfinite(p)]:
            raise BadInput(f"a penalty is a finite number, not {bad[0]}")
        if (PAIR * self.batch_size) % self.samples:
            raise BadInput(
                f"samples={self.samples} masks share {PAIR * self.batch_size} examples equally in an update; "
                "give a divisor of that of at least 2"
            )

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.trials)

    @property
    def folder(self) -> str:
        """Runs on other data, or of another length, are kept apart."""
        return f"{self.dataset}{'-held_out' if self.held_out else ''}-{self.epochs}_epochs"

    @property
    def evaluated_on(self) -> str:
        return f"{self.held_out} held-out training images" if self.held_out else "test set"

    @property
    def parts(self) -> list[int | None]:
        """The folds, or one None."""
        return [None]

    def updates(self, examples: int) -> int:
        return self.epochs * examples // self.batch_size

    def variant_of(self, method: str) -> str:
        """The name of the form that a method has under these settings."""
        return method

    def asked(self, method: str) -> list[dict[str, Any]]:
        """What each setting of a method asks of its runs: a penalty, a target, a size or a rate."""
        return [{"penalty": penalty} for penalty in self.penalties]

    def runs(self, method: str, fold: int | None = None) -> list[RunSpec]:
        """The runs of one method on one fold: every setting with every seed, settings outermost."""
        variant = self.variant_of(method)
        return [RunSpec(method, variant, seed, fold, **one) for one in self.asked(method) for seed in self.seeds]

    def recorded(self, where: str) -> dict[str, Any]:
        """The settings that are recorded there: "always", or of a "search"."""
        return {one.name: getattr(self, one.name) for one in declared(type(self)) if one.recorded == where}


@dataclass(frozen=True)
class PaperSettings(StudySettings):
    """What the paper's two studies have in common.

    Every method makes ``epochs * examples // batch_size`` updates of ``2 * batch_size`` examples; with more masks than
    two each of them reads fewer. held_out: 0 reports on the test set, which is otherwise not touched.
    """

    learning_rate: float = setting(
        0.01, "Of the weights; a tenth at 1/2 and at 3/4 of the run.", least=0, after="batch_size", recorded="always"
    )
    momentum: float = setting(0.9, "Of SGD.", least=0, recorded="always")
    weight_decay: float = setting(1e-4, "Of SGD.", least=0, recorded="always")
    theta_rate: float | None = setting(None, "Learning rate of theta; default 1/d.", after="samples", recorded="search")
    initial: float = setting(0.5, "Theta at the start.", recorded="search")
    settle: float = setting(0.0, "The share of the run, at its end, under the structure found.", recorded="search")
    adaptive: bool = setting(False, "The step size of theta adapts itself (ASNG).", after="cost", recorded="search")
    permuted: bool = setting(False, "The control: losses shuffled before they are ranked.", recorded="search")

    pad = 0  # images are padded by so much, cropped back and mirrored at random; 0 leaves them as they are

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.settle < 1:
            raise BadInput(f"settle is a share of the run in [0, 1), not {self.settle}")

    def variant_of(self, method: str) -> str:
        """Of the search: "search" is the paper's, what differs is added."""
        if method != "search":
            return method
        differs = {
            f"settle_{self.settle:g}": self.settle,
            f"cost_{self.cost}": self.cost != type(self).cost,
            "adaptive": self.adaptive,
            f"samples_{self.samples}": self.samples != PAIR,
            f"theta_{self.theta_rate or 0:g}": self.theta_rate is not None,
            "permuted": self.permuted,
        }
        return "+".join(["search", *(name for name, it_does in differs.items() if it_does)])

    def describe(self, method: str) -> dict[str, Any]:
        """What a run of this method depends on, JSON-able: equal for runs that may stand in one table."""
        return self.recorded("always") | (self.recorded("search") if method == "search" else {})

    def recipe_of(self, method: str) -> Recipe:
        """How structure and weights are trained: the paper's way, with these settings in place of its own."""
        own = {name: getattr(self, name) for name in ("settle", "initial", "adaptive", "momentum", "weight_decay")}
        return replace(PAPER, weights_learning_rate=self.learning_rate, samples=self.samples, **own)


@dataclass(frozen=True)
class Settings(PaperSettings):
    """Of unit selection, the paper's by default."""

    study = "unit-selection"
    sharing = (("search",), ("fixed", "dropout"))
    dataset: str = "mnist"
    methods: tuple[str, ...] = setting(UNIT_METHODS, f"Some of {', '.join(UNIT_METHODS)}.", choices=UNIT_METHODS)
    penalties: tuple[float, ...] = (2**-6, 2**-7, 2**-8, 2**-9, 0.0, -(2**-3), -1.0)
    sizes: tuple[float, ...] = setting(  # where the paper's Table 1 has its search, and one between
        (0.066, 0.13, 0.261, 0.578, 0.777, 1.0), "Shares of the units of every layer, of fixed networks."
    )
    epochs: int = 500
    points: int = 20
    cost: str = setting(
        "units", "What the penalty counts: units (the paper's) or weights.", choices=("units", "weights")
    )
    hidden: tuple[int, ...] | None = setting(
        None, "Units of the hidden layers, as 784,784,784; default: three as wide as the input.", after="batch_size"
    )
    dropout: float = setting(0.5, "The rate of the dropout runs.", after="weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bad := [s for s in self.sizes if not 0 < s <= 1]:
            raise BadInput(f"a size is a share of the units in (0, 1], not {bad[0]}")
        if not 0 < self.dropout < 1:
            raise BadInput(f"dropout is a rate in (0, 1), not {self.dropout}")
        _check_hidden(self.hidden)

    def asked(self, method: str) -> list[dict[str, Any]]:
        rivals = {"fixed": [{"size": size} for size in self.sizes], "dropout": [{"rate": self.dropout}]}
        return rivals[method] if method in rivals else super().asked(method)


@dataclass(frozen=True)
class ConnectionSettings(PaperSettings):
    """Of connection selection, the paper's by default. step: "readable", the network as it is defined, or "fast", the
    same function computed for many runs at once; it is no part of the record.

    The method "recipe" is not the paper's: it searches for every target by the default recipe of :func:`espalier.fit`,
    with as many updates of as many examples as the others and with the recipe's own numbers for the weights.
    """

    study = "connection-selection"
    sharing = (("search",), (RECIPE,), ("random", "full"))
    dataset: str = setting("cifar10", "A set of images; the paper's is cifar10.")
    methods: tuple[str, ...] = setting(
        CONNECTION_METHODS,
        f"Some of {', '.join(CONNECTION_METHODS)}; and {RECIPE}: the default recipe of train.",
        choices=(*CONNECTION_METHODS, RECIPE),
    )
    penalties: tuple[float, ...] = (2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 0.0, -(2**-3), -1.0)
    shares: tuple[float, ...] = setting(  # where the paper's Table 2 has its search
        (0.16, 0.24, 0.42, 0.675, 0.80), "Of the weights, of random selections."
    )
    targets: tuple[float, ...] = setting(
        (0.25, 0.5), f"Shares of the cost, as 0.25,0.5, of the method {RECIPE!r}.", read=partial(share, name="a target")
    )
    epochs: int = 300
    points: int = 12
    precision: str = setting("float32", "float32, tf32 or bf16 matrix products; default: bf16 on cuda.", on_cuda="bf16")
    step: str = setting(
        "readable",
        "readable, or fast: the same for many runs at once; default: fast on cuda.",
        choices=("readable", "fast"),
        on_cuda="fast",
    )
    cost: str = setting(
        "weights", "What the penalty counts: weights (the paper's) or macs.", choices=("weights", "macs")
    )
    learning_rate: float = 0.1
    layers: int = setting(12, "Layers of each of the three blocks.", least=1, after="batch_size")
    growth: int = setting(12, "Channels that a layer adds.", least=1)
    pad: int = setting(
        4,
        "Images are padded by so much, cropped back and mirrored; 0: as they are.",
        least=0,
        after="weight_decay",
        recorded="always",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if bad := [s for s in self.shares if not 0 < s < 1]:
            raise BadInput(f"a share of random selection is in (0, 1), not {bad[0]}; the whole network is 'full'")
        if bad := [t for t in self.targets if not 0 < t <= 1]:
            raise BadInput(f"a target is a share of the full cost in (0, 1], not {bad[0]}")

    @property
    def depth(self) -> int:
        """Layers on the longest path: stem, three blocks, two transitions, classifier."""
        return 4 + 3 * self.layers

    @property
    def folder(self) -> str:
        """Runs on other data, of another length or of another network are kept apart."""
        usual = (self.layers, self.growth) == (12, 12)
        return super().folder + ("" if usual else f"-depth_{self.depth}-growth_{self.growth}")

    def recipe_of(self, method: str) -> Recipe:
        return SLOPES if method == RECIPE else super().recipe_of(method)

    def describe(self, method: str) -> dict[str, Any]:
        if method != RECIPE:
            return super().describe(method)
        own = asdict(self.recipe_of(method))
        weights = {"learning_rate": own["weights_learning_rate"]} | {k: own[k] for k in ("momentum", "weight_decay")}
        return self.recorded("always") | weights | {"cost": self.cost, "permuted": self.permuted, RECIPE: own}

    def variant_of(self, method: str) -> str:
        parts = [f"cost_{self.cost}"] * (self.cost != type(self).cost) + ["permuted"] * self.permuted
        return "+".join([method, *parts]) if method == RECIPE else super().variant_of(method)

    def asked(self, method: str) -> list[dict[str, Any]]:
        rivals = {"random": [{"size": share} for share in self.shares], "full": [{"size": 1.0}]}
        rivals[RECIPE] = [{"target": target} for target in self.targets]
        return rivals[method] if method in rivals else super().asked(method)


@dataclass(frozen=True)
class GridSettings(StudySettings):
    """Of a grid of runs at equal budget.

    methods: "search" with every target; "permuted", the same with its losses shuffled before they are ranked;
    "scratch", networks of equal layers with at most the search's target; "found", networks of the widths that the
    search found, from scratch; "penalty", the plain method with every penalty.
    epochs, batch_size: every run of every method makes ``epochs * (examples // batch_size)`` updates, and each update
    takes the gradient of ``2 * batch_size`` examples: of the same mini-batch under each of the masks while masks are
    compared, of as many distinct examples under one mask otherwise.
    """

    study = "grid"
    sharing = tuple((method,) for method in GRID_METHODS)
    permuted, theta_rate, pad = False, None, 0  # which the paper's studies have
    dataset: str = setting("digits", "A set by name; a file.npz with x, y; module:function, as to train.")
    model: str = setting(
        "mlp", "mlp, of the --hidden layers; cnn, densenet or your own, as to train: then without 'scratch'."
    )
    model_arg: tuple[str, ...] = setting(
        (), "An argument of your network, as width=64; may be repeated.", metavar="NAME=VALUE", repeated=True
    )
    methods: tuple[str, ...] = setting(GRID_METHODS[:4], f"Some of {', '.join(GRID_METHODS)}.", choices=GRID_METHODS)
    targets: tuple[float, ...] = setting(
        (0.03, 0.06, 0.12, 0.25, 0.5, 0.75),
        "Shares of the full cost to end at, as 0.1,0.3 or 10%,30%.",
        read=partial(share, name="a target"),
    )
    penalties: tuple[float, ...] = setting((2**-4, 2**-6, 2**-8), "Of the method 'penalty', for example 2^-6,0.")
    trials: int = setting(5, "Runs of each setting, on each fold.", flag="seeds")
    first_seed: int = setting(0, "The first seed.")
    batch_size: int = setting(BATCH_SIZE, "Examples under each of two masks; twice as many where there is one.")
    hidden: tuple[int, ...] | None = setting(
        None, "Units of the hidden layers, as 64,64,64; default: three as wide as the input.", old="widths"
    )
    folds: int = setting(
        0, "Cross-validation over all examples; 0: the set's own test part.", least=0, recorded="always"
    )
    held_out: int = setting(
        0, "For tuning: so many training examples stand in for the test part (with --folds: each fold of them)."
    )
    cost: str = setting(
        "weights", "What a target counts: weights, macs, units or parameters.", choices=COSTS, recorded="always"
    )
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "found" in self.methods and "search" not in self.methods:
            raise BadInput("'found' trains the networks that 'search' finds; give both methods")
        if bad := [t for t in self.targets if not 0 < t <= 1]:
            raise BadInput(f"a target is a share of the full cost in (0, 1], not {bad[0]}")
        if self.folds == 1:
            raise BadInput("folds is at least 2, or 0 for the set's own test part")
        _check_hidden(self.hidden)

    @property
    def folder(self) -> str:
        """Runs on other data, of another length, batch or rate of the weights are kept apart. The usual is unnamed."""
        held = "-held_out" if self.held_out else ""
        own = self.recipe.weights_learning_rate
        rate = "" if own == Recipe().weights_learning_rate else f"-rate_{own:g}"
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
        return list(range(self.folds)) if self.folds else super().parts

    def recipe_of(self, method: str) -> Recipe:
        """The plain method under a penalty is the paper's, with the weights' schedule of all the others."""
        own = self.recipe
        if method == "penalty":
            own = replace(PAPER, **{name: getattr(own, name) for name in WEIGHTS})
        return replace(own, samples=self.samples)

    def updates(self, examples: int) -> int:
        return self.epochs * (examples // self.batch_size)

    def describe(self, method: str) -> dict[str, Any]:
        """What a run of this method depends on, JSON-able: equal for runs that may stand in one table.

        The order counts: the seed of a batch is made of it.
        """
        recipe = asdict(self.recipe_of(method))
        recipe["drops"] = None if recipe["drops"] is None else list(recipe["drops"])
        record = self.recorded("always") | {name.removeprefix("weights_"): recipe[name] for name in WEIGHTS}
        if method not in ("scratch", "found"):
            record |= self.recorded("search")
            record |= {name: value for name, value in recipe.items() if name not in (*WEIGHTS, "samples")}
            if recipe["signal"] == "ranked":  # as all earlier runs were
                del record["signal"]
            if not recipe["begin"]:  # without it there is nothing to begin earlier; and earlier runs are as good
                del record["begin"], record["ramp_updates"]
        return record

    def asked(self, method: str) -> list[dict[str, Any]]:
        return super().asked(method) if method == "penalty" else [{"target": target} for target in self.targets]


def _check_hidden(hidden: tuple[int, ...] | None) -> None:
    if hidden is not None and (not hidden or min(hidden) < 1):
        raise BadInput(f"hidden layers have at least one unit each, not {hidden}")


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
