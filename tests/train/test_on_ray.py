"""Batches of runs as Ray tasks, on a real local cluster: a worker dies in the middle, and the numbers stay the same.

Ray is not among what `make test` installs (its wheel is 79 MB), so these are skipped there; results/scale has the log
of a run by hand. What needs no cluster is tested everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import networks
import pytest
from torch import Tensor
from torch.nn import functional as F

from espalier import BadInput, sweep
from espalier.cli import main
from espalier.train.on_ray import Ray

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ray's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Any:
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def swept(folder: Path, noted: Path, **more: Any) -> list[Any]:
    (x, y), test = networks.digit_vectors(640)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        (noted / f"{os.getpid()}").touch()
        return F.cross_entropy(outputs, targets)

    settings: dict[str, Any] = {"epochs": 60, "batch_size": 32, "targets": [0.3, 0.6], "seeds": (0, 1), "loss": loss}
    return sweep(networks.mlp, (x, y), validation=test, at_once=2, checkpoint=folder, quiet=True, **settings, **more)


def kill_one(folder: Path, noted: Path, killed: list[int]) -> None:
    """The first worker, once it has saved something in the middle of its runs."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        saved = [int(path.stem[11:]) for path in folder.glob("batch-*/checkpoint-*.safetensors")]
        workers = [int(path.name) for path in noted.iterdir() if int(path.name) != os.getpid()]
        if workers and any(update >= 100 for update in saved):
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])
            return
        time.sleep(0.01)


@needs_ray
@pytest.mark.parametrize("time_limit", [None, 4.0])  # of a task, which is then queued again
def test_a_worker_dies_and_every_run_is_what_it_is_here(cluster: Any, time_limit: float | None, tmp_path: Path) -> None:
    for name in ("here", "there", "noted", "unused"):
        (tmp_path / name).mkdir()
    killed = list[int]()
    watch = threading.Thread(target=kill_one, args=(tmp_path / "there", tmp_path / "noted", killed))
    watch.start()
    results = swept(tmp_path / "there", tmp_path / "noted", executor=Ray(time_limit=time_limit))
    watch.join()
    assert killed, "it was over before a worker could be killed"
    assert len(list((tmp_path / "noted").iterdir())) >= 2

    expected = swept(tmp_path / "here", tmp_path / "unused")
    assert all(result.finished for result in results)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.theta.equal(theirs.theta)
        assert ours.mask.equal(theirs.mask)
        for name, tensor in theirs.model.state_dict().items():
            assert ours.model.state_dict()[name].equal(tensor)
    there, here = ({str(p.relative_to(tmp_path / n)) for p in (tmp_path / n).rglob("*")} for n in ("there", "here"))
    assert {name for name in there if "checkpoint-" not in name} == {name for name in here if "checkpoint-" not in name}


@needs_ray
def test_a_study_by_ray_writes_what_a_study_here_writes(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def study(out: Path, *more: str) -> dict[str, Any]:
        words = ["--data", "digits", "--targets", "0.2,0.5", "--seeds", "2", "--epochs", "2", "--hidden", "16,16"]
        monkeypatch.setattr(sys, "argv", ["espalier", "study", *words, "--out", str(out), "--quiet", "--json", *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["complete"]
        records = dict[str, Any]()
        for path in sorted(out.glob("runs/*/*/*.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            records[str(path.relative_to(out))] = [row["result"] for row in rows[1:]]
        return records

    assert study(tmp_path / "there", "--executor", "ray") == study(tmp_path / "here", "--device", "cpu")


@needs_ray
def test_what_a_cluster_does_not_have_is_said_before_training(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"a task asks for 2 GPUs, and the cluster has 0"):
        swept(tmp_path / "run", tmp_path, executor=Ray(gpus=2))
    assert not list(tmp_path.glob("run/run-*"))


@needs_ray
def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    import ray

    ray.shutdown()
    with pytest.raises(BadInput, match=r"no Ray cluster answers at 127\.0\.0\.1:9: .*refused"):
        swept(tmp_path / "run", tmp_path, executor=Ray("127.0.0.1:9"))


def test_without_ray_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'espalier\[ray\]'"):
        swept(tmp_path / "run", tmp_path, executor="ray")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"executor": "slurm"}, "executor is 'ray'"),
        ({"executor": "ray", "checkpoint": None}, "needs checkpoint="),
        ({"executor": Ray, "checkpoint": None}, "executor is 'ray'"),
    ],
)
def test_bad_input(settings: dict[str, Any], words: str) -> None:
    data, _ = networks.digit_vectors(64)
    with pytest.raises(BadInput, match=words):
        sweep(networks.mlp, data, targets=[0.5], epochs=1, quiet=True, **settings)
    with pytest.raises(BadInput, match="a part of one"):
        Ray(gpus=1.5)
    with pytest.raises(BadInput, match="cpus of a task"):
        Ray(cpus=-1)
