"""Slopes by the gates: what ``masked(mask, slopes=True)`` reads is the derivative of the loss by a real-valued mask."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import espalier
from espalier import BadInput, Gate
from espalier.models import MLP, DenseNet

from .nets import NETS

FOUND = ("units", "channels", "heads")


class Shared(nn.Module):
    """One gate read twice, on slices of two widths."""

    def __init__(self):
        super().__init__()
        self.gate = Gate((3, 2), dim=-1)
        self.first, self.left, self.right = nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.left(self.gate(h)) + torch.sigmoid(self.right(self.gate(h)))


class TiedAutoencoder(nn.Module):
    """The decoder multiplies with the encoder's weight: one weight, masked on both of its sides."""

    def __init__(self):
        super().__init__()
        self.encoder, self.between, self.head = nn.Linear(6, 5), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = F.linear(torch.sigmoid(self.encoder(x)), self.encoder.weight.T)
        return self.head(torch.tanh(self.between(x)))


class Branches(nn.Module):
    """Residual branches, some with BatchNorm inside."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1))
            for _ in "abc"
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(F.relu(x))
        return self.head(x.mean((2, 3)))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


def plain():
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))


CASES = {
    **{name: (make, example, FOUND) for name, (make, example) in NETS.items()},
    "placed": (lambda: MLP(7, (6, 5), 3), lambda: torch.randn(4, 7), FOUND),
    "placed, shared": (Shared, lambda: torch.randn(4, 7), FOUND),
    "placed, connections": (
        lambda: DenseNet(depth=13, growth=3, classes=4, stem=4),
        lambda: torch.randn(3, 3, 8, 8),
        FOUND,
    ),
    "conv, BatchNorm": (convolutional, lambda: torch.randn(4, 2, 8, 8), FOUND),
    "branches": (Branches, lambda: torch.randn(3, 3, 5, 5), ("branches",)),
    "branches and channels": (Branches, lambda: torch.randn(3, 3, 5, 5), ("branches", "channels")),
    "inputs": (plain, lambda: torch.randn(5, 7), ("inputs", "units")),
    "tied autoencoder": (TiedAutoencoder, lambda: torch.randn(4, 6), ("units", "inputs")),
}


def setting(name):
    """A gated model in float64 and train mode, its input, and the loss of an output."""
    make, example, kinds = CASES[name]
    torch.manual_seed(0)
    model, x = make().double().train(), example()
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():  # a bias of 0 behind closed gates is the kink of a ReLU, where no derivative exists
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    gated = espalier.attach(model, x, kinds=kinds)
    direction = torch.randn(model(x).shape, dtype=torch.float64)

    def loss(out):
        return (out * direction).mean() + out.square().mean() / 3

    return model, gated, x, loss


def differences(gated, x, loss, mask, step):
    """The derivative by each entry of the mask, from two sides, through the pure function of parameters and mask."""
    tensors = {name: value.detach().clone() for name, value in gated.model.state_dict().items()}

    def at(i, move):
        moved = mask.double()
        moved[i] += move
        with torch.no_grad():
            return loss(gated.call({k: v.clone() for k, v in tensors.items()}, moved, x)).item()

    return torch.tensor([(at(i, step) - at(i, -step)) / (2 * step) for i in range(gated.d)], dtype=torch.float64)


def some_masks(d):
    generator = torch.Generator().manual_seed(1)
    return [torch.ones(d), *((torch.rand(d, generator=generator) < share).float() for share in (0.7, 0.4))]


@pytest.mark.parametrize("name", CASES)
def test_slopes_are_those_of_finite_differences(name):
    model, gated, x, loss = setting(name)
    assert gated.d
    for mask in some_masks(gated.d):
        with gated.masked(mask, slopes=True) as slopes:
            loss(model(x)).backward()
            read = slopes()
        assert read.shape == (gated.d,)
        assert read.dtype == torch.float64
        assert not read.requires_grad
        # A BatchNorm that reads zeros multiplies a step by 1 / sqrt(eps): kinks of the ReLU behind it come close.
        step = 1e-8 if name == "placed, connections" else 1e-6
        torch.testing.assert_close(read, differences(gated, x, loss, mask, step), rtol=1e-5, atol=2e-7)
    if "BatchNorm" not in name:
        assert bool((read[mask == 0] != 0).any()), "closed gates have slopes too"


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_behind_and_the_weights_learn_the_same(name):
    model, gated, x, loss = setting(name)
    plain = model(x)
    for mask in some_masks(gated.d)[1:]:
        gradients = []
        for slopes in (False, True):
            model.zero_grad()
            with gated.masked(mask, slopes=slopes):
                out = model(x)
                loss(out).backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for n in gradients[0]:
            torch.testing.assert_close(gradients[0][n], gradients[1][n], rtol=1e-9, atol=1e-12)
        for n, buffer in model.named_buffers():
            assert not buffer.requires_grad, n
            assert buffer.grad is None, n
        assert torch.equal(model(x), plain)
    with gated.masked(mask):
        assert not any(buffer.requires_grad for buffer in model.buffers())


def test_a_shared_gate_adds_up_what_its_readers_say():
    model, gated, x, loss = setting("placed, shared")
    mask = torch.tensor([1.0, 0.0])
    with gated.masked(mask, slopes=True) as slopes:
        loss(model(x)).backward()
        both = slopes()
    total = torch.zeros(2, dtype=torch.float64)
    for side in ("left", "right"):  # the other reader looks at a constant copy of the mask
        h = torch.tanh(model.first(x)).detach()
        spread = mask.double().repeat_interleave(torch.tensor([3, 2]))
        own = spread.clone().requires_grad_()
        left, right = (own, spread) if side == "left" else (spread, own)
        loss(model.left(h * left) + torch.sigmoid(model.right(h * right))).backward()
        total += torch.stack([own.grad[:3].sum(), own.grad[3:].sum()])
    torch.testing.assert_close(both, total)


def test_backward_passes_add_up_and_a_new_mask_starts_anew():
    model, gated, x, loss = setting("conv, BatchNorm")
    mask = some_masks(gated.d)[1]
    with gated.masked(mask, slopes=True) as slopes:
        loss(model(x)).backward()
        once = slopes()
        loss(model(x)).backward()
        torch.testing.assert_close(slopes(), 2 * once)
    with gated.masked(mask, slopes=True) as slopes:
        with pytest.raises(BadInput, match="backward"):
            slopes()
        with gated.masked(1 - mask):  # another mask inside, without slopes
            loss(model(x)).backward()
            assert not any(buffer.requires_grad for buffer in model.buffers())
        loss(model(x)).backward()
        torch.testing.assert_close(slopes(), once)


def test_slopes_in_float32_and_of_a_model_whose_weights_rest():
    """Frozen parameters need no gradient; the gates still have their slopes."""
    torch.manual_seed(0)
    model, x = plain(), torch.randn(5, 7)
    gated = espalier.attach(model, x)
    mask = some_masks(gated.d)[1]
    with gated.masked(mask, slopes=True) as slopes:
        model(x).square().mean().backward()
        expected = slopes()
    assert expected.dtype == torch.float32
    model.requires_grad_(False)
    with gated.masked(mask, slopes=True) as slopes:
        model(x).square().mean().backward()
        assert torch.equal(slopes(), expected)


# The sizes of slopes of gates that multiply many channels


class Layer(nn.Module):
    """One of a transformer, without attention."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    """Layers of which each may go; ``gates`` do the same by hand, channel by channel."""

    def __init__(self, width, gates):
        super().__init__()
        self.stem, self.head = nn.Linear(7, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Layer(width) for _ in "abc")
        self.gates = nn.ModuleList(Gate((1,) * width, dim=-1) for _ in "abc") if gates else None

    def forward(self, x):
        x = self.stem(x)
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = y if self.gates is None else x + self.gates[i](y - x)
        return self.head(x)


class GatedBranches(Branches):
    """Each branch gated by hand, channel by channel."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(Gate((1,) * 5, dim=1) for _ in "abc")

    def forward(self, x):
        x = self.stem(x)
        for block, gate in zip(self.blocks, self.gates):
            x = x + gate(block(F.relu(x)))
        return self.head(x.mean((2, 3)))


