"""What a user may do on the way of a run: callbacks, which ``fit`` and ``sweep`` take as a list.

Progress bars, run directories, early stopping and loggers are such callbacks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.space import BadInput, BadType, whole_number
from espalier.train import checks
from espalier.train.result import Result, Row
from espalier.train.scoring import is_larger_better

if TYPE_CHECKING:
    from espalier.train.loop import Loop


class Callback:
    """Override the methods you want; here they do nothing. ``loop`` knows how far the runs are.

    A sweep trains batches of runs, one loop for each; ``rows`` and ``results`` have an entry for each run of the batch.
    ``once``: where several processes train one run, only the first calls it, as for loggers.

    >>> class Patient(Callback):
    ...     def on_epoch(self, loop, rows):
    ...         if loop.phase == "settled" and rows[0]["validation_error"] < 0.01:
    ...             loop.stop("the error is small enough")
    """

    once = False

    def on_begin(self, loop: Loop) -> None:
        """Before the first update of this call; a run that goes on has its history already."""

    def on_update(self, loop: Loop) -> None:
        """After some updates, about twice a second."""

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        """The runs were measured: at the end of an epoch, or where a study measures. What is added to a row is
        recorded with it."""

    def on_settle(self, loop: Loop) -> None:
        """The structure is fixed from here on."""

    def on_leave(self, loop: Loop) -> None:
        """The loop is left, at its end, stopped, or by an error."""

    def on_end(self, loop: Loop, results: list[Result]) -> None:
        """What came out; ``loop.finished`` is False where a time limit came first."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: numbers, strings, tensors, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept; before ``on_begin``."""


class EarlyStopping(Callback):
    """Ends a run whose validation no longer gets better, once its structure has settled: what comes before is not yet
    what ships. Of a sweep, when it holds for every run of a batch.

    monitor: a number of the rows, or a metric by its name; "max acc" or "min acc" also says which is better. largest:
    the same, whether the larger is; None: as is known of losses, of named metrics, and of objects of torchmetrics.
    patience: so many measurements without a better one; None: never stop. best: go back to the weights of the best
    measurement, each run of a sweep to its own.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int | None = 5,
        *,
        largest: bool | None = None,
        best: bool = False,
    ) -> None:
        if patience is not None:
            whole_number(patience, "patience, a number of measurements,", 1)
        if not isinstance(monitor, str):
            raise BadType(f"monitor names a number of the rows, such as 'validation_loss', not {monitor!r}")
        word, _, name = monitor.partition(" ")
        if word in ("max", "min") and name:
            if largest is not None and largest is not (word == "max"):
                raise BadInput(f"monitor={monitor!r} and largest={largest} say opposite things; give one of them")
            monitor, largest = name, word == "max"
        self.monitor, self.patience, self.largest, self.best = monitor, patience, largest, best
        self._weights: dict[str, Any] | None = None

    def know(self, metrics: Mapping[str, Any]) -> None:
        """Find out which is better, where nobody has said it. metrics: of the call, by name."""
        if self.largest is not None:
            return
        name = self.monitor.removeprefix("validation_")
        self.largest = is_larger_better(name, metrics.get(name))
        if self.largest is None:
            raise BadInput(
                f"whether a larger {self.monitor!r} is better or a smaller one is not known: say "
                f'"max {self.monitor}" or "min {self.monitor}"'
            )

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        if f"validation_{self.monitor}" in rows[0]:
            self.monitor = f"validation_{self.monitor}"
        if all(row.get(self.monitor) is None for row in rows):
            known = sorted(name for name, value in rows[0].items() if value)
            raise BadInput(f"there is no {self.monitor!r} to monitor, only {known}")
        if loop.phase != "settled":
            return
        since = [self._since(history) for history in loop.histories]
        if self.best and min(since) == 0:
            self._weights = loop.engine.keep(self._weights, [measurements == 0 for measurements in since])
        if self.patience is not None and min(since) >= self.patience:
            loop.stop(f"{self.monitor} did not get better for {self.patience} measurements")

    def _since(self, history: list[Row]) -> int:
        """Measurements since the best one with a settled structure."""
        settled = [row[self.monitor] for row in history if row["settled"]]
        sign = -1.0 if self.largest else 1.0
        values = [math.inf if value is None else sign * value for value in settled]  # None of a run that diverged
        return len(values) - 1 - values.index(min(values))

    def on_leave(self, loop: Loop) -> None:
        if self._weights is not None and loop.finished:
            loop.engine.put_back(self._weights)
            loop.engine.close()  # what was trained is written into the model
            loop.save(again=True)  # the same call then finds what ships
        self._weights = None  # the next batch of a sweep has its own

    def state_dict(self) -> dict[str, Any]:
        return {} if self._weights is None else {"best": dict(self._weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights = state.get("best")


class Logger(Callback):
    """Hands every row to a function ``log(row)``, or ``log(row, run)`` of a sweep: to a file, a table, a tracker.

    >>> Logger(lambda row: print(row["loss"])).log is not None
    True
    """

    once = True

    def __init__(self, log: Callable[..., None]) -> None:
        self.log = log

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        for run, row in enumerate(rows):
            self.log(row, run) if len(rows) > 1 else self.log(row)


class TensorBoard(Callback):
    """Writes every number of every row to TensorBoard's files in a folder, of a sweep a folder for each run."""

    once = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self.writers = Path(folder), dict[int, Any]()

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for run, row in enumerate(rows):
            if run not in self.writers:
                place = self.folder if len(rows) == 1 else self.folder / f"run-{run:03d}"
                self.writers[run] = SummaryWriter(str(place))
            for name, value in _numbers([row]).items():
                self.writers[run].add_scalar(name, value, row["update"])

    def on_leave(self, loop: Loop) -> None:
        while self.writers:
            self.writers.popitem()[1].close()


