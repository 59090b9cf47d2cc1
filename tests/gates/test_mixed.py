"""Choices: only the option taken runs, the cost is its own, and the compact model holds nothing else."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import espalier


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 12))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.act = espalier.Mixed([Counted(nn.ReLU()), Counted(nn.Linear(12, 12)), Counted(deep())])
        self.again = espalier.Mixed([nn.Identity(), nn.Tanh()])

    def forward(self, x):
        return self.head(self.again(self.act(self.first(x))))


X = torch.randn(4, 6, dtype=torch.float64)


@pytest.fixture
def subject():
    torch.manual_seed(4)
    model = Net().double()
    return model, espalier.attach(model, X)


def chosen(gated, act: int, again: int, bits: float = 1.0, seed: int = 0) -> Tensor:
    mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < bits).float()
    for name, option in (("act", act), ("again", again)):
        mask[gated.space.slices[name]] = torch.eye(3 if name == "act" else 2)[option]
    return mask


def test_the_space_has_a_choice_for_each(subject):
    _, gated = subject
    assert gated.space.choices == [
        (espalier.Choice("act", 3), gated.space.slices["act"]),
        (espalier.Choice("again", 2), gated.space.slices["again"]),
    ]
    with pytest.raises(espalier.BadMask, match="exactly one option"):
        gated.compact(torch.ones(gated.d))


@pytest.mark.parametrize(("act", "again"), list(itertools.product(range(3), range(2))))
def test_masked_equals_the_option_alone_and_the_compact_model(subject, act, again):
    model, gated = subject
    mask = chosen(gated, act, again)
    by_hand = model.head(model.again.options[again](model.act.options[act](model.first(X))))
    with gated.masked(mask):
        assert torch.equal(model(X), by_hand)
    for seed in range(3):
        mask = chosen(gated, act, again, 0.5, seed)
        canonical, small = gated.canonical(mask), gated.compact(mask)
        assert torch.equal(canonical[gated.space.slices["act"]], mask[gated.space.slices["act"]])
        with gated.masked(canonical):
            torch.testing.assert_close(small(X), model(X), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            gated.call(dict(model.named_parameters()), canonical, X), small(X), rtol=1e-9, atol=1e-12
        )
        assert type(small.act) is Counted
        assert type(small.act.inner) is type(model.act.options[act].inner)
        for kind, least in (("weights", 2), ("parameters", 1)):
            count = sum(p.numel() for p in small.parameters() if p.ndim >= least)
            assert gated.cost(kind)(canonical) == count
        assert gated.cost("macs")(canonical) == len(X) * gated.cost("weights")(canonical)


def test_only_the_option_taken_runs(subject):
    model, gated = subject
    for option in range(3):
        for module in model.act.options:
            module.calls = 0
        with gated.masked(chosen(gated, option, 0)):
            model(X)
        assert [module.calls for module in model.act.options] == [int(k == option) for k in range(3)]


def test_without_a_mask_and_without_gates_the_first_option_runs(subject):
    model, gated = subject
    expected = model.head(model.act.options[0](model.first(X)))
    assert torch.equal(model(X), expected)
    gated.detach()
    assert torch.equal(model(X), expected)
    assert not model.act._buffers


def test_slopes_by_the_options_are_the_differences(subject):
    model, gated = subject
    mask = chosen(gated, 1, 1).double()
    where = gated.space.slices["act"]

    def loss(m):
        h = model.first(X)
        mixed = sum(weight * option(h) for weight, option in zip(m, model.act.options))
        return model.head(torch.tanh(mixed)).square().sum()

    with gated.masked(mask, slopes=True) as slopes:
        model(X).square().sum().backward()
        found = slopes()[where]
    for i in range(3):
        step = torch.zeros(3).double()
        step[i] = 1e-6
        difference = (loss(mask[where] + step) - loss(mask[where] - step)).item() / 2e-6
        assert found[i].item() == pytest.approx(difference, rel=1e-6)


def test_choices_inside_choices_and_at_the_root():
    torch.manual_seed(0)
    inner = espalier.Mixed([nn.ReLU(), nn.Tanh()])
    model = espalier.Mixed([nn.Linear(6, 2), nn.Sequential(nn.Linear(6, 4), inner, nn.Linear(4, 2))]).double()
    gated = espalier.attach(model, X, kinds=("units",))
    names = [group.name for group in gated.space.groups]
    assert names == ["options.1.0", "mixed", "options.1.1"]
    for outer, nested in itertools.product(range(2), range(2)):
        mask = torch.cat([torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.eye(2)[outer], torch.eye(2)[nested]])
        small = gated.compact(mask)
        with gated.masked(gated.canonical(mask)):
            torch.testing.assert_close(small(X), model(X), rtol=1e-9, atol=1e-12)
        assert not any(isinstance(module, espalier.Mixed) for module in small.modules())


def test_save_and_load(subject, tmp_path):
    _, gated = subject
    small = gated.compact(chosen(gated, 2, 1, 0.5))
    espalier.save(small, tmp_path)
    assert torch.equal(espalier.load(tmp_path, lambda: Net().double())(X), small(X))


@pytest.mark.parametrize(("options", "said"), [([nn.ReLU()], "two options"), ([nn.ReLU(), 3], "torch modules")])
def test_bad_options_are_named(options, said):
    with pytest.raises(espalier.EspalierError, match=said):
        espalier.Mixed(options)


def test_options_of_other_shapes_are_refused():
    model = nn.Sequential(espalier.Mixed([nn.Linear(6, 4), nn.Linear(6, 5)]), nn.Linear(4, 2)).double()
    with pytest.raises(espalier.BadInput, match="all of one shape"):
        espalier.attach(model, X)