WIDE = {
    "branches": (Branches, GatedBranches, lambda: torch.randn(4, 3, 5, 5), 5),
    "blocks": (lambda: Layers(5, False), lambda: Layers(5, True), lambda: torch.randn(4, 6, 7), 5),
    "blocks of one channel": (lambda: Layers(1, False), lambda: Layers(1, True), lambda: torch.randn(4, 6, 7), 1),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_block_is_as_large_as_gates_on_each_of_its_channels_together(name):
    whole, by_hand, example, channels = WIDE[name]
    torch.manual_seed(0)
    model, single, x = whole().double(), by_hand().double(), example().double()
    single.load_state_dict(model.state_dict(), strict=False)
    one, many = espalier.attach(model, x, kinds=(name.split()[0],)), espalier.attach(single, x)
    for mask in (torch.ones(3), torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3)):
        with one.masked(mask, slopes=True) as read:
            model(x).square().mean().backward()
            plain, (slopes, sizes) = read(), read.sized()
        with many.masked(mask.repeat_interleave(channels), slopes=True) as read:
            single(x).square().mean().backward()
            each = read().view(3, channels)
        assert torch.equal(plain, slopes)
        torch.testing.assert_close(slopes, each.sum(1))
        if channels == 1:
            assert sizes is None or torch.equal(sizes, slopes.abs())
        else:
            torch.testing.assert_close(sizes, each.abs().sum(1))
            assert bool((sizes > slopes.abs()).any())


