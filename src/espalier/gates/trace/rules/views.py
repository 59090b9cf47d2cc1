"""Rules: views, splits, joins and lookups, which move indices about."""

from __future__ import annotations

import math

import numpy as np
import torch

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Result, dims_of, rule, wrap


@rule("view", "_unsafe_view", "reshape", "unflatten", "flatten", "_reshape_alias", "view_copy")
def view(call: Call) -> Result:
    return call.p.reshaped(call.x, call.shape())


@rule("as_strided", "as_strided_")
def as_strided(call: Call) -> Result:
    """Channels-last pooling to one place restates strides: nothing moved if those of axes longer than 1 stay."""
    x, size, strides = call.x, call.arg(1, "size"), call.arg(2, "stride")
    unmoved = all(a == b for n, a, b in zip(x.shape, call.strides, strides) if n > 1)
    if tuple(size) == x.shape and unmoved and call.arg(3, "storage_offset") is None:
        return x
    call.p.freeze(x, "laid out anew by `as_strided`")
    return Layout(call.shape())


@rule("t", "numpy_T", "mT")
def transpose_all(call: Call) -> Result:
    return call.p.permuted(call.x, list(range(len(call.x.shape)))[::-1])


@rule("transpose", "swapaxes", "transpose_")
def transpose(call: Call) -> Result:
    order = list(range(len(call.x.shape)))
    a, b = (wrap(call.args[i], len(order)) for i in (1, 2)) if order else (0, 0)
    if order:
        order[a], order[b] = order[b], order[a]
    return call.p.permuted(call.x, order)


@rule("permute")
def permute(call: Call) -> Result:
    return call.p.permuted(call.x, [wrap(d, len(call.x.shape)) for d in call.args[1]])


@rule("unsqueeze", "unsqueeze_")
def unsqueeze(call: Call) -> Result:
    shape = call.shape()
    new = wrap(call.args[1], len(shape))
    return call.p.renumbered(call.x, shape, {d: d + (d >= new) for d in range(len(shape) - 1)})


@rule("squeeze", "squeeze_")
def squeeze(call: Call) -> Result:
    x = call.x
    chosen = dims_of(call.arg(1, "dim"), len(x.shape))
    return call.p.without(x, [d for d in chosen if x.shape[d] == 1])


@rule("view_as_complex")
def complex_(call: Call) -> Result:
    """The last axis holds the real and the imaginary part."""
    last = len(call.x.shape) - 1
    return call.p.without(call.p.mixed(call.x.activation(), last, "real and imaginary part"), [last])


@rule("view_as_real")
def real(call: Call) -> Result:
    return call.in_shape(call.x.activation())


@rule("expand", "broadcast_to", "expand_copy")
def expand(call: Call) -> Result:
    x, shape = call.x, call.shape()
    shift = len(shape) - len(x.shape)
    return _copied(call, call.p.renumbered(x, shape, {d: d + shift for d in range(len(x.shape))}))


@rule("repeat")
def repeat(call: Call) -> Result:
    """Tiles: along a repeated axis the same atoms come again."""
    n, shape = len(call.x.shape), call.shape()
    shift = len(shape) - n
    x = call.p.renumbered(call.x.activation(), (1,) * shift + call.x.shape, {d: d + shift for d in range(n)})
    for dim, size in enumerate(shape):
        x = call.p.taken(x, dim, np.arange(size) % max(x.shape[dim], 1))
    return _copied(call, x)


def _copied(call: Call, x: Layout) -> Layout:
    """Along an axis that was one index, all are alike: as many may be left as there are heads or channels to meet.

    If their number does not follow a cut, the check at attach time finds out. The batch is no such axis.
    """
    p, shape = call.p, call.shape()
    old = (1,) * (len(shape) - len(call.x.shape)) + call.x.shape
    free = [d for d, n in enumerate(shape) if old[d] == 1 < n <= 100_000 and (d > 0 or n != p.examples)]
    return p.clean(shape, (*x.blocks, *(Block((d,), p.atoms.new(shape[d])) for d in free)), x.weight)


@rule("select")
def select(call: Call) -> Result:
    x = call.x
    dim = wrap(call.args[1], len(x.shape))
    return call.p.without(call.p.mixed(x, dim, "one index picked"), [dim])


@rule("unbind")
def unbind(call: Call) -> Result:
    x = call.x
    dim = wrap(call.arg(1, "dim", 0), len(x.shape))
    return [call.p.without(call.p.mixed(x, dim, "taken apart by unbind"), [dim])] * len(call.out)


