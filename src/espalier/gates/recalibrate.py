"""Recalibration: BatchNorm's running statistics estimated anew for the structure that will be used; what is frozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from espalier.gates.trace import Example, eval_mode, modes_kept, values_kept
from espalier.space import BadInput, BadType, whole_number

Norm = nn.modules.batchnorm._BatchNorm


def recalibrate(model: nn.Module, data: Any, *, batch_size: int = 256) -> None:
    """Re-estimate BatchNorm's running statistics by a mean over one pass of the data; a batch counts by what it holds.

    ``data``: inputs as one tensor ``(N, ..)``; or ``(inputs, targets)`` tensors; or an iterable of batches, each a
    tensor, a tuple whose first item is the inputs (themselves a tuple where the model takes several), or a dict of
    keyword arguments. Everything but BatchNorm runs in eval mode; afterwards modes and momenta are as before. Inside
    ``gated.masked(mask)`` the statistics are the mask's. If it fails, the statistics are as before.
    """
    whole_number(batch_size, "batch_size", 1)
    _estimate(model, _tracking(model), data, batch_size)


def recalibrate_under(gated: Any, mask: Tensor, batches: Iterable[Any]) -> None:
    """The same under the canonical form of a mask ``(d)``, but for BatchNorm in eval mode, which is frozen: it is used
    as it is, and left so."""
    with gated.masked(gated.canonical(mask)):
        _estimate(gated.model, [norm for norm in _tracking(gated.model) if norm.training], batches)


@contextmanager
def calibrated(gated: Any, mask: Tensor, batches: Iterable[Any]) -> Iterator[None]:
    """Inside, the statistics of this mask over these batches; afterwards, the ones of before."""
    with values_kept(_statistics(_tracking(gated.model))):
        recalibrate_under(gated, mask, batches)
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Train mode, as a run has it; afterwards every module is in the mode it was in.

    Modules in eval mode inside a model in train mode are frozen, and stay so, as do those that the model's own
    ``train()`` keeps in eval mode. A model that is in eval mode as a whole was only used before: all of it is trained.
    """
    frozen = [module for module in model.modules() if not module.training] if model.training else []
    with modes_kept(model):
        model.train()
        for module in frozen:
            module.training = False
        yield


def _tracking(model: nn.Module) -> list[Norm]:
    """BatchNorm that keeps running statistics."""
    return [module for module in model.modules() if isinstance(module, Norm) and module.track_running_stats]


def _statistics(norms: Sequence[Norm]) -> list[Tensor]:
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def _estimate(model: nn.Module, norms: Sequence[Norm], data: Any, batch_size: int = 1) -> None:
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    hooks = [norm.register_forward_pre_hook(_weighing(), with_kwargs=True) for norm in norms]
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    seen = 0
    try:
        with values_kept(_statistics(norms), on_failure=True), eval_mode(model), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.train()
            for example in map(Example.of, _batches(data, batch_size)):
                if not all(len(tensor) for tensor in example.tensors[:1] if tensor.ndim):
                    # BatchNorm would take no statistics of it, and say nothing.
                    raise BadInput(f"recalibrate needs data: batch {seen} has no examples; leave it out")
                args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), tuple(example))
                model(*args, **kwargs)
                seen += 1
            if not seen:
                raise BadInput("recalibrate needs data: there was no batch")
    finally:
        for norm, momentum, hook in zip(norms, momenta, hooks):
            norm.momentum = momentum
            hook.remove()


def _weighing() -> Callable[..., None]:
    """A hook before a norm: its statistics are the mean over all values so far, so that a short last batch does not
    count as much as a full one. A single value has no variance: it passes by what is known."""
    values = 0

    def weigh(norm: Norm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal values
        shape = (args[0] if args else next(iter(kwargs.values()))).shape
        count = math.prod((shape[0], *shape[2:]))
        norm.training = count > 1 or not values
        if norm.training:
            values += count
            norm.momentum = count / max(values, 1)

    return weigh


def _batches(data: Any, batch_size: int) -> Iterator[Tensor | tuple[Any, ...] | dict[str, Any]]:
    if isinstance(data, Tensor):
        yield from torch.split(data, batch_size)
    elif isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        yield from torch.split(data[0], batch_size)
    elif isinstance(data, Iterable):
        for batch in data:
            if isinstance(batch, (tuple, list)) and batch:
                batch = tuple(batch[0]) if isinstance(batch[0], list) else batch[0]
            if not isinstance(batch, (Tensor, tuple, dict)):
                raise BadType(
                    f"a batch is a tensor, a tuple that begins with one, or a dict, not {type(batch).__name__}"
                )
            yield batch
    else:
        raise BadType(f"data are tensors or an iterable of batches, not {type(data).__name__}")
