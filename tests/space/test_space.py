"""The space: its layout, its JSON, and what it refuses."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from espalier import BadInput, BadMask, Bits, Choice, EspalierError, Space

names = st.text(min_size=1, max_size=8)
groups = st.one_of(
    st.tuples(names, st.integers(1, 9), st.integers(0, 9)).map(lambda t: Bits(t[0], t[1], min(t[2], t[1]))),
    st.tuples(names, st.integers(2, 6)).map(lambda t: Choice(*t)),
)
spaces = st.lists(groups, min_size=1, max_size=6, unique_by=lambda g: g.name).map(Space)


def test_the_layout_by_hand():
    space = Space([Bits("a", 3), Choice("b", 4), Bits("c", 2, least=1), Choice("d", 2)])
    assert (space.d, space.n, space.freedom) == (11, 7, 9)
    assert [(g.name, where.start, where.stop) for g, where in space.bits] == [("a", 0, 3), ("c", 7, 9)]
    assert [(g.name, where.start, where.stop) for g, where in space.choices] == [("b", 3, 7), ("d", 9, 11)]
    assert not space.is_bits
    assert Space.of(5) == Space([Bits("bits", 5)])
    assert Space.of(space) is space


@settings(max_examples=100, deadline=None, derandomize=True)
@given(spaces)
def test_the_layout_covers_every_entry_once_and_survives_json(space):
    covered = [i for where in space.slices.values() for i in range(where.start, where.stop)]
    assert covered == list(range(space.d))
    back = Space.from_json(space.to_json())
    assert back == space
    assert hash(back) == hash(space)
    assert back.to_json() == space.to_json()
    assert back.slices == space.slices


def test_least_and_kind_tell_spaces_apart():
    one = Space([Bits("a", 2)])
    for other in (Space([Bits("a", 2, least=1)]), Space([Choice("a", 2)]), Space([Bits("b", 2)]), "a"):
        assert one != other


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: Space([]), ValueError, "empty"),
        (lambda: Space.of(0), ValueError, "0 bits"),
        (lambda: Space.of(-3), ValueError, "-3 bits"),
        (lambda: Space.of(2.0), TypeError, "2.0"),
        (lambda: Space.of(True), TypeError, "True"),
        (lambda: Space.of("x"), TypeError, "'x'"),
        (lambda: Space([Bits("a", 1), Choice("a", 2)]), ValueError, "'a'"),
        (lambda: Space([3]), TypeError, "3"),
        (lambda: Bits("a", 0), ValueError, "0"),
        (lambda: Bits("", 1), ValueError, "empty"),
        (lambda: Bits(7, 1), TypeError, "7"),
        (lambda: Bits("a", 1.5), TypeError, "1.5"),
        (lambda: Bits("a", 2, least=3), ValueError, "least=3"),
        (lambda: Bits("a", 2, least=-1), ValueError, "-1"),
        (lambda: Choice("a", 1), ValueError, "1"),
        (lambda: Choice("a", True), TypeError, "True"),
    ],
)
def test_refused(make, kind, says):
    with pytest.raises(kind) as caught:
        make()
    assert isinstance(caught.value, BadInput)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "kind", "says"),
    [
        ([1.0, 0.0, 1.0, 0.0], TypeError, "list"),
        (torch.tensor([1, 0, 1, 0]), TypeError, "int64"),
        (torch.tensor([True, False, True, False]), TypeError, "bool"),
        (torch.tensor([1.0, 0.0, 1.0]), ValueError, "(3,)"),
        (torch.tensor(1.0), ValueError, "()"),
        (torch.tensor([0.5, 0.0, 1.0, 0.0]), ValueError, "0.5"),
        (torch.tensor([2.0, 0.0, 1.0, 0.0]), ValueError, "2.0"),
        (torch.tensor([-1.0, 0.0, 1.0, 0.0]), ValueError, "-1.0"),
        (torch.tensor([float("nan"), 0.0, 1.0, 0.0]), ValueError, "nan"),
        (torch.tensor([1.0, 0.0, 0.0, 0.0]), ValueError, "'act'"),
        (torch.tensor([1.0, 0.0, 1.0, 1.0]), ValueError, "'act'"),
        (torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]]), ValueError, "'act'"),
    ],
)
def test_masks_refused(mask, kind, says):
    space = Space([Bits("fc", 1), Choice("act", 3)])
    with pytest.raises(kind) as caught:
        space.check_mask(mask)
    assert isinstance(caught.value, BadMask)
    assert isinstance(caught.value, EspalierError)
    assert says in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_masks_of_any_batch_and_precision_are_taken(dtype):
    space = Space([Bits("fc", 1), Choice("act", 3)])
    space.check_mask(torch.tensor([[[1, 0, 1, 0], [0, 0, 0, 1]]], dtype=dtype))
    space.check_mask(torch.zeros(0, 4, dtype=dtype))
