"""Rules by operation, first part: layout, elementwise and reducing operations.

Each rule says what one ATen operation does to the layouts of its operands. An operation without a rule freezes what it
touches, so a missing rule costs gates and never exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.gates.layout import Block, Layout, Propagation


@dataclass(eq=False)
class Event:
    """One product with a parameter: the parameter's number, and how often each of its elements was used."""

    weight: int
    uses: float
    rows: tuple[np.ndarray, ...] = ()  # further factors of the uses: arrays of atoms, counting those kept
    module: str = ""
    grouped: bool = False  # a grouped convolution: each group passes through, nothing is mixed between them


@dataclass(eq=False)
class Call:
    """One operation as it was executed: its schema name, operands, results and their layouts."""

    p: Propagation
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    of: Callable[[Any], Layout]
    sizes: dict[int, int] = field(default_factory=dict)  # elements of each parameter, by number
    events: list[Event] = field(default_factory=list)
    module: str = ""

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def x(self) -> Layout:
        return self.of(self.args[0])

    @property
    def tensors(self) -> list[Layout]:
        found: list[Layout] = []

        def visit(value: Any) -> None:
            if isinstance(value, Tensor):
                found.append(self.of(value))
            elif isinstance(value, (list, tuple)):
                for item in value:
                    visit(item)

        visit(self.args)
        visit(tuple(self.kwargs.values()))
        return found

    def shape(self, i: int | None = None) -> tuple[int, ...]:
        out = self.out if i is None else self.out[i]
        return tuple(out.shape)


Result = Layout | Sequence[Layout | None] | None
Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[f"aten::{name}"] = function
        return function

    return register


def wrap(dim: int, n: int) -> int:
    return dim % n if n else 0


def dims_of(value: Any, n: int) -> list[int]:
    """Dimensions as an operation takes them: None or empty for all, one, or several."""
    if value is None:
        return list(range(n))
    if isinstance(value, int):
        return [wrap(value, n)] if n else []
    return [wrap(d, n) for d in value] or list(range(n))


# ---- the same indices at the same places -----------------------------------------------------------------------------


@rule("detach", "alias", "clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "to", "positive")
def same(call: Call) -> Result:
    return call.x


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "bernoulli", "randint_like")
@rule("bernoulli_", "uniform_", "normal_", "zero_", "fill_", "random_", "exponential_", "native_dropout")
def like(call: Call) -> Result:
    layout = call.x.activation()
    return [layout, layout] if isinstance(call.out, (tuple, list)) else layout


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def filled(call: Call) -> Result:
    """A constant tensor looks the same at every index, so its axes are free; if its size does not follow a cut, the
    check at attach time finds out."""
    shape = call.shape()
    if max(shape, default=0) > 100_000:
        return Layout(shape)
    return call.p.clean(shape, [Block((d,), call.p.atoms.new(n)) for d, n in enumerate(shape)])


def pointwise(call: Call) -> Result:
    """Elementwise with broadcasting: what is combined goes together."""
    layouts = call.tensors
    outs = call.out if isinstance(call.out, (tuple, list)) else [call.out]
    verb = call.name.removeprefix("aten::").rstrip("_")
    made = [call.p.merged(layouts, tuple(out.shape), f"combined by {verb}") for out in outs]
    return made if isinstance(call.out, (tuple, list)) else made[0]


@rule("copy_", "masked_fill", "masked_fill_", "where", "clamp", "dropout", "_fused_dropout", "relu_", "lerp", "prelu")
@rule("_prelu_kernel", "addcmul", "addcdiv", "bitwise_not", "isin", "rrelu_with_noise", "floor_divide", "hardswish")
@rule("hardswish_", "log_sigmoid_forward", "special_expit", "threshold_", "celu_", "selu_", "alpha_dropout")
def elementwise(call: Call) -> Result:
    return pointwise(call)


@rule("fill_diagonal_", "tril", "triu", "tril_", "triu_")
def triangle(call: Call) -> Result:
    n = len(call.x.shape)
    return call.p.mixed_all(call.x, [n - 2, n - 1], "cut to a triangle")


# ---- moved indices ---------------------------------------------------------------------------------------------------


@rule("view", "_unsafe_view", "reshape", "unflatten", "flatten", "_reshape_alias", "view_copy")
def view(call: Call) -> Result:
    return call.p.reshaped(call.x, call.shape())


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


@rule("expand", "broadcast_to", "expand_copy")
def expand(call: Call) -> Result:
    x, shape = call.x, call.shape()
    shift = len(shape) - len(x.shape)
    return call.p.renumbered(x, shape, {d: d + shift for d in range(len(x.shape))})


@rule("repeat")
def repeat(call: Call) -> Result:
    """Tiles: along a repeated axis the same atoms come again."""
    x, shape = call.x, call.shape()
    shift = len(shape) - len(x.shape)
    blocks = []
    for block in x.blocks:
        times = [shape[d + shift] // x.shape[d] for d in block.dims]
        blocks.append(Block(tuple(d + shift for d in block.dims), np.tile(block.atoms, times)))
    return call.p.clean(shape, blocks)


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
    x, shape = call.x, call.shape()
    if shape == x.shape:
        return x
    dim = next(d for d in range(len(shape)) if shape[d] != x.shape[d])
    x = call.p.mixed(x, dim, "sliced at fixed places")
    return call.p.clean(shape, x.blocks, x.weight)


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "tensor_split")
def split(call: Call) -> Result:
    """Equal tiles of an axis keep the same units each, so that they stay equal; unequal ones fix the axis."""
    x = call.x
    dim = wrap(call.arg(2, "dim", 0), len(x.shape))
    sizes = [tuple(out.shape)[dim] for out in call.out]
    block = x.at(dim)
    if len(sizes) == 1 or block is None:
        return [call.p.clean(tuple(out.shape), x.blocks, x.weight) for out in call.out]
    if len(block.dims) > 1 or len(set(sizes)) > 1:
        x = call.p.mixed(x, dim, "split at fixed places")
        return [call.p.clean(tuple(out.shape), x.blocks, x.weight) for out in call.out]
    tiles = block.atoms.reshape(len(sizes), -1)
    call.p.atoms.tie(tiles[:1], tiles)
    return [call.p.taken(x, dim, slice(i * sizes[0], (i + 1) * sizes[0])) for i in range(len(sizes))]


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


