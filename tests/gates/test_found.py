"""Found gates: which, how coupled; masked equals cut; costs by counting."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.gates.verify import Trial

from .nets import NETS


def subject(name, **options):
    torch.manual_seed(1)
    make, example = NETS[name]
    model = make().double()
    inputs = example()
    if inputs.is_floating_point():
        inputs = inputs.double()
    return model, inputs, espalier.attach(model, inputs, **options)


def masks_of(gated, count=8):
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        yield (torch.rand(gated.d, generator=generator) < (0.9, 0.5, 0.2, 0.0)[i % 4]).float()


EXPECTED = {  # group -> (kind, gates), counted by hand
    "split": {
        "0.wide": ("channels", 4),
        "0.back": ("channels", 2),
        "0.inner": ("channels", 4),
        "1.wide": ("channels", 3),
        "1.inner": ("channels", 3),
    },
    "residual": {"stem": ("channels", 6), "inner": ("channels", 8), "squeeze": ("units", 3)},
    "joined": {"left": ("channels", 3), "right": ("channels", 5)},
    "grouped": {"first": ("channels", 4), "up": ("channels", 6)},
    "attention": {"q": ("heads", 2), "up": ("units", 10)},
    "fused": {"qkv": ("heads", 3)},
    "lstm": {"rnn.l0": ("units", 6)},
    "gru": {"rnn.l0": ("units", 6)},
    "cell": {"cell": ("units", 6)},
    "shuffled": {"first": ("channels", 4), "second": ("channels", 3), "third": ("channels", 5)},
    "tied": {"into": ("units", 7), "back": ("units", 6)},
    "mlp": {"0": ("units", 9), "3": ("units", 8)},
}


@pytest.mark.parametrize("name", NETS)
def test_the_gates_that_are_there_are_found(name):
    _, _, gated = subject(name)
    assert {g.name: (g.kind, g.size) for g in gated.structure.groups} == EXPECTED[name]
    assert not gated.refused


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_masked_equals_cut(name, train):
    model, inputs, gated = subject(name)
    for mask in masks_of(gated):
        small = gated.compact(mask).train(train)
        model.train(train)
        with gated.masked(gated.canonical(mask)):
            expected = copy.deepcopy(model)(inputs)
        got = small(inputs)
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NETS)
def test_all_open_is_the_model_bit_for_bit(name):
    model, inputs, gated = subject(name)
    plain = copy.deepcopy(model)
    gated.detach()
    expected = model.eval()(inputs)
    gated = espalier.attach(model, inputs)
    assert torch.equal(model(inputs), expected)
    with gated.masked(torch.ones(gated.d)):
        assert torch.equal(model(inputs), expected)
    assert torch.equal(plain.eval()(inputs), expected)


@pytest.mark.parametrize("name", NETS)
def test_costs_are_counted_on_the_tensors(name):
    _, _, gated = subject(name)
    for mask in masks_of(gated):
        canonical = gated.canonical(mask)
        assert torch.equal(gated.canonical(canonical), canonical)
        small = gated.compact(mask)
        assert gated.cost("parameters")(canonical).item() == sum(p.numel() for p in small.parameters())
        assert gated.cost("units")(canonical).item() == canonical.sum().item()


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_the_cut_model_are_the_masked_ones(name):
    model, inputs, gated = subject(name)
    mask = gated.canonical(next(m for i, m in enumerate(masks_of(gated)) if i == 1))
    with gated.masked(mask):
        model.eval()(inputs).square().sum().backward()
    small = gated.compact(mask).eval()
    small(inputs).square().sum().backward()
    plan = gated.plan(mask)
    originals = dict(model.named_parameters())
    compared = 0
    for name_, parameter in small.named_parameters():
        whole = originals[name_].grad
        for dim, runs in plan.tensors.get(name_, {}).items():
            index = torch.tensor([i for a, b in runs for i in range(a, b)], dtype=torch.int64)
            whole = whole.index_select(dim, index)
        if parameter.numel():
            assert torch.allclose(parameter.grad, whole, rtol=1e-8, atol=1e-12), name_
            compared += 1
    assert compared > 1


@pytest.mark.parametrize("name", ["mlp", "residual", "joined", "attention", "grouped"])
def test_masks_on_inputs_and_on_weights_give_the_same(name, monkeypatch):
    model, inputs, gated = subject(name)
    mask = next(m for i, m in enumerate(masks_of(gated)) if i == 1)
    assert any(not spot.raw for spot in gated._installed.spots)
    with gated.masked(mask):
        model.eval()(inputs).square().sum().backward()
        expected = model(inputs)
    slopes = {n: p.grad.clone() for n, p in model.named_parameters()}
    gated.detach()
    model.zero_grad()
    monkeypatch.setattr("espalier.gates.masking._input_axis", lambda structure, reader: None)
    gated = espalier.attach(model, inputs)
    assert all(spot.raw for spot in gated._installed.spots)
    with gated.masked(mask):
        model(inputs).square().sum().backward()
        assert torch.allclose(model(inputs), expected, rtol=1e-12)
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, slopes[n], rtol=1e-9, atol=1e-12), n


def test_masked_recurrent_weights_give_the_gradients_of_zeroed_ones():
    """A masked weight (LSTM) against the obvious: its output multiplied at the reading layer and its recurrence cut."""
    model, inputs, gated = subject("lstm")
    mask = (torch.arange(6) % 2).double()
    reference = copy.deepcopy(model)
    gated_out = None
    with gated.masked(mask):
        gated_out = model(inputs)
        gated_out.sum().backward()
    closed = mask == 0
    gated.detach()
    with torch.no_grad():
        for weight in (reference.rnn.weight_hh_l0, reference.rnn.weight_hh_l1, reference.rnn.weight_ih_l1):
            weight[:, closed] = 0
        reference.head.weight[:, closed] = 0
    plain = unrolled(reference, inputs)
    assert torch.allclose(gated_out, plain, rtol=1e-12)
    plain.sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters()):
        grad = b.grad.clone()
        if name in ("rnn.weight_hh_l0", "rnn.weight_hh_l1", "rnn.weight_ih_l1", "head.weight"):
            grad[:, closed] = 0  # a closed column is not trained
        assert torch.allclose(a.grad, grad, rtol=1e-9, atol=1e-12), name


def unrolled(model, inputs):
    return F.linear(
        torch.lstm(
            inputs, [torch.zeros(2, 3, 6).double()] * 2, list(model.rnn.parameters()), True, 2, 0.0, False, False, True
        )[0],
        model.head.weight,
        model.head.bias,
    )


def test_macs_and_weights_counted_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(), nn.Linear(54, 5)
    )
    gated = espalier.attach(model, torch.randn(2, 3, 7, 7))
    ones = torch.ones(gated.d)
    weights, macs = gated.cost("weights"), gated.cost("macs")
    assert weights(ones).item() == 3 * 4 * 9 + 4 * 6 * 9 + 54 * 5
    assert macs(ones).item() == 2 * (108 * 49 + 216 * 9 + 270)  # the whole batch as given
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 0, 0], dtype=torch.float32)
    assert weights(mask).item() == 3 * 2 * 9 + 2 * 3 * 9 + 27 * 5
    assert macs(mask).item() == 2 * (54 * 49 + 54 * 9 + 135)
    theta = torch.rand(gated.d, dtype=torch.float64)
    draws = (torch.rand(40_000, gated.d) < theta).double()
    assert weights(draws).mean().item() == pytest.approx(weights(theta).item(), rel=0.01)


@pytest.mark.parametrize("batch", [1, 3])
def test_layers_that_read_learned_queries_count(batch):
    class Asked(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.up, self.down = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            asked = F.relu(self.up(self.queries.expand(len(x), -1, -1)))
            return self.down(asked) * x[:, None]

    gated = espalier.attach(Asked(), torch.randn(batch, 2))
    mask = torch.tensor([1.0, 0, 1, 0, 0, 0])
    assert gated.cost("weights")(mask).item() == 2 * (4 + 2)
    assert gated.cost("macs")(mask).item() == 2 * (4 + 2) * 5 * batch


def test_a_layer_that_reads_a_table_of_positions_counts():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.randn(7, 3))
            self.up, self.down, self.body = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(2, 4)

        def forward(self, x):
            return self.body(x + self.down(F.relu(self.up(self.places)))[None])

    gated = espalier.attach(Biased(), torch.randn(5, 7, 2))
    mask = torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 0, 0])  # the columns of the table are gates, too
    assert gated.cost("weights")(mask).item() == 2 * (3 + 2) + 8
    assert gated.cost("macs")(mask).item() == 7 * 2 * (3 + 2) + 5 * 7 * 8


class Messages(nn.Module):
    """A graph whose edges carry messages: gathered at one end, collected at the other."""

    def __init__(self, collect):
        super().__init__()
        self.collect, self.into, self.message, self.out = collect, nn.Linear(3, 5), nn.Linear(10, 6), nn.Linear(11, 2)

    def forward(self, nodes, edges):
        nodes, (start, end) = self.into(nodes).relu(), edges.T
        from_ = nodes.gather(0, start[:, None].expand(-1, nodes.shape[1]))
        messages = self.message(torch.cat([from_, nodes[end]], 1)).relu()
        collected = self.collect(nodes.new_zeros(len(nodes), messages.shape[1]), end, messages)
        return self.out(torch.cat([nodes, collected], 1))


COLLECT = {
    "index_add": lambda into, end, messages: into.index_add(0, end, messages),
    "scatter_add": lambda into, end, messages: into.scatter_add(0, end[:, None].expand_as(messages), messages),
    "amax": lambda into, end, messages: into.scatter_reduce(0, end[:, None].expand_as(messages), messages, "amax"),
    "sparse": lambda into, end, messages: torch.sparse.mm(
        torch.sparse_coo_tensor(
            torch.stack([end, torch.arange(len(end))]),
            torch.ones_like(end).to(messages),
            (len(into), len(end)),
            check_invariants=False,
        ),
        messages,
    ),
}


@pytest.mark.parametrize("collect", COLLECT)
def test_messages_along_edges(collect):
    torch.manual_seed(4)
    model = Messages(COLLECT[collect]).double().eval()
    inputs = torch.randn(4, 3).double(), torch.randint(4, (7, 2))
    gated = espalier.attach(model, inputs)
    assert {group.name: group.size for group in gated.structure.groups} == {"into": 5, "message": 6}
    for mask in masks_of(gated, 4):
        with gated.masked(gated.canonical(mask)):
            expected = model(*inputs)
        assert torch.allclose(gated.compact(mask)(*inputs), expected, rtol=1e-9, atol=1e-12)


class Shared(nn.Module):
    """Heads of queries that meet one head of keys and values; then channels, each blurred by the same kernel."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(6, 2)
        self.register_buffer("kernel", torch.tensor([[[1.0, 2.0, 1.0]]]))

    def forward(self, x):
        q = self.q(x).unflatten(2, (-1, 2)).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        read = ((q @ k.transpose(2, 3)).softmax(3) @ v).transpose(1, 2).flatten(2)
        channels = self.out(read).transpose(1, 2)
        kernel = self.kernel.repeat(channels.shape[1], 1, 1)
        return self.head(F.conv1d(channels, kernel, groups=channels.shape[1]).transpose(1, 2))


