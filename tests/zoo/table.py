"""The table of architectures: measured into results/gates/architectures.json, written from there to docs.

python -m tests.zoo.table --measure    # examine every architecture (minutes), then write the page
python -m tests.zoo.table              # write the page from the committed results
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .catalogue import ENTRIES
from .checks import (
    Subject,
    compact_output,
    gradient_mismatch,
    masked_output,
    masks,
    mismatch,
    relative,
    reload_mismatch,
    roads,
    share_bound,
    smallest_share,
)
from .entry import Entry
from .odd_layers import ODD
from .random_graphs import random_graph
from .traps import TRAPS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "gates" / "architectures.json"
SPEED = ROOT / "results" / "gates" / "speed.json"
PAGE = ROOT / "docs" / "architectures.md"
MASKS = 20


def examine(entry: Entry, number: int = MASKS) -> dict[str, Any]:
    """Everything the table says of one architecture."""
    start = time.perf_counter()
    it = Subject.or_refusal(entry)
    row: dict[str, Any] = {"name": entry.name, "source": entry.source, "family": entry.family, "kinds": entry.kinds}
    row["attach_s"] = round(time.perf_counter() - start, 3)
    if isinstance(it, str):
        return row | {"refused": it}
    drawn = masks(it.gated, number)
    errors = [mismatch(it, mask) for mask in drawn]
    costs = [roads(it, mask) for mask in (it.ones, *drawn)]
    apart, outside = gradient_mismatch(it, drawn[number // 2])
    small = it.gated.compact(drawn[number // 2])
    canonical = it.gated.canonical(drawn[number // 2])
    other = [
        relative(compact_output(small, inputs, False), masked_output(it, canonical, inputs, False))
        for inputs in entry.other_inputs()
    ]
    return row | {
        "gates": it.gated.d,
        "groups": len(it.gated.space.groups),
        "weights": int(costs[0]["weights"][-1]),
        "parameters": int(costs[0]["parameters"][-1]),
        "smallest_share": smallest_share(it),
        "share_bound": share_bound(entry, it.model),
        "error_eval": max(error for error, _ in errors),
        "error_train": max(error for _, error in errors),
        "error_other_sizes": max(other, default=0.0),
        "error_gradients": max(apart, outside),
        "error_reload": reload_mismatch(it, drawn[number // 2]),
        "cost_difference": max(abs(n - numbers[-1]) for cost in costs for numbers in cost.values() for n in numbers),
    }


def examine_odd(entry: Entry) -> dict[str, Any]:
    """One unusual layer: the groups of gates around it, or the first reason of the refusal."""
    it = Subject.or_refusal(entry)
    if isinstance(it, str):
        return {"name": entry.name, "refused": it.splitlines()[2].strip()}
    groups = [f"{group.name} ({group.size})" for group in it.gated.space.groups]
    worst = max(error for mask in masks(it.gated, MASKS) for error in mismatch(it, mask))
    return {"name": entry.name, "gated": groups, "error": worst}


def examine_graph(seed: int) -> dict[str, Any]:
    """One random graph: refused, or how far masked and compact are apart."""
    it = Subject.or_refusal(random_graph(seed))
    if isinstance(it, str):
        return {"seed": seed, "refused": it}
    drawn = masks(it.gated, 3, seed)
    worst = max(error for mask in drawn for error in mismatch(it, mask))
    return {"seed": seed, "gates": it.gated.d, "error": worst}


def measure(graphs: range) -> dict[str, Any]:
    import transformers

    rows = []
    for entry in ENTRIES:
        rows.append(examine(entry))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    traps = []
    for entry, parts in TRAPS:
        it = Subject.or_refusal(entry)
        kept = "nothing" if isinstance(it, str) else ", ".join(group.name for group in it.gated.space.groups)
        traps.append({"name": entry.name, "frozen": list(parts), "gated": kept})
    found = [examine_graph(seed) for seed in graphs]
    with_gates = [graph for graph in found if "error" in graph]
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "masks": MASKS,
        "architectures": rows,
        "traps": traps,
        "odd": [examine_odd(entry) for entry in ODD],
        "random_graphs": {
            "seeds": [graphs.start, graphs.stop],
            "with_gates": len(with_gates),
            "refused": len(found) - len(with_gates),
            "gates": sum(graph["gates"] for graph in with_gates),
            "worst_error": max(graph["error"] for graph in with_gates),
            "mismatches": [graph["seed"] for graph in with_gates if graph["error"] > 1e-9],
        },
    }


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def small_number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def architecture_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| architecture | from | gates | groups | weights | smallest share | bound | eval | train | other sizes "
        "| gradients | costs |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['name']} | {row['source']} | refused by name | | | | | | | | | |")
            continue
        numbers = [row[f"error_{key}"] for key in ("eval", "train", "other_sizes", "gradients")]
        cells = [row["name"], row["source"], str(row["gates"]), str(row["groups"]), f"{row['weights']:,}"]
        cells += [percent(row["smallest_share"]), percent(row["share_bound"]), *map(small_number, numbers)]
        cells.append("equal" if row["cost_difference"] == 0 else f"differ by {row['cost_difference']:g}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def odd_rows(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"| {odd['name']} | not gated: {odd['refused']} | |"
        if "refused" in odd
        else f"| {odd['name']} | {', '.join(odd['gated'])} | {small_number(odd['error'])} |"
        for odd in found
    ]


def speed_tables(speed: dict[str, Any]) -> list[str]:
    threads = f"{speed['threads']} thread{'s' * (speed['threads'] != 1)}"
    lines = [
        "",
        "## Speed",
        "",
        f"Medians of {speed['repeats']} interleaved repeats on {speed['device']}, {threads}, "
        f"torch {speed['torch']}, clock `{speed['clock']}`; `python benchmarks/gates.py`. Quartiles are in "
        "`results/gates/speed.json`.",
        "",
        "| training step | mode | batch | plain ms | masked ms | masked / plain |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in speed.get("training_step", []):
        plain, masked = row["plain"]["median_ms"], row["masked"]["median_ms"]
        head = f"| {row['model']} | {row['mode']} | {row['batch']} |"
        lines.append(f"{head} {plain:.2f} | {masked:.2f} | {row['ratio']:.3f} |")
    lines += [
        "",
        "| compact inference | batch | gates kept | MACs kept | MACs fewer by | faster by |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in speed.get("compact_inference", []):
        kept = f"{percent(row['share_of_gates'])} | {percent(row['share_of_macs'])}"
        lines.append(
            f"| {row['model']} | {row['batch']} | {kept} | {row['macs_ratio']:.2f}x | {row['speed_up']:.2f}x |"
        )
    lines += ["", "| attach | parameters | gates | numerical check | seconds |", "|---|---:|---:|---|---:|"]
    for row in speed.get("attach", []):
        check = "yes" if row["check"] else "no"
        lines.append(f"| {row['model']} | {row['parameters']:,} | {row['gates']:,} | {check} | {row['median_s']:.2f} |")
    return lines


def page(results: dict[str, Any], speed: dict[str, Any] | None) -> str:
    versions, graphs = results["versions"], results["random_graphs"]
    first, stop = graphs["seeds"]
    lines = [
        "# Architectures",
        "",
        "<!-- Written by `python -m tests.zoo.table` from results/gates; do not edit. -->",
        "",
        "Networks that `espalier.attach` was tried on, with the gates that it found. They were built from their "
        f"configuration, in float64, with torch {versions['torch']} and transformers {versions['transformers']}.",
        "",
        "| column | is |",
        "|---|---|",
        "| smallest share | the share of linear and convolution weights that the emptiest mask keeps |",
        "| bound | what that may be at most: 5%; for a transformer the share that no gate can cut, and two points |",
        f"| eval, train | the largest relative difference between the masked and the compact model, over "
        f"{results['masks']} random masks and the emptiest one, with dropout off |",
        "| other sizes | the same difference on other batch, sequence or image sizes |",
        "| gradients | the same for the gradients, in train mode |",
        "| costs | whether three counts agree: `gated.cost`, the compact model's tensors, an independent counter |",
        "",
        "A difference of exactly 0 means that the norms of that model round to float32, which hides the rounding.",
        "",
        *architecture_table(results["architectures"]),
        "",
        "## What is not gated",
        "",
        "Each of these is a small network with one part that cannot be cut exactly. `explain` names the part and the "
        "reason.",
        "",
        "| network | not gated | gated |",
        "|---|---|---|",
        *(f"| {t['name']} | {', '.join(f'`{p}`' for p in t['frozen'])} | {t['gated']} |" for t in results["traps"]),
        "",
        "## Unusual layers",
        "",
        "Each network is a stem, the unusual layer, and a head that reads it. The table has the gates found and the "
        "largest relative difference between masked and compact, or why nothing was gated.",
        "",
        "| layer | gated (gates), or why not | difference |",
        "|---|---|---:|",
        *odd_rows(results["odd"]),
        "",
        "## Random graphs",
        "",
        f"Seeds {first} to {stop - 1} give {graphs['with_gates']} graphs with {graphs['gates']:,} gates; "
        f"{graphs['refused']} are refused by name. There are {len(graphs['mismatches'])} mismatches. The largest "
        f"relative difference is {small_number(graphs['worst_error'])}.",
    ]
    refused = [row for row in results["architectures"] if "refused" in row]
    if refused:
        lines += ["", "## Refused", "", *(f"- **{row['name']}**: {row['refused']}" for row in refused)]
    if speed:
        lines += speed_tables(speed)
    return "\n".join(lines) + "\n"


def committed_page() -> str:
    speed = json.loads(SPEED.read_text()) if SPEED.exists() else None
    return page(json.loads(RESULTS.read_text()), speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="examine every architecture first")
    parser.add_argument("--graphs", type=int, default=500, help="how many random graphs to examine")
    options = parser.parse_args()
    if options.measure:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        found = measure(range(1000, 1000 + options.graphs))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(committed_page())


if __name__ == "__main__":
    main()