@rule("index", "_unsafe_index")
def index(call: Call) -> Result:
    """Advanced indexing: indexed dimensions are fixed, the others move along."""
    p, x, indices = call.p, call.x, list(call.args[1])
    for given in indices:
        if given is not None:
            p.freeze(call.of(given), "used as an index")
    used = [d for d, given in enumerate(indices) if given is not None]
    if any(given is not None and given.dtype in (torch.bool, torch.uint8) for given in indices):
        p.freeze(x, "picked by a boolean mask")
        return Layout(call.shape())
    x = p.mixed_all(x, used, "looked up by index")
    wide = max(given.ndim for given in indices if given is not None)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    left = [d for d in range(len(x.shape)) if d not in used]
    before = [d for d in left if d < first] if first == used[0] else []
    place = {d: (i if i < len(before) else i + wide) for i, d in enumerate(left)}
    return p.clean(call.shape(), [Block(tuple(place[d] for d in b.dims), b.atoms) for b in x.blocks])


@rule("index_select")
def index_select(call: Call) -> Result:
    x = call.x
    dim = wrap(call.args[1], len(x.shape))
    return call.p.clean(call.shape(), call.p.mixed(x, dim, "looked up by index").blocks)


# ---- operations over whole axes --------------------------------------------------------------------------------------


def reduce_(call: Call) -> Result:
    """Sums, means, extrema over axes: those need every index; without ``keepdim`` they vanish."""
    x = call.x
    first = call.arg(1, "dim")
    dims = dims_of(None if isinstance(first, bool) else first, len(x.shape))
    return _reduced(call, dims)


def _reduced(call: Call, dims: list[int]) -> Result:
    verb = call.name.removeprefix("aten::")
    x = call.p.mixed_all(call.x, dims, f"{verb} over the axis")
    several = isinstance(call.out, (tuple, list))
    made = []
    for out in call.out if several else [call.out]:
        shape = tuple(out.shape)
        if len(shape) == len(x.shape):
            made.append(call.p.clean(shape, x.blocks))
        else:
            made.append(call.p.without(x.activation(), dims))
    return made if several else made[0]


for _name in ("sum", "mean", "amax", "amin", "any", "all", "prod", "max", "min", "logsumexp", "argmax", "argmin"):
    RULES[f"aten::{_name}"] = reduce_
for _name in ("std_mean", "var_mean", "var", "std", "aminmax", "median", "nansum", "count_nonzero"):
    RULES[f"aten::{_name}"] = reduce_


@rule("linalg_vector_norm", "norm")
def norm(call: Call) -> Result:
    return _reduced(call, dims_of(call.arg(2, "dim"), len(call.x.shape)))


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
@rule("_safe_softmax", "sort", "cummax", "cummin")
def along(call: Call) -> Result:
    """The shape stays, and every index of one axis meets every other."""
    verb = call.name.removeprefix("aten::").lstrip("_")
    n = len(call.x.shape)
    position = call.arg(1, "dim", -1)
    x = call.p.mixed_all(call.x.activation(), dims_of(position, n), f"{verb} over the axis")
    return [x] * len(call.out) if isinstance(call.out, (tuple, list)) else x


SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def spatial(call: Call) -> Result:
    """Pooling, resampling, padding: batch and channels pass, space is worked on."""
    x = call.x.activation()
    n = next((k for mark, k in SPATIAL.items() if mark in call.name), 2)
    dims = range(max(0, len(x.shape) - n), len(x.shape))
    x = call.p.mixed_all(x, dims, "pooled or resampled")
    outs = call.out if isinstance(call.out, (tuple, list)) else [call.out]
    made = [call.p.clean(tuple(out.shape), x.blocks) for out in outs]
    return made if isinstance(call.out, (tuple, list)) else made[0]


for _name in ("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool"):
    for _n in SPATIAL:
        RULES[f"aten::{_name}{_n}"] = RULES[f"aten::{_name}{_n}_with_indices"] = spatial
for _name in ("nearest", "bilinear", "bicubic", "linear", "trilinear"):
    for _n in ("1d", "2d", "3d"):
        for _kind in ("upsample_", "_upsample_"):
            RULES[f"aten::{_kind}{_name}{_n}"] = RULES[f"aten::{_kind}{_name}{_n}_aa"] = spatial
        RULES[f"aten::_upsample_nearest_exact{_n}"] = spatial
for _name in ("reflection_pad", "replication_pad"):
    for _n in SPATIAL:
        RULES[f"aten::{_name}{_n}"] = spatial


@rule("pixel_shuffle")
def pixel_shuffle(call: Call) -> Result:
    *lead, channels, high, wide = call.x.shape
    r, k = call.args[1], len(lead)
    x = call.p.reshaped(call.x, (*lead, channels // (r * r), r, r, high, wide))
    order = [*range(k), k, k + 3, k + 1, k + 4, k + 2]
    return call.p.reshaped(call.p.permuted(x, order), call.shape())
