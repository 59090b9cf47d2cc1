"""The ramp as a function of progress: a straight one is the share, others are followed, bad ones are refused."""

import math

import pytest
import torch

import espalier


def run(search, updates=400):
    """The expected share of the cost after each update."""
    shares = []
    for _ in range(updates):
        masks = search.ask()
        search.tell(masks, -masks[..., :5].sum(-1))
        shares.append(search.expected_cost() / search.full_cost)
    return torch.stack(shares)


def test_a_straight_function_is_the_share():
    keywords = {"target": 0.3, "horizon": 400, "initial": 0.8, "seed": 2}
    by_share, by_function = (
        espalier.Search(40, ramp=ramp, **keywords) for ramp in (0.25, lambda progress: min(progress / 0.25, 1.0))
    )
    assert torch.allclose(run(by_share), run(by_function), rtol=1e-12)
    assert by_share.state_dict().keys() == by_function.state_dict().keys()


def cosine(progress):
    return (1 - math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_another_ramp_is_followed_by_every_run(batch):
    search = espalier.Search(200, target=0.2, horizon=400, initial=0.8, ramp=cosine, batch=batch)
    shares = run(search)
    wanted = torch.tensor([0.8 - 0.6 * cosine(update / 400) for update in range(1, 401)], dtype=torch.float64)
    assert (shares - wanted.reshape(-1, *(1 for _ in batch))).abs().max() < 0.02


def test_one_value_for_each_run():
    def early_and_late(progress):
        return [progress**0.5, progress**2]

    search = espalier.Search(200, target=[0.2, 0.4], horizon=400, initial=0.8, ramp=early_and_late, batch=(2,))
    shares = run(search)
    assert shares[99].tolist() == pytest.approx([0.8 - 0.6 * 0.5, 0.8 - 0.4 / 16], abs=0.02)
    assert shares[-1].tolist() == pytest.approx([0.2, 0.4], abs=0.01)


def test_after_the_horizon_it_stays():
    search = espalier.Search(50, target=0.4, horizon=100, initial=0.9, ramp=cosine)
    assert run(search, 150)[-1].item() == pytest.approx(0.4, abs=0.01)


def test_resumed_with_the_same_function():
    keywords = {"target": 0.3, "horizon": 100, "ramp": cosine, "seed": 1}
    whole, first, second = (espalier.Search(30, **keywords) for _ in range(3))
    run(whole, 100)
    run(first, 40)
    second.load_state_dict(first.state_dict())
    run(second, 60)
    assert torch.equal(whole.theta, second.theta)


def test_in_a_compiled_update():
    search, plain = (espalier.Search(30, target=0.3, horizon=50, ramp=cosine, seed=1) for _ in range(2))
    search._learn = torch.compile(search._update, fullgraph=True, dynamic=False, backend="eager")
    assert torch.allclose(run(search, 50), run(plain, 50), rtol=1e-12)


@pytest.mark.parametrize(
    ("ramp", "words"),
    [
        (lambda progress: progress / 2, ["from 0 to 0.5"]),
        (lambda progress: 1.0, ["from 1 to 1"]),
        (lambda progress: 1.5 * progress if progress < 0.9 else progress, ["never falls", "0.8"]),
        (lambda progress: float("nan") if progress == 0.5 else progress, ["not finite"]),
        (lambda progress: [progress, progress], ["shape of the batch"]),
        (lambda progress: "half", ["ramp is a number"]),
        ("half", ["share of the horizon or a function"]),
        (0.0, ["(0, 1]"]),
    ],
)
def test_refused_by_name(ramp, words):
    with pytest.raises(espalier.BadInput) as caught:
        espalier.Search(10, target=0.5, horizon=10, ramp=ramp)
    for word in ["ramp", *words]:
        assert word in str(caught.value)


def test_the_ramp_ends_at_the_target_where_choices_multiply():
    """The least expectation inside the bounds is at other options than those of the cheapest structure."""
    space = espalier.Space([espalier.Choice("a", 2), espalier.Choice("b", 2)])
    one = [espalier.Form.run(i, i + 1) for i in range(4)]
    pairs = {(0, 2): 1.0, (0, 3): 100.0, (1, 2): 1.1, (1, 3): 1.2}
    cost, *others = [espalier.Cost.product([one[i], one[j]], d=4, scale=w) for (i, j), w in pairs.items()]
    search = espalier.Search(space, cost=sum(others, cost), target=0.1, horizon=300, learning_rate=0.05)
    for _ in range(300):
        search.tell(search.ask(), torch.zeros(2))
    a, _, b, _ = search.theta.tolist()
    expected = a * b + 100 * a * (1 - b) + 1.1 * (1 - a) * b + 1.2 * (1 - a) * (1 - b)
    assert abs(expected - 10) < 0.01
