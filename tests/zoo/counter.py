"""An independent counter of weights, MACs and parameters on any plain module: two roads, neither shared with `src`.

``by_layers`` reads the tensors of known layer types. ``by_operations`` watches the operations of one forward pass and
knows no layer: a weight is a parameter that a matrix product or a convolution reads. Conventions: a tied weight counts
once, embeddings used as tables do not count, products of two activations are no MACs of a layer and are stated apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .entry import Inputs, call

aten = torch.ops.aten
BUFFER = -1  # stands for every buffer, and for what is computed from buffers alone
PRODUCTS = {
    aten.mm: (0, 1),
    aten.addmm: (1, 2),
    aten.bmm: (0, 1),
    aten.baddbmm: (1, 2),
    aten.mv: (0, 1),
    aten.addmv: (1, 2),
}
SAME_ELEMENTS = {  # what hands a parameter on without computing: its elements stay its elements
    aten.t, aten.transpose, aten.permute, aten.view, aten._unsafe_view, aten.reshape, aten.clone, aten._to_copy,
    aten.detach, aten.alias, aten.expand, aten.unsqueeze, aten.squeeze, aten.slice, aten.select, aten.split,
    aten.split_with_sizes, aten.chunk, aten.unbind, aten.contiguous, aten._reshape_alias, aten.as_strided,
}  # fmt: skip


@dataclass
class Count:
    """What one module holds and what one forward pass of it takes."""

    weights: int = 0
    macs: int = 0
    parameters: int = 0
    attention: int = 0  # multiply-adds of products of two activations


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layer_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight that a known type of layer multiplies with, a tied one once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        names: list[str] = []
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D":
            names = ["weight"]
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            names = [name for name, _ in module.named_parameters(recurse=False) if name.startswith("weight")]
        elif hasattr(module, "in_proj_weight"):  # torch's attention, and what is left of it
            names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
        for name in names:
            tensor = getattr(module, name)
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def by_layers(model: nn.Module) -> Count:
    """Weights and parameters, from the tensors alone."""
    return Count(weights=sum(tensor.numel() for _, tensor in layer_weights(model)), parameters=parameters(model))


@dataclass
class _Watch(TorchDispatchMode):
    """Follows parameters through views, copies and computations of their own; adds up the products they enter.

    A weight is what stands in a matrix product or a convolution against something else than a weight: a parameter, or
    a tensor computed from parameters and buffers alone (a normalised weight).
    """

    owners: dict[int, tuple[int, Tensor]]  # id of a tensor -> which weight it is; the tensor keeps its id taken
    sizes: list[int]
    parameters: int  # numbers below are parameters themselves, others are computed
    read: set[int] = field(default_factory=set)
    macs: int = 0
    attention: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def owner(self, value: Any) -> int | None:
        found = self.owners.get(id(value))
        return None if found is None else found[0]

    def multiply(self, left: Any, right: Any, count: int) -> None:
        weights = [which for which in (self.owner(left), self.owner(right)) if which not in (None, BUFFER)]
        if len(weights) == 2:  # a layer reads what was computed from parameters; two factors of a weight are no layer
            weights = [which for which in weights if which < self.parameters]
            if len(weights) == 2:
                return
        if len(weights) == 1:
            self.read.update(weights)
            self.macs += count
        elif not weights:
            self.attention += count

    def hand_on(self, packet: Any, args: Any, out: Any) -> None:
        """Views and copies of a weight are that weight; what is computed from weights and buffers is a new one."""
        owned = [self.owner(value) for value in tree_leaves(args) if isinstance(value, Tensor)]
        if not owned or None in owned:
            return
        if packet in (aten.expand, aten.repeat) and out.numel() > args[0].numel():
            return  # given to every example, as learned queries, or a bias where a layer has lost all it read
        for tensor in tree_leaves(out):
            which = owned[0]
            if packet not in SAME_ELEMENTS and any(of != BUFFER for of in owned):
                which = len(self.sizes)
                self.sizes.append(tensor.numel())
            self.owners[id(tensor)] = (which, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is aten.mv and self.owner(args[1]) == BUFFER:
            pass  # how a spectral norm measures its weight: a part of computing the weight, no layer
        elif packet in PRODUCTS:
            left, right = (args[i] for i in PRODUCTS[packet])
            self.multiply(left, right, out.numel() * left.shape[-1])
        elif packet is aten.convolution:
            x, weight, transposed = args[0], args[1], args[6]
            # Each element on the fine side (output; input if transposed) meets one slice of the weight.
            self.multiply(x, weight, (x if transposed else out).numel() * prod(weight.shape[1:]))
        elif "scaled_dot_product" in packet.__name__:
            query, key, value = args[:3]
            self.attention += prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        elif "_native_multi_head" in packet.__name__ or "_rnn" in packet.__name__ or "lstm" in packet.__name__:
            raise NotImplementedError(f"{func} hides its products; count it with gradients enabled, in float64")
        self.hand_on(packet, args, out)
        return out


def by_operations(model: nn.Module, inputs: Inputs) -> Count:
    """Weights, MACs (of the whole batch of `inputs`), parameters, and products of activations, from one forward pass.

    Gradients stay enabled: without them torch takes fused paths whose products cannot be seen.
    """
    named = list(model.parameters())
    owners = {id(b): (BUFFER, b) for b in model.buffers()} | {id(p): (i, p) for i, p in enumerate(named)}
    watch = _Watch(owners, [p.numel() for p in named], len(named))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.enable_grad(), watch:
        call(model, inputs)
    with torch.no_grad():  # a pass in train mode moves running statistics; counting must leave no trace
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    weights = sum(watch.sizes[i] for i in watch.read)
    return Count(weights, watch.macs, parameters(model), watch.attention)
