"""BatchNorm statistics under one mask: for good at the end of a run, for a moment to evaluate in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from espalier.gates.recalibrate import recalibrate as estimate
from espalier.train.feed import Feed
from espalier.train.gradients import Gated


def running(model: nn.Module) -> list[Tensor]:
    """The running statistics a model keeps; none where it has no BatchNorm that tracks them."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        for buffer in module.buffers(recurse=False)
    ]


def recalibrate(gated: Gated, mask: Tensor, feed: Feed, limit: int | None = None) -> None:
    """Re-estimate the running statistics under the canonical mask ``(d)``, in one pass over the data.

    Those of a BatchNorm in eval mode are frozen: they are used as they are, and left so.
    """
    with gated.masked(gated.canonical(mask)), _left_alone(gated.model):
        estimate(gated.model, feed.once(limit))


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Train mode, as a run has it; afterwards every module is in the mode it was in.

    Modules in eval mode inside a model in train mode are frozen, and stay so, as do those that the model's own
    ``train()`` keeps in eval mode. A model that is in eval mode as a whole was only used before: all of it is trained.
    """
    modes = [(module, module.training) for module in model.modules()]
    frozen = [module for module, mode in modes if not mode] if model.training else []
    model.train()
    for module in frozen:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm in eval mode says that it tracks nothing; it still reads the statistics it has."""
    frozen = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats and not module.training
    ]
    for module in frozen:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in frozen:
            module.track_running_stats = True


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
