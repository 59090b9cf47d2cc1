"""What cannot be cut exactly is not gated, and the library says which part and why."""

import pytest
import torch

import espalier

from .checks import TOLERANCE, Subject, masks, mismatch, reasons, rows_kept
from .traps import TRAPS

CASES = [pytest.param(entry, parts, id=entry.name) for entry, parts in TRAPS]


@pytest.mark.parametrize(("entry", "parts"), CASES)
def test_trap_is_frozen_or_refused_by_name(entry, parts):
    it = Subject.or_refusal(entry)
    text = it if isinstance(it, str) else reasons(it.gated)
    for part in parts:
        assert part in text, f"{part} is not named: {text}"
    if isinstance(it, str):
        return
    for mask in masks(it.gated, 4):
        assert max(mismatch(it, mask)) <= TOLERANCE
    for name, (left, of) in rows_kept(it, torch.zeros(it.gated.d)).items():
        if any(part in name for part in parts):
            assert left == of, f"{name} was cut, but its units cannot go exactly"


def test_no_gates_says_what_was_seen():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.only = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.only(x)

    with pytest.raises(espalier.NoGates, match="only"):
        espalier.attach(Bare(), torch.randn(2, 4))


def test_a_module_that_breaks_while_traced_is_named():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("shapes do not fit")

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Broken())
    with pytest.raises((espalier.EspalierError, RuntimeError), match="shapes do not fit"):
        espalier.attach(model, torch.randn(2, 4))
    assert not model[0]._forward_pre_hooks
