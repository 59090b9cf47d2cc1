"""Applying a plan: a copy of the model with smaller tensors, plain layers, and no trace but its plan."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from espalier.compact.layers import Attention, Constant, Fill, Pass, Select
from espalier.compact.plan import Plan, from_runs
from espalier.space import BadInput

PLAN_OF = "espalier_plan"  # the attribute of a compact model that holds its plan as a dict
TORCHS = (nn.TransformerEncoder, nn.TransformerDecoder)


def uncompiled(model: Any) -> Any:
    """The module itself, of what ``torch.compile`` wraps around it: its names are those of the factory."""
    return getattr(model, "_orig_mod", model)  # to ask for its class would import the compiler


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that is held in several places, under each of its names."""
    named: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                named[f"{path}.{name}" if path else name] = tensor
    return named


def tensor_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's ``state_dict``. What else a class puts there, as notes of its version, is its own."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """A memo for ``deepcopy``: what modules keep of their last pass, such as attention to be looked at, without the
    graph behind it, which torch does not copy. What listens to the model is no part of it, and is not copied."""
    held = (leaf for module in model.modules() for leaf in tree_leaves(list(vars(module).values())))
    passed = {id(leaf): leaf.detach().clone() for leaf in held if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    return passed | listeners(model)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy that computes the same: a module that makes itself anew of what it was made with, as the layers of
    einops do when they are copied, would forget the numbers that a cut has changed."""
    other = copy.deepcopy(model, without_graphs(model))
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        for name, value in vars(mine).items():
            leaves = tree_leaves(value)
            if leaves and all(isinstance(leaf, (int, str)) for leaf in leaves):
                theirs.__dict__[name] = copy.copy(value)
    return other


def listeners(model: nn.Module) -> dict[int, Any]:
    """A memo for ``deepcopy``: objects that are hooks of the model, or whose methods are, stay themselves, so that a
    hook of the copy tells the same object. Those that a module holds are parts of it, and copied."""
    memo, kept = dict[int, Any](), list[Any]()
    for module in model.modules():
        for name, value in vars(module).items():
            if not name.endswith("_hooks"):
                kept.append(value)
                continue
            for hook in value.values() if isinstance(value, dict) else ():
                while isinstance(hook, functools.partial):
                    hook = hook.func
                owner = getattr(hook, "__self__", hook)
                memo[id(owner)] = owner
    if memo:
        for part in (*model.modules(), *tree_leaves(kept)):
            memo.pop(id(part), None)
    return memo


def apply_plan(
    model: nn.Module, plan: Plan, *, share: bool = False, pieces: dict[str, Tensor] | None = None
) -> nn.Module:
    """The compact model; ``model`` is left as it is. ``share``: tensors that stay whole are not copied.

    Of a model that is compact itself the plan of both cuts is kept, so that the result loads from the uncut one.
    pieces: filled with the compact model's tensor for each name of a tensor of ``model``."""
    if plan.earlier is not None:
        if hasattr(model, PLAN_OF):
            raise BadInput("this plan begins with the uncut model, but the model given is a compact one")
        model = apply_plan(model, plan.earlier)
    elif hasattr(model, PLAN_OF):
        plan = replace(plan, earlier=Plan.from_dict(getattr(model, PLAN_OF)))
    memo = listeners(model) if share else without_graphs(model)  # a model that is tried out makes no graph
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
        attribute, _, place = attribute.partition("[")  # of several numbers in it: "sizes[1]" is the second
        held = None if attribute.startswith("__") else getattr(module, attribute, None)  # a plan may be a stranger's
        new: Any = value
        leaves, form = tree_flatten(held)
        i = int(place[:-1]) if place[:-1].isdecimal() and len(place) < 10 else len(leaves)
        if i < len(leaves) and type(leaves[i]) is int:
            new = tree_unflatten([*leaves[:i], value, *leaves[i + 1 :]], form)
        elif place or not isinstance(held, (int, tuple)):
            raise BadInput(f"the plan sets {name}, which is no number of this model")
        elif isinstance(held, tuple):  # a norm's shape
            new = (value,)
        setattr(module, attribute, new)
    chosen = [path for path, change in plan.layers.items() if change["kind"] == "option"]
    for path in [*(path for path in plan.layers if path not in chosen), *sorted(chosen, key=len, reverse=True)]:
        try:
            layer = _layer(_module(small, path), plan.layers[path])  # options last: what is in them has changed by then
        except KeyError as lacking:
            kind = plan.layers[path]["kind"]
            raise BadInput(f"the plan's change of kind {kind!r} has no {lacking.args[0]}") from None
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
            module.layers = nn.ModuleList(layer for layer in layers if not isinstance(layer, Pass) or layer.empty)
    modes = [(module, module.training) for module in small.modules()]
    small.train(not model.training)  # what modules made of their parameters for eval mode, and keep, they make anew
    small.train(model.training)
    for module, training in modes:
        module.training = training
    for module in list(small.modules()):
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            if not share and all(weight.numel() for weight in module._flat_weights if weight is not None):
                module.flatten_parameters()  # on a GPU one chunk of memory, as torch makes it of a new layer
    keep_plan(small, plan.to_dict())
    return small


