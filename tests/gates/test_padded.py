"""Code that insists on a width: layers around it are cut, and zeros stand in between them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from zoo.counter import by_layers, by_operations

from .test_found import masks_of


class Heads(nn.Module):
    """Attention as it is often written: the size of a head is the width of the stream over the number of heads."""

    def __init__(self):
        super().__init__()
        self.heads, self.qkv, self.out, self.head = 4, nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (y.view(n, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).reshape(n, t, c)))


class Biased(Heads):
    """The same with parameters for each head between the layers: a temperature, and a bias looked up in a table."""

    def __init__(self):
        super().__init__()
        self.warm, self.table = nn.Parameter(torch.rand(4, 1, 1)), nn.Parameter(torch.randn(9, 4))
        self.register_buffer("place", torch.arange(5)[:, None] - torch.arange(5) + 4)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (y.view(n, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        scores = self.warm * (q @ k.transpose(-2, -1)) + self.table[self.place].permute(2, 0, 1)
        return self.head(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c)))


class Flattened(nn.Module):
    """A number of columns that is written out, behind BatchNorm or not."""

    def __init__(self, normed):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 6, 3, bias=not normed)
        self.norm = nn.BatchNorm2d(6) if normed else nn.Identity()
        self.head = nn.Linear(6 * 9, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.second(F.relu(self.first(x))))), 2)
        return self.head(x.view(-1, 54))


class Maxout(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.hidden, self.head = nn.Linear(7, 12), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(F.relu(self.hidden(self.wide(x).view(-1, 4, 3).amax(-1))))


class Mixed(nn.Module):
    """Tokens mixed for every channel that is open, which zeros would not save. A hidden layer behind it."""

    def __init__(self):
        super().__init__()
        self.stem, self.tokens, self.up, self.head = (nn.Linear(n, m) for n, m in ((6, 8), (5, 5), (8, 7), (7, 2)))

    def forward(self, x):
        tokens = self.tokens(self.stem(x).view(-1, 5, 8).transpose(1, 2))
        return self.head(F.relu(self.up(F.relu(tokens.transpose(1, 2)))))


NETWORKS = {
    "heads": (Heads, (2, 5, 16), {"qkv": 4}),
    "biased": (Biased, (2, 5, 16), {"qkv": 4}),
    "flattened": (lambda: Flattened(False), (3, 1, 10, 10), {"second": 6}),
    "normed": (lambda: Flattened(True), (3, 1, 10, 10), {"second": 6}),
    "maxout": (Maxout, (3, 7), {"wide": 4}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_cut_around_code_that_keeps_its_width(name, tmp_path):
    torch.manual_seed(0)
    make, shape, padded = NETWORKS[name]
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    gated = espalier.attach(model, x)
    assert not gated.refused
    assert {group: len(range(gated.d)[gated.space.slices[group]]) for group in padded} == padded
    assert "keeps its width, with zeros" in gated.explain()
    for mask in masks_of(gated, 8):
        mask, small = gated.canonical(mask), gated.compact(mask)
        for training in (False, True):
            model.train(training), small.train(training)
            with gated.masked(mask):
                masked = model(x)
            torch.testing.assert_close(small(x), masked, rtol=0, atol=1e-12)
        assert gated.cost("weights")(mask).item() == by_layers(small).weights
        assert gated.cost("macs")(mask).item() == by_operations(small, (x,)).macs
        assert gated.cost("parameters")(mask).item() == by_layers(small).parameters
    espalier.save(small, tmp_path)
    again = espalier.load(tmp_path, lambda: make().double())
    assert torch.equal(again.eval()(x), small.eval()(x))


def test_attention_of_padded_heads_is_stated_as_it_runs():
    gated = espalier.attach(Heads(), torch.randn(2, 5, 16))
    mask = torch.ones(gated.d)
    mask[gated.space.slices["qkv"]] = torch.tensor([1.0, 0, 0, 0])
    products = next(line for line in gated.explain(mask).splitlines() if line.startswith("products of two"))
    assert products.endswith("100.0%")


def test_what_zeros_would_not_save_is_refused():
    gated = espalier.attach(Mixed(), torch.randn(3, 5, 6))
    assert [group.name for group in gated.space.groups] == ["up"]
    assert "the cut model does not run: RuntimeError: shape '[-1, 5, 8]' is invalid" in gated.refused["stem"]


def test_a_refusal_names_the_module_whose_code_insists_on_a_width():
    """Queries, keys and values without a call of their layer, behind which no zeros can stand, as in BEiT."""

    class Uncalled(Heads):
        def forward(self, x):
            n, t, c = x.shape
            y = (
                F.linear(x, self.qkv.weight, self.qkv.bias)
                .view(n, t, 3, self.heads, c // self.heads)
                .permute(2, 0, 3, 1, 4)
            )
            return self.head(x + self.out(F.scaled_dot_product_attention(*y).transpose(1, 2).reshape(n, t, c)))

    model = nn.Sequential(nn.Linear(16, 16), Uncalled(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    refused = espalier.attach(model, torch.randn(2, 5, 16)).refused
    assert refused["1.qkv"].startswith("the cut model does not run (in 1): RuntimeError: shape"), refused


def test_a_network_that_writes_sizes_out_is_trained_to_a_small_target_and_ships(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(64, 5, 16)
    result = espalier.fit(Heads(), (x, x[..., :3]), loss=F.mse_loss, epochs=4, target=0.3, quiet=True)
    assert sum(m.weight.numel() for m in result.model.modules() if isinstance(m, nn.Linear)) <= 0.3 * (16 * 67)
    assert result.shares["weight_share"] <= 0.3
    shipped = espalier.ship(result, tmp_path, formats=("torch", "python"), inputs=x[:8])
    assert shipped.checks["python"]["difference"] < 1e-6


class Halves(nn.Module):
    """Takes its units, of one layer or of two, apart in the middle."""

    def __init__(self, width, two):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(3, width // (1 + two)) for _ in range(1 + two))
        self.left, self.right, self.head = nn.Linear(width // 2, 4), nn.Linear(width // 2, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = torch.tanh(torch.cat([layer(x) for layer in self.first], 1))
        half = y.shape[1] // 2
        return self.head(self.left(y[:, :half]) + self.right(y[:, half:]))


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("width", [4, 6, 10, 32, 38])
def test_a_middle_that_follows_the_width_is_tried_with_unlike_halves(width, two):
    """Masks that keep as many of both halves would agree by chance."""
    model, x = Halves(width, two).double(), torch.randn(4, 3, dtype=torch.float64)
    gated = espalier.attach(model, x)
    for mask in masks_of(gated, 4):
        with gated.masked(gated.canonical(mask)):
            torch.testing.assert_close(gated.compact(mask)(x), model(x), rtol=1e-9, atol=1e-12)
