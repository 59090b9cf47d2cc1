"""What fresh memory costs: whole networks in a process that returns what it frees, and in one that keeps it; torch.

    python benchmarks/memory.py [--networks vgg16 mobilenetv2] [--batch 64] > results/ship-memory.json

Every figure is of a new process: milliseconds of the thread's own time and page faults of one forward pass, medians.
The two kinds of process take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

import ship
from espalier.gates import latency


def one_process(name: str, batch: int, kept: bool, rounds: int) -> tuple[float, float]:
    """Milliseconds and page faults of a forward pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    factory, shape = ship.NETWORKS[name]
    model, x = factory().eval(), ship.inputs(shape, batch)
    times, faults = [], []
    with torch.no_grad(), latency.kept_memory() if kept else nullcontext():
        for _ in range(rounds + 3):
            before, began = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt, time.thread_time()
            model(x)
            times.append(1e3 * (time.thread_time() - began))
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return statistics.median(times[3:]), statistics.median(faults[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet20", "vgg16", "mobilenetv2"], choices=ship.NETWORKS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=3, help="of each kind")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in given.networks:
        runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(given.processes):
            for kept, own in runs.items():
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    own.append(pool.apply(one_process, (name, given.batch, kept, given.rounds)))
        row: dict[str, Any] = {"network": name, "batch": given.batch}
        for label, kept in (("returned", False), ("kept", True)):
            row[f"{label}_ms"], row[f"{label}_faults"] = (statistics.median(each) for each in zip(*runs[kept]))
        rows.append(row)
    print(json.dumps({**ship.machine("benchmarks/memory.py", "cpu"), "rounds": given.rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
