"""Networks of other libraries: each is tried in a process of its own, what fails has a line, and a table is made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import libraries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gates.md"


def networks():
    def build(*layers):
        return lambda: (nn.Sequential(*layers), torch.randn(3, 4, dtype=torch.float64))

    yield "found", build(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))
    yield "nothing", build(nn.Linear(4, 2))
    yield "broken", build(nn.Linear(5, 2))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_every_network_has_a_line(tmp_path, monkeypatch):
    out = tmp_path / "torch.jsonl"
    monkeypatch.setitem(libraries.LIBRARIES, "torch", networks)
    for words in ([], ["--again", "--only", "found"], []):
        monkeypatch.setattr(sys, "argv", ["libraries.py", "torch", "--out", str(out), *words])
        libraries.main()
    broken, found, nothing = (json.loads(line) for line in out.read_text().splitlines())
    assert (found["gates"], found["groups"], found["cost_difference"], found["error_reload"]) == (8, 1, 0, 0)
    assert max(found["error_eval"], found["error_train"]) < 1e-12
    assert nothing["no_gates"].startswith("no gates")
    assert broken["error"].startswith("RuntimeError: mat1 and mat2")
    row = libraries.table([broken, found, nothing]).splitlines()[-1]
    assert row == f"| torch {torch.__version__} | 3 | 1 | 1 | 1 | 1 | 0 | 1 |"


def test_the_page_has_the_table_of_the_lines():
    lines = libraries.lines_of(libraries.RESULTS)
    assert libraries.table(lines) in PAGE.read_text()
    assert f" {len(lines)} networks of " in (PAGE.parents[1] / "README.md").read_text()
