"""A weight's gradient multiplied and applied in one kernel: of the weights' memory nothing is touched twice.

Written in Triton, which comes with torch where there is a GPU; imported there alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from espalier.train.descent import SGD

ROWS, COLUMNS, DEPTH, WARPS = 64, 64, 64, 8  # of a tile; measured on an H200, see docs/performance.md


@triton.jit
def _descend(
    weight,
    velocity,
    left,
    right,
    rates,
    moves,
    outputs,
    inputs,
    depth,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LOOP: tl.constexpr,
):
    """One tile of one run's weight: torch.optim.SGD's arithmetic."""
    run = tl.program_id(1).to(tl.int64)
    if tl.load(moves + run) == 0:
        return
    across = tl.cdiv(inputs, BN)
    row = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    lefts = left + run * outputs * depth + row[:, None] * depth
    rights = right + run * inputs * depth + column[None, :] * depth
    k = tl.arange(0, BK)
    if LOOP:
        gradient = tl.zeros((BM, BN), tl.float32)
        for start in range(0, depth, BK):
            read = start + k < depth
            a = tl.load(lefts + start + k[None, :], (row[:, None] < outputs) & read[None, :], 0.0)
            b = tl.load(rights + start + k[:, None], (column[None, :] < inputs) & read[:, None], 0.0)
            gradient = tl.dot(a, b, gradient, input_precision=PRECISION)
    else:
        read = k < depth
        a = tl.load(lefts + k[None, :], (row[:, None] < outputs) & read[None, :], 0.0)
        b = tl.load(rights + k[:, None], (column[None, :] < inputs) & read[:, None], 0.0)
        gradient = tl.dot(a, b, input_precision=PRECISION)
    rate = tl.load(rates + run)
    inside = (row[:, None] < outputs) & (column[None, :] < inputs)
    place = run * outputs * inputs + row[:, None] * inputs + column[None, :]
    w = tl.load(weight + place, inside, 0.0)
    v = tl.load(velocity + place, inside, 0.0)
    gradient += DECAY * w
    v = MOMENTUM * v + gradient
    step = gradient + MOMENTUM * v if NESTEROV else v
    tl.store(velocity + place, v, inside)
    tl.store(weight + place, w - rate * step, inside)


def descend(
    left: Tensor,
    right: Tensor,
    weight: Tensor,
    velocity: Tensor,
    rates: Tensor,
    moves: Tensor,
    sgd: SGD,
    *,
    tf32: bool,
) -> None:
    """One step of one layer's weight of R runs, in place: the gradient is ``left @ right^T``.

    left ``(R, out, K)``, right ``(R, in, K)``: see Factors; weight, velocity ``(R, out, in)`` float32; all contiguous.
    rates: ``(R)``; moves: ``(R)`` bool: a run that does not move is not touched.
    """
    for tensor in (left, right, weight, velocity):
        if not tensor.is_contiguous():
            raise ValueError(f"the kernel reads plain memory, not strides {tensor.stride()} of {tuple(tensor.shape)}")
    runs, outputs, inputs = weight.shape
    depth = left.shape[-1]
    at_once = min(max(16, triton.next_power_of_2(depth)), DEPTH)
    _descend[(triton.cdiv(outputs, ROWS) * triton.cdiv(inputs, COLUMNS), runs)](
        weight,
        velocity,
        left,
        right,
        rates,
        moves,
        outputs,
        inputs,
        depth,
        DECAY=sgd.weight_decay,
        MOMENTUM=sgd.momentum,
        NESTEROV=sgd.nesterov,
        PRECISION="tf32" if tf32 else "ieee",
        BM=ROWS,
        BN=COLUMNS,
        BK=at_once,
        LOOP=depth > at_once,
        num_warps=WARPS,
    )
