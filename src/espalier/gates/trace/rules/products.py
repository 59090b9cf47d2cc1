"""Rules: products of matrices and vectors, with parameters or of two activations; convolutions, and what else is done
over space: pooling, resampling, padding, shuffles of pixels and channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Event, Result, rule, wrap


def contract(call: Call, a: Layout, ka: int, b: Layout, kb: int) -> tuple[Layout, Layout]:
    """Sum over one axis of each. With a parameter on one side that axis is read: there a mask acts."""
    p = call.p
    if a.weight < 0 and b.weight < 0:
        why = "two activations are multiplied and summed over the axis"
        if a.computed or b.computed:
            why = "read by a weight that is computed from parameters"
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
    axes = [block for block in map(weight.at, over) if block is not None]
    summed = frozenset(int(d) for block in axes for d in np.unique(call.p.atoms.dim[block.atoms]))
    call.events.append(Event(weight.weight, times, counted, call.module, grouped, summed))


def is_weight(layout: Layout) -> bool:
    """A parameter, a bare view of one, or a tensor computed from parameters alone."""
    return layout.weight >= 0 or layout.computed


@rule("mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "_sparse_mm", "_sparse_addmm")
def product(call: Call) -> Result:
    """The product of two operands, or that added to the first of three."""
    added = int("add" in call.name)
    a, b = (call.of(operand) for operand in call.args[added : added + 2])
    out = _multiplied(call, a, b, {1: "mk,k->m", 2: "mk,kn->mn", 3: "bmk,bkn->bmn"}[len(b.shape)])
    if len(b.shape) == 3 and not is_weight(a) and not is_weight(b):
        apart(call, out, a.shape[2])
    return call.p.merged([call.x, out], call.shape(), "added") if added else out


@rule("linear")
def linear(call: Call) -> Result:
    rows = "abcdefgh"[: len(call.x.shape) - 1]
    out = _multiplied(call, call.x, call.of(call.args[1]), f"{rows}k,nk->{rows}n")
    bias = call.arg(2, "bias")
    return out if bias is None else call.p.merged([out, call.of(bias)], call.shape(), "added")


@rule("dot")
def dot(call: Call) -> Result:
    contract(call, call.of(call.args[0]), 0, call.of(call.args[1]), 0)
    return Layout(())


@rule("_grouped_mm")
def grouped(call: Call) -> Result:
    """Runs of rows with a matrix for each, such as experts have. The kernel takes rows of multiples of 16 bytes, so
    channels go by eight: the small network may be cast to half precision."""
    p, rows, weights = call.p, call.x, call.of(call.args[1])
    if (len(rows.shape), len(weights.shape)) != (2, 3):
        for layout in call.tensors:
            p.freeze(layout, "multiplied in runs of another kind")
        return Layout(call.shape())
    weights = p.mixed(weights, 0, "one of several matrices for each row")
    for block in weights.blocks:
        if block.atoms.size % 8:
            weights = p.mixed(weights, block.dims[0], "multiplied by a kernel that takes multiples of 16 bytes")
        else:
            runs = block.atoms.reshape(-1, 8)
            p.atoms.tie(runs[:, :1], runs)
            p.atoms.joined[block.atoms] = True
    out = _multiplied(call, rows, weights, "mk,ekn->mn")
    for event in call.events:
        event.uses /= weights.shape[0]
    return out


def _multiplied(call: Call, a: Layout, b: Layout, axes: str) -> Layout:
    """The product that einsum writes so, summed over k; batch axes are tied, so a head's slices stay together."""
    operands, out = axes.split("->")
    left, right = operands.split(",")
    a2, b2 = contract(call, a, left.index("k"), b, right.index("k"))
    if is_weight(a) and not is_weight(b):
        weight, its, other, others = a, left, b2, right
    else:
        weight, its, other, others = b, right, a2, left
    used(call, weight, [its.index("k")], other, [dim for dim, axis in enumerate(others) if axis not in its])
    spread = []
    for x, own in ((a2, left), (b2, right)):
        shape = [x.shape[own.index(axis)] if axis in own else 1 for axis in out]
        spread.append(call.p.renumbered(x, shape, {own.index(axis): i for i, axis in enumerate(out) if axis in own}))
    return call.p.merged(spread, call.shape(), "multiplied as a batch")


def apart(call: Call, out: Layout, depth: int) -> None:
    """Note a product of two activations: ``depth`` multiplications for each element of ``out``."""
    over = {d for block in out.blocks for d in block.dims}
    times = depth * math.prod(n for d, n in enumerate(out.shape) if d not in over)
    call.events.append(Event(-1, float(times), tuple(block.atoms for block in out.blocks), call.module))


# ---- convolution -----------------------------------------------------------------------------------------------------


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
        channels = [] if block is None else [Block((1,), block.atoms)]
    else:
        channels = _grouped(call, x, w, in_axis, out_axis, groups)
    out = p.clean(call.shape(), [*(b for b in x.blocks if b.dims == (0,)), *channels])
    if bias is not None:
        shape = (call.of(bias).shape[0], *(1 for _ in spatial))
        out = p.merged([out, p.reshaped(call.of(bias), shape)], call.shape(), "added")
    return out


