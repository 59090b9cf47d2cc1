"""What holds of every cost: additivity, scaling, batches, and the gradient as what opening a gate adds."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from espalier import Cost, Form, Space
from oracle.bridge import space_of

spaces = st.lists(st.sampled_from([1, 1, 1, 2, 3, 5]), min_size=1, max_size=6)
weights = st.one_of(st.integers(0, 9).map(float), st.floats(0, 1e3, allow_subnormal=False))


@st.composite
def forms(draw, d):
    pieces = ()
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, d - 1))
        stop = draw(st.integers(start + 1, d))
        if draw(st.booleans()):
            values = draw(weights)
        else:
            values = np.array(draw(st.lists(weights, min_size=stop - start, max_size=stop - start)))
        pieces += ((start, stop, values),)
    return Form(pieces, draw(weights))


@st.composite
def costs(draw, d):
    total = None
    for _ in range(draw(st.integers(1, 3))):
        factors = draw(st.lists(forms(d), min_size=1, max_size=4))
        term = Cost.product(factors, d=d, scale=draw(st.floats(0.01, 100)))
        total = term if total is None else total + term
    return total


@st.composite
def thetas(draw, space: Space, batch=()):
    """(*batch, d) float64 with choices that sum to 1; sometimes exactly a mask."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sharp = draw(st.booleans())
    theta = np.zeros((*batch, space.d))
    for _, where in space.bits:
        draws = rng.uniform(0, 1, (*batch, where.stop - where.start))
        theta[..., where] = draws.round() if sharp else draws
    for group, where in space.choices:
        draws = rng.dirichlet(np.ones(group.size), batch)
        theta[..., where] = np.eye(group.size)[draws.argmax(-1)] if sharp else draws
    return torch.from_numpy(theta)


@st.composite
def problems(draw, count=1, batch=()):
    space = space_of(draw(spaces))
    return space, [draw(costs(space.d)).over(space) for _ in range(count)], draw(thetas(space, batch))


def close(a, b, size=None):
    size = float(torch.as_tensor(b).abs().max()) if size is None else size
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11 * size + 1e-300)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problems(count=2), st.floats(0.01, 100))
def test_costs_add_and_scale(problem, factor):
    _, (one, two), theta = problem
    close((one + two)(theta), one(theta) + two(theta))
    close((one + two).gradient(theta), one.gradient(theta) + two.gradient(theta))
    close((factor * one)(theta), factor * one(theta))
    close((one * factor).gradient(theta), factor * one.gradient(theta))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([(0,), (1,), (4,), (2, 3)]).flatmap(lambda batch: problems(batch=batch)))
def test_a_batch_equals_a_loop(problem):
    space, (cost,), theta = problem
    flat = theta.reshape(-1, space.d)
    values, slopes = cost(theta), cost.gradient(theta)
    assert values.shape == theta.shape[:-1]
    assert slopes.shape == theta.shape
    for row, value, slope in zip(flat, values.reshape(-1), slopes.reshape(-1, space.d)):
        close(value, cost(row))
        close(slope, cost.gradient(row), float(cost(row)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_at_a_mask_the_gradient_is_what_opening_the_gate_adds(problem):
    space, (cost,), theta = problem
    mask = torch.zeros_like(theta)
    for _, where in space.bits:
        mask[where] = (theta[where] >= 0.5).to(mask.dtype)
    for _, where in space.choices:
        mask[where.start + int(theta[where].argmax())] = 1
    slopes = cost.gradient(mask)
    for _, where in space.bits:
        for i in range(where.start, where.stop):
            opened, closed = mask.clone(), mask.clone()
            opened[i], closed[i] = 1, 0
            close(slopes[i], cost(opened) - cost(closed), float(cost(opened)))
    for _, where in space.choices:
        others = mask.clone()
        others[where] = 0
        for i in range(where.start, where.stop):
            taken = others.clone()
            taken[i] = 1
            close(slopes[i], cost(taken) - cost(others), float(cost(taken)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_the_gradient_is_the_derivative_autograd_finds(problem):
    _, (cost,), theta = problem
    leaf = theta.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(cost(leaf), leaf, allow_unused=True)
    close(cost.gradient(theta), torch.zeros_like(theta) if slopes is None else slopes, float(cost(theta)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems())
def test_it_is_linear_in_each_variable(problem):
    """The expectation is affine along any one bit, which is what makes E[cost(M)] = cost(theta)."""
    space, (cost,), theta = problem
    for _, where in space.bits:
        for i in range(where.start, where.stop):
            ends = [theta.clone() for _ in range(3)]
            ends[0][i], ends[1][i], ends[2][i] = 0.0, 1.0, 0.3
            low, high, between = (cost(end) for end in ends)
            close(between, 0.7 * low + 0.3 * high, float(high))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_whatever_the_dtype_the_cost_is_float64(dtype):
    cost = Cost.linear([1.0] * 3000)
    mask = torch.ones(3000, dtype=dtype)
    assert cost(mask).item() == 3000.0
    assert cost(mask).dtype == cost.gradient(mask).dtype == torch.float64


def test_many_uneven_groups_need_no_square_matrix():
    """A million entries in uneven layers: value and gradient by segment sums, well below a gigabyte."""
    widths = [100_000 + 1000 * i for i in range(9)]
    ends = np.cumsum([0, *widths]).tolist()
    d = ends[-1]
    layers = [Form.run(a, b) for a, b in itertools.pairwise(ends)]
    cost = Cost.product(layers[:2], d=d)
    for pair in itertools.pairwise(layers[1:]):
        cost = cost + Cost.product(pair, d=d)
    theta = torch.full((d,), 0.5, dtype=torch.float64)
    assert cost(theta).item() == pytest.approx(sum(a * b / 4 for a, b in itertools.pairwise(widths)), rel=1e-12)
    slopes = cost.gradient(theta)
    assert slopes[0].item() == pytest.approx(widths[1] / 2)
    assert slopes[ends[1]].item() == pytest.approx((widths[0] + widths[2]) / 2)
