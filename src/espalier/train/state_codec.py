"""A nested state as JSON and tensors apart, and back: exactly, and without pickle.

A state is what ``state_dict()`` of an optimiser, a scheduler or a search gives: dicts (keys are strings or integers),
lists, tuples, counters, tensors, numbers, strings, None. Tensors go to safetensors; the rest keeps its shape in JSON,
in which every container is an object of one key that names its kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from espalier.space import BadType, Corrupt

Json = Any  # what json.loads gives


def split(state: Mapping[str, Any]) -> tuple[Json, dict[str, Tensor]]:
    """The state as JSON in which tensors are names, and those tensors: on the CPU, contiguous, no memory shared.

    A tensor that occurs twice (tied weights) is stored once.

    >>> tree, tensors = split({"step": 3, "weight": torch.zeros(2)})
    >>> tree
    {'dict': [['step', 3], ['weight', {'tensor': 'weight'}]]}
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[object, ...], str] = {}

    def tensor(value: Tensor, path: str) -> Json:
        if value.layout is not torch.strided:
            raise BadType(f"{path} is a {value.layout} tensor; a checkpoint holds dense ones, use .to_dense()")
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if not value.numel() or place not in names:
            names[place] = path
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": names[place]}

    def node(value: object, path: str) -> Json:
        if isinstance(value, Tensor):
            return tensor(value, path)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, bool) or not isinstance(key, (str, int)):
                    raise BadType(f"{path or 'the state'} has the key {key!r}; keys are strings or integers")
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[key, node(item, f"{path}.{key}" if path else str(key))] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [node(item, f"{path}.{i}") for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise BadType(
            f"{path} is of type {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None, and dicts, "
            "lists and tuples of them"
        )

    return node(state, ""), tensors


def join(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The state that :func:`split` took apart."""
    try:
        return _join(tree, tensors)
    except (TypeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, Corrupt) else Corrupt(f"a node of the state is damaged: {error}") from None


def _join(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise Corrupt(f"a node of the state names one kind, not {sorted(tree)}")
    ((kind, value),) = tree.items()
    match kind:
        case "dict":
            return {key: _join(item, tensors) for key, item in value}
        case "counter":
            return Counter({key: _join(item, tensors) for key, item in value})
        case "list":
            return [_join(item, tensors) for item in value]
        case "tuple":
            return tuple(_join(item, tensors) for item in value)
        case "float":
            return float(value)
        case "tensor":
            if value not in tensors:
                raise Corrupt(f"the state names the tensor {value!r}, which is missing")
            return tensors[value]
    raise Corrupt(f"a node of the state is of the unknown kind {kind!r}")
