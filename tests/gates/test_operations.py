"""Gates behind operations that papers' code uses: what is found, and that a cut there is exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.gates.verify import MadeIn
from zoo.counter import by_operations


class Net(nn.Module):
    """A stem, what is tried, and a head."""

    def __init__(self, stem, head, **parts):
        super().__init__()
        self.stem, self.head = stem, head
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        y = self.between(self.stem(x))
        return self.head(y.flatten(2).mean(2) if y.ndim == 4 else y)


class LinearAttention(Net):
    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(16, 3), out=nn.Linear(16, 16), heads=4)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def between(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out((q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)).transpose(1, 2).flatten(2))


class EinsumHeads(Net):
    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(16, 3))
        self.query, self.key, self.value = (nn.Parameter(torch.randn(4, 16, 6)) for _ in range(3))
        self.out = nn.Parameter(torch.randn(4, 6, 16))

    def between(self, x):
        q, k, v = (torch.einsum("btc,hcd->bthd", x, w) for w in (self.query, self.key, self.value))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return torch.einsum("bihd,hdc->bic", torch.einsum("bhij,bjhd->bihd", weights, v), self.out)


class Splines(Net):
    """Curves of every input, as in a KAN: a hidden unit is read at each point of the grid."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(12, 3))
        self.register_buffer("grid", torch.linspace(-1, 1, 4))
        self.curves = nn.Parameter(torch.randn(12, 16, 4))

    def between(self, x):
        return torch.einsum("btig,oig->bto", torch.exp(-((x[..., None] - self.grid) ** 2)), self.curves)


class Rotary(Net):
    """Positions as complex numbers."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(16, 3), out=nn.Linear(16, 16), heads=4)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def between(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1])).to(x)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(3) for y in (q, k))
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
        return self.out(y.transpose(1, 2).flatten(2))


class Complex(Net):
    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(12, 3), real=nn.Linear(16, 12), imaginary=nn.Linear(16, 12))

    def between(self, x):
        y = torch.complex(self.real(x), self.imaginary(x))
        return (y * y.conj()).real + y.angle()


class Filter(Net):
    """Frequencies weighted channel by channel."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 1), nn.Linear(8, 3))
        self.weight = nn.Parameter(torch.randn(8, 6, 4, 2))

    def between(self, x):
        y = torch.fft.rfft2(x) * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(y, s=x.shape[-2:])


class Windows(Net):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 1), nn.Linear(12, 3), read=nn.Linear(72, 12))

    def between(self, x):
        return self.read(F.unfold(x, 3, padding=1, stride=2).transpose(1, 2)).mean(1)


class Folded(Net):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 1), nn.Linear(8, 3))

    def between(self, x):
        return F.fold(F.unfold(x, 3, padding=1).relu(), x.shape[-2:], 3, padding=1)


class Latent(Net):
    """Keys put together in an empty tensor, a part of them the same for all heads, as in DeepSeek."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(16, 3), shared=nn.Linear(16, 2), out=nn.Linear(16, 16), heads=4)
        self.q, self.kv = nn.Linear(16, 24), nn.Linear(16, 32)

    def between(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        keys = k.new_empty(*k.shape[:-1], 6)
        keys[..., :4].copy_(k)
        keys[..., 4:].copy_(self.shared(x)[:, None].expand(-1, k.shape[1], -1, -1))
        return self.out(F.scaled_dot_product_attention(q, keys, v).transpose(1, 2).flatten(2))


class Halo(Net):
    """Overlapping windows taken by `unfold`, as in HaloNet."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 1), nn.Linear(12, 3), read=nn.Linear(8, 12))

    def between(self, x):
        windows = F.pad(x, (1, 1, 1, 1)).unfold(2, 4, 2).unfold(3, 4, 2)  # (B, C, rows, columns, 4, 4)
        return self.read(windows.amax((4, 5)).flatten(2).transpose(1, 2)).relu().mean(1)


