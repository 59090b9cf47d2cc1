"""Tables of a grid study from synthetic run files: pairs, intervals, verdicts, targets."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.report import recipe
from espalier.space import BadInput, Corrupt

HEAD = {
    "format": 1, "study": "grid", "evaluated_on": "5-fold cross-validation", "command": "espalier study --x",
    "settings": {"dataset": "digits", "epochs": 20, "widths": [64, 64, 10]}, "hardware": {"cpu": "a machine"},
}  # fmt: skip


def story(method: str, target: float, fold: int, seed: int, error: float | None, **more: Any) -> dict[str, Any]:
    result = {"test_error": error, "weight_share": target * 0.99, "units": [4], "reached_before": target + 0.01}
    result |= {"reached_after": target * 0.99, "gap": 0.01} | more
    return {"run": {"method": method, "seed": seed, "fold": fold, "target": target}, "result": result, "curve": []}


def save(folder: Path, method: str, stories: list[dict[str, Any]], **head: Any) -> Path:
    path = folder / "runs" / "digits-20_epochs" / method / "fold_0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [HEAD | {"runs_in_batch": len(stories)} | head, *stories]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def study(folder: Path) -> None:
    """Against scratch: better at 0.1, level at 0.3, worse at 0.5, in noise that the pairs share."""
    noise = np.random.default_rng(1).normal(0, 0.02, (5, 4))
    small = np.random.default_rng(2).normal(0, 0.001, (5, 4))
    for method, gain in (("search", 0.0), ("scratch", 1.0), ("permuted", 2.0)):
        shift = {0.1: 0.004 * gain, 0.3: 0.0, 0.5: -0.004 * gain}
        stories = [
            story(method, target, fold, seed, 0.1 + noise[fold, seed] + shift[target] + small[fold, seed] * (gain > 0))
            for target in shift for fold in range(5) for seed in range(4)
        ]  # fmt: skip
        save(folder, method, stories)


def test_verdicts_are_of_pairs(tmp_path: Path) -> None:
    study(tmp_path)
    (section,) = recipe.read(tmp_path)
    found = recipe.verdicts(section)
    assert {cell: word for cell, word in found.items() if cell[1] == "scratch"} == {
        (0.1, "scratch"): "won", (0.3, "scratch"): "level", (0.5, "scratch"): "lost",
    }  # fmt: skip
    cell = recipe.compare(section.of("search", 0.1), section.of("scratch", 0.1))
    assert cell is not None
    assert cell.pairs == 20
    assert cell.low < -0.004 < cell.high
    assert cell.high - cell.low < 0.002  # the noise that pairs share is out
    assert (0.1, "found") not in found


def test_an_interval_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        low, high = recipe.paired_interval((0.3 + rng.normal(0, 1, 50)).tolist(), [None] * 50)
        inside += low <= 0.3 <= high
    assert 180 <= inside <= 199


def test_the_tables(tmp_path: Path) -> None:
    study(tmp_path)
    docs = tmp_path / "page.md"
    marks = [mark.format(name="digits-20_epochs") for mark in (recipe.BEGIN, recipe.END)]
    docs.write_text(f"before\n{marks[0]}\nSTALE\n{marks[1]}\nafter\n")
    written = recipe.write(tmp_path, docs)
    assert docs in written
    text = docs.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "STALE" not in text
    assert "ours minus scratch" in text
    assert tmp_path / "README.md" in written
    against = list(csv.reader((tmp_path / "tables" / "digits-20_epochs-recipe.csv").read_text().splitlines()))
    assert [row[0] for row in against] == ["% of cost", "10.0", "30.0", "50.0"]
    assert [row[5] for row in against] == ["cell", "won", "level", "lost"]
    target = (tmp_path / "tables" / "digits-20_epochs-target.csv").read_text().splitlines()
    assert [float(x) for x in target[1].split(",")[:7]] == pytest.approx([10, 20, 11, 1, 9.9, 9.9, 0])
    page = (tmp_path / "README.md").read_text()
    assert "espalier study --x" in page
    assert "180 runs (60 permuted, 60 scratch, 60 search); a machine" in page


def test_a_run_without_a_finite_error_counts_as_all_wrong(tmp_path: Path) -> None:
    save(tmp_path, "search", [story("search", 0.1, 0, seed, None) for seed in range(2)])
    (section,) = recipe.read(tmp_path)
    assert [run.error for run in section.runs] == [1.0, 1.0]


def test_a_run_above_its_target_is_counted(tmp_path: Path) -> None:
    over = [story("search", 0.1, 0, seed, 0.1, reached_after=0.1 + 0.01 * seed) for seed in range(3)]
    save(tmp_path, "search", over)
    recipe.write(tmp_path)
    target = (tmp_path / "tables" / "digits-20_epochs-target.csv").read_text().splitlines()
    assert target[1].split(",")[6] == "2"


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a folder"):
        recipe.read(tmp_path / "nothing")
    with pytest.raises(BadInput, match="espalier study"):
        recipe.read(tmp_path)
    path = save(tmp_path, "search", [story("search", 0.1, 0, 0, 0.1)], runs_in_batch=2)
    with pytest.raises(Corrupt, match=path.name):
        recipe.read(tmp_path)
    path.write_text("{")
    with pytest.raises(Corrupt, match=path.name):
        recipe.read(tmp_path)
