"""A target with limits on other costs: how far a step is pulled at each, against every set of pulls written out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

import espalier

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
