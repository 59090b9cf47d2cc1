"""How long one update of the gated DenseNet-40 takes: the fast step against the readable one. Prints one JSON object.

    PYTHONPATH=src python benchmarks/densenet.py --device cuda --runs 1 4 8 --time-limit 80
    PYTHONPATH=src python benchmarks/densenet.py --device cpu --depth 7 --images 4     # does it run at all

An update is forward and backward for two masks on a mini-batch, and SGD; "sloped": for one mask on twice as many
images, with the slopes of all gates. Inputs are synthetic: time does not depend on
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

from densenet_case import Case, captured, fast_update, measured, microseconds, updates, worst
from densenet_compile import ALL

BEGAN = time.monotonic()
found: dict[str, Any] = {}


# ---- the measurements ------------------------------------------------------------------------------------------------


def agreement(given: argparse.Namespace, precision: str, runs: int = 2) -> dict[str, Any]:
    case = Case(given, runs, 2, given.images, 0.6)
    theirs, losses = case.readable()()
    fast = case.fast(precision)
    mine, (fast_losses, _), _ = fast(case.params, {}, case.masks, case.x, case.y)
    row = {"losses": float(((fast_losses - losses) / losses).abs().max()), **worst(mine, theirs)}
    if precision == "bf16":
        theirs_too, losses_too = case.readable(torch.bfloat16)()
        row["readable_in_bf16"] = {
            "losses": float(((losses_too - losses) / losses).abs().max()), **worst(theirs_too, theirs)
        }  # fmt: skip
    one = Case(given, runs, 1, given.images, 0.6)
    slopes, (ours, _) = one.slopes(), one.fast(precision)(one.params, {}, one.masks, *one.apart(), slopes=True)[2]
    row["slopes"] = float((ours - slopes).norm() / slopes.norm())
    return row


def steps(given: argparse.Namespace, runs: int, precision: str, tuning: Any = None) -> dict[str, Any]:
    device, row = torch.device(given.device), {}
    for name, samples, images, open_ in (
        ("gated_all_open", 2, given.images, 1.1),
        ("plain", 1, 2 * given.images, 1.1),
        ("gated_half_open", 2, given.images, 0.5),
        ("gated_fifth_open", 2, given.images, 0.2),
        ("sloped_all_open", 1, 2 * given.images, 1.1),
        ("sloped_half_open", 1, 2 * given.images, 0.5),
    ):
        case = Case(given, runs, samples, images, open_)
        row[name] = measured(fast_update(case, precision, tuning, name.startswith("sloped")), device)
        row[name]["us_per_run_update"] = row[name]["us_per_update"] / runs
        torch.cuda.empty_cache()
    for kind in ("gated", "sloped"):
        row[f"{kind}_over_plain"] = row[f"{kind}_all_open"]["us_per_update"] / row["plain"]["us_per_update"]
    return row


def operations(given: argparse.Namespace, runs: int) -> dict[str, Any]:
    """Each kernel alone, all its launches for one block, for each way to cut it up."""
    from densenet_compile import launch
    from densenet_compile import operations as cut

    case = Case(given, runs, 2, given.images, 1.1)
    fast = case.fast("bf16")
    fast(fast.pack(case.params), {}, case.masks, case.x, case.y)
    rooms, _ = next(iter(fast._rooms.values()))
    table: dict[str, Any] = {}
    for name in given.kernels:
        for room in rooms:
            size = room.block.size
            for tuning in choices(given, name, room):
                if over(given):
                    return table
                do = cut("bf16", lambda operation, _, t=tuning, n=name: t if operation == n else None)
                try:
                    work = captured(functools.partial(launch, name, do, room), 2)
                    took: Any = round(microseconds(work, case.device, 0.01) / 2, 1)
                except Exception as error:
                    took = repr(error)[:100]
                way = " ".join(map(str, astuple(tuning))) if tuning else "as usual"
                table.setdefault(f"{name} {size}x{size}", {})[way] = took
    return table


def choices(given: argparse.Namespace, name: str, room: Any) -> list[Any]:
    """The ways to cut up a kernel for a block, the usual one first; None where there is no choice."""
    from densenet_compile import GRID, applies, ways
    from densenet_compile import operations as cut

    usual = cut("bf16", nothing).tuning(name, room.block.size) if name in GRID else None
    if usual is None or not applies(name, usual, room):
        return [None]
    further = [way for way in ways(name) if applies(name, way, room)] if given.grid else []
    return list(dict.fromkeys([usual, *further]))


def profile(given: argparse.Namespace, runs: int, tuning: Any = None) -> list[str]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    case = Case(given, runs, 2, given.images, 1.1)
    replay = captured(fast_update(case, "bf16", tuning), 1)
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

    grid = given.kernels if given.grid else ()
    made = compile_all(given.depth, given.precisions, grid, False, given.time_limit / 2)
    return {"failed": made["failed"], "too_large": made["too_large"], "kernels": len(made["kernels"])}


def kernels(names: str) -> list[str]:
    found = names.split(",")
    if unknown := sorted(set(found) - set(ALL)):
        raise argparse.ArgumentTypeError(f"no kernel is called {', '.join(unknown)}; there are {', '.join(ALL)}")
    return found


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
    parser.add_argument(
        "--kernels", type=kernels, default=ALL, help=f"those to measure alone, of {','.join(ALL)} (all of them)"
    )
    parser.add_argument("--precisions", nargs="+", default=["float32", "tf32", "bf16"])
    parser.add_argument("--compiled", action="store_true", help="also the readable step under torch.compile: minutes")
    parser.add_argument("--once", action="store_true", help="one gradient and no more, for a profiler to look at")
    given = parser.parse_args()
    if given.once:
        case = Case(given, given.runs[0], 2, given.images, 1.1)
        fast_update(case, "bf16")()
        return
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


def choose(given: argparse.Namespace) -> None:
    """Every way to cut up every kernel, and the update with the fastest ones."""
    attempt(given, "agreement bf16", lambda: agreement(given, "bf16"))
    for runs in given.runs:
        attempt(given, f"fast bf16, {runs} runs", lambda n=runs: steps(given, n, "bf16"))
        attempt(given, f"operations, {runs} runs", lambda n=runs: operations(given, n))
        fastest = best(found[f"operations, {runs} runs"])
        found[f"fastest, {runs} runs"] = {" ".join(map(str, at)): list(astuple(way)) for at, way in fastest.items()}
        chosen = functools.partial(lambda fastest, *at: fastest.get(at), fastest)
        attempt(given, f"fast bf16, {runs} runs, fastest", lambda n=runs, t=chosen: steps(given, n, "bf16", t))
        if runs == given.runs[0]:
            attempt(given, f"profile of fast bf16, {runs} runs", lambda n=runs, t=chosen: profile(given, n, t))


def nothing(operation: str, size: int) -> None:
    """Everything as usual."""


def best(table: Any) -> dict[tuple[str, int], Any]:
    """The fastest way for each kernel and size of image."""
    from espalier.models.densenet_fast.launch import Tuning

    fastest = {}
    for at, row in table.items() if isinstance(table, dict) else ():
        name, size = at.split()
        took = {way: us for way, us in row.items() if isinstance(us, float) and way != "as usual"}
        if took:
            fastest[name, int(size.split("x")[0])] = Tuning(*map(int, min(took, key=took.__getitem__).split()))
    return fastest


def measure(given: argparse.Namespace, on_cuda: bool) -> None:
    first = given.runs[0]
    if on_cuda and given.grid:
        return choose(given)
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
