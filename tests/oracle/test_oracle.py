"""The oracle against hand-computed numbers and against definitions, so that it can be trusted as a second road."""

import math

import numpy as np
import pytest

from oracle.asng import Adaptive, root_fisher
from oracle.costs import cost_of, epsilon, expected_cost, gradient, linear, natural_gradient
from oracle.method import Method, PaperMethod, lower_bounds, restrict, utilities
from oracle.structures import (
    all_masks,
    entries,
    expectation,
    fisher,
    mode,
    natural_gradient_of_mean,
    probability,
    raw_loss_direction,
    sample,
    score,
)
from oracle.tuples import mean_direction

SPACES = [[1, 1, 1], [2], [3], [1, 3], [1, 2, 4, 1]]


def theta_of(variables, rng):
    theta = np.zeros(sum(variables))
    for size, owned in zip(variables, entries(variables)):
        theta[owned] = rng.uniform(0.1, 0.9) if size == 1 else rng.dirichlet(np.full(size, 3.0))
    return theta


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.3, 0.1], [-1, 1]),
        ([0.1, 0.1], [0, 0]),
        ([3.0, 1.0, 2.0], [-1, 1, 0]),
        ([1.0, 1.0, 2.0], [0.5, 0.5, -1]),
        ([5, 4, 3, 2, 1], [-1, -1, 0, 1, 1]),
        ([1, 1, 1, 2, 3], [2 / 3, 2 / 3, 2 / 3, -1, -1]),
        ([1, 2, 2, 2, 3, 4, 5, 6], [1, 1 / 3, 1 / 3, 1 / 3, 0, 0, -1, -1]),
        ([0.1, math.nan], [1, -1]),
        ([-math.inf, 7.0], [-1, 1]),
        ([math.inf, math.nan, -math.inf, 1.0], [-1 / 3, -1 / 3, -1 / 3, 1]),
        ([math.inf, 2.0, -math.inf, 1.0], [-0.5, 0, -0.5, 1]),
    ],
)
def test_utilities_by_hand(losses, expected):
    assert utilities(losses) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("variables", SPACES, ids=str)
def test_probabilities_sum_to_one_and_theta_is_the_mean(variables):
    theta = theta_of(variables, np.random.default_rng(0))
    assert expectation(variables, theta, lambda mask: 1.0) == pytest.approx(1.0, abs=1e-14)
    assert expectation(variables, theta, lambda mask: mask) == pytest.approx(theta, abs=1e-14)


@pytest.mark.parametrize("variables", SPACES, ids=str)
def test_mask_minus_theta_is_the_natural_gradient_of_the_log_likelihood(variables):
    theta = theta_of(variables, np.random.default_rng(1))
    free = [i for owned in entries(variables) for i in (owned if len(owned) == 1 else owned[:-1])]
    for mask in all_masks(variables):
        natural = np.linalg.solve(fisher(variables, theta), score(variables, theta, mask))
        assert natural == pytest.approx((mask - theta)[free], abs=1e-12)


@pytest.mark.parametrize("variables", SPACES, ids=str)
def test_the_raw_loss_direction_is_the_natural_gradient_of_the_mean_loss(variables):
    rng = np.random.default_rng(2)
    theta = theta_of(variables, rng)
    table = {tuple(mask): rng.normal() for mask in all_masks(variables)}

    def loss(mask):
        return table[tuple(mask)]

    assert raw_loss_direction(variables, theta, loss) == pytest.approx(
        natural_gradient_of_mean(variables, theta, loss), abs=1e-12
    )


@pytest.mark.parametrize("d", [1, 2, 5, 8])
def test_raw_loss_identity_of_a_linear_cost(d):
    """The natural gradient of E[c.M] is c theta (1 - theta)."""
    rng = np.random.default_rng(d)
    c, theta = rng.uniform(0, 5, d), rng.uniform(0.05, 0.95, d)
    found = raw_loss_direction([1] * d, theta, lambda mask: float(c @ mask))
    assert found == pytest.approx(c * theta * (1 - theta), abs=1e-12)


def test_two_samples_rank_towards_the_better_mask():
    """By hand: one bit, L = -m. The pair differs with probability 2 t (1-t), and each such pair moves by 1/2."""
    for t in (0.2, 0.5, 0.9):
        assert mean_direction([1], np.array([t]), lambda mask: -mask[0], 2) == pytest.approx([t * (1 - t)], abs=1e-15)


def test_a_product_with_a_shared_bit_by_hand():
    """(m0 + m1)(m0 + 2): m0 + m0 m1 + 2 m0 + 2 m1."""
    terms = [(1.0, [([1, 1], 0.0), ([1, 0], 2.0)])]
    theta = np.array([0.3, 0.6])
    assert expected_cost([1, 1], terms, theta) == pytest.approx(3 * 0.3 + 0.18 + 1.2)
    assert gradient([1, 1], terms, theta) == pytest.approx([3.6, 2.3])
    assert natural_gradient([1, 1], terms, theta) == pytest.approx([3.6 * 0.21, 2.3 * 0.24])
    assert epsilon([1, 1], terms, 2.0) == pytest.approx(2.0 / 4)  # at (1, 1) opening m0 adds 4, m1 adds 3


