"""Bad input: the right kind of error, which names the value and the way out, and nothing has changed."""

import math

import pytest
import torch

import espalier
from espalier import BadInput, BadMask, Bits, Choice, Cost, Diverged, EspalierError, Search, Space, Unreachable

NAN, INF = float("nan"), float("inf")
MIXED = Space([Bits("fc", 3, least=2), Choice("act", 2)])

BUILD = [
    # arguments, keywords, kind of error, what its text names
    ((0,), {}, ValueError, ["0 bits", "at least one"]),
    ((-2,), {}, ValueError, ["-2"]),
    ((2.5,), {}, TypeError, ["2.5", "espalier.Space"]),
    (("ten",), {}, TypeError, ["'ten'"]),
    ((4,), {"samples": 1}, ValueError, ["samples", "at least 2", "1"]),
    ((4,), {"samples": 0}, ValueError, ["samples", "0"]),
    ((4,), {"samples": -3}, ValueError, ["-3"]),
    ((4,), {"samples": 2.0}, TypeError, ["samples", "2.0"]),
    ((4,), {"samples": True}, TypeError, ["samples", "True"]),
    ((4,), {"penalty": 0.1, "target": 0.5, "horizon": 10}, ValueError, ["penalty", "target", "0.1", "0.5"]),
    ((4,), {"penalty": 0.0, "target": 0.5, "horizon": 10}, ValueError, ["exclude"]),
    ((4,), {"target": 0.5}, ValueError, ["0.5", "horizon"]),
    ((4,), {"target": 0.0, "horizon": 10}, ValueError, ["target", "0.0", "(0, 1]"]),
    ((4,), {"target": -0.25, "horizon": 10}, ValueError, ["-0.25", "(0, 1]"]),
    ((4,), {"target": 1.5, "horizon": 10}, ValueError, ["1.5", "(0, 1]"]),
    ((4,), {"target": NAN, "horizon": 10}, ValueError, ["target", "nan"]),
    ((4,), {"target": [0.5, 2.0], "horizon": 10, "batch": (2,)}, ValueError, ["2.0"]),
    ((4,), {"target": "half", "horizon": 10}, TypeError, ["'half'"]),
    ((4,), {"target": 0.5, "horizon": 0}, ValueError, ["horizon", "0"]),
    ((4,), {"target": 0.5, "horizon": -5}, ValueError, ["horizon", "-5"]),
    ((4,), {"target": 0.5, "horizon": 1e3}, TypeError, ["horizon", "1000.0"]),
    ((4,), {"target": 0.5, "horizon": 10, "ramp": 0.0}, ValueError, ["ramp", "0.0"]),
    ((4,), {"target": 0.5, "horizon": 10, "ramp": 1.5}, ValueError, ["ramp", "1.5"]),
    ((4,), {"ramp": 0.0}, ValueError, ["ramp", "0.0"]),
    ((4,), {"penalty": 0.1, "ramp": "half"}, TypeError, ["ramp", "'half'"]),
    ((4,), {"adaptive": "yes"}, TypeError, ["adaptive", "'yes'"]),
    ((4,), {"adaptive": None}, TypeError, ["adaptive", "None"]),
    ((4,), {"penalty": NAN}, ValueError, ["penalty", "nan"]),
    ((4,), {"penalty": INF}, ValueError, ["penalty", "inf"]),
    ((4,), {"penalty": "much"}, TypeError, ["penalty", "'much'"]),
    ((4,), {"penalty": [0.1, 0.2]}, ValueError, ["penalty", "(2,)"]),
    ((4,), {"penalty": torch.zeros(3), "batch": (2,)}, ValueError, ["penalty", "(3,)", "(2,)"]),
    ((4,), {"cost": [1.0, -1.0, 1.0, 1.0]}, ValueError, ["-1.0", "not negative"]),
    ((4,), {"cost": torch.zeros(4)}, ValueError, ["zero", "positive"]),
    ((4,), {"cost": [1.0, NAN, 1.0, 1.0]}, ValueError, ["nan", "finite"]),
    ((4,), {"cost": torch.tensor([1.0, INF, 1.0, 1.0])}, ValueError, ["inf", "finite"]),
    ((4,), {"cost": [1.0, 1.0]}, ValueError, ["2", "4"]),
    ((4,), {"cost": torch.ones(2, 4)}, ValueError, ["(2, 4)"]),
    ((4,), {"cost": Cost.linear([1.0] * 5)}, ValueError, ["5", "4"]),
    ((4,), {"cost": Cost.linear([1.0] * 4).over(Space([Choice("c", 4)]))}, ValueError, ["another space"]),
    ((4,), {"cost": "macs"}, TypeError, ["macs"]),
    ((4,), {"learning_rate": 0.0}, ValueError, ["learning_rate", "0.0", "positive"]),
    ((4,), {"learning_rate": -0.1}, ValueError, ["-0.1"]),
    ((4,), {"learning_rate": NAN}, ValueError, ["learning_rate", "nan"]),
    ((4,), {"learning_rate": torch.ones(3), "batch": (2,)}, ValueError, ["learning_rate", "(3,)"]),
    ((4,), {"initial": 1.5}, ValueError, ["initial", "1.5"]),
    ((4,), {"initial": NAN}, ValueError, ["initial", "nan"]),
    ((4,), {"initial": "half"}, TypeError, ["initial", "'half'"]),
    ((4,), {"initial": torch.full((3,), 0.5)}, ValueError, ["initial", "(3,)"]),
    ((4,), {"initial": torch.tensor([0.5, 0.5, 0.5, 2.0])}, ValueError, ["initial", "2.0"]),
    ((MIXED,), {"initial": torch.full((5,), 0.9)}, ValueError, ["initial", "'act'"]),
    ((4,), {"margin": 0.5}, ValueError, ["margin", "0.5"]),
    ((4,), {"margin": -0.1}, ValueError, ["margin", "-0.1"]),
    ((4,), {"margin": "no"}, TypeError, ["margin", "'no'"]),
    ((4,), {"seed": -1}, ValueError, ["seed", "-1"]),
    ((4,), {"seed": 1.5}, TypeError, ["seed", "1.5"]),
    ((4,), {"seed": 2**70}, ValueError, ["seed", str(2**70)]),
    ((4,), {"batch": (0,)}, ValueError, ["batch", "0"]),
    ((4,), {"batch": (2, -1)}, ValueError, ["batch", "-1"]),
    ((4,), {"batch": "many"}, TypeError, ["batch", "'many'"]),
    ((4,), {"batch": (2.0,)}, TypeError, ["batch", "2.0"]),
]


