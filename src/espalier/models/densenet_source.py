"""The fast step's gradient of activations as a Triton kernel, by rows of a strip as ``densenet_forward.py`` has them.

A row of a consumer's gradient is read once and multiplied by the weights of the up to three rows that it came from.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from espalier.models.densenet_backward import FEW
from espalier.models.densenet_kernels import _add_two


@triton.jit
def _nine(above, middle, below, w0, w1, w2, PRECISION: tl.constexpr):
    acc = tl.dot(above, w0, input_precision=PRECISION)
    acc = tl.dot(middle, w1, acc, input_precision=PRECISION)
    return tl.dot(below, w2, acc, input_precision=PRECISION)


@triton.jit
def _asked(at, three, WIDE: tl.constexpr):
    """A row's three taps side by side, and a fourth of zeros."""
    return tl.reshape(tl.load(at, mask=three, other=0.0), (WIDE, 64))


@triton.jit
def _passed(normal, s, t, asked):
    return tl.where(normal * s[None, :] + t[None, :] > 0, asked, 0.0)


@triton.jit
def _tail(here, ask, m, r, s, t, both, share, PRECISION: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr):
    """A row's normalised values, what the tail asks of them, and its sums."""
    v = tl.load(here, mask=both, other=0.0)
    normal = (v.to(tl.float32) - m[None, :]) * r[None, :]
    # Nothing is added: but from here on values lie in registers as products do, and are not moved in the loop.
    zeros = tl.zeros((WIDE, 16), v.dtype)
    normal = tl.dot(zeros, tl.zeros((16, WIDTH), v.dtype), normal, input_precision=PRECISION)
    passed = tl.where(both, _passed(normal, s, t, tl.load(ask, mask=both, other=0.0).to(tl.float32) * share), 0.0)
    plain, weighted = tl.reduce((passed, passed * normal), 0, _add_two)
    return normal, passed * s[None, :], plain, weighted


@triton.jit
def _leave(to, total, normal, both):
    total = tl.where(both, total, 0.0)
    tl.store(to, total, mask=both)
    return tl.reduce((total, total * normal), 0, _add_two)


