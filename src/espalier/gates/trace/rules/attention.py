"""Rules: attention in one operation, however torch computes it."""

from __future__ import annotations

import numpy as np

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Result, rule
from espalier.gates.trace.rules.matmul import apart


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
    q, k, v = (p.mixed_all(x, [n - 2], "attended over") for x in (q, k, v))
    lead = q.shape[: n - 2]

    def batch(x: Layout, last: int) -> Layout:
        return p.clean((*x.shape[: n - 2], 1, last), x.blocks)

    if n >= 3 and k.shape[n - 3] != q.shape[n - 3]:  # grouped queries: each key head serves a run of query heads
        rep = q.shape[n - 3] // k.shape[n - 3]
        k, v = (_repeated(call, x, n - 3, rep) for x in (k, v))
    scores = p.merged([batch(q, 1), batch(k, 1)], (*lead, 1, 1), "attended together")
    out = p.merged([scores, batch(v, v.shape[-1])], (*lead, 1, v.shape[-1]), "attended together")
    length, depth = k.shape[n - 2], q.shape[n - 1] + v.shape[n - 1]
    apart(call, p.clean((*lead, q.shape[n - 2], 1), scores.blocks), length * depth)
    mask = next((t for t in (call.arg(5, "attn_mask"), call.arg(3, "attn_bias")) if hasattr(t, "shape")), None)
    if mask is not None:
        layout = call.of(mask)
        out = p.merged([out, p.clean((*layout.shape[:-2], 1, 1), _outer(call, layout))], out.shape, "masked together")
    result = p.clean(call.shape(0) if isinstance(call.out, (tuple, list)) else call.shape(), out.blocks)
    if not isinstance(call.out, (tuple, list)):
        return result
    return [result, *[None] * (len(call.out) - 1)]


def _outer(call: Call, layout: Layout) -> tuple[Block, ...]:
    n = len(layout.shape)
    return call.p.mixed_all(layout, [n - 2, n - 1], "a mask over positions").blocks


def _repeated(call: Call, x: Layout, dim: int, times: int) -> Layout:
    blocks = []
    for block in x.blocks:
        if dim in block.dims:
            block = Block(block.dims, np.repeat(block.atoms, times, axis=block.dims.index(dim)))
        blocks.append(block)
    return call.p.clean((*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :]), blocks)
