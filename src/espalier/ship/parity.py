"""Whether two networks give the same: their outputs side by side, and inputs of any batch size to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.train import pytree


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor; infinite where shapes differ, or where one
    is finite and the other is not.

    >>> apart([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])])
    0.2
    """
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    worst = 0.0
    for a, b in zip((t.double() for t in ours), (t.double() for t in theirs)):
        if not a.numel():
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, (a - b).abs())
        if not bool(difference.isfinite().all()):
            return float("inf")
        finite = b[b.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        worst = max(worst, float(difference.max()) / max(scale, 1e-12))
    return worst


def repeated(inputs: Any, batch: int) -> Any:
    """So many real examples: those given, from the first again where they do not suffice."""
    n = pytree.count(inputs, "the inputs")
    return pytree.each(lambda t: t[torch.arange(batch, device=t.device) % n], inputs)


def random_like(inputs: Any, batch: int, seed: int = 0) -> Any:
    """So many random examples: normal with the mean and deviation of those given; integers within their range."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        shape = (batch, *tensor.shape[1:])
        if tensor.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if tensor.is_floating_point():
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            values = tensor.detach().cpu().double()
            return (noise * values.std(correction=0) + values.mean()).to(tensor.dtype)
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, shape, generator=generator).to(tensor.dtype)

    return pytree.each(draw, inputs)
