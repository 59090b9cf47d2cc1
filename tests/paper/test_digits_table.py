"""The table of digits in docs/evidence.md is that of the committed runs."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

from espalier.report import read

ROOT = Path(__file__).parents[2]


def test_the_table_of_digits_is_that_of_the_runs() -> None:
    errors: dict[tuple[str, float], list[float]] = {}
    for run in read(ROOT / "results" / "evidence" / "digits").runs:
        key = run.record["run"]["method"], run.record["run"]["target"]
        errors.setdefault(key, []).append(100 * run.record["result"]["test_error"])
    assert {len(column) for column in errors.values()} == {50}
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    section = page[page.index("## Digits") : page.index("## How it was run")]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    assert len(rows) == 6
    for share, *shown in rows:
        means = [fmean(errors[method, int(share) / 100]) for method in ("search", "scratch", "found", "permuted")]
        assert [f"{mean:.2f}" for mean in means] == shown
