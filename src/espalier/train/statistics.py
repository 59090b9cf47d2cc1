"""BatchNorm statistics under one mask: for good at the end of a run, for a moment to evaluate in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from espalier.gates.recalibrate import recalibrate as estimate
from espalier.train.feed import Feed
from espalier.train.step import Gated


def running(model: nn.Module) -> list[Tensor]:
    """The running statistics a model keeps; none where it has no BatchNorm that tracks them."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        for buffer in module.buffers(recurse=False)
    ]


def recalibrate(gated: Gated, mask: Tensor, feed: Feed, limit: int | None = None) -> None:
    """Re-estimate the running statistics under the canonical mask ``(d)``, in one pass over the data."""
    with gated.masked(gated.canonical(mask)):
        estimate(gated.model, feed.once(limit))


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
