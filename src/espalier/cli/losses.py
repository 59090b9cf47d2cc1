"""The loss of a command: by name, the user's own, or what fits the targets; tried out before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from espalier.ship import import_spec
from espalier.space import BadInput
from espalier.train import feed, nested

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "binary-cross-entropy": F.binary_cross_entropy_with_logits,
}


def chosen(name: str, reading: feed.Feed) -> Callable[[Any, Any], Tensor]:
    """By name, the user's own, or what fits the targets: cross entropy for integers, the mean square for numbers."""
    if import_spec.is_reference(name):
        return import_spec.function(name, "--loss")
    if name:
        return LOSSES[name]
    targets = next(iter(reading.once(1)))[1]
    if not isinstance(targets, Tensor):
        raise BadInput("these targets are several tensors; say what is to be minimised, as --loss file.py:function")
    return F.mse_loss if targets.is_floating_point() else F.cross_entropy


def named(loss: Callable[..., Any]) -> str:
    return next((name for name, given in LOSSES.items() if given is loss), getattr(loss, "__name__", "loss"))


def tried(loss: Callable[[Any, Any], Tensor], name: str, outputs: Any, reading: feed.Feed, device: Any) -> None:
    """The loss takes what the network gives, said before anything is trained."""
    first = next(iter(reading.once(4)))[1]
    targets = nested.each(lambda t: t[:4].to(device), first)
    name = name or named(loss)
    shapes = [", ".join(str(tuple(t.shape)) for t in nested.tensors(part)) for part in (outputs, targets)]
    if loss in (F.mse_loss, F.binary_cross_entropy_with_logits) and shapes[0] != shapes[1]:
        way = "--loss cross-entropy is for classes"
        if shapes[0] == shapes[1].replace(",)", ", 1)"):
            way = "give the targets a last dimension of 1, y[:, None]"
        raise BadInput(
            f"--loss {name} compares outputs and targets of one shape; here they are {shapes[0]} and {shapes[1]}: {way}"
        )
    try:
        with torch.no_grad():
            loss(outputs, targets)
    except Exception as error:  # the user's own function may raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"--loss {name} does not take outputs {shapes[0]} and targets {shapes[1]}: {why}") from error
