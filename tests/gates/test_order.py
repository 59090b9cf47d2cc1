"""The order of channels at compaction: what a reader keeps lies together, and nothing else changes."""

import copy
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.compact.layers import Select
from espalier.gates.order import arranged
from espalier.train.optimizer import Settled


def together(order, chosen):
    places = sorted(order.index(one) for one in chosen)
    return places[-1] - places[0] + 1 == len(places)


def test_orders_are_those_that_enumeration_finds():
    draw, left = random.Random(0), 0
    for _ in range(300):
        n = draw.randint(2, 6)
        sets = [frozenset(draw.sample(range(n), draw.randint(1, n))) for _ in range(draw.randint(1, 5))]
        orders = list(itertools.permutations(range(n)))
        for one in sets:  # in turn, each where an order is left that has it together with those taken before
            left += not any(together(order, one) for order in orders)
            orders = [order for order in orders if together(order, one)] or orders
        assert tuple(arranged(n, sets)) in set(orders)
    assert left > 10


class Stream(nn.Module):
    """Readers of one stream, each with a gate for every channel; two streams joined; a flattened end."""

    def __init__(self, readers=3, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(readers))
        self.gates = nn.ModuleList(espalier.Gate(width) for _ in range(readers))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(readers))
        self.joined, self.gate = nn.Conv2d(2 * width, 4, 1), espalier.Gate(2 * width)
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, x):
        x = first = self.stem(x)
        for norm, gate, conv in zip(self.norms, self.gates, self.convs):
            x = x + conv(gate(F.relu(norm(x))))
        x = self.joined(self.gate(torch.cat([x, F.relu(first)], 1)))
        return self.head(x.flatten(1))


def random_statistics(model):
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.uniform_(tensor, 0.2, 1.0)
    return model


def stream_mask(gated, sets):
    mask = torch.ones(gated.d)
    for number, kept in enumerate(sets):
        own = gated.space.slices[f"gates.{number}"]
        mask[own] = torch.tensor([float(i in kept) for i in range(own.stop - own.start)])
    return mask


def gathers(model):
    return [module for module in model.modules() if isinstance(module, Select) and module.run is None]


@pytest.mark.parametrize("train", [False, True])
def test_a_cut_in_another_order_equals_the_masked_model(train):
    torch.manual_seed(0)
    model, x = random_statistics(Stream()).double().train(train), torch.randn(3, 3, 4, 4).double()
    gated = espalier.attach(model, x)
    orders, views = 0, 0
    for seed in range(12):
        torch.manual_seed(seed)
        mask = gated.canonical((torch.rand(gated.d) < 0.6).float())
        plan, small = gated.plan(mask), gated.compact(mask).train(train)
        orders += any(list(runs) != sorted(runs) for dims in plan.tensors.values() for runs in dims.values())
        views += sum(isinstance(module, Select) and module.run is not None for module in small.modules())
        with gated.masked(mask):
            assert torch.allclose(small(x), copy.deepcopy(model)(x), rtol=1e-10, atol=1e-12)
        again = espalier.compact.apply.apply_plan(gated.model, espalier.compact.plan.Plan.from_dict(plan.to_dict()))
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), small.parameters()))
    assert min(orders, views) >= 10


def test_what_lies_together_is_given_in_one_chunk_on_a_cpu():
    x = torch.randn(2, 6, 3, 3)
    given = Select([2, 3, 4], 1)(x)
    assert torch.equal(given, x[:, 2:5])
    assert given.is_contiguous()
    assert Select([2, 3, 4], 1)(x.to("meta")).stride() == x[:, 2:5].stride()  # on another device a view


def test_nested_and_overlapping_readers_need_no_gather():
    gated = espalier.attach(Stream(), torch.randn(2, 3, 4, 4))
    small = gated.compact(stream_mask(gated, [{1, 3, 5, 7}, {3, 7}, {0, 2, 5, 7, 3}]))
    assert not gathers(small)
    assert len([m for m in small.modules() if isinstance(m, Select)]) == 3
    cyclic = stream_mask(gated, [{0, 1, 2, 3}, {2, 3, 4, 5}, {4, 5, 0, 1}])  # no order has all three together
    assert len(gathers(gated.compact(cyclic))) == 1


def test_channels_of_groups_keep_their_places():
    class Grouped(Stream):
        def __init__(self):
            super().__init__()
            self.grouped = nn.GroupNorm(4, 8)

        def forward(self, x):
            x = self.grouped(self.stem(x))
            for gate, conv in zip(self.gates, self.convs):
                x = x + conv(gate(F.relu(x)))
            return self.head(self.joined(self.gate(torch.cat([x, x], 1))).flatten(1))

    torch.manual_seed(0)
    model, x = Grouped().double(), torch.randn(2, 3, 4, 4).double()
    gated = espalier.attach(model, x)
    mask = gated.canonical(stream_mask(gated, [{1, 3, 5}, {0, 4}, {2, 6, 7}]))
    with gated.masked(mask):
        assert torch.allclose(gated.compact(mask)(x), copy.deepcopy(model)(x), rtol=1e-10)


def test_what_is_trained_in_another_order_is_written_back_to_its_places():
    torch.manual_seed(0)
    model, x = random_statistics(Stream()), torch.randn(4, 3, 4, 4)
    gated = espalier.attach(model, x)
    mask = gated.canonical(stream_mask(gated, [{1, 3, 5, 7}, {3, 7}, {0, 2, 5, 7, 3}]))
    reference = copy.deepcopy(model)

    def train(model, optimizer, runs):
        for _ in range(3):
            optimizer.zero_grad()
            runs(x).square().sum().backward()
            optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with gated.masked(mask):
        train(model, optimizer, model)
    settled = Settled(model, gated.plan(mask))
    settled.take_over(optimizer)
    train(settled.small, optimizer, settled.small)
    settled.write_back()
    other = espalier.attach(reference, x)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3, momentum=0.9)
    with other.masked(mask):
        for _ in range(2):
            train(reference, optimizer, reference)
        expected = reference.eval()(x)
    with gated.masked(mask):
        assert torch.allclose(model.eval()(x), expected, rtol=1e-4, atol=1e-5)


def test_kept_and_cut_twice(tmp_path):
    torch.manual_seed(0)
    model, x = random_statistics(Stream()).eval(), torch.randn(2, 3, 4, 4)
    gated = espalier.attach(model, x)
    small = gated.compact(stream_mask(gated, [{1, 3, 5, 7}, {3, 7}, {0, 1, 2, 4, 6}])).eval()
    twice = espalier.attach(small, x)
    smaller = twice.compact(twice.canonical((torch.rand(twice.d) < 0.6).float()))
    for number, one in enumerate((small, smaller)):
        espalier.save(one, tmp_path / str(number))
        assert torch.equal(espalier.load(tmp_path / str(number), Stream).eval()(x), one.eval()(x))
