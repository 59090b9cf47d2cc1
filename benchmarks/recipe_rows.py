"""What grid studies on held-out data say of a setting, beside another one's: one line each, kept and compared.

    espalier study --held-out 10000 --first-seed 1000 --initial 0.99 --out runs/initial_0.99 ...
    PYTHONPATH=src python benchmarks/recipe_rows.py runs/default runs/initial_0.99 --out results/recipe/tuning.jsonl

Appends a row for each method and length in each folder: the whole setting, every single error, means, the hardware and
the command. Prints every row's mean error (in %) and mean training loss, and the difference from the first folder's
search, over pairs of equal fold and seed, with its 95% bootstrap interval, at each size and over all of them. Studies
of test sets are refused: tuning is not done on those.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from espalier.report import recipe
from espalier.report.recipe import Run, Section


def by_method(section: Section) -> dict[str, dict[float, list[Run]]]:
    """The runs of each method by target."""
    found: dict[str, dict[float, list[Run]]] = {}
    for run in section.runs:
        if run.target is not None:
            found.setdefault(run.method, {}).setdefault(run.target, []).append(run)
    return found


def row(name: str, method: str, by_target: dict[float, list[Run]]) -> dict[str, Any]:
    """What is kept of one method."""
    targets = sorted(by_target)
    heads = {id(run.head): run.head for t in targets for run in by_target[t]}.values()
    head = next(iter(heads))
    return {
        "name": f"study: {name}, {method}", "method": method, "epochs": head["settings"]["epochs"],
        "targets": targets, "runs": [len(by_target[t]) for t in targets],
        "setting": head["settings"], "examples": head["examples"],
        "mean": [round(100 * statistics.mean(run.error for run in by_target[t]), 3) for t in targets],
        "train_loss": [last_losses(by_target[t]) for t in targets],
        "pairs": [[[run.pairing[0] or 0, run.pairing[1]] for run in by_target[t]] for t in targets],
        "errors": [[run.error for run in by_target[t]] for t in targets],
        "seconds": round(sum(one["seconds"]["batch"] for one in heads), 1),
        "hardware": head["hardware"], "versions": head["versions"], "commit": head["commit"],
        "commands": list(dict.fromkeys(one["command"] for one in heads)),
    }  # fmt: skip


def last_losses(runs: list[Run]) -> float | None:
    """Their mean; None where a run diverged."""
    losses = [run.story["curve"][-1]["train_loss"] for run in runs]
    return None if None in losses else round(statistics.mean(losses), 4)


def told(one: dict[str, Any], section: Section, base: Section | None) -> str:
    """The row in one line, beside the search of another section."""
    parts = []
    for target, mean, loss in zip(one["targets"], one["mean"], one["train_loss"], strict=True):
        text = f"{target:g}: {mean:.2f} (loss {'diverged' if loss is None else f'{loss:.3f}'})"
        itself = section is base and one["method"] == "search"
        theirs = base.of("search", target) if base and not itself else {}
        if apart := recipe.compare(section.of(one["method"], target), theirs):
            text += f" {100 * apart.mean:+.2f} [{100 * apart.low:+.2f}, {100 * apart.high:+.2f}]"
        parts.append(text)
    if base and not (section is base and one["method"] == "search"):
        parts += together(section, base, one["method"], one["targets"])
    return f"{one['epochs']:4d} epochs  {one['name'].removeprefix('study: '):28s} " + "   ".join(parts)


def together(section: Section, base: Section, method: str, targets: list[float]) -> list[str]:
    """The difference over all sizes: of each pair their mean, as sizes of one seed are not independent."""
    ours, theirs = [section.of(method, t) for t in targets], [base.of("search", t) for t in targets]
    pairs = sorted(set.intersection(*(set(runs) for runs in [*ours, *theirs])), key=str)
    if len(targets) < 2 or len(pairs) < 2:
        return []
    apart = [statistics.mean(a[pair].error - b[pair].error for a, b in zip(ours, theirs)) for pair in pairs]
    low, high = recipe.paired_interval(apart, [fold for fold, _ in pairs])
    return [f"together {100 * statistics.mean(apart):+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"]


def sections_of(folder: Path) -> list[Section]:
    sections = recipe.read(folder)
    for section in sections:
        where = section.runs[0].head["evaluated_on"]
        if not section.runs[0].head["settings"]["held_out"]:
            sys.exit(f"{folder} was evaluated on {where}: tuning is done on held-out data alone")
    return sections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of studies; others are held against the first")
    parser.add_argument("--out", type=Path, help="the file to append the rows to; default: none")
    given = parser.parse_args()
    of = [(folder.name, section) for folder in given.folders for section in sections_of(folder)]
    epochs = [section.runs[0].head["settings"]["epochs"] for _, section in of]
    bases = {n: section for n, (name, section) in reversed(list(zip(epochs, of))) if name == given.folders[0].name}
    rows = []
    for n, (name, section) in sorted(zip(epochs, of), key=lambda pair: pair[0]):
        for method, by_target in sorted(by_method(section).items()):
            rows.append(row(name, method, by_target))
            print(told(rows[-1], section, bases.get(n)))
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one, separators=(",", ":")) + "\n" for one in rows)


if __name__ == "__main__":
    main()
