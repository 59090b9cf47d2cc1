"""Recipes: the paper's numbers exactly, theta's rate by the length of the search, and settling against the ramp."""

from __future__ import annotations

import math

import pytest

from espalier.search.arguments import ramp_length
from espalier.space import BadInput, BadType, Space
from espalier.train import Recipe
from espalier.train.presets import PRESETS, read, settle_update, settled


def test_the_paper_is_the_paper() -> None:
    """Its experiment A, with theta at one over the degrees of freedom whatever the length, and cost as it is."""
    for updates in (10, 937_500):
        found = read("paper").search_arguments(Space.of(2352), updates)
        assert found == {"learning_rate": 1 / 2352, "initial": 0.5, "adaptive": False, "ramp": 0.5, "even": 0.0}
    paper = read("paper")
    assert (paper.learning_rate, paper.momentum, paper.weight_decay, paper.drops) == (0.01, 0.9, 1e-4, (0.5, 0.75))
    assert paper.settle == 0.0


def test_the_rate_of_theta_is_a_way_over_the_updates_within_bounds() -> None:
    recipe, space = Recipe(), Space.of(200)
    assert read(None) == recipe
    short, middle, long = (recipe.step_of_theta(space, updates) for updates in (20, 2000, 10**6))
    assert short == recipe.theta_cap
    assert middle == pytest.approx(recipe.theta_way / 2000)
    assert long == pytest.approx(1 / 200)
    assert recipe.step_of_theta(Space.of(50), 2000) == pytest.approx(middle)  # the number of gates does not count
    assert Recipe(adaptive=True, theta_rate=1.5).step_of_theta(space, 2000) == 1.5
    assert Recipe(theta_rate=8.0, theta_way=0.0).step_of_theta(space, 2000) == pytest.approx(0.04)


def test_the_default_settles_as_its_ramp_ends() -> None:
    recipe = Recipe()
    assert recipe.ramp + recipe.settle == 1
    assert settle_update(recipe, 1000, 0.5) == 500


@pytest.mark.parametrize(("share", "ramp"), [(0.8, 0.2), (0.5, 0.5), (0.1, 0.5), (0.0, 0.5), (None, 0.5)])
def test_an_explicit_settle_ends_the_ramp(share: float | None, ramp: float) -> None:
    found = settled(Recipe(ramp=0.5, settle=0.25), share)
    assert found.ramp == pytest.approx(ramp)
    assert found.settle == (0.25 if share is None else share)
    assert settle_update(found, 1000, 0.5) >= round(1000 * found.ramp)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"ramp": 0.0}, r"ramp of a recipe is a share of the run in \(0, 1\]"),
        ({"ramp": 1.01}, "ramp of a recipe"),
        ({"settle": 1.0}, r"settle of a recipe is a share of the run in \[0, 1\)"),
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
    with pytest.raises(BadInput, match=r"use settle of at most 0\.2"):
        settle_update(Recipe(ramp=0.8, settle=0.5), 100, 0.5)
    assert settle_update(Recipe(ramp=0.8, settle=0.5), 100, None) == 50  # without a target there is no ramp
    assert set(PRESETS) == {"default", "paper", "finetune"}


@pytest.mark.parametrize("updates", range(1, 30))
def test_the_ramp_ends_before_the_structure_settles(updates: int) -> None:
    recipe = Recipe()
    assert settle_update(recipe, updates, 0.3) >= ramp_length(updates, recipe.ramp)
