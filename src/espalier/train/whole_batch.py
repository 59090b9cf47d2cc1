"""BatchNorm over a mini-batch that several ranks share: its statistics are those of the whole batch, as in one process.

A reduction of our own, since torch's SyncBatchNorm takes GPUs alone. It acts on calls of ``batch_norm`` while it is on,
and leaves no trace in a model. A call sends C + 1 and then C numbers forwards, 2 C backwards, however many ranks there
are: the mean first, then the squares of what differs from it, so that nothing cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from espalier.train.ranks import Ranks


class WholeBatch(TorchFunctionMode):
    """Inside, ``batch_norm`` in train mode takes the statistics of all ranks' examples."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self.ranks, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def _batch_norm(
    ranks: Ranks,
    input: Tensor,  # the names of torch's function
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    normed, mean, variance, count = _Normed.apply(input, eps, ranks)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
    shape = _shape(input)
    normed = normed if weight is None else normed * weight.view(shape)
    normed = normed if bias is None else normed + bias.view(shape)
    return normed.to(input.dtype)  # type: ignore[no-any-return]


def _shape(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *[1] * (x.ndim - 2))


class _Normed(torch.autograd.Function):
    """x less its mean, over its deviation: of the examples of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims, shape, channels = [dim for dim in range(x.ndim) if dim != 1], _shape(x), x.shape[1]
        count = wide.new_full((1,), wide.numel() // channels)
        sums, total = torch.split(ranks.total(torch.cat([wide.sum(dims), count])), [channels, 1])
        mean = sums / total
        apart = wide - mean.view(shape)
        variance = ranks.total(apart.square().sum(dims)) / total
        scale = (variance + eps).rsqrt()
        normed = apart * scale.view(shape)
        ctx.save_for_backward(normed, scale, total)
        ctx.ranks, ctx.dtype = ranks, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normed, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normed, scale, total = ctx.saved_tensors
        dims, shape = [dim for dim in range(slope.ndim) if dim != 1], _shape(slope)
        sums = ctx.ranks.total(torch.stack([slope.sum(dims), (slope * normed).sum(dims)])) / total
        inner = slope - sums[0].view(shape) - normed * sums[1].view(shape)
        return (inner * scale.view(shape)).to(ctx.dtype), None, None
