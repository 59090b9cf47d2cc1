"""The gradient of one update: one mask at a time, or several in one pass of the network, where the model allows it.

One mask at a time needs the memory of one. Each mask's gradient is taken from the parameters as soon as it is there, so
that a closure may zero gradients. In one pass what the masks read is one batch, interleaved: example n runs under mask
``n % samples`` (``gated.masked``). Each mask's loss is that of its own outputs and targets, so that any loss is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from espalier.cost import Cost
from espalier.gates.one_pass import Unfit, interleaved
from espalier.space import BadInput, BadType, Space
from espalier.train import pytree

Sized = tuple[Tensor, Tensor | None]  # slopes (samples, d) and sizes, None where each is that of its slope
Gradient = tuple[Tensor, Sized | None]  # losses (samples), and what the search is told beside them


class Gated(Protocol):
    """What training asks of a gated model; see :func:`espalier.attach`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def space(self) -> Space: ...
    def masked(self, mask: Tensor, *, slopes: bool = False) -> AbstractContextManager[Callable[..., Tensor]]: ...
    def canonical(self, mask: Tensor) -> Tensor: ...
    def cost(self, kind: str) -> Cost: ...
    def compact(self, mask: Tensor) -> nn.Module: ...


@dataclass(frozen=True, eq=False)
class Update:
    """What the gradient of one update is computed of. Whoever computes it leaves the mean over the masks in the
    parameters, see :func:`only_finite`, and returns the losses and, where asked for, the slopes by the gates with
    their sizes.

    masks: ``(samples, d)``. parts: what each mask reads, or one for all of them.
    closure: given a part, computes the loss of the masked model, goes backwards through it, and returns it. What the
    gradients held before is lost. gated: None where it needs no mask, as that of a compact network.
    across: the mean of losses and slopes over processes, where each computes a part: then all of them know the same.
    skips: the optimiser leaves the weights alone by itself where a loss is not finite, see :func:`step_unless`.
    even: of the search, by which sizes of gates on many channels are made.
    """

    gated: Any
    masks: Tensor
    parts: Sequence[Any]
    parameters: Sequence[Tensor]
    closure: Callable[..., Tensor | float]
    slopes: bool = False
    across: Callable[[Tensor], Tensor] | None = None
    skips: bool = False
    even: float = 0.0

    def one_at_a_time(self, masks: Tensor | None = None, parts: Sequence[Any] | None = None) -> Gradient:
        """The gradient, one mask after the other; masks, parts: others of the same shapes."""
        masks, parts = self.masks if masks is None else masks, self.parts if parts is None else parts
        if len(masks) == 1:
            losses, rows = self._alone(masks[0], parts[0])
            return self.known(losses), rows
        inputs = itertools.cycle(parts)
        total: list[Tensor | None] = [None] * len(self.parameters)
        each = list[Gradient]()
        for mask in masks:
            each.append(self._alone(mask, next(inputs)))
            total = _added(total, [parameter.grad for parameter in self.parameters])
        counted = [part for part in total if part is not None]
        if counted:
            torch._foreach_div_(counted, len(each))
        for parameter, part in zip(self.parameters, total):
            parameter.grad = part
        told = [own for _, own in each if own is not None]
        sizes = [size for _, size in told if size is not None]
        joined = (torch.cat([row for row, _ in told]), torch.cat(sizes) if sizes else None) if told else None
        return self.known(torch.cat([loss for loss, _ in each])), joined

    def _alone(self, mask: Tensor, part: Any) -> Gradient:
        """The gradient of one mask ``(d)``, left in the parameters; its loss ``(1)`` and slopes ``(1, d)``."""
        self.forget()
        with self._under(mask) as read, torch.enable_grad():
            loss = scalar(self.closure(*part))
            slopes, sizes = self.read(read) if self.slopes else (None, None)
        if slopes is None:
            return loss.unsqueeze(0), None
        return loss.unsqueeze(0), (slopes.unsqueeze(0), None if sizes is None else sizes.unsqueeze(0))

    def read(self, slopes: Any) -> Sized:
        """What a backward pass has left at the gates. A handle of one's own need not know sizes."""
        across = self.across or (lambda one: one)
        told: Sized = slopes.sized(across, self.even) if hasattr(slopes, "sized") else (across(slopes()), None)
        return told

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def known(self, losses: Tensor) -> Tensor:
        """The losses as all processes know them; the gradients count only where all of these are finite."""
        losses = losses if self.across is None else self.across(losses)
        if not self.skips:
            only_finite(self.parameters, losses)
        return losses

    def _under(self, mask: Tensor) -> AbstractContextManager[Any]:
        if self.gated is None:
            return nullcontext()
        masked: AbstractContextManager[Any] = self.gated.masked(mask, **{"slopes": True} if self.slopes else {})
        return masked


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can be told on the device not to step: a fused one can."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def not_finite(losses: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Whether none of the losses ``(samples)`` is finite, and whether some are not: 1.0 or 0.0, on a GPU as tensors."""
    if not losses.is_cuda:
        finite = [math.isfinite(loss) for loss in losses.tolist()]
        return float(not any(finite)), float(not all(finite))
    each = torch.ne(losses - losses, 0, out=torch.empty_like(losses, dtype=torch.float32))
    return (each[0], each[0]) if len(each) == 1 else (each.amin(), each.amax())


