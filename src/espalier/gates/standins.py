"""Stand-ins: plain layers for those that a cut leaves without input, without output, or in a closed branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from espalier.gates.norms import norm_of
from espalier.gates.structure import GateGroup, Structure

ZERO_WIDE_FAILS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


def emptied_layers(
    structure: Structure, keep: Callable[[np.ndarray], np.ndarray], layers: dict[str, Mapping[str, Any]]
) -> None:
    """Layers left without a single channel to write or to read, which torch would refuse to run."""
    for info in structure.trace.tensors:
        path, name = info.places[0]
        module = structure.modules[path]
        if name != "weight" or not isinstance(module, nn.modules.conv._ConvNd) or module.groups > 1:
            continue
        out, read = (keep(info.atoms[dim]) for dim in ((1, 0) if module.transposed else (0, 1)))
        if out.any() and not read.any():
            layers[path] = {"kind": "bias", "width": int(out.sum()), "dim": 1, "reach": _reach(module)}
    for path, layouts in structure.trace.exits.items():
        module = structure.modules[path]
        if not isinstance(module, ZERO_WIDE_FAILS + POOLS) or len(layouts[0].shape) < 3:
            continue
        blocks = [layout.at(1) for layout in layouts]
        if all(block is not None and not keep(block.atoms).any() for block in blocks):
            layers[path] = _zeros(0, 1, _reach(module))


def _zeros(width: int, dim: int = -1, reach: Sequence[list[int]] = (), lookup: bool = False) -> dict[str, Any]:
    """Zeros of this width in place of a layer; see :class:`espalier.compact.layers.Zeros`."""
    return {"kind": "zeros", "width": width, "dim": dim, "reach": list(reach), "lookup": lookup}


def _reach(module: nn.Module) -> list[list[int]]:
    if isinstance(module, nn.modules.conv._ConvNd):
        n = len(module.kernel_size)
        padding = [0] * n if isinstance(module.padding, str) else list(module.padding)
        if module.padding == "same":  # as wide as before: a kernel of one
            return [[1, 1, 0, 1]] * n
        rows = [list(r) for r in zip(module.kernel_size, module.stride, padding, module.dilation)]
        extra = module.output_padding if module.transposed else ()
        return [[*row, more] for row, more in zip(rows, extra)] if module.transposed else rows
    if isinstance(module, POOLS):
        n = next(k for k in (1, 2, 3) if type(module).__name__.endswith(f"{k}d"))

        def each(value: Any) -> list[int]:
            return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)] * n

        dilation = each(getattr(module, "dilation", 1))
        return [list(r) for r in zip(each(module.kernel_size), each(module.stride), each(module.padding), dilation)]
    return []


def branch_layer(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], planned: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """What stands for a layer of a closed residual branch: zeros without weights. None: there is nothing that could."""
    if planned is not None and planned["kind"] == "zeros":
        return planned
    weight = getattr(module, "weight", None)
    if isinstance(
        module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)
    ) or norm_of(module):
        return {"kind": "identity"}
    shape = shapes.get("weight", () if weight is None else tuple(weight.shape))
    if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        reach = _reach(module)
        return _zeros(shape[0], -1 - len(reach), reach)
    buffers = [name for name in module._buffers if not name.startswith("espalier_")]
    if len(shape) == 2 and set(module._parameters) <= {"weight", "bias"} and not buffers:
        out = 0 if isinstance(module, nn.Linear) else 1
        return _zeros(shape[out], lookup=isinstance(module, nn.Embedding))
    return None


def phantom_layers(
    structure: Structure, group: GateGroup, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> dict[str, Mapping[str, Any]] | None:
    """An emptied group whose code does not run on width zero: one unit of zeros, without weights, stands in.

    Layers that write the group give zeros of one unit's width, layers that read it give their bias. None where one of
    them does more than that.
    """
    layers: dict[str, Mapping[str, Any]] = {}
    for axis, inside in structure.along(group):
        tensor, (path, name) = axis.info.tensor, axis.info.places[0]
        module = structure.modules[path]
        if not inside.all() or any(True for _ in module.children()) or len(axis.info.places) > 1:
            return None
        if axis.is_read and tensor.ndim == 2 and name == "weight":
            changed = shapes.get(path, {}).get("weight", tuple(tensor.shape))
            layers[path] = {"kind": "bias", "width": int(changed[1 - axis.dim]), "dim": -1, "reach": []}
        elif not axis.is_read and name in ("weight", "bias") and tensor.ndim <= 2:
            norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.PReLU)
            if layers.get(path, {}).get("kind") == "bias" or isinstance(module, norms):
                return None
            layers[path] = _zeros(len(inside) // int(group.widths.sum()), lookup=isinstance(module, nn.Embedding))
        else:
            return None
    return layers
