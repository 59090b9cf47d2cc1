"""The gradient of R runs from one call for all runs and masks: for networks that know how to compute them together.

:class:`espalier.train.batched.step.Differential` maps a network of one run and one mask over both. A network written
for many at once (grouped convolutions, kernels of its own) cannot be mapped; it is differentiated as a whole instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from espalier.space import BadInput
from espalier.train.batched.step import Loss, Measured, Named

ALIKE = "runs computed together have masks that all examples share, and no tensors but parameters"
SLOPELESS = (
    "a network that computes its own gradient does not give slopes by its gates; search it by ranked losses, "
    'signal="ranked"'
)
Together = Callable[[Named, Tensor, Tensor], Tensor]


class _Slopeless:
    gives_slopes = False

    def with_slopes(
        self, params: Named, fixed: Named, masks: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Named, Measured, Tensor]:
        raise BadInput(SLOPELESS)


class Grouped(_Slopeless):
    """The same gradients, losses and errors as Differential's, by ordinary automatic differentiation.

    call: ``(params, masks, x) -> logits``, of params ``(R, ...)``, masks ``(R, samples, d)`` and x ``(R, B, ...)``;
    logits are ``(R, samples, B, classes)``. It compiles what it wants compiled itself: ``whole`` is False.
    """

    whole = False

    def __init__(self, call: Together, loss: Loss) -> None:
        self.call, self.loss = call, loss

    def __call__(
        self, params: Named, fixed: Named, masks: Tensor, x: Tensor, y: Tensor, *, each: bool
    ) -> tuple[Named, Measured]:
        """As Differential. Runs do not read each other's weights, so the gradient of their sum is each run's own."""
        if each or fixed:
            raise BadInput(ALIKE)
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            losses, wrong = self._measured(self.call(leaves, masks, x), y)
            finite = losses.detach().isfinite()
            means = torch.where(finite, losses, 0.0).sum(-1) / finite.sum(-1).clamp(min=1)
            grads = torch.autograd.grad(means.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads)), (losses.detach(), wrong)

    def attempt(self, params: Named, fixed: Named, mask: Tensor, x: Tensor, y: Tensor) -> None:
        """One run, eagerly: see ``Batch``. params: ``(1, ...)``; mask ``(d)``; x ``(B, ...)``."""
        self._measured(self.call(params, mask[None, None], x[None]), y[None])

    def _measured(self, out: Tensor, y: Tensor) -> Measured:
        """out ``(R, samples, B, classes)``, y ``(R, B)``: losses and numbers of wrong classes ``(R, samples)``."""
        scores = out.float() if out.dtype == torch.bfloat16 else out
        losses = vmap(vmap(self.loss, in_dims=(0, None)))(scores, y)
        return losses, (out.detach().argmax(-1) != y.unsqueeze(1)).sum(-1)


class Own(_Slopeless):
    """Of a network that computes its own gradient of the mean over finite losses, without automatic differentiation.

    gradients: ``(params, masks, x, y) -> (grads, losses, wrong)``, shapes as in :class:`Grouped`.
    """

    whole = False

    def __init__(self, gradients: Callable[[Named, Tensor, Tensor, Tensor], tuple[Named, Tensor, Tensor]]) -> None:
        self.gradients = gradients

    def __call__(
        self, params: Named, fixed: Named, masks: Tensor, x: Tensor, y: Tensor, *, each: bool
    ) -> tuple[Named, Measured]:
        if each or fixed:
            raise BadInput(ALIKE)
        grads, losses, wrong = self.gradients(params, masks, x, y)
        return grads, (losses, wrong)

    def attempt(self, params: Named, fixed: Named, mask: Tensor, x: Tensor, y: Tensor) -> None:
        self.gradients(params, mask[None, None], x[None], y[None])
