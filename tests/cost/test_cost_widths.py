"""Functions of widths: exact against sums over every mask, linear ones equal to forms, others refused by name."""

import itertools

import numpy as np
import pytest
import torch

from espalier import BadInput, Bits, Choice, Cost, Form, Space
from espalier.cost import widths
from oracle.structures import all_masks


def layers(*sizes):
    return Space([Bits(f"layer {i}", size) for i, size in enumerate(sizes)])


def staircase(size, rng):
    """A function that stays, or jumps: what tiles cost."""
    return np.cumsum(rng.integers(0, 2, size + 1) * rng.exponential(1.0, size + 1)) + rng.integers(0, 2)


def random_cost(space, rng):
    """A product over all layers, each layer alone, and one function of the joint width."""
    names = list(space.slices)
    product = Cost.of_widths(space, {n: staircase(space.slices[n].stop - space.slices[n].start, rng) for n in names})
    alone = [Cost.of_widths(space, {g.name: staircase(g.size, rng)}) for g in space.groups]
    joint = Cost.of_widths(space, {tuple(names): staircase(space.d, rng)}, scale=0.5)
    return sum(alone, product) + 2 * joint


def by_hand(cost, mask):
    """The cost of one mask, straight from the tables."""
    total = 0.0
    for scale, factors in cost.width_terms:
        for factor in factors:
            scale *= factor.table[int(sum(mask[a:b].sum() for a, b in factor.runs))]
        total += scale
    return total


def expected(values, masks, theta):
    """values: the cost of each mask."""
    chances = np.prod(np.where(masks == 1, theta, 1 - theta), axis=-1)
    return float(chances @ values)


@pytest.mark.parametrize("block", [1, 2, 3, 16])  # how many bits are multiplied one by one: trees of every depth
@pytest.mark.parametrize("sizes", [(1,), (5,), (12,), (3, 4), (2, 3, 4), (1, 1, 10), (7, 2, 3)], ids=str)
def test_expectation_and_gradient_equal_enumerated_ones(sizes, block, monkeypatch):
    monkeypatch.setattr(widths, "BLOCK", block)
    rng = np.random.default_rng([*sizes, block])
    space = layers(*sizes)
    cost = random_cost(space, rng)
    masks = np.stack(all_masks([1] * space.d))
    values = np.array([by_hand(cost, mask) for mask in masks])
    for theta in (rng.uniform(0, 1, space.d), rng.uniform(0, 1, space.d).round()):
        at = torch.from_numpy(theta)
        value = expected(values, masks, theta)
        assert cost(at).item() == pytest.approx(value, rel=1e-12)
        slopes = cost.gradient(at).tolist()
        for i in range(space.d):
            one, zero = theta.copy(), theta.copy()
            one[i], zero[i] = 1, 0
            difference = expected(values, masks, one) - expected(values, masks, zero)
            assert slopes[i] == pytest.approx(difference, rel=1e-11, abs=1e-12 * value)


def test_at_a_mask_it_is_the_function_to_the_last_digit():
    rng = np.random.default_rng(0)
    space = layers(70, 33)
    cost = Cost.of_widths(space, {"layer 0": staircase(70, rng)}) + Cost.of_widths(
        space, {"layer 1": staircase(33, rng)}
    )
    masks = (torch.rand(50, space.d) < torch.rand(50, 1)).float()
    assert cost(masks).tolist() == [by_hand(cost, mask) for mask in masks.numpy()]
    closed = masks.clone()
    closed[:, 5] = 0
    opened = masks.clone()
    opened[:, 5] = 1
    assert cost.gradient(closed)[:, 5].tolist() == pytest.approx((cost(opened) - cost(closed)).tolist(), rel=1e-14)


@pytest.mark.parametrize("sizes", [(9, 20), (100, 17, 64), (520, 300)], ids=str)
def test_where_the_function_is_linear_it_is_the_multilinear_cost(sizes):
    space = layers(*sizes)
    ends = np.cumsum([0, *sizes]).tolist()
    forms = [Form.run(a, b, 0.5) + 3.0 for a, b in itertools.pairwise(ends)]
    by_forms = Cost.product(forms, d=space.d, scale=2.0).over(space)
    by_widths = Cost.of_widths(space, {name: lambda width: 3.0 + 0.5 * width for name in space.slices}, scale=2.0)
    theta = torch.from_numpy(np.random.default_rng(1).uniform(0, 1, (2, 3, space.d)))
    assert torch.allclose(by_widths(theta), by_forms(theta), rtol=1e-13)
    assert torch.allclose(by_widths.gradient(theta), by_forms.gradient(theta), rtol=1e-12)
    assert torch.allclose(by_widths.chord().gradient(theta), by_forms.gradient(theta), rtol=1e-13)


