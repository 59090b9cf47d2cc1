"""What torch compiles: a function for fixed shapes, and a network that falls back to what it is where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

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

    Masks are buffers of a gated network, so that another mask needs no other code.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.on = settings, True
        self.last: tuple[nn.Module, Function] | None = None

    def network(self, network: nn.Module) -> Function:
        if not self.on:
            return network
        if self.last is None or self.last[0] is not network:

            def call(*args: Any, **kwargs: Any) -> Any:
                return network(*args, **kwargs)

            self.last = network, compiled(call, **self.settings)
        return self.last[1]

    def tried(self, update: Callable[[], None]) -> None:
        """An update; if torch cannot compile it, one line says so and it is done without."""
        if not self.on:
            return update()
        try:
            update()
        except torch._dynamo.exc.TorchDynamoException as error:
            self.on = False
            reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
            warnings.warn(f"this network trains uncompiled: torch.compile says {reason}", stacklevel=2)
            update()
