"""Gates at random places of random networks: compacted exactly and counted exactly, or refused by name."""

import copy
import random

import pytest
import torch
from torch import nn

import espalier


class Random(nn.Module):
    """Convolutions, norms, pools, additions and concatenations with gates strewn among them."""

    def __init__(self, seed):
        super().__init__()
        self.draw = random.Random(seed)
        self.layers = nn.ModuleList()
        self.steps, self.widths = [], [3]
        self.convolved(0)
        for _ in range(self.draw.randint(2, 6)):
            source = self.draw.randrange(1, len(self.widths))
            kind = self.draw.random()
            if kind < 0.5:
                self.reader(source)
            elif kind < 0.65:
                same = [i for i in range(1, len(self.widths)) if self.widths[i] == self.widths[source]]
                self.step("add", source, self.draw.choice(same), width=self.widths[source])
            elif kind < 0.9:
                other = self.draw.randrange(1, len(self.widths))
                self.step("cat", source, other, width=self.widths[source] + self.widths[other])
            else:
                self.layer(nn.AvgPool2d(3, 1, 1), source)
        last = len(self.widths) - 1
        if self.draw.random() < 0.7 or not any(isinstance(layer, espalier.Gate) for layer in self.layers):
            self.layer(self.gate(last), last)
        self.head = nn.Linear(self.widths[-1], 3)

    def step(self, kind, *operands, width):
        self.steps.append((kind, *operands))
        self.widths.append(width)
        return len(self.widths) - 1

    def layer(self, module, source, width=None):
        self.layers.append(module)
        return self.step("layer", len(self.layers) - 1, source, width=width or self.widths[source])

    def convolved(self, source):
        width, kernel = self.draw.choice([2, 3, 4, 6]), self.draw.choice([1, 3])
        bias = self.draw.random() < 0.5
        return self.layer(nn.Conv2d(self.widths[source], width, kernel, padding=kernel // 2, bias=bias), source, width)

    def gate(self, source):
        left, sizes = self.widths[source], []
        if self.draw.random() < 0.4:
            return espalier.Gate(left)
        while left:
            sizes.append(self.draw.randint(1, left))
            left -= sizes[-1]
        return espalier.Gate(sizes)

    def reader(self, source):
        if self.draw.random() < 0.6:
            source = self.layer(nn.BatchNorm2d(self.widths[source]), source)
        if self.draw.random() < 0.8:
            source = self.layer(self.draw.choice([nn.ReLU(), nn.Tanh()]), source)
        if self.draw.random() < 0.8:
            source = self.layer(self.gate(source), source)
        return self.convolved(source)

    def forward(self, x):
        values = [x]
        for kind, a, b in self.steps:
            if kind == "layer":
                values.append(self.layers[a](values[b]))
            else:
                pair = values[a], values[b]
                values.append(pair[0] + pair[1] if kind == "add" else torch.cat(pair, 1))
        return self.head(values[-1].mean((2, 3)))


def judge(seed):
    """Whether the gates of this seed were taken; fails on any disagreement."""
    torch.manual_seed(seed)
    model, x = Random(seed).double(), torch.randn(3, 3, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    try:
        gated = espalier.attach(model, x)
    except espalier.BadInput as refusal:
        return "layers." not in str(refusal) and pytest.fail(f"the gate is not named: {refusal}")
    for share in (0.8, 0.5, 0.3, 0.0, 0.7, 0.4):
        mask = (torch.rand(gated.d) < share).float()
        canonical = gated.canonical(mask)
        assert torch.equal(gated.canonical(canonical), canonical)
        small = gated.compact(mask)
        for train in (False, True):
            with gated.masked(canonical):
                expected = copy.deepcopy(model).train(train)(x)
            got = copy.deepcopy(small).train(train)(x)
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-11), (train, mask)
        layers = [module for module in small.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        assert gated.cost("parameters")(canonical).item() == sum(p.numel() for p in small.parameters())
        assert gated.cost("weights")(canonical).item() == sum(layer.weight.numel() for layer in layers)
    return True


def test_random_places():
    assert sum(judge(seed) for seed in range(30)) >= 20


@pytest.mark.long
def test_many_random_places():
    assert sum(judge(seed) for seed in range(1000, 1300)) >= 200
