"""`espalier paper connection-selection` from the command line, on images in CIFAR-10's own format."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from espalier.cli.app import app  # noqa: E402
from espalier.space import BadInput  # noqa: E402

FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
SMALL = [
    "paper", "connection-selection", "--device", "cpu", "--layers", "2", "--growth", "4", "--epochs", "1", "--trials",
    "1", "--batch-size", "4", "--penalties", "2^-2,-2^0", "--shares", "0.5", "--points", "2", "--commit", "abc",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five batches and a test batch of six images each, ten classes."""
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in FILES:
        labels, images = draw.integers(0, 10, 6), draw.integers(0, 256, (6, 3072), dtype=np.uint8)
        (folder / name).write_bytes(b"".join(bytes([y]) + x.tobytes() for y, x in zip(labels, images)))
    return folder.parent


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("ESPALIER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def invoke(*words):
    return CliRunner().invoke(app, [*SMALL, "--quiet", *map(str, words)])


def test_the_command_runs_and_reports(data, tmp_path):
    page = tmp_path / "page.md"
    begin, end = "<!-- generated: connection selection -->", "<!-- end of generated: connection selection -->"
    page.write_text(f"# Ours\n\n{begin}\n{end}\n\nby hand\n")
    done = invoke("--data-dir", data, "--out", tmp_path / "out", "--reproduction", page, "--keep-state")
    assert done.exit_code == 0, done.output
    names = sorted(str(p.relative_to(tmp_path / "out" / "runs")) for p in tmp_path.glob("out/runs/**/*.jsonl"))
    section = "cifar10-1_epochs-depth_10-growth_4"
    assert names == [
        f"{section}/random+full/size_0.5_to_1.0-seed_0.jsonl", f"{section}/search/penalty_-1.0_to_0.25-seed_0.jsonl",
    ]  # fmt: skip
    story, run, _ = map(json.loads, (tmp_path / "out" / "runs" / names[1]).read_text().splitlines())
    assert story["commit"] == "abc"
    assert story["examples"] == {"train": 30, "test": 6}
    assert story["standard_data"] is False
    assert run["result"]["updates"] == 30 // 4
    assert len(list(tmp_path.glob("out/state/**/*seed_0.safetensors"))) == 4
    report = (tmp_path / "out" / "README.md").read_text()
    assert "Table 2" in report
    assert "The paper trains for 300 epochs, these runs for 1." in report
    assert "C6, undecided: Connection selection beats random selection" in page.read_text()
    assert page.read_text().endswith("by hand\n")
    again = CliRunner().invoke(app, ["report", str(tmp_path / "out"), "--no-figures"])
    assert again.exit_code == 0
    assert (tmp_path / "out" / "README.md").read_text().count("![") == 0


def test_a_limit_of_time_stops_it_the_same_command_goes_on_and_says_how_far_it_is(data, tmp_path):
    stopped = invoke("--data-dir", data, "--out", tmp_path / "out", "--time-limit", "1e-6")
    assert stopped.exit_code == 0, stopped.output
    assert not list(tmp_path.glob("out/runs/**/*.jsonl"))
    words = [sys.executable, "-m", "espalier", *SMALL, "--data-dir", str(data), "--out", str(tmp_path / "out")]
    done = subprocess.run([*words, "--runs-at-once", "1", "--no-report"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("out/runs/**/*.jsonl"))) == 4
    assert "search-penalty_0.25-seed_0-1_runs: 1 runs of 7 updates as one batch (1 of 4) on cpu" in done.stderr
    assert "7 of 7 updates" in done.stderr


def test_a_checkpoint_of_other_settings_is_refused_and_both_are_shown(data, tmp_path, monkeypatch):
    from espalier.train.loop import Stop

    class Soon(Stop):
        looks = 2

        def now(self, spare: float = 0.0) -> bool:
            self.looks -= 1
            return self.looks < 0

    monkeypatch.setattr("espalier.cli.app.Stop", Soon)
    words = ("--data-dir", data, "--out", tmp_path / "out")
    assert invoke(*words, "--no-report").exit_code == 0
    assert list(tmp_path.glob("out/state/**/*.safetensors"))
    refused = invoke(*words, "--learning-rate", "0.2")
    assert isinstance(refused.exception, BadInput)
    assert "0.1" in str(refused.exception)
    assert "0.2" in str(refused.exception)
    assert "another folder" in str(refused.exception)


def run_offline(*words):
    """In a process that reaches no network."""
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "espalier", *SMALL, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | offline)


def test_missing_data_say_what_where_and_how(tmp_path):
    done = run_offline("--data-dir", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("espalier: cifar10")
    assert str(tmp_path / "nowhere") in said
    assert "cifar-10-binary.tar.gz" in said
    assert "data_dir" in said or "--data-dir" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "search,dropout"], "dropout"),
        (["--shares", "0.5,1"], "full"),
        (["--shares", "0.001"], "use another share"),
        (["--cost", "units"], "units"),
        (["--step", "quick"], "quick"),
        (["--precision", "fp4"], "fp4"),
        (["--runs-at-once", "0"], "--runs-at-once is at least 1"),
        (["--layers", "0"], "layers"),
        (["--batch-size", "40"], "at most 15"),
    ],
)
def test_bad_input_is_one_clear_line(words, said, data, tmp_path):
    done = invoke("--data-dir", data, "--out", tmp_path / "out", *words)
    assert isinstance(done.exception, (BadInput, SystemExit))
    assert said in f"{done.exception} {done.output}"
    assert not (tmp_path / "out").exists()
