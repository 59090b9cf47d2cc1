"""What the paper's experiments select, and batches of their runs.

What is selected are units of an MLP or connections of a DenseNet: :class:`espalier.models.MLP` and
:class:`espalier.models.DenseNet` with their gates attached, what their runs start from, and what their masks mean. A
batch is what a sweep is asked for, how far it is in words, and what is recorded of each run.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from espalier.cost import Cost
from espalier.data import Dataset
from espalier.files import clean
from espalier.gates.attach import attach
from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.models import MLP, DenseNet
from espalier.picture.describe import Connection, connections, depths, living
from espalier.space import BadInput
from espalier.study.settings import PAIR, ConnectionSettings, GridSettings, PaperSettings, RunSpec, Settings
from espalier.train.batched.batch import Compute, Precision
from espalier.train.batched.batch_engine import BatchEngine
from espalier.train.batched.runs import Plan, Run
from espalier.train.batched.step import cross_entropy
from espalier.train.callbacks import Callback
from espalier.train.checkpoint import Checkpoint
from espalier.train.loop import Loop, Stop
from espalier.train.progress import Progress, Shown

Row = dict[str, Any]
NEAR = 0.005  # a random selection is within half a point of its share
MOST_DRAWS = 20_000
BINS = 20  # of a histogram of theta
DRAWS = 20  # structures of the stochastic prediction
CHUNK = 1000  # test images at once
ALIGNED = 16  # units: rows of other lengths are multiplied by slower kernels on a GPU
# What run files call the numbers of a row.
CURVE = {"loss": "train_loss", "error": "train_error", "validation_loss": "test_loss", "validation_error": "test_error"}


class Selection(ABC):
    """A network with gates, what its runs start from, and what its masks mean.

    ``share``: the name of the share that progress shows. ``counted``: what the gates are. ``shares``: what is recorded
    of a mask, beside the kind of cost it is a share of. ``options``: further arguments of the sweep's plan.
    """

    share: str
    counted: str
    shares: tuple[tuple[str, str], ...]
    options: dict[str, Any]

    @cached_property
    @abstractmethod
    def gated(self) -> Gated: ...

    @property
    @abstractmethod
    def groups(self) -> Sequence[slice | Tensor]:
        """Where the gates are in a mask that are counted together: of one layer, of one block."""

    @abstractmethod
    def describe(self) -> Row:
        """What tells this network from another of its kind, for run files."""

    def layout(self) -> Row:
        """What tells two arrangements of the same weights apart, for checkpoints."""
        return {}

    @abstractmethod
    def build(self, run: Run) -> nn.Module:
        """He initialisation, normal by fan-in, biases 0. The fan-in is what is read under the mask of the run, if it
        has one: the open part of a network starts as the small network it is."""

    @abstractmethod
    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        """The mask ``(d)`` of a run that does not search, and how it was come by."""

    def holding(self, runs: Sequence[RunSpec], unit: int) -> Selection:
        """The network itself, or a smaller one that holds each of those that are trained as they are; its widths are
        multiples of ``unit``, or its own."""
        return self

    def cost(self, kind: str) -> Cost:
        return self.gated.cost(kind)

    def counts(self, masks: Tensor) -> list[Row]:
        """Gates of each group, and shares, of each mask ``(R, d)``."""
        ones, costs = torch.ones_like(masks[0]), {name: self.cost(kind) for kind, name in self.shares}
        columns = {self.counted: torch.stack([masks[:, where].sum(-1) for where in self.groups], -1).long()}
        columns |= {name: cost(masks) / cost(ones) for name, cost in costs.items()}
        return [dict(zip(columns, row)) for row in zip(*(column.tolist() for column in columns.values()), strict=True)]

    def about(self, masks: Tensor) -> list[Row]:
        """The same of canonical masks ``(R, d)``, and what else is known of the network that ships."""
        return self.counts(masks)


class Units(Selection):
    """Units of an MLP. widths: inputs, hidden units of each layer, classes. least: units that a layer keeps at least;
    the paper puts no floor under a layer.

    >>> Units((784, 784, 784, 784, 10)).gated.d
    2352
    """

    share, counted = "unit_share", "units"
    shares = ("units", "unit_share"), ("weights", "weight_share")

    def __init__(self, widths: Sequence[int], least: int = 0) -> None:
        self.widths, self.least = tuple(widths), least
        self.options: dict[str, Any] = {"how": {"check": False}}

    @classmethod
    def of(cls, hidden: Sequence[int] | None, data: Dataset, least: int = 0) -> Units:
        """What reads these data, vectors; hidden: None for three layers as wide as the input."""
        inputs = data.shape[0]
        return cls((inputs, *(hidden or (inputs,) * 3), len(data.classes)), least)

    @property
    def hidden(self) -> tuple[int, ...]:
        return self.widths[1:-1]

    @cached_property
    def gated(self) -> Gated:
        return attach(self._model(), torch.zeros(1, self.widths[0]), check=False)

    def _model(self) -> MLP:
        return MLP(self.widths[0], self.hidden, self.widths[-1], least=self.least)

    @property
    def groups(self) -> list[slice]:
        return [where for _, where in self.gated.space.bits]

    def describe(self) -> Row:
        return {"widths": list(self.widths)}

    @torch.no_grad()
    def build(self, run: Run) -> MLP:
        model = self._model()
        mask = torch.ones(sum(self.hidden)) if run.mask is None else run.mask
        read = [float(self.widths[0]), *(float(part.sum()) for part in torch.split(mask, list(self.hidden)))]
        for i, (layer, fan_in) in enumerate(zip([*model.layers, model.head], read, strict=True)):
            # Layer by layer: a seed means the same draws whatever the mask, and whatever the other layers.
            generator = torch.Generator().manual_seed(run.seed * 1000 + i)
            normal = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.copy_(normal * (2 / max(fan_in, 1.0)) ** 0.5)
        return model

    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        return self.uniform(1.0 if run.size is None else run.size) if run.units is None else self.first(run.units), {}

    def holding(self, runs: Sequence[RunSpec], unit: int) -> Units:
        """
        >>> runs = [RunSpec("found", "found", 0, units=units) for units in ((3, 17), (9, 39))]
        >>> Units((64, 40, 40, 10)).holding(runs, 16).widths
        (64, 16, 40, 10)
        """
        each = [run.units for run in runs if run.units is not None]
        if not each:
            return self
        hidden = [min(-(-max(column) // unit) * unit, most) for column, most in zip(zip(*each), self.hidden)]
        return Units((self.widths[0], *hidden, self.widths[-1]), self.least)

    def uniform(self, share: float) -> Tensor:
        """The mask ``(d)`` with this share of the units of every layer, at least one."""
        return self.first([max(round(share * width), 1) for width in self.hidden])

    def first(self, units: Sequence[int]) -> Tensor:
        """The mask ``(d)`` with the first so many units of each layer."""
        return torch.cat([(torch.arange(width) < count).float() for width, count in zip(self.hidden, units)])


@dataclass(frozen=True)
class DenseNetGraph:
    """The connections of a DenseNet of three blocks of so many layers, in the order of a mask, as
    :func:`espalier.picture.connections` lists them: blocks, paths, depth, dead layers, random selections.

    >>> DenseNetGraph(12).d, DenseNetGraph(12).depth
    (273, 40)
    """

    layers: int

    @cached_property
    def gates(self) -> list[Connection]:
        return connections(self.layers)

    @property
    def d(self) -> int:
        return len(self.gates)

    @property
    def depth(self) -> int:
        """Layers on the longest path of the whole network: stem, blocks, two transitions, classifier."""
        return self.gates[-1].reader

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Where the connections of each block are in a mask, those that close it included."""
        return [torch.tensor([i for i, gate in enumerate(self.gates) if gate.block == block]) for block in range(3)]

    def paths(self, mask: Tensor) -> Row:
        """What leads from image to classes under a mask ``(d)``. depth: layers on the longest path, 0 where there is
        none. block_depths: on its way through each block, or None. dead_layers: those on no path, by their depth in the
        whole network (stem: 1)."""
        at = depths(compress(self.gates, living(self.gates, mask.tolist())))
        ends = [at.get(block * (self.layers + 1) + 1) for block in range(4)]  # what is before, between and after blocks
        chains = [None if a is None or b is None else b - a - 1 for a, b in pairwise(ends)]
        dead = {gate.reader for gate in self.gates} - at.keys()
        return {"depth": ends[-1] or 0, "block_depths": chains, "dead_layers": sorted(dead)}

    def draw(self, share: float, weights: Tensor, seed: int) -> tuple[Tensor, dict[str, float]]:
        """Random selection: each connection with probability ``share``, until the weights kept are near that share of
        all and a path leads from image to classes. weights: ``(d)``. Returns the mask ``(d)`` and what was drawn.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(f"{share!r} {seed}".encode()))
        total, pathless, away = weights.sum(), 0, 0
        for draws in range(1, MOST_DRAWS + 1):
            mask = (torch.rand(self.d, generator=generator) < share).to(torch.float32)
            near = bool(((mask.to(weights) * weights).sum() / total - share).abs() <= NEAR)
            path = bool(self.paths(mask)["depth"])
            pathless, away = pathless + (not path), away + (not near)
            if near and path:
                counts = {"draws": draws, "without_path": pathless, "away_from_share": away}
                return mask, counts | {"without_path_share": pathless / draws}
        raise BadInput(
            f"none of {MOST_DRAWS:,} random selections of {self.d} connections has {share:.1%} of the weights, within "
            f"{NEAR:.1%}, and a path from image to classes; use another share or a larger network"
        )


class Connections(Selection):
    """Connections of a DenseNet. depth, growth: of it; shape: of an image; fast: computed by kernels for many runs at
    once, with matrix products of this precision.

    In the middle of a run the statistics of BatchNorm are estimated on 5,000 images, at its end on all.
    """

    share, counted = "weight_share", "connections"
    shares = ("weights", "weight_share"), ("macs", "mac_share")

    def __init__(
        self,
        depth: int,
        growth: int,
        shape: Sequence[int],
        classes: int,
        fast: bool = False,
        precision: str = "float32",
    ) -> None:
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise BadInput(
                f"connection selection needs images (channels, height, width), not inputs of shape {tuple(shape)}"
            )
        self.sizes: dict[str, int] = {"depth": depth, "growth": growth, "classes": classes, "channels": shape[0]}
        self.shape, self.fast = tuple(shape), fast
        self.graph = DenseNetGraph((depth - 4) // 3)
        self.options: dict[str, Any] = {"how": {"check": False}, "calibrate": 5000}
        self._drawn: dict[tuple[float, int], tuple[Tensor, dict[str, float]]] = {}
        if fast:
            from espalier.models.densenet_fast import FastDenseNet

            self.options["gradient"] = FastDenseNet(**self.sizes, precision=precision)

    @cached_property
    def gated(self) -> Gated:
        # The image has its true resolution: MACs are counted on it.
        return attach(DenseNet(**self.sizes), torch.zeros(1, *self.shape), check=False)

    @property
    def groups(self) -> list[Tensor]:
        return self.graph.blocks

    def describe(self) -> Row:
        return {"network": "DenseNet", "depth": self.sizes["depth"], "growth": self.sizes["growth"]}

    def layout(self) -> Row:
        return {"step": "fast" if self.fast else "readable"}

    @torch.no_grad()
    def build(self, run: Run) -> DenseNet:
        model = DenseNet(**self.sizes)
        mask = torch.ones(self.graph.d) if run.mask is None else run.mask.cpu()
        modules, start = dict(model.named_modules()), 0
        for name, gate in modules.items():
            if isinstance(gate, Gate):
                reader = modules[f"{name.removesuffix('gate')}conv" if name != "gate" else "head"]
                widths = torch.tensor(gate.sizes, dtype=torch.float32)
                kept = (mask[start : start + gate.bits] * widths).sum()
                assert isinstance(reader.weight, Tensor)
                reader.weight *= (widths.sum() / kept.clamp(min=1)).sqrt()
                start += gate.bits
        return model

    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        if run.method != "random":
            return torch.ones(self.graph.d), {}
        assert run.size is not None
        key = run.size, run.seed
        if key not in self._drawn:
            self._drawn[key] = self.graph.draw(run.size, self.prices("weights"), run.seed)
        mask, drawn = self._drawn[key]
        return mask, {"drawn": drawn}

    def prices(self, kind: str) -> Tensor:
        """What each connection costs ``(d)``, float64: "weights" or "macs" of the convolution that reads it."""
        return self.gated.cost(kind).gradient(torch.zeros(self.graph.d))

    @cached_property
    def _costs(self) -> dict[str, Cost]:
        return {kind: Cost.linear(self.prices(kind)) for kind in ("weights", "macs")}

    def cost(self, kind: str) -> Cost:
        """The paper's linear cost; without the stem, which no mask can take away."""
        return self._costs[kind]

    def counts(self, masks: Tensor) -> list[Row]:
        shares = masks.double().mean(-1).tolist()
        return [row | {"connection_share": share} for row, share in zip(super().counts(masks), shares, strict=True)]

    def about(self, masks: Tensor) -> list[Row]:
        pairs = zip(self.counts(masks), masks.cpu())
        return [row | self.graph.paths(mask) | {"mask": mask_to_hex(mask)} for row, mask in pairs]


