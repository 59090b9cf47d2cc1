"""What ``densenet.py`` measures: runs with synthetic inputs, their updates, and the clock."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import espalier
from densenet_compile import operations
from espalier.models import DenseNet
from espalier.models.densenet_fast import FastDenseNet
from espalier.train.batched.batch_engine import strip
from espalier.train.batched.step import Differential, cross_entropy
from espalier.train.descent import SGD


@functools.cache
def template(depth: int, device: torch.device) -> Any:
    """The readable network, that computes with any weights; without running statistics, as while training."""
    gated = espalier.attach(DenseNet(depth), torch.rand(1, 3, 8, 8), check=False)
    strip(gated.model)
    gated.model.to(device)
    return gated


@functools.cache
def network(depth: int, precision: str) -> FastDenseNet:
    """One for all cases: where its weights go is worked out once."""
    return FastDenseNet(depth, precision=precision)


class Case:
    """R runs with synthetic inputs: S masks on B images each, or without a search one open mask on S * B images."""

    def __init__(self, given: argparse.Namespace, runs: int, samples: int, images: int, open_: float) -> None:
        self.device, rng = torch.device(given.device), torch.Generator().manual_seed(0)
        self.shape = {"depth": given.depth, "growth": 12}
        shapes = network(given.depth, "bf16").shapes
        self.params = {name: self._start(name, (runs, *shape), rng) for name, shape in shapes.items()}
        masks = (torch.rand(runs, samples, network(given.depth, "bf16").d, generator=rng) < open_).float()
        self.masks = masks.to(self.device)
        self.x = torch.randn(runs, images, 3, 32, 32, generator=rng).to(self.device)
        self.y = torch.randint(0, 10, (runs, images), generator=rng).to(self.device)

    def _start(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Not quite as a network starts, so that every parameter matters."""
        fan = torch.Size(shape[2:]).numel() if len(shape) > 2 else 100
        value = torch.randn(shape, generator=rng) * (2 / fan) ** 0.5
        return (value + 1 if name.endswith("norm.weight") else value).to(self.device)

    def fast(self, precision: str, tuning: Any = None) -> FastDenseNet:
        fast = network(self.shape["depth"], precision)
        fast._rooms.clear()
        if tuning is not None:
            runs, samples, _ = self.masks.shape
            rooms, _ = fast._room(runs, samples, self.x.shape[1], 32, self.x.device)
            fast._rooms[next(iter(fast._rooms))] = rooms, operations(precision, tuning)
        return fast

    def apart(self) -> tuple[Tensor, Tensor]:
        """Images and classes, those of the one mask of each run."""
        return self.x.unsqueeze(1), self.y.unsqueeze(1)

    def slopes(self) -> Tensor:
        """By the gates, of the readable network."""
        differential = Differential(template(self.shape["depth"], self.device).call, cross_entropy)
        sized = differential(self.params, {}, self.masks, *self.apart(), each=False, slopes=True)[2]
        assert sized is not None
        return sized[0]

    def readable(self, dtype: torch.dtype | None = None) -> Callable[[], tuple[dict[str, Tensor], Tensor]]:
        differential = Differential(template(self.shape["depth"], self.device).call, cross_entropy, dtype)

        def gradients() -> tuple[dict[str, Tensor], Tensor]:
            grads, (losses, _), _ = differential(self.params, {}, self.masks, self.x, self.y, each=False)
            return grads, losses

        return gradients


def updates(params: dict[str, Tensor], gradients: Callable[[], dict[str, Tensor]]) -> Callable[[], None]:
    """A whole update, weights included (which stay small: the learning rate is)."""
    optimizer = SGD(lr=1e-6)
    values = list(params.values())
    slots = [[torch.zeros_like(p) for p in values]]
    pace = optimizer.pace(torch.full((len(values[0]),), 1e-6, device=values[0].device), torch.zeros(()))

    def update() -> None:
        grads = gradients()
        optimizer.move(values, [grads[name] for name in params], slots, pace, None)

    return update


def fast_update(case: Case, precision: str, tuning: Any = None, sloped: bool = False) -> Callable[[], None]:
    fast = case.fast(precision, tuning)
    packed = fast.pack(case.params)
    if sloped:
        return updates(packed, lambda: fast(packed, {}, case.masks, *case.apart(), slopes=True)[0])
    return updates(packed, lambda: fast(packed, {}, case.masks, case.x, case.y)[0])


def captured(work: Callable[[], Any], times: int = 4) -> Callable[[], None]:
    """The same as a CUDA graph of several."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph.replay


def microseconds(work: Callable[[], Any], device: torch.device, seconds: float = 0.25) -> float:
    """Of one call, the least of several rounds."""
    work()
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin, least = time.perf_counter(), float("inf")
    while time.perf_counter() - begin < seconds:
        start.record()
        work()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) * 1e3)
    return least


def measured(work: Callable[[], Any], device: torch.device, times: int = 4) -> dict[str, float]:
    if device.type != "cuda":
        return {"us_per_update": microseconds(work, device)}
    torch.cuda.reset_peak_memory_stats(device)
    ready = captured(work, times)
    took = microseconds(ready, device) / times
    return {"us_per_update": took, "peak_memory_MB": torch.cuda.max_memory_allocated(device) / 2**20}


def worst(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference within a parameter over its largest gradient, and the one over all parameters together."""
    each = [float((mine[k] - g).abs().max() / g.abs().max().clamp(min=1e-12)) for k, g in theirs.items()]
    a, b = (torch.cat([t[k].flatten() for k in theirs]) for t in (mine, theirs))
    return {
        "worst_parameter": max(each),
        "median_parameter": sorted(each)[len(each) // 2],
        "norm_of_difference": float((a - b).norm() / b.norm()),
    }
