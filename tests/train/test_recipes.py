"""Recipes: the paper's numbers exactly, theta's rate by the length of the search, and settling against the ramp."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.space import BadInput, BadType, Space
from espalier.train import Recipe
from espalier.train.descent import of_torch
from espalier.train.recipes import PRESETS, Phases, chosen, ramped, read, settled


def test_the_paper_is_the_paper() -> None:
    """Its experiment A, with theta at one over the degrees of freedom whatever the length, and cost as it is."""
    for updates in (10, 937_500):
        phases = read("paper").phases(updates, None)
        assert phases == Phases(0, updates // 2, updates, updates)
        found = read("paper").search_arguments(Space.of(2352), phases)
        assert found == {
            "learning_rate": 1 / 2352,
            "initial": 0.5,
            "adaptive": False,
            "signal": "ranked",
            "ramp": 0.5,
            "even": 0.0,
        }
    paper = read("paper")
    assert (paper.weights_learning_rate, paper.momentum, paper.weight_decay, paper.drops) == (
        0.01,
        0.9,
        1e-4,
        (0.5, 0.75),
    )
    assert paper.settle == 0.0


def test_the_rate_of_theta_is_a_way_over_the_updates_within_bounds() -> None:
    recipe, space = Recipe(), Space.of(200)
    assert read("ranked") == recipe
    short, middle, long = (recipe.step_of_theta(space, updates) for updates in (20, 2000, 10**6))
    assert short == recipe.theta_cap
    assert middle == pytest.approx(recipe.theta_way / 2000)
    assert long == pytest.approx(1 / 200)
    assert recipe.step_of_theta(Space.of(50), 2000) == pytest.approx(middle)  # the number of gates does not count
    assert Recipe(adaptive=True, theta_rate=1.5).step_of_theta(space, 2000) == 1.5
    assert Recipe(theta_rate=8.0, theta_way=0.0).step_of_theta(space, 2000) == pytest.approx(0.04)


@pytest.mark.parametrize("name", ["default", "ranked"])
def test_the_default_settles_as_its_ramp_ends(name: str) -> None:
    recipe = read(name)
    assert recipe.begin + recipe.ramp + recipe.settle == 1
    phases = recipe.phases(100_000, 0.5)
    assert phases.begin == round(100_000 * recipe.begin)
    assert phases.begin + phases.ramp == phases.settle == 50_000


def test_a_straight_line_is_the_same_for_fit_and_sweep() -> None:
    """Up over the first twentieth, then down to nothing; stepped by torch, or computed where the counter lives."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = of_torch(read("default").schedule, optimizer, 200)
    rates = []
    for update in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        assert rates[-1] == pytest.approx(2.0 * min((update + 1) / 11, (200 - update) / 190))
        optimizer.step()
        scheduler.step()
    assert rates.index(max(rates)) == 10
    assert max(rates) == pytest.approx(2.0)
    assert rates[105] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.02


@pytest.mark.parametrize(("share", "ramp"), [(0.8, 0.2), (0.5, 0.5), (0.1, 0.5), (0.0, 0.5), (None, 0.5)])
def test_an_explicit_settle_ends_the_ramp(share: float | None, ramp: float) -> None:
    found = settled(Recipe(ramp=0.5, settle=0.25, begin=0.0), share)
    assert found.ramp == pytest.approx(ramp)
    assert found.settle == (0.25 if share is None else share)
    assert found.phases(1000, 0.5).settle >= round(1000 * found.ramp)


@pytest.mark.parametrize(
    ("recipe", "updates", "phases"),
    [
        (PRESETS["finetune"], 1000, Phases(0, 100, 100, 1000)),
        (PRESETS["finetune"], 100, Phases(0, 20, 20, 100)),
        (PRESETS["finetune"], 30, Phases(0, 15, 15, 30)),
        (PRESETS["finetune"], 1, Phases(0, 1, 1, 1)),
        (PRESETS["default"], 30, Phases(3, 12, 15, 30)),
        (Recipe(begin=0.0, ramp=0.1, ramp_updates=0, settle=0.9), 100, Phases(0, 10, 10, 100)),
    ],
)
def test_a_short_run_that_begins_to_search_at_once_by_slopes_settles_later(recipe, updates, phases) -> None:
    assert recipe.phases(updates, 0.5) == phases