class MLflow(Callback):
    """Logs every number of every row to MLflow, into the active run or a new one; of a sweep as "run-000/loss"."""

    once = True

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        _tracker("mlflow").log_metrics(_numbers(rows), step=rows[0]["update"])


class WandB(Callback):
    """Logs every number of every row to Weights & Biases, into its active run or one of these settings, which are those
    of ``wandb.init``: ``WandB(project="digits", mode="offline")``. Of a sweep as "run-000/loss"."""

    once = True

    def __init__(self, **settings: Any) -> None:
        self.settings, self._own = settings, dict[str, Any]()

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        wandb = _tracker("wandb")
        if wandb.run is None:
            self._own["run"] = wandb.init(**self.settings)
        wandb.log(_numbers(rows), step=rows[0]["update"])

    def on_leave(self, loop: Loop) -> None:
        if self._own:
            self._own.pop("run").finish()


def _numbers(rows: list[Row]) -> dict[str, float]:
    """The numbers of a row; of several, with the name of the run before them."""
    return {
        (f"run-{run:03d}/" if len(rows) > 1 else "") + name: float(value)
        for run, row in enumerate(rows)
        for name, value in row.items()
        if isinstance(value, (int, float))
    }


def _tracker(name: str) -> Any:
    return checks.needed(name, f"this callback logs by {name}, which is not there: pip install {name}")


def check(given: Sequence[Callback], monitor: str | None, metrics: Mapping[str, Any]) -> list[Callback]:
    """The callbacks of a call, and one that ships the best epoch by what is monitored; anything else is named.
    metrics: of the call, by name."""
    if isinstance(given, Callback) or not isinstance(given, Sequence):
        raise BadType(f"callbacks is a list of espalier.Callback, not {type(given).__name__}")
    for one in given:
        if isinstance(one, type) or not isinstance(one, Callback):
            raise BadType(f"a callback is an object of a class made from espalier.Callback, not {one!r}")
    watching = [*given] if monitor is None else [*given, EarlyStopping(monitor, None, best=True)]
    for one in watching:
        if isinstance(one, EarlyStopping):
            one.know(metrics)
    return watching
