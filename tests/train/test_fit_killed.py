"""Law 10: killed anywhere, stopped by time or by hand, a run goes on and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import espalier
from espalier import fit
from espalier.train import loop
from espalier.train.run_directory import locked

HERE = Path(__file__).parent
DATA, TEST = networks.digit_vectors(320)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="attempts are forks")
@pytest.mark.parametrize(("kind", "kills"), [("tensors", 20), ("loader", 8), ("sweep", 8)])
def test_killed_20_times_at_random_moments_the_run_ends_the_same(tmp_path: Path, kind: str, kills: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(HERE / "killed.py"), str(tmp_path), str(kills), kind],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert report["resumed"] >= kills // 4  # else the kills came too early to test anything
    assert report["digests"]
    assert set(report["digests"]) == {report["expected"]}


def call(model: nn.Module, data: object = DATA, **settings):
    ready = {"loss": F.cross_entropy, "epochs": 4, "batch_size": 32, "samples": 2, "target": 0.4, "quiet": True}
    settings = ready | settings
    return fit(model, data, **settings)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(x.equal(y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class Slow:
    """A loss that makes the clock of the run go forward by a second each time; no test waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("espalier.train.loop.time", self)

    def monotonic(self) -> float:
        return self.now

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.now += 1.0
        return F.cross_entropy(outputs, targets)


def test_a_time_limit_stops_cleanly_and_the_same_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slow(monkeypatch)
    whole = networks.mixed_network()
    expected = call(whole, loss=clock)
    parts, model = [], networks.mixed_network()
    while not parts or not parts[-1].finished:
        parts.append(call(model, loss=clock, checkpoint=tmp_path, time_limit=17.0))
        assert len(parts) < 10
    # 40 updates: 4 of the whole network, 16 with two masks, 20 settled
    assert [part.updates for part in parts] == [10, 18, 32, 40]  # none ends after its limit
    assert parts[1].model(TEST[0]).shape == (450, 10)  # what would ship at that moment
    assert parts[-1].theta.equal(expected.theta)
    assert same(parts[-1].model, expected.model)
    assert same(model, whole)
    assert [{**row, "seconds": 0} for row in parts[-1].history] == [{**row, "seconds": 0} for row in expected.history]
    assert json.loads((tmp_path / "result.json").read_text())["finished"]
    before = networks.files(tmp_path)
    again = call(networks.mixed_network(), loss=clock, checkpoint=tmp_path)  # of a finished run
    assert same(again.model, expected.model)
    assert again.updates == 40
    assert networks.files(tmp_path) == before


def test_seconds_add_up_over_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slow(monkeypatch)
    first = call(networks.mlp(), loss=clock, checkpoint=tmp_path, time_limit=17.0)
    assert first.seconds == 16  # what follows would have ended after 17
    clock.now += 1000  # the time between the calls is not the run's
    assert call(networks.mlp(), loss=clock, checkpoint=tmp_path).seconds == 56


def test_a_time_limit_without_a_checkpoint_ends_the_run_early(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call(networks.mlp(), loss=Slow(monkeypatch), time_limit=17.0)
    assert not result.finished
    assert result.share_after <= 0.4


@pytest.mark.parametrize("own", [False, True], ids=["", "drawing from a generator of its own"])
def test_somebody_else_s_loader_is_resumed_at_the_start_of_an_epoch(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read() -> DataLoader[tuple[Tensor, ...]]:
        drawn = torch.Generator().manual_seed(3) if own else None
        return DataLoader(TensorDataset(*DATA), 32, shuffle=True, drop_last=True, generator=drawn)

    clock = Slow(monkeypatch)
    expected = call(networks.mixed_network(), read(), loss=clock)
    parts = []
    while not parts or not parts[-1].finished:
        model = networks.mixed_network()
        parts.append(call(model, read(), loss=clock, checkpoint=tmp_path, time_limit=25.0, quiet=False))
        assert len(parts) < 10
    assert "at the start of the epoch it was in" in capsys.readouterr().err
    assert len(parts) > 2
    assert same(parts[-1].model, expected.model)


@pytest.mark.parametrize("adaptive", [True, False])
def test_adam_asng_and_a_scheduler_are_resumed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adaptive: bool
) -> None:
    from espalier.train import Recipe

    clock = Slow(monkeypatch)
    settings = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=3e-3),
        "scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        "recipe": Recipe(adaptive=adaptive, settle=0.0, theta_rate=1.0),
        "loss": clock,
        "samples": 4,
    }
    expected = call(networks.mixed_network(), **settings)
    for _ in range(20):
        result = call(networks.mixed_network(), checkpoint=tmp_path, time_limit=50.0, **settings)
        if result.finished:
            break
    assert same(result.model, expected.model)
    assert result.search.ask().equal(expected.search.ask())


def test_checkpoints_take_a_small_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a save that takes 20 times an update, one is made about every 400 updates."""
    clock, saves = Slow(monkeypatch), []

    def slow(self, state: object, step: int) -> None:
        saves.append(step)
        clock.now += 40.0

    monkeypatch.setattr(loop.Checkpoint, "save", slow)
    call(networks.mlp(), loss=clock, checkpoint=tmp_path, epochs=120, settle=0.0, recipe="paper", target=None)
    assert saves == [1, 401, 801, 1200]


def test_ctrl_c_ends_the_update_saves_and_the_same_call_goes_on(tmp_path: Path) -> None:
    expected = call(networks.mixed_network())
    calls = 0

    def interrupting(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 13:
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(outputs, targets)

    interrupting.__qualname__, interrupting.__module__ = (
        F.cross_entropy.__qualname__,
        F.__name__,
    )  # as far as settings go
    before = signal.getsignal(signal.SIGINT)
    model = networks.mixed_network()
    with pytest.raises(KeyboardInterrupt):
        call(model, loss=interrupting, checkpoint=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    assert calls == 14  # the second mask of the seventh update was finished
    result = call(model, checkpoint=tmp_path)
    assert same(result.model, expected.model)


def test_metrics_written_after_the_last_checkpoint_are_not_written_twice(tmp_path: Path) -> None:
    expected = call(networks.mlp(), checkpoint=tmp_path / "whole")
    calls = 0

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 50:
            raise RuntimeError("power cut")
        return F.cross_entropy(outputs, targets)

    failing.__qualname__, failing.__module__ = F.cross_entropy.__qualname__, F.__name__
    monkeyed = loop.SAVING
    loop.SAVING = 1e-9  # only the first update is saved
    try:
        with pytest.raises(RuntimeError, match="power cut"):
            call(networks.mlp(), loss=failing, checkpoint=tmp_path / "cut")
    finally:
        loop.SAVING = monkeyed
    assert len((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()) > 1
    call(networks.mlp(), checkpoint=tmp_path / "cut")
    rows = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in expected.history]


@pytest.mark.parametrize("way", ["fit", "sweep"])
def test_two_processes_never_train_in_one_folder(way: str, tmp_path: Path) -> None:
    def run() -> object:
        if way == "fit":
            return call(networks.mlp(), checkpoint=tmp_path)
        return espalier.sweep(networks.mlp, DATA, targets=[0.4], epochs=1, checkpoint=tmp_path, quiet=True)

    with (
        locked(tmp_path),
        pytest.raises(espalier.BadInput, match=rf"another process .*process {os.getpid()} on .* since"),
    ):
        run()
    assert run()
