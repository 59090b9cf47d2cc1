"""From a factory to stacked weights and back: R initial models as one set of tensors, one trained model out of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.gates.attach import attach
from espalier.space import BadInput, BadType
from espalier.train import checks, gradients, pytree
from espalier.train.batched.runs import Run
from espalier.train.batched.step import Named
from espalier.train.pytree import Nested

# Builds an nn.Module, or a gated model; given the Run if it has a parameter of the name `run`.
Factory = Callable[..., Any]
NOTHING: Mapping[str, Any] = {}
Norm = nn.modules.batchnorm._BatchNorm


class Gated(gradients.Gated, Protocol):
    """What a sweep asks of a gated model beyond that; see :func:`espalier.attach`."""

    def call(self, params_and_buffers: Named, mask: Tensor, *args: Any, **kwargs: Any) -> Any: ...


def made(factory: Factory, run: Run) -> Any:
    """What the factory builds under the seed of this run; torch's own random state stays as it was."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BadType(
            f"factory is a function without arguments that builds the model, anew for every seed, such as "
            f"lambda: Net(), not {type(factory).__name__}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        found = factory(run) if takes_run(factory) else factory()
    if isinstance(found, nn.Module) or (hasattr(found, "call") and isinstance(module(found), nn.Module)):
        return found
    raise BadType(f"factory() builds a module, or a gated model as espalier.attach gives it, not {found!r}")


def takes_run(factory: Factory) -> bool:
    """Whether a factory builds for one run what it builds for no other of its seed."""
    try:
        return "run" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def module(found: Any) -> nn.Module:
    return found if isinstance(found, nn.Module) else getattr(found, "model", None)  # type: ignore[return-value]


def attached(found: Any, example: Nested, check: bool = True, how: Mapping[str, Any] = NOTHING) -> Gated:
    """A gated model as it is, or gates attached to a module. example: a few inputs as the network reads them. how: more
    for :func:`espalier.attach`."""
    if not isinstance(found, nn.Module):
        if how and how != {"round_to": getattr(found, "blocks", None)}:
            names = ", ".join(how)
            raise BadInput(f"the factory gives gates of its own; give {names} to espalier.attach, which makes them")
        return found  # type: ignore[no-any-return]
    device, dtype = next((p.device for p in found.parameters()), None), pytree.dtype(found)
    example = pytree.each(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), example)
    checks.readable(found, example)
    gated: Gated = attach(found, example, check=check, **how)
    return gated


def build(factory: Factory, run: Run, example: Nested, check: bool = True, how: Mapping[str, Any] = NOTHING) -> Gated:
    """A gated model with the initial weights of this run."""
    return attached(made(factory, run), example, check, how)


def stacked(
    factory: Factory,
    runs: Sequence[Run],
    example: Nested,
    device: torch.device,
    check: bool = True,
    how: Mapping[str, Any] = NOTHING,
) -> tuple[Gated, Named, Named]:
    """A template that computes with any weights, the trained tensors ``(R, ...)`` and the fixed ones, by name.

    The template keeps no running statistics: while training, every mask of every run normalises with its own batch,
    and what ships is calibrated under its own mask at the end.
    """
    keys = list(range(len(runs))) if takes_run(factory) else [run.seed for run in runs]
    each = {key: made(factory, run) for key, run in dict(zip(reversed(keys), reversed(runs))).items()}
    template = attached(each[keys[0]], example, check, how)
    frozen = [name for name, m in template.model.named_modules() if isinstance(m, Norm) and not m.training]
    if frozen and template.model.training:
        raise BadInput(
            f"{frozen[0]} is BatchNorm in eval mode; a sweep normalises with batch statistics always and cannot keep "
            "frozen ones. Use espalier.fit, or put it into train mode"
        )
    strip(template.model)
    names = dict(template.model.named_parameters())
    if not any(p.requires_grad for p in names.values()):
        raise BadInput("the model has no parameter that requires a gradient; there is nothing to train")
    # A mask is no tensor of a run: the call brings its own.
    buffers = [n for n, _ in template.model.named_buffers() if not n.rpartition(".")[2].startswith("espalier_")]
    states = {
        key: dict(module(one).named_parameters()) | dict(module(one).named_buffers()) for key, one in each.items()
    }

    def stack(name: str) -> Tensor:
        found = [states[key].get(name) for key in keys]
        shapes = {None if t is None else tuple(t.shape) for t in found}
        if len(shapes) > 1 or None in shapes:
            raise BadInput(f"factory() builds different models: {name} has shapes {sorted(map(str, shapes))}")
        return torch.stack([t.detach().to(device) for t in found if t is not None])

    params = {name: stack(name) for name, p in names.items() if p.requires_grad}
    fixed = {name: stack(name) for name in [*(n for n, p in names.items() if not p.requires_grad), *buffers]}
    template.model.to(device)  # what is not among these tensors is read from the template
    return template, params, fixed


def strip(model: nn.Module) -> None:
    """Let BatchNorm use batch statistics always; torch writes running ones in place, which no vmap can follow."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.track_running_stats = False
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(module, name, None)


def load(gated: Gated, params: Named, run: int) -> None:
    """Write one run's weights and buffers into a model."""
    names = dict(gated.model.named_parameters()) | dict(gated.model.named_buffers())
    with torch.no_grad():
        for name, stack in params.items():
            names[name].copy_(stack[run])


def has_norms(model: nn.Module) -> bool:
    return any(isinstance(module, Norm) for module in model.modules())
