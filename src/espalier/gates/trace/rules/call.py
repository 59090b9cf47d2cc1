"""One operation as the watcher sees it, what a product leaves in the record, and the table of rules.

A rule says what one ATen operation does to the layouts of its operands: it gives the layout of the result, or a list of
those of the first ones of several; results without one are plain. An operation without a rule freezes what it touches,
so a missing rule costs gates and never exactness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from espalier.gates.trace.layout import Layout, Propagation


@dataclass(eq=False)
class Event:
    """One product: the number of the parameter in it, and how often each of its elements was used.

    Not counted: multiplied and summed element by element, which no cost counts. Number -1: no single parameter, but
    a tensor ``computed`` from parameters, or a product of two activations.
    """

    weight: int
    uses: float
    rows: tuple[np.ndarray, ...] = ()  # further factors of the uses: arrays of atoms, counting those kept
    module: str = ""
    grouped: bool = False  # a grouped convolution: each group passes through, nothing is mixed between them
    summed: frozenset[int] = frozenset()  # the parameter's dimensions that were summed over; the others are written
    computed: Layout | None = None
    counted: bool = True  # an element of it counts as a weight, also where a layer got no rows


@dataclass(eq=False)
class Call:
    """One operation as it was executed: its schema name, operands, results and their layouts."""

    p: Propagation
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    of: Callable[[Any], Layout]
    sizes: dict[int, int] = field(default_factory=dict)  # elements of each parameter, by number
    module: str = ""
    strides: tuple[int, ...] = ()  # of the first operand of `as_strided_`, before that changed them
    events: list[Event] = field(default_factory=list)  # products, noted by the rule

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def x(self) -> Layout:
        return self.of(self.args[0])

    def layouts(self, values: Any) -> list[Layout]:
        """Of those of these operands that are tensors."""
        return [self.of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]

    @property
    def tensors(self) -> list[Layout]:
        return self.layouts((self.args, self.kwargs))

    @property
    def outs(self) -> list[Any]:
        return list(self.out) if isinstance(self.out, (tuple, list)) else [self.out]

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """Of a result."""
        return tuple(self.outs[i].shape)

    def in_shape(self, x: Layout) -> list[Layout]:
        """The same blocks in the shape of each result."""
        return [self.p.clean(tuple(out.shape), x.blocks) for out in self.outs]


Result = Layout | list[Layout]
Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[f"aten::{name}"] = function
        return function

    return register


def wrap(dim: int, n: int) -> int:
    return dim % n if n else 0


def dims_of(value: Any, n: int) -> list[int]:
    """Dimensions as an operation takes them: None or empty for all, one, or several."""
    if value is None:
        return list(range(n))
    if isinstance(value, int):
        return [wrap(value, n)] if n else []
    return [wrap(d, n) for d in value] or list(range(n))
