"""Tables that any study has: its runs, and size against error of each setting."""

from __future__ import annotations

from typing import Any

from espalier.report.sections import Section, Study, spread, variant_label
from espalier.report.statistics import median
from espalier.report.story import AXES
from espalier.report.table import Table
from espalier.report.words import counted, kept

SHARE, ERROR, COUNT, LOSS = ".1%", ".2%", "g", ".4g"


def trade_off(section: Section) -> Table:
    """A row for each setting of each method: shares and errors over its seeds."""
    measure = section.measure or "error"
    form = ERROR if measure == "error" else LOSS
    columns = [("method", ""), ("setting", ""), ("runs", COUNT)]
    columns += [(f"{axis} kept", SHARE) for axis in section.axes]
    columns += [(f"{measure}, median", form), (f"{measure}, 25%", form), (f"{measure}, 75%", form)]
    rows = list[tuple[Any, ...]]()
    for one in section.series:
        for point in one.points:
            row: list[Any] = [one.label, point.label, len(point.done)]
            row += [median(found) if (found := point.shares(axis)) else None for axis in section.axes]
            low, middle, high = spread(point.errors(measure)) or (None, None, None)
            rows.append((*row, middle, low, high))
    front = {id(point) for axis in section.axes for _, _, point in section.front(axis)}
    marked = [id(point) in front for point in section.points()]
    columns.append(("Pareto front", ""))
    rows = [(*row, "yes" if mark else "") for row, mark in zip(rows, marked, strict=True)]
    caption = f"Size against {measure} ({section.error_of}; medians over {section.over}): {section.title}"
    return Table("trade-off", caption, tuple(columns), tuple(rows), section.note)


def runs(study: Study, *, short: bool = False) -> Table:
    """A row for each run, with the columns that are known of any. short: without what is the same for all runs."""
    shares = [name for name in AXES if any(name in run.shares for run in study.runs)]
    columns = [("method", ""), ("setting", ""), ("fold", COUNT), ("seed", COUNT), ("error", ERROR), ("loss", LOSS)]
    columns += [
        *((f"{name} kept", SHARE) for name in shares),
        ("gates kept", ""),
        ("updates", ",d"),
        ("seconds", ",.1f"),
    ]
    columns += [("state", ""), ("hardware", ""), ("section", ""), ("run", "")]
    rows = list[tuple[Any, ...]]()
    for section in study.sections:
        for run in section.runs:
            row: list[Any] = [
                variant_label(run.variant),
                run.setting.label if run.setting else "",
                run.fold,
                run.seed,
                run.error,
                run.loss,
            ]
            row += [*(run.share(name) for name in shares), kept(run, most=1000), run.updates, run.seconds]
            rows.append((*row, run.state, run.machine, section.title, run.name))
    full = [i for i in range(len(columns)) if any(row[i] not in (None, "") for row in rows)]
    if short:
        same = {"state", "hardware", "section"}
        full = [i for i in full if columns[i][0] not in same or len({row[i] for row in rows}) > 1]
    rows = [tuple(row[i] for i in full) for row in rows]
    note = f"{counted(len(rows), 'run')} of {study.name}"
    return Table("runs", f"The runs of {study.name}", tuple(columns[i] for i in full), tuple(rows), note)
