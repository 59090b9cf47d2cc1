"""Rules: operations element by element, and those along whole axes (sums, extrema, softmax, sorting)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Event, Result, dims_of, rule, wrap

# ---- the same indices at the same places -----------------------------------------------------------------------------


@rule("detach", "alias", "clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "to", "positive")
@rule("_conj", "_conj_physical", "resolve_conj", "_neg_view", "resolve_neg")
def same(call: Call) -> Result:
    return call.x


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "bernoulli", "randint_like")
@rule("bernoulli_", "uniform_", "normal_", "zero_", "fill_", "random_", "exponential_", "native_dropout")
def like(call: Call) -> Result:
    return [call.x.activation()] * len(call.outs)


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def filled(call: Call) -> Result:
    """A constant tensor looks the same at every index, so its axes are free; if its size does not follow a cut, the
    check at attach time finds out."""
    shape = call.shape()
    if max(shape, default=0) > 100_000:
        return Layout(shape)
    return call.p.clean(shape, [Block((d,), call.p.atoms.new(n)) for d, n in enumerate(shape)])


@rule("copy_", "masked_fill", "masked_fill_", "where", "clamp", "dropout", "_fused_dropout", "relu_", "lerp", "prelu")
@rule("_prelu_kernel", "addcmul", "addcdiv", "bitwise_not", "isin", "rrelu_with_noise", "floor_divide", "hardswish")
@rule("hardswish_", "log_sigmoid_forward", "special_expit", "threshold_", "celu_", "selu_", "alpha_dropout")
@rule("complex", "polar", "softplus_backward", "fake_quantize_per_tensor_affine_cachemask")
@rule("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "elu_backward", "leaky_relu_backward")
@rule("hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "mish_backward", "log_sigmoid_backward")
def pointwise(call: Call) -> Result:
    """Elementwise with broadcasting: what is combined goes together."""
    layouts, verb = call.tensors, call.name.removeprefix("aten::").rstrip("_")
    weights = [x for x in layouts if x.weight >= 0]
    if verb == "mul" and len(layouts) == 2 and len(weights) == 1:
        product = call.p.merged(layouts, call.shape(), f"combined by {verb}")
        return replace(product, scaled=weights[0].lifted(product.shape))
    return [call.p.merged(layouts, tuple(out.shape), f"combined by {verb}") for out in call.outs]


@rule("fake_quantize_per_channel_affine_cachemask")
def rounded(call: Call) -> Result:
    """Each channel has a scale and a zero point of its own."""
    axis, why = wrap(call.args[3], len(call.x.shape)), "rounded by channel"
    x, atoms = call.p.only(call.x.activation(), axis, why)
    call.p.beside(atoms, [call.of(own) for own in call.args[1:3]], why)
    return [x] * len(call.outs)


@rule("fill_diagonal_", "tril", "triu", "tril_", "triu_")
def triangle(call: Call) -> Result:
    n = len(call.x.shape)
    return call.p.mixed_all(call.x, [n - 2, n - 1], "cut to a triangle")


# ---- operations over whole axes --------------------------------------------------------------------------------------


@rule("sum", "mean", "amax", "amin", "any", "all", "prod", "max", "min", "logsumexp", "argmax", "argmin")
@rule("std_mean", "var_mean", "var", "std", "aminmax", "median", "nansum", "count_nonzero")
@rule("linalg_vector_norm", "norm")
def reduce_(call: Call) -> Result:
    """Sums, means, extrema, norms over axes: those need every index; without ``keepdim`` they vanish."""
    verb = call.name.removeprefix("aten::")
    over = call.arg(2 if "norm" in verb else 1, "dim")
    if isinstance(over, Tensor):  # the larger of two tensors
        return pointwise(call)
    dims = dims_of(None if isinstance(over, bool) else over, len(call.x.shape))
    x = _dotted(call, call.x, dims) if verb == "sum" else call.x
    x = call.p.mixed_all(x.activation(), dims, f"{verb} over the axis")
    kept = len(call.shape()) == len(x.shape)
    return call.in_shape(x) if kept else [call.p.without(x, dims)] * len(call.outs)


def _dotted(call: Call, x: Layout, dims: Sequence[int]) -> Layout:
    """Multiplied with a parameter and summed over its axis: a product with a vector, written out. A mask acts on the
    parameter, and what is closed adds nothing. Written out element by element, it counts in no cost."""
    atoms, weight = call.p.atoms, x.scaled
    if weight is None:
        return x
    for dim in dims:
        own, block = weight.at(dim), x.at(dim)
        if own is None or block is None or len(own.dims) > 1 or len(block.dims) > 1:
            continue
        if not np.array_equal(atoms.roots(own.atoms), atoms.roots(block.atoms)):
            continue
        atoms.read[own.atoms] = True
        x = replace(x, blocks=tuple(b for b in x.blocks if b is not block))
        summed = frozenset(int(d) for d in np.unique(atoms.dim[own.atoms]))
        call.events.append(Event(weight.weight, 0.0, (), call.module, False, summed, counted=False))
    return x


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
@rule("_safe_softmax", "sort", "cummax", "cummin")
def along(call: Call) -> Result:
    """The shape stays, and every index of one axis meets every other."""
    verb, dims = call.name.removeprefix("aten::").lstrip("_"), dims_of(call.arg(1, "dim", -1), len(call.x.shape))
    return [call.p.mixed_all(call.x.activation(), dims, f"{verb} over the axis")] * len(call.outs)


@rule("topk")
def topk(call: Call) -> Result:
    """The first of one axis, as sorted."""
    dim = wrap(call.arg(2, "dim", -1), len(call.x.shape))
    return call.in_shape(call.p.mixed(call.x.activation(), dim, "topk over the axis"))


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def spectrum(call: Call) -> Result:
    """Every frequency is made of every place along the axes that are transformed; the others pass."""
    dims = dims_of(call.args[1], len(call.x.shape))
    return call.in_shape(call.p.mixed_all(call.x.activation(), dims, "transformed to frequencies, or back"))