class Partly(nn.Module):
    """A part of the channels is convolved, the others pass, as in FasterNet."""

    def __init__(self, width, share):
        super().__init__()
        self.part, self.rest = share, width - share
        self.spatial, self.mix = nn.Conv2d(share, share, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        a, b = torch.split(x, (self.part, self.rest), 1)
        return x + self.mix(torch.cat((self.spatial(a), b), 1)).relu()


class PartialConvolution(Net):
    """Two blocks along a stream: what passes is split off in each of them."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 12, 1), nn.Linear(12, 3), blocks=nn.Sequential(Partly(12, 4), Partly(12, 4)))

    def between(self, x):
        return self.blocks(x)


class Gated(Net):
    """Sizes in a list, one of them twice, as in MambaOut; a convolution that has no stand-in for what is closed."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 1), nn.Linear(8, 3), up=nn.Conv2d(8, 24, 1), down=nn.Conv2d(12, 8, 1))
        self.near, self.sizes = nn.Conv2d(4, 4, 3, padding=1, groups=4), [12, 8, 4]

    def between(self, x):
        gate, same, mixed = torch.split(self.up(x), self.sizes, 1)
        return x + self.down(gate.relu() * torch.cat((same, self.near(mixed)), 1))


class Sliced(Net):
    """Channels taken by a size that the module keeps; the others count from it."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 12, 1), nn.Linear(12, 3), near=nn.Conv2d(5, 5, 3, padding=1, groups=5), part=5)

    def between(self, x):
        return torch.cat((x[:, self.part :], self.near(x[:, : self.part]).relu()), 1)


class Written(Net):
    """Sizes written out in the code: zeros stand in."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 12, 1), nn.Linear(12, 3), mix=nn.Conv2d(5, 9, 1))

    def between(self, x):
        return torch.cat((x[:, 9:], self.mix(x[:, :5]).relu()), 1)


class Scored(Net):
    """Neighbours weighted by scores, as in a graph attention network: a product with a vector is written out."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(12, 3), mix=nn.Linear(16, 12, bias=False))
        self.near, self.far = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(1, 1, 12))

    def between(self, x):
        x = self.mix(x.relu())
        scores = (x * self.near).sum(-1)[:, :, None] + (x.tanh() * self.far).sum(dim=-1)[:, None]
        return scores.softmax(-1) @ x


class Weighted(Net):
    """Curves from every unit to every other, weighted and added up, as in a KAN, beside units of a kind that it has
    none of."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(12, 3), width=16)
        self.weights, self.shifts = nn.Parameter(torch.randn(16, 12)), nn.Parameter(torch.randn(16, 12))

    def between(self, x):
        x = torch.cat([x[..., : self.width], x[..., self.width :: 2] * x[..., self.width + 1 :: 2]], -1)
        return (self.weights * torch.tanh(x[..., None] + self.shifts)).sum(2)


class Shape(nn.Module):
    """A view by sizes that it keeps in a dict and, made of that, in a tuple."""

    def __init__(self, **sizes):
        super().__init__()
        self.sizes = sizes
        self.pairs = tuple(sizes.items())

    def forward(self, x):
        return x.reshape(*x.shape[:2], self.pairs[0][1], x.shape[2] // self.sizes["heads"])


class KeptSizes(Net):
    """Heads whose number layers without tensors keep, as those that rearrange axes do."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(16, 3), out=nn.Linear(16, 16))
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.split_q, self.split_k = Shape(heads=4), nn.Unflatten(2, (4, -1))

    def between(self, x):
        q, k, v = self.split_q(self.q(x)), self.split_k(self.k(x)), self.v(x).view(2, 6, -1, 4)
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class Strongest(Net):
    """The strongest places of each channel."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 1), nn.Linear(8, 3))

    def between(self, x):
        return x.topk(2, -1).values * x.topk(2).indices


class Slope(Net):
    """The slope of an energy."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(16, 3), mix=nn.Linear(16, 12), energy=nn.Linear(12, 1))

    def between(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(F.softplus(self.mix(x))).sum(), x, create_graph=True)[0]


class Rounded(Net):
    """Activations rounded as for integers, with one scale or one for each channel."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(12, 3), mix=nn.Linear(16, 12))
        self.register_buffer("scale", torch.linspace(0.01, 0.2, 12))
        self.register_buffer("zero", torch.arange(12, dtype=torch.int32) - 6)

    def between(self, x):
        x = torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127).to(x)
        scale = self.scale.float()
        return torch.fake_quantize_per_channel_affine(self.mix(x).float(), scale, self.zero, 2, -128, 127).to(x)


class Picked(Net):
    """Rows that a mask of booleans picks pass a layer and are put back; others are put in by number."""

    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.Linear(12, 3), mix=nn.Linear(16, 12), two=nn.Linear(16, 12))
        self.register_buffer("mask", torch.arange(12).reshape(2, 6) % 3 > 0)

    def between(self, x):
        y = x.new_zeros(2, 6, self.mix.out_features)
        y[self.mask] = self.mix(x[self.mask]).relu()
        y[:, torch.tensor([0, 4])] = self.two(x[:, 1:3])
        y[~self.mask] += 1.0
        return y


