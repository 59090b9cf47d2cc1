"""A function of tensors on a GPU, recorded as a CUDA graph: one launch takes the place of some hundred."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from espalier.space import first_line

WARM = 3  # calls before one is recorded: what is made once is made in them

T = TypeVar("T")

_streams: dict[int, torch.cuda.Stream] = {}  # of each device, the one on which is recorded


class Recorded:
    """Calls what it is given a few times, then records it, and replays the recording from then on.

    Every call brings arguments of the same form and shapes. What the function changes lies where it lay when it was
    recorded, and what it returns is overwritten by the next call. What it decides in Python is decided once.
    What cannot be recorded is called as it is, then and from then on, and ``trouble`` says why.

    warm: calls before one is recorded. generator: what it draws from, if that is not torch's own; else every replay
    would draw the numbers of the recording. pool: memory of other recordings that are never replayed at the same time.
    """

    def __init__(self, warm: int = WARM, generator: torch.Generator | None = None, pool: Any = None) -> None:
        self.calls, self.warm, self.generator, self.pool = 0, warm, generator, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self.trouble = ""

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():  # somebody records all of this
            return function(*given)
        self.calls += 1
        if self.calls <= self.warm:
            return aside(function, *given)
        if self.graph is None and not self.trouble:
            self._record(function, given)
        if self.graph is None:
            return function(*given)
        torch._foreach_copy_(self.tensors, _tensors(given))
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
            settings: dict[str, Any] = {"pool": self.pool, "stream": _stream(), "capture_error_mode": "thread_local"}
            with _nothing_collected(), torch.cuda.graph(graph, **settings):
                self.outputs = function(*inputs)
        except Exception as error:  # torch leaves its stream and the generator as they were in the recording
            torch.cuda.set_stream(stream)
            _streams.clear()  # what is asked for on that stream may go on to come from the memory of this recording
            fresh = torch.Generator(generator.device)
            fresh.set_state(drawn)
            generator.graphsafe_set_state(fresh)
            self.trouble = _first_cause(error)
            return
        self.tensors, self.graph = _tensors(inputs), graph


def aside(function: Callable[..., T], *given: Any) -> T:
    """A call on the stream on which is recorded later. Autograd knows for each parameter the stream of the pass that
    first reached it, as long as anything holds that; in a recording it would wait for one that is not recorded."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return function(*given)
    side, here = _stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            return function(*given)
    finally:
        here.wait_stream(side)


def _stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _streams[device]


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage is collected before, and not inside: an older graph that goes while another one is recorded spoils it."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _first_cause(error: BaseException) -> str:
    """CUDA ends a recording that was spoilt with a word on "a previous error": that one, and the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames[-1].name in ("capture_end", "__exit__") and error.__context__ is not None:
        error = error.__context__
        frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f"{first_line(error)} ({Path(last.filename).name}, line {last.lineno}: {last.line})"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
