"""Widths in multiples: gates are blocks of units alike in importance; what is searched is what ships."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import espalier


def flat(blocks) -> list[int]:
    return list(itertools.chain.from_iterable(blocks))


def perceptron(*widths: int) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def convolutional() -> nn.Sequential:
    torch.manual_seed(2)
    first = [nn.Conv2d(3, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20), nn.ReLU()]
    second = [nn.Conv2d(20, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*first, *second, nn.Linear(16, 4)).double()
    with torch.no_grad():
        model[1].weight.uniform_(0.1, 2.0)
    return model


IMAGES = torch.randn(4, 3, 8, 8, dtype=torch.float64)


def test_blocks_hold_every_unit_once_and_widths_are_multiples():
    model = perceptron(6, 40, 24, 3)
    x = torch.randn(5, 6).double()
    gated = espalier.attach(model, x, round_to=8)
    assert [(g.name, g.size) for g in gated.space.groups] == [("0", 5), ("2", 3)]
    assert sorted(flat(gated.blocks["0"])) == list(range(40))
    for seed in range(4):
        mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        small = gated.compact(mask)
        opened = gated.canonical(mask)
        kept = sorted(flat(b for b, m in zip(gated.blocks["0"], opened[:5]) if m))
        assert small[0].out_features % 8 == small[2].out_features % 8 == 0
        assert torch.equal(small[0].weight, model[0].weight[kept])
        with gated.masked(opened):
            torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-12)
        assert gated.cost("units")(opened) == small[0].out_features + small[2].out_features
        assert gated.cost("weights")(opened) == sum(small[i].weight.numel() for i in (0, 2, 4))


def test_a_width_that_is_no_multiple_has_one_smaller_block_and_explain_says_so():
    gated = espalier.attach(convolutional(), IMAGES, round_to=8)
    assert [len(block) for block in gated.blocks["0"]] == [8, 8, 4]
    text = gated.explain()
    assert "2 gates open 8 of these each, one of 4, alike in importance" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_all_open_is_the_model_bit_for_bit():
    model = convolutional().eval()
    expected = model(IMAGES)
    gated = espalier.attach(model, IMAGES, round_to=8)
    with gated.masked(torch.ones(gated.d)):
        assert torch.equal(model(IMAGES), expected)


def test_a_block_holds_units_alike_in_importance():
    """By hand: the size of what writes a unit times the size of what reads it; behind BatchNorm its scale writes."""
    model = perceptron(6, 24, 3)
    with torch.no_grad():
        model[0].weight.mul_(torch.linspace(0.1, 3, 24).double()[torch.randperm(24)][:, None])
    gated = espalier.attach(model, torch.randn(5, 6).double(), round_to=8)
    importance = (model[0].weight.norm(dim=1) * model[2].weight.norm(dim=0)).detach().numpy()
    assert flat(gated.blocks["0"]) == np.argsort(-importance).tolist()
    model = convolutional()
    gated = espalier.attach(model, IMAGES, round_to=8)
    importance = model[1].weight.abs() * model[3].weight.square().sum((0, 2, 3)).sqrt()
    assert flat(gated.blocks["0"]) == (-importance).argsort().tolist()


def test_closing_the_last_blocks_of_a_trained_network_costs_less_than_blocks_by_position():
    torch.manual_seed(3)
    model = perceptron(8, 32, 2)
    x = torch.randn(256, 8).double()
    y = (x[:, 0] * x[:, 1] > 0).long()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for _ in range(200):
        loss = nn.functional.cross_entropy(model(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()

    def halved(round_to):
        gated = espalier.attach(model, x, round_to=round_to)
        with torch.no_grad(), gated.masked(torch.tensor([1.0, 1.0, 0.0, 0.0])):
            lost = nn.functional.cross_entropy(model(x), y).item()
        gated.detach()
        return lost

    places = {"0": [list(range(i, i + 8)) for i in (0, 8, 16, 24)]}
    assert halved(8) < 0.9 * halved(places)


def test_heads_count_by_their_channels():
    layer = nn.TransformerEncoderLayer(32, 8, 48, batch_first=True, dropout=0.0)
    model = nn.Sequential(layer, nn.Linear(32, 3)).double()
    x = torch.randn(2, 5, 32).double()
    gated = espalier.attach(model, x, round_to=8)  # heads of 4 channels: two in a block
    sizes = {group.name: group.blocks for group in gated.structure.groups}
    assert sizes == {"0.self_attn": (2, 2, 2, 2), "0.linear1": (8,) * 6}
    gated.detach()
    gated = espalier.attach(model, x, round_to=4)
    assert "0.self_attn" not in gated.blocks
    assert gated.space.slices["0.self_attn"] == slice(0, 8)


def test_by_group_and_auto():
    model, x = perceptron(6, 40, 24, 3), torch.randn(5, 6).double()
    gated = espalier.attach(model, x, round_to={"2": 4})
    assert [(g.name, g.size) for g in gated.space.groups] == [("0", 40), ("2", 6)]
    gated.detach()
    gated = espalier.attach(model, x, round_to="auto")
    assert len(gated.blocks["0"][0]) == (16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8)
    blocks = gated.blocks
    gated.detach()
    with torch.no_grad():
        model[0].weight.normal_()
    assert espalier.attach(model, x, round_to=blocks).blocks == blocks


def test_auto_leaves_every_layer_two_blocks():
    gated = espalier.attach(perceptron(6, 40, 8, 3), torch.randn(5, 6).double(), round_to="auto")
    assert [len(block) for block in gated.blocks["2"]] == [4, 4]
    assert not gated.refused


def test_units_too_few_for_two_blocks_are_no_gates_and_named():
    gated = espalier.attach(perceptron(6, 40, 8, 3), torch.randn(5, 6).double(), round_to=8)
    assert [g.name for g in gated.space.groups] == ["0"]
    assert "one block" in gated.refused["2"]
    with pytest.raises(espalier.NoGates, match="one block"):
        espalier.attach(perceptron(6, 8, 3), torch.randn(5, 6).double(), round_to=8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "at least 1"),
        (2.5, "integer"),
        ("large", "auto"),
        ({"wing": 8}, "wing"),
        ({"0": [[0, 1], [1, 2]]}, "each of its 40 units once"),
        ({"0": "8"}, "integer"),
    ],
)
def test_bad_values_are_named(given, said):
    with pytest.raises(espalier.EspalierError, match=said):
        espalier.attach(perceptron(6, 40, 24, 3), torch.randn(5, 6).double(), round_to=given)


def test_placed_gates_are_as_they_were_placed():
    model = nn.Sequential(nn.Linear(4, 8), espalier.Gate(8), nn.Linear(8, 2))
    with pytest.raises(espalier.BadInput, match="placed by hand"):
        espalier.attach(model, torch.randn(2, 4), round_to=4)
