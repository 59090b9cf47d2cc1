"""Tables as Markdown and as CSV, the pages that they are put into, and the tables that any study has.

A page is generated completely, or between two marks: what people have written is left alone.
"""

from __future__ import annotations

import contextlib
import csv
import html
import io
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier import files, schema
from espalier.report.phrases import counted, kept
from espalier.report.run_reader import AXES
from espalier.report.significance import median, quartiles
from espalier.report.study_reader import Section, Study
from espalier.space import BadInput, Corrupt

SHARE, ERROR, COUNT, LOSS = ".1%", ".2%", "g", ".4g"
MARK = "Made from the files under `runs/`; edits are overwritten."
PAGES = ("README.md", "REPORT.md")
SIGNED = re.compile(r"[+-][-+0-9.,^ %\[\]]*")  # numbers with their signs and ranges
Marks = tuple[str, str]
Column = tuple[str, str, Callable[[Any], Any]]  # heading, format, and the value of an item


@dataclass(frozen=True)
class Table:
    """columns: heading and format ("" for text, else as in ``format(value, ...)``). CSV holds the values unrounded."""

    name: str
    caption: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    @classmethod
    def of(cls, name: str, caption: str, columns: Iterable[Column], items: Iterable[Any], note: str = "") -> Table:
        """A row for each item."""
        every = list(columns)
        rows = tuple(tuple(value(item) for _, _, value in every) for item in items)
        return cls(name, caption, tuple((heading, form) for heading, form, _ in every), rows, note)

    def markdown(self) -> str:
        lines = [f"**{escaped(self.caption)}**", "", _line([heading for heading, _ in self.columns])]
        lines.append("|" + "|".join("---" if not form else "---:" for _, form in self.columns) + "|")
        lines += [_line([_cell(v, form) for v, (_, form) in zip(row, self.columns, strict=True)]) for row in self.rows]
        if self.note:
            lines += ["", f"*{escaped(self.note)}*"]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([heading for heading, _ in self.columns])
        writer.writerows([[_plain(value) for value in row] for row in self.rows])
        return text.getvalue()

    def write(self, stem: Path) -> list[Path]:
        """stem.md and stem.csv."""
        parts = {"md": self.markdown(), "csv": self.csv()}
        return [files.write(stem.with_name(f"{stem.name}.{kind}"), text) for kind, text in parts.items()]


def escaped(text: str) -> str:
    """Text that Markdown and HTML leave alone, whatever a run is called."""
    return html.escape(text, quote=False).replace("|", "&#124;")


def _plain(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula and not SIGNED.fullmatch(value) else value


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    return format(value, form) if form and not isinstance(value, str) else escaped(str(value))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def readme_of(root: Path) -> Path:
    """Where the page of a folder goes: README.md, or REPORT.md beside a README.md that somebody else has written."""
    for page in (root / name for name in PAGES):
        if not os.path.lexists(page):
            return page
        with contextlib.suppress(OSError, Corrupt):
            if MARK.encode() in schema.content(page).splitlines()[:5]:
                return page
    raise BadInput(
        f"{root} has a README.md and a REPORT.md that no report has made (their first lines would say so); move one of "
        "them away"
    )


def put_between(page: Path, parts: Iterable[tuple[Marks, str]]) -> Path:
    """Replace what stands between each pair of marks; all of it, or nothing where a pair is lacking."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{page} cannot be read: {error.strerror}") from None
    for (begin, end), part in parts:
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            lines = f"it needs the lines {begin!r} and {end!r} once each"
            raise BadInput(f"{page} has no place for generated text: {lines}")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{part.strip()}\n\n{end}{rest.split(end)[1]}"
    return files.write(page, text)


def trade_off(section: Section) -> Table:
    """A row for each setting of each method: shares and errors over its seeds."""
    measure = section.measure or "error"
    form = ERROR if measure == "error" else LOSS
    columns = [("method", ""), ("setting", ""), ("runs", COUNT)]
    columns += [(f"{axis} kept", SHARE) for axis in section.axes]
    columns += [(f"{measure}, {name}", form) for name in ("median", "25%", "75%")]
    front = {id(point) for axis in section.axes for _, _, point in section.front(axis)}
    rows = list[tuple[Any, ...]]()
    for one in section.series:
        for point in one.points:
            shares = [median(known) if (known := point.shares(axis)) else None for axis in section.axes]
            errors = point.errors(measure)
            low, mid, high = quartiles(errors) if errors else (None, None, None)
            mark = "yes" if id(point) in front else ""
            rows.append((one.label, point.label, len(point.done), *shares, mid, low, high, mark))
    caption = f"Size against {measure} ({section.error_of}; medians over {section.over}): {section.title}"
    return Table("trade-off", caption, (*columns, ("Pareto front", "")), tuple(rows), section.note)


def runs(study: Study, *, short: bool = False) -> Table:
    """A row for each run, with the columns that are known of any. short: without what is the same for all runs."""
    shares = [name for name in AXES if any(name in run.shares for run in study.runs)]
    columns = [
        ("method", ""), ("setting", ""), ("fold", COUNT), ("seed", COUNT), ("error", ERROR), ("loss", LOSS),
        *((f"{name} kept", SHARE) for name in shares), ("gates kept", ""), ("updates", ",d"), ("seconds", ",.1f"),
        ("state", ""), ("hardware", ""), ("section", ""), ("run", ""),
    ]  # fmt: skip
    rows = [
        (
            run.called, run.label, run.fold, run.seed, run.error, run.loss, *map(run.share, shares),
            kept(run, most=1000), run.updates, run.seconds, run.state, run.machine, section.title, run.name,
        )
        for section in study.sections for run in section.runs
    ]  # fmt: skip
    full = [i for i in range(len(columns)) if any(row[i] not in (None, "") for row in rows)]
    if short:
        same = {"state", "hardware", "section"}
        full = [i for i in full if columns[i][0] not in same or len({row[i] for row in rows}) > 1]
    note = f"{counted(len(rows), 'run')} of {study.name}"
    cells = tuple(tuple(row[i] for i in full) for row in rows)
    return Table("runs", f"The runs of {study.name}", tuple(columns[i] for i in full), cells, note)
