"""The plan, and the module made by it: data first, then plain torch layers."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import espalier
from espalier.compact import Plan
from espalier.compact.apply import apply_plan
from espalier.compact.plan import from_runs, to_runs


def subject():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5), nn.ReLU(), nn.Linear(5, 2)
    )
    x = torch.randn(4, 3, 5, 5)
    return model, x, espalier.attach(model, x)


MASK = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0], dtype=torch.float32)


@pytest.mark.parametrize("indices", [[], [3], [0, 1, 2], [0, 2, 3, 7], [5, 4, 4, 5, 6]])
def test_runs_hold_any_indices(indices):
    assert from_runs(to_runs(indices)) == indices


def test_the_plan_says_what_stays():
    _, _, gated = subject()
    plan = gated.plan(MASK)
    assert plan.tensors["0.weight"] == {0: ((0, 1), (2, 4), (5, 6))}
    assert plan.tensors["4.weight"] == {0: ((1, 3),), 1: ((0, 9), (18, 36), (45, 54))}
    assert plan.tensors["1.running_var"] == plan.tensors["0.bias"] == plan.tensors["0.weight"]
    assert plan.attributes == {
        "0.out_channels": 4,
        "1.num_features": 4,
        "4.in_features": 36,
        "4.out_features": 2,
        "6.in_features": 2,
    }
    assert "4.weight dim 1: keep 36: 0-8 18-35 45-53" in str(plan)


def test_the_plan_cannot_be_changed_and_goes_through_json():
    _, _, gated = subject()
    plan = gated.plan(MASK)
    with pytest.raises(TypeError):
        plan.tensors["0.weight"] = {}
    with pytest.raises(AttributeError):
        plan.attributes = {}
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.to_dict() == plan.to_dict()
    assert again.tensors == plan.tensors


def test_a_plan_replays_on_a_fresh_model():
    model, _, gated = subject()
    small = gated.compact(MASK)
    fresh = copy.deepcopy(model)
    gated.detach()
    again = apply_plan(fresh, Plan.from_dict(small.espalier_plan))
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in small.named_parameters()}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 6, 3)), "does not have"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "shape"),
        (lambda: nn.Linear(2, 2), "does not have"),
    ],
)
def test_a_plan_on_another_model_is_refused_by_name(other, match):
    _, _, gated = subject()
    with pytest.raises(espalier.BadInput, match=match):
        apply_plan(other(), gated.plan(MASK))


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes, self.named, self.eps = [4, (8, 16)], {"heads": 4, "share": 0.5}, 0.1


def test_a_plan_sets_numbers_inside_what_a_module_keeps():
    set_to = {"sizes[1]": 3, "named[0]": 2}
    small = apply_plan(Sizes(), Plan({}, set_to))
    assert (small.sizes, small.named) == ([4, (3, 16)], {"heads": 2, "share": 0.5})


@pytest.mark.parametrize(
    "name", ["eps", "sizes", "sizes[3]", "sizes[-1]", "sizes[x]", "named[1]", "gone[0]", "__dict__[{}]"]
)
def test_a_plan_sets_nothing_but_numbers_that_are_there(name):
    name = name.format(tree_leaves(vars(Sizes())).index(4))
    with pytest.raises(espalier.BadInput, match="is no number of this model"):
        apply_plan(Sizes(), Plan({}, {name: 3}))


def test_the_compact_model_is_plain_and_the_original_untouched():
    model, x, gated = subject()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small = gated.compact(MASK)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(small.state_dict()) == set(before)
    for module in small.modules():
        assert type(module).__module__.startswith("torch.nn")
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not [n for n in (*module._buffers, *vars(module)) if "espalier" in n and n != "espalier_plan"]
    assert isinstance(small.espalier_plan, dict)
    shared = {t.data_ptr() for t in model.state_dict().values()} & {t.data_ptr() for t in small.state_dict().values()}
    assert not shared
    small(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_and_modes_stay_as_they_are():
    model, _, gated = subject()
    model[0].weight.requires_grad_(False)
    model.eval()
    small = gated.compact(MASK)
    assert not small[0].weight.requires_grad
    assert small[4].weight.requires_grad
    assert not small.training


def test_tied_tensors_stay_tied():
    """One weight applied twice in a row: what it reads and what it writes are the same units."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.one, self.two, self.head = (nn.Linear(a, b) for a, b in ((3, 6), (6, 6), (6, 6), (6, 2)))
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.head(torch.relu(self.two(torch.relu(self.one(torch.relu(self.first(x)))))))

    model = Tied().double()
    x = torch.randn(3, 3, dtype=torch.float64)
    gated = espalier.attach(model, x)
    assert gated.d == 6
    mask = (torch.arange(6) % 3 > 0).float()
    small = gated.compact(mask)
    assert small.two.weight is small.one.weight
    assert small.one.weight.shape == (4, 4)
    with gated.masked(mask):
        assert torch.allclose(small(x), model(x), rtol=1e-10)
    assert gated.cost("weights")(mask).item() == 3 * 4 + 4 * 4 + 4 * 2


def test_compiled_exported_and_copied():
    _, x, gated = subject()
    small = gated.compact(MASK).eval()
    expected = small(x)
    assert torch.equal(copy.deepcopy(small)(x), expected)
    exported = torch.export.export(small, (x,)).module()
    assert torch.allclose(exported(x), expected, atol=1e-6)
    compiled = torch.compile(small, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), expected, atol=1e-6)
