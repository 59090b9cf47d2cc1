"""The handle: masks come and go, the model stays the user's; bad input is named."""

import copy
import operator
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import espalier

from .nets import NETS, Attention, Recurrent, Residual, small_mlp


def everything(model):
    """All that could be left behind: attributes, buffers and hooks of every module."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[path, name] = dict(value) if isinstance(value, dict) else value
    return {key: (set(v) if isinstance(v, (dict, set)) else repr(v)[:60]) for key, v in found.items()}


@pytest.mark.parametrize("name", NETS)
def test_detach_leaves_the_model_as_found(name):
    make, example = NETS[name]
    model = make()
    names, before = list(model.state_dict()), everything(model)
    gated = espalier.attach(model, example())
    assert list(model.state_dict()) == names
    assert [n for n, _ in model.named_parameters()] == [n for n in names if n in dict(model.named_parameters())]
    with gated.masked((torch.rand(gated.d) < 0.5).float()):
        model(example())
    assert gated.detach() is model
    assert everything(model) == before
    with pytest.raises(espalier.BadInput, match="detached"), gated.masked(torch.ones(gated.d)):
        pass
    espalier.attach(model, example())


def test_modes_random_state_and_statistics_are_not_touched():
    model = Residual()
    model.norm.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    espalier.attach(model, torch.zeros(2, 3, 6, 6))
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_masks_nest_and_end_even_after_an_error():
    model = small_mlp()
    x = torch.randn(3, 4)
    gated = espalier.attach(model, x)
    plain = model(x)
    one, two = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([0.0, 0, 0, 1, 1, 1])
    with gated.masked(one):
        first = model(x)
        with gated.masked(two):
            second = model(x)
        assert torch.equal(model(x), first)
    assert torch.equal(model(x), plain)
    assert torch.allclose(first + second - model[2].bias, plain, atol=1e-6)
    with pytest.raises(RuntimeError), gated.masked(one):
        model(torch.randn(3, 5))
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("make", [Recurrent, Residual])
def test_an_error_inside_the_model_leaves_its_weights_in_place(make):
    model = make()
    x = {Recurrent: torch.randn(2, 5, 3), Residual: torch.randn(2, 3, 6, 6)}[make]
    gated = espalier.attach(model, x)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError), gated.masked(torch.zeros(gated.d)):
        model(torch.randn(2, 7))
    for name, p in model.named_parameters():
        assert (id(p), True) == (before[name][0], torch.equal(p, before[name][1]))


def test_a_gated_model_can_be_sent_to_another_process():
    model = small_mlp()
    gated = espalier.attach(model, torch.randn(3, 4))
    assert pickle.dumps(model)
    assert gated.d == 6


@pytest.mark.parametrize("how", [lambda gated: pickle.loads(pickle.dumps(gated)), copy.deepcopy])  # noqa: S301
@pytest.mark.parametrize("name", NETS)
def test_gates_that_were_used_mask_their_copy_elsewhere(name, how):
    """Some masks act on weights or in norms, which ask whether one is set: the copy's modules know of its handle."""
    make, example = NETS[name]
    model, x = make().eval(), example()
    gated = espalier.attach(model, x, kinds=("units", "channels", "heads"))
    mask = gated.canonical((torch.arange(gated.d) % 2).float())
    with gated.masked(mask):
        expected = model(x)
    there = how(gated)
    for _ in range(2):
        with there.masked(mask):
            assert torch.equal(there.model(x), expected)
        assert torch.equal(there.model(x), model(x))
    assert torch.allclose(there.compact(mask)(x), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_compiled_in_place_is_gated_uncompiled_and_is_as_it_was_afterwards():
    model, x = small_mlp(), torch.randn(4, 4)
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    calls = [module._compiled_call_impl for module in (model, model[0])]
    whole = model(x)  # traced without gates
    gated = espalier.attach(model, x)
    with gated.masked(mask := torch.tensor([1.0, 0, 1, 0, 0, 1])):
        masked = model(x)
    assert not torch.allclose(masked, whole)
    assert torch.allclose(gated.compact(mask)(x), masked, atol=1e-6)
    assert gated.one_at_a_time(x) == ""
    gated.detach()
    assert [module._compiled_call_impl for module in (model, model[0])] == calls
    with pytest.raises(espalier.NoGates):
        espalier.attach(model, x, ignore=("0",))
    assert [module._compiled_call_impl for module in (model, model[0])] == calls


def test_two_attaches_on_one_model_are_an_error():
    model = small_mlp()
    gated = espalier.attach(model, torch.randn(3, 4))
    with pytest.raises(espalier.BadInput, match="already"):
        espalier.attach(model, torch.randn(3, 4))
    gated.detach()
    espalier.attach(model, torch.randn(3, 4))


def test_masks_of_another_dtype_and_a_model_moved_later():
    model = small_mlp()
    x = torch.randn(3, 4)
    gated = espalier.attach(model, x)
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0])
    with gated.masked(mask):
        expected = model(x)
    model.double()
    for dtype in (torch.float16, torch.float32, torch.float64):
        with gated.masked(mask.to(dtype)):
            out = model(x.double())
        assert out.dtype == torch.float64
        assert torch.allclose(out, expected.double(), atol=1e-6)
        tensors = dict(model.named_parameters())
        assert torch.allclose(gated.call(tensors, mask.to(dtype), x.double()), out)