@triton.jit(do_not_specialize=FEW)
def source(
    x, out, weight, pooled_grad, gain, offset, mean, rstd, listed, count, gates, grad, totals,
    gamma, beta, grad_stride, first, last, consumers, chunks, samples, images, run_stride,
    H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, MANY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the normalised values of MANY chunks of one source: what the tail asks, and each open layer."""
    bands = H // ROWS
    j, g, groups = first + tl.program_id(1) * MANY, tl.program_id(2), tl.num_programs(2)
    y, strip = (tl.program_id(0) % bands) * ROWS, tl.program_id(0) // bands
    slots, framed = chunks * 16, (H + 2) * (W + 2)
    own, o, n = tl.arange(0, WIDE), tl.arange(0, 16), tl.arange(0, MANY * 16)
    image, px = strip * (WIDE // W) + own // W, own % W
    lanes = j * 16 + n
    known = lanes < last * 16
    both = (image < images)[:, None] & known[None, :]
    image = tl.minimum(image, images - 1)
    chunk = ((j + n // 16) * groups + g) * images  # of images
    here = x + ((image * (H + 2) + y + 1) * W + px)[:, None] * 16 + (chunk * ((H + 2) * W * 16) + n % 16)[None, :]
    to = grad + ((image * H + y) * W + px)[:, None] * 16 + (chunk * (H * W * 16) + n % 16)[None, :]
    small: tl.constexpr = (H // POOL) * (W // POOL)
    window = (g * images + image) * small + px // POOL
    ask = pooled_grad + window[:, None] * slots + lanes[None, :]
    down = (W // POOL) * slots
    m = tl.load(mean + g * slots + lanes, mask=known, other=0.0)
    r = tl.load(rstd + g * slots + lanes, mask=known, other=0.0)
    gain += g * consumers * slots + lanes
    offset += g * consumers * slots + lanes
    tail = (consumers - 1) * slots
    s, t = tl.load(gain + tail, mask=known, other=0.0), tl.load(offset + tail, mask=known, other=0.0)
    share = 1.0 / (POOL * POOL)
    N: tl.constexpr = MANY * 16
    n0, t0, plain, weighted = _tail(here, ask + (y // POOL) * down, m, r, s, t, both, share, PRECISION, WIDE, N)
    n1, t1, p, q = _tail(here + W * 16, ask + ((y + 1) // POOL) * down, m, r, s, t, both, share, PRECISION, WIDE, N)
    plain += p
    weighted += q
    n2, t2, n3, t3 = n1, t1, n1, t1
    if ROWS == 4:
        n2, t2, p, q = _tail(
            here + 2 * W * 16, ask + ((y + 2) // POOL) * down, m, r, s, t, both, share, PRECISION, WIDE, N
        )
        plain += p
        weighted += q
        n3, t3, p, q = _tail(
            here + 3 * W * 16, ask + ((y + 3) // POOL) * down, m, r, s, t, both, share, PRECISION, WIDE, N
        )
        plain += p
        weighted += q
    bit = tl.load(gates + (g * consumers + consumers - 1) * chunks + j)  # one for all chunks of a source
    at = (g // samples) * grad_stride + tail + lanes
    tl.atomic_add(beta + at, plain * bit, mask=known, sem="relaxed")
    tl.atomic_add(gamma + at, weighted * bit, mask=known, sem="relaxed")

    # The frame of zeros around an image makes every neighbour readable.
    corner = (g * images + image) * framed + y * (W + 2) + px
    tap = tl.arange(0, 4)[None, :, None]
    at = out + corner[:, None, None] * 16 + (tap * 16 + o[None, None, :])
    three = (tap < 3) & (corner >= 0)[:, None, None] & (o >= 0)[None, None, :]
    below = (W + 2) * 16
    weight += (g // samples) * run_stride + j * 2304 + ((n // 16) * 2304 + n % 16)[None, :]
    row = weight + tl.arange(0, 64)[:, None] * 16
    listed += (g * chunks + j) * consumers
    number = tl.load(count + g * chunks + j)
    layer = tl.load(listed)
    for i in range(number):
        following = tl.load(listed + tl.minimum(i + 1, number - 1))
        far, by = layer * (groups * images * (framed * 16)), layer * chunks * 2304
        a = _asked(at + far, three, WIDE)
        b = _asked(at + (far + below), three, WIDE)
        c = _asked(at + (far + 2 * below), three, WIDE)
        d = _asked(at + (far + 3 * below), three, WIDE)
        w0 = tl.load(row + by)
        w1 = tl.load(row + by + 768)
        w2 = tl.load(row + by + 1536)
        s, t = tl.load(gain + layer * slots), tl.load(offset + layer * slots)
        acc = _nine(a, b, c, w0, w1, w2, PRECISION)
        t0 += _passed(n0, s, t, acc) * s[None, :]
        acc = _nine(b, c, d, w0, w1, w2, PRECISION)
        t1 += _passed(n1, s, t, acc) * s[None, :]
        if ROWS == 4:
            e = _asked(at + (far + 4 * below), three, WIDE)
            acc = _nine(c, d, e, w0, w1, w2, PRECISION)
            t2 += _passed(n2, s, t, acc) * s[None, :]
            f = _asked(at + (far + 5 * below), three, WIDE)
            acc = _nine(d, e, f, w0, w1, w2, PRECISION)
            t3 += _passed(n3, s, t, acc) * s[None, :]
        layer = following
    plain, weighted = _leave(to, t0, n0, both)
    p, q = _leave(to + W * 16, t1, n1, both)
    plain += p
    weighted += q
    if ROWS == 4:
        p, q = _leave(to + 2 * W * 16, t2, n2, both)
        plain += p
        weighted += q
        p, q = _leave(to + 3 * W * 16, t3, n3, both)
        plain += p
        weighted += q
    tl.atomic_add(totals + g * slots + lanes, plain, mask=known, sem="relaxed")
    tl.atomic_add(totals + (groups + g) * slots + lanes, weighted, mask=known, sem="relaxed")
