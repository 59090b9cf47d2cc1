"""Tables of a grid study from its run files: the search against its rivals and its control, and how targets are hit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espalier.picture.labels import power
from espalier.report.commands import made_by
from espalier.report.files import put
from espalier.report.generated import MARK, into, place
from espalier.report.sections import NAMES
from espalier.report.statistics import median
from espalier.report.table import Table
from espalier.space import BadInput, Corrupt

FORMAT = 1
DRAWS = 10_000
SEED = 0
RIVALS = {
    "scratch": "equal layers from scratch",
    "found": "the found widths from scratch",
    "permuted": "control: losses permuted",
}
Pairing = tuple[int | None, int]  # fold and seed


@dataclass(frozen=True)
class Run:
    """One finished run. head: what it has in common with its batch; story: its own line."""

    head: dict[str, Any]
    story: dict[str, Any]

    @property
    def method(self) -> str:
        return str(self.story["run"]["method"])

    @property
    def target(self) -> float | None:
        found: float | None = self.story["run"].get("target")
        return found

    @property
    def penalty(self) -> float | None:
        found: float | None = self.story["run"].get("penalty")
        return found

    @property
    def pairing(self) -> Pairing:
        return self.story["run"].get("fold"), int(self.story["run"]["seed"])

    @property
    def error(self) -> float:
        """Share of wrong test images; 1 where none could be told, as training diverged."""
        found = self.story["result"]["test_error"]
        return 1.0 if found is None else float(found)

    def result(self, name: str) -> Any:
        return self.story["result"].get(name)


@dataclass(frozen=True)
class Section:
    """Runs on the same data, of the same length."""

    name: str
    runs: tuple[Run, ...]

    @property
    def targets(self) -> list[float]:
        return sorted({run.target for run in self.runs if run.method == "search" and run.target is not None})

    def of(self, method: str, target: float | None = None) -> dict[Pairing, Run]:
        """The runs of one method (and target) by fold and seed."""
        return {r.pairing: r for r in self.runs if r.method == method and (target is None or r.target == target)}

    @property
    def title(self) -> str:
        settings = self.runs[0].head["settings"]
        shape = "-".join(map(str, settings["widths"]))
        rate = f", learning rate {settings['learning_rate']:g}" if "-rate_" in self.name else ""
        batch = f", batch {settings['batch_size']}" if "-batch_" in self.name else ""
        length = f"{settings['epochs']} epochs{rate}{batch}"
        data = NAMES.get(settings["dataset"], settings["dataset"])
        return f"{data}, {length}, {shape}, {self.runs[0].head['evaluated_on']}"

    @property
    def note(self) -> str:
        """What every table says of itself."""
        machines = dict.fromkeys(str(r.head["hardware"].get("gpu") or r.head["hardware"]["cpu"]) for r in self.runs)
        methods = dict.fromkeys(run.method for run in self.runs)
        counts = ", ".join(f"{sum(r.method == m for r in self.runs)} {m}" for m in methods)
        return f"{len(self.runs)} runs ({counts}); {' and '.join(machines)}"


def read(folder: str | os.PathLike[str]) -> list[Section]:
    """Every run under the folder, in sections; a file that is not whole is named and refused."""
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give the folder of a study")
    sections: dict[str, list[Run]] = {}
    for path in sorted((root / "runs").glob("*/*/*.jsonl")):
        head, stories = _lines(path)
        sections.setdefault(path.parts[-3], []).extend(Run(head, story) for story in stories)
    if not sections:
        raise BadInput(f"{root} holds no finished run of a grid (no runs/*/*/*.jsonl); run `espalier study` first")
    return [Section(name, tuple(runs)) for name, runs in sorted(sections.items(), key=_length)]


def _length(item: tuple[str, list[Run]]) -> tuple[str, int]:
    settings = item[1][0].head["settings"]
    return item[0].rpartition("-")[0], int(settings["epochs"])


def _lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        head, *stories = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a file of runs: {error}. Remove it and run the study again") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("runs_in_batch") != len(stories):
        raise Corrupt(f"{path} is not a whole file of runs of format {FORMAT}; remove it and run the study again")
    return head, stories


@dataclass(frozen=True)
class Comparison:
    """The search minus a rival in one cell: the mean difference of error over pairs of equal fold and seed."""

    pairs: int
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Only what the interval is sure of."""
        return "won" if self.high < 0 else "lost" if self.low > 0 else "level"


def compare(ours: dict[Pairing, Run], theirs: dict[Pairing, Run]) -> Comparison | None:
    """None where there are not two pairs to compare."""
    both = sorted(ours.keys() & theirs.keys(), key=str)
    if len(both) < 2:
        return None
    differences = [ours[pair].error - theirs[pair].error for pair in both]
    low, high = paired_interval(differences, [fold for fold, _ in both])
    return Comparison(len(both), float(np.mean(differences)), low, high)