@pytest.mark.parametrize(
    ("arguments", "keywords", "kind", "names"), [pytest.param(*row, id=f"{row[0]}{row[1]}"[:70]) for row in BUILD]
)
def test_a_search_that_cannot_be_built(arguments, keywords, kind, names):
    with pytest.raises(kind) as caught:
        Search(*arguments, **keywords)
    assert isinstance(caught.value, EspalierError)
    for name in names:
        assert name in str(caught.value)


def test_an_empty_space():
    with pytest.raises(BadInput, match="empty"):
        Search(Space([]))


@pytest.mark.parametrize(
    ("space", "cost", "target", "smallest"),
    [
        (Space([Bits("a", 4, least=3)]), None, 0.5, "0.75"),
        (MIXED, [1.0, 1.0, 4.0, 2.0, 6.0], 0.3, "0.333"),
        (Space([Choice("c", 3)]), [2.0, 5.0, 8.0], 0.2, "0.25"),
        (Space.of(3), Cost.product([espalier.Form.run(0, 3) + 3.0], d=3), 0.4, "0.5"),
    ],
)
def test_a_target_out_of_reach_names_the_range(space, cost, target, smallest):
    with pytest.raises(Unreachable) as caught:
        Search(space, cost=cost, target=target, horizon=100)
    assert isinstance(caught.value, ValueError)
    assert f"{target}" in str(caught.value)
    assert smallest in str(caught.value)
    assert "1" in str(caught.value).split(smallest)[-1]


