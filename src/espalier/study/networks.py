"""What the paper's experiments select: units of an MLP, connections of a DenseNet. Their networks, masks and counts.

The networks are :class:`espalier.models.MLP` and :class:`espalier.models.DenseNet` with their gates attached; a study
trains them as a sweep does.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.attach import attach
from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.models import MLP, DenseNet
from espalier.picture.describe import Connection, connections
from espalier.space import BadInput
from espalier.study.run_files import mask_to_hex
from espalier.study.settings import ConnectionSettings, PaperSettings, RunSpec, Settings
from espalier.train.batched.runs import Run
from espalier.train.batched.step import Own

Row = dict[str, Any]
NEAR = 0.005  # a random selection is within half a point of its share
MOST_DRAWS = 20_000


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
        self.options: dict[str, Any] = {"check": False}

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
        return self.uniform(1.0 if run.size is None else run.size), {}

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

    def opened(self, mask: Tensor) -> list[Connection]:
        """The connections that are open under a mask ``(d)``."""
        return [gate for gate, bit in zip(self.gates, mask.tolist(), strict=True) if bit]

    def chains(self, mask: Tensor) -> list[int | None]:
        """Layers on the longest path through each block under a mask ``(d)``; None: no path leads through it."""
        chains, opened = list[int | None](), self.opened(mask)
        for block in range(3):
            start = block * (self.layers + 1) + 1
            longest = {start: 0}  # layers on the longest path to each; what is read comes before its reader
            for gate in opened:
                if gate.block == block and gate.source in longest:
                    longest[gate.reader] = max(longest.get(gate.reader, 0), longest[gate.source] + 1)
            closing = longest.get(start + self.layers + 1)
            chains.append(None if closing is None else closing - 1)
        return chains

    def connected(self, mask: Tensor) -> bool:
        """Whether a path leads from the image to the classifier."""
        return None not in self.chains(mask)

    def depth_under(self, mask: Tensor) -> int:
        """Layers on the longest path from the image to the classes; 0 where there is none."""
        chains = self.chains(mask)
        return 0 if None in chains else 4 + sum(chain or 0 for chain in chains)

    def dead_layers(self, mask: Tensor) -> list[int]:
        """Layers that read nothing under a canonical mask ``(d)``, by their depth in the whole network (stem: 1)."""
        return sorted({gate.reader for gate in self.gates} - {gate.reader for gate in self.opened(mask)})

    def draw(self, share: float, weights: Tensor, seed: int) -> tuple[Tensor, dict[str, float]]:
        """Random selection: each connection with probability ``share``, until the weights kept are near that share of
        all and a path leads from image to classes. weights: ``(d)``. Returns the mask ``(d)`` and what was drawn.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(f"{share!r} {seed}".encode()))
        total, pathless, away = weights.sum(), 0, 0
        for draws in range(1, MOST_DRAWS + 1):
            mask = (torch.rand(self.d, generator=generator) < share).to(torch.float32)
            near = bool(((mask.to(weights) * weights).sum() / total - share).abs() <= NEAR)
            path = self.connected(mask)
            pathless, away = pathless + (not path), away + (not near)
            if near and path:
                told = {"draws": draws, "without_path": pathless, "away_from_share": away}
                return mask, told | {"without_path_share": pathless / draws}
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
        self.options: dict[str, Any] = {"check": False, "calibrate": 5000}
        self._drawn: dict[tuple[float, int], tuple[Tensor, dict[str, float]]] = {}
        if fast:
            from espalier.models.densenet_fast import FastDenseNet

            network = FastDenseNet(**self.sizes, precision=precision)
            self.options["gradient"] = Own(network.gradients, network.pack, network.unpack, network.sloped)

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
        graph = self.graph
        return [
            row
            | {"depth": graph.depth_under(mask), "block_depths": graph.chains(mask)}
            | {"dead_layers": graph.dead_layers(mask), "mask": mask_to_hex(mask)}
            for row, mask in zip(self.counts(masks), masks.cpu())
        ]


def selection(settings: PaperSettings, data: Dataset) -> tuple[Dataset, Selection]:
    """The data as the experiment of these settings reads them, and what it trains on them."""
    if isinstance(settings, Settings):
        data = data.flatten()
        return data, Units.of(settings.hidden, data)
    assert isinstance(settings, ConnectionSettings)
    # Images are read as they are stored, each channel standardised.
    sizes = settings.depth, settings.growth, data.shape, len(data.classes)
    return data, Connections(*sizes, settings.step == "fast", settings.precision)
