"""Rules: products of matrices and vectors, with parameters or of two activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from espalier.gates.trace.layout import Layout
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


@rule("mm", "bmm", "mv", "addmm", "baddbmm", "addmv")
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
