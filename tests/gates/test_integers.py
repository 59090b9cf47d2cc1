"""Integers that follow a cut, and those that only happen to be equal to one that does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier


class Windowed(nn.Module):
    """Attention to the last positions, as many as the layer is wide."""

    def __init__(self):
        super().__init__()
        self.window, self.width = 16, 16
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (-1, 4)).transpose(1, 2) for y in self.qkv(x).split(self.width, 2))
        k, v = k[:, :, -self.window :], v[:, :, -self.window :]
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Limited(nn.Module):
    """A scale over the width, of so many positions at most."""

    def __init__(self):
        super().__init__()
        self.longest, self.width, self.scale = 16, 16, nn.Parameter(torch.rand(16))

    def forward(self, x):
        return (x[:, : self.longest] * self.scale).reshape(len(x), -1, self.width)


@pytest.mark.parametrize(("part", "kinds"), [(Windowed, ("heads",)), (Limited, ("width",))])
def test_an_integer_that_is_equal_by_chance_stays(part, kinds):
    """The example is shorter than the window, so that a smaller window gives the same outputs there."""
    torch.manual_seed(2)
    norm = nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(5, 16), part(), part(), norm, nn.Linear(16, 3)).double()
    gated = espalier.attach(model, torch.randn(2, 1, 5).double(), kinds=kinds)
    mask = (torch.arange(gated.d) % 4 < 2).float()
    small = gated.compact(mask)
    assert not gated.refused
    assert [small[i].width for i in (1, 2)] == [8, 8]
    x = torch.randn(2, 16, 5).double()
    with gated.masked(gated.canonical(mask)):
        torch.testing.assert_close(model(x), small(x))
    assert {name.partition(".")[2] for name in gated.plan(mask).attributes if name[0] in "12"} <= {
        "width",
        *(f"{layer}.{end}_features" for layer in ("qkv", "out") for end in ("in", "out")),
    }
