"""What ships: within the target, with nothing more to add, never emptier than `least`; and the ends of the range."""

import itertools
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import espalier
from espalier import Bits, Choice, Cost, Form, Space
from oracle.bridge import random_terms
from oracle.costs import cost_of

seeds = st.integers(0, 2**32 - 1)


@st.composite
def spaces(draw, most=9):
    """Groups of bits, some of which may not be emptied, and choices, of at most `most` entries."""
    groups, left = [], most
    for i in range(draw(st.integers(1, 3))):
        if left >= 2 and draw(st.integers(0, 2)) == 0:
            size = draw(st.integers(2, min(left, 4)))
            groups.append(Choice(f"g{i}", size))
        elif left >= 1:
            size = draw(st.integers(1, min(left, 5)))
            groups.append(Bits(f"g{i}", size, draw(st.integers(0, size))))
        else:
            break
        left -= size
    return Space(groups)


def permitted(space):
    """Every mask that may ship: one option per choice, `least` gates per group."""
    parts = []
    for group in space.groups:
        rows = list(itertools.product([0.0, 1.0], repeat=group.size))
        if isinstance(group, Choice):
            parts.append([row for row in rows if sum(row) == 1])
        else:
            parts.append([row for row in rows if sum(row) >= group.least])
    return np.array([list(itertools.chain(*rows)) for rows in itertools.product(*parts)])


def random_cost(space, rng, kind):
    """Terms as in the oracle: a linear cost, layers whose widths multiply, or forms that share any entry."""
    if kind == "linear":
        return [(1.0, [(rng.integers(1, 9, space.d).astype(float).tolist(), 0.0)])]
    if kind == "any":
        return random_terms(space.d, rng, (1, 2))
    indicator = []
    for where in space.slices.values():
        row = np.zeros(space.d)
        row[where] = rng.uniform(1, 3)
        indicator.append((row.tolist(), float(rng.integers(0, 2))))
    whole = ([1.0] * space.d, 0.0)
    return [(1.0, list(pair)) for pair in itertools.pairwise([*indicator, whole])]


def cost_from(space, terms):
    total = None
    for scale, forms in terms:
        term = Cost.product([Form.of(w, c) for w, c in forms], d=space.d, scale=scale)
        total = term if total is None else total + term
    return total.over(space)


def random_start(space, rng):
    theta = np.zeros(space.d)
    for group, where in space.bits:
        theta[where] = rng.uniform(0.02, 0.98, group.size)
    for group, where in space.choices:
        theta[where] = rng.dirichlet(np.ones(group.size)) * 0.9 + 0.1 / group.size
    return torch.from_numpy(theta)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(spaces(), seeds, st.sampled_from(["linear", "layers", "any"]), st.floats(0.001, 1.0))
def test_a_selection_meets_its_target_or_the_target_is_unreachable(space, seed, kind, target):
    if kind == "any":  # which `least` gates are cheapest is a hard problem where they multiply each other
        space = Space([Bits(g.name, g.size) if isinstance(g, Bits) else g for g in space.groups])
    rng = np.random.default_rng(seed)
    terms = random_cost(space, rng, kind)
    costs = np.array([cost_of(terms, mask) for mask in permitted(space)])
    full, smallest = costs.max(), costs.min()
    if full - smallest < 1e-6 * full:
        return  # nothing to choose between
    cost, theta = cost_from(space, terms), random_start(space, rng)
    keywords = {"cost": cost, "target": target, "horizon": 100, "initial": theta, "margin": 1e-3}
    share = smallest / full
    if target < share - 1e-9:
        with pytest.raises(espalier.Unreachable) as caught:
            espalier.Search(space, **keywords)
        assert f"{target:.4g}"[:4] in str(caught.value)
        assert f"{share:.6g}"[:5] in str(caught.value)
        return
    if target < share + 1e-9:
        return  # equal but for rounding: either answer will do
    search = espalier.Search(space, **keywords)
    assert search.full_cost.item() == pytest.approx(full, rel=1e-12)
    chosen, budget = search.select(), target * full
    space.check_mask(chosen)
    shipped = cost_of(terms, chosen.tolist())
    assert shipped <= budget * (1 + 1e-12)
    assert search.usage().item() == pytest.approx(shipped / full, rel=1e-12)
    for group, where in space.bits:
        assert chosen[where].sum() >= group.least
        for i in range(where.start, where.stop):
            if chosen[i] == 0:
                wider = chosen.clone()
                wider[i] = 1
                assert cost_of(terms, wider.tolist()) > budget - 1e-9 * full, f"gate {i} still fits"
    mode = cost_of(terms, search.mode().tolist())
    assert search.gap().item() == pytest.approx(mode / full - target, abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spaces(), seeds, st.floats(0.001, 1.0))
