"""Recalibration: BatchNorm's running statistics estimated anew, for the structure that will be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from espalier.gates.trace.watch import eval_mode
from espalier.space import BadInput, BadType, whole_number


def recalibrate(model: nn.Module, data: Any, *, batch_size: int = 256) -> None:
    """Re-estimate BatchNorm's running statistics by a cumulative mean over one pass of the data.

    ``data``: inputs as one tensor ``(N, ..)``; or ``(inputs, targets)`` tensors; or an iterable of batches, each a
    tensor, a tuple whose first item is the inputs (themselves a tuple where the model takes several), or a dict of
    keyword arguments. Everything but BatchNorm runs in eval mode; afterwards modes and momenta are as before. Inside
    ``gated.masked(mask)`` the statistics are the mask's. If it fails, the statistics are as before.
    """
    whole_number(batch_size, "batch_size", 1)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = {norm: norm.momentum for norm in norms}
    if not norms:
        return
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    held = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    seen = 0
    try:
        with eval_mode(model), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative mean
                norm.train()
            for batch in _batches(data, batch_size):
                _refuse_empty(batch, seen)
                if isinstance(batch, dict):
                    model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()})
                else:
                    parts = batch if isinstance(batch, tuple) else (batch,)
                    model(*(v.to(device) if isinstance(v, Tensor) else v for v in parts))
                seen += 1
        if not seen:
            raise BadInput("recalibrate needs data: there was no batch")
    except BaseException:
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)
        raise
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum


def _refuse_empty(batch: Tensor | tuple[Any, ...] | dict[str, Any], number: int) -> None:
    """Refuse a batch without examples: BatchNorm would take no statistics of it, and say nothing."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)
    first = next((part for part in parts if isinstance(part, Tensor) and part.ndim), None)
    if first is not None and not len(first):
        raise BadInput(f"recalibrate needs data: batch {number} has no examples; leave it out")


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
