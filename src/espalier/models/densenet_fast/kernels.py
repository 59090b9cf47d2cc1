"""The fast step's kernels on chunks of 16 channels, in Triton, for all runs and masks in one launch: gates, statistics,
pooling, the way back through the normalisation; then the convolutions and their gradients.

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


# ---- convolutions ----------------------------------------------------------------------------------------------------


# Layers, 3 x 3 convolutions of normalised, gated and rectified chunks: a program has ROWS rows of a strip, the same
# rows of as many images as make WIDE pixels side by side. A chunk's row is read and rectified once and multiplied by
# the weights of the up to three output rows that see it.
#
# Gradients: of what a consumer reads, ``u = m relu(gamma n + beta)`` with n normalised and m the gate, a weight's is
# ``sum u dy = gamma N + beta A`` where ``N = sum m [u > 0] n dy`` and ``A = sum m [u > 0] dy`` over pixels. And because
# what is asked of u is ``sum w dy`` over the taps, gamma's gradient is ``sum w N`` and beta's is ``sum w A``. So two
# matrix products per weight give all three, and on the way back to the activations nothing has to be summed over
# pixels.

FEW = [name for name in SMALL if name not in ("H", "W", "POOL")]


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


@triton.jit
def _neighbours(p, pixels, H: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr):
    """Where a pixel lies when every image has a frame; pixels that do not exist are the first one."""
    px, py, image = p % W, (p // W) % H, p // (W * H)
    corner = (image * (H + 2) + py + 1) * (W + 2) + px + 1
    return corner if EVEN else tl.where(p < pixels, corner, W + 3)


@triton.jit
def _first_eight(corner, W: tl.constexpr):
    """Where the first eight of nine neighbours and their channels lie, ``(pixels, 128)``."""
    k = tl.arange(0, 128)
    near = ((k // 48 - 1) * (W + 2) + (k // 16) % 3 - 1) * 16 + k % 16
    return corner[:, None] * 16 + near[None, :]


@triton.jit
def _by_tap(corner, W: tl.constexpr):
    """The same as ``(pixels, 8, 16)``: neighbouring threads read neighbouring pixels instead of a pixel's neighbours.

    For weights this is faster, for activations it is slower (docs/performance.md).
    """
    tap = tl.arange(0, 8)[None, :, None]
    near = ((tap // 3 - 1) * (W + 2) + tap % 3 - 1) * 16 + tl.arange(0, 16)[None, None, :]
    return corner[:, None, None] * 16 + near


@triton.jit(do_not_specialize=FEW)
def source(
    x, out, weight, pooled_grad, gain, offset, mean, rstd, listed, count, gates, grad, totals,
    gamma, beta, grad_stride, first, last, consumers, chunks, samples, pixels, framed, small, run_stride,
    H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The gradient of the normalised values of MANY chunks of one source: what the tail asks, and each open layer."""
    j, g, groups = first + tl.program_id(1) * MANY, tl.program_id(2), tl.num_programs(2)
    slots = chunks * 16
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k, o, n = tl.arange(0, 128), tl.arange(0, 16), tl.arange(0, MANY * 16)
    lanes = j * 16 + n
    known = lanes < last * 16
    both = (p < pixels)[:, None] & known[None, :]
    chunk = (j + n // 16) * groups + g
    place = _in_frame(p, H, W)[:, None] * 16 + (chunk * (pixels // H * (H + 2)) * 16 + n % 16)[None, :]
    v = tl.load(x + place, mask=both, other=0.0).to(tl.float32)
    m = tl.load(mean + g * slots + lanes, mask=known, other=0.0)
    r = tl.load(rstd + g * slots + lanes, mask=known, other=0.0)
    normal = (v - m[None, :]) * r[None, :]
    # Nothing is added: but from here on values lie in registers as products do, and are not moved in the loop.
    zeros = tl.zeros((TILE, 16), x.dtype.element_ty)
    normal = tl.dot(zeros, tl.zeros((16, MANY * 16), x.dtype.element_ty), normal, input_precision=PRECISION)

    tail = (consumers - 1) * slots
    px, py, image = p % W, (p // W) % H, p // (W * H)
    window = (image * (H // POOL) + py // POOL) * (W // POOL) + px // POOL
    ask = tl.load(pooled_grad + (g * small + window)[:, None] * slots + lanes[None, :], mask=both, other=0.0)
    gain += g * consumers * slots + lanes
    offset += g * consumers * slots + lanes
    s, t = tl.load(gain + tail, mask=known, other=0.0), tl.load(offset + tail, mask=known, other=0.0)
    passed = tl.where((normal * s[None, :] + t[None, :] > 0) & both, ask.to(tl.float32) / (POOL * POOL), 0.0)
    plain, weighted = tl.reduce((passed, passed * normal), 0, _add_two)
    bit = tl.load(gates + (g * consumers + consumers - 1) * chunks + j)  # one for all chunks of a source
    at = (g // samples) * grad_stride + tail + lanes
    tl.atomic_add(beta + at, plain * bit, mask=known, sem="relaxed")
    tl.atomic_add(gamma + at, weighted * bit, mask=known, sem="relaxed")
    total = passed * s[None, :]

    # The nine taps of 16 channels as 8 + 1: the frame of zeros around an image makes every neighbour readable.
    corner = g * framed + _neighbours(p, pixels, H, W, EVEN)
    eight = out + _first_eight(corner, W)
    ninth = out + (corner + W + 3)[:, None] * 16 + o[None, :]
    column = (n // 16) * 9 * 256 + n % 16
    weight += (g // samples) * run_stride + j * 9 * 256
    row = weight + k[:, None] * 16 + column[None, :]
    last_row = weight + 2048 + o[:, None] * 16 + column[None, :]
    listed += (g * chunks + j) * consumers
    number = tl.load(count + g * chunks + j)
    layer = tl.load(listed)
    for i in range(number):
        following = tl.load(listed + tl.minimum(i + 1, number - 1))
        far, by = layer * groups * framed * 16, layer * chunks * 9 * 256
        asked, asked_last = tl.load(eight + far), tl.load(ninth + far)
        if MANY == 1:
            w, w_last = tl.load(row + by), tl.load(last_row + by)
            s, t = tl.load(gain + layer * slots), tl.load(offset + layer * slots)
        else:
            w = tl.load(row + by, mask=known[None, :], other=0.0)
            w_last = tl.load(last_row + by, mask=known[None, :], other=0.0)
            s = tl.load(gain + layer * slots, mask=known, other=0.0)
            t = tl.load(offset + layer * slots, mask=known, other=0.0)
        acc = tl.dot(asked, w, input_precision=PRECISION)
        acc = tl.dot(asked_last, w_last, acc, input_precision=PRECISION)
        total += tl.where(normal * s[None, :] + t[None, :] > 0, acc, 0.0) * s[None, :]
        layer = following
    if not EVEN:
        total = tl.where(both, total, 0.0)
    own = p[:, None] * 16 + (chunk * pixels * 16 + n % 16)[None, :]
    tl.store(grad + own, total, mask=both)
    plain, weighted = tl.reduce((total, total * normal), 0, _add_two)
    tl.atomic_add(totals + g * slots + lanes, plain, mask=known, sem="relaxed")
    tl.atomic_add(totals + (groups + g) * slots + lanes, weighted, mask=known, sem="relaxed")


@triton.jit(do_not_specialize=FEW)
def weights(
    x, out, scale, shift, mean, rstd, gates, listed, count, target,
    consumers, chunks, samples, groups, pixels, framed, per_split, run_stride, half, H: tl.constexpr, W: tl.constexpr,
    TILE: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """N and A between one layer and MANY of the chunks it reads, over a part of the pixels of one group.

    target: ``(2, R, L, C, 16 in, 9 mirrored, 16 out)``, first N, then, half a tensor further, A. Values are
    multiplied as they are, to V: ``N = (V - mean A) rstd``.
    """
    quads = tl.cdiv(chunks - 1, MANY)
    layer, quad, g = tl.program_id(1) // quads, tl.program_id(1) % quads, tl.program_id(2)
    row = g * consumers + layer
    number = tl.load(count + row)
    if quad * MANY < number:
        k, c, slots = tl.arange(0, 128), tl.arange(0, 16), chunks * 16
        i = tl.arange(0, MANY * 16)
        place = quad * MANY + i // 16
        known = place < number
        j = tl.load(listed + row * chunks + place, mask=known, other=0)
        slot = j * 16 + i % 16
        s = tl.load(scale + row * slots + slot, mask=known, other=0.0)
        t = tl.load(shift + row * slots + slot, mask=known, other=0.0)
        gate = tl.load(gates + row * chunks + j, mask=known, other=0.0)
        chunk = quad * MANY + tl.arange(0, MANY)
        chunk = tl.load(listed + row * chunks + chunk, mask=chunk < number, other=0)
        far = ((chunk * groups + g) * (pixels // H * (H + 2)) * 16)[None, :, None] + c[None, None, :]
        there = out + (layer * groups + g) * framed * 16
        value = tl.zeros((MANY * 16, 128), tl.float32)
        active = tl.zeros((MANY * 16, 128), tl.float32)
        value_last = tl.zeros((MANY * 16, 16), tl.float32)
        active_last = tl.zeros((MANY * 16, 16), tl.float32)
        start = tl.program_id(0) * per_split
        own = tl.arange(0, TILE)
        corner = (own // W) * (W + 2) + own % W  # of a tile of whole rows of one image
        for begin in range(start, tl.minimum(start + per_split, pixels), TILE):
            if WHOLE:
                image, y = begin // (H * W), (begin // W) % H
                above = there + ((image * (H + 2) + y + 1) * (W + 2) + 1) * 16
                eight = tl.load(above + _by_tap(corner, W))
                ninth = tl.load(above + ((corner + W + 3)[:, None] * 16 + c[None, :]))
                base, lies = x + (begin + (2 * image + 1) * W) * 16, own * 16
            else:
                p = begin + own
                corner = _neighbours(p, pixels, H, W, False)
                eight = tl.load(there + _by_tap(corner, W))
                ninth = tl.load(there + (corner + W + 3)[:, None] * 16 + c[None, :])
                base, lies = x, _in_frame(tl.minimum(p, pixels - 1), H, W) * 16
            v = tl.reshape(tl.load(base + (lies[:, None, None] + far)), (TILE, MANY * 16))
            eight = tl.reshape(eight, (TILE, 128))
            exact = v.to(tl.float32)
            lit = exact * s[None, :] + t[None, :] > 0
            if not WHOLE:
                lit = lit & (begin + own < pixels)[:, None]
            on = tl.where(lit, 1.0, 0.0)
            by_value, by_one = tl.trans((exact * on).to(v.dtype)), tl.trans((on * gate[None, :]).to(v.dtype))
            value = tl.dot(by_value, eight, value, input_precision=PRECISION)
            active = tl.dot(by_one, eight, active, input_precision=PRECISION)
            value_last = tl.dot(by_value, ninth, value_last, input_precision=PRECISION)
            active_last = tl.dot(by_one, ninth, active_last, input_precision=PRECISION)
        m, r = tl.load(mean + g * slots + slot)[:, None], tl.load(rstd + g * slots + slot)[:, None]
        to = target + (g // samples) * run_stride + layer * chunks * 9 * 256 + (slot * 144)[:, None] + k[None, :]
        there = known[:, None] & (k >= 0)[None, :]
        tl.atomic_add(to, (value * gate[:, None] - m * active) * r, mask=there, sem="relaxed")
        tl.atomic_add(to + half, active, mask=there, sem="relaxed")
        to = target + (g // samples) * run_stride + layer * chunks * 9 * 256 + (slot * 144)[:, None] + 128 + c[None, :]
        there = known[:, None] & (c >= 0)[None, :]
        tl.atomic_add(to, (value_last * gate[:, None] - m * active_last) * r, mask=there, sem="relaxed")
        tl.atomic_add(to + half, active_last, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=[*FEW, "affine_stride", "weight_stride"])
def settle(
    sums, weight, gamma, beta, gates, target, gamma_grad, beta_grad, slopes, first, consumers, chunks, samples, half,
    run_stride, affine_stride, weight_stride, grad_stride, SLOPES: tl.constexpr,
):  # fmt: skip
    """From N and A between a layer and a chunk to the gradients of weights, gamma and beta.

    SLOPES: N and A are of each group and as if the gate were open. ``sum w (gamma N + beta A)`` is then the slope of
    its loss by the gate, and what they are of a run is their sum over its groups, each times its gate.
    """
    j, layer, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if j < first + layer:
        i, k = tl.arange(0, 16), tl.arange(0, 256)
        there = (k < 144)[None, :] & (i >= 0)[:, None]
        at = (layer * chunks + j) * 2304 + i[:, None] * 144 + k[None, :]
        turned = (layer * chunks + j) * 2304 + k[None, :] * 16 + i[:, None]
        w = tl.load(weight + r * weight_stride + turned, mask=there, other=0.0).to(tl.float32)
        slot = layer * chunks * 16 + j * 16 + i
        s, t = tl.load(gamma + r * affine_stride + slot), tl.load(beta + r * affine_stride + slot)
        if SLOPES:
            normal = tl.zeros((16, 256), tl.float32)
            active = tl.zeros((16, 256), tl.float32)
            for g in range(r * samples, (r + 1) * samples):
                n = tl.load(sums + g * run_stride + at, mask=there, other=0.0)
                a = tl.load(sums + half + g * run_stride + at, mask=there, other=0.0)
                own = (g * consumers + layer) * chunks + j
                tl.store(slopes + own, tl.sum(s * tl.sum(w * n, 1) + t * tl.sum(w * a, 1), 0))
                gate = tl.load(gates + own)
                normal += tl.where(gate != 0, gate * n, 0.0)  # what a closed gate hides may be infinite
                active += tl.where(gate != 0, gate * a, 0.0)
        else:
            normal = tl.load(sums + r * run_stride + at, mask=there, other=0.0)
            active = tl.load(sums + half + r * run_stride + at, mask=there, other=0.0)
        tl.store(target + r * grad_stride + at, s[:, None] * normal + t[:, None] * active, mask=there)
        tl.store(gamma_grad + r * grad_stride + slot, tl.sum(w * normal, 1))
        tl.store(beta_grad + r * grad_stride + slot, tl.sum(w * active, 1))