@pytest.mark.parametrize("name", NETS)
def test_every_buffer_holds_its_part_of_the_mask_and_ones_afterwards(name):
    make, example = NETS[name]
    gated = espalier.attach(make(), example())
    spots, channels = gated._installed.spots, gated._installed.channels
    for moved in (False, True):
        if moved:  # buffers of two types
            spots[0].module.double()
        mask = (torch.rand(gated.d) < 0.5).float()
        with gated.masked(mask, slopes=moved):
            for spot in spots:
                assert torch.equal(spot.held.detach().float(), spot.value(channels.of(mask)).reshape(spot.held.shape))
                assert spot.held.requires_grad == moved
                assert spot.held.is_leaf
        assert all(bool((spot.held == 1).all()) and not spot.held.requires_grad for spot in spots)


def test_a_mask_that_changes_before_the_backward_pass_is_noticed():
    model = small_mlp()
    gated = espalier.attach(model, torch.randn(3, 4))
    with gated.masked(torch.tensor([1.0, 0, 1, 0, 1, 0]), slopes=True):
        loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_keeps_its_dtype():
    model = small_mlp()
    gated = espalier.attach(model, torch.randn(3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16), gated.masked(torch.ones(gated.d)):
        assert model(torch.randn(3, 4)).dtype == torch.bfloat16


def test_keyword_and_tuple_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x, scale=None):
            return self.second(input=F.relu(self.first(input=x))) * (1.0 if scale is None else scale)

    x = torch.randn(3, 4)
    for example in (x, (x,), (x, torch.tensor(2.0)), {"x": x, "scale": torch.tensor(2.0)}):
        model = Two()
        gated = espalier.attach(model, example)
        mask = torch.tensor([1.0, 0, 1, 0, 1, 0])
        with gated.masked(mask):
            assert torch.allclose(model(x), gated.compact(mask)(x), atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(5), espalier.BadMask),
        (torch.full((6,), 0.5), espalier.BadMask),
        (torch.ones(6, dtype=torch.bool), espalier.BadMask),
        (torch.ones(6, dtype=torch.int64), espalier.BadMask),
        ([1.0] * 6, espalier.BadMask),
        (torch.ones(2, 2, 6), espalier.BadMask),
        (torch.full((6,), float("nan")), espalier.BadMask),
    ],
)
def test_bad_masks(mask, error):
    gated = espalier.attach(small_mlp(), torch.randn(3, 4))
    with pytest.raises(error), gated.masked(mask):
        pass
    with pytest.raises(error):
        gated.compact(mask)


def test_bad_arguments_are_named():
    model = small_mlp()
    x = torch.randn(3, 4)
    for arguments, match in (
        ({"kinds": ("wings",)}, "wings"),
        ({"kinds": "units"}, "collections"),
        ({"ignore": ("nowhere",)}, "nowhere"),
    ):
        with pytest.raises(espalier.BadInput, match=match):
            espalier.attach(model, x, **arguments)
    with pytest.raises(espalier.BadInput, match="Module"):
        espalier.attach(lambda x: x, x)
    with pytest.raises(espalier.BadInput, match="example_inputs"):
        espalier.attach(model, "x")
    with pytest.raises(espalier.BadInput, match="NaN"):
        espalier.attach(model, torch.full((3, 4), float("nan")))
    with pytest.raises(espalier.BadInput, match="weights, macs, units, parameters"):
        espalier.attach(model, x).cost("joules")


def test_no_gates_says_what_was_seen_and_why():
    with pytest.raises(espalier.NoGates, match="reaches the model's output") as caught:
        espalier.attach(nn.Linear(3, 2), torch.randn(1, 3))
    assert "espalier.Gate" in str(caught.value)


@pytest.mark.parametrize(
    ("norm", "way_out"),
    [
        (nn.utils.parametrizations.weight_norm, "parametrize.remove_parametrizations"),
        (nn.utils.parametrizations.spectral_norm, "parametrize.remove_parametrizations"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.3), "prune.remove"),
    ],
)
def test_no_gates_on_normalised_weights_says_why_and_the_way_out_works(norm, way_out):
    model = nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), norm(nn.Linear(8, 6)), nn.ReLU(), norm(nn.Linear(6, 2)))
    x = torch.randn(3, 4)
    with pytest.raises(espalier.NoGates, match=f"0, 2, 4: the weight is computed from parameters.*{way_out}"):
        espalier.attach(model, x)
    for layer in model[::2]:
        operator.attrgetter(way_out)(nn.utils)(layer, "weight")
    assert espalier.attach(model, x).d == 14


def test_no_gates_names_operations_without_a_rule():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 2)))
    with pytest.raises(espalier.NoGates, match="uses `_weight_norm_interface`, an operation without a rule"):
        espalier.attach(model, torch.randn(3, 4))


