"""The paper's networks: their gates, costs and parameters."""

import pytest
import torch
from torch import nn

import espalier
from espalier.models import MLP, DenseNet


def test_mlp_has_a_gate_on_each_hidden_unit():
    model = MLP()
    gated = espalier.attach(model, torch.rand(2, 784))
    assert gated.d == 2352
    assert [g.size for g in gated.space.groups] == [784] * 3
    ones = torch.ones(2352)
    assert gated.cost("weights")(ones).item() == 3 * 784 * 784 + 7840
    assert gated.cost("parameters")(ones).item() == sum(p.numel() for p in model.parameters())
    kept = torch.zeros(2352)
    kept[:340] = kept[784 : 784 + 141] = kept[1568 : 1568 + 126] = 1  # the second row of the paper's table 1
    share = gated.cost("weights")(kept) / gated.cost("weights")(ones)
    assert round(100 * share.item(), 1) == 18.0
    assert round(100 * gated.cost("units")(kept).item() / 2352, 1) == 25.8
    small = gated.compact(kept)
    assert [tuple(layer.weight.shape) for layer in (*small.layers, small.head)] == [
        (340, 784),
        (141, 340),
        (126, 141),
        (10, 126),
    ]
    with gated.masked(kept):
        x = torch.rand(3, 1, 28, 28)
        assert torch.allclose(model(x), small(x), atol=1e-5)


def test_densenet_has_a_gate_on_each_connection_with_the_papers_linear_costs():
    model = DenseNet()
    assert sum(p.numel() for p in model.parameters()) == 1_019_722
    gated = espalier.attach(model, torch.rand(1, 3, 8, 8), check=False)
    assert gated.d == 273
    per_block = [sum(g.size for g in gated.space.groups if g.name.startswith(f"blocks.{b}.")) for b in range(3)]
    assert per_block == [78] * 3
    cost = gated.cost("weights")
    for theta in (torch.ones(273), torch.rand(273), torch.zeros(273)):
        assert cost.gradient(theta).sum().item() == 1_001_184
    stem = 3 * 16 * 9  # read by gates, but itself reading no gate: always there
    assert cost(torch.ones(273)).item() == 1_001_184 + stem
    c = cost.gradient(torch.zeros(273))
    first = gated.space.slices["blocks.0.1.gate"]
    assert c[first].tolist() == [16 * 12 * 9, 12 * 12 * 9]
    assert c[gated.space.slices["gate"]].tolist() == [10 * 304, *[10 * 12] * 12]


def test_initialisation_is_he_normal():
    torch.manual_seed(0)
    model = MLP(784, (784, 784), 10)
    weight = model.layers[1].weight
    assert weight.std().item() == pytest.approx((2 / 784) ** 0.5, rel=0.01)
    assert not model.layers[1].bias.any()
    conv = DenseNet(depth=7, growth=64).blocks[0][0].conv
    assert conv.weight.std().item() == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.03)


def test_dropout_is_off_by_default_and_after_each_hidden_layer_on_request():
    torch.manual_seed(0)
    x = torch.rand(5, 784)
    model = MLP()
    assert torch.equal(model(x), model(x))
    assert not torch.equal(MLP(dropout=0.5)(x), MLP(dropout=0.5)(x))


def test_an_odd_depth_is_refused():
    with pytest.raises(espalier.BadInput, match="41"):
        DenseNet(depth=41)


def test_nothing_below_knows_these_networks():
    """The same gates in a network of one's own do the same."""
    mine = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), espalier.Gate(5), nn.Linear(5, 2))
    gated = espalier.attach(mine, torch.rand(3, 6))
    assert gated.compact(torch.tensor([1.0, 0, 1, 0, 0]))[0].out_features == 2
