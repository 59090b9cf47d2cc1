"""Whole blocks as gates: a closed one hands its input on, costs nothing, and is gone from what ships."""

import numpy as np
import pytest
import torch
from torch import nn

import espalier
from espalier.compact.layers import Pass
from espalier.gates.verify import random_masks


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, scale=1.0, several=False):
        x = x + scale * self.down(torch.tanh(self.up(self.norm(x))))
        return (x, None) if several else x


class Stack(nn.Module):
    """Three blocks, called with their input by name, that give a tuple if asked to."""

    def __init__(self, several: bool = False):
        super().__init__()
        self.stem, self.head, self.several = nn.Linear(5, 8), nn.Linear(8, 3), several
        self.layers = nn.ModuleList(Block(8, hidden) for hidden in (6, 10, 12))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            if self.several:
                x, _ = layer(x=x, scale=0.5, several=True)
            else:
                x = layer(x)
        return self.head(x)


X = torch.randn(4, 5, dtype=torch.float64)


def prepared(**options) -> nn.Module:
    torch.manual_seed(2)
    return Stack(**options).double()


def without(model: nn.Module, closed: list[int]) -> nn.Module:
    """The user's own network, built with fewer blocks."""
    fewer = prepared(several=model.several)
    fewer.layers = nn.ModuleList(layer for i, layer in enumerate(fewer.layers) if i not in closed)
    return fewer


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("closed", [[0], [2], [0, 1], [0, 1, 2]])
def test_a_closed_block_is_the_network_without_it(closed, several):
    model = prepared(several=several)
    gated = espalier.attach(model, X, kinds=("blocks",))
    (group,) = gated.structure.groups
    assert (group.name, group.size, group.least) == ("layers", 3, 0)
    mask = torch.ones(3)
    mask[closed] = 0
    small, fewer = gated.compact(mask), without(model, closed)
    with gated.masked(mask):
        assert torch.equal(model(X), fewer(X))
    assert torch.equal(small(X), fewer(X))
    assert [i for i, layer in enumerate(small.layers) if isinstance(layer, Pass)] == closed
    for kind, least in (("parameters", 0), ("weights", 2)):
        assert gated.cost(kind)(mask) == sum(p.numel() for p in fewer.parameters() if p.ndim >= least)


def test_a_closed_block_closes_what_is_inside():
    gated = espalier.attach(prepared(), X, kinds=("units", "width", "blocks"))
    mask = torch.ones(gated.d)
    mask[gated.space.slices["layers"].start + 1] = 0
    canonical = gated.canonical(mask)
    sums = {name: int(canonical[where].sum()) for name, where in gated.space.slices.items()}
    assert sums["layers.1.up"] == 0
    assert sums["layers.0.up"] == 6
    assert sums["layers"] == 2


def test_slopes_compare_a_block_with_its_input():
    model = prepared()
    gated = espalier.attach(model, X, kinds=("blocks",))
    mask = torch.tensor([1.0, 0.0, 1.0]).double()

    def loss(m):
        x = model.stem(X)
        for layer, own in zip(model.layers, m):
            x = own * layer.down(torch.tanh(layer.up(layer.norm(x)))) + x
        return model.head(x).square().sum()

    with gated.masked(mask, slopes=True) as slopes:
        model(X).square().sum().backward()
        found = slopes()
    for i in range(3):
        step = torch.zeros(3).double()
        step[i] = 1e-6
        difference = (loss(mask + step) - loss(mask - step)).item() / 2e-6
        assert found[i].item() == pytest.approx(difference, rel=1e-6)


def test_what_is_inside_a_block_is_tried_while_it_is_open():
    """A trial has few masks, and one of two blocks may be closed in all of them."""
    gated = espalier.attach(prepared(), X, kinds=("units", "blocks"))
    structure, blocks = gated.structure, gated.space.slices["layers"]
    for seed in range(20):
        first, *others = random_masks(structure, None, np.random.default_rng(seed), 3)
        assert first[blocks].all()
        assert not first[: blocks.start].all()
        assert not all(mask[blocks].all() for mask in others)
        (alone,) = random_masks(structure, {"layers"}, np.random.default_rng(seed), 1)
        assert not alone[blocks].all()


def test_layers_of_torchs_encoder_are_taken_out():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(5, 12), nn.TransformerEncoder(layer, 3), nn.Linear(12, 2)).double().eval()
    x = torch.randn(2, 4, 5).double()
    gated = espalier.attach(model, x, kinds=("heads", "blocks"))
    where = gated.space.slices["1.layers"]
    mask = torch.ones(gated.d)
    mask[where.start] = mask[0] = 0
    small = gated.compact(mask)
    assert len(small[1].layers) == 2
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), gated.masked(gated.canonical(mask)):
            torch.testing.assert_close(small(x), model(x), rtol=1e-9, atol=1e-12)
    mask[where] = 0  # torch looks into its first layer, so one stays
    assert len(gated.compact(mask)[1].layers) == 1


def test_what_changes_the_channels_is_no_block():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 2))
    with pytest.raises(espalier.NoGates):
        espalier.attach(model, torch.randn(2, 8), kinds=("blocks",))
    shared = prepared()
    shared.layers[1] = shared.layers[0]
    gated = espalier.attach(shared, X, kinds=("blocks",))
    assert gated.structure.groups[0].reads == ("layers.2",)


class ChannelNorm(nn.Module):
    """A convolution, perhaps, and a layer norm over the channels of a map."""

    def __init__(self, circular: bool):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular") if circular else nn.Identity()
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.conv(x).movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("circular", [True, False])
def test_a_block_is_masked_for_any_number_of_examples_and_any_size(circular):
    """The example is as long as wide as it has channels, and circular padding makes a tensor for its examples."""
    model = nn.Sequential(nn.Conv2d(3, 6, 1), ChannelNorm(circular), ChannelNorm(circular), nn.Conv2d(6, 2, 1)).double()
    gated = espalier.attach(model, torch.randn(3, 3, 6, 6).double(), kinds=("blocks",))
    mask = torch.zeros(gated.d)
    small, x = gated.compact(mask), torch.randn(5, 3, 8, 8).double()
    with gated.masked(gated.canonical(mask)):
        torch.testing.assert_close(model(x), small(x), rtol=1e-9, atol=1e-12)
