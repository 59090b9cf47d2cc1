"""The snippets of docs/training.md run, are short, and its table is that of the presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from espalier.train import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_snippet_is_under_15_lines() -> None:
    assert len(BLOCKS) >= 6
    for block in BLOCKS:
        assert len(block.strip().splitlines()) < 15


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/training.md", "exec"), names)
    said = capsys.readouterr()
    assert "reached" in said.err
    scores = re.findall(r"error=([0-9.]+)", said.out)
    assert len(scores) == 3
    assert all(float(score) < 0.2 for score in scores)
    assert (tmp_path / "runs" / "digits" / "small").is_dir()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("signal", "signal"),
        ("theta's learning rate times degrees of freedom", "theta_rate"),
        ("theta's learning rate times updates of the search", "theta_way"),
        ("even", "even"),
        ("theta at the start", "initial"),
        ("begin", "begin"),
        ("ramp", "ramp"),
        ("settle", "settle"),
        ("weights", "weights_learning_rate"),
        ("weight decay", "weight_decay"),
        ("the rate falls", "drops"),
    ],
)
def test_the_table_of_presets_is_true(row: str, field: str) -> None:
    (line,) = [
        line
        for line in PAGE.splitlines()
        if line.startswith(f"| {row} ") or line.startswith((f"| {row}:", f"| {row},"))
    ]
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    values = [getattr(PRESETS[name], field) for name in ("default", "ranked", "paper", "finetune")]
    assert cells == [shown(value) for value in values]


def shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{v:g}" for v in value)
    return "line" if value is None else value if isinstance(value, str) else f"{value:g}"
