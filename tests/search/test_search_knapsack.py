"""A knapsack: the penalty as the price of weight, the target as the capacity, against the exact optimum."""

import itertools

import numpy as np
import pytest
import torch

import espalier

D, RUNS = 24, 60
RNG = np.random.default_rng(0)
VALUES, WEIGHTS = RNG.integers(5, 40, D), RNG.integers(3, 30, D)
WORTH = torch.from_numpy(VALUES.astype(np.float32))


def optimum(capacity):
    """The largest value of items that fit, by dynamic programming over whole weights."""
    best = [0] * (capacity + 1)
    for value, weight in zip(VALUES.tolist(), WEIGHTS.tolist()):
        for room in range(capacity, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[capacity]


def pack(updates, *, permuted=False, **keywords):
    search = espalier.Search(D, cost=torch.from_numpy(WEIGHTS), batch=(RUNS,), **keywords)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        masks = search.ask()
        losses = -(masks @ WORTH)
        if permuted:
            losses = losses.gather(-1, torch.rand(losses.shape, generator=generator).argsort(-1))
        search.tell(masks, losses)
    return search


def quality(search):
    """Value of each run's selection over the best value at the same weight, or 1 where it is empty."""
    chosen = search.select().double().numpy()
    ratios = []
    for mask in chosen:
        best = optimum(int(mask @ WEIGHTS))
        ratios.append(mask @ VALUES / best if best else 1.0)
    return np.array(ratios)


def test_the_optimum_by_trying_all():
    """The dynamic programme itself, against every subset of the first twelve items."""
    masks = np.array([[i >> k & 1 for k in range(D)] for i in range(2**12)])
    for capacity in (20, 60, 110):
        fits = masks @ WEIGHTS <= capacity
        best = (masks @ VALUES)[fits].max()
        assert optimum(capacity) >= best
    total = int(WEIGHTS.sum())
    assert optimum(total) == VALUES.sum()


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
def test_the_penalty_is_a_price(adaptive):
    """A higher price buys less weight, and what is bought is near the best of its weight."""
    penalties = torch.tensor([0.1, 0.4, 0.8, 1.6]).repeat_interleave(RUNS // 4)
    search = pack(1500, penalty=penalties, adaptive=adaptive)
    used = search.usage().reshape(4, -1).median(-1).values.tolist()
    assert (np.median(quality(search).reshape(4, -1), -1) >= 0.94).all()
    assert used == sorted(used, reverse=True)
    assert used[0] >= 0.9
    assert used[-1] <= 0.15
    assert all(a - b >= 0.05 for a, b in itertools.pairwise(used))


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
def test_the_target_is_a_capacity(adaptive):
    """Never above it, nearly as good as the exact optimum; with permuted losses far from it."""
    shares = np.repeat([0.2, 0.5, 0.8], RUNS // 3)
    capacity = np.floor(shares * WEIGHTS.sum() + 1e-9).astype(int)
    best = np.array([optimum(c) for c in sorted(set(capacity.tolist())) for _ in range(RUNS // 3)])
    keywords = {"target": torch.from_numpy(shares), "horizon": 1500, "adaptive": adaptive}
    values = {}
    for permuted in (False, True):
        search = pack(1500, permuted=permuted, **keywords)
        chosen = search.select().double().numpy()
        assert (chosen @ WEIGHTS <= capacity).all()
        closed = np.where(chosen == 0, WEIGHTS, np.inf).min(-1)
        assert (chosen @ WEIGHTS + closed > capacity).all()
        values[permuted] = (chosen @ VALUES / best).reshape(3, -1)
    assert (np.median(values[False], -1) >= 0.93).all()
    assert values[False].min() >= 0.8
    assert (np.median(values[True], -1) <= 0.85).all()


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
def test_the_expected_cost_follows_its_ramp_and_stays(adaptive):
    """From where it starts to the target in half of the horizon, in every run, whatever the losses say."""
    target = torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64).repeat_interleave(20)
    search = espalier.Search(40, target=target, horizon=800, batch=(60,), adaptive=adaptive)
    allowed = 0.06 if adaptive else 0.005
    for update in range(1, 801):
        masks = search.ask()
        search.tell(masks, -masks[..., :10].sum(-1))
        wanted = 0.5 + (target - 0.5) * min(update / 400, 1.0)
        assert (search.expected_cost() / search.full_cost - wanted).abs().max().item() <= allowed
    assert search.usage().tolist() == pytest.approx(target.tolist())
    helpful = search.select()[:, :10].sum(-1)
    assert (helpful >= 0.9 * (40 * target).clamp(max=10)).double().mean().item() >= 0.9


def test_with_a_linear_cost_every_update_lands_on_the_ramp():
    """The cost of a step is then known exactly, so away from the bounds the expected cost is never off."""
    target = torch.tensor([0.4, 0.65], dtype=torch.float64)
    search = espalier.Search(D, cost=torch.from_numpy(WEIGHTS), target=target, horizon=40, batch=(2,))
    for update in range(1, 41):
        masks = search.ask()
        search.tell(masks, -(masks @ WORTH))
        wanted = 0.5 + (target - 0.5) * min(update / 20, 1.0)
        assert bool(((search.theta > 1 / D) & (search.theta < 1 - 1 / D)).all())
        torch.testing.assert_close(search.expected_cost() / search.full_cost, wanted, rtol=0, atol=1e-12)


def test_the_unit_of_cost_does_not_count():
    """Grams or tonnes: the same masks, theta, selection and penalty."""
    for keywords in ({"target": 0.4, "horizon": 100}, {"penalty": 0.3}):
        one, other = (
            espalier.Search(D, cost=torch.from_numpy(WEIGHTS * unit), batch=(3,), **keywords) for unit in (1.0, 1e6)
        )
        for _ in range(100):
            masks = one.ask()
            assert torch.equal(other.ask(), masks)
            for search in (one, other):
                search.tell(masks, -(masks @ WORTH))
        torch.testing.assert_close(one.theta, other.theta, rtol=0, atol=1e-9)
        torch.testing.assert_close(one.penalty, other.penalty, rtol=1e-6, atol=1e-9)
        assert torch.equal(one.select(), other.select())


def test_the_ramp_is_as_long_as_asked():
    search = espalier.Search(40, target=0.2, horizon=400, ramp=0.25, batch=(8,))
    for _ in range(100):
        masks = search.ask()
        search.tell(masks, torch.randn(masks.shape[:-1], generator=torch.Generator().manual_seed(0)))
    assert (search.expected_cost() / search.full_cost).tolist() == pytest.approx([0.2] * 8, abs=0.01)


def test_the_target_works_for_products_and_choices():
    """Three layers whose widths multiply, and a choice of kernel: the target is met in weights.

    The likeliest mask within it may leave much of the target unused, where only a rarer option would fill it.
    """
    space = espalier.Space([espalier.Bits(f"l{i}", 16, least=1) for i in range(3)] + [espalier.Choice("kernel", 3)])
    layers = [espalier.Form.run(16 * i, 16 * i + 16) for i in range(3)]
    kernel = espalier.Form.of([0.0] * 48 + [1.0, 9.0, 25.0])
    cost = espalier.Cost.product([layers[0], layers[1], kernel], d=51) + espalier.Cost.product(layers[1:], d=51)
    targets = torch.tensor([0.02, 0.1, 0.4, 0.9])
    search = espalier.Search(space, cost=cost, target=targets, horizon=800, batch=(4,))
    for _ in range(800):
        masks = search.ask()
        search.tell(masks, -masks[..., :48:2].sum(-1) - masks[..., 49])
    chosen = search.select()
    assert bool((search.usage() <= targets).all())
    assert bool((chosen[:, :48].reshape(4, 3, 16).sum(-1) >= 1).all())
    for mask, target in zip(chosen, targets):
        wider = torch.maximum(mask, torch.eye(51)[:48])[mask[:48] == 0]  # (closed, 51): one more gate each
        assert bool((cost.over(space)(wider) > target * search.full_cost).all())
    expected = search.expected_cost() / search.full_cost
    assert expected[1:].tolist() == pytest.approx(targets[1:].tolist(), abs=0.03)
