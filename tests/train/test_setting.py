"""A setting is defined once: what its flag takes, what it refuses, and numbers as the paper writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.space import BadInput
from espalier.train.setting import check, declared, number, setting, share, text


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-60, 60).map(lambda k: -(2.0**k)))
def test_a_number_is_read_as_it_is_written(value):
    assert number(text(value)) == value


@pytest.mark.parametrize(("word", "value"), [("25%", 0.25), ("2^-2", 0.25), ("1", 1.0)])
def test_shares(word, value):
    assert share(word, "--target") == value


@dataclass(frozen=True)
class Tree:
    height: float = setting(1.0, "In metres.", least=0, recorded="always")
    kind: str = setting("", "Of the tree.", choices=("apple", "pear"))
    years: int | None = setting(None, "Its age.", least=1)


@dataclass(frozen=True)
class Bush(Tree):
    branches: int = setting(3, "Of the bush.", least=2, after="height")
    kind: str = "pear"
    height: float = setting(0.5, "In feet.")


def test_a_class_below_changes_a_default_and_keeps_the_rest():
    settings = {one.name: one for one in declared(Bush)}
    assert list(settings) == ["height", "branches", "kind", "years"]
    height = settings["height"]
    assert (height.default, height.help, height.least, height.recorded) == (0.5, "In feet.", 0, "always")
    assert (settings["kind"].default, settings["kind"].help) == ("pear", "Of the tree.")
    assert declared(Tree)[0].help == "In metres."


def test_a_setting_stands_after_the_one_above_it_in_its_class():
    @dataclass(frozen=True)
    class Hedge(Tree):
        kind: str = "pear"
        gaps: int = setting(0, "Between the trees.")
        paths: int = setting(0, "Through it.")
        height: float = 0.5
        roots: int = setting(1, "Of a tree.")

    assert [one.name for one in declared(Hedge)] == ["height", "roots", "kind", "gaps", "paths", "years"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"height": -1.0}, "height is a finite number from 0 up, not -1.0"),
        ({"height": math.nan}, "height is a finite number from 0 up, not nan"),
        ({"height": math.inf}, "height is a finite number from 0 up, not inf"),
        ({"kind": "aple"}, "kind is 'apple' or 'pear', not 'aple'; did you mean 'apple'?"),
        ({"years": 0}, "years is at least 1, not 0"),
        ({"branches": 1}, "branches is at least 2, not 1"),
    ],
)
def test_what_is_out_of_bounds_is_named(values, said):
    with pytest.raises(BadInput) as caught:
        check(Bush(**values))
    assert str(caught.value) == said
    check(Bush())