def _grouped(call: Call, x: Layout, w: Layout, in_axis: int, out_axis: int, groups: int) -> list[Block]:
    p = call.p
    channels, width = x.shape[1], call.shape()[1]
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
    out = rows if out_axis == 0 else p.atoms.new(width)
    outside = out.reshape(groups, width // groups)
    p.atoms.tie(inside[:, :1], outside)
    if in_axis == 0:
        p.atoms.tie(atoms, rows)
    if channels > groups or width > groups:
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


# ---- pooling, resampling, padding ------------------------------------------------------------------------------------


POOLS = ("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")
WAYS = ("nearest", "linear", "bilinear", "trilinear", "bicubic", "nearest_exact")
SAMPLED = [f"{kind}{way}" for kind in ("upsample_", "_upsample_") for way in WAYS]
PADS = ("reflection_pad", "replication_pad")


@rule(*(f"{name}{n}d{end}" for name in POOLS for n in (1, 2, 3) for end in ("", "_with_indices")))
@rule(*(f"{name}{n}d{end}" for name in (*SAMPLED, *PADS) for n in (1, 2, 3) for end in ("", "_aa")))
def spatial(call: Call) -> Result:
    """Pooling, resampling, padding: batch and channels pass, space is worked on."""
    n = len(call.x.shape)
    over = next((k for k in (1, 2, 3) if f"{k}d" in call.name), 2)
    return call.in_shape(call.p.mixed_all(call.x.activation(), range(max(0, n - over), n), "pooled or resampled"))


@rule("constant_pad_nd", "pad")
def pad(call: Call) -> Result:
    """Padded channels are new and fixed; the old ones keep their atoms between them."""
    p, x, amounts = call.p, call.x, call.args[1]
    if min(amounts, default=0) < 0:
        return spatial(call)
    for k in range(len(amounts) // 2):
        dim = len(x.shape) - 1 - k
        before, after = amounts[2 * k], amounts[2 * k + 1]
        shape = (*x.shape[:dim], x.shape[dim] + before + after, *x.shape[dim + 1 :])
        blocks = x.blocks
        if before or after:
            x, atoms = p.only(x, dim, "padded")
            blocks = x.blocks
            if atoms is not None:
                ends = p.atoms.new(before + after)
                p.atoms.freeze(ends, f"zeros padded onto the channels (in {p.where})")
                padded = np.concatenate([ends[:before], atoms, ends[before:]])
                blocks = (*(b for b in x.blocks if dim not in b.dims), Block((dim,), padded))
        x = p.clean(shape, blocks)
    return x


@rule("pixel_shuffle")
def pixel_shuffle(call: Call) -> Result:
    *lead, channels, high, wide = call.x.shape
    r = call.args[1]
    return _shuffled(call, (*lead, channels // (r * r), r, r, high, wide), (0, 3, 1, 4, 2))


@rule("pixel_unshuffle")
def pixel_unshuffle(call: Call) -> Result:
    *lead, channels, high, wide = call.x.shape
    r = call.args[1]
    return _shuffled(call, (*lead, channels, high // r, r, wide // r, r), (0, 2, 4, 1, 3))


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: Call) -> Result:
    batch, channels, *space = call.x.shape
    groups = call.args[1]
    return _shuffled(call, (batch, groups, channels // groups, *space), (1, 0, *range(2, 2 + len(space))))


def _shuffled(call: Call, shape: Sequence[int], order: Sequence[int]) -> Result:
    """Split into this shape, the last dimensions in this order, and joined again."""
    lead = len(shape) - len(order)
    x = call.p.permuted(call.p.reshaped(call.x, shape), [*range(lead), *(lead + dim for dim in order)])
    return call.p.reshaped(x, call.shape())


@rule("unfold")
def windows(call: Call) -> Result:
    """Windows along one axis, which may overlap, laid along a new last axis."""
    dim = wrap(call.args[1], len(call.x.shape))
    return call.in_shape(call.p.mixed(call.x.activation(), dim, "unfolded"))


@rule("im2col")
def unfold(call: Call) -> Result:
    """The windows of an image side by side: each channel gives a row for each place in the kernel."""
    x = call.p.mixed_all(call.x.activation(), range(len(call.x.shape) - 2, len(call.x.shape)), "unfolded")
    x = call.p.without(x, [len(x.shape) - 1])
    places = call.shape()[-2] // x.shape[-2]
    x = call.p.taken(x, len(x.shape) - 2, np.repeat(np.arange(x.shape[-2]), places))
    return call.in_shape(x)


@rule("col2im")
def fold(call: Call) -> Result:
    """Windows put back and added up: the rows of a channel go together."""
    *lead, rows, _ = call.x.shape
    x = call.p.mixed(call.x.activation(), len(lead) + 1, "folded")
    x = call.p.reshaped(x, (*lead, call.shape()[-3], rows // call.shape()[-3], call.x.shape[-1]))
    return call.in_shape(call.p.mixed(x, len(lead) + 1, "folded"))


@rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: Call) -> Result:
    """Sampled at places that another tensor gives: batch and channels pass."""
    call.p.freeze(call.of(call.args[1]), "says where to sample")
    return call.in_shape(call.p.mixed_all(call.x.activation(), range(2, len(call.x.shape)), "resampled"))
