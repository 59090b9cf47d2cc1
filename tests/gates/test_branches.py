"""Residual branches as gates, in networks whose branches share parts or end in unusual ones."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.gates.verify import random_masks

from .nets import ByHand

KINDS = ("units", "width", "branches")
X = torch.randn(4, 6, 5, dtype=torch.float64)


class Sandwich(nn.Module):
    """A norm before and behind the layers of a branch."""

    def __init__(self, norm):
        super().__init__()
        self.before, self.up, self.down, self.behind = norm(8), nn.Linear(8, 12), nn.Linear(12, 8), norm(8)

    def forward(self, x):
        return x + self.behind(self.down(torch.relu(self.up(self.before(x)))))


class Gated(ByHand):
    """A norm that may be given a gate, as in Mamba 2."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * torch.sigmoid(gate))


class GatedBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.norm, self.down = nn.Linear(8, 12), nn.Linear(8, 12), Gated(12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x), self.gate(x)))


class Parallel(nn.Module):
    """Two branches that read the same norm, as of Cohere or GPT-J."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(x)
        return x + self.first(torch.relu(y)) + self.second(torch.tanh(y))


class Sized(nn.Embedding):
    """A table of positions that is given a shape, as of RoFormer."""

    def forward(self, size):
        return super().forward(torch.arange(size[1]))


class Positions(nn.Module):
    """Two branches with one table of positions, which is read after the stem."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = Sized(6, 12), nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            self.up.append(nn.Linear(8, 12))
            self.down.append(nn.Linear(12, 8))

    def forward(self, x):
        positions = self.table(x.shape)
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x) + positions))
        return x


class Both(NamedTuple):
    hidden: Tensor
    kept: Tensor


class Named(nn.Module):
    """A branch whose module gives a tuple with names, as of Reformer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return Both(self.down(hidden), hidden)


class AddsNamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Named()

    def forward(self, x):
        return x + self.inner(x).hidden


class Typed(nn.Module):
    """A branch that looks at the type of a layer's weight, as of T5."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        y = torch.relu(self.up(x))
        return x + self.down(y.to(self.down.weight.dtype) if isinstance(self.down.weight, Tensor) else y)


class Insists(nn.Module):
    """A branch whose code takes a width from elsewhere."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)).view(*x.shape[:2], 12))


class Attends(nn.Module):
    """A branch that ends in torch's own attention, behind a norm or not."""

    def __init__(self, norm, **options):
        super().__init__()
        self.norm, self.attention = norm, nn.MultiheadAttention(8, 2, batch_first=True)
        self.options = options

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(query=y, key=y, value=y, **self.options)[0]


BRANCHES = {
    "torch's norm at the end": (lambda: Sandwich(nn.LayerNorm), 1),
    "a norm written out at the end": (lambda: Sandwich(ByHand), 1),
    "a norm with a gate": (GatedBranch, 1),
    "a norm that both read": (Parallel, 1),
    "a table that both read": (Positions, 2),
    "a tuple with names": (AddsNamed, 1),
    "code that looks at a weight": (Typed, 1),
    "code that insists on a width": (Insists, 1),
    "attention": (lambda: Attends(nn.Identity(), need_weights=False), 1),
    "attention behind a norm": (lambda: Attends(nn.LayerNorm(8)), 1),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_closed_branch_is_cut_exactly(name):
    make, count = BRANCHES[name]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), make(), nn.Linear(8, 3)).double()
    gated = espalier.attach(model, X, kinds=KINDS)
    branches = [group.name for group in gated.structure.groups if group.kind == "branches"]
    assert len(branches) == count, gated.explain()
    for opened, share in itertools.product(itertools.product((0.0, 1.0), repeat=count), (1.0, 0.5)):
        mask = (torch.rand(gated.d) <= share).float()
        for branch, bit in zip(branches, opened):
            mask[gated.space.slices[branch]] = bit
        mask = gated.canonical(mask)
        with gated.masked(mask):
            expected, small = model(X), gated.compact(mask)
        torch.testing.assert_close(small(X), expected, rtol=1e-9, atol=1e-9)
        assert gated.cost("parameters")(mask) == sum(p.numel() for p in small.parameters())


def test_every_branch_is_tried_closed_while_blocks_are_open():
    torch.manual_seed(4)
    blocks = nn.Sequential(Typed(), Typed())
    model = nn.Sequential(nn.Linear(5, 8), blocks, nn.Linear(8, 3)).double()
    gated = espalier.attach(model, X, kinds=("units", "blocks", "branches"))
    branches, (around,) = ([g for g in gated.structure.groups if g.kind == kind] for kind in ("branches", "blocks"))
    assert len(branches) == around.size == 2
    where = gated.structure.where
    for seed in range(10):
        masks = random_masks(gated.structure, None, np.random.default_rng(seed), 3)
        tried = [mask for mask in masks if mask[where(around)].all()]
        assert all(any(not mask[where(branch)].any() for mask in tried) for branch in branches)


def test_blocks_of_a_closed_branch_hand_nothing_on():
    class Deep(nn.Module):
        """A branch that is made of blocks, as the convolutions for positions in Data2Vec."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))

        def forward(self, x):
            return x + self.inner(x)

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 8), Deep(), nn.Linear(8, 3)).double()
    gated = espalier.attach(model, X, kinds=("blocks", "branches"))
    assert sorted(group.kind for group in gated.structure.groups) == ["blocks", "branches"]
    for bits in itertools.product((0.0, 1.0), repeat=3):
        mask = torch.tensor(bits)
        with gated.masked(gated.canonical(mask)):
            expected = model(X)
        torch.testing.assert_close(gated.compact(mask)(X), expected, rtol=1e-9, atol=1e-9)


def test_a_block_that_is_a_closed_branch_hands_nothing_on():
    class Scales(Named):
        """With a parameter of its own, which is no layer."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(8))

        def forward(self, x):
            return self.scale * self.down(torch.tanh(self.up(x)))

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
            self.blocks = nn.ModuleList(Scales() for _ in range(2))

        def forward(self, x):
            for norm, block in zip(self.norms, self.blocks):
                x = x + block(norm(x))
            return x

    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 8), Adds(), nn.Linear(8, 3)).double()
    gated = espalier.attach(model, X, kinds=("blocks", "branches"))
    assert sorted(group.kind for group in gated.structure.groups) == ["blocks", "branches", "branches"]
    for bits in itertools.product((0.0, 1.0), repeat=4):
        mask = gated.canonical(torch.tensor(bits))
        with gated.masked(mask):
            expected = model(X)
        small = gated.compact(mask)
        torch.testing.assert_close(small(X), expected, rtol=1e-9, atol=1e-9)
        assert gated.cost("parameters")(mask) == sum(p.numel() for p in small.parameters())


def test_a_branch_that_adds_a_parameter_of_its_own_is_left_where_nothing_is_tried_out():
    class Shifted(Named):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.rand(8))

        def forward(self, x):
            return self.down(torch.relu(self.up(x))) + self.shift

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Shifted()

        def forward(self, x):
            return x + self.inner(x)

    model = nn.Sequential(nn.Linear(5, 8), Adds(), nn.Linear(8, 3)).double()
    gated = espalier.attach(model, X, kinds=("units", "branches"), check=False)
    assert {group.kind for group in gated.structure.groups} == {"units"}