class PostNorm(nn.Module):
    """Layers that end in a norm, whose channels nobody follows; ``gates`` do the same by hand."""

    def __init__(self, gates):
        super().__init__()
        self.stem, self.head = nn.Linear(7, 5), nn.Linear(5, 3)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(5, 1, 4, 0.0, batch_first=True) for _ in "ab")
        self.gates = nn.ModuleList(Gate((1,) * 5, dim=-1) for _ in "ab") if gates else None

    def forward(self, x):
        x = self.stem(x)
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = y if self.gates is None else x + self.gates[i](y - x)
        return self.head(x)


def test_a_block_that_ends_in_a_norm_has_the_channels_of_the_norm():
    torch.manual_seed(0)
    model, single, x = PostNorm(False).double(), PostNorm(True).double(), torch.randn(4, 6, 7).double()
    single.load_state_dict(model.state_dict(), strict=False)
    one, many = espalier.attach(model, x, kinds=("blocks",)), espalier.attach(single, x)
    with one.masked(torch.ones(2), slopes=True) as read:
        model(x).square().mean().backward()
        slopes, sizes = read.sized()
    with many.masked(torch.ones(10), slopes=True) as read:
        single(x).square().mean().backward()
        each = read().view(2, 5)
    torch.testing.assert_close(slopes, each.sum(1))
    torch.testing.assert_close(sizes, each.abs().sum(1))