def good(batch=()):
    search = Search(MIXED, batch=batch, seed=5, penalty=0.1, adaptive=True)
    masks = search.ask()
    search.tell(masks, masks[..., 0])
    return search, search.ask()


def unchanged(search, before):
    after = search.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name], name


def changed(masks, index, value):
    masks = masks.clone()
    masks[index] = value
    return masks


LOSSES = torch.tensor([1.0, 2.0])
TELL = [
    ("masks a list", lambda m: (m.tolist(), LOSSES), BadMask, TypeError, ["list"]),
    ("masks none", lambda m: (None, LOSSES), BadMask, TypeError, ["None"]),
    ("masks integers", lambda m: (m.int(), LOSSES), BadMask, TypeError, ["int32", "float"]),
    ("masks bool", lambda m: (m.bool(), LOSSES), BadMask, TypeError, ["bool"]),
    ("masks complex", lambda m: (m.to(torch.complex64), LOSSES), BadMask, TypeError, ["complex"]),
    ("masks one short", lambda m: (m[:1], LOSSES), BadMask, ValueError, ["(1, 5)", "(2, 5)"]),
    ("masks narrow", lambda m: (m[:, :4], LOSSES), BadMask, ValueError, ["(2, 4)", "5"]),
    ("masks flat", lambda m: (m[0], LOSSES), BadMask, ValueError, ["(5,)"]),
    ("masks scalar", lambda m: (torch.tensor(1.0), LOSSES), BadMask, ValueError, ["()"]),
    ("masks deep", lambda m: (m[None], LOSSES[None]), BadMask, ValueError, ["(1, 2, 5)"]),
    ("mask of a half", lambda m: (changed(m, (0, 0), 0.5), LOSSES), BadMask, ValueError, ["0.5", "0 and 1"]),
    ("mask of two", lambda m: (changed(m, (1, 2), 2.0), LOSSES), BadMask, ValueError, ["2.0"]),
    ("mask negative", lambda m: (changed(m, (1, 2), -1.0), LOSSES), BadMask, ValueError, ["-1.0"]),
    ("mask nan", lambda m: (changed(m, (1, 2), NAN), LOSSES), BadMask, ValueError, ["nan"]),
    ("no option", lambda m: (changed(m, (0, slice(3, 5)), 0.0), LOSSES), BadMask, ValueError, ["'act'", "one option"]),
    ("two options", lambda m: (changed(m, (0, slice(3, 5)), 1.0), LOSSES), BadMask, ValueError, ["'act'", "2"]),
    ("losses a list", lambda m: (m, [1.0, 2.0]), BadInput, TypeError, ["list", "losses"]),
    ("losses a number", lambda m: (m, 1.0), BadInput, TypeError, ["float", "losses"]),
    ("losses integers", lambda m: (m, torch.tensor([1, 2])), BadInput, TypeError, ["int64", "losses"]),
    ("losses bool", lambda m: (m, torch.tensor([True, False])), BadInput, TypeError, ["bool"]),
    ("losses short", lambda m: (m, LOSSES[:1]), BadInput, ValueError, ["(1,)", "(2,)"]),
    ("losses long", lambda m: (m, torch.zeros(3)), BadInput, ValueError, ["(3,)"]),
    ("losses scalar", lambda m: (m, torch.tensor(1.0)), BadInput, ValueError, ["()"]),
    ("losses deep", lambda m: (m, LOSSES[:, None]), BadInput, ValueError, ["(2, 1)"]),
    ("on another device", lambda m: (m.to("meta"), LOSSES), BadMask, ValueError, ["meta", "cpu"]),
]


