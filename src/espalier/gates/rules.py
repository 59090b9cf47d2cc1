"""Rules by operation, first part: elementwise, reducing and resampling operations.

Each rule says what one ATen operation does to the layouts of its operands. An operation without a rule freezes what it
touches, so a missing rule costs gates and never exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from espalier.gates.layout import Block, Layout, Propagation


@dataclass(eq=False)
class Event:
    """One product: the number of the parameter in it, and how often each of its elements was used.

    Number -1: no single parameter, but a tensor ``computed`` from parameters, or a product of two activations.
    """

    weight: int
    uses: float
    rows: tuple[np.ndarray, ...] = ()  # further factors of the uses: arrays of atoms, counting those kept
    module: str = ""
    grouped: bool = False  # a grouped convolution: each group passes through, nothing is mixed between them
    summed: frozenset[int] = frozenset()  # the parameter's dimensions that were summed over; the others are written
    computed: Layout | None = None


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
    strides: tuple[int, ...] = ()  # of the first operand of `as_strided_`, before that changed them

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


# ---- operations over whole axes --------------------------------------------------------------------------------------


def reduce_(call: Call) -> Result:
    """Sums, means, extrema over axes: those need every index; without ``keepdim`` they vanish."""
    x = call.x
    first = call.arg(1, "dim")
    if isinstance(first, Tensor):  # the larger of two tensors
        return pointwise(call)
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
