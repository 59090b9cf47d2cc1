"""The width behind LayerNorm and RMSNorm: statistics of the open channels alone, and slopes that see them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.gates.norms import masked_norm, norm_of

from .nets import ByHand

WIDTH = ("units", "heads", "width")


class Centred(ByHand):
    """A layer norm written out."""

    def __init__(self, width: int, shifted: bool):
        super().__init__(width)
        self.bias = nn.Parameter(torch.randn(width)) if shifted else None

    def forward(self, x):
        scaled = super().forward(x - x.mean(-1, keepdim=True))
        return scaled if self.bias is None else scaled + self.bias


NORMS = {
    "layer": lambda: nn.LayerNorm(12, eps=1e-3),
    "layer, no shift": lambda: nn.LayerNorm(12, bias=False),
    "layer, no scale": lambda: nn.LayerNorm(12, elementwise_affine=False),
    "root mean square": lambda: nn.RMSNorm(12, eps=1e-2),
    "root mean square, its own epsilon": lambda: nn.RMSNorm(12),
    "by hand": lambda: ByHand(12),
    "by hand, around one": lambda: ByHand(12, plus=1.0),
    "layer, by hand": lambda: Centred(12, shifted=True),
    "layer, by hand, no shift": lambda: Centred(12, shifted=False),
}


class Stream(nn.Module):
    """A residual stream of 12 channels with a branch, post- and pre-normed."""

    def __init__(self, norm):
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.before, self.after, self.head = norm(), norm(), nn.Linear(12, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.after(x + self.down(torch.tanh(self.up(self.before(x))))))


def prepared(norm: str) -> nn.Module:
    torch.manual_seed(5)
    model = Stream(NORMS[norm]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2, 0.6)
    return model


X = torch.randn(4, 5, dtype=torch.float64)


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_over_open_channels_is_the_norm_of_what_is_left(name):
    torch.manual_seed(1)
    norm = NORMS[name]().double()
    opened = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0], dtype=torch.float64)
    left = opened.bool()
    x = torch.randn(2, 3, 12).double()
    shift = getattr(norm, "bias", None)
    weight = None if norm.weight is None else norm.weight[left]
    if isinstance(norm, (nn.LayerNorm, Centred)):
        eps = getattr(norm, "eps", 1e-6)
        expected = F.layer_norm(x[..., left], (7,), weight, None if shift is None else shift[left], eps)
    else:
        weight = weight + 1 if getattr(norm, "plus", 0.0) else weight
        expected = F.rms_norm(x[..., left], (7,), weight, getattr(norm, "eps", 1e-6))
    found = masked_norm(norm_of(norm), x, opened, norm._parameters)
    torch.testing.assert_close(found[..., left], expected, rtol=0, atol=1e-12)
    each = torch.stack([opened, torch.ones(12).double()])[:, None]  # a mask for each example
    found = masked_norm(norm_of(norm), x, each, norm._parameters)
    torch.testing.assert_close(found[0][..., left], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], norm(x[1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_masked_equals_compact_and_the_cut_norm_is_plain(name):
    model = prepared(name)
    gated = espalier.attach(model, X, kinds=WIDTH)
    kinds = {group.kind: group.size for group in gated.structure.groups}
    assert kinds == {"width": 12, "units": 16}
    for seed in range(5):
        mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        small = gated.compact(mask)
        with gated.masked(gated.canonical(mask)):
            torch.testing.assert_close(model(X), small(X), rtol=1e-9, atol=1e-12)
        assert type(small.before) is type(model.before)
        left = int(gated.canonical(mask)[gated.space.slices["stem"]].sum())
        assert small.stem.out_features == left
        if hasattr(small.before, "normalized_shape"):
            assert small.before.normalized_shape == (left,)
        weights = {n: p for n, p in small.named_parameters() if p.ndim > 1}
        assert gated.cost("weights")(gated.canonical(mask)) == sum(p.numel() for p in weights.values())
        assert gated.cost("parameters")(gated.canonical(mask)) == sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize("name", NORMS)
def test_all_open_is_the_users_norm_bit_for_bit(name):
    model = prepared(name)
    expected = model(X)
    gated = espalier.attach(model, X, kinds=WIDTH)
    assert torch.equal(model(X), expected)
    with gated.masked(torch.ones(gated.d)):
        assert torch.equal(model(X), expected)
        assert torch.equal(copy.deepcopy(model)(X), expected)
    named = dict(model.named_parameters())
    torch.testing.assert_close(gated.call(named, torch.ones(gated.d), X), expected, rtol=0, atol=1e-12)
    gated.detach()
    assert not any(module._forward_hooks or module._buffers for module in model.modules())


@pytest.mark.parametrize("name", ["layer", "root mean square"])
def test_slopes_are_the_differences_of_the_weighted_network(name):
    """Written out: every consumer reads m x, and a norm's sums are weighted by m and divided by the sum of m."""
    model = prepared(name)
    gated = espalier.attach(model, X, kinds=("width",))
    mask = (torch.arange(gated.d) % 3 != 1).double()

    def norm(layer, x, m):
        count = m.sum()
        centre = (x * m).sum(-1, keepdim=True) / count if isinstance(layer, nn.LayerNorm) else 0.0
        variance = ((x - centre) ** 2 * m).sum(-1, keepdim=True) / count
        y = (x - centre) / (variance + layer.eps).sqrt() * layer.weight
        return y + layer.bias if isinstance(layer, nn.LayerNorm) else y

    def loss(m):
        x = model.stem(X)
        h = model.down(torch.tanh(model.up(norm(model.before, x, m) * m)))
        return model.head(norm(model.after, x + h, m) * m).square().sum()

    with gated.masked(mask, slopes=True) as slopes:
        found = model(X).square().sum()
        found.backward()
        gradient = slopes()
    assert found.item() == pytest.approx(loss(mask).item(), rel=1e-12)
    for i in range(gated.d):
        step = torch.zeros(gated.d).double()
        step[i] = 1e-6
        difference = (loss(mask + step) - loss(mask - step)).item() / 2e-6
        assert gradient[i].item() == pytest.approx(difference, rel=1e-5, abs=1e-7)
    batch = torch.func.vmap(lambda m: gated.call(dict(model.named_parameters()), m, X).square().sum())
    torch.testing.assert_close(batch(torch.stack([mask, mask])), found.detach().expand(2), rtol=1e-12, atol=0)


