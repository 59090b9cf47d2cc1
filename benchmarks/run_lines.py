"""Runs in a file, one JSON line for each: what is there is not made again. For ``encoders.py`` and ``language.py``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from espalier.report.tables import put_between


def arguments(about: str | None, out: Path | None = None) -> argparse.ArgumentParser:
    """The arguments that such a benchmark has in any case; out: the file, unless another is given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, required=out is None)
    parser.add_argument("--into", type=Path, help="write the table of the file into this page, and train nothing")
    return parser


class Lines(list[dict[str, Any]]):
    """The lines of a file, with those that are added.

    older: what lines stand for that were written before a setting was there, by its name.
    """

    def __init__(self, path: Path, older: Mapping[str, Any] | None = None) -> None:
        super().__init__(map(json.loads, path.read_text().splitlines() if path.exists() else []))
        self.path, self.older = path, dict(older or {})

    def hold(self, run: dict[str, Any]) -> bool:
        """Whether a line has all these settings."""
        return any(run.items() <= (self.older | line).items() for line in self)

    def add(self, line: dict[str, Any]) -> None:
        self.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def put(self, page: Path, marks: tuple[str, str], table: Callable[[list[dict[str, Any]]], str]) -> None:
        """Their table, into a page."""
        put_between(page, [(marks, table(self))])