@rule("slice", "narrow")
def slice_(call: Call) -> Result:
    """A part of an axis keeps its units. Whether its ends follow a cut, the trial at attach time finds out."""
    x, shape = call.x, call.shape()
    if shape == x.shape:
        return x
    if 0 in shape:  # nothing is taken, as of units of a kind that a layer has none of
        return Layout(shape)
    dim = next(d for d in range(len(shape)) if shape[d] != x.shape[d])
    block = x.at(dim)
    if block is None or len(block.dims) > 1 or call.p.unchecked:
        x = call.p.mixed(x, dim, "sliced at fixed places")
        return call.p.clean(shape, x.blocks, x.weight)
    start, end = call.arg(2, "start") or 0, call.arg(3, "end")
    if call.name == "aten::narrow":
        end += start
    ends = [end for end in (start, end) if end is not None and 0 < abs(end) < x.shape[dim]]
    call.p.parts += [(call.module, block.atoms[:end] if end > 0 else block.atoms[end:]) for end in ends]
    return call.p.taken(x, dim, slice(start, end, call.arg(4, "step", 1)))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "tensor_split")
def split(call: Call) -> Result:
    """Equal parts of an axis keep the same units each, so that they stay equal; unequal ones keep their own. In torch's
    attention, where queries are split from keys and values, all are alike."""
    x = call.x
    dim = wrap(call.arg(2, "dim", 0), len(x.shape))
    sizes = [tuple(out.shape)[dim] for out in call.out]
    block = x.at(dim)
    if len(sizes) == 1 or block is None:
        return [call.p.clean(tuple(out.shape), x.blocks, x.weight) for out in call.out]
    attention = call.module in call.p.heads
    if len(block.dims) > 1 or (call.p.unchecked and len(set(sizes)) > 1 and not attention):
        x = call.p.mixed(x, dim, "split at fixed places")
        return [call.p.clean(tuple(out.shape), x.blocks, x.weight) for out in call.out]
    parts = np.split(block.atoms, np.cumsum(sizes)[:-1])
    alike = (
        [block.atoms.reshape(-1, math.gcd(*sizes))]
        if attention
        else [np.stack([part for part in parts if len(part) == size]) for size in sorted(set(sizes))]
    )
    for tiles in alike:
        call.p.atoms.tie(tiles[:1], tiles)
    call.p.parts += [(call.module, part) for part in parts]
    ends = np.cumsum(sizes)
    return [call.p.taken(x, dim, slice(int(end) - size, int(end))) for size, end in zip(sizes, ends)]


@rule("glu")
def glu(call: Call) -> Result:
    x = call.x
    dim = wrap(call.arg(1, "dim", -1), len(x.shape))
    half = x.shape[dim] // 2
    block = x.at(dim)
    if block is not None and len(block.dims) == 1:
        call.p.atoms.tie(block.atoms[:half], block.atoms[half:])
    else:
        x = call.p.mixed(x, dim, "split at fixed places")
    return call.p.taken(x, dim, slice(0, half))


@rule("cat", "concatenate")
def cat(call: Call) -> Result:
    """Along the joined axis the atoms follow one another; elsewhere the operands are tied."""
    p = call.p
    dim = wrap(call.arg(1, "dim", 0), len(call.shape()))
    layouts = [call.of(t) for t in call.args[0] if tuple(t.shape) != (0,)]
    parts = []
    if any(layout.at(dim) is not None for layout in layouts):
        for i, layout in enumerate(layouts):
            layouts[i], atoms = p.only(layout, dim, "joined with others by cat")
            if atoms is None:
                atoms = p.atoms.new(layout.shape[dim])
                p.atoms.freeze(atoms, f"joined by cat with a tensor of fixed size (in {p.where})")
            parts.append(atoms)
    narrow = [
        Layout((*x.shape[:dim], 1, *x.shape[dim + 1 :]), tuple(b for b in x.blocks if dim not in b.dims))
        for x in layouts
    ]
    shape = call.shape()
    joined = p.merged(narrow, (*shape[:dim], 1, *shape[dim + 1 :]), "joined by cat")
    blocks = (*joined.blocks, Block((dim,), np.concatenate(parts))) if parts else joined.blocks
    return p.clean(shape, blocks)


@rule("stack")
def stack(call: Call) -> Result:
    dim = wrap(call.arg(1, "dim", 0), len(call.shape()))
    layouts = [call.of(t) for t in call.args[0]]
    joined = call.p.merged(layouts, layouts[0].shape, "stacked")
    shape = call.shape()
    return call.p.renumbered(joined, shape, {d: d + (d >= dim) for d in range(len(shape) - 1)})