def test_a_choice_by_hand():
    """Options of cost 1, 4, 2: range 3; natural gradient theta_k (g_k - mean g)."""
    theta = np.array([0.2, 0.5, 0.3])
    mean = 0.2 + 2.0 + 0.6
    assert natural_gradient([3], linear([1, 4, 2]), theta) == pytest.approx(theta * (np.array([1, 4, 2]) - mean))
    assert epsilon([3], linear([1, 4, 2]), 0.5) == pytest.approx(0.5 / 3)
    squared = [(1.0, [([1, 4, 2], 0.0), ([1, 4, 2], 0.0)])]  # m_j m_k = 0, so the squares remain
    assert expected_cost([3], squared, theta) == pytest.approx(0.2 + 16 * 0.5 + 4 * 0.3)


def test_bounds_by_hand():
    assert lower_bounds([1, 1]) == [0.25, 0.25]
    assert lower_bounds([1] * 10) == [0.1] * 10
    assert lower_bounds([3]) == [pytest.approx(1 / 6)]
    assert lower_bounds([1] * 9 + [3])[-1] == pytest.approx(1 / 20)
    moved = restrict([3], np.array([-0.2, 0.4, 0.8]))  # low 1/6: raised by 0.3667, heights 0.2333 and 0.6333
    excess = 1 / 6 + 0.2
    heights = np.array([0.0, 0.4 - 1 / 6, 0.8 - 1 / 6])
    assert moved == pytest.approx(np.array([1 / 6, 0.4, 0.8]) - excess * heights / heights.sum())
    assert moved.sum() == pytest.approx(1.0, abs=1e-15)


def test_one_update_by_hand():
    """d = 2, c = (1, 4), eps' = 0.8 so eps = 0.2: the paper's formula on paper."""
    masks, losses = [np.array([1.0, 0.0]), np.array([0.0, 0.0])], [1.0, 2.0]
    for method in (
        PaperMethod([1, 4], penalty=0.8, learning_rate=0.1),
        Method([1, 1], terms=linear([1, 4]), penalty=0.8, learning_rate=0.1),
    ):
        method.update(masks, losses)
        assert method.theta == pytest.approx([0.5 + 0.1 * (0.5 - 0.2 * 0.25), 0.5 - 0.1 * (0.2 * 4 * 0.25)], abs=1e-15)


def test_when_every_loss_is_lost_theta_stays():
    method = Method([1, 1], terms=linear([1, 1]), penalty=0.5)
    method.update(all_masks([1, 1])[:2], [math.nan, math.inf])
    assert method.diverged
    assert list(method.theta) == [0.5, 0.5]


@pytest.mark.parametrize("variables", SPACES, ids=str)
def test_the_root_of_the_fisher_matrix(variables):
    """Column by column: S^T S = F."""
    theta = theta_of(variables, np.random.default_rng(3))
    columns = []
    for size, owned in zip(variables, entries(variables)):
        for i in owned if size == 1 else owned[:-1]:
            direction = np.zeros(sum(variables))
            direction[i] = 1.0
            if size > 1:
                direction[owned[-1]] = -1.0
            columns.append(root_fisher(variables, theta, direction))
    root = np.stack(columns, axis=1)
    assert root.T @ root == pytest.approx(fisher(variables, theta), abs=1e-10)


def test_one_adaptive_update_by_hand():
    """d = 2 at theta = 0.5: G = (1/2, 0), so its Fisher norm is 1, and delta = 0.2 moves theta by 0.2 G."""
    adaptive = Adaptive([1, 1], terms=linear([1, 1]), delta=0.2, penalty=0.4)
    adaptive.update([np.array([1.0, 0.0]), np.array([0.0, 0.0])], [1.0, 2.0])
    beta = 0.2 / math.sqrt(2)
    assert adaptive.theta == pytest.approx([0.5 + 0.2 * (0.5 - 0.1), 0.5 - 0.2 * 0.1], abs=1e-15)
    assert adaptive.path == pytest.approx([math.sqrt(beta * (2 - beta)), 0.0])
    assert adaptive.gamma == pytest.approx(beta * (2 - beta))
    assert adaptive.Delta == pytest.approx(math.exp(beta * beta * (2 - beta) * (1 - 1 / 1.5)))


def test_sampling_and_mode_by_hand():
    assert list(sample([1, 3], np.array([0.4, 0.2, 0.5, 0.3]), [0.39, 0.7])) == [1, 0, 0, 1]
    assert list(sample([1, 3], np.array([0.4, 0.2, 0.5, 0.3]), [0.4, 0.1999])) == [0, 1, 0, 0]
    assert list(mode([1, 1, 3], np.array([0.5, 0.4999, 0.3, 0.3, 0.4]))) == [1, 0, 0, 0, 1]
    assert probability([1, 3], np.array([0.4, 0.2, 0.5, 0.3]), [0, 0, 1, 0]) == pytest.approx(0.3)
    assert cost_of([(2.0, [([1, 3], 1.0)])], [0, 1]) == 8.0
