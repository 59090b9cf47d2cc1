"""Unusual layers: exact, or not gated; never wrong, never a crash."""

import pytest

from .checks import TOLERANCE, Subject, gradient_mismatch, masks, mismatch, reload_mismatch, roads
from .odd_layers import ODD

# What cannot be cut exactly, or needs an operation without a rule: the whole network is refused, by name.
REFUSED = {
    "LocalResponseNorm",
    "L2 normalisation of channels",
    "pixel unshuffle",
    "max unpooling",
    "cumulative sum over channels",
    "roll over channels",
    "flip of channels",
    "max over channels",
    "LSTM with projection",
}


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in ODD])
def test_odd_layer(entry):
    it = Subject.or_refusal(entry)
    if isinstance(it, str):
        assert entry.name in REFUSED, it
        assert any(name in it for name, _ in entry.build().named_children()), f"no part is named: {it}"
        return
    drawn = masks(it.gated, 3)
    for mask in drawn:
        assert max(mismatch(it, mask)) <= TOLERANCE
    for mask in (it.ones, drawn[1], drawn[-1]):
        for kind, numbers in roads(it, mask).items():
            assert len(set(numbers)) == 1, (kind, numbers)
    assert max(gradient_mismatch(it, drawn[1])) <= TOLERANCE
    assert reload_mismatch(it, drawn[1]) == 0.0