@pytest.mark.parametrize(("share", "begin"), [(0.1, 0.35), (0.15, 0.35), (0.3, 0.2), (0.5, 0.0), (0.8, 0.0)])
def test_an_explicit_ramp_lets_the_search_begin_earlier(share: float, begin: float) -> None:
    found = ramped(Recipe(begin=0.35, ramp=0.15, settle=0.5), share)
    assert (found.ramp, found.settle) == (share, 0.5)
    assert found.begin == pytest.approx(begin)
    assert ramped(read("paper"), share).begin == 0


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"ramp": 0.0}, r"ramp of a recipe is a share of the run in \(0, 1\]"),
        ({"ramp": 1.01}, "ramp of a recipe"),
        ({"settle": 1.0}, r"settle of a recipe is a share of the run in \[0, 1\)"),
        ({"begin": 1.0}, r"begin of a recipe is a share of the run in \[0, 1\)"),
        ({"initial": 1.5}, r"initial of a recipe is in \[0, 1\]"),
        ({"even": 2}, r"even of a recipe is in \[0, 1\]"),
        ({"theta_way": -1.0}, "theta_way of a recipe is a finite number"),
        ({"theta_rate": math.nan}, "theta_rate of a recipe is a finite number"),
        ({"drops": (0.5, 1.0)}, "drops of a recipe"),
    ],
)
def test_numbers_that_no_recipe_has(numbers: dict[str, float], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Recipe(**numbers)  # type: ignore[arg-type]


def test_what_settle_is_not() -> None:
    for share, kind in ((1.0, BadInput), (-0.1, BadInput), ("half", BadType), (True, BadType)):
        with pytest.raises(kind, match="settle is a share of the run"):
            settled(Recipe(), share)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"use settle of at most 0\.2, or a recipe with a shorter ramp$"):
        Recipe(ramp=0.8, settle=0.5, begin=0.0).phases(100, 0.5)
    with pytest.raises(BadInput, match=r"at most 0\.4, or a recipe with a shorter ramp or that begins earlier$"):
        Recipe(ramp=0.4, settle=0.5, begin=0.2).phases(100, 0.5)
    with pytest.raises(BadInput, match=r"ends; use a recipe with a shorter ramp or that begins earlier$"):
        Recipe(ramp=0.8, settle=0.5, begin=0.3).phases(100, 0.5)
    assert Recipe(ramp=0.8, settle=0.5, begin=0.0).phases(100, None).settle == 50  # without a target there is no ramp
    assert set(PRESETS) == {"default", "ranked", "paper", "finetune"}


@given(
    updates=st.integers(1, 400), begin=st.floats(0, 0.99), ramp=st.floats(0.01, 1), settle=st.floats(0, 0.99),
    target=st.sampled_from([None, 0.3]), least=st.sampled_from([0, 40, 1000]),
)  # fmt: skip
def test_the_phases_of_a_run(
    updates: int, begin: float, ramp: float, settle: float, target: float | None, least: int
) -> None:
    """One after another, a search between them, and a ramp that ends in it."""
    recipe = Recipe(begin=begin, ramp=ramp, settle=settle, ramp_updates=least)
    if begin + settle >= 1 or (target is not None and begin + ramp + settle > 1 + 1e-9):
        with pytest.raises(BadInput, match="settle"):
            recipe.phases(updates, target)
        return
    phases = recipe.phases(updates, target)
    assert 0 <= phases.begin < phases.end == updates
    assert phases.begin <= phases.settle <= updates
    assert phases.begin <= begin * updates + 1
    if ramp * updates >= least:
        assert abs(phases.begin - begin * updates) <= 1
    else:  # what the ramp takes, the whole network loses
        assert phases.begin <= 1 or phases.ramp >= min(least, updates - phases.begin) - 1
        assert abs(phases.begin + phases.ramp - min((begin + ramp) * updates, updates)) <= 2
    if target is None:
        return
    found = recipe.search_arguments(Space.of(5), phases, target)
    assert found["horizon"] == updates - phases.begin
    last = phases.begin + max(round(found["ramp"] * found["horizon"]), 1)
    assert last <= max(phases.settle, phases.begin + 1)
    assert last == phases.begin + phases.ramp


@given(begin=st.floats(0, 0.9), ramp=st.floats(0.01, 1), share=st.floats(0, 0.99))
def test_any_settle_leaves_room_for_what_comes_before(begin: float, ramp: float, share: float) -> None:
    found = settled(Recipe(begin=begin, ramp=ramp, settle=0.0), share)
    assert found.begin + found.ramp + found.settle <= 1 + 1e-9
    assert found.begin * ramp == pytest.approx(found.ramp * begin)  # shortened alike


def test_a_run_with_a_penalty_has_the_paper_s_signal() -> None:
    assert chosen(None, None, penalised=True) == PRESETS["ranked"]
    assert chosen(None, None, penalised=False) == PRESETS["default"]
