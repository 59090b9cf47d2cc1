"""State: exact round trips, through files too, and what a state of something else does."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import espalier

SPACE = espalier.Space([espalier.Bits("a", 5), espalier.Choice("b", 3), espalier.Bits("c", 2, least=1)])
COST = torch.arange(1.0, 11.0)
KINDS = {
    "plain": {"penalty": 0.2},
    "free": {},
    "target": {"target": 0.6, "horizon": 80},
    "adaptive": {"adaptive": True, "penalty": 0.1},
    "batch": {"batch": (3,), "penalty": [0.0, 0.1, -0.1]},
    "batch target": {"batch": (2,), "target": [0.4, 0.8], "horizon": 80, "adaptive": True},
    "ramp": {"target": 0.6, "horizon": 80, "ramp": lambda progress: progress**2},
    "widths": {"target": 0.6, "horizon": 80, "cost": espalier.Cost.of_widths(SPACE, {"a": [0, 1, 1, 3, 3, 4]})},
}


def fresh(kind, seed=0):
    return espalier.Search(SPACE, seed=seed, samples=3, **{"cost": COST} | KINDS[kind])


def run(search, updates):
    """Everything that can be seen of some updates, under a loss that the masks decide."""
    seen = []
    for _ in range(updates):
        masks = search.ask()
        search.tell(masks, (masks * torch.linspace(-1, 1, 10)).sum(-1))
        seen += [masks, search.theta.clone(), search.penalty.clone(), search.select()]
    return seen


def same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        if isinstance(one[name], torch.Tensor):
            assert torch.equal(one[name], two[name]), name
        else:
            assert one[name] == two[name], name


def through_files(state, folder):
    """Tensors in safetensors, the rest in JSON: nothing else may be in a state (law 9)."""
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in state.items() if name not in tensors}
    save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(rest), encoding="utf-8")
    return {**load_file(folder / "state.safetensors"), **json.loads((folder / "state.json").read_text("utf-8"))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_goes_on_identically(kind, tmp_path):
    search = fresh(kind)
    run(search, 25)
    state = search.state_dict()
    stored = through_files(state, tmp_path)
    same(state, stored)
    expected = run(search, 40)
    for where in (state, stored):
        resumed = fresh(kind, seed=99)
        resumed.load_state_dict(where)
        same(resumed.state_dict(), state)
        for one, two in zip(expected, run(resumed, 40), strict=True):
            assert torch.equal(one, two)
    rewound = search
    rewound.load_state_dict(state)
    for one, two in zip(expected, run(rewound, 40), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_between_ask_and_tell(kind):
    """The masks are out when the state is taken: their losses may be told to the resumed search."""
    search, resumed = fresh(kind), fresh(kind)
    run(search, 5)
    masks = search.ask()
    resumed.load_state_dict(search.state_dict())
    losses = masks.sum(-1)
    search.tell(masks, losses)
    resumed.tell(masks.clone(), losses)
    assert torch.equal(search.theta, resumed.theta)
    assert torch.equal(search.ask(), resumed.ask())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_a_snapshot(kind):
    search = fresh(kind)
    state = search.state_dict()
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    run(search, 10)
    same(state, before)
    loaded = fresh(kind)
    loaded.load_state_dict(state)
    run(loaded, 10)
    same(state, before)


@pytest.mark.parametrize("kind", KINDS)
def test_settled_is_part_of_the_state(kind):
    search, resumed = fresh(kind), fresh(kind)
    run(search, 30)
    search.settle()
    resumed.load_state_dict(search.state_dict())
    assert torch.equal(resumed.ask(), search.ask())
    assert torch.equal(resumed.select(), search.select())
    resumed.load_state_dict(fresh(kind).state_dict())
    assert not torch.equal(resumed.ask(), search.ask())


def test_diverged_is_part_of_the_state():
    search, resumed = fresh("batch"), fresh("batch")
    search.tell(search.ask(), torch.tensor([[0.0, 1, 2], [math.nan, math.nan, math.inf], [0, 1, 2]]))
    resumed.load_state_dict(search.state_dict())
    assert resumed.diverged.tolist() == [False, True, False]
    assert resumed.updates.tolist() == [1, 0, 1]


def test_a_penalty_comes_back_in_force():
    """What `penalty` says after a load is what the next update uses."""
    search, resumed = espalier.Search(5, penalty=0.3), espalier.Search(5)
    resumed.load_state_dict(search.state_dict())
    masks, losses = search.ask(), torch.tensor([0.0, 1.0])
    search.tell(masks, losses)
    resumed.tell(masks, losses)
    if resumed.penalty.item() == search.penalty.item():
        assert torch.equal(search.theta, resumed.theta)
    else:
        assert resumed.penalty.item() == 0.0


def test_same_seed_same_masks_and_another_seed_others():
    one, two, three = (espalier.Search(40, seed=seed) for seed in (7, 7, 8))
    torch.manual_seed(0)
    first = [one.ask() for _ in range(3)]
    torch.manual_seed(1)
    torch.rand(10)
    assert all(torch.equal(a, two.ask()) for a in first)
    assert not torch.equal(first[0], three.ask())


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    search = fresh("target")
    run(search, 5)
    search.state_dict()
    assert torch.equal(torch.rand(4), expected)


def other_states():
    good = fresh("plain").state_dict()
    yield "another space", espalier.Search(10, cost=COST, samples=3, penalty=0.2).state_dict(), ValueError
    yield "fewer entries", espalier.Search(9).state_dict(), ValueError
    yield (
        "another batch",
        espalier.Search(SPACE, cost=COST, penalty=0.2, batch=(2,)).state_dict(),
        ValueError,
    )
    yield "adaptive", fresh("adaptive").state_dict(), ValueError
    yield "empty", {}, ValueError
    yield "without theta", {k: v for k, v in good.items() if k != "theta"}, ValueError
    yield "with more", {**good, "extra": torch.zeros(1)}, ValueError
    yield "float32 theta", {**good, "theta": good["theta"].float()}, ValueError
    yield "a list for theta", {**good, "theta": good["theta"].tolist()}, ValueError
    yield "short theta", {**good, "theta": good["theta"][:4]}, ValueError
    yield "theta not finite", {**good, "theta": good["theta"] * math.nan}, ValueError
    yield "theta above one", {**good, "theta": good["theta"] + 1}, ValueError
    yield "an impossible generator", {**good, "generator": torch.zeros_like(good["generator"])}, ValueError
    yield "a cut generator", {**good, "generator": good["generator"][:100]}, ValueError
    yield "not a mapping", [1, 2], TypeError
    yield "nothing", None, TypeError


@pytest.mark.parametrize(("state", "kind"), [pytest.param(s, k, id=i) for i, s, k in other_states()])
def test_a_state_of_something_else_is_refused_whole(state, kind):
    search = fresh("plain")
    run(search, 3)
    before = search.state_dict()
    with pytest.raises(kind) as caught:
        search.load_state_dict(state)
    assert isinstance(caught.value, espalier.EspalierError)
    assert str(caught.value)
    same(search.state_dict(), before)
    np.testing.assert_array_equal(search.theta.numpy(), before["theta"].numpy())


def test_a_search_travels_to_another_process_between_ask_and_tell():
    search = espalier.Search(6, penalty=0.1, batch=(2,), seed=3)
    masks = search.ask()
    copy = pickle.loads(pickle.dumps(search))  # noqa: S301 - our own bytes, as multiprocessing sends them
    losses = masks.sum(-1)
    search.tell(masks, losses)
    copy.tell(masks, losses)
    assert torch.equal(copy.theta, search.theta)
    assert torch.equal(copy.ask(), search.ask())


def test_a_tightened_budget_is_part_of_the_state():
    limits = {"other": (espalier.Cost.linear(COST.flip(0)), 0.8)}
    kept, resumed = (espalier.Search(10, cost=COST, target=0.6, limits=limits, horizon=80) for _ in range(2))
    kept.load_state_dict(kept.state_dict() | {"theta": torch.linspace(0.2, 0.8, 10, dtype=torch.float64)})
    before = kept.select()
    assert kept.tighten("target", 0.5)
    assert kept.tighten("other", 0.5)
    assert not torch.equal(kept.select(), before)
    state = kept.state_dict()
    resumed.load_state_dict(state)
    assert torch.equal(resumed.select(), kept.select())
    old = {name: value for name, value in state.items() if name != "tightened"}  # states once had none
    resumed.load_state_dict(old)
    assert torch.equal(resumed.select(), before)


@pytest.mark.parametrize(("name", "value"), [("updates", -1), ("tightened", 0.0), ("tightened", float("nan"))])
def test_an_altered_state_is_refused(name, value):
    search = fresh("target")
    state = search.state_dict()
    before = search.state_dict()
    with pytest.raises(espalier.Corrupt, match=name):
        search.load_state_dict(state | {name: torch.full_like(state[name], value)})
    same(search.state_dict(), before)
