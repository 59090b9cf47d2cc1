"""What torch compiles and records: a function for fixed shapes, a network, an update; as they are where that fails."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.search.recorded import WARM, Recorded, aside
from espalier.space import first_line
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


LAYERS = (torch.conv1d, torch.conv2d, torch.conv3d, torch.nn.functional.linear)


def as_it_is(module: torch.fx.GraphModule, inputs: object) -> Function:
    """A backend that compiles nothing: torch's own kernels, without layers whose outputs nobody reads."""
    for node in reversed(module.graph.nodes):
        if node.target in LAYERS and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module.forward


class Compiling:
    """Gives networks in compiled form, each compiled once, until one cannot be compiled: then it is off.

    Masks are buffers of a gated network, so that another mask needs no other code. A network is compiled whole; one
    that torch must break into pieces is not recorded. asked: by the user, who is told when it does not work; else it
    is given up silently, and pieces are not worth it. settings: of ``torch.compile``.
    """

    def __init__(self, asked: bool = True, **settings: Any) -> None:
        self.asked, self.settings, self.on, self.whole = asked, settings, True, True
        self.last: tuple[Function, Function] | None = None

    def form(self, function: Function, then: Function | None = None) -> Function:
        """The compiled form of a network. then: a loss; the form takes inputs and targets and gives outputs and loss.

        They are one function, so that nothing has run when torch finds that it cannot compile."""
        if self.last is None or self.last[0] is not function:

            def alone(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            def with_loss(inputs: Any, targets: Any) -> Any:
                outputs = pytree.call(function, inputs)
                assert then is not None
                return outputs, then(outputs, targets)

            body = alone if then is None else with_loss
            self.last = function, compiled(body, fullgraph=self.whole, **self.settings)
        return self.last[1]

    def tried(self, update: Callable[[], None]) -> None:
        """An update; if torch cannot compile it whole, it is compiled in pieces; if it cannot at all, one line says so
        and it is done without."""
        if not self.on:
            return update()
        try:
            update()
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self.last = None
            if self.whole and self.asked:
                self.whole = False
                return self.tried(update)
            self.on = False
            if self.asked:
                reason = first_line(getattr(error, "inner_exception", error))
                warnings.warn(f"this network trains uncompiled: torch.compile says {reason}", stacklevel=2)
            update()


class Recording:
    """Gradients of updates on a GPU, recorded for each shape of batch and replayed; see ``StructureOptimizer.step``.

    The optimiser itself is not recorded: it may be any, with hooks and schedules of its own. A recording does not see
    what is decided in Python. So the network and the loss are compiled, and torch looks at all that they read in Python
    before each of their calls: where it finds something new in every call nothing is recorded. The first update of an
    epoch is not replayed (``looking``), so that what a callback has changed is found then, and recorded anew.
    asked: by the user, who is told when it does not work.
    """

    def __init__(self, asked: bool = True) -> None:
        self.asked, self.on, self.looking = asked, True, False
        self.graphs = _graphs()
        self.first: Tensor | None = None  # parameter
        self.slopes = False
        self.known: dict[object, tuple[Recorded, list[Tensor | None]]] = {}

    def __call__(self, update: Update) -> Gradient:
        if not self.on or update.across is not None:  # what waits for other processes is not recorded
            return update.one_at_a_time()
        masks, parts, parameters = update.masks, update.parts, update.parameters
        if parameters[0] is not self.first or update.slopes != self.slopes:  # a new phase: what is known is of no use
            self.first, self.slopes, self.known = parameters[0], update.slopes, {}
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in (masks, *pytree.tensors(list(parts))))
        if shapes not in self.known:
            if len(self.known) == SHAPES:
                return update.one_at_a_time()
            self.known[shapes] = Recorded(), []
        recorded, gradients = self.known[shapes]
        if self.looking or recorded.calls == WARM - 1:
            return self._looked(update, recorded)
        recording, graphs = recorded.graph is None, _graphs()
        losses, rows = recorded(update.one_at_a_time, masks, parts)
        if recorded.trouble:
            self._give_up(recorded.trouble + (", after torch compiled anew" if _graphs() != graphs else ""))
            return losses, rows
        if recording:
            gradients[:] = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        return losses, rows

    def _looked(self, update: Update, recorded: Recorded) -> Gradient:
        """An update that is not replayed, to see whether Python decides as before."""
        before, self.looking = _decided_in_python(), False
        gradient = aside(update.one_at_a_time)
        if recorded.graph is None:
            recorded.calls += 1
        if _graphs() == self.graphs:  # as with TORCHDYNAMO_DISABLE=1
            self._give_up("torch compiles nothing here, so that nobody sees what Python decides")
            return gradient
        if _decided_in_python() == before:
            return gradient
        if recorded.calls != WARM:
            self.known = {}
        else:
            self._give_up("what the network or the loss decides in Python changes from update to update")
        return gradient

    def _give_up(self, reason: str) -> None:
        self.on, self.known = False, {}
        if self.asked:
            warnings.warn(f"updates are not recorded as a CUDA graph: {reason}", stacklevel=2)


def _graphs() -> int:
    """How many torch's compiler has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _decided_in_python() -> tuple[object, ...]:
    """Changes where a call has made torch's compiler find something new, or has drawn from a generator on the CPU."""
    drawn = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - of the one that others draw from
    return _graphs(), random.getstate(), drawn["key"].tobytes(), drawn["pos"], torch.get_rng_state().numpy().tobytes()
