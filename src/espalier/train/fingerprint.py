"""What a run is of, in words that two calls can be compared by: the network, its weights, the loss."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def network(model: nn.Module) -> str:
    """Its type, and a hash of its parts as it prints them and of the shapes of its tensors.

    What a ``forward`` of one's own computes is not compared: code may be mended between two calls of one run.
    """
    shapes = [[name, str(value.dtype), *value.shape] for name, value in model.state_dict().items()]
    return f"{type(model).__qualname__} {_hashed(ADDRESS.sub('', repr(model)) + json.dumps(shapes))}"


def weights(tensors: Iterable[Tensor]) -> str:
    """A hash of every bit of the tensors, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def function(given: Any) -> str:
    """A function's name; where that does not tell it from another (a lambda, a partial) a hash of what it does.

    >>> function(lambda x: x + 1) == function(lambda x: x + 2)
    False
    """
    if isinstance(given, functools.partial):
        return f"partial of {function(given.func)} {_hashed(repr(_plain([given.args, given.keywords])))}"
    if isinstance(given, nn.Module):
        set_to = {k: _plain(v) for k, v in vars(given).items() if not k.startswith("_") and k != "training"}
        return f"{network(given)} {_hashed(repr(set_to))}"
    name: str = getattr(given, "__qualname__", type(given).__qualname__)
    code = getattr(given, "__code__", None)
    if "<" not in name or code is None:
        return name
    held = [_cell(cell) for cell in given.__closure__ or ()]
    return f"{name} {_hashed(repr([_code(code), _plain(given.__defaults__), _plain(given.__kwdefaults__), held]))}"


def _code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, [_plain(constant) for constant in code.co_consts]]


def _cell(cell: Any) -> Any:
    try:
        return _plain(cell.cell_contents)
    except ValueError:  # not bound yet
        return None


def _plain(value: Any) -> Any:
    """The value in a form whose repr is the same in another process."""
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, Tensor):
        return weights([value])
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return function(value) if callable(value) else type(value).__qualname__


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
