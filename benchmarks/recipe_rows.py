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

from espalier.report import Run, Section, read
from espalier.report.grid_tables import Paired, by_pair, compare
from espalier.report.grid_tables import sections_of as grids_of
from espalier.report.significance import paired_interval


def by_method(section: Section) -> dict[str, dict[float, list[Run]]]:
    """The runs of each method by target, those of the plain method by penalty."""
    found: dict[str, dict[float, list[Run]]] = {}
    for run in section.members:
        if run.setting is not None:
            found.setdefault(run.method, {}).setdefault(run.setting.value, []).append(run)
    return found


def row(name: str, method: str, by_label: dict[float, list[Run]]) -> dict[str, Any]:
    """What is kept of one method."""
    labels = sorted(by_label)
    groups = [by_label[label] for label in labels]
    heads = {run.path: run.record for runs in groups for run in runs}.values()  # a file for each batch
    head = next(iter(heads))
    return {
        "name": f"study: {name}, {method}", "method": method, "epochs": head["settings"]["epochs"],
        **named(method, labels, groups), "runs": [len(runs) for runs in groups],
        "setting": head["settings"], "examples": head["examples"],
        "mean": [round(100 * statistics.mean(run.number("error") for run in runs), 3) for runs in groups],
        "train_loss": [last_losses(runs) for runs in groups],
        "pairs": once([[[run.fold or 0, run.seed] for run in runs] for runs in groups]),
        "errors": [[run.number("error") for run in runs] for runs in groups],
        "seconds": round(sum(one["seconds"]["batch"] for one in heads), 1),
        "hardware": head["hardware"], "versions": head["versions"], "commit": head["commit"],
        "commands": list(dict.fromkeys(one["command"] for one in heads)),
    }  # fmt: skip


def once(lists: list[Any]) -> list[Any]:
    """A single one where all are alike."""
    return lists[:1] if all(one == lists[0] for one in lists) else lists


def named(method: str, labels: list[float], groups: list[list[Run]]) -> dict[str, list[float]]:
    """What sets the runs apart; where that is a penalty, the sizes that came of it as well."""
    if method != "penalty":
        return {"targets": labels}
    shares = [round(statistics.median(run.number("reached_after") for run in runs), 4) for runs in groups]
    return {"penalties": labels, "shares": shares}


def last_losses(runs: list[Run]) -> float | None:
    """Their mean; None where a run diverged."""
    losses = [run.record["curve"][-1]["train_loss"] for run in runs]
    return None if None in losses else round(statistics.mean(losses), 4)


def told(one: dict[str, Any], by_label: dict[float, list[Run]], base: dict[float, list[Run]]) -> str:
    """The row in one line, beside the search of another folder; a penalty's beside that search's only size."""
    plain = one["method"] == "penalty"
    parts, compared = [], []
    for i, (label, runs) in enumerate(sorted(by_label.items())):
        size = f" ({one['shares'][i]:.1%})" if plain else ""
        loss = one["train_loss"][i]
        text = f"{label:g}{size}: {one['mean'][i]:.2f} (loss {'diverged' if loss is None else f'{loss:.3f}'})"
        theirs = base.get(next(iter(base)) if plain and len(base) == 1 else label, [])
        pairs = by_pair(runs), by_pair(theirs)
        if theirs is not runs and (apart := compare(*pairs)):
            text += f" {apart.label}"
            compared.append(pairs)
        parts.append(text)
    if not plain and len(compared) == len(by_label) > 1:
        parts += together(compared)
    return f"{one['epochs']:4d} epochs  {one['name'].removeprefix('study: '):28s} " + "   ".join(parts)


def together(compared: list[tuple[Paired, Paired]]) -> list[str]:
    """The difference over all sizes: of each pair their mean, as sizes of one seed are not independent."""
    pairs = sorted(set.intersection(*(set(runs) for both in compared for runs in both)), key=str)
    if len(pairs) < 2:
        return []
    apart = [
        statistics.mean(ours[pair].number("error") - theirs[pair].number("error") for ours, theirs in compared)
        for pair in pairs
    ]
    low, high = paired_interval(apart, [fold for fold, _ in pairs])
    return [f"together {100 * statistics.mean(apart):+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"]


def sections_of(folder: Path) -> list[Section]:
    sections = grids_of(read(folder))
    for section in sections:
        where = section.members[0].error_of
        if not section.members[0].settings["held_out"]:
            sys.exit(f"{folder} was evaluated on {where}: tuning is done on held-out data alone")
    return sections


def epochs(section: Section) -> int:
    return int(section.members[0].settings["epochs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of studies; others are held against the first")
    parser.add_argument("--out", type=Path, help="the file to append the rows to; default: none")
    given = parser.parse_args()
    of = [(folder, section) for folder in given.folders for section in sections_of(folder)]
    rows, bases = [], {}
    for folder, section in sorted(of, key=lambda pair: epochs(pair[1])):
        methods = by_method(section)
        if folder == given.folders[0]:
            bases[epochs(section)] = methods.get("search", {})
        for method, by_label in sorted(methods.items()):
            rows.append(row(folder.name, method, by_label))
            print(told(rows[-1], by_label, bases.get(epochs(section), {})))
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one, separators=(",", ":")) + "\n" for one in rows)


if __name__ == "__main__":
    main()