def test_any_cost_with_least(space, seed, target):
    """Where the smallest structure is only estimated, the estimate errs to the safe side."""
    rng = np.random.default_rng(seed)
    terms = random_cost(space, rng, "any")
    costs = np.array([cost_of(terms, mask) for mask in permitted(space)])
    cost = cost_from(space, terms)
    if costs.max() - costs.min() < 1e-6 * costs.max():
        return
    search, refusal = None, None
    try:
        search = espalier.Search(space, cost=cost, target=target, horizon=9, initial=random_start(space, rng))
    except espalier.Unreachable as error:
        refusal = str(error)
    if search is None:  # the share it names is that of a structure that may ship, and above the target
        share = float(re.search(r"reachable share ([0-9.e+-]+);", refusal).group(1))
        assert target <= share * (1 + 1e-5)
        assert np.isclose(costs / costs.max(), share, rtol=1e-5).any()
        return
    chosen = search.select()
    assert target >= costs.min() / costs.max() * (1 - 1e-12)
    assert cost_of(terms, chosen.tolist()) <= target * costs.max() * (1 + 1e-12)
    for group, where in space.bits:
        assert chosen[where].sum() >= group.least


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 60), seeds, st.floats(0.001, 1.0))
def test_with_equal_costs_the_likeliest_gates_ship(d, seed, target):
    theta = torch.from_numpy(np.random.default_rng(seed).permutation(d) / d * 0.9 + 0.05)
    search = espalier.Search(d, target=target, horizon=10, initial=theta, margin=0.01)
    kept = int(np.floor(target * d))
    expected = torch.zeros(d)
    expected[theta.argsort(descending=True)[:kept]] = 1
    assert torch.equal(search.select(), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 40), seeds, st.floats(0.05, 0.95))
def test_no_gate_is_passed_over_for_a_dearer_and_less_likely_one(d, seed, target):
    rng = np.random.default_rng(seed)
    theta, c = rng.uniform(0.05, 0.95, d), rng.exponential(1.0, d) + 0.01
    search = espalier.Search(
        d, cost=torch.from_numpy(c), target=target, horizon=10, initial=torch.from_numpy(theta), margin=0.01
    )
    chosen = search.select().numpy()
    for i in np.flatnonzero(chosen == 0):
        for j in np.flatnonzero(chosen == 1):
            assert not (theta[i] > theta[j] and c[i] <= c[j])


