"""Random graphs: whatever is gated is exact. A graph may be refused as a whole, but few are."""

import contextlib

import pytest
import torch

import espalier

from .checks import TOLERANCE, Subject, gradient_mismatch, masks, mismatch, roads
from .random_graphs import random_graph

ORDINARY = range(30)
FRESH = range(1000, 1500)


def judge(seed: int) -> bool:
    """Whether the graph of this seed got gates; fails on any disagreement."""
    entry = random_graph(seed)
    it = Subject.or_refusal(entry)
    if isinstance(it, str):
        assert len(it) > 40, f"a refusal says what was seen and why nothing could be gated: {it}"
        return False
    drawn = masks(it.gated, 3, seed)
    for mask in drawn:
        worst = mismatch(it, mask, it.inputs, *entry.other_inputs())
        assert max(worst) <= TOLERANCE, f"eval, train: {worst}, mask={mask.tolist()} of {it.model}"
    for mask in (it.ones, drawn[1], drawn[-1]):
        for kind, numbers in roads(it, mask).items():
            assert numbers == pytest.approx([numbers[-1]] * len(numbers), rel=1e-12), (kind, mask.tolist(), it.model)
    apart, outside = gradient_mismatch(it, drawn[1])
    assert max(apart, outside) <= TOLERANCE, f"gradients {apart:.1e}, {outside:.1e}, mask={drawn[1].tolist()}"
    return True


@pytest.mark.parametrize("seed", ORDINARY)
def test_random_graph(seed):
    judge(seed)


def test_most_graphs_get_gates():
    """Freezing everything would be exact too: most of these graphs hold a hidden layer that can be cut."""
    gated = 0
    for seed in ORDINARY:
        entry = random_graph(seed)
        with contextlib.suppress(espalier.NoGates):
            gated += espalier.attach(entry.build(), entry.inputs(), check=False).d > 0
    assert gated >= 0.8 * len(ORDINARY)


@pytest.mark.parametrize("seed", range(100, 108))
def test_what_is_approved_does_not_rest_on_the_weights(seed):
    """Attached while every parameter is zero, where every comparison would hold, and filled afterwards."""
    entry = random_graph(seed)
    model = entry.build()
    filled = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    gated = espalier.attach(model, entry.inputs())
    model.load_state_dict(filled)
    it = Subject(entry, model, gated, entry.inputs())
    for mask in masks(gated, 3, seed):
        assert max(mismatch(it, mask)) <= TOLERANCE


def test_generator_repeats_itself_and_varies():
    one, same, other = (random_graph(seed).build() for seed in (5, 5, 7))
    assert str(one) == str(same) != str(other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))


@pytest.mark.long
@pytest.mark.parametrize("first", range(FRESH.start, FRESH.stop, 25))
def test_five_hundred_fresh_graphs(first):
    assert sum(judge(seed) for seed in range(first, first + 25)) >= 18