def test_what_is_copied_for_every_head_or_channel_follows_them():
    torch.manual_seed(5)
    model, inputs = Shared().double(), torch.randn(3, 5, 8).double()
    gated = espalier.attach(model, inputs)
    assert {group.name: group.size for group in gated.structure.groups} == {"q": 4, "out": 6}
    for mask in masks_of(gated, 4):
        with gated.masked(gated.canonical(mask)):
            expected = model(inputs)
        assert torch.allclose(gated.compact(mask)(inputs), expected, rtol=1e-9, atol=1e-12)


def test_bags_of_a_table_are_as_wide_as_it():
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode="mean"), nn.ReLU(), nn.Linear(6, 2)).double()
    bags = torch.randint(9, (4, 3))
    gated = espalier.attach(model, bags)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0])
    with gated.masked(mask):
        expected = model(bags)
    small = gated.compact(mask)
    assert small[0].weight.shape == (9, 3)
    assert torch.allclose(small(bags), expected, rtol=1e-9, atol=1e-12)


def test_a_tied_table_counts_once_and_a_plain_table_not_at_all():
    _, _, gated = subject("tied")
    assert gated.cost("weights")(torch.ones(gated.d)).item() == 11 * 6 + 6 * 7 + 7 * 6
    plain = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    gated = espalier.attach(plain, torch.randint(11, (3,)))
    assert gated.cost("weights")(torch.ones(gated.d)).item() == 6 * 5 + 5 * 2


