"""A short, seeded part of the fault campaign: nothing lost, nothing wrong, nothing let in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("typer")


@pytest.mark.skipif(sys.platform != "linux", reason="the campaign forks processes and limits their memory")
def test_a_short_campaign_finds_nothing():
    words = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--short"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
    story = json.loads(done.stdout)
    assert story["failures"] == []
    assert done.returncode == 0
    counts = story["counts"]
    assert counts["kills: cases"] + counts["errors: cases"] == 16
    assert counts["kills: killed"] == counts["kills: cases"]  # a kill that did not happen would prove nothing
    assert counts["damaged files: cases"] >= 150
    assert counts["damaged files: refused"] > 50
    assert counts["changed inputs: refused"] == counts["changed inputs: cases"] == 25
    assert counts["odd calls: cases"] == 300


def test_the_page_of_the_long_campaign_is_made_of_its_figures():
    folder = ROOT / "results" / "faults"
    stories = [json.loads(path.read_text()) for path in sorted(folder.glob("campaign*.json"))]
    page = (folder / "README.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    shown = [int(row[1].replace(",", "")) for row in rows[1:]]
    kinds = ("kills", "errors", "damaged files", "two processes", "changed inputs", "odd calls")
    assert shown == [sum(story["counts"][f"{kind}: cases"] for story in stories) for kind in kinds]
    assert all((story["failed"], story["failures"], story["command"] in page) == (0, [], True) for story in stories)
    assert all(count >= least for count, least in zip(shown, (1000, 1, 20_000, 1, 1, 100_000), strict=True))
    assert all(cell.strip() == "0" for row in rows[1:] for cell in row[2:])