ROWS, IMAGE = (2, 6, 5), (2, 3, 6, 6)
NETS = {
    LinearAttention: (ROWS, {"stem": 16, "q": 4, "out": 16}),
    Latent: (ROWS, {"stem": 16, "q": 4, "out": 16}),
    EinsumHeads: (ROWS, {"stem": 16, "query": 4, "out": 16}),
    Splines: (ROWS, {"stem": 16, "curves": 12}),
    Scored: (ROWS, {"stem": 16, "mix": 12}),
    Weighted: (ROWS, {"stem": 16, "weights": 12}),
    KeptSizes: (ROWS, {"stem": 16, "q": 4, "out": 16}),
    Rotary: (ROWS, {"stem": 16, "q": 4, "out": 16}),
    Complex: (ROWS, {"stem": 16, "real": 12}),
    Filter: (IMAGE, {"stem": 8}),
    Windows: (IMAGE, {"stem": 8, "read": 12}),
    Folded: (IMAGE, {"stem": 8}),
    Halo: (IMAGE, {"stem": 8, "read": 12}),
    PartialConvolution: (IMAGE, {"stem": 4, "stem#2": 8, "blocks.0.spatial": 4, "blocks.1.spatial": 4}),
    Gated: (IMAGE, {"stem": 8, "up": 8, "up#2": 4}),
    Sliced: (IMAGE, {"stem": 5, "stem#2": 7}),
    Written: (IMAGE, {"stem": 5, "stem#2": 3, "mix": 9}),
    Strongest: (IMAGE, {"stem": 8}),
    Slope: (ROWS, {"stem": 16, "mix": 12}),
    Rounded: (ROWS, {"stem": 16, "mix": 12}),
    Picked: (ROWS, {"stem": 16, "mix": 12}),
}


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_gates_are_found_and_exact(net):
    shape, sizes = NETS[net]
    torch.manual_seed(6)
    model, x = net().double(), torch.randn(shape, dtype=torch.float64)
    gated = espalier.attach(model, x)
    assert {group.name: group.size for group in gated.structure.groups} == sizes, gated.explain()
    for share in (0.7, 0.4, 0.0):
        mask = gated.canonical((torch.rand(gated.d) < share).float())
        with gated.masked(mask):
            expected = model(x)
        torch.testing.assert_close(gated.compact(mask)(x), expected, rtol=1e-9, atol=1e-9)


def test_sizes_that_layers_keep_follow_a_cut():
    gated = espalier.attach(KeptSizes(), torch.randn(2, 6, 5))
    mask = torch.ones(gated.d)
    mask[gated.space.slices["q"]] = torch.tensor([1.0, 0, 1, 0])
    small = gated.compact(mask)
    assert (small.split_q.sizes, small.split_q.pairs) == ({"heads": 2}, (("heads", 2),))
    assert (small.split_k.unflattened_size, small.v.out_features) == ((2, -1), 8)
    assert gated.model.split_q.sizes == {"heads": 4}