def test_what_is_no_norm_of_the_kind_stays_fixed():
    torch.manual_seed(0)
    assert norm_of(ByHand(12)) is not None
    assert norm_of(ByHand(12, plus=0.5)) is None
    assert norm_of(nn.LayerNorm((3, 12))) is None
    NORMS["plus"] = lambda: ByHand(12, plus=0.5)
    try:
        gated = espalier.attach(prepared("plus"), X, kinds=WIDTH)
    finally:
        del NORMS["plus"]
    assert [group.kind for group in gated.structure.groups] == ["units"]
    assert "over the axis" in gated.explain()


@pytest.mark.parametrize("name", NORMS)
def test_a_mask_that_closes_the_whole_width_gives_finite_gradients(name):
    """Masks that a search draws are not canonical: a group may be emptier than it ships."""
    model = prepared(name)
    gated = espalier.attach(model, X, kinds=("width",))
    with gated.masked(torch.zeros(gated.d), slopes=True) as slopes:
        model(X).square().sum().backward()
        assert slopes().isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_channels_that_reach_the_output_stay():
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(5, 12), layer).double()
    gated = espalier.attach(model, torch.randn(2, 4, 5).double(), kinds=WIDTH)
    assert {group.kind for group in gated.structure.groups} == {"units", "heads"}
    assert "reaches the model's output" in gated.explain()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_batches_packed_in_eval_mode():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True, dropout=0.0)
            self.read, self.encoder, self.head = nn.Linear(5, 12), nn.TransformerEncoder(layer, 2), nn.Linear(12, 3)

        def forward(self, x, padding):
            return self.head(self.encoder(self.read(x), src_key_padding_mask=padding))

    torch.manual_seed(0)
    model = Padded().double().eval()
    padding = torch.tensor([[False] * 4, [False] * 2 + [True] * 2])
    example = (torch.randn(2, 4, 5).double(), padding)
    gated = espalier.attach(model, example, kinds=WIDTH)
    mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(0)) < 0.6).float()
    small = gated.compact(mask)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), gated.masked(gated.canonical(mask)):
            torch.testing.assert_close(small(*example), model(*example), rtol=1e-9, atol=1e-12)


def test_rounded_widths():
    model = prepared("layer")
    gated = espalier.attach(model, X, kinds=WIDTH, round_to=4)
    mask = torch.ones(gated.d)
    mask[0] = 0
    small = gated.compact(mask)
    assert small.before.normalized_shape == (8,)
    with gated.masked(mask):
        torch.testing.assert_close(model(X), small(X), rtol=1e-9, atol=1e-12)


def test_looking_for_norms_leaves_batch_norm_as_it_was():
    """BatchNorm is asked whether it is a norm over the width; in train mode it takes statistics of what it is asked."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    espalier.attach(model, torch.randn(5, 4), kinds=WIDTH)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
