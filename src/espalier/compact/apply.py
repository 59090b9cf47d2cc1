"""Applying a plan: a copy of the model with smaller tensors, plain layers, and no trace but its plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.layers import Attention, Bias, Fill, Pass, Select, Zeros
from espalier.compact.plan import Plan, from_runs
from espalier.space import BadInput

TORCHS = (nn.TransformerEncoder, nn.TransformerDecoder)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that is held in several places, under each of its names."""
    named: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                named[f"{path}.{name}" if path else name] = tensor
    return named


def apply_plan(
    model: nn.Module, plan: Plan, *, share: bool = False, pieces: dict[str, Tensor] | None = None
) -> nn.Module:
    """The compact model; ``model`` is left as it is. ``share``: tensors that stay whole are not copied.

    pieces: filled with the compact model's tensor for each name of a tensor of ``model``."""
    memo: dict[int, Any] = {}
    named = named_tensors(model)
    for name, dims in plan.tensors.items():
        if name not in named:
            raise BadInput(f"the plan cuts {name}, which this model does not have; it is not the model it was made for")
        shape = tuple(named[name].shape)
        if shape != plan.shapes.get(name, shape):
            raise BadInput(f"the plan cuts {name} of shape {plan.shapes[name]}, but here it is of shape {shape}")
        memo[id(named[name])] = _copied(named[name], cut(named[name], name, dims))
    for tensor in named.values():
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor if share else _copied(tensor, tensor.detach().clone())
    if pieces is not None:
        pieces.update({name: memo[id(tensor)] for name, tensor in named.items()})
    small = copy.deepcopy(model, memo)
    for name, value in plan.attributes.items():
        path, _, attribute = name.rpartition(".")
        module = _module(small, path)
        is_shape = isinstance(getattr(module, attribute, None), tuple)  # of a norm
        setattr(module, attribute, (value,) if is_shape else value)
    chosen = [path for path, change in plan.layers.items() if change["kind"] == "option"]
    for path in [*(path for path in plan.layers if path not in chosen), *sorted(chosen, key=len, reverse=True)]:
        layer = _layer(_module(small, path), plan.layers[path])  # options last: what is in them has changed by then
        if path == "":
            small = layer
            continue
        parent, _, name = path.rpartition(".")
        owner = small.get_submodule(parent)
        shared = owner._modules[name]
        for holder in list(small.modules()):  # a module may be held in several places
            for key, held in list(holder._modules.items()):
                if held is shared and held is not layer and holder is not layer:
                    holder._modules[key] = layer
    for module in list(small.modules()):
        layers = getattr(module, "layers", None)
        if isinstance(module, TORCHS) and isinstance(layers, nn.ModuleList):  # they look into their first layer
            module.layers = nn.ModuleList(layer for layer in layers if not isinstance(layer, Pass))
    for module in list(small.modules()):
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            if not share and all(weight.numel() for weight in module._flat_weights if weight is not None):
                module.flatten_parameters()  # on a GPU one chunk of memory, as torch makes it of a new layer
    object.__setattr__(small, "espalier_plan", plan.to_dict())
    return small


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadInput(f"the plan changes module {path!r}, which this model does not have") from None


def cut(tensor: Tensor, name: str, dims: Mapping[int, Any]) -> Tensor:
    """The indices of a tensor that stay, as the plan says of this name; also of what has its shape, as momentum has."""
    data = tensor.detach()
    for dim, runs in dims.items():
        index = from_runs(runs)
        if dim >= data.ndim or (index and max(index) >= data.shape[dim]):
            raise BadInput(
                f"the plan keeps index {max(index, default=0)} of dimension {dim} of {name}, "
                f"which is of shape {tuple(tensor.shape)} here; it is not the model the plan was made for"
            )
        data = data.index_select(dim, torch.tensor(index, dtype=torch.int64, device=data.device))
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return data.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def put_back(tensor: Tensor, piece: Tensor, dims: Mapping[int, Any]) -> None:
    """Write what :func:`cut` took, as it is now, into its places; in place."""
    places = [
        torch.tensor(from_runs(dims[dim]) if dim in dims else range(size), dtype=torch.int64, device=tensor.device)
        for dim, size in enumerate(tensor.shape)
    ]
    with torch.no_grad():
        if dims:
            tensor[torch.meshgrid(*places, indexing="ij")] = piece.to(tensor)
        else:
            tensor.copy_(piece)


def _copied(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _layer(module: nn.Module, change: Mapping[str, Any]) -> nn.Module:
    kind = change["kind"]
    layer: nn.Module
    if kind == "identity":
        layer = nn.Identity()
    elif kind == "select":
        select = Select(change["index"], change["dim"])
        layer = select if change.get("alone") else nn.Sequential(select, module)
    elif kind == "fill":
        layer = Fill(change["index"], change["dim"])
    elif kind == "zeros":
        layer = Zeros(change["width"], change["dim"], change["reach"], change["lookup"])
    elif kind == "bias":
        layer = Bias(module._parameters.get("bias"), change["width"], change["dim"], change["reach"])
    elif kind == "option":
        return module.get_submodule(f"options.{change['index']}")
    elif kind == "pass":
        layer = Pass()
    elif kind == "attention":
        assert isinstance(module, nn.MultiheadAttention)
        layer = Attention(module, change["heads"])
    else:
        raise BadInput(f"the plan has a change of kind {kind!r}, which this version of Espalier does not know")
    layer.train(module.training)
    tensor = next(module.parameters(), None)
    return layer if tensor is None else layer.to(tensor.device)
