"""Inputs and targets of any form: a tensor, or tuples, lists and dicts of tensors, all with examples first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from espalier.space import BadInput, BadType

Nested = Any  # a tensor, or tuples, lists and dicts of Nested; beside tensors None, numbers and words
PLAIN = (bool, int, float, complex, str, bytes)


def each(function: Callable[[Tensor], Any], value: Nested) -> Nested:
    """The same form with the function applied to every tensor; None, numbers and words in it stay."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: each(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return like(value, [each(function, item) for item in value])
    if value is None or isinstance(value, PLAIN):
        return value
    raise not_read(value)


def not_read(value: object) -> BadType:
    """What is said of anything else."""
    return BadType(
        f"inputs and targets are tensors, or tuples and dicts of them, not {type(value).__name__}; leave it out, or "
        "make it a tensor with examples first"
    )


def like(value: Nested, items: list[Nested]) -> Nested:
    """A tuple or list of the same type, with these items; a named tuple is given them one by one."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def tensors(value: Nested) -> list[Tensor]:
    """The tensors in it, in order."""
    flat: list[Tensor] = []
    each(flat.append, value)
    return flat


def named(value: Nested) -> dict[str, Tensor] | None:
    """The tensors of a dict that holds them by name, without what is no tensor; None of any other form."""
    own = {key: part for key, part in value.items() if isinstance(part, Tensor)} if isinstance(value, dict) else {}
    return own if own and len(own) == len(tensors(value)) else None


def count(value: Nested, name: str) -> int:
    """The number of examples, which all its tensors share."""
    found = sizes(value)
    if not found:
        raise BadType(f"{name} hold no tensor")
    if len(found) != 1:
        raise BadInput(f"{name} hold different numbers of examples: {sorted(found)}")
    return found.pop()


def sizes(value: Nested) -> set[int]:
    """The first sizes of its tensors: one, where all of them have their examples first."""
    return {len(tensor) if tensor.ndim else 0 for tensor in tensors(value)}


def few(value: Nested, most: int = 4) -> Nested:
    """Its first examples; all of it where its tensors do not share their number, as nodes and edges of a graph, or
    where one is sparse, which cannot be sliced."""
    whole = len(sizes(value)) != 1 or sizes(value) == {0} or any(t.layout is not torch.strided for t in tensors(value))
    return value if whole else each(lambda tensor: tensor[:most], value)


def form(value: Nested) -> list[Any]:
    """What batches share that can be joined to one: the shapes of their examples, and all that is no tensor."""
    return [leaf.shape[1:] if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(each(lambda t: t, value))]


def after_divergence(value: Nested) -> str:
    """The way out where no loss of an update was finite. value: what was read; it may hold what is not finite."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    parts = [leaf.unsqueeze(-1).flatten(1) for leaf in leaves if leaf.ndim]
    spoilt, count = max(((int((~part.isfinite()).any(1).sum()), len(part)) for part in parts), default=(0, 0))
    if spoilt:
        return f"{spoilt} of the {count} examples hold NaN or infinity: mend the data"
    return "Lower the learning rate of the weights, or look at the data"


def join(values: Sequence[Nested]) -> Nested:
    """Several batches of one form as one; what is no tensor in them is that of the first."""
    if len(values) == 1:
        return values[0]
    return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *values)


def split(value: Nested, parts: int) -> list[Nested]:
    """One batch as so many, of nearly equal size; as one where that would leave fewer than two examples in a part.
    What stays one may be of any form."""
    if parts == 1 or (size := count(value, "inputs and targets")) < 2 * parts:
        return [value]
    ends = [round(size * part / parts) for part in range(parts + 1)]
    return [each(lambda t, a=a, b=b: t[a:b], value) for a, b in itertools.pairwise(ends)]  # type: ignore[misc]


def dtype(model: nn.Module) -> torch.dtype:
    """What a model computes in: the type of its first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def call(model: Callable[..., Any], inputs: Nested) -> Any:
    """A tensor is the model's only argument, a tuple or list its positional ones, a dict its keyword ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)
