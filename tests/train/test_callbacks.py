"""Callbacks: told of the same events by fit and sweep; they add to rows, and end runs early, for good."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import networks
import pytest
import torch

import espalier
from espalier import Callback, fit, sweep
from espalier.train import loop as loops
from espalier.train.callbacks import EarlyStopping, Logger, MLflow, TensorBoard, WandB
from espalier.train.loop import Loop

DATA, TEST = networks.digit_vectors(320)
SHORT: dict[str, Any] = {"epochs": 4, "batch_size": 32, "quiet": True, "validation": TEST}


class Told(Callback):
    """Notes what it is told, and where the runs are."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []

    def note(self, event: str, loop: Loop) -> None:
        self.events.append((event, loop.update, loop.phase))

    def on_begin(self, loop: Loop) -> None:
        self.note("begin", loop)

    def on_update(self, loop: Loop) -> None:
        self.note("update", loop)

    def on_epoch(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
        self.note(f"epoch of {len(rows)}", loop)
        for row in rows:
            row["double"] = 2 * row["loss"]

    def on_settle(self, loop: Loop) -> None:
        self.note("settle", loop)

    def on_leave(self, loop: Loop) -> None:
        self.note("leave", loop)

    def on_end(self, loop: Loop, results: list[Any]) -> None:
        self.note(f"end of {len(results)}", loop)


def run(how: str, callback: Callback, **settings: Any) -> Any:
    if how == "fit":
        return fit(networks.mlp(), DATA, target=0.4, callbacks=[callback], **(SHORT | settings))
    return sweep(networks.mlp, DATA, targets=[0.4, 0.6], callbacks=[callback], **(SHORT | settings))[0]


@pytest.mark.parametrize(("how", "runs"), [("fit", 1), ("sweep", 2)])
def test_the_events_of_a_run_in_their_order(
    how: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "LOOK", 0.0)  # a look after every update
    told = Told()
    run(how, told, checkpoint=tmp_path)
    assert told.events[0] == ("begin", 0, "whole")
    assert [e for e in told.events if e[0] == f"epoch of {runs}"] == [
        (f"epoch of {runs}", 10, "searching"), (f"epoch of {runs}", 20, "searching"),
        (f"epoch of {runs}", 30, "settled"), (f"epoch of {runs}", 40, "settled"),
    ]  # fmt: skip
    assert [e for e in told.events if e[0] == "settle"] == [("settle", 20, "settled")]
    assert [update for event, update, _ in told.events if event == "update"] == list(range(1, 41))
    assert told.events[-2:] == [("leave", 40, "settled"), (f"end of {runs}", 40, "settled")]
    path = next(tmp_path.rglob("metrics.jsonl"))
    for line in path.read_text().splitlines():  # what a callback adds to a row is recorded with it
        row = json.loads(line)
        assert row["double"] == 2 * row["loss"]


class Stops(Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
        if rows[0]["epoch"] == self.epoch:
            loop.stop("good enough")


@pytest.mark.parametrize("how", ["fit", "sweep"])
@pytest.mark.parametrize("epoch", [2, 3])
def test_a_run_that_a_callback_ends_is_finished_for_good(how: str, epoch: int, tmp_path: Path) -> None:
    result = run(how, Stops(epoch), checkpoint=tmp_path)
    assert (result.updates, result.finished, result.stopped) == (10 * epoch, True, "good enough")
    assert result.share_after <= 0.4
    assert json.loads(next(tmp_path.rglob("result.json")).read_text())["stopped"] == "good enough"
    again = run(how, Callback(), checkpoint=tmp_path)  # the same call goes on with nothing
    assert (again.updates, again.stopped) == (10 * epoch, "good enough")
    assert again.mask.equal(result.mask)


@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_an_error_of_a_callback_is_the_user_s_own(how: str, tmp_path: Path) -> None:
    class Wrong(Told):
        def on_epoch(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
            raise ZeroDivisionError("mine")

    told = Wrong()
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(how, told, checkpoint=tmp_path)
    assert told.events[-1][0] == "leave"
    assert run(how, Callback(), checkpoint=tmp_path).finished


@pytest.mark.parametrize("given", [Callback(), [Callback], ["print"], 3])
def test_what_is_no_callback_is_named(given: Any) -> None:
    with pytest.raises((espalier.BadInput, TypeError), match="callback"):
        fit(networks.mlp(), DATA, callbacks=given, **SHORT)


class Rising(Callback):
    """A validation loss that falls until the third epoch and rises from there."""

    def on_epoch(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["validation_loss"] = abs(row["epoch"] - 3) + 0.5


@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_early_stopping_waits_for_the_structure_to_settle(how: str) -> None:
    settings = {"epochs": 8, "settle": 0.75, "callbacks": [Rising(), EarlyStopping(patience=2)]} | {"target": 0.4}
    if how == "fit":
        result = fit(networks.mlp(), DATA, **(SHORT | settings))
    else:
        settings["targets"] = [settings.pop("target"), 0.6]
        result = sweep(networks.mlp, DATA, **(SHORT | settings))[0]
    assert result.updates == 50  # settled from the third epoch on, the best of which is the third itself
    assert result.finished
    assert "validation_loss did not get better for 2" in result.stopped


def test_the_best_epoch_is_what_ships(tmp_path: Path) -> None:
    class Weights(Callback):
        def __init__(self) -> None:
            self.seen: dict[int, list[torch.Tensor]] = {}

        def on_epoch(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
            network = loop.engine.structure.network
            self.seen[rows[0]["epoch"]] = [p.detach().clone() for p in network.parameters()]

    kept = Weights()
    settings = {"epochs": 8, "settle": 0.75, "callbacks": [Rising(), kept, EarlyStopping(patience=2, best=True)]}
    result = fit(networks.mlp(), DATA, target=0.4, checkpoint=tmp_path, **(SHORT | settings))
    again = fit(networks.mlp(), DATA, target=0.4, checkpoint=tmp_path, **(SHORT | settings))
    for one in (result, again):
        for ours, third in zip(one.model.parameters(), kept.seen[3], strict=True):
            assert ours.equal(third)


def test_each_run_of_a_sweep_ships_its_own_best_measurement(tmp_path: Path) -> None:
    """In two batches; of the first, one run is best at the third epoch and one at the fifth."""

    class Weights(Callback):
        def __init__(self) -> None:
            self.seen: dict[tuple[float, int], list[torch.Tensor]] = {}

        def on_epoch(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
            masks = loop.engine.masks()
            for i, (run, row) in enumerate(zip(loop.engine.runs, rows, strict=True)):
                row["validation_loss"] = abs(row["epoch"] - best[run.target])
                model = loop.engine._compact(loop.engine.weights(), i, masks[i])
                self.seen[run.target, row["epoch"]] = [p.detach().clone() for p in model.parameters()]

    best, kept = {0.4: 3, 0.6: 5, 0.8: 8}, Weights()
    settings = SHORT | {"epochs": 8, "settle": 0.75, "callbacks": [kept], "monitor": "validation_loss", "at_once": 2}
    for _ in range(2):  # the second call finds what ships
        results = sweep(networks.mlp, DATA, targets=list(best), checkpoint=tmp_path, **settings)
        for result, (target, epoch) in zip(results, best.items(), strict=True):
            assert result.updates == 80
            for ours, then in zip(result.model.parameters(), kept.seen[target, epoch], strict=True):
                torch.testing.assert_close(ours, then, rtol=0, atol=0)


def test_loggers_see_every_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    result = fit(networks.mlp(), DATA, target=0.4, **(SHORT | {"callbacks": [Logger(rows.append)]}))
    assert rows == result.history
    runs: list[int] = []
    sweep(
        networks.mlp, DATA, targets=[0.4, 0.6], **(SHORT | {"callbacks": [Logger(lambda row, run: runs.append(run))]})
    )
    assert runs == [0, 1] * 4
    pytest.importorskip("tensorboard")
    fit(networks.mlp(), DATA, target=0.4, **(SHORT | {"callbacks": [TensorBoard(tmp_path / "board")]}))
    assert list((tmp_path / "board").glob("events*"))


class Tracker:
    """What MLflow and W&B are asked for."""

    def __init__(self, log: str) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.run: Any = None
        self.settings: dict[str, Any] = {}
        setattr(self, log, lambda numbers, step: self.logged.append((step, numbers)))

    def init(self, **settings: Any) -> Tracker:
        self.settings, self.run = settings, self
        return self

    def finish(self) -> None:
        self.run = None


@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_mlflow_and_wandb(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, wandb = Tracker("log_metrics"), Tracker("log")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    result = run(how, MLflow())
    assert run(how, WandB(mode="offline")).history[-1]["loss"] == result.history[-1]["loss"]
    assert wandb.settings == {"mode": "offline"}
    assert wandb.run is None  # the one that was opened is closed
    name = "loss" if how == "fit" else "run-000/loss"
    for tracker in (mlflow, wandb):
        seen = {step: numbers[name] for step, numbers in tracker.logged if name in numbers}
        assert seen == {row["update"]: row["loss"] for row in result.history}
        assert all(type(number) is float for _, numbers in tracker.logged for number in numbers.values())
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(espalier.BadInput, match="pip install mlflow"):
        run(how, MLflow())


def test_a_tracker_that_lacks_something_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.py").write_text("import nobody_has_this\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        run("fit", MLflow())


@pytest.mark.parametrize(
    ("wrong", "said"), [({"patience": 0}, "at least 1"), ({"monitor": "accuracy"}, "no 'accuracy' to monitor")]
)
def test_early_stopping_names_what_is_wrong(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(espalier.BadInput, match=said):
        fit(networks.mlp(), DATA, target=0.4, **(SHORT | {"callbacks": [EarlyStopping(**wrong)]}))
