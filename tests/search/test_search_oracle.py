"""The search against the oracle: the same masks and losses, hundreds of updates, theta equal to 1e-12 after each."""

import itertools
import math

import numpy as np
import pytest
import torch

import espalier
from oracle.asng import Adaptive
from oracle.bridge import cost_over, random_terms, random_theta, space_of
from oracle.costs import full_cost, linear
from oracle.method import Method, PaperMethod
from oracle.structures import dimension, mode, sample


def some_losses(rng, samples):
    """Mostly distinct, often tied, sometimes lost; one in forty updates loses everything."""
    losses = rng.normal(size=samples)
    if rng.random() < 0.4:
        losses = losses.round()
    lost = rng.random(samples) < rng.choice([0.0, 0.0, 0.3])
    losses[lost] = rng.choice([math.nan, math.inf, -math.inf], lost.sum())
    if rng.random() < 1 / 40:
        losses[:] = math.nan
    return losses


def follow(search, method, variables, samples, updates, rng, tolerance=1e-12):
    """Tell both the same and compare theta after every update."""
    assert search.theta.dtype == torch.float64
    for update in range(updates):
        masks = [sample(variables, method.theta, rng.random(len(variables))) for _ in range(samples)]
        losses = some_losses(rng, samples)
        method.update(masks, losses)
        told = torch.from_numpy(np.stack(masks)).float(), torch.from_numpy(losses)
        if np.isfinite(losses).any():
            search.tell(*told)
        else:
            with pytest.raises(espalier.Diverged):
                search.tell(*told)
        np.testing.assert_allclose(
            search.theta.numpy(), method.theta, rtol=0, atol=tolerance, err_msg=f"after update {update}"
        )
    assert bool(search.diverged) == method.diverged
    np.testing.assert_array_equal(search.mode().numpy(), mode(variables, method.theta))