def test_a_vector_written_out_counts_in_no_weights():
    gated = espalier.attach(Scored(), torch.randn(2, 6, 5))
    assert gated.cost("weights")(torch.ones(gated.d)) == 5 * 16 + 16 * 12 + 12 * 3
    assert gated.cost("macs")(torch.ones(gated.d)) == 2 * (6 * (5 * 16 + 16 * 12) + 6 * 12 * 3)


def test_no_unit_of_zeros_stands_in_where_a_layer_would_run_on_it():
    class Projected(Net):
        """Keys and values of fewer positions, as in a Linformer; its code does not run without a head."""

        def __init__(self):
            super().__init__(nn.Linear(5, 16), nn.Linear(16, 3), out=nn.Linear(16, 16), heads=4)
            self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
            self.positions = nn.Parameter(torch.randn(6, 4))

        def between(self, x):
            k, v = (torch.einsum("bnd,nk->bkd", f(x), self.positions) for f in (self.k, self.v))
            q, k, v = (y.reshape(*y.shape[:2], -1, 4).transpose(1, 2) for y in (self.q(x), k, v))
            k, v = (y.expand(-1, self.heads, -1, -1) for y in (k, v))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            return x + self.out(y.reshape(*y.shape[:2], -1))

    x = torch.randn(2, 6, 5)
    gated = espalier.attach(Projected(), x)
    least = gated.canonical(torch.zeros(gated.d))
    assert gated.cost("macs")(least) == by_operations(gated.compact(least).eval(), x).macs


def test_nested_tensors_are_refused_by_name():
    class Ragged(Net):
        def __init__(self):
            super().__init__(nn.Linear(5, 8), nn.Linear(8, 3))

        def between(self, x):
            rows = torch.nested.nested_tensor([x[0, :2], x[1]], layout=torch.jagged)
            return torch.nested.to_padded_tensor(rows.relu(), 0.0)

    with pytest.raises(espalier.BadInput, match="a nested tensor is made in the model"):
        espalier.attach(Ragged(), torch.randn(2, 6, 5))


def test_a_row_behind_the_last_of_a_sparse_matrix_ends_no_process():
    """Torch writes it without a look, so that a wrong cut would end the process a while later."""
    with MadeIn(torch.float64), pytest.raises(espalier.BadInput, match="row 3 of a sparse matrix of 3 rows"):
        torch._convert_indices_from_coo_to_csr(torch.tensor([0, 3]), 3)


def test_why_an_input_of_a_computed_weight_stays():
    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * 0.5, self.bias)

    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), Scaled(8, 6), nn.ReLU(), nn.Linear(6, 3))
    text = " ".join(espalier.attach(model, torch.randn(2, 5)).explain().split())
    assert "read by a weight that is computed from parameters (in 2): 0.weight[0]" in text


def test_why_a_third_axis_stays():
    class Experts(Net):
        """One matrix for each expert, whose hidden units einsum lays beside the experts."""

        def __init__(self):
            super().__init__(nn.Linear(5, 8), nn.Linear(8, 3))
            self.up, self.down = nn.Parameter(torch.randn(4, 8, 6)), nn.Parameter(torch.randn(4, 6, 8))

        def between(self, x):
            return torch.einsum("ebto,eoc->btc", torch.einsum("btc,eco->ebto", x, self.up).relu(), self.down)

    assert "up[2]" in espalier.attach(Experts(), torch.randn(2, 6, 5)).explain().partition("not gated")[2]


def test_unequal_parts_stay_where_nothing_is_tried_out():
    gated = espalier.attach(Written(), torch.randn(IMAGE), check=False)
    assert "sliced at fixed places" in gated.explain().partition("not gated")[2]
    assert [group.name for group in gated.structure.groups] == ["mix"]
