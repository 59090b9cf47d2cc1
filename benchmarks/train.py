"""How long one update takes: many runs at once against one at a time, gated against plain. Prints one JSON object.

    PYTHONPATH=src python benchmarks/train.py                      # what this machine has
    PYTHONPATH=src python benchmarks/train.py --device cuda --runs 1 8 35 --precision tf32

Data are synthetic (uint8 pixels, random classes): time does not depend on what they show.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import espalier
from espalier.data import from_arrays
from espalier.train.batched.batch import Batch, Compute
from espalier.train.batched.batch_engine import build, stacked
from espalier.train.batched.chain import chain_of
from espalier.train.batched.inputs import Given, Searched
from espalier.train.batched.runs import Run
from espalier.train.batched.step import cross_entropy
from espalier.train.descent import SGD, Steps
from espalier.train.settled import of_one_shape

PAPER = (784, 784, 784, 784, 10)
DIGITS = (64, 64, 64, 64, 10)
SIZE, SAMPLES = 32, 2
PASSES = 6  # over the weights: forward, backward, weight and momentum read and written; no gradient is written


def network(widths: tuple[int, ...]) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def examples(widths: tuple[int, ...], device: torch.device, count: int = 4096) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, widths[0]), dtype=torch.uint8, generator=rng)
    return x.to(device), torch.randint(0, widths[-1], (count,), generator=rng).to(device)


def batch(
    widths: tuple[int, ...],
    runs: int,
    device: torch.device,
    compute: Compute,
    samples: int = SAMPLES,
    kind: str = "search",
    by_hand: bool = True,
    signal: str = "ranked",
) -> Batch:
    """R runs: "search"; "gated", under a given mask with as many examples; "plain", the same without gates.

    by_hand: on a GPU the gradient of this network is written out and applied in one kernel; else derived by torch.
    signal: what the search learns from.
    """
    template, params, fixed = stacked(
        lambda: network(widths), [Run(seed) for seed in range(runs)], torch.rand(4, widths[0]), device
    )
    call: Callable[..., Tensor] = template.call
    gates, first = [where for _, where in template.space.bits], {name: p[0] for name, p in params.items()}
    chain = chain_of(template.model, gates, template.call, first, torch.rand(4, widths[0], device=device))
    search = espalier.Search(
        template.space, penalty=[2.0**-7] * runs, batch=(runs,), samples=samples, signal=signal, device=device
    )
    source: Any = Searched(search)
    if kind != "search":
        source = Given(torch.ones(runs, template.space.d, device=device), torch.zeros(runs, device=device))
    if kind == "plain":
        module = network(widths).to(device)

        def call(tensors: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
            return functional_call(module, tensors, (x,))

    return Batch(
        call,
        params,
        fixed,
        data=from_arrays(examples(widths, device), examples(widths, device, 16), scale=1 / 255),
        seeds=list(range(runs)),
        source=source,
        loss=cross_entropy,
        optimizer=SGD(),
        schedule=Steps(),
        total=1_000_000,
        batch_size=SIZE,
        samples=samples,
        compute=compute,
        chain=chain if by_hand and kind != "plain" else None,
    )


def single(widths: tuple[int, ...]) -> Callable[[int], None]:
    """One run, one mask at a time, by torch.optim: what a user writes first. Returns what does so many updates."""
    gated = build(lambda: network(widths), Run(0), torch.rand(4, widths[0]))
    model: nn.Module = gated.model
    search = espalier.Search(gated.space, penalty=2.0**-7, samples=SAMPLES)
    inner = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    x, y = examples(widths, torch.device("cpu"))
    order = torch.randperm(len(x))

    def updates(count: int) -> None:
        for update in range(count):
            where = order[update * SIZE % (len(x) - SIZE) :][:SIZE]
            inputs, targets = x[where].float() / 255, y[where]
            masks, losses = search.ask(), []
            inner.zero_grad()
            for mask in masks:
                with gated.masked(mask):  # type: ignore[attr-defined]
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    (loss / SAMPLES).backward()
                losses.append(loss.detach())
            inner.step()
            search.tell(masks, torch.stack(losses))

    return updates


def settled(widths: tuple[int, ...], runs: int, compute: Compute) -> tuple[dict[str, Callable[[int], None]], float]:
    """Settled runs, each with about a fifth of the units of every layer: under their masks, and as smaller networks of
    one shape. And the share of the weights that the largest run keeps."""
    gated: Any = build(lambda: network(widths), Run(0), torch.rand(4, widths[0]))
    masks = torch.rand(runs, gated.d, generator=torch.Generator().manual_seed(1)) < 0.2
    both = [batch(widths, runs, torch.device("cpu"), compute, kind="gated") for _ in range(2)]
    for one in both:
        one.settle(masks.float())
    smaller = of_one_shape(gated, masks.float(), both[1].state.params)
    assert smaller is not None
    both[1].cut(smaller)
    cost = gated.cost("weights")
    share = cost(gated.canonical(masks.float())).max() / cost(torch.ones(gated.d))
    return {"masked": both[0].advance, "smaller": both[1].advance}, float(share)


def seconds(updates: Callable[[int], None], count: int, device: torch.device) -> float:
    """For one update: CUDA events on a GPU, the clock on a CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        updates(count)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count
    begin = time.perf_counter()
    updates(count)
    return (time.perf_counter() - begin) / count


