"""The gradient of one update: the mean over the masks whose loss is finite, one mask at a time.

One mask at a time needs the memory of one. Each mask's gradient is taken from the parameters as soon as it is there, so
the function that computes it may zero gradients, as a closure of a torch optimiser does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.space import BadInput, BadType, Space


class Gated(Protocol):
    """What training asks of a gated model; see :func:`espalier.attach`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def space(self) -> Space: ...
    def masked(self, mask: Tensor, *, slopes: bool = False) -> AbstractContextManager[Callable[[], Tensor]]: ...
    def canonical(self, mask: Tensor) -> Tensor: ...
    def cost(self, kind: str) -> Cost: ...
    def compact(self, mask: Tensor) -> nn.Module: ...


def mean_gradient(
    gated: Gated | None,
    masks: Tensor,
    parameters: Sequence[Tensor],
    closure: Callable[[], Tensor | float],
    slopes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """masks: ``(samples, d)``. Leaves the mean gradient over the masks of finite loss in the parameters; returns the
    losses ``(samples)``, where they were computed, and, where asked for, the slopes by the gates ``(samples, d)``.

    gated: None where the closure needs no mask, as that of a compact network.
    closure: computes the loss of the masked model, goes backwards through it, and returns it. What the gradients held
    before is lost. Where no loss is finite they are None on the CPU; on a GPU, which is not waited for, the gradients
    of several masks are 0 then, and those of a single one are what they are.
    """
    total: list[Tensor | None] = [None] * len(parameters)
    losses, rows = list[Tensor](), list[Tensor]()
    for mask in masks:
        for parameter in parameters:
            parameter.grad = None
        with _under(gated, mask, slopes) as read, torch.enable_grad():
            loss = scalar(closure())
            if slopes:
                rows.append(read())
        losses.append(loss)
        gradients = [parameter.grad for parameter in parameters]
        if loss.is_cuda and len(masks) > 1:
            finite = loss.isfinite()
            gradients = [None if gradient is None else torch.where(finite, gradient, 0.0) for gradient in gradients]
        if loss.is_cuda or math.isfinite(loss.item()):
            total = _added(total, gradients)
    several = torch.stack(losses)
    counted = [part for part in total if part is not None]
    if several.is_cuda and len(losses) > 1:
        torch._foreach_div_(counted, several.isfinite().sum().clamp(min=1))
    elif (count := 1 if several.is_cuda else int(several.isfinite().sum())) > 1:
        torch._foreach_div_(counted, count)
    for parameter, part in zip(parameters, total):
        parameter.grad = part
    return several, torch.stack(rows) if slopes else None


def _under(gated: Gated | None, mask: Tensor, slopes: bool) -> AbstractContextManager[Any]:
    if gated is None:
        return nullcontext()
    return gated.masked(mask, slopes=True) if slopes else gated.masked(mask)


def _added(total: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    """The sums, in place where there is something to add to."""
    both = [(a, b) for a, b in zip(total, more) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(total, more)]


def scalar(loss: object) -> Tensor:
    """The loss as a tensor without dimensions and without a graph."""
    if isinstance(loss, float):
        return torch.tensor(loss, dtype=torch.float64)
    if not isinstance(loss, Tensor):
        raise BadType(f"the loss is a scalar tensor, not {type(loss).__name__}; does the closure return it?")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise BadInput(
            f"the loss is one floating-point number, not {loss.dtype} of shape {tuple(loss.shape)}; take its mean over "
            "the mini-batch"
        )
    return loss.detach().reshape(())
