"""The way to a target that takes from all gates alike: what it holds to, and what it leaves to the losses."""

from __future__ import annotations

import pytest
import torch

import espalier
from espalier.space import BadInput, BadType

SIZES = (8, 8)
COST = torch.tensor([10.0] * 8 + [1.0] * 8, dtype=torch.float64)


def searched(even: float, updates: int = 200, tell: bool = False, **changes: object) -> espalier.Search:
    space = espalier.Space([espalier.Bits("dear", 8), espalier.Bits("cheap", 8)])
    settings = {"cost": COST, "target": 0.3, "horizon": updates, "learning_rate": 0.05, "batch": (64,), "seed": 3}
    search = espalier.Search(space, even=even, **(settings | changes))
    for _ in range(updates):
        masks = search.ask()
        losses = masks[..., :2].sum(-1) * -1.0 if tell else torch.zeros(masks.shape[:-1])
        search.tell(masks, losses)
    return search


def test_without_a_signal_all_gates_stay_alike() -> None:
    """All losses tie: fully even, theta is one number; by cost the dear gates go and the cheap ones stay."""
    even, dear = searched(1.0), searched(0.0)
    torch.testing.assert_close(even.theta, torch.full_like(even.theta, 0.3), rtol=0, atol=2e-3)
    assert dear.theta[:, :8].max().item() < 0.29
    assert dear.theta[:, 8:].min().item() > 0.4
    half = searched(0.5)
    assert dear.theta[0, 0] < half.theta[0, 0] < even.theta[0, 0]


@pytest.mark.parametrize("even", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_target_is_met_all_the_same(even: float, adaptive: bool) -> None:
    rate = 1.0 if adaptive else 0.05
    search = searched(even, tell=True, adaptive=adaptive, learning_rate=rate)
    assert search.expected_cost().div(88).tolist() == pytest.approx([0.3] * 64, abs=0.06 if adaptive else 0.02)
    assert bool((search.usage() <= 0.3).all())
    assert (search.select()[:, :2].sum(-1) == 2).double().mean().item() > 0.9  # what the losses ask for is kept


def test_zero_is_the_projection_bit_for_bit() -> None:
    space = espalier.Space([espalier.Bits("a", 5), espalier.Choice("b", 3)])
    cost = espalier.Cost.linear([3.0, 1.0, 4.0, 1.0, 5.0, 0.0, 2.0, 6.0])
    searches = [
        espalier.Search(space, cost=cost, target=0.4, horizon=50, seed=1, **more) for more in ({}, {"even": 0.0})
    ]
    for _ in range(50):
        for search in searches:
            masks = search.ask()
            search.tell(masks, masks.sum(-1) + masks[:, 0])
    assert torch.equal(searches[0].theta, searches[1].theta)


def test_choices_gates_without_a_cost_and_the_unit_of_cost() -> None:
    """The cheapest option and a free gate are left alone, dearer options move alike, grams or tonnes."""
    space = espalier.Space([espalier.Bits("a", 3), espalier.Choice("b", 3)])
    thetas = []
    for unit in (1.0, 1e6):
        cost = espalier.Cost.linear([0.0, unit, 4 * unit, unit, 3 * unit, 9 * unit])
        search = espalier.Search(space, cost=cost, target=0.3, horizon=60, learning_rate=0.1, even=1.0)
        for _ in range(60):
            masks = search.ask()
            search.tell(masks, torch.zeros(2))
        thetas.append(search.theta)
    theta = thetas[0]
    torch.testing.assert_close(thetas[0], thetas[1], rtol=0, atol=1e-9)
    assert theta[0].item() == 0.5
    assert theta[1].item() == pytest.approx(theta[2].item())
    assert theta[4].item() == pytest.approx(theta[5].item())
    assert theta[3] > theta[4]
    assert float(search.expected_cost() / search.full_cost) == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(("even", "kind"), [(1.5, BadInput), (-0.1, BadInput), ("all", BadType), (True, BadType)])
def test_what_it_is_not(even: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="even is"):
        espalier.Search(4, target=0.5, horizon=10, even=even)  # type: ignore[arg-type]


def test_a_cost_that_is_there_by_rounding_pulls_at_nothing():
    """Two options that cost 0.3, where one is summed up from 0.1 and 0.2."""
    space = espalier.Space([espalier.Choice("a", 3), espalier.Bits("b", 2)])
    plain = espalier.Cost.linear([0.5, 0.3, 0.3, 1, 1])
    summed = espalier.Cost.linear([0.5, 0.1, 0.3, 1, 1]) + espalier.Cost.linear([0, 0.2, 0, 0, 0])
    assert float(summed(torch.eye(5)[1])) != float(summed(torch.eye(5)[2]))
    for even in (0.0, 0.5, 1.0):
        searches = [
            espalier.Search(space, cost=cost, target=0.5, horizon=100, even=even, learning_rate=0.05, margin=0.01)
            for cost in (plain, summed)
        ]
        for search in searches:
            for _ in range(100):
                search.tell(search.ask(), torch.zeros(2))
        torch.testing.assert_close(searches[1].theta, searches[0].theta, rtol=0, atol=1e-9)
