"""Every architecture of the zoo under several masks in one pass: what one mask at a time gives, or refused by name."""

import pytest
import torch
from torch.utils import _pytree

import espalier
from espalier.gates.one_pass import interleaved

from .catalogue import BY_NAME
from .checks import mode, relative
from .entry import call, flat

TOLERANCE = 1e-10
SHARED = "the mask acts on the weight"
REFUSED = {
    "ShuffleNet-like": SHARED,
    "LSTM": SHARED,
    "LSTM, both ways": SHARED,
    "GRU": SHARED,
    "nn.TransformerEncoder": SHARED,
    "nn.TransformerEncoder, norm first": SHARED,
    "nn.MultiheadAttention": SHARED,
    "small GPT, every kind": SHARED,
    "nn.TransformerEncoder, width and blocks too": SHARED,
    "ResNet-20, blocks too": "1 is a block that may go",
    "GPT-2, width too": SHARED,
    "grouped queries, width too": "norm1 normalises over a gated width",
    "BERT, width too": "bert.embeddings.LayerNorm normalises over a gated width",
    "ViT, width too": "vit.layers.0.layernorm_before normalises over a gated width",
    "Llama, width too": "model.layers.0.input_layernorm normalises over a gated width",
    "CLIP, two towers": "its output holds something that is not of single examples",
}
THREE = ("MLP, inputs too", "ResNet-20, branches too", "Swin")


def parts_of(entry, samples):
    """Inputs for each mask, all different."""
    parts = []
    for seed in range(samples):
        torch.manual_seed(seed)
        parts.append(entry.example())
    return parts


def setting(it, samples):
    generator = torch.Generator().manual_seed(3)
    return parts_of(it.entry, samples), (torch.rand(samples, it.gated.d, generator=generator) < 0.7).float()


def loss_of(output):
    """A mean over the outputs in which every element counts differently."""
    values = flat(output)
    return (values * torch.cos(torch.arange(values.numel()).to(values))).sum() / values.numel() ** 0.5


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def one_at_a_time(model, gated, parts, masks):
    losses, slopes = [], []
    model.zero_grad()
    for mask, part in zip(masks, parts):
        with gated.masked(mask, slopes=True) as read:
            loss = loss_of(call(model, part))
            (loss / len(masks)).backward()
            slopes.append(read() * len(masks))
            losses.append(loss.detach())
    return torch.stack(losses), torch.stack(slopes), gradients(model)


def in_one_pass(model, gated, parts, masks):
    model.zero_grad()
    joined = _pytree.tree_map(lambda *leaves: interleaved(leaves), *parts)
    with gated.masked(masks, slopes=True) as read:
        losses = torch.stack([loss_of(out) for out in gated.apart(call(model, joined), len(masks))])
        losses.mean().backward()
        slopes = read()
    return losses.detach(), slopes, gradients(model)


def compare(it, samples):
    model, gated, (parts, masks) = it.model, it.gated, setting(it, samples)
    before = {n: b.clone() for n, b in model.state_dict().items()}
    losses, slopes, weights = one_at_a_time(model, gated, parts, masks)
    after = {n: b.clone() for n, b in model.state_dict().items()}
    model.load_state_dict(before)
    got_losses, got_slopes, got_weights = in_one_pass(model, gated, parts, masks)
    assert relative(got_losses, losses) <= TOLERANCE
    assert relative(got_slopes, slopes) <= TOLERANCE
    assert float(slopes.abs().max()) > 0
    scale = max(float(g.abs().max()) for g in weights.values() if g is not None)
    for n, gradient in weights.items():
        if gradient is None:
            assert got_weights[n] is None, n
        else:
            assert float((got_weights[n] - gradient).abs().max()) <= TOLERANCE * scale, n
    for n, value in model.state_dict().items():
        assert relative(value.double(), after[n].double()) <= TOLERANCE, n
    model.zero_grad()


def refused(it, why):
    """It is, and explained."""
    parts, masks = setting(it, 2)
    joined = _pytree.tree_map(lambda *leaves: interleaved(leaves), *parts)
    with pytest.raises(espalier.BadInput, match=why), it.gated.masked(masks):
        call(it.model, joined)
    assert it.gated.one_at_a_time(joined).startswith(why)
    lines = it.gated.explain().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("several masks run one at a time"))
    assert why in " ".join(" ".join(lines[start : start + 3]).split())


def test_one_pass_gives_what_one_mask_at_a_time_gives_or_is_refused(it):
    assert {*REFUSED, *THREE} <= set(BY_NAME)
    with mode(it.model, True):
        if it.entry.name in REFUSED:
            refused(it, REFUSED[it.entry.name])
            return
        for samples in (2, 3) if it.entry.name in THREE else (2,):
            compare(it, samples)
