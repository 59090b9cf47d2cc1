"""Rules by operation, third part: products with parameters, convolution, attention, embedding and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from espalier.gates.layout import Block, Layout
from espalier.gates.rules import Call, Event, Result, rule, wrap


def contract(call: Call, a: Layout, ka: int, b: Layout, kb: int) -> tuple[Layout, Layout]:
    """Sum over one axis of each. With a parameter on one side that axis is read: there a mask acts."""
    p = call.p
    if a.weight < 0 and b.weight < 0:
        why = "two activations are multiplied and summed over the axis"
        return p.mixed(a, ka, why), p.mixed(b, kb, why)
    a, x = p.only(a, ka, "read by a product over one of its axes")
    b, y = p.only(b, kb, "read by a product over one of its axes")
    if x is not None and y is not None:
        p.atoms.tie(x, y)
        for layout, atoms in ((a, x), (b, y)):
            if layout.weight >= 0:
                p.atoms.read[atoms[p.atoms.tensor[atoms] == layout.weight]] = True
        return _drop(a, ka), _drop(b, kb)
    why = "read together with the model's input, or a tensor of fixed size"
    return p.mixed(a, ka, why), p.mixed(b, kb, why)


def _drop(layout: Layout, dim: int) -> Layout:
    return Layout(layout.shape, tuple(b for b in layout.blocks if dim not in b.dims), layout.weight)


def used(
    call: Call, weight: Layout, over: Sequence[int], rows: Layout, row_dims: Sequence[int], grouped: bool = False
) -> None:
    """Note a product: every element of a weight was used once per row; ``over``: the dimensions it is summed over."""
    if not is_weight(weight):
        return
    blocks = [b for b in rows.blocks if set(b.dims) <= set(row_dims)]
    inside = {d for b in blocks for d in b.dims}
    times = float(math.prod(rows.shape[d] for d in row_dims if d not in inside))
    counted = tuple(b.atoms for b in blocks)
    if weight.weight < 0:
        call.events.append(Event(-1, times, counted, call.module, grouped, computed=weight))
        return
    times *= math.prod(weight.shape) / max(call.sizes[weight.weight], 1)
    found = [block for block in map(weight.at, over) if block is not None]
    summed = frozenset(int(d) for block in found for d in np.unique(call.p.atoms.dim[block.atoms]))
    call.events.append(Event(weight.weight, times, counted, call.module, grouped, summed))


def is_weight(layout: Layout) -> bool:
    """A parameter, a bare view of one, or a tensor computed from parameters alone."""
    return layout.weight >= 0 or layout.computed


def weight_first(a: Layout, b: Layout) -> bool:
    """Which of two operands is the layer's weight: the second, unless only the first is one."""
    return is_weight(a) and not is_weight(b)


@rule("mm")
def mm(call: Call) -> Result:
    return _matrix(call, call.of(call.args[0]), call.of(call.args[1]))


@rule("addmm")
def addmm(call: Call) -> Result:
    product = _matrix(call, call.of(call.args[1]), call.of(call.args[2]))
    return call.p.merged([call.of(call.args[0]), product], call.shape(), "added")


@rule("linear")
def linear(call: Call) -> Result:
    x, w = call.of(call.args[0]), call.of(call.args[1])
    n = len(x.shape)
    x2, w2 = contract(call, x, n - 1, w, 1)
    used(call, w, [1], x2, range(n - 1))
    blocks = [*x2.blocks, *(Block((n - 1,), b.atoms) for b in w2.blocks if b.dims == (0,))]
    out = call.p.clean(call.shape(), blocks)
    bias = call.arg(2, "bias")
    return out if bias is None else call.p.merged([out, call.of(bias)], call.shape(), "added")


def _matrix(call: Call, a: Layout, b: Layout) -> Layout:
    """``(m, k) @ (k, n)``."""
    a2, b2 = contract(call, a, 1, b, 0)
    if weight_first(a, b):
        used(call, a, [1], b2, [1])
    else:
        used(call, b, [0], a2, [0])
    shape = (a.shape[0], b.shape[1])
    return call.p.clean(shape, [*a2.blocks, *b2.blocks])


@rule("mv", "addmv")
def mv(call: Call) -> Result:
    added = call.name == "aten::addmv"
    a, v = call.of(call.args[1 if added else 0]), call.of(call.args[2 if added else 1])
    a2, _ = contract(call, a, 1, v, 0)
    if weight_first(a, v):
        used(call, a, [1], v, [])
    else:
        used(call, v, [0], a2, [0])
    out = call.p.clean((a.shape[0],), a2.blocks)
    return call.p.merged([call.of(call.args[0]), out], call.shape(), "added") if added else out


@rule("dot")
def dot(call: Call) -> Result:
    contract(call, call.of(call.args[0]), 0, call.of(call.args[1]), 0)
    return Layout(())


