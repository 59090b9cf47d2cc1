"""One expectation, and one gradient, of a cost of widths, beside those of the multilinear cost. Prints one JSON object.

Neighbouring groups are multiplied, as the layers of a chain are: 15 products for 16 groups.

    python benchmarks/widths.py [--groups 16] [--width 512] [--runs 1 8] [--repeats 21]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from functools import partial

import torch

from espalier import Bits, Cost, Form, Space


def median_milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Of processor time, on one thread, of one call after one warm-up: other work on the machine does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return round(1e3 * sorted(times)[len(times) // 2], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=21)
    given = parser.parse_args()
    torch.set_num_threads(1)
    space = Space([Bits(f"layer {i}", given.width) for i in range(given.groups)])
    stairs, forms = [], []
    for a, b in itertools.pairwise(space.slices):
        stairs.append(Cost.of_widths(space, {a: lambda width: -(-width // 8), b: lambda width: -(-width // 32)}))
        runs = [Form.run(space.slices[name].start, space.slices[name].stop) for name in (a, b)]
        forms.append(Cost.product(runs, d=space.d))
    costs = {"widths": sum(stairs[1:], stairs[0]), "multilinear": sum(forms[1:], forms[0])}
    rows = []
    for runs, (name, cost) in itertools.product(given.runs, costs.items()):
        theta = torch.rand(runs, space.d, dtype=torch.float64)
        value = median_milliseconds(partial(cost, theta), given.repeats)
        gradient = median_milliseconds(partial(cost.gradient, theta), given.repeats)
        rows.append({"runs": runs, "cost": name, "expectation_ms": value, "gradient_ms": gradient})
    print(
        json.dumps(
            {
                "groups": given.groups,
                "width": given.width,
                "threads": 1,
                "processor": platform.machine(),
                "torch": torch.__version__,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
