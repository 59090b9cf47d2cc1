"""Markdown tables of the lines of ``evidence.py``: a row for each method, and how far ours is ahead over equal seeds.

    python benchmarks/evidence_table.py FILE.jsonl ... [--ours ours] [--methods ours,uniform,...] [--into PAGE.md]
    python benchmarks/evidence_table.py FILE.jsonl ... --overview [--across] [--into PAGE.md]

A table for each network, cost and target, and for each budget that the files hold: mean error in %, its standard
deviation, n, shares of weights and MACs, seconds (of the device that most runs had); and ours minus the rival over the
seeds that both have, with the 95% interval of Student's t and in how many of them ours has the lower error. A row of
ours at the size of a rival ("ours-RIVAL") says the same of itself and that rival. ``--into`` writes them between
``<!-- generated: evidence -->`` and ``<!-- end of generated: evidence -->``. ``--overview``: one table instead, errors
alone, a row for each label of the lines (or method) and a column for each network, cost and target; between the marks
``generated: overview``. ``--across``: the other way round, a column for each method. ``--part NAME``: between the marks
``generated: NAME`` instead.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.report.tables import put_between
from evidence import lines_of


def marks_of(part: str) -> tuple[str, str]:
    return f"<!-- generated: {part} -->", f"<!-- end of generated: {part} -->"


MARKS, OVERVIEW = marks_of("evidence"), marks_of("overview")
BUDGET = ("data", "held_out", "epochs", "batch", "examples", "narrow")
COSTS = {"weights": "weights", "macs": "MACs", "parameters": "parameters"}
NETWORKS = {
    "vgg16": "VGG-16", "resnet8": "ResNet-8", "resnet20": "ResNet-20", "resnet56": "ResNet-56",
    "densenet40": "DenseNet-40",
}  # fmt: skip
RUNS = 3  # of each method in a cell, to be shown beside cells that have more
GUESS = 90.0  # error in % of one class for all of ten
ORDER = (
    "ours", "ranked", "control", "control-group", "uniform", "uniform-macs", "found", "pruned", "fastnas", "oto",
    "dense",
)  # fmt: skip


def within(t: float, freedom: int) -> float:
    """The probability that Student's t of so many degrees of freedom is between -t and t; exact for whole numbers.

    >>> round(within(12.706, 1), 4), round(within(2.776, 4), 4)
    (0.95, 0.95)
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (cosine if freedom > 1 else 0.0) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(freedom: int, share: float = 0.95) -> float:
    """The t within which this share of Student's distribution lies."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle, freedom) >= share else (middle, high)
    return high


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Of a sample; not a number where there is only one."""
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else math.nan


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences and the ends of its 95% interval; infinite ends where there is only one."""
    middle, n = mean(differences), len(differences)
    if n < 2:
        return middle, -math.inf, math.inf
    half = quantile(n - 1) * deviation(differences) / math.sqrt(n)
    return middle, middle - half, middle + half


def compared(ours: dict[int, float], rival: dict[int, float]) -> str:
    """Ours minus the rival, in points of error, over the seeds of both; bold where the interval leaves out 0, or where
    all of six or more are of one sign, which has a probability of 3% at most if neither is better.

    A run that learned nothing makes the interval as wide as it is; how many seeds are ahead, it does not change."""
    differences = [100 * (ours[seed] - rival[seed]) for seed in sorted(ours.keys() & rival.keys())]
    if not differences:
        return ""
    middle, low, high = interval(differences)
    if len(differences) < 2:
        return f"{middle:+.2f} (n = 1)"
    lower = sum(difference < 0 for difference in differences)
    text = f"{middle:+.2f} [{low:+.2f}, {high:+.2f}] (lower in {lower} of {len(differences)})"
    alike = len(differences) >= 6 and (lower == len(differences) or all(d > 0 for d in differences))
    return f"**{text}**" if alike or low > 0 or high < 0 else text


def row(name: str, lines: Sequence[dict[str, Any]], difference: str) -> str:
    errors = [100 * line["error"] for line in lines]
    spread = f" ± {deviation(errors):.2f}" if len(errors) > 1 else ""
    shares = [f"{100 * mean([line['shares'][kind] for line in lines]):.1f}" for kind in ("weights", "macs")]
    usual = Counter(line["device"] for line in lines).most_common(1)[0][0]
    seconds = mean([line["seconds"] for line in lines if line["device"] == usual])
    return (
        f"| {name} | {mean(errors):.2f}{spread} | {len(lines)} | {' | '.join(shares)} | {seconds:.0f} | {difference} |"
    )


def label(method: str, lines: Sequence[dict[str, Any]], usual: Sequence[Any]) -> str:
    """The name of a method, with what differs from the table's usual optimiser."""
    own = (lines[0]["lr"], lines[0]["weight_decay"], lines[0]["schedule"])
    other = [f"{name} {mine}" for name, mine, most in zip(("rate", "decay", ""), own, usual) if mine != most]
    return f"{method} ({', '.join(part.strip() for part in other)})" if other else method


