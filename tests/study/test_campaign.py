"""The commands that docs/reproduction.md says are still to be run: each parses, runs, stops, goes on and reports.

Smaller settings are given behind those of the page, and the last word counts.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

typer = pytest.importorskip("typer")
from study_helpers import StopAfter  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from espalier.cli.app import app  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reproduction.md"
SMALL = {
    "connection-selection": "--step fast --layers 2 --growth 4 --epochs 2 --batch-size 4 --points 2 --part-size 0.03",
    "unit-selection": "--data digits --hidden 6,5 --epochs 1 --points 2 --part-size 0.03",
}
COMMON = "--device cpu --precision float32 --updates-at-once 2 --commit abc --quiet --json"


def commands() -> list[list[str]]:
    section = PAGE.read_text(encoding="utf-8").partition("## What is still to be run")[2]
    lines = section.replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ espalier ")) for line in lines if line.startswith("$ espalier ")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """CIFAR-10's own files, with eight images each."""
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        rows = np.concatenate(
            [draw.integers(0, 10, (8, 1), dtype=np.uint8), draw.integers(0, 256, (8, 3072), dtype=np.uint8)], 1
        )
        (folder / name).write_bytes(rows.tobytes())
    return folder.parent


def carried(source: Path, target: Path) -> None:
    """As the page says: run files, and of each batch's state the newest checkpoint and the list of its runs."""
    if (source / "runs").exists():
        shutil.copytree(source / "runs", target / "runs")
    for runs in source.glob("state/*/*/runs.json"):
        there = target / runs.parent.relative_to(source)
        there.mkdir(parents=True)
        newest = sorted(runs.parent.glob("checkpoint-*.safetensors"))[-1:]
        for path in [runs, *(other for one in newest for other in runs.parent.glob(f"{one.stem}*"))]:
            shutil.copyfile(path, there / path.name)


def test_the_page_has_the_whole_campaign():
    methods = [words[words.index("--methods") + 1] for words in commands()]
    assert methods == ["search", "random,full"] * 2 + ["random", "recipe", "recipe", "search", "fixed,dropout"]
    for words in commands():
        assert float(words[words.index("--time-limit") + 1]) < 600


@pytest.mark.long
@pytest.mark.parametrize("number", range(9))
def test_a_command_runs_stops_goes_on_elsewhere_and_reports(number, data, tmp_path, monkeypatch):
    given = commands()[number]
    words = [*given, "--data-dir", str(data), *shlex.split(f"{SMALL[given[1]]} {COMMON}")]
    if "--shares" in given:  # of 18 connections none are near to a sixth of the weights, with a path
        count = len(given[given.index("--shares") + 1].split(","))
        words += ["--shares", ",".join(["0.5", "0.6", "0.7", "0.8"][:count])]
    monkeypatch.setattr("espalier.cli.app.Stop", lambda _: StopAfter(4))
    place = 0
    while True:
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / str(place))])
        assert done.exit_code == 0, done.output
        outcome = json.loads(done.stdout.splitlines()[-1])
        if outcome["complete"]:
            break
        carried(tmp_path / str(place), tmp_path / str(place + 1))
        place += 1
        assert place < 60
    assert place
    asked = int(words[words.index("--trials") + 1])
    assert outcome["runs"] % asked == 0
    assert outcome["runs"] >= 2 - (words[words.index("--methods") + 1] == "random")
    report = CliRunner().invoke(app, ["report", str(tmp_path / str(place)), "--no-figures"])
    assert report.exit_code == 0, report.output
    assert "Size against error" in (tmp_path / str(place) / "README.md").read_text()