def paired_interval(
    differences: Sequence[float], folds: Sequence[int | None], level: float = 0.95
) -> tuple[float, float]:
    """A bootstrap interval (percentiles, fixed seed) of the mean of paired differences.

    Pairs of one fold share their images: folds are drawn first, then pairs within each of them, so that what is due to
    the split is not taken for evidence. Folds of equal size; None: no folds, and pairs are drawn alone.

    >>> paired_interval([0.1] * 4, [0, 0, 1, 1]) == (0.1, 0.1)
    True
    """
    rng = np.random.default_rng(SEED)
    groups = [
        np.asarray([d for d, f in zip(differences, folds, strict=True) if f == fold], dtype=np.float64)
        for fold in sorted(set(folds), key=str)
    ]
    inside = np.stack([g[rng.integers(len(g), size=(DRAWS, len(groups), len(g)))].mean(-1) for g in groups], -1)
    # inside: (draws, places, folds), the mean of a drawing of its own for every place a fold may be drawn to
    drawn = rng.integers(len(groups), size=(DRAWS, len(groups), 1))
    means = np.take_along_axis(inside, drawn, -1).squeeze(-1).mean(-1)
    # Summing in another order moves a last digit: that is no evidence.
    low, high = np.round(np.quantile(means, [(1 - level) / 2, (1 + level) / 2]), 12)
    return float(low), float(high)


def tables(section: Section) -> list[Table]:
    """Those that the runs of a section allow."""
    made = [_against(section), _medians(section), _targets(section), _widths(section)]
    if section.of("penalty"):
        made.append(_penalties(section))
    return [table for table in made if table.rows]


def _against(section: Section) -> Table:
    rows = list[tuple[Any, ...]]()
    for target in section.targets:
        ours = section.of("search", target)
        row: list[Any] = [100 * target, len(ours), _mean(ours)]
        for rival in RIVALS:
            theirs = section.of(rival, target)
            found = compare(ours, theirs)
            row += [_mean(theirs), *([None, None] if found is None else [_told(found), found.verdict])]
        rows.append(tuple(row))
    columns = [("% of cost", "g"), ("runs", "d"), ("ours", ".2f")]
    for rival, words in RIVALS.items():
        columns += [(words, ".2f"), (f"ours minus {rival} [95%]", ""), ("cell", "")]
    note = (
        "Mean test error in %. Differences over pairs of equal fold and seed, 95% by bootstrap over folds and pairs; "
        "won or lost only if 0 "
        f"is outside. {section.note}"
    )
    return Table(f"{section.name}-recipe", f"Ours and its rivals: {section.title}", tuple(columns), tuple(rows), note)


def _medians(section: Section) -> Table:
    rows = [
        (100 * target, *[_median(section.of(method, target)) for method in ("search", *RIVALS)])
        for target in section.targets
    ]
    columns = (("% of cost", "g"), ("ours", ".2f"), *[(words, ".2f") for words in RIVALS.values()])
    return Table(f"{section.name}-medians", f"Medians: {section.title}", columns, tuple(rows), section.note)


def _targets(section: Section) -> Table:
    rows = list[tuple[Any, ...]]()
    for target in section.targets:
        runs = list(section.of("search", target).values())
        before = [100 * run.result("reached_before") for run in runs]
        after = [100 * run.result("reached_after") for run in runs]
        gaps = [abs(100 * run.result("gap")) for run in runs]
        over = sum(run.result("reached_after") > target * (1 + 1e-9) for run in runs)
        row = (100 * target, len(runs), median(before), max(gaps), median(after), min(after), over)
        rows.append(
            (
                *row,
                100 * median([run.result("weight_share") for run in runs]),
                _mean(section.of("search", target)),
                _median(section.of("search", target)),
            )
        )
    columns = (
        ("target %", "g"), ("runs", "d"), ("reached before selection, median %", ".2f"), ("largest gap", ".2f"),
        ("reached after, median %", ".2f"), ("lowest %", ".2f"), ("runs above target", "d"),
        ("weights %", ".2f"), ("mean error %", ".2f"), ("median error %", ".2f"),
    )  # fmt: skip
    return Table(
        f"{section.name}-target", f"Targets and what was reached: {section.title}", columns, tuple(rows), section.note
    )


