"""Invariances and identities of the search, for any space, losses, penalty and learning rate."""

import contextlib
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import espalier
from oracle.bridge import space_of
from oracle.method import lower_bounds

spaces = st.lists(st.sampled_from([1, 1, 1, 2, 3, 5]), min_size=1, max_size=6)
penalties = st.one_of(st.just(0.0), st.floats(-3, 3))
seeds = st.integers(0, 2**32 - 1)
thorough = settings(max_examples=60, deadline=None, derandomize=True)


def costs_for(variables, rng):
    return torch.from_numpy(rng.uniform(0.5, 5.0, sum(variables)))


@st.composite
def problems(draw):
    """(variables, the keyword arguments of a search over them, a random generator for the rest)."""
    variables = draw(spaces)
    rng = np.random.default_rng(draw(seeds))
    keywords = {
        "cost": costs_for(variables, rng),
        "penalty": draw(penalties),
        "samples": draw(st.integers(2, 9)),
        "adaptive": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }
    if draw(st.booleans()):
        keywords["learning_rate"] = draw(st.floats(1e-3, 1.0))
    return variables, keywords, rng


def some_losses(rng, shape, lost=0.1):
    losses = torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float64))
    losses[torch.from_numpy(rng.random(shape) < lost)] = rng.choice([math.nan, math.inf, -math.inf])
    losses[..., 0] = losses[..., 0].nan_to_num(0.0, 0.0, 0.0)  # never all lost: that is another test
    return losses


@thorough
@given(problems(), seeds)
def test_only_the_order_of_the_losses_counts(problem, seed):
    """Any increasing map of the finite losses leaves theta the same to the last bit."""
    variables, keywords, rng = problem
    plain, mapped = (espalier.Search(space_of(variables), **keywords) for _ in range(2))
    for _ in range(4):
        masks = plain.ask()
        assert torch.equal(mapped.ask(), masks)
        losses = some_losses(rng, keywords["samples"])
        levels = torch.from_numpy(np.sort(np.random.default_rng(seed).normal(size=7)) * 1e3)
        image = torch.where(losses.isfinite(), levels[losses.nan_to_num(0, 0, 0).long() + 3], losses)
        plain.tell(masks, losses)
        mapped.tell(masks, image)
        assert torch.equal(plain.theta, mapped.theta)


@thorough
@given(problems(), seeds)
def test_the_order_of_the_samples_does_not_count(problem, seed):
    variables, keywords, rng = problem
    plain, shuffled = (espalier.Search(space_of(variables), **keywords) for _ in range(2))
    for _ in range(4):
        masks = plain.ask()
        losses = some_losses(rng, keywords["samples"])
        order = torch.from_numpy(np.random.default_rng(seed).permutation(keywords["samples"]))
        plain.tell(masks, losses)
        shuffled.tell(masks[order], losses[order])
        torch.testing.assert_close(plain.theta, shuffled.theta, rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    spaces,
    seeds,
    st.integers(2, 6),
    st.floats(-1e6, 1e6),
    st.one_of(st.none(), st.floats(1e-6, 1e9)),
    st.one_of(st.none(), st.floats(1e-9, 0.49)),
)
def test_theta_stays_in_its_bounds(variables, seed, samples, penalty, learning_rate, margin):
    """For any masks, losses, penalty and learning rate; what is drawn and shipped stays a mask."""
    rng = np.random.default_rng(seed)
    space = space_of(variables)
    search = espalier.Search(
        space,
        cost=costs_for(variables, rng),
        penalty=penalty,
        samples=samples,
        learning_rate=learning_rate,
        margin=margin,
        batch=(3,),
        seed=1,
    )
    lows = np.concatenate([np.full(size, low) for size, low in zip(variables, lower_bounds(variables, margin))])
    for _ in range(6):
        masks = search.ask()
        space.check_mask(masks)
        search.tell(masks, some_losses(rng, (3, samples), lost=0.5))
        theta = search.theta.numpy()
        assert np.isfinite(theta).all()
        assert (theta >= lows - 1e-12).all()
        for group, where in space.choices:
            assert theta[:, where].sum(-1) == pytest.approx(np.ones(3), abs=1e-9)
            assert (theta[:, where] <= 1 - (group.size - 1) * lows[where] + 1e-9).all()
        for _, where in space.bits:
            assert (theta[:, where] <= 1 - lows[where]).all()
        space.check_mask(search.select())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spaces, seeds, st.floats(1e-3, 20.0), st.sampled_from([0.0, 0.3, -5.0]), st.sampled_from([None, 0.0, 1e-9]))
