"""`espalier demo`: every part of it, small; what it writes is what it says; stopped, continued, and run again."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.data import load
from espalier.report import Section, read
from espalier.report.run_reader import _of_record
from espalier.train import evaluate
from espalier.train.batched.batch import Batch

pytest.importorskip("typer")
from espalier.cli import demo as demonstration


def weights(hidden):
    return sum(a * b for a, b in pairwise((64, *hidden, 10)))


@pytest.fixture
def narrow(monkeypatch):
    """One target and the uncut network."""
    monkeypatch.setattr(demonstration, "TARGETS", (0.25, 1.0))


def test_the_demo_shows_and_writes_all_of_its_parts(espal, tmp_path, narrow):
    pytest.importorskip("onnxscript")
    out = tmp_path / "demo"
    done = espal("demo", "--epochs", 1, "--seeds", 2, "--out", out, "--quiet")
    assert done.code == 0, done.err
    assert not done.err
    shown = " ".join(done.out.split())
    assert "0 of 2 networks of the batch exceed their target" in shown
    assert "25% of the weights" in shown
    assert "30% of the MACs" in shown
    assert "uncut" in shown
    assert shown.count("64 at once: ") == 2
    assert "Equal is the number of examples read, not the time: 4 networks of the search and its control took" in shown
    assert "the control: their signal is shuffled among the gates" in shown

    stories = list[dict[str, Any]]()
    for path in (out / "runs").rglob("*.jsonl"):
        head, *runs = map(json.loads, path.read_text().splitlines())
        stories += [head | one for one in runs]
    asked = [(story["run"]["method"], story["run"]["target"], story["run"]["seed"]) for story in stories]
    cells = [("permuted", 0.25), ("scratch", 0.25), ("scratch", 1.0), ("search", 0.25)]
    assert sorted(asked) == [(*cell, seed) for cell in cells for seed in (0, 1)]
    for story in stories:
        kept = story["result"]["units"]
        assert story["result"]["weight_share"] == pytest.approx(weights(kept) / weights((64, 64)), abs=1e-6)
        assert weights(kept) <= weights((64, 64)) * story["run"]["target"]
        # Equally many examples, whatever the batch: two passes over 1,344 of them.
        assert 2 * story["settings"]["batch_size"] * story["result"]["updates"] == 2 * 1344
        assert story["curve"][-1]["test_error"] is not None
        assert story["command"].startswith("espalier demo")

    runs = [run for section in read(out).sections for run in section.runs if run.searches]
    assert all(abs(run.settled_at - run.updates / 2) < 1 for run in runs)  # where curves cease to be dotted

    # The networks that it ships are as good as the table says.
    data = load("digits")
    for name, factory in {
        "quarter": lambda: espalier.models.MLP(64, (256, 256), 10),
        "images": lambda: espalier.models.CNN(1, (32, 64, 64), 10),
    }.items():
        small = espalier.load(out / f"{name}-small", factory)
        found = evaluate(small, data, loss=torch.nn.functional.cross_entropy).error
        assert found == json.loads((out / name / "result.json").read_text())["validation_error"]
        assert f"error {found:.2%} on the test part" in shown
        run = read(out / name).sections[0].runs[0]
        assert (run.state, run.error) == ("finished", found)
        assert (out / f"{name}-small" / "model.onnx").exists()
    assert not (out / "state").exists()
    assert json.loads((out / "demo.json").read_text())["finished"] is True


def test_small_networks_are_trained_by_one_thread(espal, tmp_path, monkeypatch):
    before, seen = torch.get_num_threads(), []

    def stopped(*_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(demonstration, "_sizes", stopped)
    torch.set_num_threads(2)
    try:
        assert espal("demo", "--out", tmp_path / "d").code == 130
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_stopped_demo_goes_on_and_a_finished_one_starts_anew(espal, tmp_path, narrow, monkeypatch):
    words = ("demo", "--epochs", 1, "--seeds", 1, "--out", tmp_path / "d", "--quiet")
    monkeypatch.setattr(demonstration, "_can_export", lambda console: False)
    monkeypatch.setattr(demonstration, "_page", lambda out: None)  # the other test looks at it
    both = demonstration._singles
    monkeypatch.setattr(demonstration, "_singles", lambda epochs: both(epochs)[:1])

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demonstration.training, "run", stopped)
        done = espal(*words)
    assert done.code == 130
    assert "the same command goes on" in done.err
    with monkeypatch.context() as patch:

        def again(*_):
            raise AssertionError("the batch was trained before")

        patch.setattr(Batch, "advance", again)
        assert espal(*words).code == 0
    first = json.loads((tmp_path / "d" / "quarter" / "result.json").read_text())
    done = espal("demo", "--epochs", 2, "--seeds", 1, "--out", tmp_path / "d", "--quiet")
    assert done.code == 0, done.err
    second = json.loads((tmp_path / "d" / "quarter" / "result.json").read_text())
    assert second["updates"] == 2 * first["updates"]


def test_ctrl_c_among_the_sizes_ends_the_demo(espal, tmp_path, narrow, monkeypatch):
    advance = Batch.advance

    def pressed(*given):
        signal.raise_signal(signal.SIGINT)
        return advance(*given)

    monkeypatch.setattr(Batch, "advance", pressed)
    done = espal("demo", "--epochs", 1, "--seeds", 1, "--out", tmp_path / "d", "--quiet")
    assert (done.code, done.err.count("goes on from the last checkpoint")) == (130, 1)
    assert not (tmp_path / "d" / "quarter").exists()


def test_folders_of_somebody_else_are_left_alone(espal, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("mine")
    assert "did not write" in espal("demo", "--epochs", 1, "--out", tmp_path).line
    (tmp_path / "demo.json").write_text("[]")
    assert "demo.json" in espal("demo", "--epochs", 1, "--out", tmp_path).line
    assert (tmp_path / "runs" / "mine").read_text() == "mine"


def test_the_structure_shown_is_of_the_run_of_the_middle_error_as_on_the_page(narrow):
    def run(variant, width, error, **asked):
        result = {"units": [width, 8], "weight_share": 0.2, "test_error": error}
        record = {"settings": {}, "seconds": 1.0, "versions": {}, "hardware": {}, "curve": [], "result": result}
        asked |= {"method": variant, "variant": variant}
        return _of_record(Path(f"runs/digits/{variant}/{width}.json"), Path(variant), record | {"run": asked})

    led = [run("search", width, error, target=0.25) for width, error in {5: 0.4, 6: 0.2, 7: 0.1}.items()]
    others = [
        run("permuted", 9, 0.3, target=0.25),
        run("scratch", 3, 0.5, size=0.2),
        run("scratch", 64, 0.05, size=1.0),
    ]
    table = demonstration._size_table(Section("digits", "digits", "digits", (*led, *others)), 3)
    columns = [list(column.cells) for column in table.columns]
    assert columns[2] == ["64-6-8-10", ""]
    assert columns[3:5] == [["20.0%", ""], ["30.0%", ""]]
    assert columns[5:] == [["64-3-8-10", "64-64-8-10"], ["50.0%", "5.0%"]]
