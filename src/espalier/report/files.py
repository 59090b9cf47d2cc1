"""Files of a report: put in place whole or not at all; pages that are made wholly, or between two marks.

What was there before stays until the new file is complete, and what people have written is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from espalier.space import BadInput, EspalierError

PARTIAL = ".partial"
MARK = "Made from the files under `runs/`; edits are overwritten."
PAGES = ("README.md", "REPORT.md")
Marks = tuple[str, str]


class NotWritten(EspalierError):
    """A file of a report could not be written; what was there before is intact."""


def put(path: Path, data: bytes | str) -> Path:
    """Write beside it, flush to the disk, rename."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else error.strerror or str(error)
        way = "make room" if full else "make its folder one that can be written to"
        raise NotWritten(
            f"{path} could not be written: {why}. The runs are intact; {way}, and ask for the report again"
        ) from error
    return path


def readme_of(root: Path) -> Path:
    """Where the page of a folder goes: README.md, or REPORT.md beside a README.md that somebody else has written."""
    for page in (root / name for name in PAGES):
        if not page.exists() or MARK in page.read_text(encoding="utf-8", errors="replace").splitlines()[:5]:
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
            raise BadInput(
                f"{page} has no place for generated text: it needs the lines {begin!r} and {end!r} once each"
            )
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{part.strip()}\n\n{end}{rest.split(end)[1]}"
    return put(page, text)