def test_inputs_that_the_model_cannot_take_are_refused_with_its_own_words():
    model = small_mlp()
    model[1].eval()
    placed = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), espalier.Gate(6), nn.Linear(6, 2))
    before, modes = everything(model), [module.training for module in model.modules()]
    for example, match in (
        (torch.randn(3, 5), "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (torch.randn(3, 4).double(), "RuntimeError: .*dtype"),
        ((torch.randn(3, 4), torch.randn(3)), "TypeError: .*positional arguments"),
        ({"y": torch.randn(3, 4)}, "TypeError: .*'y'"),
        ((), "TypeError: .*missing"),
    ):
        for each in (model, placed):
            with pytest.raises(espalier.BadInput, match=f"does not run on example_inputs: {match}") as caught:
                espalier.attach(each, example)
            assert "\n" not in str(caught.value)
    assert (everything(model), [module.training for module in model.modules()]) == (before, modes)


class Unknown(nn.Module):
    """An operation without a rule on hidden units; others stay free."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(F.relu(self.second(self.operation(self.first(x)))))


@pytest.mark.parametrize(
    "operation",
    [
        lambda h: h.cumsum(-1),
        lambda h: h.softmax(-1),
        lambda h: h.sort(-1).values,
        lambda h: torch.linalg.qr(h.T @ h + torch.eye(6))[0][:3] * h,
        lambda h: h[:, [1, 0, 2, 3, 4, 5]],
        lambda h: h - h.mean(-1, keepdim=True),
        lambda h: F.normalize(h, dim=-1),
        lambda h: h + torch.from_numpy(h.detach().numpy()).flip(1),
        lambda h: h * h.tolist()[0][0],
        lambda h: h.view(-1, 3, 2).amax(-1).repeat(1, 2),
        lambda h: torch.fft.fft(h).real,
    ],
)
def test_what_has_no_rule_or_needs_the_whole_axis_is_frozen_and_named(operation):
    model = Unknown(operation)
    gated = espalier.attach(model, torch.randn(3, 4))
    text = gated.explain()
    assert [g.name for g in gated.space.groups if g.size == 5] == ["second"]
    assert "first.weight[0]" in text or "first" in gated.refused
    assert "not gated, and why" in text


EDGES = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 0, 0, 2])


@pytest.mark.parametrize(
    "operation",
    [
        lambda h: torch.zeros_like(h).index_add(0, EDGES[1], h[EDGES[0]]),
        lambda h: torch.zeros(h.shape).index_add_(0, EDGES[1], h[EDGES[0]]),
        lambda h: h.new_zeros(h.shape).scatter_add_(0, EDGES[1][:, None].expand(-1, h.shape[1]), h[EDGES[0]]),
        lambda h: torch.zeros_like(h).scatter_reduce(0, EDGES[1][:, None].expand_as(h[EDGES[0]]), h[EDGES[0]], "mean"),
    ],
)
def test_messages_in_a_graph_and_tensors_that_are_made_in_the_forward_pass_can_be_cut(operation):
    model, x = Unknown(operation), torch.randn(3, 4)
    gated = espalier.attach(model, x)
    mask = gated.canonical((torch.arange(gated.d) % 3 > 0).float())
    assert {g.size for g in gated.space.groups} == {6, 5}
    with gated.masked(mask):
        masked = model(x)
    torch.testing.assert_close(gated.compact(mask)(x), masked)


def test_without_the_check_nothing_is_tried_and_rules_still_freeze():
    gated = espalier.attach(Unknown(lambda h: h.softmax(-1)), torch.randn(3, 4), check=False)
    assert [(g.name, g.least) for g in gated.space.groups] == [("second", 1)]


def test_ignored_modules_are_left_alone():
    gated = espalier.attach(Residual(), torch.randn(2, 3, 6, 6), ignore=("inner", "squeeze"))
    assert [g.name for g in gated.space.groups] == ["stem"]
    assert "ignored" in gated.refused["inner"]


def test_other_sizes_than_the_example():
    model = Attention().double()
    gated = espalier.attach(model, torch.randn(2, 5, 16, dtype=torch.float64))
    mask = torch.tensor([0.0, 1, *[1, 0] * 5])
    small = gated.compact(mask)
    for shape in ((1, 1, 16), (3, 9, 16)):
        x = torch.randn(shape, dtype=torch.float64)
        with gated.masked(mask):
            assert torch.allclose(model(x), small(x), rtol=1e-10)


@pytest.mark.parametrize("name", NETS)
def test_explanations_fit_80_columns_and_name_every_layer(name):
    make, example = NETS[name]
    model = make()
    gated = espalier.attach(model, example())
    text = gated.explain((torch.rand(gated.d) < 0.5).float())
    assert max(len(line) for line in text.splitlines()) <= 80
    for group in gated.space.groups:
        assert re.search(rf"^{re.escape(group.name)}\s", text, re.MULTILINE)
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            assert f"{path}.weight" in text
