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
    assert counts["damaged files: cases"] == 150
    assert counts["damaged files: refused"] > 50
    assert counts["changed inputs: refused"] == counts["changed inputs: cases"] == 21
    assert counts["odd calls: cases"] == 300