def fastest(
    candidates: dict[str, Callable[[int], None]], count: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """The least seconds per update of each, measured in turns, so that all meet the same disturbances."""
    for updates in candidates.values():
        updates(min(count, 5))
    found = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, updates in candidates.items():
            found[name] = min(found[name], seconds(updates, count, device))
    return found


def on_gpu(
    runs: list[int], derived: list[int], updates: int, device: torch.device, compute: Compute
) -> list[dict[str, Any]]:
    """The paper's unit selection, for each number of runs, and with slopes; and for some with the gradient derived."""
    rows = []
    weights = sum(a * b for a, b in pairwise(PAPER))
    by_hands = [(count, True, signal) for count in runs for signal in ("ranked", "slopes")]
    for count, by_hand, signal in [*by_hands, *((count, False, "ranked") for count in derived)]:
        torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        engine = batch(PAPER, count, device, compute, by_hand=by_hand, signal=signal)
        engine.advance(2 * compute.updates_at_once + 10)  # compiles, records, and fills the caches
        torch.cuda.synchronize(device)
        ready = time.perf_counter() - begin
        took = min(seconds(engine.advance, updates, device) for _ in range(5))
        passes = PASSES if by_hand else PASSES + 2  # the gradient written and read
        rows.append(
            {
                "runs": count,
                "gradient": "by hand" if by_hand else "derived",
                "signal": signal,
                "us_per_update": took * 1e6,
                "us_per_run_update": took * 1e6 / count,
                "passes_over_the_weights": passes,
                "achieved_TB_per_s": passes * 4 * weights * count / took / 1e12,
                "seconds_to_compile_and_record": ready,
                "peak_memory_MB": torch.cuda.max_memory_allocated(device) / 2**20,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
        del engine
        torch.cuda.empty_cache()
    return rows


def memory(device: torch.device, samples: int = 8) -> dict[str, Any]:
    """Peak memory of one gradient: all masks of an update at once, or one at a time and added up."""
    engine = batch(PAPER, 1, device, Compute(compile=False, capture=False), samples=samples)
    x, y = engine.feed.batch(engine.feed.take(1, SIZE).at(0))
    masks = engine.source.masks(engine.source.noise(SIZE))

    def at_once() -> None:
        engine.differential(engine.state.params, {}, masks, x, y, each=False)

    def in_turn() -> None:
        total: dict[str, Tensor] = {}
        for i in range(samples):
            grads, _, _ = engine.differential(engine.state.params, {}, masks[:, i : i + 1], x, y, each=False)
            total = {k: g + total[k] if k in total else g for k, g in grads.items()}

    found = {"masks": samples, "at_once_MB": peak(at_once, device), "one_at_a_time_MB": peak(in_turn, device)}
    return found | {"ratio": found["at_once_MB"] / found["one_at_a_time_MB"]}


def peak(work: Callable[[], None], device: torch.device) -> float:
    """Most memory that the tensors made inside hold at one time, in MB."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        work()
    held = most = 0
    for event in sorted(traced.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


def on_cpu(updates: int, compute: Compute) -> dict[str, Any]:
    device = torch.device("cpu")
    found: dict[str, Any] = {}
    for name, widths, count in (("digits", DIGITS, updates), ("paper", PAPER, max(updates // 25, 2))):
        eight = batch(widths, 8, device, compute)
        took = fastest({"eight": eight.advance, "single": single(widths)}, count, 5, device)
        ones = {kind: batch(widths, 1, device, compute, kind=kind).advance for kind in ("search", "gated", "plain")}
        took |= fastest(ones, count, 5, device)
        two, share = settled(widths, 8, compute)
        took |= fastest(two, count, 5, device)
        found[name] = {
            "network": "-".join(map(str, widths)),
            "us_batched_update_of_8_runs": took["eight"] * 1e6,
            "us_single_eager_update": took["single"] * 1e6,
            "batched_over_8_single": took["eight"] / (8 * took["single"]),
            "gated_over_plain_step": took["gated"] / took["plain"],
            "search_over_plain_step": took["search"] / took["plain"],
            "settled_8_runs_smaller_over_masked": took["smaller"] / took["masked"],
            "weights_that_the_largest_of_them_keeps": share,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8, 35], help="numbers of runs at once, on a GPU")
    parser.add_argument("--derived", type=int, nargs="*", default=[35], help="the same with the gradient by autograd")
    parser.add_argument("--updates", type=int, default=None, help="updates in one measurement")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--capture", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--autotune", action="store_true")
    parser.add_argument("--option", action="append", default=[], help="of torch's inductor, NAME=JSON; may be repeated")
    parser.add_argument("--at-once", type=int, default=50, help="updates in one CUDA graph")
    parser.add_argument("--cpu-too", action="store_true", help="measure the CPU beside a GPU")
    given = parser.parse_args()
    device = torch.device(given.device)
    on_cuda = device.type == "cuda"
    compute = Compute(
        precision=given.precision or ("tf32" if on_cuda else "float32"),
        compile=given.compile,
        capture=given.capture,
        autotune=given.autotune,
        options={name: json.loads(value) for name, _, value in (text.partition("=") for text in given.option)},
        updates_at_once=given.at_once,
    )
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "precision": compute.precision,
        "options": dict(compute.options) | {"autotune": compute.autotune},
        "batch": SIZE,
        "masks": SAMPLES,
    }
    if on_cuda:
        found["gpu"] = torch.cuda.get_device_name(device)
        found["unit_selection"] = on_gpu(given.runs, given.derived, given.updates or 1000, device, compute)
    found["memory"] = memory(device)
    if not on_cuda or given.cpu_too:
        found["cpu"] = on_cpu(given.updates or 100, Compute(compile=given.compile if not on_cuda else None))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
