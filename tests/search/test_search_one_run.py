"""The quick update of one run gives what the general one gives, to the last bit."""

import copy

import pytest
import torch
from torch import Tensor

from espalier.cost import Cost, Form
from espalier.search import Search
from espalier.space import Bits, Diverged, Space

SPACE = Space([Bits("a", 7), Bits("b", 5), Bits("c", 12, least=1)])
D = SPACE.d


def pair(start: int, stop: int, other: Form, scale: float = 1.0) -> Cost:
    return Cost.product([Form.run(start, stop), other], d=D, scale=scale)


COSTS = {
    "linear": Cost.linear(torch.arange(1.0, D + 1)),
    "next to nothing": Cost.linear(torch.ones(D).index_fill(0, torch.tensor([2, 9]), 1e-14)),
    "equal": Cost.linear(torch.ones(D)),
    "layers": pair(0, 7, Form.run(7, 12, 3.0) + 2.0) + pair(7, 12, Form.run(12, 24)) + Cost.linear(torch.ones(D)),
    "recurrent": pair(0, 24, Form.run(0, 24, 4.0) + 1.0),  # forms that share entries: cumulants of order two
    "uneven": sum((pair(i, i + 2, Form.run(i + 2, i + 4) + 1.0) for i in range(0, 20, 2)), Cost.linear(torch.ones(D))),
}


def searches(cost: Cost, even: float = 0.5, **given: object) -> tuple[Search, Search]:
    settings: dict = {"target": 0.3, "horizon": 80, "ramp": 0.7, "signal": "slopes", "samples": 1} | given
    quick, general = (
        Search(SPACE, cost=cost, initial=0.9, learning_rate=0.05, even=even, seed=3, **settings) for _ in range(2)
    )
    general._one_run = None
    return quick, general


def told(search: Search, generator: torch.Generator, spoilt: float | None = None, where: str = "slopes") -> None:
    masks = search.ask()
    losses = torch.rand(1, generator=generator)
    slopes = torch.randn(masks.shape, generator=generator) * torch.rand(masks.shape, generator=generator) ** 8
    spreads = None if where == "slopes" else 3 * torch.rand(masks.shape, generator=generator)
    if spoilt is not None:
        (slopes if spreads is None else spreads)[0, 4] = spoilt
    search.tell(masks, losses, slopes, spreads)


def same(one: Search, other: Search) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a if isinstance(a[name], Tensor))


@pytest.mark.parametrize("where", ["slopes", "spreads"])
@pytest.mark.parametrize("even", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", list(COSTS))
def test_theta_is_the_same_to_the_last_bit(name: str, even: float, where: str) -> None:
    quick, general = searches(COSTS[name], even)
    assert quick._one_run is not None
    drawn = [torch.Generator().manual_seed(5) for _ in range(2)]
    for update in range(80):
        steep = 1e6 if update == 40 else None  # beyond what a single worth may count for
        told(quick, drawn[0], steep, where)
        told(general, drawn[1], steep, where)
        same(quick, general)


@pytest.mark.parametrize("where", ["slopes", "spreads"])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_slopes_that_are_not_finite_leave_theta_as_it_was(spoilt: float, where: str) -> None:
    quick, general = searches(COSTS["layers"])
    drawn = [torch.Generator().manual_seed(5) for _ in range(2)]
    for search, generator in zip((quick, general), drawn):
        told(search, generator)
        with pytest.raises(Diverged):
            told(search, generator, spoilt, where)
    same(quick, general)


def test_slopes_of_half_precision_are_read_as_they_are() -> None:
    slopes = torch.randn(1, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    quick, general = searches(COSTS["layers"])
    for search in (quick, general):
        search.tell(search.ask(), torch.ones(1), slopes)
    same(quick, general)


def test_a_copy_moves_its_own_theta() -> None:
    quick, general = searches(COSTS["layers"])
    twin = copy.deepcopy(quick)
    before = quick.state_dict()
    for search in (twin, general):
        told(search, torch.Generator().manual_seed(5))
    same(twin, general)
    assert torch.equal(quick.theta, before["theta"])
    assert int(quick.updates) == 0


def test_a_state_goes_on_in_either() -> None:
    quick, general = searches(COSTS["recurrent"])
    for step in range(20):
        told(quick, torch.Generator().manual_seed(step))
    general.load_state_dict(quick.state_dict())
    fresh, _ = searches(COSTS["recurrent"])
    fresh.load_state_dict(quick.state_dict())
    for step in range(20):
        for search in (quick, general, fresh):
            told(search, torch.Generator().manual_seed(step))
    same(quick, general)
    same(quick, fresh)


@pytest.mark.parametrize(
    "given", [{"samples": 2}, {"signal": "first-order"}, {"adaptive": True}, {"ramp": lambda share: share}]
)
def test_what_it_does_not_know_takes_the_general_update(given: dict) -> None:
    assert searches(COSTS["layers"], **given)[0]._one_run is None
