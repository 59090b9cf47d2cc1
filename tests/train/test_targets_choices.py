"""Targets on a space of bits and choices, through fit and sweep, with a gated model written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import networks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.train import fit, sweep

DATA, _ = networks.digit_vectors(256)
WIDTH, WIDE = 8, 24


class Head(nn.Module):
    """64 inputs, gated hidden units, and one of two ways from them to the classes: straight, or through a layer."""

    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.straight = nn.Linear(hidden, 10)
        self.inner, self.outer = nn.Linear(hidden, WIDE), nn.Linear(WIDE, 10)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH + 2) if self.mask is None else self.mask.to(x.dtype)
        hidden = F.relu(self.first(x)) * mask[:WIDTH]
        straight: Tensor = mask[WIDTH] * self.straight(hidden)
        return straight + mask[WIDTH + 1] * self.outer(F.relu(self.inner(hidden)))


class GatedHead:
    """The interface of an attached model."""

    def __init__(self) -> None:
        self.model = Head()
        self.space = espalier.Space([espalier.Bits("hidden", WIDTH, least=1), espalier.Choice("way", 2)])

    @contextmanager
    def masked(self, mask: Tensor, *, slopes: bool = False) -> Iterator[Callable[[], Tensor]]:
        self.model.mask = mask.clone().requires_grad_() if slopes else mask
        try:
            yield lambda: self.model.mask.grad
        finally:
            self.model.mask = None

    def call(self, tensors: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
        with self.masked(mask):
            out: Tensor = torch.func.functional_call(self.model, tensors, (x,))
        return out

    def canonical(self, mask: Tensor) -> Tensor:
        return mask

    def cost(self, kind: str) -> espalier.Cost:
        """Weights, whatever the kind: 64 for a unit, what each way reads of it, and the long way's outer layer."""
        bits, d = espalier.Form.run(0, WIDTH), WIDTH + 2
        straight, long = (espalier.Form.run(WIDTH + k, WIDTH + k + 1) for k in (0, 1))
        return (
            espalier.Cost.product([bits], d=d, scale=64.0)
            + espalier.Cost.product([bits, straight], d=d, scale=10.0)
            + espalier.Cost.product([bits, long], d=d, scale=float(WIDE))
            + espalier.Cost.product([long], d=d, scale=10.0 * WIDE)
        )

    def compact(self, mask: Tensor) -> nn.Module:
        kept, model = mask[:WIDTH].nonzero().flatten(), self.model
        first = nn.Linear(64, len(kept))
        first.weight.data, first.bias.data = model.first.weight.data[kept], model.first.bias.data[kept]
        ways = [[model.straight], [model.inner, nn.ReLU(), model.outer]][int(mask[-1])]
        copied = [nn.ReLU() if isinstance(way, nn.ReLU) else nn.Linear(1, 1) for way in ways]
        for copy, way in zip(copied, ways):
            if isinstance(way, nn.Linear):
                weight = way.weight.data if way is model.outer else way.weight.data[:, kept]
                copy.weight, copy.bias = nn.Parameter(weight.clone()), nn.Parameter(way.bias.data.clone())
        return nn.Sequential(first, nn.ReLU(), *copied)


FULL = 64 * WIDTH + WIDTH * WIDE + WIDE * 10
SMALLEST = 74 / FULL


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("target", [SMALLEST * (1 + 1e-6), 0.25, 0.6, 1.0])
def test_fit(target: float) -> None:
    torch.manual_seed(0)
    result = fit(GatedHead(), DATA, loss=F.cross_entropy, epochs=4, batch_size=32, target=target, quiet=True)  # type: ignore[arg-type]
    share = weights(result.model) / FULL
    assert share <= target * (1 + 1e-9)
    assert result.share_after == pytest.approx(share)
    assert result.mask[WIDTH:].sum() == 1
    assert result.target == target
    assert f"target {target:.2%} of the weights, reached {result.share_before:.2%}" in str(result)
    if target < 0.3:  # the long way alone costs 26%
        assert result.mask[WIDTH:].tolist() == [1.0, 0.0]


def test_sweep_with_a_target_for_each_run() -> None:
    targets = [SMALLEST * (1 + 1e-6), 0.25, 0.6, 1.0]
    results = sweep(GatedHead, DATA, targets=targets, seeds=(0, 1), epochs=4, batch_size=32, quiet=True)
    for result in results:
        assert result.target is not None
        assert weights(result.model) / FULL <= result.target * (1 + 1e-9)
        assert result.share_after == pytest.approx(weights(result.model) / FULL)
        assert result.mask[WIDTH:].sum() == 1
    assert results[0].mask.sum() == results[1].mask.sum() == 2


def test_what_cannot_be_met_is_refused() -> None:
    with pytest.raises(espalier.Unreachable, match=r"below the smallest reachable share 0\.078"):
        fit(GatedHead(), DATA, loss=F.cross_entropy, epochs=1, target=0.05, quiet=True)  # type: ignore[arg-type]
