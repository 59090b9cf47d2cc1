"""The gradient of an update with several masks in one pass of the network, where the model allows it.

What the masks read is one batch, interleaved: example n runs under mask ``n % samples`` (``gated.masked``). Each mask's
loss is that of its own outputs and targets, so that any loss is exact. A model that cannot run so, or a loss that is
not finite, goes one mask at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from espalier.gates.one_pass import Unfit, interleaved
from espalier.train import pytree
from espalier.train.feed import Batch

Gradient = tuple[Tensor, Tensor | None]  # losses (samples), slopes (samples, d)
OneAtATime = Callable[[Tensor, Sequence[Any]], Gradient]  # of masks (samples, d) and what each reads
Across = Callable[[Tensor], Tensor] | None  # the mean over processes that train the same model


class OnePass:
    """One update's gradient. ``seen``: outputs and targets of the first mask, once it has run.

    forward: outputs of inputs. loss: a scalar tensor of one mask's outputs and targets.
    """

    def __init__(self, gated: Any, forward: Callable[[Any], Any], loss: Callable[[Any, Any], Tensor]) -> None:
        self.gated, self.forward, self.loss = gated, forward, loss
        self.seen: tuple[Any, Any] | None = None

    def __call__(
        self,
        parts: Sequence[Batch],
        masks: Tensor,
        parameters: Sequence[Tensor],
        slopes: bool,
        alone: OneAtATime,
        across: Across = None,
    ) -> Gradient:
        """masks: ``(samples, d)``. Leaves the mean gradient over the masks of finite loss in the parameters.

        parts: what each mask reads, or one batch for all of them. across: as of ``mean_gradient``.
        alone: does the same, one mask after the other. On a GPU, which is not waited for, the gradient of an update in
        which some loss is not finite is 0.
        """
        samples = len(masks)

        def one_at_a_time() -> Gradient:
            return alone(masks, parts)

        if samples == 1:
            return one_at_a_time()
        uneven = len(parts) > 1 and len({pytree.count(part, "inputs and targets") for part in parts}) > 1
        if uneven or not hasattr(self.gated, "apart"):  # a handle of one's own knows one mask at a time
            return one_at_a_time()
        parts = parts if len(parts) > 1 else [parts[0]] * samples
        inputs = _pytree.tree_map(lambda *leaves: interleaved(leaves), *(part[0] for part in parts))
        if self.gated.one_at_a_time(inputs, samples):
            return one_at_a_time()
        for parameter in parameters:
            parameter.grad = None
        try:
            with self.gated.masked(masks, slopes=slopes) as read, torch.enable_grad():
                outputs = self.gated.apart(self.forward(inputs), samples)
                each = torch.stack([self.loss(o, part[1]).reshape(()) for o, part in zip(outputs, parts)])
                losses = each.detach() if across is None else across(each)
                finite = losses.isfinite()
                if losses.is_cuda:
                    torch.where(finite, each, 0.0).mean().backward()  # type: ignore[no-untyped-call]
                elif bool(finite.all()):
                    each.mean().backward()  # type: ignore[no-untyped-call]
                else:
                    del each, outputs
                    return self._again(one_at_a_time)
                rows = read() if slopes else None
        except Unfit:  # a later batch of another form
            return one_at_a_time()
        if losses.is_cuda:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = torch.where(finite.all(), parameter.grad, 0.0)
        self.seen = (_detached(outputs[0]), parts[0][1])
        return losses, rows

    def _again(self, one_at_a_time: Callable[[], Gradient]) -> Gradient:
        """Zero times infinity is no zero, so nothing of such a mask may be in the graph. The pass has moved running
        statistics as one mask at a time would, so they are kept."""
        held = [(buffer, buffer.clone()) for buffer in self.gated.model.buffers()]
        gradient = one_at_a_time()
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)
        return gradient


def _detached(outputs: Any) -> Any:
    return _pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
