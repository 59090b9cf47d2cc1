"""How well latency is predicted for networks that a search found against it: ten short runs, predicted and measured.

    python benchmarks/predictions.py --runtime onnxruntime --round-to auto [--network resnet20] [--batch 16]
    python benchmarks/predictions.py --network mobilenetv2 --batch 64 --shares 0.6 0.4
    python benchmarks/predictions.py --table docs/latency.md

Runs are of some updates on random data, at two shares of the latency, five seeds: the widths are what counts. Writes a
JSON file for each network, runtime and ``round_to``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import espalier
import ship
from espalier.files import write
from espalier.gates.latency import VARIABLE
from espalier.report.tables import put_between

MARKS = ("<!-- generated: predictions -->", "<!-- end of generated: predictions -->")


def found(given: argparse.Namespace, share: float, seed: int) -> tuple[dict[str, Any], Any]:
    factory, shape = ship.NETWORKS[given.network]
    torch.manual_seed(seed)
    x = ship.inputs(shape, 8 * given.updates, seed)
    y = x.float().flatten(1)[:, :10].argmax(1)
    blocks = None if given.round_to == "1" else given.round_to if given.round_to == "auto" else int(given.round_to)
    gated = ship.attached(given.network, factory(), **({} if blocks is None else {"round_to": blocks}))
    cost = gated.cost("latency", runtime=given.runtime, batch=given.batch)
    result = espalier.fit(
        gated, (x, y), cost=cost, target=share, epochs=1, batch_size=8, samples=1, seed=seed, quiet=True, device="cpu"
    )
    kept = next(iter(gated.latencies.values()))
    gated.detach()
    assert result.latency is not None
    return {"share": share, "seed": seed, **result.latency}, kept


def table(folder: Path) -> str:
    lines = [
        "| | residual, nine of ten | found networks within 10% | largest error | target met | corrections |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        errors = [abs(row["predicted"] / row["compared"] - 1) for row in told["rows"]]
        met = sum(row["compared"] <= 1.01 * row["most"] for row in told["rows"])
        blocks = "one gate a channel" if told["round_to"] == "1" else f"round_to {told['round_to']}"
        lines.append(
            f"| {told['network']}, {told['runtime']}, batch {told['batch']}, {blocks} | {told['residual']:.1%}, "
            f"{told['worst']:.1%} | {sum(e <= 0.1 for e in errors)} of {len(errors)} | {max(errors):.1%} | "
            f"{met} of {len(errors)} | {sum(row['corrections'] for row in told['rows'])} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20", choices=ship.NETWORKS)
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--round-to", default="auto", help='"auto", a number, or 1 for a gate for each channel.')
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.5, 0.3], help="of the latency of the whole network"
    )
    parser.add_argument("--out", type=Path, default=Path("results/ship-latency"))
    parser.add_argument("--table", type=Path, help="The page whose generated part is to be replaced.")
    given = parser.parse_args()
    if given.table is not None:
        put_between(given.table, [(MARKS, table(given.out))])
        return
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ[VARIABLE] = cache  # measured now, not at some other time
        for seed in range(given.seeds):
            for share in given.shares:
                row, kept = found(given, share, seed)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    told = {key: getattr(given, key) for key in ("network", "runtime", "round_to", "batch", "updates")}
    told |= {"residual": kept.residual, "worst": kept.worst, "tile": kept.tile, "variants": kept.variants}
    told |= ship.machine("benchmarks/predictions.py", "cpu") | {"rows": rows}
    write(given.out / f"{given.network}-{given.runtime}-{given.round_to}.json", json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
