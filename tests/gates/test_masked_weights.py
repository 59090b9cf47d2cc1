"""Masks on weights: wherever a part of the model runs, also by itself, again in the backward pass, or inside itself."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import espalier


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.inside(x)[0]


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x):
        return self.inside(x, x, x, need_weights=False)[0]


def layer():
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


PARTS = {"lstm": Recurrent, "attention": Attended, "layer": layer, "encoder": lambda: nn.TransformerEncoder(layer(), 2)}


class Model(nn.Module):
    def __init__(self, part, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.part, self.middle, self.head, self.again = PARTS[part](), nn.Linear(8, 8), nn.Linear(8, 3), again

    def encode(self, x):
        return (checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)).mean(1)

    def decode(self, x):
        return self.head(self.middle(x).relu())

    def forward(self, x):
        return self.decode(self.encode(x))


def gated(part, again=False):
    model, x = Model(part, again).double(), torch.randn(4, 5, 8, dtype=torch.float64)
    gated = espalier.attach(model, x)
    return model, x, gated, gated.canonical((torch.arange(gated.d) % 2).float())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_called_by_itself_runs_under_the_mask(part, training):
    model, x, gates, mask = gated(part)
    small = gates.compact(mask).train(training)
    model.train(training)
    with gates.masked(mask), torch.no_grad():
        torch.testing.assert_close(model.decode(model.encode(x)), small(x))
    with gates.masked(mask, slopes=True) as slopes:
        model(x).square().sum().backward()
        whole = slopes()
    with gates.masked(mask, slopes=True) as slopes:
        model.decode(model.encode(x)).square().sum().backward()
        torch.testing.assert_close(slopes(), whole)


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_gives_the_same_gradients_and_slopes(part):
    found = []
    for again in (False, True):
        model, x, gates, mask = gated(part, again)
        with gates.masked(mask, slopes=True) as slopes:
            model.train()(torch.ones_like(x).requires_grad_()).square().sum().backward()
            found.append([slopes(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)


def test_what_was_compiled_without_a_mask_reads_one():
    model, x, gates, mask = gated("layer")
    compiled, small = torch.compile(model.train(), backend="eager"), gates.compact(mask).train()
    with torch.no_grad():
        before = copy.deepcopy(model)(x)
        with gates.masked(torch.ones(gates.d)):
            torch.testing.assert_close(compiled(x), before)
        with gates.masked(mask):
            torch.testing.assert_close(compiled(x), small(x))
        torch.testing.assert_close(compiled(x), before)


class Tree(nn.Module):
    """Calls itself for the nodes below, and reads parameters of its own."""

    def __init__(self):
        super().__init__()
        self.leaf, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
        self.left, self.right = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, tree, top=True):
        if isinstance(tree, torch.Tensor):
            return self.leaf(tree)
        nodes = self(tree[0], False) @ self.left + self(tree[1], False) @ self.right
        return self.out(nodes.tanh()) if top else nodes.tanh()


def test_a_module_that_calls_itself_keeps_its_parameters():
    model, (a, b, c, d) = Tree().double(), torch.randn(4, 2, 4, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    gates = espalier.attach(model, {"tree": ((a, b), (c, d))})
    mask = (torch.arange(gates.d) % 2).float()
    with gates.masked(mask):
        masked = model(((a, b), (c, d)))
    torch.testing.assert_close(masked, gates.compact(mask)(((a, b), (c, d))))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    torch.testing.assert_close(dict(model.named_parameters()), before)


class Tied(nn.Module):
    """The weight that reads the units is also a table."""

    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def encode(self, x):
        return self.middle(self.table(x)).relu()

    def forward(self, x):
        return self.head(self.encode(x))


def test_a_tied_weight_is_masked_where_the_layer_that_reads_it_runs_alone():
    model, x = Tied().double(), torch.arange(8).view(2, 4)
    gates = espalier.attach(model, x)
    mask = gates.canonical((torch.arange(gates.d) % 2).float())
    with gates.masked(mask):
        torch.testing.assert_close(model.head(model.encode(x)), gates.compact(mask)(x))