def cell(lines: Sequence[dict[str, Any]], ours: str, wanted: Sequence[str] | None) -> list[str]:
    """The rows of one network, cost and target; the whole network's lines among them."""
    by: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for line in lines:
        if wanted is None or line["method"] in wanted:
            rival = (line["method"], line["lr"], line["weight_decay"], line["schedule"])
            by.setdefault(rival, {})[line["seed"]] = line
    budgets = [rival[1:] for rival in by if rival[0] == ours] or [rival[1:] for rival in by]
    usual = max(budgets, key=budgets.count)
    base = {seed: line["error"] for seed, line in by.get((ours, *usual), {}).items()}

    def place(rival: tuple[Any, ...]) -> tuple[int, str]:
        order = list(wanted or (ours, *ORDER))
        known = rival[0] if rival[0] in order else rival[0].split("-")[0]
        return order.index(known) if known in order else len(order), str(rival)

    rows = []
    for rival in sorted(by, key=place):
        seeds = by[rival]
        same, errors = rival == (ours, *usual), {seed: line["error"] for seed, line in seeds.items()}
        other = rival[0].removeprefix(f"{ours}-")  # at the size of which ours was run
        if (other, *usual) in by and other != rival[0]:
            their = {seed: line["error"] for seed, line in by[other, *usual].items()}
            difference = f"it minus {other}: {compared(errors, their)}"
        else:
            difference = "" if same else compared(base, errors)
        own = [seeds[seed] for seed in sorted(seeds)]
        rows.append(row(label(rival[0], own, usual), own, difference))
    return rows


def budget_words(budget: dict[str, Any]) -> str:
    where = f"{budget['held_out']} held-out training images" if budget["held_out"] else "the test set"
    shrunk = f", {budget['examples']} examples" if budget["examples"] else ""
    shrunk += f", widths divided by {budget['narrow']}" if budget["narrow"] != 1 else ""
    return f"{budget['data']}, {budget['epochs']} epochs of batches of {budget['batch']}{shrunk}; error on {where}"


def tables(lines: Sequence[dict[str, Any]], ours: str = "ours", wanted: Sequence[str] | None = None) -> str:
    """All tables of some lines, as Markdown."""
    parts = []
    budgets = {tuple(line[name] for name in BUDGET): None for line in lines}
    for budget in budgets:
        here = [line for line in lines if tuple(line[name] for name in BUDGET) == budget]
        parts.append(f"{budget_words(dict(zip(BUDGET, budget)))}.")
        cells = {(line["network"], line["cost"], line["target"]): None for line in here if line["cost"] is not None}
        for network, cost, target in sorted(cells, key=lambda one: (one[0], one[1], one[2])):
            own = [line for line in here if (line["network"], line["cost"], line["target"]) == (network, cost, target)]
            dense = [line for line in here if line["network"] == network and line["cost"] is None]
            rows = cell([*own, *dense], ours, wanted)
            heading = f"**{NETWORKS.get(network, network)}, {100 * target:g}% of the {COSTS[cost]}**"
            head = f"| method | error % | n | weights % | MACs % | seconds | {ours} minus it |"
            parts.append("\n".join([heading, "", head, "|---" * 7 + "|", *rows]))
    return "\n\n".join(parts)


