"""The fast step's layers as a Triton kernel: 3 x 3 convolutions of normalised, gated and rectified chunks.

A program has ROWS rows of a strip: the same rows of as many images as make WIDE pixels side by side. A chunk's row is
read and rectified once and multiplied by the weights of the up to three output rows that see it.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from espalier.models.densenet_fast.kernels import SMALL, _add_sums


@triton.jit
def _read(here, s, t):
    """What a layer reads of a row. The frame's NaN becomes 0."""
    v = tl.load(here)
    return tl.maximum(v.to(tl.float32) * s[None, :] + t[None, :], 0.0).to(v.dtype)


@triton.jit
def _three(above, middle, below, w0, w1, w2, acc, PRECISION: tl.constexpr):
    acc = tl.dot(above, w0, acc, input_precision=PRECISION)
    acc = tl.dot(middle, w1, acc, input_precision=PRECISION)
    return tl.dot(below, w2, acc, input_precision=PRECISION)


@triton.jit
def _row(acc, to, inside, own, W: tl.constexpr, WIDE: tl.constexpr):
    """What the taps side by side (and a fourth of zeros) found, each shifted to its pixel, added up and stored."""
    dx = tl.arange(0, 64) // 16 - 1
    column = (own % W)[:, None] + dx[None, :]
    place = tl.minimum(tl.maximum(own[:, None] + dx[None, :], 0), WIDE - 1)
    taps = tl.where((column >= 0) & (column < W) & (dx < 2)[None, :], tl.gather(acc, place, 0), 0.0)
    values = tl.sum(tl.reshape(taps, (WIDE, 4, 16)), 1).to(to.dtype.element_ty)
    tl.store(to, values, mask=inside[:, None])
    return values


@triton.jit(do_not_specialize=[*(name for name in SMALL if name not in ("H", "W")), "images"])
def layer(
    x, weight, scale, shift, listed, count, sums, arrived, mean, rstd, gain, offset,
    layer, first, consumers, chunks, samples, images, pixels, run_stride, H: tl.constexpr, W: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, EPSILON: tl.constexpr, CONSUMERS: tl.constexpr,
):  # fmt: skip
    """One layer's output, ROWS (2 or 4) rows of a strip."""
    bands = tl.cdiv(H, ROWS)
    g, groups = tl.program_id(1), tl.num_programs(1)
    y, strip = (tl.program_id(0) % bands) * ROWS, tl.program_id(0) // bands
    own, o = tl.arange(0, WIDE), tl.arange(0, 16)
    image = strip * (WIDE // W) + own // W
    row = g * consumers + layer
    lies = (g * images + tl.minimum(image, images - 1)) * ((H + 2) * W) + own % W
    here = x + lies[:, None] * 16 + o[None, :]
    listed += row * chunks
    scale_here, shift_here = scale + row * chunks * 16 + o, shift + row * chunks * 16 + o
    weight += (g // samples) * run_stride + layer * 3 * chunks * 1024
    weight_here = weight + o[:, None] * 64 + tl.arange(0, 64)[None, :]
    down = W * 16
    acc0 = tl.zeros((WIDE, 64), tl.float32)
    acc1 = tl.zeros((WIDE, 64), tl.float32)
    acc2 = tl.zeros((WIDE, 64), tl.float32)
    acc3 = tl.zeros((WIDE, 64), tl.float32)
    for i in range(tl.load(count + row)):
        j = tl.load(listed + i)
        s, t = tl.load(scale_here + j * 16), tl.load(shift_here + j * 16)
        top = here + j * (groups * images * ((H + 2) * W * 16)) + y * down
        by = weight_here + j * 1024
        w0, w1, w2 = tl.load(by), tl.load(by + chunks * 1024), tl.load(by + chunks * 2048)
        a, b = _read(top, s, t), _read(top + down, s, t)
        c, d = _read(top + 2 * down, s, t), _read(top + 3 * down, s, t)
        acc0 = _three(a, b, c, w0, w1, w2, acc0, PRECISION)
        acc1 = _three(b, c, d, w0, w1, w2, acc1, PRECISION)
        if ROWS == 4:
            e, f = _read(top + 4 * down, s, t), _read(top + 5 * down, s, t)
            acc2 = _three(c, d, e, w0, w1, w2, acc2, PRECISION)
            acc3 = _three(d, e, f, w0, w1, w2, acc3, PRECISION)
    j = first + layer
    to = here + j * (groups * images * ((H + 2) * W * 16)) + (y + 1) * down
    inside = image < images
    pair = tl.join(_row(acc0, to, inside, own, W, WIDE), _row(acc1, to + down, inside, own, W, WIDE))
    if ROWS == 4:
        other = tl.join(
            _row(acc2, to + 2 * down, inside, own, W, WIDE), _row(acc3, to + 3 * down, inside, own, W, WIDE)
        )
        values = tl.reshape(tl.permute(tl.join(pair, other), (3, 2, 0, 1)), (4 * WIDE, 16))
    else:
        values = tl.reshape(tl.permute(pair, (2, 0, 1)), (2 * WIDE, 16))
    inside = strip * (WIDE // W) + (tl.arange(0, ROWS * WIDE) % WIDE) // W < images
    _add_sums(
        values, inside, j, g, groups, sums, arrived, mean, rstd, gain, offset, scale, shift,
        consumers, chunks, pixels, EPSILON, CONSUMERS,
    )  # fmt: skip
