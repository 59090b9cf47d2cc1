"""Expected cost, gradient and natural gradient against sums over every structure of small spaces."""

import itertools
import math

import numpy as np
import pytest
import torch

import espalier
from espalier import Cost, Form
from oracle.bridge import cost_over, random_terms, random_theta
from oracle.costs import cost_of, expected_cost, gradient, linear, natural_gradient
from oracle.structures import all_masks, entries

SPACES = [[1], [1, 1, 1], [3], [2, 2], [1, 4, 1], [1, 1, 3, 1, 2], [1] * 10, [5, 1, 1, 3], [1, 1, 3, 2, 1, 1, 1]]


def natural(variables, theta, slopes):
    """Law 4: theta (1 - theta) g for a bit, theta_k (g_k - sum_j theta_j g_j) for an option."""
    result = np.zeros(len(theta))
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            result[owned] = theta[owned] * (1 - theta[owned]) * slopes[owned]
        else:
            result[owned] = theta[owned] * (slopes[owned] - (theta[owned] * slopes[owned]).sum())
    return result


@pytest.mark.parametrize("degrees", [(1,), (2,), (3,), (4,), (1, 2, 3), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("variables", SPACES, ids=str)
def test_expectation_and_gradients_equal_enumerated_ones(variables, degrees):
    rng = np.random.default_rng([*variables, *degrees])
    terms = random_terms(sum(variables), rng, degrees)
    cost = cost_over(variables, terms)
    theta = random_theta(variables, rng)
    at = torch.from_numpy(theta)
    scale = expected_cost(variables, terms, np.array(theta))
    assert cost(at).item() == pytest.approx(scale, rel=1e-12)
    slopes = cost.gradient(at).numpy()
    assert slopes == pytest.approx(gradient(variables, terms, theta), rel=1e-11, abs=1e-11 * scale)
    enumerated = natural_gradient(variables, terms, theta)
    assert natural(variables, theta, slopes) == pytest.approx(enumerated, rel=1e-10, abs=1e-11 * scale)


@pytest.mark.parametrize("variables", SPACES[:6], ids=str)
def test_on_masks_it_is_the_plain_product(variables):
    rng = np.random.default_rng(7)
    terms = random_terms(sum(variables), rng, (1, 2, 3, 4))
    cost = cost_over(variables, terms)
    masks = all_masks(variables)
    found = cost(torch.from_numpy(np.stack(masks)).float())
    assert found.dtype == torch.float64
    assert found.numpy() == pytest.approx([cost_of(terms, mask) for mask in masks], rel=1e-12)


def test_runs_that_overlap_add():
    """Pieces over the same entries, per-entry weights beside one weight, and a constant."""
    form = Form.run(0, 6, 2.0) + Form.run(4, 8, 3.0) + Form(((1, 3, np.array([0.5, 0.25])),)) + 1.0
    dense = [2, 2.5, 2.25, 2, 5, 5, 3, 3]
    other = [1, 0, 0, 0, 0, 7, 7, 0]
    cost = Cost.product([form, Form.of(other)], d=8, scale=0.5)
    terms = [(0.5, [(dense, 1.0), (other, 0.0)])]
    theta = np.random.default_rng(0).uniform(0.1, 0.9, 8)
    assert cost(torch.from_numpy(theta)).item() == pytest.approx(expected_cost([1] * 8, terms, theta), rel=1e-13)
    assert cost.gradient(torch.from_numpy(theta)).numpy() == pytest.approx(gradient([1] * 8, terms, theta), rel=1e-12)


@pytest.mark.parametrize("power", [2, 3, 4, 5, 6])
def test_a_power_of_one_form_is_a_moment_of_the_binomial(power):
    """(m_1 + .. + m_n)^k at equal theta: moments of a binomial count, known in closed form."""
    n, p = 50, 0.3
    cost = Cost.product([Form.run(0, n)] * power, d=n)
    moment = math.fsum(k**power * math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1))
    assert cost(torch.full((n,), p, dtype=torch.float64)).item() == pytest.approx(moment, rel=1e-12)


def test_the_hidden_to_hidden_weight_of_a_recurrent_layer():
    """Units on both axes of one weight: the square of the count, with its theta (1 - theta) correction."""
    n = 24
    theta = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    squared = Cost.product([Form.run(0, n), Form.run(0, n)], d=n)
    assert squared(theta).item() == pytest.approx((theta.sum() ** 2 + (theta * (1 - theta)).sum()).item(), rel=1e-13)


def test_a_cost_that_does_not_know_the_choices_is_told_by_over():
    """Unbound, two options are two bits; bound, m_j m_k = 0."""
    product = Cost.product([Form.run(0, 1), Form.run(1, 2)], d=2)
    theta = torch.tensor([0.4, 0.6], dtype=torch.float64)
    assert product(theta).item() == pytest.approx(0.24)
    assert product.over(espalier.Space([espalier.Choice("c", 2)]))(theta).item() == 0.0


def test_the_expectation_agrees_with_the_mean_of_drawn_masks():
    """At a size no enumeration reaches: three layers of 400, sampled, within five standard errors."""
    widths = [400, 400, 400]
    ends = np.cumsum([0, *widths])
    layers = [Form.run(int(a), int(b)) for a, b in itertools.pairwise(ends)]
    cost = Cost.product(layers[:2], d=1200) + 2.0 * Cost.product(layers[1:], d=1200) + Cost.product(layers, d=1200)
    generator = torch.Generator().manual_seed(1)
    theta = torch.rand(1200, dtype=torch.float64, generator=generator)
    masks = (torch.rand(2000, 1200, dtype=torch.float64, generator=generator) < theta).float()
    sampled = cost(masks)
    error = sampled.std() / math.sqrt(len(masks))
    assert abs(sampled.mean() - cost(theta)) < 5 * error
    assert error / sampled.mean() < 0.01


def test_a_linear_cost_of_the_paper():
    c = [1.0, 4.0, 2.5]
    theta = np.array([0.2, 0.7, 0.5])
    cost = Cost.linear(c)
    assert cost(torch.from_numpy(theta)).item() == pytest.approx(expected_cost([1, 1, 1], linear(c), theta))
    assert cost.gradient(torch.from_numpy(theta)).tolist() == c
