"""Numbers and facts of runs in words, tables as Markdown and as CSV, the pages that they are put into, and the tables
that any study has.

A page is generated completely, or between two marks: what people have written is left alone.
"""

from __future__ import annotations

import contextlib
import csv
import html
import io
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier import files, schema
from espalier.report.run_reader import AXES, Run
from espalier.report.significance import median, quartiles
from espalier.report.study_reader import Section, Study, grouped
from espalier.space import BadInput, Corrupt

SHARE, ERROR, COUNT, LOSS = ".1%", ".2%", "g", ".4g"
MARK = "Made from the files under `runs/`; edits are overwritten."
PAGES = ("README.md", "REPORT.md")
SIGNED = re.compile(r"[+-][-+0-9.,^ %\[\]]*")  # numbers with their signs and ranges
BESIDES = {"--commit": 1, "--time-limit": 1, "--page": 1, "--reproduction": 1}  # flags and how many words they take
BESIDES |= {"--quiet": 0, "--no-report": 0, "--report": 0, "--json": 0, "--keep-state": 0}
SLICES = ("--methods", "--targets", "--penalties", "--seeds", "--trials", "--first-seed")
FEW = 4  # calls that are still listed one by one
Marks = tuple[str, str]
Column = tuple[str, str, Callable[[Any], Any]]  # heading, format, and the value of an item


# ---- in words --------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """Three digits at least, and no more than can be read.

    >>> percent(0.01482), percent(0.1826), percent(1.0), percent(0.00004), percent(None)
    ('1.48%', '18.3%', '100%', '0.004%', '')
    """
    if value is None:
        return ""
    size = abs(100 * value)
    if size == 0 or size >= 99.95:
        return f"{100 * value:.0f}%"
    return f"{100 * value:.1f}%" if size >= 10 else f"{100 * value:.2f}%" if size >= 0.095 else f"{100 * value:.2g}%"


def amount(value: float | None) -> str:
    """A number of any size in four digits.

    >>> amount(0.052279), amount(187500.0), amount(12.5)
    ('0.05228', '187,500', '12.5')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """
    >>> duration(4.39), duration(0.4), duration(200), duration(8000)
    ('4.4 s', '0.4 s', '3 min 20 s', '2 h 13 min')
    """
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def score(measure: str, value: float | None) -> str:
    return percent(value) if measure == "error" else amount(value)


def kept(run: Run, most: int = 6) -> str:
    """Gates that ship in each group, of how many."""
    parts = [f"{count}" if total is None else f"{count}/{total}" for count, total in run.kept.values()]
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} groups more" if len(parts) > most else "")


def facts(run: Run) -> list[tuple[str, str]]:
    """All that is known of a run, in a few words each."""
    words = [
        ("method", run.called),
        ("setting", run.label),
        ("fold", "" if run.fold is None else str(run.fold)),
        ("seed", "" if run.seed is None else str(run.seed)),
        (f"error, {run.error_of}", percent(run.error)),
        (f"loss, {run.error_of}", amount(run.loss)),
        *((f"{name} kept", percent(share)) for name, share in run.shares.items()),
        ("gates kept", kept(run)),
        ("updates", "" if run.updates is None else f"{run.updates:,}"),
        ("time", duration(run.seconds)),
        ("on", run.machine),
        ("state", run.state),
    ]
    return [(name, value) for name, value in words if value]


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def headline(section: Section) -> str:
    """The one sentence to read: how small a network of the search may be for an error close to its lowest."""
    axis = section.axes[0] if section.axes else ""
    front = section.front(axis, "search") if section.measure else []
    if not front:
        return ""
    measure = section.measure or "error"
    x, best, _ = front[-1]
    if len(section.marks) == 1:
        said = f"{score(measure, best)} ({section.error_of})"
        return f"The {section.middle}{measure} is {said}, at {percent(x)} of the {axis}."
    at = f"{score(measure, best)}, at {percent(x)} of the {axis}"
    lowest = f"The lowest {section.middle}{measure} of the search is {at}"
    small, value, _ = next(one for one in front if one[1] <= 1.1 * best)
    if percent(small) == percent(x):
        return f"{lowest}."
    return f"{lowest}; within a tenth of it, at {score(measure, value)}, {percent(small)} of them are enough."


def layer(place: int, name: str) -> str:
    """A group of gates by its place from the input, and by the name of its module where that is a name.

    >>> layer(1, "stem"), layer(2, "3"), layer(1, "layer 1"), layer(3, "block 3")
    ('layer 1 · stem', 'layer 2', 'layer 1', 'block 3')
    """
    if re.fullmatch(r"(layer|block) \d+", name):
        return name
    return f"layer {place}" if name.isdigit() else f"layer {place} · {name}"


def made_by(commands: Iterable[str]) -> list[str]:
    """Lines that tell how runs were made: each distinct command, or the one that many of them are slices of.

    >>> made_by(["espalier study --quiet --seeds 2 --out x", "espalier study --seeds 2 --out x --commit abc"])
    ['espalier study --seeds 2 --out x']
    >>> made_by(f"espalier study --out x --first-seed {k} --seeds 2" for k in range(0, 10, 2))
    ['espalier study --out x   # in 5 calls, which share out --seeds, --first-seed; each run file has its own']
    """
    calls = dict.fromkeys(_without(command, BESIDES) for command in commands if command)
    lines = list[str]()
    for base, slices in grouped(calls, lambda call: _without(call, dict.fromkeys(SLICES, 1))).items():
        if len(slices) <= FEW:
            lines += slices
            continue
        shared = ", ".join(flag for flag in SLICES if any(flag in call.split() for call in slices))
        lines.append(f"{base}   # in {len(slices)} calls, which share out {shared}; each run file has its own")
    return lines


def _without(command: str, flags: dict[str, int]) -> str:
    try:
        words, kept = shlex.split(command), list[str]()
    except ValueError:  # not one of ours
        return command
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in flags:
            del words[: 0 if equals else flags[name]]
        else:
            kept.append(word)
    return shlex.join(kept)


# ---- tables ----------------------------------------------------------------------------------------------------------


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