def keep_plan(small: nn.Module, plan: dict[str, Any]) -> None:
    """The plan of a compact model, where it is looked for; also where Transformers writes it, to config.json."""
    object.__setattr__(small, PLAN_OF, plan)
    config = getattr(small, "config", None)
    if hasattr(config, "to_dict") and hasattr(small, "save_pretrained"):
        setattr(config, PLAN_OF, plan)


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadInput(f"the plan changes module {path!r}, which this model does not have") from None


def cut(tensor: Tensor, name: str, dims: Mapping[int, Any]) -> Tensor:
    """The indices of a tensor that stay, as the plan says of this name; also of what has its shape, as momentum has."""
    data = tensor.detach()
    for dim, runs in dims.items():
        last = max((stop - 1 for _, stop in runs), default=-1)
        if dim >= data.ndim or last >= data.shape[dim] or sum(b - a for a, b in runs) > data.shape[dim]:
            raise BadInput(
                f"the plan keeps index {last} of dimension {dim} of {name}, "
                f"which is of shape {tuple(tensor.shape)} here; it is not the model the plan was made for"
            )
        index = from_runs(runs)
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
        alone = bool(change.get("alone"))  # the model's own code follows, or a module's that may ask for one chunk
        select = Select(change["index"], change["dim"], alone or not type(module).__module__.startswith("torch.nn."))
        layer = select if alone else nn.Sequential(select, module)
    elif kind == "fill":
        layer = Fill(change["index"], change["dim"])
    elif kind == "padded":
        before = [Select(change["select"], change["dim"])] if "select" in change else []
        behind = [Fill(change["fill"], change["dim"])] if "fill" in change else []
        layer = nn.Sequential(*before, module, *behind)
    elif kind in ("zeros", "bias"):
        bias, lookup = (None, change["lookup"]) if kind == "zeros" else (module._parameters.get("bias"), False)
        layer = Constant(bias, change["width"], change["dim"], change["reach"], lookup, change.get("length", 0))
    elif kind == "option":
        options = module._modules.get("options")
        if not isinstance(options, nn.ModuleList) or not change["option"] < len(options):
            raise BadInput(f"the plan takes option {change['option']} of a module that has no such one")
        chosen: nn.Module = options[change["option"]]
        return chosen
    elif kind == "pass":
        layer = Pass(change.get("length", 0), bool(change.get("empty")))
    elif kind == "attention":
        if not isinstance(module, nn.MultiheadAttention):
            raise BadInput("the plan cuts heads of a module that is no attention of torch")
        layer = Attention(module, change["heads"])
    else:
        raise BadInput(f"the plan has a change of kind {kind!r}, which this version of Espalier does not know")
    layer.train(module.training)
    tensor = next(module.parameters(), None)
    return layer if tensor is None else layer.to(tensor.device)
