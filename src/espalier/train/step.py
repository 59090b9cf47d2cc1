"""The gradient of one update: the mean over the masks whose loss is finite, one mask at a time.

One mask at a time needs the memory of one. Each mask's gradient is taken from the parameters as soon as it is there, so
the function that computes it may zero gradients, as a closure of a torch optimiser does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

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
    gated: Gated,
    masks: Tensor,
    parameters: Sequence[Tensor],
    closure: Callable[[], Tensor | float],
    slopes: bool = False,
) -> tuple[Tensor, list[float], Tensor | None]:
    """masks: ``(samples, d)``. Leaves the mean gradient in the parameters; returns the losses ``(samples)``, where they
    were computed, the finite ones as numbers, and, where asked for, the slopes by the gates ``(samples, d)``.

    closure: computes the loss of the masked model, goes backwards through it, and returns it. What the gradients held
    before is lost; where no loss is finite they are None.
    """
    total: list[Tensor | None] = [None] * len(parameters)
    losses, finite, rows = list[Tensor](), list[float](), list[Tensor]()
    for mask in masks:
        for parameter in parameters:
            parameter.grad = None
        with gated.masked(mask, slopes=slopes) as read, torch.enable_grad():
            loss = scalar(closure())
            if slopes:
                rows.append(read())
        losses.append(loss)
        value = loss.item()  # waits for a GPU; a gradient of infinities would be worse than that wait
        if math.isfinite(value):
            finite.append(value)
            total = _added(total, [parameter.grad for parameter in parameters])
    if len(finite) > 1:
        torch._foreach_div_([part for part in total if part is not None], len(finite))
    for parameter, part in zip(parameters, total):
        parameter.grad = part
    return torch.stack(losses), finite, torch.stack(rows) if slopes else None


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
