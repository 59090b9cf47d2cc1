"""Tables of digits in the docs that are typed by hand are those of the committed runs."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

from espalier.cli.demo import RIVALS_BATCH
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


def test_rivals_of_the_demo_have_the_batch_that_suited_them_on_held_out_folds() -> None:
    means = dict[int, list[float]]()
    for section in read(ROOT / "results" / "demo").sections:
        (batch,) = {2 * run.settings["batch_size"] for run in section.runs}  # under one mask twice as many
        assert all(run.error_of.startswith("held-out training images") for run in section.runs)
        cells = [[100 * run.number("error") for run in section.of("scratch", t)] for t in (0.05, 0.1, 0.25, 0.5, 1.0)]
        assert [len(cell) for cell in cells] == [15] * 5
        means[batch] = [*map(fmean, cells), fmean(value for cell in cells for value in cell)]
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (16|32|64) \| (.*) \|$", page, re.MULTILINE)
    assert {int(batch): cells.split(" | ") for batch, cells in rows} == {
        batch: [f"{mean:.2f}" for mean in row] for batch, row in means.items()
    }
    assert min(means, key=lambda batch: means[batch][-1]) == RIVALS_BATCH
