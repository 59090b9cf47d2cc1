"""The paper's DenseNet with a gate on every connection, as a study trains, counts and evaluates it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.gates.attach import attach
from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.gates.recalibrate import recalibrate
from espalier.models import DenseNet
from espalier.space import BadInput, Space
from espalier.study.anatomy import Anatomy
from espalier.study.record import mask_to_hex
from espalier.study.settings import RunSpec
from espalier.study.subject import Evaluation, Pair, Row
from espalier.train.batched import stack
from espalier.train.batched.batch import Batch
from espalier.train.batched.grouped import Own
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.step import Gradient, Loss, Named

CHUNK = 500  # images at once when statistics are estimated and when errors are counted
MIDDLE = 5_000  # training images whose statistics a measurement in the middle of a run uses; the last one uses all


class Connections:
    """depth, growth: of the DenseNet; shape: of an image; step: see ConnectionSettings; precision: of the fast step.

    While training, every mask of every run normalises with the statistics of its own mini-batch, and no running ones
    are kept. Before it is evaluated, each run has them estimated under its canonical mask: the cumulative mean over the
    training images without augmentation, over ``MIDDLE`` of them in the middle of a run.
    """

    share = "weight_share"
    chain = None

    def __init__(
        self,
        depth: int,
        growth: int,
        shape: tuple[int, ...],
        classes: int,
        *,
        step: str = "readable",
        precision: str = "float32",
    ) -> None:
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise BadInput(f"connection selection needs images (channels, height, width), not inputs of shape {shape}")
        self.sizes: dict[str, int] = {"depth": depth, "growth": growth, "classes": classes, "channels": shape[0]}
        self.shape, self.step = shape, step
        self.anatomy = Anatomy((depth - 4) // 3)
        example = torch.zeros(1, *shape)  # at its true resolution: MACs are counted on it
        self.gated: Gated = attach(self._model(), example, check=False)
        stack.strip(self.gated.model)
        self.judge: Gated = attach(self._model(), example, check=False)  # keeps running statistics
        self._drawn: dict[tuple[float, int], tuple[Tensor, dict[str, float]]] = {}
        self.fast: Any = None
        if step == "fast":
            from espalier.models.densenet_fast import FastDenseNet

            self.fast = FastDenseNet(**self.sizes, precision=precision)

    def _model(self) -> DenseNet:
        return DenseNet(**self.sizes)

    @property
    def space(self) -> Space:
        return self.gated.space

    @property
    def groups(self) -> list[Tensor]:
        return self.anatomy.blocks

    def describe(self) -> Row:
        return {"network": "DenseNet", "depth": self.sizes["depth"], "growth": self.sizes["growth"]}

    def layout(self) -> Row:
        return {"step": self.step}

    # ---- what is trained -------------------------------------------------------------------------------------------

    def call(self, params: Named, mask: Tensor, x: Tensor) -> Tensor:
        """One run under one mask ``(d)``, with the statistics of this mini-batch. x: ``(B, C, H, W)``."""
        logits: Tensor = self.gated.call(params, mask, x)
        return logits

    def gradient(self, loss: Loss) -> Gradient | None:
        return None if self.fast is None else Own(self.fast.gradients)

    def start(self, seeds: Sequence[int], masks: Tensor, device: torch.device) -> Named:
        """He initialisation, its fan-in the channels that are read: see unit selection's Network.start."""
        built = {seed: dict(stack.made(self._model, seed).named_parameters()) for seed in set(seeds)}
        names = list(built[seeds[0]])
        params = {name: torch.stack([built[seed][name].detach() for seed in seeds]) for name in names}
        for name, module in self.gated.model.named_modules():
            if isinstance(module, Gate):
                reader = f"{name.removesuffix('gate')}conv" if name != "gate" else "head"
                widths = torch.tensor(module.sizes, dtype=torch.float32)
                kept = (masks[:, self.space.slices[name]].cpu() * widths).sum(-1)
                weight = params[f"{reader}.weight"]
                weight *= (widths.sum() / kept.clamp(min=1)).sqrt().view(-1, *[1] * (weight.ndim - 1))
        self.gated.model.to(device)  # what a call brings along is read where the weights are
        on_device = {name: p.to(device) for name, p in params.items()}
        packed: Named = on_device if self.fast is None else self.fast.pack(on_device)
        return packed

    def weights(self, params: Named) -> Named:
        """The stacked weights by the model's own names, however the step keeps them."""
        named: Named = params if self.fast is None else self.fast.unpack(params)
        return named

    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        if run.method != "random":
            return torch.ones(self.space.d), {}
        assert run.size is not None
        key = run.size, run.seed
        if key not in self._drawn:
            self._drawn[key] = self.anatomy.draw(run.size, self.prices("weights"), run.seed)
        mask, drawn = self._drawn[key]
        return mask, {"drawn": drawn}

    # ---- what a mask means -----------------------------------------------------------------------------------------

    def canonical(self, masks: Tensor) -> Tensor:
        return self.gated.canonical(masks)

    def prices(self, kind: str) -> Tensor:
        """What each connection costs ``(d)``, float64: "weights" or "macs" of the convolution that reads it."""
        return self.gated.cost(kind).gradient(torch.zeros(self.space.d))

    @cached_property
    def _costs(self) -> dict[str, Cost]:
        return {kind: Cost.linear(self.prices(kind)) for kind in ("weights", "macs")}

    def cost(self, kind: str) -> Cost:
        """The paper's linear cost; without the stem, which no mask can take away."""
        return self._costs[kind]

    def tell(self, masks: Tensor) -> list[Row]:
        """Connections of each block, and the shares of connections, weights and MACs of all connections."""
        ones = torch.ones_like(masks[0])
        shares = {"connection_share": masks.double().mean(-1).tolist()}
        for kind, name in (("weights", "weight_share"), ("macs", "mac_share")):
            shares[name] = (self.cost(kind)(masks) / self.cost(kind)(ones)).tolist()
        kept = torch.stack([masks[:, where.to(masks.device)].sum(-1) for where in self.groups], -1).long().tolist()
        return [{"connections": row} | {name: share[i] for name, share in shares.items()} for i, row in enumerate(kept)]

    def found(self, masks: Tensor) -> list[Row]:
        anatomy = self.anatomy
        return [
            row
            | {"depth": anatomy.found_depth(mask), "block_depths": anatomy.chains(mask)}
            | {"dead_layers": anatomy.dead_layers(mask), "mask": mask_to_hex(mask)}
            for row, mask in zip(self.tell(masks), masks.cpu())
        ]

    # ---- what is evaluated -----------------------------------------------------------------------------------------

    def reads(self, test: Pair, last: bool) -> int:
        return len(test[1]) + (10 * MIDDLE if last else MIDDLE)

    @torch.no_grad()
    def evaluate(self, batch: Batch, masks: Tensor, test: Pair, last: bool) -> Evaluation:
        """Run by run: statistics under its mask, then its errors; ``shipped`` at the last measurement."""
        model, weights = self.judge.model.to(batch.device), self.weights(batch.state.params)
        limit = len(batch.feed) if last else MIDDLE
        sums = torch.zeros(2, batch.runs, dtype=torch.float64, device=batch.device)
        shipped = list[Named]()
        with batch.compute.applied():
            for run in range(batch.runs):
                stack.load(self.judge, weights, run)
                with self.judge.masked(masks[run]):
                    recalibrate(model, _read(batch, batch.feed.inputs[:limit]))
                    sums[:, run] = _score(model.eval(), batch, test)
                if last:
                    shipped.append({name: t.detach().clone() for name, t in model.state_dict().items()})
        loss, error = sums / len(test[1])
        return Evaluation(loss, error, shipped if last else None)

    def stochastic(self, batch: Batch, theta: Tensor, test: Pair, seed: int) -> None:
        """Not measured: every drawn structure would need statistics of its own. The paper reports M* alone."""


def _read(batch: Batch, inputs: Tensor) -> Iterator[Tensor]:
    """Stored images as the network reads them, without augmentation, some at a time."""
    for start in range(0, len(inputs), CHUNK):
        yield batch.feed.floats(inputs[start : start + CHUNK])


def _score(model: nn.Module, batch: Batch, test: Pair) -> Tensor:
    """The sums of losses and of wrong classes ``(2)``, float64."""
    sums = torch.zeros(2, dtype=torch.float64, device=batch.device)
    for x, y in zip(_read(batch, test[0]), torch.split(test[1], CHUNK)):
        out = model(x)
        sums += torch.stack([cross_entropy(out, y).double() * len(y), (out.argmax(-1) != y).sum().double()])
    return sums
