"""A knapsack: the penalty as the price of weight, the target as the capacity, against the exact optimum."""

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
    used = []
    for penalty in (0.1, 0.4, 0.8, 1.6):
        search = pack(1500, penalty=penalty, adaptive=adaptive)
        used.append(search.usage().median().item())
        assert np.median(quality(search)) >= 0.97
    assert used == sorted(used, reverse=True)
    assert used[0] >= 0.9
    assert used[-1] <= 0.15
    assert all(a - b >= 0.1 for a, b in zip(used, used[1:]))  # noqa: RUF007


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
def test_the_target_is_a_capacity(target, adaptive):
    """Never above it, nearly as good as the exact optimum; with permuted losses far from it."""
    capacity = int(np.floor(target * WEIGHTS.sum() + 1e-9))
    keywords = {"target": target, "horizon": 1500, "adaptive": adaptive}
    values = {}
    for permuted in (False, True):
        search = pack(1500, permuted=permuted, **keywords)
        chosen = search.select().double().numpy()
        assert (chosen @ WEIGHTS <= capacity).all()
        closed = np.where(chosen == 0, WEIGHTS, np.inf).min(-1)
        assert (chosen @ WEIGHTS + closed > capacity).all()
        values[permuted] = chosen @ VALUES / optimum(capacity)
    assert np.median(values[False]) >= 0.93
    assert values[False].min() >= 0.8
    assert np.median(values[True]) <= 0.85


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("target", [0.1, 0.3, 0.9])
def test_the_expected_cost_follows_its_ramp_and_stays(target, adaptive):
    """From where it starts to the target in half of the horizon, in every run, whatever the losses say."""
    search = espalier.Search(40, target=target, horizon=600, batch=(30,), adaptive=adaptive)
    allowed = 0.06 if adaptive else 0.005
    for update in range(1, 601):
        masks = search.ask()
        search.tell(masks, -masks[..., :10].sum(-1))
        wanted = 0.5 + (target - 0.5) * min(update / 300, 1.0)
        assert (search.expected_cost() / search.full_cost - wanted).abs().max().item() <= allowed
    assert search.usage().tolist() == pytest.approx([target] * 30)
    helpful = search.select()[:, :10].sum(-1)
    assert (helpful >= 0.9 * min(10, 40 * target)).double().mean().item() >= 0.9


def test_the_ramp_is_as_long_as_asked():
    search = espalier.Search(40, target=0.2, horizon=400, ramp=0.25, batch=(8,))
    for _ in range(100):
        masks = search.ask()
        search.tell(masks, torch.randn(masks.shape[:-1], generator=torch.Generator().manual_seed(0)))
    assert (search.expected_cost() / search.full_cost).tolist() == pytest.approx([0.2] * 8, abs=0.01)


def test_the_target_works_for_products_and_choices():
    """Three layers whose widths multiply, and a choice of kernel: the target is met in weights."""
    space = espalier.Space([espalier.Bits(f"l{i}", 16, least=1) for i in range(3)] + [espalier.Choice("kernel", 3)])
    layers = [espalier.Form.run(16 * i, 16 * i + 16) for i in range(3)]
    kernel = espalier.Form.of([0.0] * 48 + [1.0, 9.0, 25.0])
    cost = espalier.Cost.product([layers[0], layers[1], kernel], d=51) + espalier.Cost.product(layers[1:], d=51)
    targets = torch.tensor([0.02, 0.1, 0.4, 0.9])
    search = espalier.Search(space, cost=cost, target=targets, horizon=800, batch=(4,))
    for _ in range(800):
        masks = search.ask()
        search.tell(masks, -masks[..., :48:2].sum(-1) - masks[..., 49])
    usage = search.usage()
    assert bool((usage <= targets).all())
    assert bool((usage >= 0.8 * targets).all())
    expected = search.expected_cost() / search.full_cost
    assert expected[1:].tolist() == pytest.approx(targets[1:].tolist(), abs=0.03)
