"""What the paper's experiments select: units of an MLP, connections of a DenseNet. Their networks, masks and counts.

The networks are :class:`espalier.models.MLP` and :class:`espalier.models.DenseNet` with their gates attached; a study
trains them as a sweep does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.attach import attach
from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.models import MLP, DenseNet
from espalier.space import BadInput
from espalier.study.densenet_graph import DenseNetGraph
from espalier.study.run_files import mask_to_hex
from espalier.study.settings import ConnectionSettings, RunSpec, Settings
from espalier.train.batched.runs import Run
from espalier.train.batched.step import Own

Row = dict[str, Any]


class Selection(Protocol):
    """A network with gates, what its runs start from, and what its masks mean.

    ``share``: the name of the share that progress shows. ``options``: further arguments of the sweep's plan.
    """

    share: str

    @property
    def gated(self) -> Gated: ...
    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def groups(self) -> Sequence[slice | Tensor]:
        """Where the gates are in a mask that are counted together: of one layer, of one block."""
        ...

    def describe(self) -> Row:
        """What tells this network from another of its kind, for run files."""
        ...

    def layout(self) -> Row:
        """What tells two arrangements of the same weights apart, for checkpoints."""
        ...

    def build(self, run: Run) -> nn.Module:
        """He initialisation, normal by fan-in, biases 0. The fan-in is what is read under the mask of the run, if it
        has one: the open part of a network starts as the small network it is."""
        ...

    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        """The mask ``(d)`` of a run that does not search, and how it was come by."""
        ...

    def cost(self, kind: str) -> Cost: ...

    def counts(self, masks: Tensor) -> list[Row]:
        """Gates of each group, and shares, of each mask ``(R, d)``."""
        ...

    def about(self, masks: Tensor) -> list[Row]:
        """The same of canonical masks ``(R, d)``, and what else is known of the network that ships."""
        ...


class Units:
    """Units of an MLP. widths: inputs, hidden units of each layer, classes. least: units that a layer keeps at least;
    the paper puts no floor under a layer.

    >>> Units((784, 784, 784, 784, 10)).gated.d
    2352
    """

    share = "unit_share"

    def __init__(self, widths: Sequence[int], least: int = 0) -> None:
        self.widths, self.least = tuple(widths), least
        self.options: dict[str, Any] = {"check": False}

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

    def layout(self) -> Row:
        return {}

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

    def cost(self, kind: str) -> Cost:
        return self.gated.cost(kind)

    def counts(self, masks: Tensor) -> list[Row]:
        units = torch.stack([masks[:, where].sum(-1) for where in self.groups], -1).long().tolist()
        return _counted(
            {"units": units}, masks, {"unit_share": self.cost("units"), "weight_share": self.cost("weights")}
        )

    def about(self, masks: Tensor) -> list[Row]:
        return self.counts(masks)


class Connections:
    """Connections of a DenseNet. depth, growth: of it; shape: of an image; fast: computed by kernels for many runs at
    once, with matrix products of this precision.

    In the middle of a run the statistics of BatchNorm are estimated on 5,000 images, at its end on all.
    """

    share = "weight_share"

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
            self.options["gradient"] = Own(network.gradients, network.pack, network.unpack)

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
        kept = torch.stack([masks[:, where.to(masks.device)].sum(-1) for where in self.groups], -1).long().tolist()
        costs = {"weight_share": self.cost("weights"), "mac_share": self.cost("macs")}
        shares = masks.double().mean(-1).tolist()
        return _counted({"connections": kept, "connection_share": shares}, masks, costs)

    def about(self, masks: Tensor) -> list[Row]:
        graph = self.graph
        return [
            row
            | {"depth": graph.depth_under(mask), "block_depths": graph.chains(mask)}
            | {"dead_layers": graph.dead_layers(mask), "mask": mask_to_hex(mask)}
            for row, mask in zip(self.counts(masks), masks.cpu())
        ]


def _counted(columns: dict[str, list[Any]], masks: Tensor, costs: dict[str, Cost]) -> list[Row]:
    """A row for each mask ``(R, d)``: of the columns, and the shares of these costs."""
    ones = torch.ones_like(masks[0])
    columns |= {name: (cost(masks) / cost(ones)).tolist() for name, cost in costs.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def units_of(settings: Settings, data: Dataset) -> Units:
    inputs = data.train_inputs.shape[1]
    return Units((inputs, *(settings.hidden or (inputs,) * 3), len(data.classes)))


def connections_of(settings: ConnectionSettings, data: Dataset) -> Connections:
    return Connections(
        settings.depth, settings.growth, data.shape, len(data.classes), settings.step == "fast", settings.precision
    )
