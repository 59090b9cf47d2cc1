"""What torch compiles and records: a function for fixed shapes, a network, an update; as they are where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from espalier.search.recorded import WARM, Recorded
from espalier.train import pytree
from espalier.train.gradients import Gradient, Update

SHAPES = 4  # of batches that are recorded: each keeps the memory of one update
Function = Callable[..., Any]


def compiled(body: Function, **settings: Any) -> Function:
    """The function compiled for fixed shapes. settings: of ``torch.compile``.

    What is compiled is kept with the code object, up to a limit of eight: every call brings one of its own."""
    assert isinstance(body, FunctionType)
    own = FunctionType(body.__code__.replace(), body.__globals__, body.__name__, None, body.__closure__)
    own.__kwdefaults__ = body.__kwdefaults__
    return torch.compile(own, dynamic=False, **settings)


class Compiling:
    """Gives networks in compiled form, each compiled once; as they are, from the first that cannot be compiled on.

    Masks are buffers of a gated network, so that another mask needs no other code. A network is compiled whole; one
    that torch must break into pieces is not recorded.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.on, self.whole = settings, True, True
        self.last: tuple[nn.Module, Function] | None = None

    def network(self, network: nn.Module) -> Function:
        if not self.on:
            return network
        if self.last is None or self.last[0] is not network:

            def call(*args: Any, **kwargs: Any) -> Any:
                return network(*args, **kwargs)

            self.last = network, compiled(call, fullgraph=self.whole, **self.settings)
        return self.last[1]

    def tried(self, update: Callable[[], None]) -> None:
        """An update; if torch cannot compile it whole, it is compiled in pieces; if it cannot at all, one line says so
        and it is done without."""
        if not self.on:
            return update()
        try:
            update()
        except torch._dynamo.exc.TorchDynamoException as error:
            if self.whole:
                self.whole, self.last = False, None
                return self.tried(update)
            self.on = False
            reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
            warnings.warn(f"this network trains uncompiled: torch.compile says {reason}", stacklevel=2)
            update()


class Recording:
    """Gradients of updates on a GPU, recorded for each shape of batch and replayed; see ``StructureOptimizer.step``.

    The optimiser itself is not recorded: it may be any, with hooks and schedules of its own.
    """

    def __init__(self) -> None:
        self.on = True
        self.parameters: Sequence[Tensor] = ()
        self.known: dict[object, tuple[Recorded, list[Tensor | None]]] = {}

    def __call__(self, update: Update) -> Gradient:
        if not self.on or update.across is not None:  # what waits for other processes is not recorded
            return update.one_at_a_time()
        masks, parts, parameters = update.masks, update.parts, update.parameters
        if not self.parameters or self.parameters[0] is not parameters[0]:  # another network: the phase has changed
            self.parameters, self.known = list(parameters), {}
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in (masks, *pytree.tensors(list(parts))))
        if (shapes, update.slopes) not in self.known:
            if len(self.known) == SHAPES:
                return update.one_at_a_time()
            self.known[shapes, update.slopes] = Recorded(), []
        recorded, gradients = self.known[shapes, update.slopes]
        recording = recorded.graph is None
        try:
            losses, rows = recorded(update.one_at_a_time, masks, parts)
        except RuntimeError as error:
            if recorded.calls <= WARM or isinstance(error, torch.OutOfMemoryError):
                raise
            self.on = False
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"updates are not recorded as a CUDA graph: {reason}", stacklevel=2)
            return update.one_at_a_time()
        if recording:
            gradients[:] = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        return losses, rows