def step_unless(spoilt: Tensor | float, optimizer: torch.optim.Optimizer) -> None:
    """One step of an optimiser that skips; none where this is 1.0, and nobody waits to know."""
    optimizer.found_inf = torch.as_tensor(spoilt, dtype=torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def only_finite(parameters: Sequence[Tensor], losses: Tensor) -> None:
    """Where a loss of an update is not finite the weights are to stay: no gradient is left, so that an optimiser does
    nothing. On a GPU, which is not waited for, it is 0: momentum and weight decay still move the weights, unless the
    optimiser skips. An update of one mask is left as it is there: a loss that is not finite ends the run, and to look
    at every gradient takes time."""
    if not losses.is_cuda:
        if not all(map(math.isfinite, losses.tolist())):
            for parameter in parameters:
                parameter.grad = None
        return
    if len(losses) == 1:
        return
    spoilt = ~losses.isfinite().all()
    for gradient in (parameter.grad for parameter in parameters):
        if gradient is not None:
            (gradient._values() if gradient.is_sparse else gradient).masked_fill_(spoilt, 0.0)


class OnePass:
    """The gradient of updates in one pass. ``seen``: outputs and targets of each mask, once it has run so.

    forward: outputs of inputs. loss: a scalar tensor of one mask's outputs and targets. A part is (inputs, targets).
    """

    def __init__(self, forward: Callable[[Any], Any], loss: Callable[[Any, Any], Tensor]) -> None:
        self.forward, self.loss = forward, loss
        self.seen: list[tuple[Any, Any]] | None = None

    def __call__(self, update: Update) -> Gradient:
        gated, parts, samples = update.gated, update.parts, len(update.masks)
        uneven = len(parts) > 1 and len({pytree.count(part, "inputs and targets") for part in parts}) > 1
        if samples == 1 or uneven or not hasattr(gated, "apart"):  # a handle of one's own knows one mask at a time
            return update.one_at_a_time()
        parts = parts if len(parts) > 1 else [parts[0]] * samples
        inputs = _pytree.tree_map(lambda *leaves: interleaved(leaves), *(part[0] for part in parts))
        if gated.one_at_a_time(inputs, samples):
            return update.one_at_a_time()
        update.forget()
        try:
            with gated.masked(update.masks, slopes=update.slopes) as read, torch.enable_grad():
                outputs = gated.apart(self.forward(inputs), samples)
                each = torch.stack([self.loss(o, part[1]).reshape(()) for o, part in zip(outputs, parts)])
                each.mean().backward()  # type: ignore[no-untyped-call]
                rows = update.read(read) if update.slopes else None
        except Unfit:  # a later batch of another form
            return update.one_at_a_time()
        self.seen = [(_pytree.tree_map_only(Tensor, Tensor.detach, o), part[1]) for o, part in zip(outputs, parts)]
        return update.known(each.detach()), rows


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


def _added(total: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    """The sums, in place where there is something to add to."""
    both = [(a, b) for a, b in zip(total, more) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(total, more)]