@pytest.mark.parametrize(("make", "family", "kind", "names"), [pytest.param(*row[1:], id=row[0]) for row in TELL])
def test_what_cannot_be_told(make, family, kind, names):
    search, masks = good()
    before = search.state_dict()
    with pytest.raises(kind) as caught:
        search.tell(*make(masks))
    assert isinstance(caught.value, family)
    assert isinstance(caught.value, EspalierError)
    for name in names:
        assert name in str(caught.value)
    unchanged(search, before)
    search.tell(masks, LOSSES)  # and it goes on


def test_masks_of_another_batch():
    search, masks = good(batch=(3,))
    before = search.state_dict()
    for wrong in (masks[:2], masks[0], masks.expand(2, 3, 2, 5)):
        with pytest.raises(BadMask, match=r"\(3, 2, 5\)"):
            search.tell(wrong, torch.zeros(wrong.shape[:-1]))
    with pytest.raises(BadInput, match=r"\(3, 2\)"):
        search.tell(masks, torch.zeros(3))
    unchanged(search, before)


def test_masks_changed_in_place_after_ask_are_looked_at_again():
    search, masks = good()
    before = search.state_dict()
    masks[0, 0] = 0.25
    with pytest.raises(BadMask, match=r"0\.25"):
        search.tell(masks, LOSSES)
    unchanged(search, before)


@pytest.mark.parametrize("lost", [[NAN, NAN], [INF, -INF], [NAN, INF]], ids=str)
def test_a_run_without_any_finite_loss_has_diverged(lost):
    """A single run says so at once; theta, the adaptation and the number of updates stay."""
    search, masks = good()
    before = search.state_dict()
    with pytest.raises(Diverged) as caught:
        search.tell(masks, torch.tensor(lost))
    assert isinstance(caught.value, ArithmeticError)
    assert isinstance(caught.value, EspalierError)
    assert "learning rate" in str(caught.value)
    after = search.state_dict()
    assert search.diverged.item() is True
    before["diverged"] = after["diverged"]
    unchanged(search, before)
    with pytest.raises(Diverged):
        search.check()
    search.tell(masks, LOSSES)  # later losses count again, and the flag stays
    assert search.updates.item() == before["updates"].item() + 1
    assert search.diverged.item() is True


@pytest.mark.parametrize("keywords", [{"penalty": 0.1}, {"target": 0.5, "horizon": 40}, {"adaptive": True}], ids=str)
def test_a_run_that_diverges_does_not_stop_the_others(keywords):
    """The others of the batch go on exactly as they would without it."""
    search, without = (Search(6, batch=(4,), seed=2, **keywords) for _ in range(2))
    for update in range(12):
        masks = search.ask()
        losses = masks.sum(-1)
        without.tell(without.ask(), losses)
        if update >= 5:
            losses[2] = math.nan
        search.tell(masks, losses)
        if update == 4:
            frozen = search.theta[2].clone()
    assert search.diverged.tolist() == [False, False, True, False]
    assert search.updates.tolist() == [12, 12, 5, 12]
    others = [0, 1, 3]
    assert torch.equal(search.theta[2], frozen)
    assert bool(search.theta.isfinite().all())
    with pytest.raises(Diverged, match="2"):
        search.check()
    without.check()
    # masks are drawn from theta, so run 2 draws others than before; the rest is untouched
    assert torch.equal(search.theta[others], without.theta[others])


def test_gap_needs_a_target_and_usage_a_cost():
    with pytest.raises(BadInput, match="target"):
        Search(3).gap()
    with pytest.raises(BadInput, match="cost"):
        Search(Space([Choice("c", 3)])).usage()
    with pytest.raises(BadInput, match="cost"):
        Search(Space([Choice("c", 3)]), penalty=0.5)
