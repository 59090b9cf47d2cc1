"""Copies of a gated model: told from the model itself, and never masked for longer than it is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

BUFFER = "espalier_mask"
MARK = "_espalier_attached"  # on the root
STATE = "_espalier_state"  # on the root and on every module with a mask buffer


class Copies:
    """Copies of a gated model, or of parts of it, made while a mask is set: they carry it until it ends.

    No handle reaches a copy, so without this it would stay masked for good.
    """

    def __init__(self) -> None:
        self.made: list[State] | None = None  # None: no mask is set

    @contextlib.contextmanager
    def opened_afterwards(self) -> Iterator[None]:
        outer, self.made = self.made, []
        try:
            yield
        finally:
            for state in self.made:
                module = state.of()
                if module is None or module.__dict__.get(STATE) is not state:
                    continue  # it is gone, or has got gates of its own
                state.masked = False
                for name in filter(is_mask, module._buffers):
                    buffer = module._buffers[name]
                    assert buffer is not None
                    module._buffers[name] = torch.ones_like(buffer)  # not in place: a backward pass may need the old
            self.made = outer


class State:
    """Beside a module's mask buffers: whether a mask is set (on the root), and word of copies to those who need it."""

    def __init__(self, module: nn.Module | None = None, copies: Copies | None = None, masked: bool = False) -> None:
        self.of: Callable[[], nn.Module | None] = _nobody if module is None else weakref.ref(module)
        self.copies, self.masked = copies or Copies(), masked

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        made = memo.get(id(self.of()))  # the copy of the module, which is under way
        state = State(made, self.copies, self.masked)
        if self.copies.made is not None:
            self.copies.made.append(state)
        return state

    def __reduce__(self) -> tuple[type[State], tuple[None, None, bool]]:
        return State, (None, None, self.masked)  # in another process it is of nobody


def is_mask(name: str) -> bool:
    """Whether a buffer holds a mask, or part of one."""
    return name == "espalier_branch" or (name.startswith(BUFFER) and not name.endswith("_index"))


class Mark:
    """Says that a model has gates; a copy of the model carries the mark of the original, and is told by that."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.of: Callable[[], nn.Module | None] = _nobody if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()  # in another process it is of nobody


def _nobody() -> None:
    return None
