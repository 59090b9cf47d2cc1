"""From a factory to stacked weights and back: R initial models as one set of tensors, one trained model out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.space import BadInput, BadType, Space
from espalier.train.batched.step import Named

Factory = Callable[[], Any]  # an nn.Module, or a gated model
Norm = nn.modules.batchnorm._BatchNorm


class Gated(Protocol):
    """What a sweep asks of a gated model; see :func:`espalier.attach`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def space(self) -> Space: ...
    def call(self, params_and_buffers: Named, mask: Tensor, x: Tensor) -> Tensor: ...
    def canonical(self, mask: Tensor) -> Tensor: ...
    def cost(self, kind: str) -> Cost: ...
    def compact(self, mask: Tensor) -> nn.Module: ...


def build(factory: Factory, seed: int, example: Tensor) -> Gated:
    """A gated model with the initial weights of this seed; torch's own random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = factory()
    if isinstance(made, nn.Module):
        from espalier.gates import attach

        gated: Gated = attach(made, example.to(next(made.parameters()).dtype))
        return gated
    if not (hasattr(made, "call") and isinstance(getattr(made, "model", None), nn.Module)):
        raise BadType(f"factory() builds a module, or a gated model as espalier.attach gives it, not {made!r}")
    return made  # type: ignore[no-any-return]


def stacked(
    factory: Factory, seeds: Sequence[int], example: Tensor, device: torch.device
) -> tuple[Gated, Named, Named]:
    """A template that computes with any weights, the trained tensors ``(R, ...)`` and the fixed ones, by name.

    The template keeps no running statistics: while training, every mask of every run normalises with its own batch,
    and what ships is calibrated under its own mask at the end.
    """
    models = {seed: build(factory, seed, example) for seed in dict.fromkeys(seeds)}
    template = models[seeds[0]]
    params, fixed = dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for seed in seeds:
        gated = models[seed]
        if gated.space != template.space:
            raise BadInput(f"factory() builds different models: {gated.space!r} and {template.space!r}")
        strip(gated.model)
        for name, tensor in gated.model.named_parameters():
            (params if tensor.requires_grad else fixed).setdefault(name, []).append(tensor.detach())
        for name, buffer in gated.model.named_buffers():
            if name.rpartition(".")[2].startswith("espalier_"):
                continue  # a mask: the call brings its own
            fixed.setdefault(name, []).append(buffer.detach())
    if not params:
        raise BadInput("the model has no parameter that requires a gradient; there is nothing to train")
    template.model.to(device)  # what is not among these tensors is read from the template
    return template, _stack(params, device), _stack(fixed, device)


def _stack(tensors: dict[str, list[Tensor]], device: torch.device) -> Named:
    return {name: torch.stack([t.to(device) for t in each]).contiguous() for name, each in tensors.items()}


def strip(model: nn.Module) -> None:
    """Let BatchNorm use batch statistics always; torch writes running ones in place, which no vmap can follow."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.track_running_stats = False
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(module, name, None)


def load(gated: Gated, params: Named, run: int) -> None:
    """Write one run's weights into a model."""
    names = dict(gated.model.named_parameters())
    with torch.no_grad():
        for name, stack in params.items():
            names[name].copy_(stack[run])


def has_norms(model: nn.Module) -> bool:
    return any(isinstance(module, Norm) for module in model.modules())