def test_adaptive_theta_stays_in_its_bounds(variables, seed, delta, penalty, margin):
    """Refused as too long a step, or inside the bounds; never NaN."""
    rng = np.random.default_rng(seed)
    space = space_of(variables)
    cost = costs_for(variables, rng)
    keywords = {"cost": cost, "penalty": penalty, "learning_rate": delta, "margin": margin, "batch": (2,)}
    search = None
    with contextlib.suppress(espalier.BadInput) if delta > 1 else contextlib.nullcontext():
        search = espalier.Search(space, adaptive=True, **keywords)
    if search is None:
        return
    for _ in range(12):
        masks = search.ask()
        search.tell(masks, some_losses(rng, (2, 2), lost=0.2))
        assert bool(((search.theta >= 0) & (search.theta <= 1)).all())


@thorough
@given(problems())
def test_penalty_zero_is_the_unpenalised_method(problem):
    """Step by step and to the last bit, whatever the cost."""
    variables, keywords, rng = problem
    keywords.pop("penalty")
    cost = keywords.pop("cost")
    searches = [
        espalier.Search(space_of(variables), **keywords),
        espalier.Search(space_of(variables), cost=cost, **keywords),
        espalier.Search(space_of(variables), cost=cost, penalty=0.0, **keywords),
        espalier.Search(space_of(variables), cost=cost * 1000, penalty=-0.0, **keywords),
    ]
    for _ in range(6):
        drawn = [search.ask() for search in searches]
        losses = some_losses(rng, keywords["samples"])
        for search, masks in zip(searches, drawn):
            assert torch.equal(masks, drawn[0])
            search.tell(masks, losses)
            assert torch.equal(search.theta, searches[0].theta)


@thorough
@given(st.integers(1, 6), seeds, penalties, st.integers(2, 5), st.booleans())
def test_two_options_of_a_choice_behave_as_one_bit(n, seed, penalty, samples, adaptive):
    """Same seed: same draws, same theta, same mode, through forty updates; the second option costs nothing."""
    rng = np.random.default_rng(seed)
    c = rng.uniform(0.5, 4.0, n)
    shared = {"penalty": penalty, "samples": samples, "adaptive": adaptive, "seed": seed % 1000}
    bits = espalier.Search(n, cost=torch.from_numpy(c), **shared)
    pairs = espalier.Space([espalier.Choice(f"c{i}", 2) for i in range(n)])
    both = torch.from_numpy(np.stack([c, np.zeros(n)], 1).reshape(-1))
    choices = espalier.Search(pairs, cost=both, **shared)
    for _ in range(40):
        masks, taken = bits.ask(), choices.ask()
        assert torch.equal(taken[..., 0::2], masks)
        assert torch.equal(taken[..., 1::2], 1 - masks)
        losses = some_losses(rng, samples)
        bits.tell(masks, losses)
        choices.tell(taken, losses)
        torch.testing.assert_close(choices.theta[0::2], bits.theta, rtol=0, atol=1e-11)
    clear = (bits.theta - 0.5).abs() > 1e-9
    assert torch.equal(choices.mode()[0::2][clear], bits.mode()[clear])
    assert choices.expected_cost().item() == pytest.approx(bits.expected_cost().item(), rel=1e-9)


