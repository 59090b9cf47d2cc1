"""Compile the kernels of the DenseNet step for an H200, where there need not be one. Prints one JSON object.

    PYTHONPATH=src python benchmarks/densenet_compile.py            # as they are used
    PYTHONPATH=src python benchmarks/densenet_compile.py --grid     # and all ways to cut them up that are worth a try

Needs Triton. Says for each kernel how many registers and how much shared memory it takes, what it spills and how many
instructions a warp has in its inner loop (for tile x many pixels and chunks of all its warps). Fails where one does
not compile or does not fit. What was compiled stays in Triton's cache, and a process with a GPU then starts at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.models.densenet_fast import FastDenseNet

SHARED = 227 * 1024  # bytes that one program of an H200 may have
# Ways to cut up the kernels: tile, many, warps, stages, splits of weights, rows of a layer's strip.
GRID = {
    "layer": "64 1 4 5 0 2, 64 1 4 5 0 4, 128 1 4 5 0 2, 128 1 8 5 0 2, 64 1 4 2 0 2",
    "source": "64 1 2 2, 64 1 2 1, 64 1 2 3, 128 1 4 2, 32 1 2 3",
    "input": (
        "64 2 4 1, 128 4 8 1, 64 1 2 2, 64 2 4 3, 32 4 4 3, 64 2 4 2, 64 2 2 1, 64 2 2 2, 64 1 2 1, 128 2 8 1, "
        "128 2 4 1, 64 4 4 1"
    ),
    "weights": (
        "64 4 4 1 8, 64 4 4 1 32, 64 4 4 1 64, 64 4 4 1 128, 32 4 4 1 32, 32 4 4 1 64, 64 8 8 1 32, 64 8 8 1 64"
    ),
}
ALL = ("layer", "source", "input", "weights", "finish", "pool")  # what takes time
# The kernels of an update as usual, in parts that take about the same time to compile.
PARTS = (("layer",), ("source",), ("weights",), ("begin", "enter", "pool", "finish", "settle"))


class Job(NamedTuple):
    depth: int
    precision: str
    look: bool  # at registers and instructions
    part: tuple[str, ...] = ()  # as usual
    name: str = ""  # or one kernel in one way
    way: Any = None


def ways(name: str) -> list[Any]:
    from espalier.models.densenet_fast.launch import Tuning

    return [Tuning(*map(int, way.split())) for way in GRID[name].split(", ")]


def operations(precision: str, chosen: Callable[[str, int], Any]) -> Any:
    """What does the work, cut up as chosen, and as usual where nothing is."""
    from espalier.models.densenet_fast import launch

    usual = launch.tuned if precision == "bf16" else launch.careful

    def tuning(operation: str, size: int) -> Any:
        return chosen(operation, size) or usual(operation, size)

    return launch.TritonOperations("tf32" if precision == "tf32" else "ieee", tuning)


class NoGPU:
    """Stands in for the driver of an H200 where kernels are compiled and not run."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


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


def applies(name: str, way: Any, room: Any) -> bool:
    """Whether a kernel is cut up in this way for a block if it is chosen."""
    if name == "input":
        return bool(room.block.first > 1)  # an input of one chunk is cut up as any source is
    return name != "layer" or way.tile % room.block.size == 0


def compile_one(job: Job) -> dict[str, Any]:
    """A part of the kernels as usual, or one in one way. The process is of no other use afterwards."""
    rows: dict[str, Any] = {}
    wanted = job.part
    try:
        import triton
        from triton.runtime.jit import JITFunction

        triton.runtime.driver.set_active(NoGPU())
        run = JITFunction.run

        def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            if self.__name__ not in wanted:
                return
            kernel = run(self, *args, grid=grid, warmup=True, **options)
            tile = [a for a, p in zip(args, self.params) if p.is_constexpr]
            name = f"{job.precision} {self.__name__} {tile} {options}"
            if name not in rows:
                rows[name] = resources(kernel) if job.look else {"shared_bytes": kernel.metadata.shared}

        JITFunction.run = compiled
        fast = FastDenseNet(job.depth, precision=job.precision)
        rooms, _ = fast._room(1, 2, 4, 32, torch.device("cpu"))
        do = operations(job.precision, lambda operation, _: job.way if operation == job.name else None)
        fast._rooms[next(iter(fast._rooms))] = rooms, do
        params = {"flat": torch.zeros(1, fast.size)}
        masks, x, y = torch.ones(1, 2, fast.d), torch.zeros(1, 4, 3, 32, 32), torch.zeros(1, 4).long()
        fast(params, {}, masks, x, y)
        if not job.name:
            fast(params, {}, masks, x.expand(2, -1, -1, -1, -1)[None], y.expand(2, -1)[None], slopes=True)
        wanted = ("source" if job.name == "input" else job.name,)
        for room in rooms:
            if job.name and applies(job.name, job.way, room):
                launch(job.name, do, room)
    except Exception:
        rows["failed"] = traceback.format_exc()[-600:]
    return rows


def resources(kernel: Any) -> dict[str, int]:
    import triton

    tools = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=False).stdout
            for command in ((tools / "cuobjdump", "-res-usage"), (tools / "nvdisasm", "-c"))
        )
    taken = re.search(r"REG:(\d+) STACK:(\d+)", used)
    registers, stack = map(int, taken.groups()) if taken else (-1, -1)
    found = {"registers": registers, "spilt_bytes": stack, "shared_bytes": kernel.metadata.shared}
    return found | {"instructions_in_loop": loop(code)}


def loop(code: str) -> int:
    """Instructions of the shortest loop with a matrix product in it, 0 where there is none."""
    seen: list[str] = []
    labels: dict[str, int] = {}
    lengths = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(seen)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            seen.append(instruction[1])
            back = re.search(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if back and back[1] in labels and any("MMA" in one for one in seen[labels[back[1]] :]):
                lengths.append(len(seen) - labels[back[1]])
    return min(lengths, default=0)


def compile_all(depth: int, precisions: list[str], grid: Iterable[str], look: bool, seconds: float) -> dict[str, Any]:
    """In processes of their own, side by side, before this one touches a GPU: in turn it would take minutes.

    grid: kernels that are compiled in all ways worth a try.
    """
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    jobs = [Job(depth, p, look, part) for p in precisions for part in PARTS]
    for name in grid:
        jobs += [Job(depth, "bf16", look, (), name, way) for way in (ways(name) if name in GRID else ())]
    # One job for each process: compiling is set up in it once and for all.
    processes = min(len(jobs), (os.cpu_count() or 1) + 1)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        rows = pool.map_async(compile_one, jobs, chunksize=1).get(timeout=seconds)
    kernels = {name: used for part in rows for name, used in part.items() if name != "failed"}
    too_large = [name for name, used in kernels.items() if used["shared_bytes"] > SHARED]
    return {"failed": [part["failed"] for part in rows if "failed" in part], "too_large": too_large, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--depth", type=int, default=40)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "tf32", "float32"])
    parser.add_argument(
        "--look", action=argparse.BooleanOptionalAction, default=True, help="at registers, spills and instructions"
    )
    given = parser.parse_args()
    found = compile_all(given.depth, given.precisions, GRID if given.grid else (), given.look, 3600)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["failed"] or found["too_large"] else 0)


if __name__ == "__main__":
    main()