def _widths(section: Section) -> Table:
    rows = list[tuple[Any, ...]]()
    for target in section.targets:
        for method in ("search", "permuted", "scratch"):
            runs = section.of(method, target).values()
            if runs:
                units = np.median([run.result("units") for run in runs], axis=0)
                shares = [100 * run.result("weight_share") for run in runs]
                rows.append((100 * target, method, "-".join(f"{u:g}" for u in units), median(shares)))
    columns = (
        ("target %", "g"),
        ("method", ""),
        ("units of each hidden layer, medians", ""),
        ("weights %, median", ".2f"),
    )
    return Table(f"{section.name}-widths", f"Widths: {section.title}", columns, tuple(rows), section.note)


def _penalties(section: Section) -> Table:
    """Every fixed penalty with the size it came to, beside the search whose target is nearest to that size."""
    rows = list[tuple[Any, ...]]()
    plain = [run for run in section.runs if run.method == "penalty"]
    for penalty in sorted({run.penalty for run in plain if run.penalty is not None}, reverse=True):
        runs = {run.pairing: run for run in plain if run.penalty == penalty}
        shares = [100 * run.result("weight_share") for run in runs.values()]
        size = max(median(shares), 1e-3) / 100
        near = min(section.targets, key=lambda t: abs(np.log(t) - np.log(size)), default=None)
        ours = {} if near is None else section.of("search", near)
        found = compare(ours, runs)
        row = (
            power(penalty),
            len(runs),
            median(shares),
            min(shares),
            max(shares),
            _mean(runs),
            _median(runs),
            None if near is None else 100 * near,
        )
        rows.append((*row, _mean(ours), _median(ours), None if found is None else _told(found)))
    columns = (
        ("penalty", ""), ("runs", "d"), ("weights %, median", ".2f"), ("lowest", ".2f"), ("highest", ".2f"),
        ("mean error %", ".2f"), ("median", ".2f"), ("nearest target %", "g"), ("ours there: mean error %", ".2f"),
        ("median", ".2f"), ("ours minus plain [95%]", ""),
    )  # fmt: skip
    return Table(
        f"{section.name}-penalty",
        f"The plain method, fixed penalties: {section.title}",
        columns,
        tuple(rows),
        section.note,
    )


def _mean(runs: dict[Pairing, Run]) -> float | None:
    """Of the errors, in per cent."""
    return float(np.mean([100 * run.error for run in runs.values()])) if runs else None


def _median(runs: dict[Pairing, Run]) -> float | None:
    return median([100 * run.error for run in runs.values()]) if runs else None


def _told(found: Comparison) -> str:
    return f"{100 * found.mean:+.2f} [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"


def verdicts(section: Section) -> dict[tuple[float, str], str]:
    """By target and rival."""
    found = {
        (t, rival): compare(section.of("search", t), section.of(rival, t)) for t in section.targets for rival in RIVALS
    }
    return {cell: comparison.verdict for cell, comparison in found.items() if comparison is not None}


def lines(section: Section) -> list[str]:
    """What a person wants to know first: a line for each target."""
    told = list[str]()
    for target in section.targets:
        runs = section.of("search", target)
        before, after = (
            median([run.result(name) for run in runs.values()]) for name in ("reached_before", "reached_after")
        )
        text = f"{section.name}: target {target:.2%} of the cost, reached {before:.2%} before the selection and "
        text += f"{after:.2%} after it, error {_median(runs):.2f}%"
        others = {rival: _median(section.of(rival, target)) for rival in RIVALS}
        text += "".join(f", {rival} {error:.2f}%" for rival, error in others.items() if error is not None)
        told.append(f"{text} (medians of {len(runs)})")
    return told


BEGIN, END = "<!-- generated: recipe {name} -->", "<!-- end of generated: recipe {name} -->"


def write(folder: str | os.PathLike[str], page: str | os.PathLike[str] | None = None) -> list[Path]:
    """The tables of every section as Markdown and CSV, under ``tables/``, and a README (or REPORT) of all of them.

    page: a page of the documentation; between its marks for a section the tables of that are put.
    """
    root = Path(folder)
    sections = read(root)
    readme = place(root)
    written = list[Path]()
    parts = dict[str, list[str]]()
    for section in sections:
        made = tables(section)
        for table in made:
            written += table.write(root / "tables" / table.name)
        commands = made_by(str(run.head["command"]) for run in section.runs)
        told = ["Made by:", "", *[f"    {command}" for command in commands], ""]
        parts[section.name] = [table.markdown() for table in made] + told
    title = "# " + ", ".join(parts)
    pieces = [piece for part in parts.values() for piece in part]
    written.append(put(readme, "\n".join([title, "", MARK, "", *pieces])))
    if page is not None:
        marks = {name: (BEGIN.format(name=name), END.format(name=name)) for name in parts}
        written.append(into(Path(page), [(marks[name], "\n".join(part)) for name, part in parts.items()]))
    return written