def test_the_gradient_is_the_slope_of_the_expectation():
    """By differences, at widths no enumeration reaches; the expectation is multilinear, so the step may be long."""
    rng = np.random.default_rng(2)
    space = layers(130, 45)
    cost = random_cost(space, rng)
    theta = torch.from_numpy(rng.uniform(0.05, 0.95, space.d))
    slopes = cost.gradient(theta)
    for i in (0, 1, 17, 64, 129, 130, 174):
        step = torch.zeros_like(theta)
        step[i] = 0.04
        assert ((cost(theta + step) - cost(theta - step)) / 0.08).item() == pytest.approx(slopes[i].item(), rel=1e-10)


def test_a_small_slope_keeps_its_digits():
    """One step at full width, all gates unlikely: the chance that all others are open, far below the function."""
    space = layers(40)
    cost = Cost.of_widths(space, {"layer 0": [1e6] * 40 + [1e6 + 1]})
    theta = torch.full((40,), 0.01, dtype=torch.float64)
    assert cost.gradient(theta).tolist() == pytest.approx([1e-78] * 40, rel=1e-12)


def test_batches_of_runs_and_both_kinds_of_terms(monkeypatch):
    rng = np.random.default_rng(3)
    space = Space([Bits("a", 37), Choice("c", 3), Bits("b", 70)])
    cost = Cost.of_widths(space, {"a": staircase(37, rng), "b": staircase(70, rng)}) + 0.3 * Cost.linear(np.ones(110))
    theta = torch.from_numpy(rng.uniform(0, 1, (2, 3, 110)))
    one = [[cost(row) for row in rows] for rows in theta]
    assert torch.allclose(cost(theta), torch.stack([torch.stack(rows) for rows in one]), rtol=1e-14)
    gradient = cost.gradient(theta)
    assert torch.allclose(gradient[1, 2], cost.gradient(theta[1, 2]), rtol=1e-13)
    assert torch.equal(gradient[..., 37:40], torch.full((2, 3, 3), 0.3, dtype=torch.float64))
    monkeypatch.setattr(widths, "WINDOWS", 100)  # in many parts: the same
    assert torch.allclose(cost.gradient(theta), gradient, rtol=1e-14)


def test_it_compiles_whole():
    space = layers(40, 20)
    cost = random_cost(space, np.random.default_rng(4))
    theta = torch.rand(3, 60, dtype=torch.float64)
    cost(theta)  # laid out
    compiled = torch.compile(lambda x: (cost(x), cost.gradient(x)), fullgraph=True, backend="eager")
    for a, b in zip(compiled(theta), (cost(theta), cost.gradient(theta))):
        assert torch.allclose(a, b, rtol=1e-13)


SPACE = Space([Bits("a", 3), Bits("b", 2), Choice("c", 3)])


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"a": [0, 1, 2]}, ["'a'", "0 to 3"]),
        ({"a": [0, 2, 1, 3]}, ["'a'", "falls from 2 at width 1 to 1 at 2"]),
        ({"a": lambda width: -width}, ["'a'", "not negative", "-1.0"]),
        ({"a": [0, 1, 2, float("nan")]}, ["'a'", "finite", "nan"]),
        ({"a": "abcd"}, ["'a'", "function of an integer"]),
        ({"z": [0, 1]}, ["'z'", "'a'", "'b'"]),
        ({"c": [0, 1, 1, 1]}, ["'c'", "choice"]),
        ({"a": [0, 1, 2, 3], ("a", "b"): [0, 1, 2, 3, 4, 5]}, ["'a'", "share gates"]),
        ({("a", "a"): [0] * 7}, ["'a'", "twice"]),
        ({}, ["dict"]),
        (None, ["dict"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[:30],
)
def test_refused_by_name(functions, words):
    with pytest.raises(BadInput) as caught:
        Cost.of_widths(SPACE, functions)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="positive"):
        Cost.of_widths(SPACE, {"a": [0, 1, 2, 3]}, scale=0.0)
