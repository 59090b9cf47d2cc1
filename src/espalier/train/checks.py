"""What is wrong with an argument, said before anything is trained: the thing, the value, the way out."""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.gates.blocks import RoundTo
from espalier.gates.trace import eval_mode
from espalier.space import BadInput, BadType, Unreachable, first_line
from espalier.train import pytree
from espalier.train.pytree import Nested

IGNORED = -100  # the class that torch's cross entropy leaves out


def needed(name: str, why: str) -> Any:
    """A module beyond what Espalier always has. why: what is said where it is not there, with the way to get it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name:  # it is there, and lacks something itself
            raise
        raise BadInput(why) from None


def device(given: object) -> torch.device:
    """A device that torch knows and that is there."""
    if not isinstance(given, (str, torch.device)):
        raise BadType(f"device is a torch.device or its name, such as 'cpu' or 'cuda:0', not {given!r}")
    try:
        place = torch.device(given)
    except RuntimeError:
        raise BadInput(f"device {given!r} is not known to torch; use 'cpu', 'cuda', 'cuda:1' or 'mps'") from None
    if place.type == "meta":
        raise BadInput("device 'meta' holds no numbers, so nothing can be trained there; use 'cpu' or 'cuda'")
    there = torch.cuda.device_count() if place.type == "cuda" else 1
    if place.type == "cuda" and (place.index or 0) >= there:
        seen = f"torch sees {there} CUDA devices" if there else "torch sees no CUDA device"
        raise BadInput(f"device {str(given)!r}: {seen} here; use 'cpu', or leave device out")
    return place


def resume(given: object) -> bool:
    """Whether a run is gone on with whatever has changed."""
    if not isinstance(given, str) or given not in ("same", "anyway"):
        raise BadInput(f"resume is 'same', or 'anyway' for a run whose data or settings have changed, not {given!r}")
    return given == "anyway"


def loss(given: object) -> None:
    """A function of outputs and targets, or None for the model's own."""
    if given is None:
        return
    if isinstance(given, type):
        raise BadType(f"loss is a function of (outputs, targets); {given.__name__} is a class: give {given.__name__}()")
    if not callable(given):
        raise BadType(f"loss is a function of (outputs, targets), such as F.cross_entropy, not {given!r}")
    if isinstance(given, nn.Module) and any(parameter.requires_grad for parameter in given.parameters()):
        said = "the loss has parameters of its own, which stay as they are: freeze them, by requires_grad_(False), or"
        warnings.warn(f"{said} train them by an optimiser of their own, beside espalier.shape", stacklevel=3)


OWN_LOSS = "give loss=, a function of (outputs, targets), such as F.mse_loss; --loss on the command line"


def cross_entropy(outputs: object, targets: Nested) -> None:
    """Torch's cross entropy, the default loss, reads what the network gives and what the data want. Some of what is
    wrong torch names without a way out; a regression it would learn in silence.

    outputs: of a few examples. targets: of these, and of all others that are at hand.
    """
    way = f"; for other targets {OWN_LOSS}"
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        given = f"the model gives a {type(outputs).__name__}, the targets are a {type(targets).__name__}"
        raise BadType(f"cross entropy, the default loss, reads two tensors: {given}; {OWN_LOSS}")
    few = targets[: len(outputs)]
    shapes = f"outputs {_shown(outputs)} and targets {_shown(few)}"
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise BadInput(f"cross entropy, the default loss, needs a score for each class, not {shapes}{way}")
    try:
        nn.functional.cross_entropy(outputs[: len(few)], torch.zeros_like(few, device=outputs.device))
    except (RuntimeError, ValueError) as error:
        why = first_line(error)
        raise BadInput(
            f"cross entropy, the default loss, does not take {shapes}: {why}. Classes are int64 of shape (n), y.long() "
            f"or y[:, 0]{way}"
        ) from None
    if targets.is_floating_point():
        if bool((targets < 0).any()) or bool((targets.sum(1) > 1.001).any()):
            raise BadInput(
                "cross entropy, the default loss, reads floating-point targets as probabilities of the classes; some "
                f"of these are below 0, or above 1 together{way}"
            )
    else:
        classes(targets[targets != IGNORED], outputs.shape[1])


def scores(outputs: object, targets: Tensor) -> None:
    """The default loss of a sweep reads what the network gives and what the data want."""
    if not isinstance(outputs, Tensor):
        raise BadType(f"the default loss of a sweep reads a tensor, not a {type(outputs).__name__}; {OWN_LOSS}")
    fits = outputs.ndim == targets.ndim + 1 and outputs.shape[-1] > 1
    if targets.is_floating_point() or not fits:
        raise BadInput(
            "the default loss of a sweep, cross entropy, needs scores (n, classes) and classes (n), not outputs "
            f"{_shown(outputs)} and targets {_shown(targets)}; for other targets {OWN_LOSS}"
        )


def classes(targets: Tensor, count: int) -> None:
    """The network has a score for each of these classes."""
    low, high = (int(targets.min()), int(targets.max())) if targets.numel() else (0, 0)
    if low < 0 or high >= count:
        raise BadInput(
            f"targets are classes from {low} to {high}, but the network tells {count} apart, from 0 to {count - 1}; "
            "number them so, or give a loss that knows them"
        )


