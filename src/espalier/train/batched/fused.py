"""A weight's gradient multiplied and applied in one kernel: of the weights' memory nothing is touched twice.

Written in Triton, which comes with torch where there is a GPU; imported there alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from espalier.train.batched.chain import Factors
from espalier.train.batched.optimizers import SGD

ROWS, COLUMNS, DEPTH, WARPS = 64, 64, 64, 4  # of a tile; measured on an H200, see docs/performance.md


@triton.jit
def _descend(
    weight,
    velocity,
    bias,
    bias_velocity,
    left,
    right,
    counts,
    rates,
    moves,
    outputs,
    inputs,
    depth,
    decay,
    momentum,
    COUNTS: tl.constexpr,
    NESTEROV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile of one run's weight, and with the first tile of a row the bias: torch.optim.SGD's arithmetic."""
    run = tl.program_id(1).to(tl.int64)
    if tl.load(moves + run) != 0:
        across = tl.cdiv(inputs, BN)
        row = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
        column = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
        lefts = left + run * outputs * depth + row[:, None] * depth
        rights = right + run * inputs * depth + column[None, :] * depth
        gradient = tl.zeros((BM, BN), tl.float32)
        slope = tl.zeros((BM,), tl.float32)
        for start in range(0, depth, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(lefts + k[None, :], (row[:, None] < outputs) & (k[None, :] < depth), 0.0)
            read = k < depth
            if COUNTS:
                read = read & (tl.load(counts + run * depth + k, read, 0) != 0)
            b = tl.load(rights + k[:, None], (column[None, :] < inputs) & read[:, None], 0.0)
            gradient = tl.dot(a, b, gradient, input_precision=PRECISION)
            slope += tl.sum(a, 1)
        rate = tl.load(rates + run)
        inside = (row[:, None] < outputs) & (column[None, :] < inputs)
        place = run * outputs * inputs + row[:, None] * inputs + column[None, :]
        w = tl.load(weight + place, inside, 0.0)
        v = tl.load(velocity + place, inside, 0.0)
        gradient += decay * w
        v = momentum * v + gradient
        step = gradient + momentum * v if NESTEROV else v
        tl.store(velocity + place, v, inside)
        tl.store(weight + place, w - rate * step, inside)
        if tl.program_id(0) % across == 0:
            where = run * outputs + row
            w1 = tl.load(bias + where, row < outputs, 0.0)
            v1 = tl.load(bias_velocity + where, row < outputs, 0.0)
            slope += decay * w1
            v1 = momentum * v1 + slope
            step1 = slope + momentum * v1 if NESTEROV else v1
            tl.store(bias_velocity + where, v1, row < outputs)
            tl.store(bias + where, w1 - rate * step1, row < outputs)


def descend(
    factors: Factors,
    weights: tuple[Tensor, Tensor],
    velocities: tuple[Tensor, Tensor],
    rates: Tensor,
    moves: Tensor,
    sgd: SGD,
    *,
    tf32: bool,
) -> None:
    """One step of one layer of R runs, in place. weights, velocities: ``(R, out, in)`` and ``(R, out)`` float32.

    rates: ``(R)``; moves: ``(R)`` bool: a run that does not move is not touched.
    """
    runs, outputs, inputs = weights[0].shape
    left, right, counts = factors.left.contiguous(), factors.right.contiguous(), factors.counts
    depth = left.shape[-1]
    grid = (triton.cdiv(outputs, ROWS) * triton.cdiv(inputs, COLUMNS), runs)
    _descend[grid](
        weights[0],
        velocities[0],
        weights[1],
        velocities[1],
        left,
        right,
        left if counts is None else counts.contiguous(),
        rates,
        moves,
        outputs,
        inputs,
        depth,
        sgd.weight_decay,
        sgd.momentum,
        COUNTS=counts is not None,
        NESTEROV=sgd.nesterov,
        PRECISION="tf32" if tf32 else "ieee",
        BM=ROWS,
        BN=COLUMNS,
        BK=min(max(16, triton.next_power_of_2(depth)), DEPTH),
        num_warps=WARPS,
    )
