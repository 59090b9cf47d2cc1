"""The scripts for Slurm, with its commands and torchrun played by scripts: when they queue themselves again, and when
not."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "slurm"
PLAYED = {
    "squeue": "echo ${LEFT:-1-02:03:04}",
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >> "$NOTES/queued"; else echo one; echo two; fi',
    "srun": 'echo "$*" >> "$NOTES/called"; case "$*" in *"ray start"*) ;; *) eval "$PLAY";; esac',
}


@pytest.fixture
def submitted(tmp_path):
    """Runs a script; play: what the command of ours does. Returns exit code, commands, and how often it was queued."""
    for name, text in PLAYED.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, words, play="true", **more):
        for name in ("called", "queued"):
            (tmp_path / name).unlink(missing_ok=True)
        own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NOTES": str(tmp_path), "PLAY": play, "WAIT": "0"}
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x", "SLURM_GPUS_ON_NODE": "4"}
        done = subprocess.run(
            ["bash", str(SCRIPTS / script), *words], env=os.environ | own | slurm | more, capture_output=True, text=True
        )
        lines = [(tmp_path / name) for name in ("called", "queued")]
        called, queued = (path.read_text().splitlines() if path.exists() else [] for path in lines)
        return done, called, queued

    return run


@pytest.mark.parametrize(
    ("finished", "code", "restarts", "queued"),
    [(True, 0, "0", 0), (False, 0, "9", 1), (None, 1, "0", 1), (False, 1, "3", 0), (True, 1, "0", 0)],
)
def test_a_run_queues_itself_until_it_is_done(submitted, tmp_path, finished, code, restarts, queued):
    out = tmp_path / "run"
    out.mkdir()
    if finished is not None:
        (out / "result.json").write_text(json.dumps({"finished": finished}))
    done, called, again = submitted(
        "train.sbatch", ["--model", "cnn", "--out", str(out)], f"exit {code}", SLURM_RESTART_COUNT=restarts
    )
    assert done.returncode == code, done.stderr
    assert again == ["7"] * queued
    (line,) = called
    assert "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=one:29500" in line
    seconds = ((26 * 60 + 3) - 5) * 60  # a day, two hours and three minutes, less five minutes
    assert line.endswith(f"-m espalier train --parallel data --time-limit {seconds} --model cnn --out {out}")


def test_a_run_without_a_folder_is_refused(submitted):
    done, called, queued = submitted("train.sbatch", ["--model", "cnn"])
    assert (done.returncode, called, queued) == (2, [], [])
    assert "--out" in done.stderr


@pytest.mark.parametrize(("complete", "queued"), [("true", 0), ("false", 1)])
def test_a_study_queues_itself_until_it_is_complete(submitted, complete, queued):
    play = f"echo progress; echo '{{\"complete\": {complete}}}'"
    done, called, again = submitted("study.sbatch", ["study", "--targets", "10%"], play, LEFT="08:00")
    assert done.returncode == 0, done.stderr
    assert again == ["7"] * queued
    assert sum("ray start" in line for line in called) == 2
    (line,) = [line for line in called if "espalier" in line]
    assert line.endswith("espalier study --targets 10% --executor ray --address one:6379 --time-limit 240 --json")
