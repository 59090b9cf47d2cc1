"""A table: rows of values with a caption, written as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.report.files import put


@dataclass(frozen=True)
class Table:
    """columns: heading and format ("" for text, else as in ``format(value, ...)``). CSV holds the values unrounded."""

    name: str
    caption: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{escaped(self.caption)}**", "", _line([heading for heading, _ in self.columns])]
        lines.append("|" + "|".join("---" if not form else "---:" for _, form in self.columns) + "|")
        lines += [_line([shown(v, form) for v, (_, form) in zip(row, self.columns, strict=True)]) for row in self.rows]
        if self.note:
            lines += ["", f"*{escaped(self.note)}*"]
        return "\n".join(lines) + "\n"

    def write(self, stem: Path) -> list[Path]:
        """stem.md and stem.csv."""
        return [
            put(stem.with_name(f"{stem.name}.md"), self.markdown()),
            put(stem.with_name(f"{stem.name}.csv"), self.csv()),
        ]

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([heading for heading, _ in self.columns])
        writer.writerows([["" if value is None else value for value in row] for row in self.rows])
        return text.getvalue()


def shown(value: Any, form: str) -> str:
    if value is None:
        return ""
    return format(value, form) if form and not isinstance(value, str) else escaped(str(value))


def escaped(text: str) -> str:
    """Text that Markdown and HTML leave alone, whatever a run is called."""
    for sign, word in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
        text = text.replace(sign, word)
    return text


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
