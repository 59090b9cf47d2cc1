"""Rules: products of matrices and vectors, with parameters or of two activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Event, Result, rule


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
    axes = [block for block in map(weight.at, over) if block is not None]
    summed = frozenset(int(d) for block in axes for d in np.unique(call.p.atoms.dim[block.atoms]))
    call.events.append(Event(weight.weight, times, counted, call.module, grouped, summed))


def is_weight(layout: Layout) -> bool:
    """A parameter, a bare view of one, or a tensor computed from parameters alone."""
    return layout.weight >= 0 or layout.computed


def weight_first(a: Layout, b: Layout) -> bool:
    """Which of two operands is the layer's weight: the second, unless only the first is one."""
    return is_weight(a) and not is_weight(b)


@rule("mm", "bmm", "mv", "addmm", "baddbmm", "addmv")
def product(call: Call) -> Result:
    """The product of two operands, or that added to the first of three."""
    added = int("add" in call.name)
    a, b = (call.of(operand) for operand in call.args[added : added + 2])
    out = {2: _matrix, 3: _batched, 1: _vector}[len(b.shape)](call, a, b)
    return call.p.merged([call.x, out], call.shape(), "added") if added else out


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


def _vector(call: Call, a: Layout, v: Layout) -> Layout:
    """``(m, k) @ (k)``."""
    a2, _ = contract(call, a, 1, v, 0)
    if weight_first(a, v):
        used(call, a, [1], v, [])
    else:
        used(call, v, [0], a2, [0])
    return call.p.clean((a.shape[0],), a2.blocks)


@rule("dot")
def dot(call: Call) -> Result:
    contract(call, call.of(call.args[0]), 0, call.of(call.args[1]), 0)
    return Layout(())


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