def test_unread_and_silent_gates_are_closed():
    """With least at 0 everywhere: emptying the middle of a chain leaves nothing to read and nothing to feed."""
    from dataclasses import replace

    from espalier.gates.find import find_groups, structure_of
    from espalier.gates.structure import canonical, finish
    from espalier.gates.trace import Example, trace

    model = nn.Sequential(*[layer for n in (5, 4, 3, 2) for layer in (nn.Linear(n + 1, n), nn.ReLU())], nn.Linear(2, 1))
    seen = trace(model, Example.of(torch.randn(3, 6)), inputs=False, placed=False)
    groups = [replace(g, least=0) for g in find_groups(seen, ("units",), dict(model.named_modules()))]
    structure = finish(structure_of(seen, groups), model)
    mask = torch.ones(structure.space.d).numpy()
    mask[structure.space.slices["4"]] = 0
    assert canonical(structure, mask).sum() == 0
    mask = torch.ones(structure.space.d).numpy()
    mask[structure.space.slices["4"].start] = 0
    assert (canonical(structure, mask) == mask).all()


class Noisy(nn.Module):
    """Noise on hidden units in train mode: of a literal width, of a width that follows, or of the tensor's own."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        self.of, self.hidden = width, 6

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.training:
            width = {"literal": 6, "attribute": self.hidden, "own": h.shape[1]}[self.of]
            h = h + 0.1 * torch.randn(x.shape[0], width, dtype=h.dtype)
        return self.last(torch.relu(self.second(h)))


@pytest.mark.parametrize("width", ["literal", "attribute", "own"])
def test_a_cut_runs_in_train_mode_even_where_that_is_random(width):
    model, x = Noisy(width), torch.randn(3, 4)
    gated = espalier.attach(model, x)
    assert list(gated.structure.learned.padded) == ["first"] * (width == "literal")  # zeros stand in: 6 is 6
    small = gated.compact((torch.arange(gated.d) % 2).float()).train()
    assert small(x).shape == (3, 2)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


class Padded(nn.Module):
    """An encoder that packs padded batches into nested tensors in eval mode without gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens, padding):
        return self.head(self.encoder(self.table(tokens), src_key_padding_mask=padding).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [False, True])
