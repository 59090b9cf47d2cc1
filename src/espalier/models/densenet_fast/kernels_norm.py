"""The fast step's kernels on chunks of 16 channels, in Triton, for all runs and masks in one launch: gates, statistics,
pooling, and the way back through the normalisation.

A program has one tile of the pixels of one group. Closed gates cost nothing: the open ones are listed on the device,
and loops run over the lists. Sums over pixels are added up in memory; those that statistics come from in float64, so
that the order of arrival does not show in them.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

# Small numbers whose divisibility or being 1 would only make the compiler work more.
SMALL = (
    "layer", "first", "last", "consumers", "chunks", "samples", "share", "H", "W", "POOL", "inputs", "slots", "groups",
    "small", "d",
)  # fmt: skip


@triton.jit
def _in_frame(p, H, W):
    """Where pixel p lies when every image has a further row above and below."""
    return p + (2 * (p // (H * W)) + 1) * W


@triton.jit(do_not_specialize=SMALL)
def begin(
    masks, bits, gamma, beta, gates, gain, offset, by_consumer, consumer_count, by_chunk, chunk_count, sums, totals,
    arrived, d, consumers, chunks, samples, run_stride, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Gates from a mask; what each consumer's gamma and beta are behind them; the open ones as lists, of each consumer
    its chunks and of each chunk its layers (the tail is not listed). And zeros where sums will be added up.
    """
    one, g, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    k, slots = tl.arange(0, TILE), chunks * 16
    masks += g * d
    if one < consumers:
        row = g * consumers + one
        own = tl.load(bits + one * chunks + k, mask=k < chunks, other=d)
        gate = tl.load(masks + own, mask=own < d, other=0.0)
        tl.store(gates + row * chunks + k, gate, mask=k < chunks)
        listed = (gate != 0).to(tl.int32)
        tl.store(by_consumer + row * chunks + tl.cumsum(listed, 0) - 1, k, mask=listed != 0)
        tl.store(consumer_count + row, tl.sum(listed, 0))
        c = tl.arange(0, SLOTS)
        lane = tl.load(bits + one * chunks + c // 16, mask=c < slots, other=d)
        factor = tl.load(masks + lane, mask=lane < d, other=0.0)
        here = (g // samples) * run_stride + one * slots + c
        tl.store(gain + row * slots + c, tl.load(gamma + here, mask=c < slots, other=0.0) * factor, mask=c < slots)
        tl.store(offset + row * slots + c, tl.load(beta + here, mask=c < slots, other=0.0) * factor, mask=c < slots)
    else:
        j = one - consumers
        reader = tl.load(bits + k * chunks + j, mask=k < consumers - 1, other=d)
        asks = (tl.load(masks + reader, mask=reader < d, other=0.0) != 0).to(tl.int32)
        tl.store(by_chunk + (g * chunks + j) * consumers + tl.cumsum(asks, 0) - 1, k, mask=asks != 0)
        tl.store(chunk_count + g * chunks + j, tl.sum(asks, 0))
        place = g * slots + j * 16 + tl.arange(0, 16)
        tl.store(sums + place, tl.zeros((16,), tl.float64))
        tl.store(sums + groups * slots + place, tl.zeros((16,), tl.float64))
        tl.store(totals + place, tl.zeros((16,), tl.float32))
        tl.store(totals + groups * slots + place, tl.zeros((16,), tl.float32))
        tl.store(arrived + g * chunks + j, 0)


@triton.jit(do_not_specialize=SMALL)
def enter(
    row, x, sums, arrived, mean, rstd, gain, offset, scale, shift, inputs, consumers, chunks, share, pixels, H, W,
    TILE: tl.constexpr, EPSILON: tl.constexpr, CONSUMERS: tl.constexpr,
):  # fmt: skip
    """Rows ``(R or G, P, inputs)`` to chunks, and their sums. share: groups that read one row."""
    j, g, groups = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, 16)
    inside = p < pixels
    known = inside[:, None] & (j * 16 + c < inputs)[None, :]
    values = tl.load(row + ((g // share) * pixels + p)[:, None] * inputs + (j * 16 + c)[None, :], mask=known, other=0.0)
    q = (j * groups + g) * (pixels // H * (H + 2)) + _in_frame(p, H, W)
    tl.store(x + q[:, None] * 16 + c[None, :], values, mask=inside[:, None])
    _add_sums(
        values, inside, j, g, groups, sums, arrived, mean, rstd, gain, offset, scale, shift,
        consumers, chunks, pixels, EPSILON, CONSUMERS,
    )  # fmt: skip


@triton.jit
def _add_sums(
    values, inside, j, g, groups, sums, arrived, mean, rstd, gain, offset, scale, shift, consumers, chunks, pixels,
    EPSILON: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add up a tile's values and squares. The last tile of a group to arrive turns the sums into statistics.

    Squares are taken around the tile's own mean, and moved in float64: else a variance far below the squared mean
    would drown in rounding.
    """
    slots = chunks * 16
    exact, known = values.to(tl.float32), tl.sum(inside.to(tl.float32), 0)
    centre = tl.sum(tl.where(inside[:, None], exact, 0.0), 0) / known
    away = tl.where(inside[:, None], exact - centre[None, :], 0.0)
    near = centre.to(tl.float64)
    here = sums + g * slots + j * 16 + tl.arange(0, 16)
    tl.atomic_add(here, near * known, sem="relaxed")
    tl.atomic_add(here + groups * slots, tl.sum(away * away, 0).to(tl.float64) + near * near * known, sem="relaxed")
    tl.debug_barrier()  # the sums of all threads are on their way before one of them says so
    if tl.atomic_add(arrived + g * chunks + j, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _statistics(
            j, g, groups, sums, mean, rstd, gain, offset, scale, shift, consumers, chunks, pixels, EPSILON, TILE
        )


@triton.jit
def _statistics(
    j, g, groups, sums, mean, rstd, gain, offset, scale, shift, consumers, chunks, pixels,
    EPSILON: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From sums to mean and deviation, and to what each consumer makes of them."""
    c, slots = j * 16 + tl.arange(0, 16), chunks * 16
    k = tl.arange(0, TILE)
    average = tl.load(sums + g * slots + c, cache_modifier=".cg") / pixels
    variance = tl.load(sums + (groups + g) * slots + c, cache_modifier=".cg") / pixels - average * average
    m, v = average.to(tl.float32), variance.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.where(v < 0, 0.0, v) + EPSILON)  # a maximum would forget NaN
    tl.store(mean + g * slots + c, m)
    tl.store(rstd + g * slots + c, r)
    here = (g * consumers + k)[:, None] * slots + c[None, :]
    there = (k < consumers)[:, None] & (c >= 0)[None, :]
    s = tl.load(gain + here, mask=there, other=0.0) * r[None, :]
    t = tl.load(offset + here, mask=there, other=0.0) - s * m[None, :]
    spoilt = tl.sum(tl.sum((s + t) * 0, 0), 0)  # 0, or NaN for all consumers: the tail, which keeps it, is among them
    tl.store(scale + here, s + spoilt, mask=there)
    tl.store(shift + here, t + spoilt, mask=there)


@triton.jit(do_not_specialize=SMALL)
def pool(x, scale, shift, pooled, consumers, slots, pixels, small, H, W, POOL, TILE: tl.constexpr):
    """What the tail mixes: normalised, gated, rectified, averaged over windows."""
    j, g, groups = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    q = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, 16)
    inside, narrow = q < small, W // POOL
    corner = _in_frame((q // narrow) * POOL * W + (q % narrow) * POOL, H, W)
    last = (g * consumers + consumers - 1) * slots + j * 16 + c
    s, t = tl.load(scale + last), tl.load(shift + last)
    here = x + ((j * groups + g) * (pixels // H * (H + 2)) + corner)[:, None] * 16 + c[None, :]
    acc = tl.zeros((TILE, 16), tl.float32)
    for i in range(POOL * POOL):
        v = tl.load(here + ((i // POOL) * W + i % POOL) * 16, mask=inside[:, None], other=0.0).to(tl.float32)
        z = v * s[None, :] + t[None, :]
        acc += tl.where(z > 0, z, z * 0)  # a maximum would forget NaN, and a diverged run has to show
    mean = acc / (POOL * POOL)
    there = pooled + (g * small + q)[:, None] * slots + (j * 16 + c)[None, :]
    tl.store(there, mean.to(pooled.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=SMALL)
def finish(
    x, grad, mean, rstd, totals, target, first, slots, inputs, pixels, framed, H, W,
    FRAME: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Back through the normalisation: to a layer's output in its frame, or to rows ``(G, P, inputs)``."""
    j, g, groups = first + tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, 16)
    inside = p < pixels
    lanes = g * slots + j * 16 + c
    own = ((j * groups + g) * pixels + p)[:, None] * 16 + c[None, :]
    r = tl.load(rstd + lanes)
    place = (j * groups + g) * (pixels // H * (H + 2)) + _in_frame(p, H, W)
    v = tl.load(x + place[:, None] * 16 + c[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    normal = (v - tl.load(mean + lanes)[None, :]) * r[None, :]
    average, slope = tl.load(totals + lanes) / pixels, tl.load(totals + groups * slots + lanes) / pixels
    asked = tl.load(grad + own, mask=inside[:, None], other=0.0)
    found = (r[None, :] * (asked - average[None, :] - normal * slope[None, :])).to(target.dtype.element_ty)
    if FRAME:
        px, py, image = p % W, (p // W) % H, p // (W * H)
        corner = g * framed + (image * (H + 2) + py + 1) * (W + 2) + px + 1
        tl.store(target + corner[:, None] * 16 + c[None, :], found, mask=inside[:, None])
    else:
        known = inside[:, None] & (j * 16 + c < inputs)[None, :]
        tl.store(target + (g * pixels + p)[:, None] * inputs + (j * 16 + c)[None, :], found, mask=known)
