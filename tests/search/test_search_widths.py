"""Targets and penalties on functions of widths, as a measured latency is one: staircases included."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import espalier
from espalier import Bits, Choice, Cost, Form, Space
from oracle.structures import all_masks

seeds = st.integers(0, 2**32 - 1)


def tiles(width, size=8):
    """What hardware that works in tiles takes."""
    return float(-(-width // size))


def staircase(size, rng):
    return np.cumsum(rng.integers(0, 2, size + 1) * rng.integers(1, 5, size + 1)) + rng.integers(0, 2)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), seeds, st.floats(0.01, 1.0), st.booleans())
def test_a_selection_never_ends_above_its_target(sizes, seed, target, choice):
    rng = np.random.default_rng(seed)
    groups = [Bits(f"g{i}", size, int(rng.integers(0, size + 1))) for i, size in enumerate(sizes)]
    space = Space([*groups, Choice("c", 3)] if choice else groups)
    cost = Cost.of_widths(space, {group.name: staircase(group.size, rng) for group in groups}) + Cost.linear(
        rng.integers(1, 4, space.d).astype(float)
    )
    masks = all_masks([*[1] * sum(sizes), *[3] * choice])
    masks = torch.tensor(
        np.stack([m for m in masks if all(m[w].sum() >= g.least for g, w in space.bits)]), dtype=torch.float64
    )
    costs = cost(masks)
    theta = torch.from_numpy(rng.uniform(0.02, 0.98, space.d))
    for _, where in space.choices:
        theta[where] /= theta[where].sum()
    keywords = {"cost": cost, "target": target, "horizon": 50, "initial": theta, "margin": 1e-3}
    if target < costs.min() / costs.max() - 1e-9:
        with pytest.raises(espalier.Unreachable):
            espalier.Search(space, **keywords)
        return
    if target < costs.min() / costs.max() + 1e-9:
        return
    search = espalier.Search(space, **keywords)
    assert search.full_cost == costs.max()
    chosen = search.select().double()
    assert cost(chosen) <= target * costs.max()
    for group, where in space.bits:
        assert chosen[where].sum() >= group.least
        for i in range(where.start, where.stop):
            if chosen[i] == 0:
                wider = chosen.clone()
                wider[i] = 1
                assert cost(wider) > target * costs.max() - 1e-9, f"gate {i} still fits"


def test_a_step_that_is_paid_for_is_filled():
    """One tile of eight is within the target, two are not: the eight likeliest gates ship."""
    theta = torch.linspace(0.1, 0.9, 24)
    cost = Cost.of_widths(Space.of(24), {"bits": tiles})
    search = espalier.Search(24, cost=cost, target=0.4, horizon=5, initial=theta, margin=0.01)
    assert search.select().tolist() == [0] * 16 + [1] * 8


@pytest.mark.parametrize("even", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_expected_cost_is_led_to_its_target(adaptive, even):
    """Through staircases with long steps; the useful gates are kept, and no layer collapses on the way."""
    space = Space([Bits("a", 64, least=1), Bits("b", 32, least=1)])
    cost = Cost.of_widths(space, {"a": tiles, "b": lambda width: tiles(width, 16) + 1})
    rng = np.random.default_rng(0)
    useful = torch.from_numpy((rng.permutation(96) < 40).astype(np.float32))
    search = espalier.Search(
        space, cost=cost, target=[0.3, 0.5], horizon=800, initial=0.9, adaptive=adaptive, even=even, batch=(2,), seed=1
    )
    narrowest = 96
    for _ in range(800):
        masks = search.ask()
        narrowest = min(narrowest, int(search.theta[..., :64].sum(-1).min()))
        search.tell(masks, -(masks * (useful + 0.01)).sum(-1))
    assert torch.isfinite(search.theta).all()
    share = search.expected_cost() / search.full_cost
    assert share.tolist() == pytest.approx([0.3, 0.5], abs=0.06)
    assert narrowest >= 4  # eps never ran away where the staircase is flat
    assert bool((search.usage() <= torch.tensor([0.3, 0.5])).all())
    kept = search.select()
    assert ((kept * useful).sum(-1) / kept.sum(-1).clamp(max=40)).min() > 0.7  # by chance 0.42


@pytest.mark.parametrize("control", [{"penalty": 0.2}, {"target": 0.4, "horizon": 200}], ids=["penalty", "target"])
def test_linear_functions_give_the_run_of_the_multilinear_cost(control):
    space = Space([Bits("a", 20), Bits("b", 30)])
    by_forms = Cost.product([Form.run(0, 20) + 1.0, Form.run(20, 50, 2.0)], d=50)
    by_widths = Cost.of_widths(space, {"a": lambda width: width + 1, "b": lambda width: 2 * width})
    runs = []
    for cost in (by_forms, by_widths):
        search = espalier.Search(space, cost=cost, seed=3, **control)
        for _ in range(200):
            masks = search.ask()
            search.tell(masks, -masks[:, :10].sum(-1))
        runs.append(search)
    assert torch.allclose(runs[0].theta, runs[1].theta, rtol=1e-9)
    assert torch.equal(runs[0].select(), runs[1].select())
    assert runs[0].penalty.item() == pytest.approx(runs[1].penalty.item(), rel=1e-9)


def test_a_penalty_counts_in_units_of_the_mean_step():
    """The last gate of a staircase costs nothing; the scale is that of the straight line between its ends."""
    cost = Cost.of_widths(Space.of(24), {"bits": lambda width: tiles(width + 7)})
    assert cost.gradient(torch.ones(24)).tolist() == [0.0] * 24
    search = espalier.Search(24, cost=cost, penalty=0.5)
    for _ in range(2000):
        masks = search.ask()
        search.tell(masks, torch.zeros(2))
    assert search.select().sum() == 0


def test_a_constant_function_controls_nothing():
    with pytest.raises(espalier.BadInput, match="no gate changes this cost"):
        espalier.Search(4, cost=Cost.of_widths(Space.of(4), {"bits": [2.0] * 5}), penalty=0.1)
