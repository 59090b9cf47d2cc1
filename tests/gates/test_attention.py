"""torch's own attention: heads are gates in every form of it, masked equals cut, no fast path slips past."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.compact.layers import Attention

TOLERANCE = 1e-9


class Cross(nn.Module):
    """One attention between two streams; everything about it is an option."""

    def __init__(self, call=None, **options):
        super().__init__()
        self.batch_first = options.setdefault("batch_first", True)
        kdim, vdim = options.get("kdim") or 24, options.get("vdim") or 24
        self.query, self.key, self.value = nn.Linear(10, 24), nn.Linear(10, kdim), nn.Linear(10, vdim)
        self.attention = nn.MultiheadAttention(24, 4, **options)
        self.head = nn.Linear(24, 3)
        self.call = call or {}

    def forward(self, x: Tensor, y: Tensor, **masks: Tensor) -> Tensor:
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        out = self.attention(self.query(x), self.key(y), self.value(y), **self.call, **masks)[0]
        return self.head(out if self.batch_first else out.transpose(0, 1))


class Own(nn.Module):
    """Self attention, in which queries, keys and values are one tensor."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, **options)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, **masks)[0])


def prepared(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    return model.double()


def heads_of(gated):
    where = [gated.space.slices[g.name] for g in gated.structure.groups if g.kind == "heads"]
    assert where, gated.explain()
    return where


def apart(model, gated, example, mask):
    """How far masked and compact are apart, relative, over eval with and without gradients and train mode."""
    small, worst = gated.compact(mask), 0.0
    for train, gradients in ((False, False), (False, True), (True, True)):
        model.train(train)
        small.train(train)
        with torch.set_grad_enabled(gradients):
            with gated.masked(gated.canonical(mask)):
                expected = model(**example)
            got = small(**example)
        worst = max(worst, float((got - expected).detach().abs().max() / expected.detach().abs().max()))
    model.eval()
    return worst


def by_hand(model, gated, example, closed):
    """The output with the closed heads' columns of the output projection set to zero in the user's own module."""
    weight = model.attention.out_proj.weight
    held = weight.detach().clone()
    with torch.no_grad():
        weight.reshape(24, 4, 6)[:, closed] = 0
        out = model(**example)
        weight.copy_(held)
    return out


L, S, N = 5, 7, 2
PADDING = torch.tensor([[False] * S, [False] * 4 + [True] * 3])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
# Which places may not see which others; every place sees one that is no padding.
HIDDEN = (torch.arange(L).unsqueeze(1) + 2 * torch.arange(S)) % 4 == 3
CASES = {
    "plain": ({}, {}, {}),
    "sequence first": ({"batch_first": False}, {}, {}),
    "without bias": ({"bias": False}, {}, {}),
    "other widths of keys and values": ({"kdim": 9, "vdim": 11}, {}, {}),
    "learned key and value": ({"add_bias_kv": True, "add_zero_attn": True}, {}, {"key_padding_mask": PADDING}),
    "weights not asked for": ({}, {"need_weights": False}, {}),
    "padding": ({}, {"need_weights": False}, {"key_padding_mask": PADDING}),
    "padding and a mask": ({}, {}, {"key_padding_mask": PADDING, "attn_mask": HIDDEN}),
    "a mask of numbers": ({"batch_first": False}, {"need_weights": False}, {"attn_mask": torch.randn(L, S).double()}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_form_of_cross_attention(case):
    options, call, masks = CASES[case]
    model = prepared(Cross(call, **options)).eval()
    example = {"x": torch.randn(N, L, 10).double(), "y": torch.randn(N, S, 10).double(), **masks}
    gated = espalier.attach(model, example)
    (where,) = heads_of(gated)
    assert where.stop - where.start == 4
    for closed in ([1], [0, 2], [0, 1, 3]):
        mask = torch.ones(gated.d)
        mask[torch.arange(where.start, where.stop)[closed]] = 0
        with torch.no_grad(), gated.masked(mask):
            torch.testing.assert_close(model(**example), by_hand(model, gated, example, closed), rtol=0, atol=1e-12)
        assert apart(model, gated, example, mask) < TOLERANCE
        small = gated.compact(mask)
        assert isinstance(small.attention, Attention)
        assert small.attention.out_proj.weight.shape == (24, 6 * (4 - len(closed)))
    for seed in range(3):
        mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        assert apart(model, gated, example, mask) < TOLERANCE


@pytest.mark.parametrize("batched", [True, False])
def test_causal_self_attention_batched_or_not(batched):
    model = prepared(Own(batch_first=True)).eval()
    example = {"x": torch.randn(N, L, 24).double() if batched else torch.randn(L, 24).double()}
    example |= {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}
    gated = espalier.attach(model, example)
    for bits in itertools.product((0.0, 1.0), repeat=4):
        mask = torch.ones(gated.d)
        mask[heads_of(gated)[0]] = torch.tensor(bits)
        assert apart(model, gated, example, mask) < TOLERANCE


def test_weights_that_are_looked_at_keep_every_head():
    class Shown(Own):
        def forward(self, x):
            out, weights = self.attention(x, x, x)
            return self.head(out) + weights.mean()

    gated = espalier.attach(prepared(Shown(batch_first=True)), torch.randn(2, 5, 24).double())
    assert all(group.kind != "heads" for group in gated.structure.groups)
    assert "attention is averaged over the heads" in gated.explain()


def test_a_mask_for_each_head_keeps_them_all():
    masks = HIDDEN[:, :L].expand(N * 4, L, L)
    example = {"x": torch.randn(N, L, 24).double(), "attn_mask": masks, "need_weights": False}
    gated = espalier.attach(prepared(Own(batch_first=True)), example)
    assert all(group.kind != "heads" for group in gated.structure.groups)


def encoder(nested: bool, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, norm_first=norm_first, dropout=0.0)
    return prepared(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)).eval()


class Pooled(nn.Module):
    def __init__(self, nested: bool):
        super().__init__()
        self.encoder, self.head = encoder(nested), nn.Linear(24, 3).double()

    def forward(self, src, src_key_padding_mask):
        return self.head(self.encoder(src, src_key_padding_mask=src_key_padding_mask))


@pytest.mark.parametrize("kinds", [("heads",), ("units", "heads")])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_batches_of_an_encoder_in_eval_mode(nested, kinds):
    """Without gradients torch takes a fused kernel for the layer, on nested tensors where it may."""
    model = Pooled(nested).eval()
    example = {"src": torch.randn(N, S, 24).double(), "src_key_padding_mask": PADDING}
    fresh = model(**example)
    with torch.no_grad():
        packed = model(**example)
    gated = espalier.attach(model, example, kinds=kinds)
    with torch.no_grad():
        assert torch.equal(model(**example), packed)
        with gated.masked(torch.ones(gated.d)):
            assert torch.equal(model(**example), packed)
    for seed in range(4):
        mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        mask[0] = 0.0
        assert apart(model, gated, example, mask) < TOLERANCE
        with torch.no_grad(), gated.masked(mask):
            moved = model(**example)
        assert (moved - packed).abs().max() > 1e-3
    if nested:  # the case is what it says: torch leaves zeros where the padding is
        assert (fresh - packed).abs().max() > 1e-3


def test_decoder_layers_have_gates_on_both_attentions():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerDecoderLayer(24, 4, 32, batch_first=True, dropout=0.0)
            self.decoder, self.head = nn.TransformerDecoder(layer, 2), nn.Linear(24, 3)

        def forward(self, tgt, memory, tgt_mask):
            return self.head(self.decoder(tgt, memory, tgt_mask=tgt_mask, tgt_is_causal=True))

    model = prepared(Decoder()).eval()
    example = {"tgt": torch.randn(N, L, 24), "memory": torch.randn(N, S, 24), "tgt_mask": CAUSAL}
    example = {name: tensor.double() for name, tensor in example.items()}
    gated = espalier.attach(model, example)
    assert len(heads_of(gated)) == 4
    for seed in range(4):
        mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        assert apart(model, gated, example, mask) < TOLERANCE


def test_slopes_by_the_heads_are_the_differences():
    model = prepared(Own(batch_first=True)).eval()
    x = torch.randn(N, L, 24).double()
    gated = espalier.attach(model, x, kinds=("heads",))
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
    with gated.masked(mask, slopes=True) as slopes:
        model(x).square().sum().backward()
        found = slopes()
    weight = model.attention.out_proj.weight.detach()

    def loss(m):
        named = dict(model.named_parameters())
        named["attention.out_proj.weight"] = weight * m.repeat_interleave(6)
        return torch.func.functional_call(model, named, (x,)).square().sum()

    step = 1e-6
    for i in range(4):
        change = torch.zeros(4).double()
        change[i] = step
        difference = (loss(mask + change) - loss(mask - change)) / (2 * step)
        assert found[i].item() == pytest.approx(difference.item(), rel=1e-6, abs=1e-8)
