"""A function of tensors on a GPU, recorded as a CUDA graph: one launch takes the place of some hundred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

WARM = 3  # calls before one is recorded: what is made once is made in them


class Recorded:
    """Calls what it is given a few times, then records it, and replays the recording from then on.

    Every call brings arguments of the same form and shapes. What the function changes lies where it lay when it was
    recorded, and what it returns is overwritten by the next call. What it decides in Python is decided once.

    warm: calls before one is recorded. generator: what it draws from, if that is not torch's own; else every replay
    would draw the numbers of the recording. pool: memory of other recordings that are never replayed at the same time.
    """

    def __init__(self, warm: int = WARM, generator: torch.Generator | None = None, pool: Any = None) -> None:
        self.calls, self.warm, self.generator, self.pool = 0, warm, generator, pool
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():  # somebody records all of this
            return function(*given)
        self.calls += 1
        if self.calls <= self.warm:
            return function(*given)
        if self.graph is None:
            self._record(function, given)
        torch._foreach_copy_(self.tensors, _tensors(given))
        assert self.graph is not None
        self.graph.replay()
        return self.outputs

    def _record(self, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        inputs = _pytree.tree_map_only(Tensor, Tensor.clone, given)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        generator = self.generator or torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.get_state()
        if self.generator is not None:
            graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self.outputs = function(*inputs)
        except RuntimeError:  # torch leaves its stream and the generator as they were in the recording
            torch.cuda.set_stream(stream)
            fresh = torch.Generator(generator.device)
            fresh.set_state(drawn)
            generator.graphsafe_set_state(fresh)
            raise
        self.tensors, self.graph = _tensors(inputs), graph


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