@rule("bmm")
def bmm(call: Call) -> Result:
    return _batched(call, call.of(call.args[0]), call.of(call.args[1]))


@rule("baddbmm")
def baddbmm(call: Call) -> Result:
    product = _batched(call, call.of(call.args[1]), call.of(call.args[2]))
    return call.p.merged([call.of(call.args[0]), product], call.shape(), "added")


def _batched(call: Call, a: Layout, b: Layout) -> Layout:
    """``(B, m, k) @ (B, k, n)``: batch axes are tied, so a head's slices stay together."""
    p = call.p
    a2, b2 = contract(call, a, 2, b, 1)
    batch, m, n = call.shape()
    left = p.clean((batch, m, 1), a2.blocks)
    right = p.clean((batch, 1, n), b2.blocks)
    out = p.merged([left, right], (batch, m, n), "multiplied as a batch")
    if weight_first(a, b):
        used(call, a, [2], b2, [2])
    else:
        used(call, b, [1], a2, [1])
    if not is_weight(a) and not is_weight(b):
        apart(call, out, a.shape[2])
    return out


def apart(call: Call, out: Layout, depth: int) -> None:
    """Note a product of two activations: ``depth`` multiplications for each element of ``out``."""
    over = {d for block in out.blocks for d in block.dims}
    times = depth * math.prod(n for d, n in enumerate(out.shape) if d not in over)
    call.events.append(Event(-1, float(times), tuple(block.atoms for block in out.blocks), call.module))


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution", "convolution_overrideable")
def convolution(call: Call) -> Result:
    """Full convolution sums over the channels; a grouped one carries each group through as one unit."""
    p = call.p
    x, w = call.of(call.args[0]), call.of(call.args[1])
    bias = call.args[2]
    transposed, groups = bool(call.args[6]), int(call.args[8])
    x = p.mixed_all(x, range(2, len(x.shape)), "convolved over")
    spatial = call.of(call.args[0]).shape[2:] if transposed else call.shape()[2:]
    event_rows = Layout((x.shape[0], *spatial), tuple(b for b in x.blocks if b.dims == (0,)))
    out_axis, in_axis = (1, 0) if transposed else (0, 1)
    summed = [in_axis if groups == 1 else 1, *range(2, len(w.shape))]
    used(call, w, summed, event_rows, range(len(event_rows.shape)), groups > 1)
    w = p.mixed_all(w, range(2, len(w.shape)), "a kernel's extent")
    if groups == 1:
        x, w = contract(call, x, 1, w, in_axis)
        block = w.at(out_axis)
        made = [] if block is None else [Block((1,), block.atoms)]
    else:
        made = _grouped(call, x, w, in_axis, out_axis, groups)
    out = p.clean(call.shape(), [*(b for b in x.blocks if b.dims == (0,)), *made])
    if bias is not None:
        shape = (call.of(bias).shape[0], *(1 for _ in spatial))
        out = p.merged([out, p.reshaped(call.of(bias), shape)], call.shape(), "added")
    return out