@rule("roll", "flip")
def roll(call: Call) -> Result:
    x = call.x
    dims = dims_of(call.arg(2, "dims") if call.name == "aten::roll" else call.arg(1, "dims"), len(x.shape))
    return call.p.mixed_all(x, dims, "rolled or flipped")


@rule("index", "_unsafe_index")
def index(call: Call) -> Result:
    """Advanced indexing: indexed dimensions are fixed, the others move along."""
    x = call.x
    used, place, *_ = _indexed(call, x)
    x = call.p.mixed_all(x, used, "looked up by index")
    return call.p.renumbered(x.activation(), call.shape(), place)


@rule("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
def index_put(call: Call) -> Result:
    """What is put into places by advanced indexing goes with what lies there along the other dimensions."""
    p, x, values = call.p, call.x.activation(), call.of(call.args[2]).activation()
    used, place, first, at = _indexed(call, x)
    x = p.mixed_all(x, used, "looked up by index")
    left = [x.shape[d] for d in place]
    shape = [*left[:first], *at, *left[first:]]
    behind = len(shape) - len(values.shape)
    rows = [d - behind for d in range(first, first + len(at)) if d >= behind]
    values = p.mixed_all(values, rows, "looked up by index")
    put = p.merged([p.renumbered(x, shape, place), values], shape, "put in by index")
    return p.renumbered(put, x.shape, {new: old for old, new in place.items()})


def _indexed(call: Call, x: Layout) -> tuple[list[int], dict[int, int], int, list[int]]:
    """Of advanced indexing: the dimensions that are indexed, where each of the others goes, and where that puts which
    shape in their place. A mask of booleans indexes as many dimensions as it has."""
    used, shapes, dim = list[int](), list[tuple[int, ...]](), 0
    for given in call.args[1]:
        count = 1
        if given is not None:
            call.p.freeze(call.of(given), "used as an index")
            is_mask = given.dtype in (torch.bool, torch.uint8)
            count = given.ndim if is_mask else 1
            shapes.append((int(given.count_nonzero()),) if is_mask else tuple(given.shape))
            used += range(dim, dim + count)
        dim += count
    at = list(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    first = used[0] if used and used == list(range(used[0], used[-1] + 1)) else 0
    left = [d for d in range(len(x.shape)) if d not in used]
    return used, {d: i if d < first else i + len(at) for i, d in enumerate(left)}, first, at


@rule("index_select")
def index_select(call: Call) -> Result:
    x = call.x
    dim = wrap(call.args[1], len(x.shape))
    return call.in_shape(call.p.mixed(x, dim, "looked up by index"))


@rule("gather")
def gather(call: Call) -> Result:
    """Along one axis each element says where to look; along the others the two go together."""
    return _looked_up(call, call.args[1], [call.x, call.of(call.args[2])])


@rule("scatter_add", "scatter_add_", "scatter", "scatter_", "scatter_reduce", "scatter_reduce_")
@rule("index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_")
def scatter(call: Call) -> Result:
    """Messages put or added into places along one axis, each row as a whole or each element by an index of its own."""
    given = call.layouts(call.args[2:4])
    if call.name.startswith("aten::index"):
        call.p.freeze(given.pop(0), "used as an index")
    return _looked_up(call, call.args[1], [call.x.activation(), *given])


def _looked_up(call: Call, dim: int, operands: list[Layout]) -> Layout:
    """Operands that share every axis but one, which holds the places that are read or written."""
    shape = call.shape()
    dim = wrap(dim, len(shape))
    narrow = (*shape[:dim], 1, *shape[dim + 1 :])
    if any((*x.shape[:dim], 1, *x.shape[dim + 1 :]) != narrow for x in operands):
        for x in operands:
            call.p.freeze(x, "looked up by index, in part")
        return Layout(shape)
    rows = [Layout(narrow, call.p.mixed(x, dim, "looked up by index").blocks) for x in operands]
    return call.p.clean(shape, call.p.merged(rows, narrow, "looked up by index").blocks)


@rule("embedding", "embedding_renorm_", "_embedding_bag", "_embedding_bag_forward_only")
def embedding(call: Call) -> Result:
    """Rows of a table, or what bags of them add up to; the first result alone has its columns."""
    w = call.p.mixed(call.of(call.args[0]), 0, "a table looked up by index")
    shape = call.shape()
    return [call.p.clean(shape, [Block((len(shape) - 1,), b.atoms) for b in w.blocks])]
