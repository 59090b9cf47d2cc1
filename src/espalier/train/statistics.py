"""BatchNorm statistics under one mask: for good at the end of a run, for a moment to evaluate in the middle of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from espalier.train import nested
from espalier.train.feed import Feed
from espalier.train.nested import Nested
from espalier.train.score import evaluating
from espalier.train.step import Gated

Norm = (nn.modules.batchnorm._BatchNorm,)


def running(model: nn.Module) -> list[Tensor]:
    """The running statistics a model keeps; none where it has no BatchNorm that tracks them."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, Norm) and module.track_running_stats
        for buffer in module.buffers(recurse=False)
    ]


def recalibrate(gated: Gated, mask: Tensor, feed: Feed, limit: int | None = None) -> None:
    """Re-estimate the running statistics under the canonical mask ``(d)``, in one pass over the data."""
    if not running(gated.model):
        return
    device = next(gated.model.parameters()).device
    with gated.masked(gated.canonical(mask)):
        over(gated.model, (nested.each(lambda t: t.to(device), inputs) for inputs, _ in feed.once(limit)))


def over(model: nn.Module, batches: Iterable[Nested]) -> None:
    """Running statistics as the plain mean over the batches' own; everything but BatchNorm in eval mode."""
    norms = [module for module in model.modules() if isinstance(module, Norm) and module.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad(), evaluating(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative mean
            norm.train()
        try:
            for inputs in batches:
                nested.call(model, inputs)
        finally:
            for norm, momentum in zip(norms, momenta):
                norm.momentum = momentum


@contextmanager
def calibrated(gated: Gated, mask: Tensor, feed: Feed, limit: int) -> Iterator[None]:
    """Inside, the statistics of this mask over about ``limit`` examples; afterwards, the ones of before."""
    buffers = running(gated.model)
    before = [buffer.clone() for buffer in buffers]
    try:
        recalibrate(gated, mask, feed, limit)
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before):
                buffer.copy_(value)