class GatedFused(NETS["fused"][0]):
    """A gate on every channel of every head."""

    def __init__(self):
        super().__init__()
        self.gate = Gate((1,) * 12, dim=-1)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).split(self.split_size, dim=2)
        q, k, v = (t.view(batch, time, self.heads, width // 3).transpose(1, 2) for t in (q, k, v))
        weights = torch.softmax(q @ k.transpose(2, 3) / 2.0, -1)
        return x + self.out(self.gate((weights @ v).transpose(1, 2).reshape(batch, time, self.split_size)))


def by_units(name):
    """A gated model, another with a gate on each channel, the gate of each of those, and an input."""
    torch.manual_seed(0)
    if name == "heads":
        model, single, x = NETS["fused"][0]().double(), GatedFused().double(), torch.randn(2, 5, 12).double()
        single.load_state_dict(model.state_dict())
        return espalier.attach(model, x), espalier.attach(single, x), torch.arange(3).repeat_interleave(4), x
    # Blocks of 4: of 6 and 5 units, or channels, the last block holds fewer; a channel has 4 columns of the last layer.
    make = convolutional if name == "channels" else plain
    x = torch.randn(4, 2, 8, 8).double() if name == "channels" else torch.randn(5, 7).double()
    model = make().double()
    single = make().double()
    single.load_state_dict(model.state_dict())
    one, many = espalier.attach(model, x, round_to=4), espalier.attach(single, x)
    gate, start = torch.zeros(many.d, dtype=torch.int64), 0
    for group, where in many.space.slices.items():
        for members in one.blocks[group]:
            gate[[where.start + unit for unit in members]] = start
            start += 1
    return one, many, gate, x


@pytest.mark.parametrize("even", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("name", ["heads", "units", "channels"])
def test_a_gate_on_several_units_has_the_norm_of_gates_on_each(name, even):
    """Alike units ``n`` are worth ``n ** (1 - even)`` of them, as the penalty pulls at them."""
    one, many, gate, x = by_units(name)
    for mask in some_masks(one.d):
        found = []
        for gated, own in ((one, mask), (many, mask[gate])):
            with gated.masked(own, slopes=True) as read:
                gated.model(x).square().mean().backward()
                found.append(read.sized(even=even))
        (slopes, sizes), (each, none) = found
        assert none is None
        zeros = torch.zeros(one.d, dtype=torch.float64)
        torch.testing.assert_close(slopes, zeros.index_add(0, gate, each))
        order = np.inf if even == 1 else 1 / (1 - even)
        expected = [np.linalg.norm(each[gate == i].numpy(), order) for i in range(one.d)]
        torch.testing.assert_close(sizes, torch.tensor(expected))
        assert not torch.allclose(sizes, slopes.abs())


MANY = ("branches", "grouped", "attention", "fused", "shuffled")  # gates on many channels


@pytest.mark.parametrize("name", [name for name in CASES if not any(word in name for word in MANY)])
def test_other_gates_are_as_large_as_their_slopes(name):
    """Units of an LSTM, channels that are flattened into many columns, features that several layers read, and slices
    placed by hand."""
    model, gated, x, loss = setting(name)
    with gated.masked(some_masks(gated.d)[1], slopes=True) as read:
        loss(model(x)).backward()
        slopes, sizes = read.sized()
        assert torch.equal(slopes, read())
    assert sizes is None


def test_sizes_of_several_masks_in_one_pass_are_those_of_one_at_a_time():
    torch.manual_seed(0)
    model, x = Residual().double(), torch.randn(6, 7, dtype=torch.float64)
    gated = espalier.attach(model, x, kinds=("branches", "units"))
    masks = torch.stack(some_masks(gated.d)[:2])
    with gated.masked(masks, slopes=True) as read:
        model(x).square().mean().backward()
        slopes, sizes = read.sized()
    assert slopes.shape == sizes.shape == masks.shape
    for s, mask in enumerate(masks):
        with gated.masked(mask, slopes=True) as read:
            model(x[s::2]).square().mean().backward()
            own = read.sized()
        torch.testing.assert_close(slopes[s], own[0])
        torch.testing.assert_close(sizes[s], own[1])


class Residual(nn.Module):
    """Linear layers beside which the stream runs on."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(7, 5), nn.Linear(5, 3)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in "ab")

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


@pytest.mark.parametrize("even", [0.0, 0.5])
def test_a_step_tells_the_search_the_sizes(monkeypatch, even):
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(6, 7)
    gated = espalier.attach(model, x, kinds=("branches", "units"), round_to={"branches.0.0": 3, "branches.1.0": 3})
    search = espalier.Search(gated.space, samples=1, signal="slopes", initial=0.9, target=0.5, horizon=9, even=even)
    assert search.even == even
    told = []
    monkeypatch.setattr(search, "tell", lambda masks, *values: told.append((masks, *values)))
    optimizer = espalier.StructureOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), search, gated)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    ((masks, _, slopes, sizes),) = told
    with gated.masked(masks[0], slopes=True) as read:
        closure()
        expected, other = read.sized(even=even), read.sized(even=0.5 - even)
    assert torch.equal(slopes[0], expected[0])
    assert torch.equal(sizes[0], expected[1])
    assert not torch.allclose(sizes[0], other[1])
    assert bool((sizes > slopes.abs()).any())


class Anew(nn.Module):
    """Its own method is computed anew in the backward pass, where no module runs that could mask the weight."""

    def __init__(self):
        super().__init__()
        self.first, self.weight, self.head = nn.Linear(5, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

    def product(self, x):
        return torch.tanh(torch.tanh(self.first(x)) @ self.weight)

    def forward(self, x):
        return self.head(checkpoint(self.product, x, use_reentrant=False))


def test_weights_that_are_read_anew_without_their_mask_have_no_gates():
    model, x = Anew().double(), torch.randn(4, 5, dtype=torch.float64)
    gated = espalier.attach(model, x)
    assert any("a backward pass reads weights anew" in why for why in gated.refused.values()), gated.refused
    mask = gated.canonical((torch.arange(gated.d) % 2).float())
    small = gated.compact(mask)
    small(x).square().mean().backward()
    with gated.masked(mask):
        model(x).square().mean().backward()
    sizes = [sum(float(own.grad.abs().sum()) for own in one.parameters()) for one in (model, small)]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-12)
