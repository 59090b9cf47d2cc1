"""Depth (the kind "blocks"): whole blocks of a network as gates; a closed one hands its input on.

While a mask is set a block's result is ``m y + (1 - m) x``, so that slopes compare the block with what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.gates.structure import GateGroup, is_inside
from espalier.gates.trace import Trace
from espalier.gates.trace.layout import Layout

PASS = "espalier_mask_pass"


def block_groups(trace: Trace, modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """The blocks of every list or sequence of modules that give what they were given in shape: one gate each.

    A block must run once, hold its tensors alone, and give its input's channels. Where blocks hold blocks, the inner
    ones are gated.
    """
    groups, taken = list[GateGroup](), list[str]()
    shared = {path for info in trace.tensors if len(info.places) > 1 for path, _ in info.places}
    for name, container in sorted(modules.items(), key=lambda item: -item[0].count(".") - bool(item[0])):
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        paths = [f"{name}.{child}" if name else child for child in container._modules]
        paths = [path for path in paths if not any(is_inside(inner, path) for inner in taken)]
        fits = [path for path in paths if _is_block(path, trace, modules, shared)]
        if fits:
            taken += fits
            nothing = np.zeros(0, dtype=np.int64)
            groups.append(GateGroup(name or "blocks", "blocks", (nothing,) * len(fits), (), tuple(fits)))
    return groups


def _is_block(path: str, trace: Trace, modules: Mapping[str, nn.Module], shared: set[str]) -> bool:
    if path not in modules:  # the same module in a second place
        return False
    module = modules[path]
    inside = [name for name in modules if is_inside(name, path)]
    if path not in trace.passes or trace.calls.get(path) != 1 or not module._modules or shared & set(inside):
        return False
    given, result = trace.passes[path]
    return any(True for _ in module.parameters()) and given.shape == result.shape and _same(trace, given, result)


def _same(trace: Trace, a: Layout, b: Layout) -> bool:
    """Whether two tensors hold the same units at the same places, as far as any of them can go."""

    def live(layout: Layout) -> dict[tuple[int, ...], list[int]]:
        left = [block for block in layout.blocks if not trace.atoms.frozen(block.atoms).all()]
        return {block.dims: trace.atoms.roots(block.atoms).reshape(-1).tolist() for block in left}

    return live(a) == live(b)


def mask_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The forward hook of a block."""
    mask = module._buffers[PASS]
    assert mask is not None
    given = args[0] if args else next(iter(kwargs.values()))
    if isinstance(output, tuple):
        return (_between(given, output[0], mask), *output[1:])
    return _between(given, output, mask)


def _between(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    m = mask.to(y.dtype)
    if y.is_nested:
        return torch.nested.as_nested_tensor([b * m + a * (1 - m) for a, b in zip(x.unbind(), y.unbind())])
    return y * m + x * (1 - m)
