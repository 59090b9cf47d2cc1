"""The laws on a CUDA device: gates attached there, masks that live elsewhere, and autocast."""

import pytest
import torch

import espalier

from .catalogue import BY_NAME
from .checks import TOLERANCE, Subject, gradient_mismatch, masks, mismatch, relative
from .entry import call, flat

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OWN = [name for name, entry in BY_NAME.items() if entry.source != "transformers"]


def on_cuda(name: str) -> Subject:
    entry = BY_NAME[name]
    model, inputs = entry.build().cuda(), entry.inputs().cuda()
    return Subject(entry, model, espalier.attach(model, inputs, kinds=entry.kinds), inputs)


@pytest.mark.parametrize("name", OWN)
def test_masked_equals_compact_on_cuda(name):
    """Masks are made on the CPU; the compact model is where the model is."""
    it = on_cuda(name)
    for mask in masks(it.gated, 3):
        assert max(mismatch(it, mask)) <= TOLERANCE
        assert max(mismatch(it, mask.cuda().double())) <= TOLERANCE
    assert {p.device.type for p in it.gated.compact(mask).parameters()} == {"cuda"}


@pytest.mark.parametrize("name", ["MLP", "ResNet-20", "small GPT, tied embeddings"])
def test_gradients_on_cuda(name):
    it = on_cuda(name)
    assert max(gradient_mismatch(it, masks(it.gated, 3)[1])) <= TOLERANCE


@pytest.mark.parametrize("name", ["MLP", "ResNet-20", "small GPT, tied embeddings"])
def test_autocast(name):
    """In bfloat16 masked and compact agree as far as the format does."""
    entry = BY_NAME[name]
    model, inputs = entry.build().float().cuda().eval(), entry.inputs().cuda()
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    gated = espalier.attach(model, inputs)
    mask = gated.canonical(masks(gated, 3)[0])
    small = gated.compact(mask)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        with gated.masked(mask):
            expected = flat(call(model, inputs)).float()
        assert relative(flat(call(small, inputs)).float(), expected) < 0.05
