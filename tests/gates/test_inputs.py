"""What a model does with its inputs: writes into them, differentiates by them, takes none, or reads them padded."""

import pytest
import torch
from torch import nn

import espalier


class InPlace(nn.Module):
    """Scales its input in place; what may be given twice has to be the same tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, y=None):
        assert y is None or y is x
        return self.b(torch.relu(self.a(x.mul_(0.5).add_(1))))


@pytest.mark.parametrize("check", [True, False])
def test_a_model_that_writes_into_its_input_has_gates_and_the_example_stays(check):
    x = torch.randn(4, 4, dtype=torch.float64)
    before = x.clone()
    gated = espalier.attach(InPlace().double(), (x, x), check=check)
    assert list(gated.space.slices) == ["a"]
    assert not gated.one_at_a_time(x)
    assert torch.equal(x, before)


class Energy(nn.Module):
    """Gives the slope of an energy by its input."""

    def __init__(self, gate):
        super().__init__()
        self.a, self.gate, self.b, self.c = nn.Linear(3, 8), gate, nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.c(torch.tanh(self.b(self.gate(torch.tanh(self.a(x))))))
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("placed", [True, False])
def test_a_model_that_differentiates_inside(placed):
    torch.manual_seed(3)
    model = Energy(espalier.Gate((1,) * 8) if placed else nn.Identity()).double()
    x = torch.randn(4, 3).double()
    gated = espalier.attach(model, x, kinds=("units", "inputs"))
    assert gated.d >= 6
    for seed in range(4):
        mask = gated.canonical((torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.6).float())
        with gated.masked(mask):
            expected = model(x)
        torch.testing.assert_close(gated.compact(mask)(x), expected, rtol=1e-9, atol=1e-9)


class Tree(nn.Module):
    """A network over a tree, which is no tensor."""

    def __init__(self):
        super().__init__()
        self.leaf, self.join, self.out = nn.Embedding(9, 6), nn.Linear(12, 6), nn.Linear(6, 2)

    def node(self, tree):
        if isinstance(tree, int):
            return self.leaf(torch.tensor([tree]))
        return torch.tanh(self.join(torch.cat([self.node(part) for part in tree], 1)))

    def forward(self, tree):
        return self.out(self.node(tree))


def test_a_model_called_without_a_tensor_is_explained():
    gated = espalier.attach(Tree(), (((1, 2), 3),))
    assert "without a tensor" in gated.one_at_a_time()
    assert "without a tensor" in gated.one_at_a_time((((1, 2), 3),))
    assert "without a tensor" in " ".join(gated.explain().split())


class Patches(nn.Module):
    """Attention whose heads are as wide as the input says, behind patches of an image."""

    def __init__(self):
        super().__init__()
        self.patch, self.qkv = nn.Conv2d(3, 8, 1), nn.Linear(8, 24)
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(n, t, c)
        return self.head(x + self.out(y))


def test_features_are_left_out_before_a_layer_behind_which_zeros_stand_in():
    torch.manual_seed(4)
    model, x = Patches().double(), torch.randn(2, 3, 4, 4).double()
    gated = espalier.attach(model, x, kinds=("heads", "channels", "inputs"))
    assert set(gated.space.slices) == {"inputs", "patch", "qkv"}, gated.refused
    for seed in range(6):
        mask = gated.canonical((torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.6).float())
        with gated.masked(mask):
            expected = model(x)
        torch.testing.assert_close(gated.compact(mask)(x), expected, rtol=1e-9, atol=1e-9)
        assert "with zeros" in gated.explain(mask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kinds", [("units",), ("units", "width")])
def test_a_module_of_torchscript_is_refused_by_name(kinds):
    inner = torch.jit.script(nn.Linear(8, 7))
    model = nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(7, 2))
    with pytest.raises(espalier.BadInput, match=r"1 is of TorchScript.* made from"):
        espalier.attach(model, torch.randn(3, 4), kinds=kinds)