def test_a_gate_that_fills_the_target_exactly_is_taken():
    """Of 16, half is 8: 5 fits, 4 does not any more, and 3 fills it to the brim."""
    theta = torch.tensor([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    cost = [5.0, 4.0, 3.0, 1.0, 2.0, 1.0]
    search = espalier.Search(6, cost=cost, target=0.5, horizon=5, initial=theta, margin=0.01)
    assert search.select().tolist() == [1, 0, 1, 0, 0, 0]
    assert search.usage().item() == 0.5


def test_a_selection_for_each_run_of_a_batch():
    rng = np.random.default_rng(0)
    space = Space([Bits("a", 6, least=1), Choice("b", 3), Bits("c", 5)])
    cost = torch.from_numpy(rng.integers(1, 9, 14).astype(float))
    theta = torch.stack([random_start(space, rng) for _ in range(40)])
    targets = torch.from_numpy(rng.uniform(0.2, 1.0, 40))
    shared = {"cost": cost, "horizon": 10, "margin": 1e-3}
    together = espalier.Search(space, target=targets, initial=theta, batch=(40,), **shared)
    alone = [espalier.Search(space, target=t.item(), initial=row, **shared) for t, row in zip(targets, theta)]
    assert torch.equal(together.select(), torch.stack([search.select() for search in alone]))
    assert bool((together.usage() <= targets * (1 + 1e-12)).all())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(spaces(), seeds, st.sampled_from(["linear", "layers"]), st.floats(0.0, 1.0))
def test_nothing_likelier_fits_in_the_place_of_what_ships(space, seed, kind, tight):
    """Of a choice no likelier option; of a group with no more open gates than it must have, no likelier gate."""
    rng = np.random.default_rng(seed)
    terms, theta = random_cost(space, rng, kind), random_start(space, rng)
    costs = np.array([cost_of(terms, mask) for mask in permitted(space)])
    full, smallest = costs.max(), costs.min()
    if full - smallest < 1e-6 * full:
        return
    target = (smallest + tight**3 * (full - smallest)) / full * (1 + 1e-9)  # most of them near the smallest
    target = min(max(target, 1e-6), 1.0)
    search = espalier.Search(space, cost=cost_from(space, terms), target=target, horizon=9, initial=theta, margin=1e-3)
    chosen, theta = search.select().numpy(), search.theta.numpy()
    for group, where in (*space.choices, *space.bits):
        owned = range(where.start, where.stop)
        if isinstance(group, Bits) and chosen[where].sum() > group.least:
            continue
        for i, j in itertools.product(owned, owned):
            if chosen[i] and not chosen[j] and theta[j] > theta[i] * (1 + 1e-9):
                other = chosen.copy()
                other[i], other[j] = 0, 1
                assert cost_of(terms, other.tolist()) > target * full * (1 - 1e-9), (i, j)


# A space, what each entry costs, the budget, theta, and what is to ship, found by hand.
TIGHT = {
    "another group keeps its likeliest gate": (
        Space([Bits("a", 2, least=1), Bits("b", 3, least=1)]),
        [10.0, 1, 5, 5, 5], 8.0, [0.9, 0.1, 0.02, 0.5, 0.98], [0, 1, 0, 0, 1],
    ),
    "the likeliest of those that fit": (
        Space([Bits("a", 4, least=1)]), [10.0, 1, 1.5, 1.5], 2.0, [0.9, 0.02, 0.8, 0.5], [0, 0, 1, 0],
    ),
    "a choice keeps its likeliest option": (
        Space([Bits("a", 2, least=1), Choice("c", 2)]), [10.0, 1, 2, 1], 5.0, [0.9, 0.1, 0.99, 0.01], [0, 1, 1, 0],
    ),
    "a choice is not moved beside one that is": (
        Space([Choice("a", 2), Choice("b", 2)]), [0.1, 0, 5, 0], 0.153, [0.55, 0.45, 0.6, 0.4], [1, 0, 0, 1],
    ),
    "two of three": (
        Space([Bits("a", 5, least=2)]), [4.0, 3, 2, 1, 1], 5.0, [0.9, 0.8, 0.7, 0.6, 0.1], [1, 0, 0, 1, 0],
    ),
    "blocks of 8, 8 and 4": (  # of 64 inputs, 10 outputs and two layers of 20, in weights but for the product
        Space([Bits("a", 3, least=1), Bits("b", 3, least=1)]),
        [512.0, 512, 256, 80, 80, 40], 350.0, [0.97, 0.1, 0.05, 0.02, 0.97, 0.05], [0, 0, 1, 0, 1, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(TIGHT))
def test_a_tight_budget_costs_no_more_likelihood_than_it_must(case):
    space, cost, budget, theta, expected = TIGHT[case]
    full = espalier.Search(space, cost=cost).full_cost.item()
    given = {"cost": cost, "horizon": 9, "margin": 1e-3}
    search = espalier.Search(space, target=budget / full, initial=torch.tensor(theta), **given)
    assert search.select().tolist() == expected
    other = torch.tensor(theta).flip(0) if space.is_bits else torch.tensor(theta)  # and beside another run
    both = torch.stack([other, torch.tensor(theta)])
    targets = torch.tensor([1.0, budget / full], dtype=torch.float64)
    search = espalier.Search(space, target=targets, initial=both, batch=(2,), **given)
    assert search.select()[1].tolist() == expected


def test_a_gate_that_fills_the_target_but_for_rounding_is_taken():
    """Of 0.9, 0.5 and 0.1, two thirds is 1.0: what is left of it beside 0.9 is a last digit less than 0.1."""
    theta = torch.tensor([0.9, 0.8, 0.7])
    search = espalier.Search(3, cost=[0.9, 0.5, 0.1], target=1 / 1.5, horizon=9, initial=theta, margin=0.01)
    assert search.select().tolist() == [1, 0, 1]


def test_at_full_target_everything_and_the_likeliest_options():
    space = Space([Bits("a", 4), Choice("b", 3)])
    theta = torch.tensor([0.1, 0.9, 0.2, 0.4, 0.2, 0.5, 0.3])
    search = espalier.Search(space, cost=torch.ones(7), target=1.0, horizon=5, initial=theta, margin=0.01)
    assert search.select().tolist() == [1, 1, 1, 1, 0, 1, 0]


def test_without_a_target_the_mode_ships_with_least_respected():
    space = Space([Bits("a", 4, least=2), Bits("b", 2), Choice("c", 3)])
    theta = torch.tensor([0.1, 0.4, 0.3, 0.2, 0.5, 0.49, 0.3, 0.3, 0.4])
    search = espalier.Search(space, initial=theta, margin=0.01)
    assert search.mode().tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert search.select().tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert search.usage().item() == pytest.approx(3 / 6)


def test_the_full_cost_where_choices_multiply():
    """10 x0 y0 + 8 x1 y1 + 3 x1 y0: no option can be ranked alone."""
    space = Space([Choice("x", 2), Choice("y", 2)])

    def one(i):
        return Form.run(i, i + 1)

    cost = (
        Cost.product([one(0), one(2)], d=4, scale=10.0)
        + Cost.product([one(1), one(3)], d=4, scale=8.0)
        + Cost.product([one(1), one(2)], d=4, scale=3.0)
    )
    search = espalier.Search(space, cost=cost, initial=torch.tensor([0.9, 0.1, 0.8, 0.2]), margin=0.01)
    assert search.full_cost.item() == pytest.approx(10.0)
    assert search.usage().item() == pytest.approx(1.0)


def test_settle_repeats_the_selection_and_learns_nothing():
    search = espalier.Search(10, target=0.35, horizon=50, batch=(4,))
    for _ in range(20):
        masks = search.ask()
        search.tell(masks, masks[..., 3:].sum(-1))
    chosen, theta = search.select(), search.theta.clone()
    search.settle()
    for _ in range(3):
        masks = search.ask()
        assert masks.shape == (4, 2, 10)
        assert torch.equal(masks, chosen.unsqueeze(1).expand(4, 2, 10))
        search.tell(masks, torch.rand(4, 2))
        assert torch.equal(search.theta, theta)
        assert torch.equal(search.select(), chosen)
    assert search.usage().tolist() == pytest.approx([0.3] * 4)
    search.settle()
    assert torch.equal(search.select(), chosen)


def test_what_is_returned_is_the_callers_own():
    search = espalier.Search(6, target=0.5, horizon=10)
    search.settle()
    chosen = search.select()
    search.select().zero_()
    search.ask().zero_()
    search.mode().zero_()
    assert torch.equal(search.select(), chosen)
    assert chosen.sum() == 3