def test_padded_batches_packed_by_the_encoder(train):
    torch.manual_seed(0)
    model = Padded().double().train(train)
    tokens, padding = torch.randint(0, 20, (4, 6)), torch.zeros(4, 6, dtype=torch.bool)
    padding[1, 4:] = padding[2, 3:] = True
    packed = []
    model.encoder.layers[0].linear2.register_forward_pre_hook(lambda _, args: packed.append(args[0].is_nested))
    gated = espalier.attach(model, (tokens, padding))
    assert [g.name for g in gated.space.groups] == [
        f"encoder.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "linear1")
    ]
    mask = (torch.arange(gated.d) % 3 == 0).double()
    small = gated.compact(mask)
    for grad in (False, True):
        packed.clear()
        with torch.set_grad_enabled(grad):
            with gated.masked(mask):
                expected = model(tokens, padding)
            assert packed == [not grad and not train]
            assert torch.allclose(small(tokens, padding), expected, rtol=1e-9, atol=1e-12)


def test_channels_last_images_pooled_to_one_place():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(6, 2)).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    gated = espalier.attach(model, x)
    assert {g.name: g.size for g in gated.space.groups} == {"0": 8, "2": 6}
    mask = (torch.arange(gated.d) % 2).double()
    with gated.masked(mask):
        expected = model(x)
    assert torch.allclose(gated.compact(mask)(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strides", [(1, 6), (0, 1), (6, 0)])
@pytest.mark.parametrize("place", [torch.Tensor.as_strided, torch.Tensor.as_strided_])
def test_other_strides_fix_what_they_touch(strides, place):
    class Restrided(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x):
            h = place(self.first(x).clone(), (6, 6), strides)
            return self.last(torch.relu(self.second(h)))

    gated = espalier.attach(Restrided(), torch.randn(6, 4), check=False)
    assert [g.name for g in gated.space.groups] == ["second"]
    assert "laid out anew by `as_strided`" in gated.explain()


@pytest.mark.parametrize("drawn", ["python", "numpy", "torch"])
def test_stochastic_depth_of_any_generator(drawn):
    """What a model draws in train mode is no reason to refuse a layer, and the user's own draws stay as they were."""
    draw = {"python": random.random, "numpy": np.random.random, "torch": lambda: torch.rand(()).item()}[drawn]

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(4))

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                if not self.training or draw() < 0.7:
                    x = x + block(x)
            return self.head(x)

    for seed in range(5):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)  # noqa: NPY002
        gated = espalier.attach(Deep(), torch.randn(3, 4))
        assert gated.refused == {}
        assert gated.d == 8 + 4 * 6
    model = Deep()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    espalier.attach(model, torch.ones(3, 4))
    assert draw() == expected


