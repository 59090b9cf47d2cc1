"""Pages that are made from runs, wholly or between two marks; what people have written is left alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from espalier.report.files import put
from espalier.space import BadInput

MARK = "Made from the files under `runs/`; edits are overwritten."
PAGES = ("README.md", "REPORT.md")
Marks = tuple[str, str]


def place(root: Path) -> Path:
    """Where the page of a folder goes: README.md, or REPORT.md beside a README.md that somebody else has written."""
    for page in (root / name for name in PAGES):
        if not page.exists() or MARK in page.read_text(encoding="utf-8", errors="replace").splitlines()[:5]:
            return page
    raise BadInput(
        f"{root} has a README.md and a REPORT.md that no report has made (their first lines would say so); move one of "
        "them away"
    )


def into(page: Path, parts: Iterable[tuple[Marks, str]]) -> Path:
    """Replace what stands between each pair of marks; all of it, or nothing where a pair is lacking."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{page} cannot be read: {error.strerror}") from None
    for (begin, end), part in parts:
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise BadInput(
                f"{page} has no place for generated text: it needs the lines {begin!r} and {end!r} once each"
            )
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{part.strip()}\n\n{end}{rest.split(end)[1]}"
    return put(page, text)