@pytest.mark.parametrize("batch", [(1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["penalty", "target", "adaptive", "adaptive target"])
@pytest.mark.parametrize("variables", [[1] * 12, [1, 1, 3, 1, 4]], ids=str)
def test_batched_runs_equal_single_runs(variables, kind, batch):
    """Given the same masks and losses, each with its own penalty or target and learning rate (law 7)."""
    rng = np.random.default_rng(len(variables))
    cost, space = costs_for(variables, rng), space_of(variables)
    runs = math.prod(batch)
    rates = torch.from_numpy(rng.uniform(0.02, 0.2, batch))
    keywords = {"cost": cost, "samples": 3, "adaptive": "adaptive" in kind}
    if "target" in kind:
        name, each = "target", torch.from_numpy(rng.uniform(0.45, 0.9, batch))
        keywords["horizon"] = 60
    else:
        name, each = "penalty", torch.from_numpy(rng.uniform(-1, 1, batch))
    together = espalier.Search(space, **{name: each}, learning_rate=rates, batch=batch, **keywords)
    alone = [
        espalier.Search(space, **{name: each.flatten()[r].item()}, learning_rate=rates.flatten()[r].item(), **keywords)
        for r in range(runs)
    ]
    for _ in range(60):
        masks = together.ask()
        losses = some_losses(rng, (*batch, 3))
        together.tell(masks, losses)
        for r, search in enumerate(alone):
            search.tell(masks.reshape(runs, 3, -1)[r], losses.reshape(runs, 3)[r])
        single = torch.stack([search.theta for search in alone]).reshape(*batch, -1)
        torch.testing.assert_close(together.theta, single, rtol=0, atol=1e-10)
    for method in ("mode", "select", "usage", "expected_cost"):
        single = torch.stack([getattr(search, method)() for search in alone])
        found = getattr(together, method)()
        torch.testing.assert_close(found, single.reshape(found.shape), rtol=0, atol=1e-9)
    assert torch.equal(together.updates.flatten(), torch.stack([s.updates for s in alone]))
    torch.testing.assert_close(
        together.penalty.flatten(), torch.stack([s.penalty for s in alone]), atol=1e-8, rtol=1e-8
    )


@pytest.mark.parametrize(
    "keywords",
    [{"penalty": 0.3}, {"target": 0.3, "horizon": 12}, {"penalty": 0.3, "adaptive": True}],
    ids=["penalty", "target", "adaptive"],
)
@pytest.mark.parametrize("layered", [False, True], ids=["linear", "layers"])
def test_many_wide_runs_equal_single_ones(keywords, layered):
    """So many entries that a batch is worked through in parts: the parts must not show."""
    d, runs, rng = 3000, 80, np.random.default_rng(0)
    cost = torch.from_numpy(rng.uniform(1, 5, d))
    if layered:
        layers = [espalier.Form.run(0, 700), espalier.Form.run(700, 2900) + 1.0, espalier.Form.run(2500, 3000)]
        cost = espalier.Cost.product(layers[:2], d=d) + espalier.Cost.product(layers, d=d)
    together = espalier.Search(d, cost=cost, batch=(runs,), learning_rate=0.05, **keywords)
    watched = [0, 41, 79]
    alone = {r: espalier.Search(d, cost=cost, learning_rate=0.05, **keywords) for r in watched}
    for _ in range(12):
        masks = together.ask()
        losses = masks[..., ::7].sum(-1)
        together.tell(masks, losses)
        for r, search in alone.items():
            search.tell(masks[r], losses[r])
            torch.testing.assert_close(together.theta[r], search.theta, rtol=0, atol=1e-10)
    frequency = torch.stack([together.ask() for _ in range(5)]).double().mean((0, 2))  # of 10 masks a run
    error = (frequency - together.theta) / (together.theta * (1 - together.theta) / 10).sqrt()
    assert error.square().mean().item() == pytest.approx(1.0, abs=0.02)


def test_learn_is_tell_without_the_checks():
    told, learnt = (espalier.Search(9, penalty=0.2, batch=(3,)) for _ in range(2))
    for update in range(6):
        masks = told.ask()
        assert torch.equal(learnt.draw(learnt.noise()), masks)
        losses = masks.sum(-1)
        if update == 4:
            losses[1] = math.nan
        told.tell(masks, losses)
        assert learnt.learn(masks, losses).tolist() == [True, update != 4, True]
        assert torch.equal(told.theta, learnt.theta)
        assert torch.equal(told.diverged, learnt.diverged)


def test_float32_and_float64_losses_and_any_gradient_history():
    search, other = espalier.Search(6), espalier.Search(6)
    for _ in range(10):
        masks = search.ask()
        losses = (masks.sum(-1) / 8).requires_grad_()
        search.tell(masks, losses)
        other.tell(masks, losses.detach().double())
        assert torch.equal(search.theta, other.theta)
        assert not search.theta.requires_grad


def test_what_is_told_is_not_kept_or_changed():
    search = espalier.Search(6)
    masks, losses = search.ask(), torch.tensor([0.5, 0.25])
    copies = masks.clone(), losses.clone()
    search.tell(masks, losses)
    theta = search.theta.clone()
    assert torch.equal(masks, copies[0])
    assert torch.equal(losses, copies[1])
    masks.zero_()
    assert torch.equal(search.theta, theta)
