"""One ask and tell of the search against its floor and against the update written plainly. Prints one JSON object.

The floor: the fewest bytes (ask reads theta and writes the masks; tell reads the masks, reads and writes theta) at the
machine's measured copy bandwidth, plus torch.rand of as many numbers as there are mask entries.

    python benchmarks/search.py [--sizes 1000 100000 10000000] [--runs 1 32] [--device cpu|cuda] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

import espalier


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of one call, after one warm-up; on a GPU by events around a captured graph's replay."""
    work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def captured(work: Callable[[], object], generator: torch.Generator | None) -> Callable[[], object]:
    """The same work as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.rand(1 << 26 if device.type == "cuda" else 1 << 24, dtype=torch.float64, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, 9)


def plain_update(theta: Tensor, losses: Tensor, d: int) -> None:
    """The paper's update for two masks as one would write it at first, in place; for comparison."""
    masks = (torch.rand((*theta.shape[:-1], 2, d), device=theta.device) < theta.unsqueeze(-2)).float()
    first = (losses[..., 0] < losses[..., 1]).to(torch.float64) * 2 - 1
    u = torch.stack([first, -first], -1).unsqueeze(-1)
    step = (u * (masks - theta.unsqueeze(-2))).mean(-2) - 0.01 * theta * (1 - theta)
    theta.copy_((theta + step / d).clamp(1 / d, 1 - 1 / d))


def measure(d: int, runs: int, device: torch.device, bandwidth: float, repeats: int) -> dict[str, float | None]:
    batch = () if runs == 1 else (runs,)
    samples = 2
    search = espalier.Search(d, penalty=2**-6, batch=batch, samples=samples, device=device)
    if device.type == "cuda":
        search.compile()
    losses = torch.rand((*batch, samples), device=device)
    compare = runs * d <= 100_000_000  # beyond, the plain update's temporaries would need tens of gigabytes
    theta = torch.full((*batch, d) if compare else (1,), 0.5, dtype=torch.float64, device=device)

    def ours() -> None:
        search.tell(search.ask(), losses)

    def alternative() -> None:
        plain_update(theta, losses, d)

    def draw() -> Tensor:
        return torch.rand((*batch, samples, d), device=device)

    if device.type == "cuda":
        seconds = median_seconds(captured(ours, search.generator), device, repeats)
        plain = median_seconds(captured(alternative, None), device, repeats) if compare else None
        rand = median_seconds(captured(draw, None), device, repeats)
    else:
        seconds, rand = (median_seconds(work, device, repeats) for work in (ours, draw))
        plain = median_seconds(alternative, device, repeats) if compare else None
    moved = runs * d * (8 + 4 * samples + 4 * samples + 16)
    floor = moved / bandwidth + rand
    return {
        "d": d,
        "runs": runs,
        "seconds": seconds,
        "floor_seconds": floor,
        "rand_seconds": rand,
        "ratio_to_floor": seconds / floor,
        "plain_seconds": plain,
        "plain_over_ours": plain / seconds if plain else None,
        "achieved_GB_per_s": moved / seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 100_000, 10_000_000])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device)
    rows = [measure(d, runs, device, bandwidth, args.repeats) for d in args.sizes for runs in args.runs]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(
        json.dumps(
            {
                "benchmark": "search: one ask and tell",
                "device": name,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "copy_GB_per_s": bandwidth / 1e9,
                "repeats": args.repeats,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
