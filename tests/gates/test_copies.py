"""Copies of a gated model, and modules that changed places since: neither is ever masked wrongly."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier

from .nets import Recurrent, small_mlp


def test_a_deepcopy_works_and_can_be_gated_again():
    for make, x in ((small_mlp, torch.randn(3, 4)), (Recurrent, torch.randn(2, 5, 3))):
        model = make()
        gated = espalier.attach(model, x)
        mask = (torch.arange(gated.d) % 2).float()
        with gated.masked(mask):
            expected, twin, parts = model(x), copy.deepcopy(model), copy.deepcopy(list(model.children()))
            second, own = copy.deepcopy(twin), espalier.attach(copy.deepcopy(model), x)
            with gated.masked(torch.ones(gated.d)):
                pass
            assert torch.equal(twin(x), expected)  # it carries the mask it was copied under, as long as that is set
            assert torch.equal(second(x), expected)
            twin(x).sum().backward()
            late = twin(x).sum()
        late.backward()
        plain = model(x)
        assert not torch.equal(plain, expected)
        for made in (twin, second, copy.deepcopy(twin)):
            assert torch.equal(made(x), plain)
        if make is small_mlp:
            assert torch.equal(nn.Sequential(*parts)(x), plain)
        with own.masked(mask):
            assert torch.equal(own.model(x), expected)
        again = espalier.attach(copy.deepcopy(model), x)
        with again.masked(mask):
            assert torch.equal(again.model(x), expected)


def test_a_deepcopy_under_a_mask_ends_with_it_for_branches_and_placed_gates_too():
    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            h = F.relu(self.first(x))
            return self.last(h + self.branch(h))

    x = torch.randn(3, 4)
    placed = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), espalier.Gate(6), nn.Linear(6, 2))
    for model, kinds in ((Branched(), ("branches",)), (placed, ("units",))):
        gated = espalier.attach(model, x, kinds=kinds)
        mask = torch.zeros(gated.d)
        with gated.masked(mask):
            expected, twin = model(x), copy.deepcopy(model)
            assert torch.equal(twin(x), expected)
        assert not torch.equal(model(x), expected)
        assert torch.equal(twin(x), model(x))


def test_a_layer_replaced_or_moved_since_is_named():
    def put(model):
        model[2] = nn.Linear(6, 6)

    def swap(model):
        model[2], model[4] = model[4], model[2]

    def drop(model):
        del model[4]

    x = torch.randn(3, 4)
    for change, name in ((put, "2"), (swap, "2"), (drop, "4")):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2))
        gated = espalier.attach(model, x)
        mask = (torch.arange(gated.d) % 2).float()
        change(model)
        match = f"module '{name}' was replaced since the gates were attached; detach and attach again"
        with pytest.raises(espalier.BadInput, match=match), gated.masked(mask):
            pass
        with pytest.raises(espalier.BadInput, match=match):
            gated.compact(mask)
        with pytest.raises(espalier.BadInput, match=match):
            gated.call(dict(model.named_parameters()), mask, x)
        gated.detach()
        again = espalier.attach(model, x)
        mask = (torch.arange(again.d) % 2).float()
        with again.masked(mask):
            assert torch.allclose(model(x), again.compact(mask)(x), atol=1e-6)


def test_a_layer_held_twice_and_replaced_in_one_place_is_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.again = self.middle

        def forward(self, x):
            return self.last(F.relu(self.again(F.relu(self.middle(F.relu(self.first(x)))))))

    model = Twice()
    gated = espalier.attach(model, torch.randn(3, 4))
    model.again = nn.Linear(6, 6)
    with pytest.raises(espalier.BadInput, match="'again' was replaced"), gated.masked(torch.ones(gated.d)):
        pass


class Seen(nn.Module):
    """Keeps what it last computed, to be looked at, in an attribute and in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(4, 6), nn.Linear(6, 2), []

    def forward(self, x):
        self.hidden = F.relu(self.first(x))
        self.kept = [self.hidden, {"again": self.hidden}]
        return self.last(self.hidden)


def test_what_a_model_keeps_of_its_last_pass_is_no_obstacle():
    """Torch copies no tensor with a graph: such a model could be attached to when it was new, and not be cut later."""
    x, model = torch.randn(8, 4), Seen()
    model(x)
    gated = espalier.attach(model, x)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0])
    with gated.masked(mask):
        expected = model(x)
    assert model.hidden.grad_fn is not None
    small = gated.compact(mask)
    assert torch.allclose(small(x), expected)
    assert small.kept[0] is small.hidden
    assert model.kept[1]["again"] is model.hidden
    gated.detach()
    result = espalier.fit(model, (x, torch.arange(8) % 2), epochs=6, batch_size=4, target=0.5, quiet=True)
    assert result.model.last.in_features <= 3


class Feature:
    """As scripts of distillation and logging have it."""

    def __init__(self, layer):
        layer.register_forward_hook(self.keep)
        layer.register_forward_pre_hook(functools.partial(self.count, 1))
        layer.register_forward_hook(self)
        self.calls = self.seen = 0

    def keep(self, module, args, output):
        self.out = output

    def count(self, by, module, args):
        self.calls += by

    def __call__(self, module, args, output):
        self.seen += 1


