"""The gradient of R runs from one call for all runs and masks, of a network that computes it by itself.

:class:`espalier.train.batched.step.Differential` maps a network of one run and one mask over both. A network written
for many at once, with kernels of its own, cannot be mapped.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from espalier.space import BadInput
from espalier.train.batched.step import Measured, Named

SLOPELESS = (
    "a network that computes its own gradient does not give slopes by its gates; search it by ranked losses, "
    'signal="ranked"'
)


class Own:
    """Of a network that computes its own gradient of the mean over finite losses, without automatic differentiation.

    gradients: ``(params, masks, x, y) -> (grads, losses, wrong)`` of params ``(R, ...)``, masks ``(R, samples, d)``,
    x ``(R, B, ...)`` and y ``(R, B)``; losses and numbers of wrong classes are ``(R, samples)``. It compiles what it
    wants compiled itself: ``whole`` is False. pack, unpack: from the model's own names and shapes to those it keeps
    its weights in, and back.
    """

    whole = gives_slopes = False

    def __init__(
        self,
        gradients: Callable[[Named, Tensor, Tensor, Tensor], tuple[Named, Tensor, Tensor]],
        pack: Callable[[Named], Named] = dict,
        unpack: Callable[[Named], Named] = dict,
    ) -> None:
        self.gradients, self.pack, self.unpack = gradients, pack, unpack

    def __call__(
        self, params: Named, fixed: Named, masks: Tensor, x: Tensor, y: Tensor, *, each: bool
    ) -> tuple[Named, Measured]:
        if each or fixed:
            raise BadInput("runs computed together have masks that all examples share, and no tensors but parameters")
        grads, losses, wrong = self.gradients(params, masks, x, y)
        return grads, (losses, wrong)

    def with_slopes(
        self, params: Named, fixed: Named, masks: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Named, Measured, Tensor]:
        raise BadInput(SLOPELESS)

    def attempt(self, params: Named, fixed: Named, mask: Tensor, x: Tensor, y: Tensor) -> None:
        self.gradients(params, mask[None, None], x[None], y[None])
