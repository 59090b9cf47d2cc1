"""A target with limits on other costs: how far a step is pulled at each, against every set of pulls written out."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

import espalier
from espalier import Bits, Choice, Cost, Search, Space, Unreachable

D, RAMP = 12, 60


def pulls(costs: np.ndarray, theta: np.ndarray, free: np.ndarray, most: np.ndarray) -> np.ndarray:
    """How strongly each cost ``(n, D)`` is pulled at, after which none exceeds what it may be ``(n)``, and each that is
    pulled at is just that. free: theta after the step of the losses alone."""
    fisher = theta * (1 - theta)
    grips = costs @ (fisher * costs).T  # what a unit of pulling at j takes off i
    for count in range(len(costs) + 1):
        for active in map(list, combinations(range(len(costs)), count)):
            share = np.zeros(len(costs))
            share[active] = np.linalg.solve(grips[np.ix_(active, active)], (costs @ free - most)[active])
            if (share >= -1e-12).all() and (costs @ free - grips @ share <= most + 1e-9).all():
                return share
    raise AssertionError("there is no such step")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limits", [1, 2])
def test_a_step_pulls_at_each_cost_no_more_than_the_others_leave_to_do(limits: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    costs = draw.uniform(0.2, 3, (1 + limits, D))
    shares = [0.5, *draw.uniform(0.48, 0.52, limits)]
    named = {f"cost {i}": (espalier.Cost.linear(torch.tensor(c)), s) for i, (c, s) in enumerate(zip(costs, shares))}
    (main, target), *others = named.values()
    search = espalier.Search(
        D, cost=main, target=target, limits={f"limit {i}": one for i, one in enumerate(others)}, horizon=RAMP, ramp=1.0,
        initial=0.8, learning_rate=0.02, signal="first-order", samples=1, seed=seed,
    )  # fmt: skip
    full = costs.sum(1)
    start, end = costs @ np.full(D, 0.8), np.array(shares) * full
    together = 0
    for update in range(RAMP):
        before = search.theta.numpy().copy()
        slopes = torch.tensor(draw.normal(-0.2, 1, (1, D)))
        masks = search.ask()
        search.tell(masks, torch.zeros(1), slopes)
        size = search.state_dict()["signal.first-order"].item()
        fisher = before * (1 - before)
        free = before + 0.02 * fisher * -slopes[0].numpy() / size
        most = start + (end - start) * (update + 1) / RAMP
        share = pulls(costs, before, free, most)
        if share[1:].max() <= 1e-12:  # no limit would be passed: the target is led along its ramp in either direction
            share[0] = (costs[0] @ free - most[0]) / (costs[0] @ (fisher * costs[0]))
        together += (share > 1e-9).sum() > 1
        expected = free - fisher * (share @ costs)
        if ((expected > 1 / D) & (expected < 1 - 1 / D)).all():  # no gate is at its bound
            assert np.abs(search.theta.numpy() - expected).max() < 1e-9
    assert together  # else one pull at a time would do


TOGETHER = {
    "a choice": Space([Choice("a", 4)]),
    "a group": Space([Bits("a", 6, least=1)]),
    "several": Space([Bits("a", 4, least=2), Choice("b", 3), Bits("c", 3, least=1), Choice("d", 2)]),
}


@pytest.mark.parametrize("limits", [1, 2])
@pytest.mark.parametrize("name", list(TOGETHER))
def test_what_can_be_met_together_is_not_refused(name: str, limits: int) -> None:
    """Against every mask: refused where none is within all budgets, and what ships is within all of them."""
    space, draw = TOGETHER[name], np.random.default_rng(limits)
    masks = [m for m in map(np.array, product([0.0, 1.0], repeat=space.d)) if permitted(space, m)]
    met = refused = 0
    for _ in range(40):
        costs = draw.exponential(1.0, (1 + limits, space.d)) + 0.05
        taken = np.array(masks) @ costs.T
        full, wanted = taken.max(0), taken[draw.integers(len(taken))]  # of some mask, but for a factor
        shares = np.minimum(wanted / full * draw.uniform(0.3, 1.3), 1.0)
        (main, target), *others = zip(costs, shares.tolist())
        named = {f"limit {i}": (Cost.linear(torch.from_numpy(c)), s) for i, (c, s) in enumerate(others)}
        given = {"cost": torch.from_numpy(main), "target": target, "limits": named, "horizon": 9}
        if not (taken <= shares * full * (1 + 1e-12)).all(1).any():
            with pytest.raises(Unreachable):
                Search(space, **given)
            refused += 1
            continue
        search = Search(space, **given)
        chosen = search.select().double().numpy()
        assert permitted(space, chosen)
        assert (costs @ chosen <= shares * full * (1 + 1e-12)).all()
        met += 1
    assert met >= 5
    assert refused >= 1


def permitted(space: Space, mask: np.ndarray) -> bool:
    whole = [mask[where].sum() == 1 for _, where in space.choices]
    return all(whole + [mask[where].sum() >= group.least for group, where in space.bits])


def test_each_run_of_a_batch_has_a_structure_within_its_own_budgets() -> None:
    """One option for the first run, the other for the second, and neither is the smallest of a cost."""
    space, other = Space([Choice("a", 4)]), Cost.linear(torch.tensor([10.0, 6, 3, 1]))
    targets, limits = torch.tensor([0.3, 0.6], dtype=torch.float64), torch.tensor([0.6, 0.3], dtype=torch.float64)
    search = Search(
        space, cost=[1.0, 3, 6, 10], target=targets, limits={"other": (other, limits)}, horizon=9, batch=(2,)
    )
    assert search.select().argmax(-1).tolist() == [1, 2]
    with pytest.raises(Unreachable, match=r"the target 0\.2, smallest 0\.1; other 0\.2, smallest"):
        Search(space, cost=[1.0, 3, 6, 10], target=0.2, limits={"other": (other, 0.2)}, horizon=9)


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_limit_that_theta_cannot_pass_changes_nothing(share: float) -> None:
    """Of two gates of equal cost that nothing holds back, theta reaches 5/6 at most."""
    other = Cost.linear([1.0, 1, 0, 0, 0, 0])
    given = {"cost": [1.0, 1, 1, 1, 3, 3], "target": 0.5, "horizon": 60, "seed": 1, "learning_rate": 0.1}
    free, limited = Search(6, **given), Search(6, limits={"other": (other, share)}, **given)
    for _ in range(60):
        masks = free.ask()
        assert torch.equal(limited.ask(), masks)
        for search in (free, limited):
            search.tell(masks, -masks[:, :4].sum(-1) + masks[:, 4:].sum(-1))
        torch.testing.assert_close(limited.theta, free.theta, rtol=0, atol=1e-12)
    assert (free.theta[:2] > 0.83).all()
    torch.testing.assert_close(limited.penalty, free.penalty)
