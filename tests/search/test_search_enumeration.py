"""The mean update over every tuple of masks, and the distribution that ask() draws from."""

import itertools
import math

import numpy as np
import pytest
import torch

import espalier
from oracle.bridge import random_theta, space_of
from oracle.structures import all_masks, entries, probability, sample
from oracle.tuples import mean_direction


def table_of(variables, rng):
    """A loss for every structure, some of them equal."""
    return {tuple(mask): float(rng.integers(0, 12)) for mask in all_masks(variables)}


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("variables", [[1], [1, 1, 1], [1] * 4, [1] * 5, [3], [1, 1, 3]], ids=str)
def test_the_mean_update_is_the_enumerated_one(variables, samples):
    """Every tuple of masks is one run of a batch; their updates, weighted by probability, against plain loops."""
    rng = np.random.default_rng([*variables, samples])
    table, theta = table_of(variables, rng), random_theta(variables, rng)
    masks = all_masks(variables)
    tuples = list(itertools.product(range(len(masks)), repeat=samples))
    weights = np.array([math.prod(probability(variables, theta, masks[k]) for k in drawn) for drawn in tuples])
    assert weights.sum() == pytest.approx(1.0)
    told = torch.from_numpy(np.stack([[masks[k] for k in drawn] for drawn in tuples])).float()
    losses = torch.tensor([[table[tuple(masks[k])] for k in drawn] for drawn in tuples], dtype=torch.float64)
    rate = 1e-2
    search = espalier.Search(
        space_of(variables),
        samples=samples,
        learning_rate=rate,
        initial=torch.from_numpy(theta),
        margin=1e-3,
        batch=(len(tuples),),
    )
    before = search.theta.clone()
    search.tell(told, losses)
    mean = (torch.from_numpy(weights) @ (search.theta - before)).numpy() / rate
    expected = mean_direction(variables, theta, lambda mask: table[tuple(mask)], samples)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("variables", [[1] * 6, [3], [2, 2], [1, 4, 1, 3, 1]], ids=str)
def test_given_noise_draws_what_the_oracle_draws(variables):
    """One uniform number per variable: a bit opens strictly below theta, a choice from its first option on."""
    rng = np.random.default_rng(variables)
    theta = random_theta(variables, rng)
    search = espalier.Search(space_of(variables), initial=torch.from_numpy(theta), margin=1e-3, samples=200)
    theta = search.theta.numpy()
    noise = rng.random((200, len(variables)))
    noise[0], noise[1] = 0.0, np.nextafter(1.0, 0.0)
    noise[2] = [theta[owned[0]] for owned in entries(variables)]  # exactly at the edge of the first option
    drawn = search.draw(torch.from_numpy(noise)).numpy()
    np.testing.assert_array_equal(drawn, np.stack([sample(variables, theta, row) for row in noise]))


def counts_of(search, rounds):
    """How often each structure is drawn, and each pair of structures in one update."""
    variables = [group.size for group in search.space.groups]  # its bits come one to a group
    masks = all_masks(variables)
    code = torch.arange(1, search.space.d + 1, dtype=torch.float64) ** 3
    codes = torch.tensor([float(torch.from_numpy(mask) @ code) for mask in masks])
    assert len(set(codes.tolist())) == len(masks)
    single, pair = np.zeros(len(masks)), np.zeros((len(masks), len(masks)))
    for _ in range(rounds):
        drawn = search.ask()
        index = (drawn.double() @ code).unsqueeze(-1).eq(codes.double()).int().argmax(-1).numpy()  # (R, 2)
        np.add.at(single, index.reshape(-1), 1)
        np.add.at(pair, (index[:, 0], index[:, 1]), 1)
    return variables, masks, single, pair


def chi_square(observed, expected):
    """(statistic - degrees) / its standard deviation: about standard normal for many cells."""
    degrees = observed.size - 1
    return (((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_ask_draws_from_theta():
    """Structures appear as often as theta says, and the two masks of an update are independent."""
    space = espalier.Space(
        [espalier.Bits("a", 1), espalier.Choice("b", 3), espalier.Bits("c", 1), espalier.Choice("d", 2)]
    )
    theta = torch.tensor([0.3, 0.2, 0.5, 0.3, 0.85, 0.6, 0.4], dtype=torch.float64)
    search = espalier.Search(space, initial=theta, margin=0.01, batch=(2000,), seed=3)
    variables, masks, single, pair = counts_of(search, 50)
    p = np.array([probability(variables, theta.numpy(), mask) for mask in masks])
    assert abs(chi_square(single, p * single.sum())) < 5
    assert abs(chi_square(pair, np.outer(p, p) * pair.sum())) < 5


def test_runs_and_updates_draw_independently():
    """No two runs, and no two updates of a run, repeat each other's masks."""
    search = espalier.Search(64, batch=(50,), seed=0)
    first, second = search.ask(), search.ask()
    rows = torch.cat([first.reshape(-1, 64), second.reshape(-1, 64)])
    assert len(torch.unique(rows, dim=0)) == 200
    agreement = (rows[:, None] == rows[None, :]).double().mean(-1)
    off = agreement[~torch.eye(200, dtype=torch.bool)]
    assert abs(off.mean().item() - 0.5) < 0.01


def test_masks_have_their_shape_and_type():
    space = espalier.Space([espalier.Bits("a", 2), espalier.Choice("b", 3)])
    for batch in [(), (1,), (4,), (2, 3)]:
        search = espalier.Search(space, samples=3, batch=batch)
        masks = search.ask()
        assert masks.shape == (*batch, 3, 5)
        assert masks.dtype == torch.float32
        space.check_mask(masks)
        assert search.theta.shape == (*batch, 5)
        assert search.mode().shape == search.select().shape == (*batch, 5)
        for value in (search.usage(), search.expected_cost(), search.diverged, search.penalty, search.updates):
            assert value.shape == batch
        space.check_mask(search.mode())
        space.check_mask(search.select())


def test_a_uniform_start_for_choices():
    space = espalier.Space([espalier.Bits("a", 1), espalier.Choice("b", 4)])
    search = espalier.Search(space)
    assert search.theta.tolist() == [0.5, 0.25, 0.25, 0.25, 0.25]
