"""The paper's fully-connected network with a gate on every hidden unit, as a pure function of stacked weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import vmap

from espalier.cost import Cost, Form
from espalier.space import Bits, Space
from espalier.study.settings import RunSpec
from espalier.study.subject import Evaluation, Pair, Row
from espalier.train.batched.batch import Batch
from espalier.train.batched.chain import Chain
from espalier.train.batched.step import Loss

DRAWS = 20  # structures of the stochastic prediction
CHUNK = 1000  # test images at once


@dataclass(frozen=True)
class Network:
    """widths: inputs, hidden units of each layer, classes. ReLU; a gate on each hidden unit's output: m_i F(X_i).

    A layer may lose all its units (``least`` 0): the paper puts no floor under a layer.

    >>> Network((784, 784, 784, 784, 10)).space.d
    2352
    """

    widths: tuple[int, ...]
    share = "unit_share"

    def describe(self) -> Row:
        return {"widths": list(self.widths)}

    def layout(self) -> Row:
        return {}

    def gradient(self, loss: Loss) -> None:
        return None

    @property
    def hidden(self) -> tuple[int, ...]:
        return self.widths[1:-1]

    @cached_property
    def space(self) -> Space:
        return Space([Bits(f"layer {i}", width, least=0) for i, width in enumerate(self.hidden, 1)])

    @cached_property
    def layers(self) -> list[slice]:
        """Where each hidden layer's gates are in a mask."""
        return [where for _, where in self.space.bits]

    @property
    def groups(self) -> list[slice]:
        return self.layers

    def call(self, params: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
        """One network under one mask ``(d)``. x: ``(B, inputs)``. Returns ``(B, classes)``."""
        return self.chain.outputs(params, mask, x)

    @cached_property
    def chain(self) -> Chain:
        names = [(f"{i}.weight", f"{i}.bias") for i in range(len(self.widths) - 1)]
        return Chain(tuple(names), tuple(self.layers))

    def start(self, seeds: Sequence[int], masks: Tensor, device: torch.device) -> dict[str, Tensor]:
        """He initialisation, normal by fan-in, biases 0: ``(R, out, in)`` and ``(R, out)``.

        masks: ``(R, d)``; the fan-in is the number of units that are read, so that under a fixed mask the open part is
        a small network's own initialisation. Runs of equal seed scale the same draws.
        """
        kept = [torch.full((len(seeds),), self.widths[0])] + [masks[:, where].sum(-1).cpu() for where in self.layers]
        params = dict[str, Tensor]()
        for i, (inputs, outputs) in enumerate(pairwise(self.widths)):
            drawn = {seed: _normal(seed, i, outputs, inputs) for seed in set(seeds)}
            weight = torch.empty(len(seeds), outputs, inputs, device=device)
            for run, seed in enumerate(seeds):
                weight[run] = (drawn[seed] * (2 / max(float(kept[i][run]), 1.0)) ** 0.5).to(device)
            params[f"{i}.weight"] = weight
            params[f"{i}.bias"] = torch.zeros(len(seeds), outputs, device=device)
        return params

    def canonical(self, masks: Tensor) -> Tensor:
        """masks ``(R, d)`` with dead gates closed: without any unit in one layer, no layer carries information."""
        alive = torch.stack([masks[:, where].any(-1) for where in self.layers]).all(0)
        return torch.where(alive.unsqueeze(-1), masks, 0.0)

    def units(self, masks: Tensor) -> Tensor:
        """Open gates of each layer ``(R, layers)``."""
        return torch.stack([masks[:, where].sum(-1) for where in self.layers], -1)

    def tell(self, masks: Tensor) -> list[Row]:
        """Units of each layer, and the shares of units and of weights."""
        ones = torch.ones_like(masks[0])
        costs = {"unit_share": self.unit_cost, "weight_share": self.weight_cost}
        shares = {name: (cost(masks) / cost(ones)).tolist() for name, cost in costs.items()}
        units = self.units(masks).long().tolist()
        return [{"units": row} | {name: share[i] for name, share in shares.items()} for i, row in enumerate(units)]

    def found(self, masks: Tensor) -> list[Row]:
        return self.tell(masks)

    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        return self.uniform(1.0 if run.size is None else run.size), {}

    def uniform(self, share: float) -> Tensor:
        """The mask ``(d)`` with this share of the units of every layer, at least one."""
        mask = torch.zeros(self.space.d)
        for where in self.layers:
            width = where.stop - where.start
            mask[where.start : where.start + max(round(share * width), 1)] = 1.0
        return mask

    def evaluate(self, batch: Batch, masks: Tensor, test: Pair, last: bool) -> Evaluation:
        return Evaluation(*batch.evaluate(masks, *test, chunk=CHUNK))

    def reads(self, test: Pair, last: bool) -> int:
        return len(test[1])

    @torch.no_grad()
    def stochastic(self, batch: Batch, theta: Tensor, test: Pair, seed: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator(theta.device).manual_seed(seed)
        size = (DRAWS, *theta.shape)
        masks = torch.rand(size, dtype=theta.dtype, device=theta.device, generator=generator) < theta
        sums = torch.zeros(2, len(theta), dtype=torch.float64, device=theta.device)
        over_runs = vmap(self.call, in_dims=(0, 0, None))
        with batch.compute.applied():
            for start in range(0, len(test[1]), CHUNK):
                x = batch.feed.floats(test[0][start : start + CHUNK])
                y = test[1][start : start + CHUNK]
                mean = torch.zeros((), device=theta.device)
                for drawn in masks:
                    mean = mean + over_runs(batch.state.params, drawn.to(x.dtype), x).softmax(-1) / DRAWS
                right = mean.gather(-1, y.view(1, -1, 1).expand(len(theta), -1, 1)).squeeze(-1)
                sums[0] += -right.clamp(min=1e-30).log().to(torch.float64).sum(-1)
                sums[1] += (mean.argmax(-1) != y).sum(-1)
        return DRAWS, sums[0] / len(test[1]), sums[1] / len(test[1])

    @cached_property
    def unit_cost(self) -> Cost:
        """One for each unit: the paper's cost."""
        return Cost.linear([1.0] * self.space.d)

    @cached_property
    def weight_cost(self) -> Cost:
        """The elements of the weights that are read: a product of the units on both sides of each layer."""
        forms = [Form.run(where.start, where.stop) for where in self.layers]
        d = self.space.d
        cost = Cost.product([forms[0]], d=d, scale=self.widths[0])
        for before, after in pairwise(forms):
            cost = cost + Cost.product([before, after], d=d)
        return cost + Cost.product([forms[-1]], d=d, scale=self.widths[-1])

    def cost(self, kind: str) -> Cost:
        """kind: "units" or "weights"."""
        return {"units": self.unit_cost, "weights": self.weight_cost}[kind]


def _normal(seed: int, layer: int, outputs: int, inputs: int) -> Tensor:
    # On the CPU whatever the device, so that a seed means the same network everywhere.
    generator = torch.Generator().manual_seed(seed * 1000 + layer)
    return torch.randn(outputs, inputs, generator=generator)
