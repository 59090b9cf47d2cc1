"""Tables of a grid study: the search against its rivals and its control, over pairs, and how targets are hit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espalier import files
from espalier.picture import power
from espalier.report.run_reader import LABELS, Run
from espalier.report.significance import median, paired_interval
from espalier.report.study_reader import Section, Study, numbers
from espalier.report.tables import MARK, Table, made_by, put_between, readme_of

RIVALS = {
    "scratch": "equal layers from scratch",
    "found": "the found widths from scratch",
    "permuted": LABELS["permuted"],
}
BEGIN, END = "<!-- generated: recipe {name} -->", "<!-- end of generated: recipe {name} -->"
Pairing = tuple[int | None, int | None]  # fold and seed
Paired = dict[Pairing, Run]


def sections_of(study: Study) -> list[Section]:
    """Those of a grid: by data, the shortest training first."""
    grids = [section for section in study.sections if section.members[0].study == "grid"]
    return sorted(grids, key=lambda s: (s.folder.rpartition("-")[0], int(s.members[0].settings["epochs"])))


def rivals(section: Section) -> dict[str, str]:
    """What the search is compared with, in words; of its control what was permuted."""
    search = next((run for run in section.members if run.searches), section.members[0])
    return {rival: words.replace("losses", search.signal) for rival, words in RIVALS.items()}


def by_pair(runs: Iterable[Run]) -> Paired:
    """Runs of one method and setting by fold and seed."""
    return {(run.fold, run.seed): run for run in runs}


def targets(section: Section) -> list[float]:
    return sorted({r.setting.value for r in section.of("search") if r.setting and r.setting.kind == "target"})


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

    @property
    def label(self) -> str:
        return f"{100 * self.mean:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"


def compare(ours: Paired, theirs: Paired) -> Comparison | None:
    """None where there are not two pairs to compare."""
    both = sorted(ours.keys() & theirs.keys(), key=str)
    if len(both) < 2:
        return None
    differences = [ours[pair].number("error") - theirs[pair].number("error") for pair in both]
    low, high = paired_interval(differences, [fold for fold, _ in both])
    return Comparison(len(both), float(np.mean(differences)), low, high)


def comparisons(section: Section, rival: str) -> dict[float, Comparison]:
    """By target, where both were run."""
    cells = {t: compare(by_pair(section.of("search", t)), by_pair(section.of(rival, t))) for t in targets(section)}
    return {target: cell for target, cell in cells.items() if cell is not None}


def tables(section: Section) -> list[Table]:
    """Those that the runs of a section allow."""
    every = [_against(section), _medians(section), _targets(section), _widths(section), _penalties(section)]
    return [table for table in every if table.rows]


def note(section: Section) -> str:
    """What every table says of itself."""
    methods = dict.fromkeys(run.method for run in section.members)
    counts = ", ".join(f"{len(section.of(method))} {method}" for method in methods)
    return f"{len(section.members)} runs ({counts}); {section.machines}"


def title(section: Section) -> str:
    return f"{section.title}, {section.members[0].error_of}"


def _table(section: Section, name: str, caption: str, columns: Any, rows: Any, words: str = "") -> Table:
    """words: what its note says first."""
    caption = f"{caption}: {title(section)}"
    return Table(f"{section.folder}-{name}", caption, tuple(columns), tuple(rows), f"{words}{note(section)}")


def _against(section: Section) -> Table:
    columns = [("% of cost", "g"), ("runs", "d"), ("ours", ".2f")]
    for rival, words in rivals(section).items():
        columns += [(words, ".2f"), (f"ours minus {rival} [95%]", ""), ("cell", "")]
    rows = list[tuple[Any, ...]]()
    cells = {rival: comparisons(section, rival) for rival in RIVALS}
    for target in targets(section):
        ours = section.of("search", target)
        row: list[Any] = [100 * target, len(ours), _mean(ours)]
        for rival in RIVALS:
            cell = cells[rival].get(target)
            row += [_mean(section.of(rival, target)), *([cell.label, cell.verdict] if cell else [None, None])]
        rows.append(tuple(row))
    words = (
        "Mean test error in %. Differences over pairs of equal fold and seed, 95% by bootstrap over folds and pairs; "
        "won or lost only if 0 is outside. "
    )
    return _table(section, "recipe", "Ours and its rivals", columns, rows, words)


def _medians(section: Section) -> Table:
    methods = ("search", *RIVALS)
    rows = [(100 * t, *[_median(section.of(method, t)) for method in methods]) for t in targets(section)]
    columns = [("% of cost", "g"), ("ours", ".2f"), *[(words, ".2f") for words in rivals(section).values()]]
    return _table(section, "medians", "Medians", columns, rows)


def _targets(section: Section) -> Table:
    columns = (
        ("target %", "g"), ("runs", "d"), ("reached before selection, median %", ".2f"), ("largest gap", ".2f"),
        ("reached after, median %", ".2f"), ("lowest %", ".2f"), ("runs above target", "d"),
        ("weights %", ".2f"), ("mean error %", ".2f"), ("median error %", ".2f"),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for target in targets(section):
        runs = section.of("search", target)
        before, after = (_percents(runs, f"reached_{part}") for part in ("before", "after"))
        over = sum(share > target * (1 + 1e-9) for share in numbers(runs, "reached_after"))
        gap = max(abs(gap) for gap in _percents(runs, "gap"))
        weights = 100 * median(numbers(runs, "weight_share"))
        row = (100 * target, len(runs), median(before), gap, median(after), min(after), over, weights)
        rows.append((*row, _mean(runs), _median(runs)))
    return _table(section, "target", "Targets and what was reached", columns, rows)


def _widths(section: Section) -> Table:
    columns = (
        ("target %", "g"), ("method", ""), ("units of each hidden layer, medians", ""), ("weights %, median", ".2f"),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for target in targets(section):
        for method in ("search", "permuted", "scratch"):
            if runs := section.of(method, target):
                units = np.median([run.result["units"] for run in runs], axis=0)
                widths = "-".join(f"{u:g}" for u in units)
                rows.append((100 * target, method, widths, median(_percents(runs, "weight_share"))))
    return _table(section, "widths", "Widths", columns, rows)


def _penalties(section: Section) -> Table:
    """Every fixed penalty with the size it came to, beside the search whose target is nearest to that size."""
    columns = (
        ("penalty", ""), ("runs", "d"), ("weights %, median", ".2f"), ("lowest", ".2f"), ("highest", ".2f"),
        ("mean error %", ".2f"), ("median", ".2f"), ("nearest target %", "g"), ("ours there: mean error %", ".2f"),
        ("median", ".2f"), ("ours minus plain [95%]", ""),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for point in section.of_each(["penalty"]):
        runs = list(point.runs)
        shares = _percents(runs, "weight_share")
        size = max(median(shares), 1e-3) / 100
        near = min(targets(section), key=lambda t: abs(np.log(t) - np.log(size)), default=None)
        ours = [] if near is None else section.of("search", near)
        cell = compare(by_pair(ours), by_pair(runs))
        row = (power(point.value), len(runs), median(shares), min(shares), max(shares), _mean(runs), _median(runs))
        beside = (None if near is None else 100 * near, _mean(ours), _median(ours), cell.label if cell else None)
        rows.append((*row, *beside))
    return _table(section, "penalty", "The plain method, fixed penalties", columns, rows)


def _percents(runs: Iterable[Run], name: str) -> list[float]:
    return [100 * value for value in numbers(runs, name)]


def _mean(runs: list[Run]) -> float | None:
    """Of the errors, in per cent."""
    return float(np.mean(_percents(runs, "error"))) if runs else None


def _median(runs: list[Run]) -> float | None:
    return median(_percents(runs, "error")) if runs else None


def lines(section: Section) -> list[str]:
    """What a person wants to know first: a line for each target."""
    summary = list[str]()
    for target in targets(section):
        runs = section.of("search", target)
        before, after = (median(numbers(runs, name)) for name in ("reached_before", "reached_after"))
        text = f"{section.folder}: target {target:.2%} of the cost, reached {before:.2%} before the selection and "
        text += f"{after:.2%} after it, error {_median(runs):.2f}%"
        others = {rival: _median(section.of(rival, target)) for rival in RIVALS}
        text += "".join(f", {rival} {error:.2f}%" for rival, error in others.items() if error is not None)
        summary.append(f"{text} (medians of {len(runs)})")
    return summary


def write(study: Study, page: str | os.PathLike[str] | None = None) -> list[Path]:
    """The tables of every section as Markdown and CSV, under ``tables/``, and a README (or REPORT) of all of them.

    page: a page of the documentation; between its marks for a section the tables of that are put.
    """
    readme, written, parts = readme_of(study.root), list[Path](), dict[str, list[str]]()
    for section in sections_of(study):
        every = tables(section)
        written += [path for table in every for path in table.write(study.root / "tables" / table.name)]
        commands = [f"    {command}" for command in made_by(run.command for run in section.members)]
        parts[section.folder] = [*(table.markdown() for table in every), "Made by:", "", *commands, ""]
    pieces = [piece for part in parts.values() for piece in part]
    written.append(files.write(readme, "\n".join([f"# {', '.join(parts)}", "", MARK, "", *pieces])))
    if page is not None:
        marks = {name: (BEGIN.format(name=name), END.format(name=name)) for name in parts}
        written.append(put_between(Path(page), [(marks[name], "\n".join(part)) for name, part in parts.items()]))
    return written
