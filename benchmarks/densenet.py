"""How long one update of the gated DenseNet-40 takes: the fast step against the readable one. Prints one JSON object.

    PYTHONPATH=src python benchmarks/densenet.py --device cuda --runs 1 4 8 --time-limit 80
    PYTHONPATH=src python benchmarks/densenet.py --device cpu --depth 7 --images 4     # does it run at all

An update is forward and backward for two masks on a mini-batch, and SGD. Inputs are synthetic: time does not depend on
what they show. Measurements come in the order of their importance; what does not fit into the time limit is left out,
and what fails says why in its place.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

import espalier
from espalier.models import DenseNet
from espalier.models.densenet_fast import FastDenseNet
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.optimizers import SGD
from espalier.train.batched.stack import strip
from espalier.train.batched.step import Differential

BEGAN = time.monotonic()
found: dict[str, Any] = {}


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
            from espalier.models.densenet_triton import TritonOperations

            runs, samples, _ = self.masks.shape
            rooms, _ = fast._room(runs, samples, self.x.shape[1], 32, self.device)
            fast._rooms[next(iter(fast._rooms))] = rooms, TritonOperations(tuning=tuning)
        return fast

    def readable(self, dtype: torch.dtype | None = None) -> Callable[[], tuple[dict[str, Tensor], Tensor]]:
        differential = Differential(template(self.shape["depth"], self.device).call, cross_entropy, dtype)

        def gradients() -> tuple[dict[str, Tensor], Tensor]:
            grads, (losses, _) = differential(self.params, {}, self.masks, self.x, self.y, each=False)
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


def fast_update(case: Case, precision: str, tuning: Any = None) -> Callable[[], None]:
    fast = case.fast(precision, tuning)
    packed = fast.pack(case.params)
    return updates(packed, lambda: fast.gradients(packed, case.masks, case.x, case.y)[0])


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


# ---- the measurements ------------------------------------------------------------------------------------------------


def agreement(given: argparse.Namespace, precision: str, runs: int = 2) -> dict[str, Any]:
    case = Case(given, runs, 2, given.images, 0.6)
    theirs, losses = case.readable()()
    fast = case.fast(precision)
    mine, fast_losses, _ = fast.gradients(case.params, case.masks, case.x, case.y)
    row = {"losses": float(((fast_losses - losses) / losses).abs().max()), **worst(mine, theirs)}
    if precision == "bf16":
        theirs_too, losses_too = case.readable(torch.bfloat16)()
        row["readable_in_bf16"] = {
            "losses": float(((losses_too - losses) / losses).abs().max()), **worst(theirs_too, theirs)
        }  # fmt: skip
    return row


def steps(given: argparse.Namespace, runs: int, precision: str, tuning: Any = None) -> dict[str, Any]:
    device, row = torch.device(given.device), {}
    for name, samples, images, open_ in (
        ("gated_all_open", 2, given.images, 1.1),
        ("plain", 1, 2 * given.images, 1.1),
        ("gated_half_open", 2, given.images, 0.5),
        ("gated_fifth_open", 2, given.images, 0.2),
    ):
        case = Case(given, runs, samples, images, open_)
        row[name] = measured(fast_update(case, precision, tuning), device)
        row[name]["us_per_run_update"] = row[name]["us_per_update"] / runs
        torch.cuda.empty_cache()
    row["gated_over_plain"] = row["gated_all_open"]["us_per_update"] / row["plain"]["us_per_update"]
    return row


def operations(given: argparse.Namespace, runs: int) -> dict[str, Any]:
    """Each kernel alone, all its launches for one block, for each way to cut it up."""
    from densenet_compile import GRID, ways
    from espalier.models.densenet_triton import TritonOperations, tuned

    case = Case(given, runs, 2, given.images, 1.1)
    fast = case.fast("bf16")
    fast.gradients(fast.pack(case.params), case.masks, case.x, case.y)
    rooms, _ = next(iter(fast._rooms.values()))
    table: dict[str, Any] = {}
    for name in ("layer", "source", "input", "weights", "finish", "pool"):
        for room in rooms:
            size = room.block.size
            usual = tuned(name if name in GRID else "plain", size)
            for tuning in [usual, *(ways(name) if given.grid and name in GRID else ())]:
                if over(given):
                    return table
                if tuning.tile % size and name == "layer":
                    continue
                do = TritonOperations(tuning=lambda op, size, t=tuning, n=name: t if op == n else tuned(op, size))
                try:
                    work = captured(functools.partial(launch, name, do, room), 2)
                    took: Any = round(microseconds(work, case.device, 0.02) / 2, 1)
                except Exception as error:
                    took = repr(error)[:100]
                table.setdefault(f"{name} {size}x{size}", {})[" ".join(map(str, astuple(tuning)))] = took
    return table


def launch(name: str, do: Any, room: Any) -> None:
    """All launches of one kernel for one block in one update."""
    layers, first = range(room.block.layers), room.block.first
    if name == "layer":
        for i in layers:
            do.layer(room, i)
    elif name == "source":
        for i in layers:
            do.source(room, first + i, first + i + 1)
    elif name == "input":
        do.source(room, 0, first)
    elif name == "weights":
        do.convolutions(room)
    elif name == "finish":
        for i in layers:
            do.finish(room, i)
        do.leave(room)
    else:
        do.pool(room)


def profile(given: argparse.Namespace, runs: int) -> list[str]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    case = Case(given, runs, 2, given.images, 1.1)
    replay = captured(fast_update(case, "bf16"), 1)
    replay()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(5):
            replay()
        torch.cuda.synchronize()
    rows = sorted(traced.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows) / 5
    shown = [f"{e.self_device_time_total / 5:9.1f} us {e.count / 5:6.0f} calls  {e.key[:90]}" for e in rows[:25]]
    return [f"{total:9.1f} us {sum(e.count for e in rows) / 5:6.0f} calls  all kernels", *shown]


def readable(
    given: argparse.Namespace, dtype: torch.dtype | None, tf32: bool, capture: bool, compile_: bool
) -> dict[str, Any]:
    case = Case(given, 1, 2, given.images, 1.1)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        gradients = case.readable(dtype)
        update = updates(case.params, lambda: dict(gradients()[0]))
        if compile_:
            update = torch.compile(update, fullgraph=True, dynamic=False)
        if capture:
            return measured(update, case.device)
        return {"us_per_update": microseconds(update, case.device)}
    finally:
        torch.backends.cudnn.allow_tf32 = before


def prepare(given: argparse.Namespace) -> dict[str, Any]:
    from densenet_compile import compile_all

    made = compile_all(given.depth, given.precisions, given.grid, False, given.time_limit / 2)
    return {"failed": made["failed"], "too_large": made["too_large"], "kernels": len(made["kernels"])}


def over(given: argparse.Namespace) -> bool:
    return time.monotonic() - BEGAN > given.time_limit


def attempt(given: argparse.Namespace, name: str, work: Callable[[], Any]) -> None:
    if over(given):
        found[name] = "left out: time limit"
        return
    begin = time.monotonic()
    try:
        found[name] = work()
    except Exception as error:
        found[name] = f"failed: {error!r}"[:600]
        traceback.print_exc()
    print(
        f"{time.monotonic() - BEGAN:6.1f} s  {name} ({time.monotonic() - begin:.1f} s): {json.dumps(found[name])}",
        file=sys.stderr,
        flush=True,
    )
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 8], help="numbers of runs at once")
    parser.add_argument("--time-limit", type=float, default=80, help="seconds")
    parser.add_argument("--depth", type=int, default=40)
    parser.add_argument("--images", type=int, default=32, help="of a mini-batch, read by two masks")
    parser.add_argument("--grid", action="store_true", help="try many ways to cut up the kernels")
    parser.add_argument("--precisions", nargs="+", default=["float32", "tf32", "bf16"])
    parser.add_argument("--compiled", action="store_true", help="also the readable step under torch.compile: minutes")
    given = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    on_cuda = given.device == "cuda"
    found["torch"], found["python"] = torch.__version__, platform.python_version()
    if on_cuda:
        attempt(given, "compile", lambda: prepare(given))
        import triton

        found["gpu"], found["triton"] = torch.cuda.get_device_name(), triton.__version__
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("time limit"))
        signal.alarm(int(given.time_limit + 15))
    found["command"] = " ".join(sys.argv)
    try:
        measure(given, on_cuda)
    finally:
        found["seconds"] = time.monotonic() - BEGAN
        print(json.dumps(found, indent=1), flush=True)


def measure(given: argparse.Namespace, on_cuda: bool) -> None:
    first = given.runs[0]
    for precision in given.precisions:
        attempt(given, f"agreement {precision}", lambda p=precision: agreement(given, p, 2 if on_cuda else 1))
    attempt(given, f"fast bf16, {first} run", lambda: steps(given, first, "bf16"))
    if not on_cuda:
        return
    attempt(given, f"profile of fast bf16, {first} run", lambda: profile(given, first))
    attempt(given, f"operations, {first} run", lambda: operations(given, first))
    for runs in given.runs[1:]:
        attempt(given, f"fast bf16, {runs} runs", lambda n=runs: steps(given, n, "bf16"))
    last = given.runs[-1]
    attempt(given, f"operations, {last} runs", lambda: operations(given, last))
    attempt(given, f"profile of fast bf16, {last} runs", lambda: profile(given, last))
    attempt(given, "readable tf32, eager", lambda: readable(given, None, True, False, False))
    attempt(given, "readable tf32, graph", lambda: readable(given, None, True, True, False))
    attempt(given, "readable bf16, graph", lambda: readable(given, torch.bfloat16, True, True, False))
    for precision in ("tf32", "float32"):
        attempt(given, f"fast {precision}, 1 run", lambda p=precision: steps(given, 1, p))
    if given.compiled:
        attempt(given, "readable tf32, compiled, graph", lambda: readable(given, None, True, True, True))
        attempt(given, "readable bf16, compiled, graph", lambda: readable(given, torch.bfloat16, True, True, True))


if __name__ == "__main__":
    main()