def test_what_listens_to_a_model_is_no_part_of_it():
    """A copy tells the same object, also where that holds an activation with a graph, which torch does not copy."""
    model, x = small_mlp(), torch.randn(3, 4)
    feature = Feature(model[0])
    gated = espalier.attach(model, x)
    model(x)
    small = gated.compact(torch.tensor([1.0, 0, 1, 1, 0, 0]))
    feature.calls = feature.seen = 0
    small(x)
    assert (feature.calls, feature.seen, feature.out.shape) == (1, 1, (3, 3))
    gated.detach()
    calls = []
    shaping = espalier.shape(model, x, torch.optim.SGD(model.parameters(), 0.05), target=0.5, updates=10)

    def closure():
        loss = F.cross_entropy(shaping.network(x), torch.tensor([0, 1, 1])) + feature.out.square().mean()
        loss.backward()
        return loss

    for _ in range(10):
        feature.calls = 0
        shaping.step(closure)
        calls.append(feature.calls)
    assert shaping.phase == "settled"
    assert calls == [1] * 10
    shaping.gated.detach()
    result = espalier.fit(model, (x, torch.tensor([0, 1, 1])), epochs=4, batch_size=3, target=0.5, quiet=True)
    assert result.model(x).shape == (3, 2)


class Helped(nn.Module):
    """Keeps an object that knows the module, as code for weights that are computed does."""

    class Scale:
        def __init__(self, module):
            self.module = module
            module.register_forward_pre_hook(self.apply)

        def apply(self, module, args):
            self.module.factor = self.module.weight.mean()

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(3)), small_mlp()
        self.scale = self.Scale(self)

    def forward(self, x):
        return self.inner(x) * self.factor


def test_an_object_that_a_module_holds_is_copied_with_it():
    model, x = Helped(), torch.randn(3, 4)
    small = espalier.attach(model, x).compact(torch.ones(6))
    assert small.scale is not model.scale
    assert small.scale.module is small
    model.factor = None
    small(x)
    assert model.factor is None


def test_a_function_that_holds_the_original_is_refused():
    """A cut would run the whole model, or a dropout that no eval() reaches."""
    model, wrapped = small_mlp(), small_mlp()
    model.forward = functools.partial(model.forward)  # of a copy it is the copy's
    assert espalier.attach(model, torch.randn(3, 4)).d > 0
    own = wrapped.forward
    wrapped.forward = lambda x: own(x)
    with pytest.raises(espalier.BadInput, match=r"still runs 0 of this one.*torch\.compile\(model\.forward\)"):
        espalier.attach(wrapped, torch.randn(3, 4))

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)
            self.noisy = lambda x: self.drop(x)

        def forward(self, x):
            return self.last(self.noisy(self.first(x).relu()))

    with pytest.raises(espalier.BadInput, match="still runs drop of this one"):
        espalier.attach(Dropped(), torch.randn(3, 4))


def test_what_a_module_keeps_of_its_parameters_for_eval_mode_is_made_anew():
    """As the attention of LeViT keeps the biases of its heads, until it is put in train mode again."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
            self.scale, self.kept = nn.Parameter(torch.rand(6) + 1), None

        def train(self, mode=True):
            self.kept = None if mode else self.kept
            return super().train(mode)

        def forward(self, x):
            scale = self.scale.exp()
            if not self.training:
                self.kept = scale = self.kept if self.kept is not None else scale.detach()
            return self.second(torch.relu(self.first(x)) * scale)

    torch.manual_seed(0)
    model, x = Keeps().double().eval(), torch.randn(3, 4, dtype=torch.float64)
    gated = espalier.attach(model, x)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    with gated.masked(mask):
        expected = model(x)
    small = gated.compact(mask)
    torch.testing.assert_close(small(x), expected)
    assert not any(module.training for module in small.modules())


class Merged(nn.Module):
    """With gradients it reads a weight around its layer, as for a kernel of its own, or without them."""

    def __init__(self, around: bool):
        super().__init__()
        self.a, self.b, self.c, self.around = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2), around

    def forward(self, x):
        x = torch.relu(self.a(x))
        around = torch.is_grad_enabled() is self.around
        return self.c(torch.relu(nn.functional.linear(x, self.b.weight, self.b.bias) if around else self.b(x)))


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_mask_acts_on_the_road_that_gradients_take(around, noise):
    torch.manual_seed(6)
    model = nn.Sequential(Merged(around), nn.Dropout(noise)).double()
    gated = espalier.attach(model, torch.randn(5, 4).double())
    mask = (torch.arange(gated.d) % 2).float()
    x, small = torch.randn(5, 4).double(), gated.compact(mask).eval()
    model.eval()
    with gated.masked(gated.canonical(mask)):
        torch.testing.assert_close(model(x), small(x))
    assert "0.b" in gated.space.slices
    assert ("0.a" in gated.space.slices) is not around


def test_a_trial_with_gradients_leaves_what_modules_keep():
    """Graphs that a pass leaves in a module cannot be copied."""

    class Keeps(Merged):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    gated = espalier.attach(Keeps(True).double(), torch.randn(5, 4).double())
    assert list(gated.space.slices) == ["b"]
