"""What grid studies on held-out data say of a setting, beside another one's: one line each, kept and compared.

    espalier study --held-out 10000 --first-seed 1000 --initial 0.99 --out runs/initial_0.99 ...
    PYTHONPATH=src python benchmarks/recipe_rows.py runs/default runs/initial_0.99 --out results/recipe/tuning.jsonl

Appends a row for each method and length in each folder: the whole setting, every single error, means, the hardware and
the command. Prints every row's mean error (in %) and mean training loss, and the difference from the first folder's
search, over pairs of equal fold and seed, with its 95% bootstrap interval. Studies of test sets are refused: tuning is
not done on those.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from espalier.report.recipe import paired_interval
from espalier.study.grid_record import lines

Errors = dict[float, dict[tuple[int, int], float]]  # of each target: by fold and seed


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A row for each length and method of a study."""
    found = []
    for place in sorted({path.parent for path in folder.glob("runs/*/*/*.jsonl")}):
        files = [lines(path) for path in sorted(place.glob("*.jsonl"))]
        head = files[0][0]
        if head["evaluated_on"] == "test set" or not head["settings"]["held_out"]:
            sys.exit(f"{place} was evaluated on {head['evaluated_on']}: tuning is done on held-out data alone")
        runs = [story for _, *stories in files for story in stories if story["run"].get("target") is not None]
        by_target: dict[float, list[Any]] = {}
        for story in runs:
            by_target.setdefault(story["run"]["target"], []).append(story)
        if by_target:
            found.append(row(folder.name, place.name, [file[0] for file in files], by_target))
    return found


def row(name: str, method: str, heads: list[Any], by_target: dict[float, list[Any]]) -> dict[str, Any]:
    head, targets = heads[0], sorted(by_target)
    of = [[story["result"]["test_error"] for story in by_target[t]] for t in targets]
    return {
        "name": f"study: {name}, {method}", "method": method, "epochs": head["settings"]["epochs"],
        "targets": targets, "runs": [len(e) for e in of], "setting": head["settings"], "examples": head["examples"],
        "mean": [round(100 * statistics.mean(e), 3) for e in of],
        "train_loss": [last_losses(by_target[t]) for t in targets],
        "pairs": [[[s["run"].get("fold") or 0, s["run"]["seed"]] for s in by_target[t]] for t in targets],
        "errors": of, "seconds": round(sum(one["seconds"]["batch"] for one in heads), 1),
        "hardware": head["hardware"], "versions": head["versions"], "commit": head["commit"],
        "commands": list(dict.fromkeys(one["command"] for one in heads)),
    }  # fmt: skip


def last_losses(stories: list[Any]) -> float | None:
    """Their mean; None where a run diverged."""
    losses = [story["curve"][-1]["train_loss"] for story in stories]
    return None if None in losses else round(statistics.mean(losses), 4)


def keyed(one: dict[str, Any]) -> Errors:
    return {
        target: {(fold, seed): error for (fold, seed), error in zip(pairs, errors, strict=True)}
        for target, pairs, errors in zip(one["targets"], one["pairs"], one["errors"], strict=True)
    }


def compared(one: dict[str, Any], base: dict[str, Any] | None) -> str:
    """The row in one line."""
    mine, theirs, parts = keyed(one), keyed(base) if base else {}, []
    for target, mean, loss in zip(one["targets"], one["mean"], one["train_loss"], strict=True):
        text = f"{target:g}: {mean:.2f} (loss {'diverged' if loss is None else f'{loss:.3f}'})"
        both = sorted(mine[target].keys() & theirs.get(target, {}).keys())
        if both and one is not base:
            apart = [100 * (mine[target][key] - theirs[target][key]) for key in both]
            low, high = paired_interval(apart, [fold for fold, _ in both])
            text += f" {statistics.mean(apart):+.2f} [{low:+.2f}, {high:+.2f}]"
        parts.append(text)
    return f"{one['epochs']:4d} epochs  {one['name'].removeprefix('study: '):28s} " + "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of studies; others are held against the first")
    parser.add_argument("--out", type=Path, help="the file to append the rows to; default: none")
    given = parser.parse_args()
    of = {folder: rows_of(folder) for folder in given.folders}
    rows = [one for found in of.values() for one in found]
    bases = {one["epochs"]: one for one in of[given.folders[0]] if one["method"] == "search"}
    for one in sorted(rows, key=lambda r: r["epochs"]):
        print(compared(one, bases.get(one["epochs"])))
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one, separators=(",", ":")) + "\n" for one in rows)


if __name__ == "__main__":
    main()