def selection(settings: PaperSettings, data: Dataset) -> tuple[Dataset, Selection]:
    """The data as the experiment of these settings reads them, and what it trains on them."""
    if isinstance(settings, Settings):
        data = data.flatten()
        return data, Units.of(settings.hidden, data)
    assert isinstance(settings, ConnectionSettings)
    # Images are read as they are stored, each channel standardised.
    sizes = settings.depth, settings.growth, data.shape, len(data.classes)
    return data, Connections(*sizes, settings.step == "fast", settings.precision)


def mask_to_hex(mask: Tensor) -> str:
    """A mask ``(d)`` as hexadecimal digits, its first gate the highest bit.

    >>> mask_to_hex(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]))
    'a4'
    """
    bits = mask.flatten().cpu().numpy() != 0
    return np.packbits(bits).tobytes().hex()[: -(-len(bits) // 4)]


# ---- batches ---------------------------------------------------------------------------------------------------------


class ShownBySetting(Shown):
    """Tells a person how a batch goes. names: of each run; share: of a row, that is shown."""

    def __init__(self, progress: Progress, names: Sequence[str], share: str) -> None:
        super().__init__(progress)
        self.names, self.share = names, share

    def on_update(self, loop: Loop) -> None:
        self.progress.update(loop.update, self._line(loop))

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        self.progress.epoch(self._line(loop))
        self.progress.states(settings_in_lines(self.names, rows, self.share))

    def _line(self, loop: Loop) -> str:
        text = f"{len(self.names)} runs, {loop.pace}"
        rows = [history[-1] for history in loop.histories if history]
        if rows:
            shares = [row[self.share] for row in rows if row.get(self.share) is not None]
            text += "; median" + (f" share {median(shares):.1%}," if shares else "")
            text += f" error {median(row['validation_error'] for row in rows):.2%}"
        return text


def settings_in_lines(names: Sequence[str], rows: Sequence[Row], share: str) -> list[str]:
    """One line for each name: the share and the error of every run that has it, in their order.

    >>> settings_in_lines(["a", "a"], [{"s": 0.1, "validation_error": 0.02}, {"s": 0.2, "validation_error": 0.03}], "s")
    ['a: share 10.0% 20.0%, error 2.00% 3.00%']
    """
    lines = list[str]()
    for name in dict.fromkeys(names):
        here = [row for its, row in zip(names, rows, strict=True) if its == name]
        shares = " ".join(f"{row[share]:.1%}" for row in here if share in row)
        errors = " ".join(f"{row['validation_error']:.2%}" for row in here)
        lines.append(f"{name}: {f'share {shares}, ' if shares else ''}error {errors}")
    return lines


class StudyBatch(Callback):
    """Runs of one shape: all of a search, or all with given masks. full: the network, uncut.

    Networks that are trained as they are (scratch, found) are computed in a small shape that holds every one of
    them, each under the mask of its own widths and with the initial weights of its own fan-in.
    """

    def __init__(
        self,
        settings: PaperSettings | GridSettings,
        full: Selection,
        data: Dataset,
        specs: Sequence[RunSpec],
        device: torch.device,
        compute: Compute | None = None,
    ) -> None:
        self.settings, self.full, self.data, self.specs = settings, full, data, list(specs)
        self.network = full.holding(specs, ALIGNED if device.type == "cuda" else 1)
        self.masks, self.drawn = zip(*(self.network.given(spec) for spec in specs))
        method, described = specs[0].method, [spec.describe() for spec in specs]
        if specs[0].searches:
            control = [settings.permuted or spec.method == "permuted" for spec in specs]
            runs = [
                Run(s.seed, None if s.target else s.penalty or 0.0, target=s.target, permuted=permuted)
                for s, permuted in zip(specs, control)
            ]
        else:
            canonical = self.network.gated.canonical(torch.stack(self.masks))
            runs = [Run(s.seed, mask=mask, dropout=s.rate) for s, mask in zip(specs, canonical, strict=True)]
        recipe, rate = settings.recipe_of(method), None if specs[0].target else settings.theta_rate
        updates = settings.updates(len(data.train_labels))
        if not updates:
            examples = f"{len(data.train_labels)} examples in {settings.epochs} epochs"
            raise BadInput(f"batch_size={settings.batch_size} leaves no update of {examples}")
        samples = recipe.samples if specs[0].searches else PAIR
        plan = Plan(
            epochs=settings.epochs,
            updates=updates,
            points=settings.points,
            loss=cross_entropy,
            batch_size=PAIR * settings.batch_size // samples,  # whatever the masks, as many examples as under two
            samples=samples,
            cost=self.network.cost(settings.cost),
            recipe=recipe,
            schedule=recipe.schedule,
            search=None if rate is None else {"learning_rate": rate},
            pad=settings.pad,
            seeded_by=[described, settings.describe(method)] if isinstance(settings, GridSettings) else described,
            **self.network.options,
        )
        compute = compute or Compute(precision=cast(Precision, settings.precision))
        self.engine = BatchEngine(self.network.build, data, None, runs, plan, device, compute)

    def loop(self, folder: Path | None, stop: Stop, progress: Progress, **kept: Any) -> Loop:
        """folder: of the checkpoints, None for none. The same settings and folder go on where the last call stopped.
        kept: see Checkpoint."""
        methods = dict.fromkeys(spec.method for spec in self.specs)
        together: Row = {method: self.settings.describe(method) for method in methods}
        together |= {"runs": [spec.describe() for spec in self.specs], "data": self.data.fingerprint()}
        together |= self.full.describe() | self.full.layout() | {"device": self.engine.device.type}
        share = "expected_share" if isinstance(self.settings, GridSettings) else self.full.share
        lines = ShownBySetting(progress, [spec.label for spec in self.specs], share)
        store = None if folder is None else Checkpoint(folder, together, **kept)
        return Loop(self.engine, stop, [self, lines], store)

    def ships(self) -> list[dict[str, Tensor]]:
        """All tensors of each run's module as it was evaluated last, where it has statistics of its own."""
        engine = self.engine
        if engine.shipped is None and engine.validation is not None:  # it was evaluated by a process that is gone
            engine.evaluate(engine.masks(), engine.validation, True)
        return engine.shipped or []


class PaperBatch(StudyBatch):
    """Of one of the paper's experiments; what does not search is a fixed network, dropout, or random selection."""

    def selected(self) -> Tensor:
        """M* of each run ``(R, d)``, or its given mask; not canonical."""
        search = self.engine.search
        return torch.stack(self.masks).to(self.engine.device) if search is None else search.select()

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        search, counts = self.engine.search, self.network.counts(self.selected())
        for row, count in zip(rows, counts, strict=True):
            row |= count
        if search is not None:
            for row, histogram in zip(rows, self._histograms(search.theta).tolist(), strict=True):
                row["theta_histogram"] = histogram

    def _histograms(self, theta: Tensor) -> Tensor:
        """Counts ``(R, groups, BINS)`` of theta in equal parts of [0, 1]."""
        bins = (theta * BINS).long().clamp(max=BINS - 1)
        counts = [torch.nn.functional.one_hot(bins[:, where], BINS).sum(1) for where in self.network.groups]
        return torch.stack(counts, 1)

    def results(self, loop: Loop) -> list[Row]:
        """What came out of each run, of its last update."""
        engine, masks = self.engine, self.selected()
        drawn = None
        if engine.search is not None and not engine.search.settled and isinstance(self.network, Units):
            with loop.timed("measuring"):
                drawn = stochastic(engine, engine.search.theta)
        about = self.network.about(engine.masks())
        keys = ("update", *self.network.counts(masks[:1])[0], *CURVE, "theta_histogram")
        records = list[Row]()
        for i, result in enumerate(loop.results()):
            curve = [{CURVE.get(key, key): row[key] for key in keys if key in row} for row in result.history]
            last = {k: v for k, v in curve[-1].items() if k not in ("update", "train_loss", "train_error")}
            outcome: Row = {"updates": result.updates, **last, "canonical": about[i]} | self.drawn[i]
            if drawn is not None:
                loss, error = (float(column[i]) for column in drawn)
                outcome["stochastic"] = {"draws": DRAWS, "test_loss": loss, "test_error": error}
            outcome["mask"] = mask_to_hex(masks[i])
            outcome |= {"diverged_at": result.diverged, "skipped_updates": result.skipped}
            records.append({"run": self.specs[i].describe(), "result": outcome, "curve": curve})
        return records


@torch.no_grad()
def stochastic(engine: BatchEngine, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and error ``(R)`` of the mean prediction of structures drawn from theta ``(R, d)``, on the test images."""
    assert engine.validation is not None
    inputs, labels = engine.validation.inputs, engine.validation.targets
    generator = torch.Generator(theta.device).manual_seed(engine.seed)
    masks = torch.rand((DRAWS, *theta.shape), dtype=theta.dtype, device=theta.device, generator=generator) < theta
    sums = torch.zeros(2, len(theta), dtype=torch.float64, device=theta.device)
    over_runs, weights = vmap(engine.gated.call, in_dims=(0, 0, None)), engine.weights()
    with engine.batch.compute.applied():
        for start in range(0, len(labels), CHUNK):
            x, y = engine.validation.read(inputs[start : start + CHUNK]), labels[start : start + CHUNK]
            mean = torch.zeros((), device=theta.device)
            for drawn in masks:
                mean = mean + over_runs(weights, drawn.to(x.dtype), x).softmax(-1) / DRAWS
            right = mean.gather(-1, y.view(1, -1, 1).expand(len(theta), -1, 1)).squeeze(-1)
            sums[0] += -right.clamp(min=1e-30).log().to(torch.float64).sum(-1)
            sums[1] += (mean.argmax(-1) != y).sum(-1)
    loss, error = sums / len(labels)
    return loss, error


class GridBatch(StudyBatch):
    """Of one method of a grid."""

    full: Units
    network: Units

    def results(self, loop: Loop) -> list[Row]:
        """What came out of each run, of its last update."""
        units = [row["units"] for row in self.network.counts(self.engine.masks())]
        shares = self.full.counts(torch.stack([self.full.first(kept) for kept in units]))
        keys = ("update", "loss", "validation_loss", "validation_error", "expected_share")
        records = list[Row]()
        for spec, share, result in zip(self.specs, shares, loop.results(), strict=True):
            last = result.history[-1]
            outcome: Row = {"updates": result.updates, "test_error": last["validation_error"]}
            outcome |= {"test_loss": last["validation_loss"], **share}
            if result.share_before is not None:
                outcome |= {"reached_before": result.share_before, "reached_after": result.share_after}
                if spec.target is not None:
                    outcome["gap"] = result.share_before - spec.target
            outcome |= {"diverged_at": result.diverged, "skipped_updates": result.skipped}
            curve = [{CURVE.get(key, key): row[key] for key in keys if key in row} for row in result.history]
            digits = {"result": clean(outcome, digits=6), "curve": clean(curve, digits=4)}  # of thousands of runs
            records.append({"run": spec.describe(), **digits})
        return records
