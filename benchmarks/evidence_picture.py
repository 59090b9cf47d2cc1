"""The picture of the README, from the lines of ``evidence.py``: error against size, for each network and cost.

    python benchmarks/evidence_picture.py FILE.jsonl ... --out PICTURE.svg

A mark is the mean over the seeds of one target, at least three where there are so many; its arms are one standard
deviation. A network is left out if it has fewer where others have so many. A dashed line is the whole network, where
the files hold runs of it.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from espalier import files
from espalier.report.figures import COLOURS, RULES
from evidence import lines_of
from evidence_table import COSTS, NETWORKS, RUNS, deviation, mean, shown

# What is drawn, and how it is called: ours, the same network narrowed from scratch, pruning.
METHODS = {"ours": "Espalier", "uniform": "narrower, from scratch", "Torch-Pruning": "Torch-Pruning"}


def panel(axes: Axes, lines: Sequence[dict[str, Any]], cost: str) -> None:
    """One network, its size counted in one cost."""
    runs = Counter((line["target"], shown(line)) for line in lines if line["cost"] == cost)
    tried = {one for one, count in runs.items() if count >= RUNS} or set(runs)
    there = {method for _, method in tried}
    targets = sorted({one for one, _ in tried if all((one, method) in tried for method in METHODS if method in there)})
    for (method, name), (colour, marker) in zip(METHODS.items(), COLOURS):
        if method not in there:
            continue
        groups = [[100 * x["error"] for x in lines if (x["cost"], x["target"]) == (cost, target) and shown(x) == method]
                  for target in targets]  # fmt: skip
        arms = [deviation(errors) if len(errors) > 1 else 0.0 for errors in groups]
        axes.errorbar(
            targets, [mean(errors) for errors in groups], yerr=arms, color=colour,
            marker=marker, ms=6, lw=2, elinewidth=1, capsize=2, label=name,
        )  # fmt: skip
    if whole := [100 * line["error"] for line in lines if line["method"] == "dense"]:
        axes.axhline(mean(whole), color="#666666", lw=1, ls="--", label="the whole network")
    axes.set_xscale("log")
    axes.set_xlim(0.75 * targets[0], 1.35 * targets[-1])
    axes.xaxis.set_major_locator(FixedLocator(targets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel(f"{COSTS[cost]} kept")


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each network and cost, panels of one network on one scale of errors."""
    runs = Counter((line["network"], line["cost"], line["target"], shown(line)) for line in lines)
    networks = sorted({cell[0] for cell, count in runs.items() if count >= RUNS} or {cell[0] for cell in runs})
    costs = sorted({line["cost"] for line in lines if line["cost"] is not None})
    with matplotlib.rc_context(RULES):
        figure = Figure(figsize=(2.4 * len(networks) * len(costs), 3.3), layout="constrained")
        parts = figure.subfigures(1, len(networks), squeeze=False)[0]
        for network, part in zip(networks, parts):
            grid = part.subplots(1, len(costs), sharey=True, squeeze=False)[0]
            for cost, axes in zip(costs, grid):
                panel(axes, [line for line in lines if line["network"] == network], cost)
            grid[0].set_title(NETWORKS.get(network, network))
            grid[0].set_ylabel("test error in %" if network == networks[0] else "")
        handles, names = parts[0].axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    lines = [line for file in given.files for line in lines_of(file) if not line["held_out"]]
    buffer = io.BytesIO()
    with matplotlib.rc_context(RULES | {"svg.fonttype": "path"}):  # a page shows it as an image: no fonts of its own
        picture(lines).savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    files.write(given.out, buffer.getvalue())


if __name__ == "__main__":
    main()