def test_a_vector_that_is_summed_over_writes_nothing():
    """Attention by one learned query: the layer that makes keys may be emptied."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.query, self.head = nn.Linear(6, 5), nn.Parameter(torch.randn(5)), nn.Linear(6, 2)

        def forward(self, x):
            weights = torch.softmax(torch.tanh(self.key(x)) @ self.query, 1)
            return self.head((weights.unsqueeze(-1) * x).sum(1))

    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(3, 4, 6).double()
    gated = espalier.attach(model, x)
    assert [(g.name, g.size, g.least) for g in gated.space.groups] == [("key", 5, 0)]
    assert gated.canonical(torch.ones(5)).all()
    for mask in ([1.0, 0, 1, 0, 0], [0.0] * 5):
        small = gated.compact(torch.tensor(mask))
        with gated.masked(torch.tensor(mask)):
            assert torch.allclose(small(x), model(x), rtol=1e-9, atol=1e-12)
        assert small.query.numel() == sum(mask)


def test_lazy_layers_are_named_before_their_first_call():
    model, x = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2)), torch.randn(3, 4)
    with pytest.raises(espalier.BadInput, match=r"0\.weight has no shape before the first call: call the model once"):
        espalier.attach(model, x)
    model(x)
    assert espalier.attach(model, x).d == 6


def test_a_grouped_convolution_whose_weight_is_computed():
    """As in Wav2Vec2; its groups stay, and what reads them is gated."""
    torch.manual_seed(0)
    grouped = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, groups=2), dim=2)
    model = nn.Sequential(nn.Conv1d(3, 8, 1), grouped, nn.ReLU(), nn.Flatten(), nn.Linear(24, 6), nn.Linear(6, 2))
    gated = espalier.attach(model, torch.randn(2, 3, 5))
    assert [group.name for group in gated.structure.groups] == ["4"]
    assert "grouped convolution" in gated.explain()


class Around(nn.Sequential):
    """In train mode the last layer's weight is read by a function, where no hook of the layer acts."""

    def forward(self, x):
        x = self[1](self[0](x))
        return F.linear(x, self[2].weight, self[2].bias) if self.training else self[2](x)


def test_a_mask_that_would_not_act_in_train_mode_is_refused():
    with pytest.raises(espalier.NoGates, match="train mode"):
        espalier.attach(Around(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4))


class Queries(nn.Module):
    """Learned queries that layers read before they meet the input, as in DETR."""

    def __init__(self):
        super().__init__()
        self.queries, self.norm = nn.Parameter(torch.randn(3, 8)), nn.LayerNorm(8)
        self.up, self.down, self.into, self.head = (nn.Linear(*n) for n in ((8, 6), (6, 8), (5, 8), (8, 2)))

    def forward(self, x):
        queries = self.queries.unsqueeze(0).repeat(len(x), 1, 1)
        queries = self.norm(queries + self.down(torch.relu(self.up(queries))))
        return self.head(queries + self.into(x).unsqueeze(1))


@pytest.mark.parametrize("kinds", [("units",), ("units", "width")])
def test_layers_that_read_learned_queries_are_counted(kinds):
    torch.manual_seed(0)
    model = Queries()
    gated = espalier.attach(model, torch.randn(4, 5), kinds=kinds)
    for mask in masks_of(gated, 4):
        small = gated.compact(mask)
        left = [layer for layer in small.modules() if isinstance(layer, nn.Linear)]
        assert float(gated.cost("weights")(gated.canonical(mask))) == sum(layer.weight.numel() for layer in left)
    products = 4 * 3 * (2 * 8 * 6 + 8 * 2) + 4 * 5 * 8
    assert float(gated.cost("macs")(torch.ones(gated.d))) == products


class Sizes(nn.Module):
    """Attention that reads two sizes of its own, behind many that it only keeps."""

    def __init__(self, kept):
        super().__init__()
        for number in range(kept):
            setattr(self, f"kept_{number}", 4)
        self.qkv, self.out, self.heads, self.inner = nn.Linear(16, 48), nn.Linear(16, 16), 4, 16

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(n, t, self.inner))


def trials_of(monkeypatch, model, example):
    """The gates of a model, and how often masked and cut were compared for them."""
    count, compare = [], Trial.disagreement
    monkeypatch.setattr(Trial, "disagreement", lambda *given: count.append(0) or compare(*given))
    return espalier.attach(model, example), len(count)


def test_integers_that_a_pass_does_not_look_at_are_not_searched(monkeypatch):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 16), Sizes(14), nn.Linear(16, 3))
    gated, trials = trials_of(monkeypatch, model, torch.randn(2, 6, 5))
    assert {(a.attribute, a.per_unit) for a in gated.structure.learned.adapted} == {("heads", 1), ("inner", 4)}
    assert trials < 20, trials
    assert type(model[1]) is Sizes


def test_a_search_begins_where_the_cut_model_failed(monkeypatch):
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16)) for _ in range(32)]
    model = nn.Sequential(nn.Linear(5, 16), *layers[:16], Sizes(0), *layers[16:])
    gated, trials = trials_of(monkeypatch, model, torch.randn(2, 6, 5))
    assert len(gated.structure.learned.adapted) == 2
    assert trials < 17, trials