def several_losses(given: object) -> None:
    """A loss in parts, or with what is to be logged beside it, is no loss."""
    if isinstance(given, (tuple, list, Mapping)):
        raise BadType(
            f"the loss is one scalar tensor, not a {type(given).__name__} of {len(given)}: add the parts, and log the "
            "rest elsewhere"
        )


def gradient_of(given: object) -> None:
    """The loss of one mini-batch can be gone backwards through."""
    several_losses(given)
    if not isinstance(given, Tensor):
        raise BadType(
            f"the loss is a scalar tensor, not {type(given).__name__}: loss(outputs, targets) returns what torch "
            "computed, without .item()"
        )
    if not given.requires_grad:
        raise BadInput(
            "the loss has no gradient: it does not depend on what is trained; does loss(outputs, targets) detach, or "
            "the model compute under no_grad?"
        )


def module_of(model: object) -> nn.Module:
    """The module to be trained, of a module or what espalier.attach gave."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise BadType(f"model is a torch module or what espalier.attach gave, not {type(model).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise BadInput("a model of TorchScript cannot be watched or cut; give the module that it was made from")
    if isinstance(module, nn.DataParallel):
        raise BadInput("DataParallel copies a model in every pass, which gates cannot follow; give model.module")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise BadInput(
            "the model is on the device 'meta', where tensors hold no numbers; build it on 'cpu', or use "
            "model.to_empty(device='cpu') and load its weights"
        )
    if next(module.parameters(), None) is None:
        raise BadInput("the model has no parameters, so there is nothing to train")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise BadInput("every parameter of the model is frozen (requires_grad is False); there is nothing to train")
    return module


def folder(given: object) -> Path:
    """Where a run may be written: not the current folder by mistake."""
    if not isinstance(given, (str, os.PathLike)):
        raise BadType(f"checkpoint is the path of a folder, not {given!r}")
    if not os.fspath(given):
        raise BadInput("checkpoint is the path of a folder, not ''; use '.' for the current one, None for none")
    return Path(given)


def readable(model: nn.Module, inputs: Nested) -> Any:
    """The model takes such inputs: it is called on a few of them, in eval mode and without a trace; its outputs.

    Nothing is converted on the way: what bytes mean (pixels, tokens) only who made them knows.
    """
    cuda = sorted({t.device.index or 0 for t in pytree.tensors(inputs) if t.device.type == "cuda"})
    try:
        with eval_mode(model), torch.random.fork_rng(devices=cuda), torch.no_grad():
            return pytree.call(model, inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a forward of the user's own may raise anything
        raise BadInput(
            f"the model does not take these inputs, {_shown(inputs)}: {_way_out(model, inputs, error)}"
        ) from error
    finally:
        torch.clear_autocast_cache()  # inside autocast torch has kept weights that were cast without a graph


def few(model: nn.Module, inputs: Nested, most: int = 4) -> Nested:
    """A few of these inputs, which the model takes; all of them where it takes no fewer, as of one graph."""
    some = pytree.few(inputs, most)
    try:
        readable(model, some)
    except BadInput as error:
        try:
            readable(model, inputs)
        except BadInput:
            raise error from error.__cause__
        return inputs
    return some


def _way_out(model: nn.Module, inputs: Nested, error: Exception) -> str:
    why = first_line(error)
    if not isinstance(error, (RuntimeError, TypeError, IndexError)):  # not torch's: the user's own words, and where
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {why} ({Path(place.filename).name}, line {place.lineno})"
    if any(tensor.dtype == torch.uint8 for tensor in pytree.tensors(inputs)):
        return (
            f"{why}. uint8 is not converted: give the espalier.data.Dataset, which knows its scale (from_arrays makes "
            "one), or x.float() / 255; for tokens x.long()"
        )
    wants = pytree.dtype(model)
    other = [t.dtype for t in pytree.tensors(inputs) if t.is_floating_point() and t.dtype != wants]
    if other:
        return f"{why}. The model computes in {wants}, the inputs are {other[0]}: use x.to({wants})"
    return why


def _shown(inputs: Nested) -> str:
    given = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in pytree.tensors(inputs)]
    more = f" and {len(given) - 4} more" if len(given) > 4 else ""
    return ", ".join(given[:4]) + more or "none"


@contextmanager
def unreachable(gated: Any, cost: Any) -> Iterator[None]:
    """Where a target cannot be met, name the layers that hold the cost."""
    try:
        yield
    except Unreachable as error:
        if not (isinstance(cost, str) and cost in ("weights", "macs", "parameters") and hasattr(gated, "held")):
            raise
        shown = [f"{name} ({count:,.0f})" for name, count in gated.held(cost)[:5]]
        why = "espalier.attach(model, inputs).explain() says why"
        raise Unreachable(f"{error}. The {cost} that always stay are of {', '.join(shown)}; {why}") from None


def attaching(
    round_to: RoundTo | None, kinds: Collection[str] | None, ignore: Collection[str], attached: bool = False
) -> dict[str, Any]:
    """What of these was given, for :func:`espalier.attach`; refused where gates are attached already."""
    given = {
        "round_to": round_to,
        "kinds": kinds,
        "ignore": None if isinstance(ignore, tuple) and not ignore else ignore,
    }
    how = {name: value for name, value in given.items() if value is not None}
    if attached and how:
        raise BadInput(f"this model has gates already; give {', '.join(how)} to espalier.attach, which makes them")
    return how