def shown(line: dict[str, Any]) -> str:
    """The name of a line's row: its label, or its method. On the test set one setting of Torch-Pruning was run."""
    pruned = line["method"].startswith("pruned") and not line["held_out"]
    return str(line.get("label", "Torch-Pruning" if pruned else line["method"]))


def overview(lines: Sequence[dict[str, Any]], across: bool = False) -> str:
    """One table of mean errors, in the order of the lines; lines of one label and cell are its seeds.

    across: a column for each label instead of a row, and a row for each cell of which all of them have ``RUNS``; where
    there is none, for each that all of them have.
    """
    cells = sorted({(line["network"], line["cost"], line["target"]) for line in lines})
    by: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for line in lines:
        own = by.setdefault(shown(line), {})
        own.setdefault((line["network"], line["cost"], line["target"]), []).append(100 * line["error"])
    if across:  # what every method has, in several runs where there are such cells
        for least in (RUNS, 1):
            full = [cell for cell in cells if all(len(own.get(cell, [])) >= least for own in by.values())]
            if full:
                break
        cells = full
        by = {name: {cell: own[cell] for cell in cells} for name, own in by.items()}
    head = [f"{NETWORKS.get(network, network)}, {100 * target:g}% of {COSTS[cost]}" for network, cost, target in cells]
    table = [["", *head]]
    table += [[name, *(f"{mean(own[cell]):.2f}" if cell in own else "" for cell in cells)] for name, own in by.items()]
    table = [list(column) for column in zip(*table)] if across else table
    most = max(len(errors) for own in by.values() for errors in own.values())
    budget = budget_words({name: lines[0][name] for name in BUDGET})
    return "\n".join(
        [
            f"Error in %, {'1 run' if most == 1 else f'up to {most} runs'} in each cell; {budget}.",
            "",
            f"| | {' | '.join(table[0][1:])} |",
            "|---" * len(table[0]) + "|",
            *(f"| {' | '.join(row)} |" for row in table[1:]),
            *(["", ahead(by), *learned_nothing(by)] if across else []),
        ]
    )


def ahead(by: dict[str, dict[tuple[Any, ...], list[float]]]) -> str:
    """By how many points of error the first method is ahead of each other one."""
    (first, own), *others = by.items()
    parts = []
    for name, rival in others:
        points = [mean(rival[cell]) - mean(own[cell]) for cell in own]
        parts += [f"of {name} by {min(points):.1f} to {max(points):.1f}"] if points else []
    return f"In points of error, {first} is ahead {', '.join(parts)}."


def learned_nothing(by: dict[str, dict[tuple[Any, ...], list[float]]]) -> list[str]:
    """A line for each method that has runs with the error of a guess, which its means do not show."""
    counts = {name: [error >= GUESS for errors in own.values() for error in errors] for name, own in by.items()}
    return [f"{sum(c)} of the {len(c)} runs of {name} learned nothing." for name, c in counts.items() if any(c)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--ours", default="ours", help="the setting that others are compared with")
    parser.add_argument("--methods", help="only these, in this order")
    parser.add_argument("--overview", action="store_true")
    parser.add_argument("--across", action="store_true", help="an overview with a column for each method")
    parser.add_argument("--into", type=Path, help="a page with the two marks")
    parser.add_argument("--part", help="the name in the marks")
    given = parser.parse_args(words)
    lines = [line for file in given.files for line in lines_of(file)]
    wanted = given.methods.split(",") if given.methods else None
    if given.overview:
        rows = (
            lines
            if wanted is None
            else [line for name in wanted for line in lines if name in (line["method"], shown(line))]
        )
        text, marks = overview(rows, given.across), OVERVIEW
    else:
        text, marks = tables(lines, given.ours, wanted), MARKS
    if given.part:
        marks = marks_of(given.part)
    if given.into is None:
        print(text)
    else:
        put_between(given.into, [(marks, text)])


if __name__ == "__main__":
    main()
