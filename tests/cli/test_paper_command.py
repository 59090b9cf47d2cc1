"""`espalier paper unit-selection` from the command line: small, stopped, continued, and refused in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from espalier.cli.app import app  # noqa: E402
from espalier.space import BadInput  # noqa: E402
from espalier.train.loop import Stop  # noqa: E402
from espalier.train.setting import number  # noqa: E402

SMALL = [
    "paper", "unit-selection", "--data", "digits", "--device", "cpu", "--hidden", "6,6,6", "--epochs", "1",
    "--trials", "1", "--penalties", "2^-2,-2^0", "--sizes", "0.5,1", "--points", "2", "--quiet", "--commit", "abc",
]  # fmt: skip


def invoke(*words):
    return CliRunner().invoke(app, [*SMALL, *map(str, words)])


def test_the_command_runs_and_reports(tmp_path):
    done = invoke("--out", tmp_path)
    assert done.exit_code == 0, done.output
    names = sorted(f"{p.parent.name}/{p.name}" for p in tmp_path.glob("runs/**/*.jsonl"))
    assert names == [
        "fixed+dropout/size_0.5_to_1.0-rate_0.5-seed_0.jsonl", "search/penalty_-1.0_to_0.25-seed_0.jsonl",
    ]  # fmt: skip
    assert (tmp_path / "README.md").exists()
    story = json.loads(next(tmp_path.glob("runs/**/penalty*.jsonl")).read_text().splitlines()[0])
    assert story["commit"] == "abc"
    assert story["settings"]["widths"] == [64, 6, 6, 6, 10]
    assert "README.md" in done.output


def test_a_limit_of_time_stops_it_and_the_same_command_goes_on(tmp_path):
    stopped = invoke("--out", tmp_path, "--time-limit", "1e-6")
    assert stopped.exit_code == 0, stopped.output
    assert stopped.stdout.endswith("stopped by its time limit; the same command goes on\n")
    assert not list(tmp_path.glob("runs/**/*.jsonl"))
    done = invoke("--out", tmp_path, "--no-report", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["runs"] == 5
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--penalties", "2^-6,strong"], "strong"),
        (["--methods", "search,magic"], "magic"),
        (["--hidden", "6,six"], "six"),
        (["--device", "abacus"], "abacus"),
        (["--precision", "fp4"], "fp4"),
        (["--data", "mnistt"], "mnistt"),
        (["--time-limit", "-1"], "time_limit"),
        (["--inductor", "fast"], "--inductor"),
    ],
)
def test_bad_input_is_one_clear_line(words, said, tmp_path):
    done = invoke("--out", tmp_path, *words)
    assert isinstance(done.exception, (BadInput, SystemExit))
    assert said in f"{done.exception} {done.output}"
    assert not list(tmp_path.iterdir())


def test_bad_input_ends_with_exit_code_2(espal, tmp_path):
    line = espal(*SMALL, "--out", tmp_path, "--penalties", "many").line
    assert line.strip() == "espalier: 'many' is not a number; write 0.015625 or 2^-6"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_stop_what_a_study_asks(told):
    stop = Stop()
    with stop.on_interrupt():
        assert not stop.now()
        signal.raise_signal(told)
        assert stop.now()
    assert stop.interrupted


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_stops_it_cleanly_and_the_same_command_goes_on(tmp_path):
    words = [word for word in SMALL if word != "--quiet"]
    words[words.index("--epochs") + 1] = "300"
    words = [sys.executable, "-m", "espalier", *words, "--out", str(tmp_path), "--methods", "search"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while "updates," not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip().endswith("espalier: stopped; the same command goes on from the last checkpoint")
    assert list(tmp_path.glob("state/**/*.safetensors"))
    assert not list(tmp_path.glob("runs/**/*.jsonl"))


def test_numbers_as_the_paper_writes_them():
    assert [number(w) for w in ("2^-9", "-2^0", "2^3", "1e-3")] == [2**-9, -1.0, 8.0, 0.001]