def _grouped(call: Call, x: Layout, w: Layout, in_axis: int, out_axis: int, groups: int) -> list[Block]:
    p = call.p
    channels, made = x.shape[1], call.shape()[1]
    x, atoms = p.only(x, 1, "read by a grouped convolution")
    w, rows = p.only(w, 0, "a grouped convolution's weight")
    if call.module in p.even and out_axis == 0 and rows is not None:
        return _even(call, w, atoms, rows, groups)
    p.mixed(w, 1, "the inside of a convolution group")
    if atoms is None or rows is None:
        if rows is not None:
            p.atoms.freeze(rows, f"a grouped convolution reads a tensor of fixed size (in {p.where})")
        if atoms is not None:
            p.atoms.freeze(atoms, f"a grouped convolution's weight is computed (in {p.where})")
        return [] if rows is None or out_axis else [Block((1,), rows)]
    inside = atoms.reshape(groups, channels // groups)
    p.atoms.tie(inside[:, :1], inside)
    out = rows if out_axis == 0 else p.atoms.new(made)
    outside = out.reshape(groups, made // groups)
    p.atoms.tie(inside[:, :1], outside)
    if in_axis == 0:
        p.atoms.tie(atoms, rows)
    if channels > groups or made > groups:
        p.atoms.joined[np.concatenate([atoms, out])] = True
    return [Block((1,), out)]


def _even(call: Call, w: Layout, atoms: np.ndarray | None, rows: np.ndarray, groups: int) -> list[Block]:
    """Inside each group the same channels go: the groups stay, and input and output are cut apart from each other."""
    p = call.p
    if atoms is None:
        p.mixed(w, 1, "reads a tensor of fixed size")
    else:
        inside = atoms.reshape(groups, -1)
        p.atoms.tie(inside[:1], inside)
        block = w.at(1)
        if block is None:
            p.atoms.freeze(atoms, f"one channel to each convolution group (in {p.where})")
        else:
            p.atoms.tie(inside[0], block.atoms)
            p.atoms.read[block.atoms] = True
    outside = rows.reshape(groups, -1)
    p.atoms.tie(outside[:1], outside)
    if outside.shape[1] == 1:
        p.atoms.freeze(rows, f"one channel from each convolution group (in {p.where})")
    return [Block((1,), rows)]


@rule("embedding", "embedding_renorm_")
def embedding(call: Call) -> Result:
    w = call.p.mixed(call.of(call.args[0]), 0, "a table looked up by index")
    shape = call.shape()
    return call.p.clean(shape, [Block((len(shape) - 1,), b.atoms) for b in w.blocks])


# ---- attention -------------------------------------------------------------------------------------------------------


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


# ---- norms -----------------------------------------------------------------------------------------------------------


def batch_norm(call: Call) -> Result:
    """Channel by channel: statistics and affine go with the channel."""
    p, x = call.p, call.x.activation()
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "batch normalised")
    for value in call.args[1:5]:
        if hasattr(value, "shape"):
            layout = call.of(value)
            if atoms is None:
                p.freeze(layout, "normalises a tensor of fixed size")
            else:
                p.merged([Layout((x.shape[1],), (Block((0,), atoms),)), layout], (x.shape[1],), "normalised")
    return _first(call, x)


def _first(call: Call, x: Layout) -> Result:
    """The first result has the layout; saved statistics are read by the backward pass alone."""
    return [x, *[None] * (len(call.out) - 1)] if isinstance(call.out, (tuple, list)) else x


for _name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm"):
    rule(_name)(batch_norm)
for _name in ("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update"):
    rule(_name)(batch_norm)


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(call: Call) -> Result:
    p, x = call.p, call.x.activation()
    n = len(x.shape)
    size = len(call.args[1])
    x = p.mixed_all(x, range(n - size, n), "layer normalisation over the axis")
    for value in call.args[2:4]:
        if hasattr(value, "shape"):
            p.freeze(call.of(value), "layer normalisation over the axis")
    return _first(call, x)


@rule("native_group_norm")
def group_norm(call: Call) -> Result:
    """Statistics over groups of channels: a whole group is one unit."""
    p, x = call.p, call.x.activation()
    groups: int = call.args[6]
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "group normalised")
    params: list[Any] = [call.of(v) for v in call.args[1:3] if hasattr(v, "shape")]
    if atoms is None:
        for layout in params:
            p.freeze(layout, "normalises a tensor of fixed size")
        return _first(call, x)
    inside = atoms.reshape(groups, -1)
    if groups == 1:
        p.atoms.freeze(atoms, f"group normalisation over all channels (in {p.where})")
    elif inside.shape[1] > 1:
        p.atoms.tie(inside[:, :1], inside)
        p.atoms.joined[atoms] = True
    for layout in params:
        p.merged([Layout((x.shape[1],), (Block((0,), atoms),)), layout], (x.shape[1],), "normalised")
    return _first(call, x)


@rule("_thnn_fused_gru_cell")
def fused_gru_cell(call: Call) -> Result:
    """CUDA's GRU step: three tiles of gates, tied with the hidden state and with each other."""
    p = call.p
    shape = call.shape(0)
    gates = p.merged([call.of(t) for t in call.args[:2]], call.of(call.args[0]).shape, "added")
    for value in call.args[3:5]:
        if hasattr(value, "shape"):
            gates = p.merged([gates, call.of(value)], gates.shape, "added")
    return [_tiled(call, gates, 3, call.of(call.args[2]), shape), None]


def _tiled(call: Call, gates: Layout, count: int, state: Layout, shape: tuple[int, ...]) -> Layout:
    """Equal tiles of the last axis, tied with each other and with the state they update."""
    p = call.p
    block = gates.at(len(gates.shape) - 1)
    if block is None or len(block.dims) > 1:
        p.freeze(gates, "combined with a tensor of fixed size")
        p.freeze(state, "combined with a tensor of fixed size")
        return Layout(shape)
    tiles = block.atoms.reshape(count, -1)
    p.atoms.tie(tiles[:1], tiles)
    last = wrap(-1, len(shape))
    return p.merged([Layout(shape, (Block((last,), tiles[0]),)), state], shape, "combined")


@rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(call: Call) -> Result:
    """CUDA's LSTM step: four tiles of gates, tied with the cell and with each other."""
    p = call.p
    shape = call.shape(0)
    gates = p.merged([call.of(t) for t in call.args[:2]], call.of(call.args[0]).shape, "added")
    for value in call.args[3:5]:
        if hasattr(value, "shape"):
            gates = p.merged([gates, call.of(value)], gates.shape, "added")
    out = _tiled(call, gates, 4, call.of(call.args[2]), shape)
    return [out, out, None]
