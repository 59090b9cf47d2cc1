"""Rules: what torch computes in one operation: norms, attention, and the steps of recurrent networks on CUDA."""

from __future__ import annotations

import numpy as np

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Result, rule
from espalier.gates.trace.rules.products import apart

FIXED = "normalises a tensor of fixed size"


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm")
@rule("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update")
def batch_norm(call: Call) -> Result:
    """Channel by channel: statistics and affine go with the channel."""
    p, x = call.p, call.x.activation()
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "batch normalised")
    p.beside(atoms, call.layouts(call.args[1:5]), FIXED)
    return x


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(call: Call) -> Result:
    why, n = "layer normalisation over the axis", len(call.x.shape)
    call.p.beside(None, call.layouts(call.args[2:4]), why)
    return call.p.mixed_all(call.x.activation(), range(n - len(call.args[1]), n), why)


@rule("native_group_norm")
def group_norm(call: Call) -> Result:
    """Statistics over groups of channels: a whole group is one unit."""
    p, x = call.p, call.x.activation()
    groups: int = call.args[6]
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "group normalised")
    if atoms is not None:
        inside = atoms.reshape(groups, -1)
        if groups == 1:
            p.atoms.freeze(atoms, f"group normalisation over all channels (in {p.where})")
        elif inside.shape[1] > 1:
            p.atoms.tie(inside[:, :1], inside)
            p.atoms.joined[atoms] = True
    p.beside(atoms, call.layouts(call.args[1:3]), FIXED)
    return x


@rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
)
def attention(call: Call) -> Result:
    """Queries and keys are summed over their last axis; heads are a batch axis; the values' last axis passes."""
    p = call.p
    q, k, v = (call.of(t).activation() for t in call.args[:3])
    n = len(q.shape)
    why = "queries and keys are multiplied and summed over the axis"
    q, k = p.mixed(q, n - 1, why), p.mixed(k, n - 1, why)
    q, k, v = (p.mixed(x, n - 2, "attended over") for x in (q, k, v))
    lead = q.shape[: n - 2]

    def batch(x: Layout, last: int) -> Layout:
        return p.clean((*x.shape[: n - 2], 1, last), x.blocks)

    if n >= 3 and k.shape[n - 3] != q.shape[n - 3]:  # grouped queries: each key head serves a run of query heads
        served = np.arange(q.shape[n - 3]) // (q.shape[n - 3] // k.shape[n - 3])
        k, v = (p.taken(x, n - 3, served) for x in (k, v))
    scores = p.merged([batch(q, 1), batch(k, 1)], (*lead, 1, 1), "attended together")
    out = p.merged([scores, batch(v, v.shape[-1])], (*lead, 1, v.shape[-1]), "attended together")
    length, depth = k.shape[n - 2], q.shape[n - 1] + v.shape[n - 1]
    apart(call, p.clean((*lead, q.shape[n - 2], 1), scores.blocks), length * depth)
    for mask in call.layouts((call.arg(5, "attn_mask"), call.arg(3, "attn_bias")))[:1]:
        m = len(mask.shape)
        over = p.mixed_all(mask, [m - 2, m - 1], "a mask over positions")
        out = p.merged([out, p.clean((*mask.shape[:-2], 1, 1), over.blocks)], out.shape, "masked together")
    return p.clean(call.shape(), out.blocks)


@rule("_thnn_fused_gru_cell")
def fused_gru_cell(call: Call) -> Result:
    """CUDA's GRU step: three tiles of gates, tied with the hidden state and with each other."""
    return _tiled(call, 3)


@rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(call: Call) -> Result:
    """CUDA's LSTM step: four tiles of gates, tied with the cell and with each other."""
    return [_tiled(call, 4)] * 2


def _tiled(call: Call, count: int) -> Layout:
    """``count`` equal tiles of the gates' last axis, tied with each other and with the state they update.

    The operands: the gates from the input and from the hidden state, the state, and perhaps two biases.
    """
    p, shape = call.p, call.shape()
    gates = p.merged([call.of(t) for t in call.args[:2]], call.of(call.args[0]).shape, "added")
    for bias in call.layouts(call.args[3:5]):
        gates = p.merged([gates, bias], gates.shape, "added")
    state = call.of(call.args[2])
    block = gates.at(len(gates.shape) - 1)
    if block is None or len(block.dims) > 1:
        p.freeze(gates, "combined with a tensor of fixed size")
        p.freeze(state, "combined with a tensor of fixed size")
        return Layout(shape)
    tiles = block.atoms.reshape(count, -1)
    p.atoms.tie(tiles[:1], tiles)
    return p.merged([Layout(shape, (Block((len(shape) - 1,), tiles[0]),)), state], shape, "combined")
