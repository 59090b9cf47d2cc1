"""Every architecture of the zoo under the laws of gates: found, cut far enough, exact, and rightly counted."""

import copy

import pytest
import torch
from torch.torch_version import TorchVersion

import espalier

from .checks import (
    Subject,
    effect,
    gradient_mismatch,
    masked_output,
    masks,
    mismatch,
    mode,
    reload_mismatch,
    roads,
    share_bound,
    smallest_share,
)
from .entry import call, flat

SWEEP, FULL_SWEEP = 4, 20


def test_gates_are_found_and_cut_far_enough(it):
    assert it.gated.d == it.gated.space.d > 0
    if it.entry.name in ("Swin", "T5") and TorchVersion(torch.__version__) < TorchVersion("2.13"):
        return  # attention with a mask of its own keeps one head: torch ends the process where there is none
    assert smallest_share(it) <= share_bound(it.entry, it.model)


def test_model_is_untouched_while_no_mask_is_set(it):
    fresh = it.entry.build().eval()
    assert list(it.model.state_dict()) == list(fresh.state_dict())
    with mode(it.model, False), torch.no_grad():
        expected = flat(call(fresh, it.inputs))
        assert torch.equal(flat(call(it.model, it.inputs)), expected)
    assert torch.equal(masked_output(it, it.ones, it.inputs, False), expected)
    assert torch.equal(it.gated.canonical(it.ones), it.ones)


def test_masks_matter(it):
    assert effect(it, masks(it.gated, 3)[1]) > 1e-6


def sweep(it: Subject, number: int) -> None:
    for mask in masks(it.gated, number):
        canonical = it.gated.canonical(mask)
        assert torch.equal(it.gated.canonical(canonical), canonical), "canonical is not a fixed point"
        worst = mismatch(it, mask)
        assert max(worst) <= it.entry.tolerance, f"eval, train: {worst} at {int(mask.sum())} of {it.gated.d} gates"


def test_masked_equals_compact(it):
    sweep(it, SWEEP)


@pytest.mark.long
def test_masked_equals_compact_on_twenty_masks(it):
    sweep(it, FULL_SWEEP)


def test_other_sizes_than_the_example(it):
    mask = masks(it.gated, 3)[1]
    small = it.gated.compact(mask).eval()
    for inputs in it.entry.other_inputs():
        expected = masked_output(it, it.gated.canonical(mask), inputs, False)
        with torch.no_grad():
            got = flat(call(small, inputs))
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= it.entry.tolerance * expected.abs().max()


def test_three_roads_to_one_cost(it):
    for mask in [it.ones, *masks(it.gated, 2, seed=1)]:
        for kind, numbers in roads(it, mask).items():
            assert numbers == pytest.approx([numbers[-1]] * len(numbers), rel=1e-12), (kind, int(mask.sum()))


def test_gradients_are_the_sliced_masked_ones(it):
    apart, outside = gradient_mismatch(it, masks(it.gated, 3, seed=2)[1])
    assert apart <= it.entry.tolerance
    assert outside <= it.entry.tolerance


def test_save_and_load(it):
    assert reload_mismatch(it, masks(it.gated, 3, seed=3)[1]) == 0.0


def test_deepcopy_and_detach(it):
    """A copy of the gated model carries on by itself; `detach` leaves the model as it was found."""
    fresh = it.entry.build()
    kinds = [type(module) for module in fresh.modules()]
    twin = copy.deepcopy(it.model).eval()
    inputs = it.inputs
    with mode(it.model, False), torch.no_grad():
        assert torch.equal(flat(call(twin, inputs)), flat(call(it.model, inputs)))
    gated = espalier.attach(fresh, inputs, kinds=it.entry.kinds, check=False)
    gated.detach()
    assert [type(module) for module in fresh.modules()] == kinds
    for module in fresh.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert list(fresh.state_dict()) == list(it.entry.build().state_dict())
