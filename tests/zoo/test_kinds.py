"""Each kind of gate on request: what it adds to the space, and that it really cuts."""

import dataclasses

import pytest
import torch

import espalier

from .catalogue import BY_NAME
from .checks import TOLERANCE, Subject, compact_output, masks, mismatch, roads
from .counter import by_operations


def with_kinds(name: str, *kinds: str) -> Subject:
    return Subject.of(dataclasses.replace(BY_NAME[name], kinds=kinds))


def test_inputs_are_features_that_the_first_layer_need_not_read():
    it = with_kinds("MLP", "inputs")
    assert it.gated.d == 20
    mask = it.ones.clone()
    mask[[3, 11]] = 0
    small = it.gated.compact(mask)
    assert by_operations(small, it.inputs).weights == by_operations(it.model, it.inputs).weights - 2 * 64
    changed = it.inputs.clone()
    changed[:, [3, 11]] += 5.0
    assert torch.equal(compact_output(small, changed, False), compact_output(small, it.inputs, False))
    assert max(mismatch(it, mask)) <= TOLERANCE


@pytest.mark.parametrize(("name", "least"), [("ResNet-20", 7), ("WideResNet", 3), ("small GPT, tied embeddings", 4)])
def test_branches_are_whole_residual_branches(name, least):
    """At least those whose shortcut is the identity; closing one removes all of its layers."""
    it = with_kinds(name, "branches")
    assert it.gated.d >= least
    full = by_operations(it.model, it.inputs).weights
    for i in range(it.gated.d):
        mask = it.ones.clone()
        mask[i] = 0
        assert max(mismatch(it, mask)) <= TOLERANCE
        canonical = it.gated.canonical(mask)
        if canonical[i] == 0:
            assert by_operations(it.gated.compact(mask).eval(), it.inputs).weights < 0.99 * full
    for mask in masks(it.gated, 4):
        for numbers in roads(it, mask).values():
            assert len(set(numbers)) == 1


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("MLP", "units", 64 + 48 + 32),
        ("VGG-BN", "channels", 16 + 2 * 32 + 2 * 48),
        ("VGG-BN", "units", 64),
        ("ResNet-20", "channels", (1 + 3) * (16 + 32 + 64)),
        ("BERT", "heads", 2 * 4),
        ("BERT", "units", 2 * 96 + 32),
        ("Llama", "heads", 2 * 2),
        ("Swin", "heads", 2 * 2 + 2 * 4),
    ],
)
def test_one_kind_alone(name, kind, count):
    assert with_kinds(name, kind).gated.d == count


def test_kinds_add_up():
    alone = [with_kinds("ResNet-20", kind).gated.d for kind in ("channels", "branches")]
    assert with_kinds("ResNet-20", "channels", "branches").gated.d == sum(alone)


def test_ignored_layers_are_not_gated():
    entry = BY_NAME["MLP"]
    gated = espalier.attach(entry.build(), entry.inputs(), ignore=("2",))
    whole = dict(entry.build().named_parameters())
    small = dict(gated.compact(torch.zeros(gated.d)).named_parameters())
    assert small["2.weight"].shape[0] == whole["2.weight"].shape[0]
    assert gated.d == 64 + 32


def test_an_unknown_kind_is_refused_by_name():
    entry = BY_NAME["MLP"]
    with pytest.raises(espalier.BadInput, match="wings"):
        espalier.attach(entry.build(), entry.inputs(), kinds=("wings",))