COSTS = {
    "ones": lambda d: np.ones(d),
    "layers": lambda d: np.repeat([3.0, 50.0, 0.5], [d // 3, d // 3, d - 2 * (d // 3)]),
    "each": lambda d: np.random.default_rng(d).exponential(10.0, d),
    "one heavy": lambda d: np.where(np.arange(d) == d // 2, 1e6, 1.0),
    "some free": lambda d: (np.arange(d) % 3 == 0) * 7.0,
}
CASES = list(itertools.product([1, 2, 3, 10, 40], [2, 3, 4, 5, 9], [0.0, 2**-6, 1.0, -(2**-3), 12.0], COSTS))


@pytest.mark.parametrize(("d", "samples", "penalty", "cost"), CASES[::11] + CASES[-1:])
def test_bits_with_linear_cost_follow_the_paper(d, samples, penalty, cost):
    rng = np.random.default_rng([d, samples])
    c = COSTS[cost](d)
    method = PaperMethod(c, penalty=penalty)
    search = espalier.Search(d, cost=torch.from_numpy(c), penalty=penalty, samples=samples)
    follow(search, method, [1] * d, samples, 200, rng)


@pytest.mark.long
def test_bits_with_linear_cost_follow_the_paper_in_every_case():
    for d, samples, penalty, cost in CASES:
        test_bits_with_linear_cost_follow_the_paper(d, samples, penalty, cost)


def test_at_the_size_of_the_papers_first_study():
    """d = 2352, lambda = 2, eta = 1/d, eps' = 2^-7."""
    method = PaperMethod(np.ones(2352), penalty=2**-7)
    search = espalier.Search(2352, penalty=2**-7)
    follow(search, method, [1] * 2352, 2, 60, np.random.default_rng(0))


@pytest.mark.parametrize("learning_rate", [1e-4, 0.3, 5.0])
@pytest.mark.parametrize("margin", [1e-6, 0.01, 0.4])
def test_learning_rate_and_margin_as_given(learning_rate, margin):
    method = PaperMethod([1, 2, 3, 4], penalty=0.5, learning_rate=learning_rate, margin=margin)
    search = espalier.Search(
        4, cost=torch.tensor([1.0, 2, 3, 4]), penalty=0.5, learning_rate=learning_rate, margin=margin
    )
    follow(search, method, [1] * 4, 2, 200, np.random.default_rng(1))


SPACES = [[2], [3], [5], [1, 3], [2, 2, 2], [1, 1, 4, 1], [3, 1, 2]]


@pytest.mark.parametrize("penalty", [0.0, 0.5, -0.25])
@pytest.mark.parametrize("variables", SPACES, ids=str)
def test_choices_and_mixed_spaces_with_linear_cost(variables, penalty):
    rng = np.random.default_rng([*variables, 7])
    c = rng.uniform(0.5, 9.0, dimension(variables))
    samples = int(rng.integers(2, 6))
    method = Method(variables, terms=linear(c), penalty=penalty)
    search = espalier.Search(space_of(variables), cost=torch.from_numpy(c), penalty=penalty, samples=samples)
    follow(search, method, variables, samples, 120, rng)


@pytest.mark.parametrize("margin", [1e-3, 0.1, 0.45])
def test_a_margin_for_choices(margin):
    """Of K options each keeps at least min(margin / (K - 1), 1 / (2 K))."""
    variables = [1, 4, 2]
    method = Method(variables, terms=linear(np.ones(7)), margin=margin, learning_rate=0.4)
    search = espalier.Search(
        space_of(variables), cost=torch.ones(7, dtype=torch.float64), margin=margin, learning_rate=0.4
    )
    follow(search, method, variables, 2, 150, np.random.default_rng(2))


@pytest.mark.parametrize("degrees", [(2,), (1, 3), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("variables", [[1] * 5, [1, 1, 3], [4], [2, 1, 3]], ids=str)
def test_products_of_forms_as_cost(variables, degrees):
    """eps is scaled at the most expensive structure, and the natural gradient is the enumerated one."""
    rng = np.random.default_rng([*variables, *degrees])
    terms = random_terms(dimension(variables), rng, degrees)
    method = Method(variables, terms=terms, penalty=0.8)
    search = espalier.Search(space_of(variables), cost=cost_over(variables, terms), penalty=0.8)
    follow(search, method, variables, 2, 60, rng)


def test_the_initial_theta_as_given():
    variables = [1, 1, 3]
    theta = random_theta(variables, np.random.default_rng(3)) * 0.4 + np.array([0.3, 0.3, 0.2, 0.2, 0.2])
    method = Method(variables, terms=linear(np.ones(5)), initial=theta, penalty=0.1, margin=0.02)
    search = espalier.Search(
        space_of(variables), cost=torch.ones(5), initial=torch.from_numpy(theta), penalty=0.1, margin=0.02, samples=3
    )
    np.testing.assert_allclose(search.theta.numpy(), theta, rtol=0, atol=1e-15)
    follow(search, method, variables, 3, 50, np.random.default_rng(4))


ADAPTIVE = [[1], [1, 1], [1] * 7, [3], [2, 2], [1, 4, 1], [1, 1, 3, 2]]


@pytest.mark.parametrize("penalty", [0.0, 0.3, -0.3])
@pytest.mark.parametrize("variables", ADAPTIVE, ids=str)
def test_adaptive_follows_asng(variables, penalty):
    rng = np.random.default_rng([*variables, 11])
    c = rng.uniform(0.5, 9.0, dimension(variables))
    samples = int(rng.integers(2, 6))
    method = Adaptive(variables, terms=linear(c), penalty=penalty)
    search = espalier.Search(
        space_of(variables), cost=torch.from_numpy(c), penalty=penalty, samples=samples, adaptive=True
    )
    follow(search, method, variables, samples, 120, rng, tolerance=1e-11)


@pytest.mark.parametrize("delta", [0.05, 0.5])
def test_adaptive_learning_rate_is_delta(delta):
    method = Adaptive([1] * 6, terms=linear(np.ones(6)), penalty=0.1, delta=delta)
    search = espalier.Search(6, penalty=0.1, learning_rate=delta, adaptive=True)
    follow(search, method, [1] * 6, 2, 300, np.random.default_rng(5), tolerance=1e-11)


@pytest.mark.parametrize(("variables", "degrees"), [([1] * 5, (1, 2)), ([1, 1, 3], (2, 3)), ([2, 3, 1], (1, 1, 4))])
def test_expected_cost_and_usage(variables, degrees):
    rng = np.random.default_rng([*variables, *degrees])
    terms = random_terms(dimension(variables), rng, degrees)
    cost = cost_over(variables, terms)
    search = espalier.Search(
        space_of(variables), cost=cost, initial=torch.from_numpy(random_theta(variables, rng)), margin=0.01
    )
    assert search.expected_cost().item() == pytest.approx(cost(search.theta).item(), rel=1e-13)
    shipped = cost(search.select()).item()
    assert search.usage().item() == pytest.approx(shipped / full_cost(variables, terms), rel=1e-12)
