"""Gates placed by hand: units, connections, branches; what they mean for the layers around them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.compact.layers import Select
from espalier.models import DenseNet


class Branches(nn.Module):
    """A gate for a whole residual branch, and one for each channel of another."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(n, 6, 3, padding=1) for n in (3, 6, 6))
        self.whole, self.each = espalier.Gate((6,)), espalier.Gate(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.whole(self.one(F.relu(x)))
        x = x + self.each(self.two(F.relu(x)))
        return self.head(x.mean((2, 3)))


class Features(nn.Module):
    """Gates on the model's own input, and one instance used twice."""

    def __init__(self):
        super().__init__()
        self.inputs, self.shared = espalier.Gate(7, dim=-1), espalier.Gate((3, 2), dim=-1)
        self.first, self.left, self.right = nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.tanh(self.first(self.inputs(x)))
        return self.left(self.shared(h)) + torch.relu(self.right(self.shared(h)))


CASES = {
    "branches": (Branches, (3, 3, 5, 5), 7),
    "features": (Features, (4, 7), 9),
    "connections": (lambda: DenseNet(depth=13, growth=3, classes=4, stem=4), (3, 3, 8, 8), 3 * (1 + 2 + 3 + 4)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_masked_equals_cut_and_costs_are_counted(name, train):
    torch.manual_seed(0)
    make, shape, d = CASES[name]
    model, x = make().double().train(train), torch.randn(shape, dtype=torch.float64)
    gated = espalier.attach(model, x)
    assert gated.d == d
    generator = torch.Generator().manual_seed(5)
    for i in range(24):
        mask = (torch.rand(d, generator=generator) < (0.9, 0.6, 0.4, 0.25, 0.1, 0.0)[i % 6]).float()
        canonical = gated.canonical(mask)
        assert name == "features" or (canonical <= mask).all()  # there `least` opens one
        small = gated.compact(mask).train(train)
        assert not any(isinstance(module, espalier.Gate) for module in small.modules())
        with gated.masked(canonical):
            expected = copy.deepcopy(model)(x)
        assert torch.allclose(small(x), expected, rtol=1e-9, atol=1e-12)
        assert gated.cost("parameters")(canonical).item() == sum(p.numel() for p in small.parameters())
        layers = [m for m in small.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        assert gated.cost("weights")(canonical).item() == sum(m.weight.numel() for m in layers)


def obvious_canonical(mask, layers):
    """Section 5.7 for three dense blocks, by the words: mask of all connections in the order of the gates.

    Sources of block b: 0 its input, 1.. its layers; reads[b][l]: which sources layer l reads (the last reader is the
    transition or classifier).
    """
    gates, start = [[] for _ in range(3)], 0
    for block in range(3):
        for layer in range(layers):
            gates[block].append(mask[start : start + layer + 1].tolist())
            start += layer + 1
    for block in range(3):
        gates[block].append(mask[start : start + layers + 1].tolist())
        start += layers + 1
    assert start == len(mask)
    while True:
        before = copy.deepcopy(gates)
        for block in range(3):
            for source in range(layers + 1):
                readers = [reader for reader in range(layers + 1) if source < len(gates[block][reader])]
                if source == 0:
                    silent = block > 0 and not any(gates[block - 1][layers])
                    feeder = (block - 1, layers) if block > 0 else None
                else:
                    silent = not any(gates[block][source - 1])
                    feeder = (block, source - 1)
                if silent:
                    for reader in readers:
                        gates[block][reader][source] = 0.0
                if feeder is not None and not any(gates[block][reader][source] for reader in readers):
                    gates[feeder[0]][feeder[1]] = [0.0] * len(gates[feeder[0]][feeder[1]])
        if gates == before:
            break
    inside = [bit for block in range(3) for layer in range(layers) for bit in gates[block][layer]]
    return torch.tensor(inside + [bit for block in range(3) for bit in gates[block][layers]])


def test_canonical_masks_of_connections_follow_the_words_of_the_paper():
    torch.manual_seed(0)
    model = DenseNet(depth=16, growth=2, classes=3, stem=3)
    gated = espalier.attach(model, torch.randn(2, 3, 8, 8))
    closed = 0
    for share in (0.2, 0.3, 0.5, 0.7) * 25:
        mask = (torch.rand(gated.d) < share).float()
        expected = obvious_canonical(mask, 4)
        assert torch.equal(gated.canonical(mask), expected)
        closed += int((mask - expected).sum())
    assert closed > 300
    batch = (torch.rand(2, 3, gated.d) < 0.4).double()
    rows = torch.stack([gated.canonical(row) for row in batch.reshape(-1, gated.d)]).reshape(2, 3, -1)
    assert torch.equal(gated.canonical(batch), rows)


def test_a_connection_is_left_out_before_batch_norm():
    model = DenseNet(depth=13, growth=3, classes=4, stem=4)
    gated = espalier.attach(model, torch.randn(2, 3, 8, 8))
    mask = torch.ones(gated.d)
    mask[gated.space.slices["blocks.0.2.gate"].start + 1] = 0
    small = gated.compact(mask)
    norm = small.blocks[0][2].norm
    assert isinstance(norm[0], Select)
    assert norm[0].index.tolist() == [0, 1, 2, 3, 7, 8, 9]
    assert norm[1].num_features == small.blocks[0][2].conv.in_channels == 7
    assert isinstance(small.blocks[0][1].norm, nn.BatchNorm2d)


def test_one_instance_used_twice_shares_its_bits():
    gated = espalier.attach(Features(), torch.randn(4, 7))
    assert {g.name: g.size for g in gated.space.groups} == {"inputs": 7, "shared": 2}


def test_a_gate_is_the_identity_until_a_mask_is_set():
    gate = espalier.Gate((2, 3), dim=1)
    x = torch.randn(4, 5, 6)
    assert torch.equal(gate(x), x)
    assert gate.state_dict() == {}


@pytest.mark.parametrize("functional", [False, True])
def test_directly_before_batch_norm_is_refused(functional):
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.norm = nn.Linear(4, 5), espalier.Gate(5, dim=-1), nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 2)

        def forward(self, x):
            h = self.gate(self.first(x))
            if functional:
                n = self.norm
                return self.head(F.batch_norm(h, n.running_mean, n.running_var, n.weight, n.bias, self.training))
            return self.head(self.norm(h))

    with pytest.raises(espalier.BadInput, match=r"gate.*BatchNorm"):
        espalier.attach(Early(), torch.randn(6, 4))


def test_a_gate_before_something_that_is_not_zero_at_zero_is_filled_or_refused():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.head = nn.Linear(4, 5), espalier.Gate(5, dim=-1), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(torch.sigmoid(self.gate(self.first(x))))

    with pytest.raises(espalier.BadInput, match="gate"):
        espalier.attach(Shifted(), torch.randn(6, 4))


def test_a_gate_never_reached_is_named():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[0].spare = espalier.Gate(5)
    with pytest.raises(espalier.BadInput, match="spare"):
        espalier.attach(model, torch.randn(3, 4))


@pytest.mark.parametrize("sizes", [0, (), (3, 0), (2, -1), True])
def test_bad_sizes(sizes):
    with pytest.raises(espalier.BadInput):
        espalier.Gate(sizes)


def test_a_width_that_does_not_fit_says_so():
    with pytest.raises(espalier.BadInput, match=r"5 indices.*\(3, 4\)"):
        espalier.Gate((2, 3), dim=1)(torch.randn(3, 4))
