"""A hand-written gated MLP with the interface of an attached model, small enough to be checked by eye; its batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import espalier
from espalier.train.batched.batch import Batch, Compute

WIDTHS = [6, 7, 5, 3]
RUNS, SAMPLES, SIZE = 3, 4, 8


class GatedMLP:
    """widths: input, hidden .., output; a gate on each hidden unit's output."""

    def __init__(self, widths: list[int], dtype: torch.dtype = torch.float32) -> None:
        self.widths = widths
        self.model = nn.ModuleList([nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)])
        self.space = espalier.Space([espalier.Bits(f"fc{i}", w, least=1) for i, w in enumerate(widths[1:-1])])
        self.d = self.space.d

    def call(self, tensors: dict[str, Tensor], mask: Tensor, x: Tensor, each: bool = False) -> Tensor:
        """mask ``(d)``, or ``(n, d)`` with one for each example."""
        start = 0
        for i, width in enumerate(self.widths[1:]):
            x = nn.functional.linear(x, tensors[f"{i}.weight"], tensors[f"{i}.bias"])
            if i < len(self.widths) - 2:
                x = torch.relu(x) * mask[..., start : start + width]
                start += width
        return x


class Recorder:
    """A source that remembers the masks it handed out and the losses and slopes it was told."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.seen: list[Tensor] = []
        self.told: list[Tensor] = []
        self.slopes: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def masks(self, noise: Any) -> Tensor:
        self.seen.append(self.source.masks(noise).clone())
        return self.seen[-1]

    def learn(self, masks: Tensor, losses: Tensor, noise: Any, slopes: Any = None) -> None:
        self.told.append(losses.clone())
        if slopes is not None:
            self.slopes.append(slopes[0].clone())
        self.source.learn(masks, losses, noise, slopes)


def data(dtype: torch.dtype = torch.float64, n: int = 50) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(n, WIDTHS[0], generator=rng, dtype=dtype), torch.randint(0, WIDTHS[-1], (n,), generator=rng)


def initial(dtype: torch.dtype = torch.float64, runs: int = RUNS) -> tuple[list[GatedMLP], dict[str, Tensor]]:
    """One model for each run, and copies of their parameters, stacked."""
    models = []
    for seed in range(runs):
        torch.manual_seed(seed)
        models.append(GatedMLP(WIDTHS, dtype))
    names = [name for name, _ in models[0].model.named_parameters()]
    return models, {name: torch.stack([m.model.get_parameter(name).detach() for m in models]) for name in names}


def batch(
    params: dict[str, Tensor],
    source: Any,
    optimizer: Any,
    schedule: Any,
    compute: Compute | None = None,
    *,
    loss: Any = nn.functional.cross_entropy,
    call: Any = None,
) -> Batch:
    first = next(iter(params.values()))
    return Batch(
        call or GatedMLP(WIDTHS).call,
        params,
        {},
        data=data(first.dtype),
        seeds=list(range(len(first))),
        source=source,
        loss=loss,
        optimizer=optimizer,
        schedule=schedule,
        total=20,
        batch_size=SIZE,
        samples=SAMPLES,
        compute=compute,
    )
