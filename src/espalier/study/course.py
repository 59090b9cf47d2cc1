"""The way of a batch of runs to its end: updates, measurements, settling, checkpoints, and the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from espalier.search import Search
from espalier.space import BadInput
from espalier.train.batched.batch import Batch
from espalier.train.checkpoint import Checkpoint
from espalier.train.progress import Progress
from espalier.train.stop import Stop

SLICE = 2000  # most updates between looks at the clock: the only times the host waits for the device
LOOK = 5.0  # seconds between looks, about
SAVE_EVERY = 300.0  # seconds at most between checkpoints; the state of 35 networks is half a gigabyte
SAVING = 0.01  # share of the time that may go into them, where they are small
SAVE_AFTER = 30.0

Row = dict[str, Any]


class Traveller(Protocol):
    """What a study does on the way. ``last`` is True at the end of the run."""

    def settle(self) -> None:
        """Fix the structure of every run."""
        ...

    def measure(self, last: bool) -> None: ...

    def reads(self, last: bool) -> int:
        """How much a measurement reads, in any unit: an estimate of its time."""
        ...

    def line(self, pace: str) -> str:
        """One line of progress; pace: updates done and updates in a second, in words."""
        ...

    def states(self) -> list[str]:
        """Every run as it was last measured: see :func:`settings_in_lines`."""
        ...

    def state_dict(self) -> Row:
        """What it keeps beside the batch and the search."""
        ...

    def load_state_dict(self, state: Row) -> None: ...


class Course:
    """batch, search: what travels; points: updates after which it is measured; settle_at: the update before which it
    settles; checkpoint: None for none. ``seconds``: what the time went into; ``stretches``: calls it took.
    """

    def __init__(
        self,
        traveller: Traveller,
        batch: Batch,
        search: Search | None,
        *,
        points: Sequence[int],
        settle_at: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.traveller, self.batch, self.search, self.checkpoint = traveller, batch, search, checkpoint
        self.total, self.points, self.settle_at = batch.total, tuple(points), settle_at
        self.seconds = {"setup": 0.0, "first_updates": 0.0, "updates": 0.0, "measuring": 0.0, "saving": 0.0}
        self.stretches = 0
        self.measured = 0  # the update after which it last was
        self.rate: float | None = None  # updates in a second
        self.reading = 0.0  # seconds for one unit of what a measurement reads
        state = sum(p.nbytes for p in batch.state.params.values()) * 2
        self.saving = state / 1e8  # seconds that a checkpoint may take, until one has been written

    @property
    def finished(self) -> bool:
        return self.batch.done >= self.total and not self._due_to_measure

    @property
    def _due_to_measure(self) -> bool:
        return self.batch.done in self.points and self.measured < self.batch.done

    def run(self, stop: Stop, progress: Progress) -> bool:
        """Go on to the end, or until told to stop. Returns whether it is the end."""
        with self.timed("setup"):
            self._resume()
            self.stretches += 1
        progress.start(self.batch.done, self.total)
        saved = time.monotonic()
        while not self.finished and not stop.now(spare=self.saving + self._ahead()):
            measures = self._due_to_measure
            self.go_on()
            progress.update(self.batch.done)
            progress.epoch(self.traveller.line(self._pace()))
            if measures:
                progress.states(self.traveller.states())
            # What a kill may cost: a few minutes, and never a run that only had to be evaluated.
            since, last = time.monotonic() - saved, self.batch.done >= self.total and not self.finished
            due = min(max(self.saving / SAVING, SAVE_AFTER), SAVE_EVERY)
            if since > (SAVE_AFTER if last else due):
                self.save()
                saved = time.monotonic()
        progress.stop()
        if not self.finished:
            self.save()
        return self.finished

    def go_on(self) -> None:
        """What is due: a measurement, or updates up to the next thing that is."""
        if self._due_to_measure:
            with self.timed("measuring"):
                self._measure()
        else:
            self._advance()

    def _measure(self) -> None:
        began, last = time.monotonic(), self.batch.done >= self.total
        self.traveller.measure(last)
        self.measured = self.batch.done
        self.reading = (time.monotonic() - began) / max(self.traveller.reads(last), 1)

    def _advance(self) -> None:
        """On to where something is due: a measurement, settling, a look at the clock."""
        began, done, first = time.monotonic(), self.batch.done, self.rate is None
        with self.timed("first_updates" if first else "updates"):
            if self.search is not None and done == self.settle_at and not self.search.settled:
                self.traveller.settle()
                first = True  # another step is compiled and recorded
            due = [point for point in (*self.points, self.settle_at, done + self._slice()) if point > done]
            self.batch.advance(min(due) - done)
            if self.batch.device.type == "cuda":
                # The clock is to know what is done, not what is asked for.
                torch.cuda.synchronize(self.batch.device)
        rate = (self.batch.done - done) / max(time.monotonic() - began, 1e-9)
        self.rate = rate if self.rate is None or not first else self.rate

    def _ahead(self) -> float:
        """Seconds that what comes next will take, about."""
        if self._due_to_measure:
            return self.reading * self.traveller.reads(self.batch.done >= self.total)
        return 0.0 if self.rate is None else self._slice() / self.rate

    def _slice(self) -> int:
        """Updates until the next look at the clock; a new process compiles and records in its first ones.

        It ends where a whole CUDA graph can, so that no updates are left to be done one by one.
        """
        whole, done = self.batch.compute.updates_at_once, self.batch.done
        if self.rate is None:
            most = 2 * whole if self.batch.device.type == "cuda" else whole
        else:
            most = max(int(min(LOOK * self.rate, SLICE)), 1)
        aligned = (done + most) // whole * whole
        return aligned - done if aligned > done else most

    def _pace(self) -> str:
        text = f"{self.batch.done:,} of {self.total:,} updates"
        if self.rate is not None:
            text += f", {self.rate:,.0f}/s" if self.rate >= 20 else f", {self.rate:.2g}/s"
        return text

    def save(self) -> None:
        """Write a checkpoint of where the runs are."""
        if self.checkpoint is None:
            return
        began = time.monotonic()
        state: Row = {"batch": self.batch.state_dict(), "stretches": self.stretches, "seconds": self.seconds}
        state |= {"measured": self.measured, "own": self.traveller.state_dict(), "reading": self.reading}
        if self.search is not None:
            state["search"] = self.search.state_dict()
        self.checkpoint.save(state, self.batch.done)
        self.saving = time.monotonic() - began
        self.seconds["saving"] += self.saving

    def _resume(self) -> None:
        state = self.checkpoint.load() if self.checkpoint is not None else None
        if state is None:
            return
        if self.search is not None:
            self.search.load_state_dict(state["search"])
        self.batch.load_state_dict(state["batch"])
        if "own" not in state:
            folder = None if self.checkpoint is None else self.checkpoint.folder
            raise BadInput(f"the checkpoint in {folder} is of an earlier version; use another folder to start anew")
        self.stretches, self.measured = int(state["stretches"]), int(state["measured"])
        self.seconds = dict(state["seconds"])
        self.reading = float(state.get("reading", 0.0))  # else a time limit would not know the first one
        self.traveller.load_state_dict(state["own"])

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - began


def settings_in_lines(names: Sequence[str], rows: Sequence[Row], share: str) -> list[str]:
    """One line for each name: the share and the error of every run that has it, in their order.

    >>> settings_in_lines(["a", "a"], [{"s": 0.1, "test_error": 0.02}, {"s": 0.2, "test_error": 0.03}], "s")
    ['a: share 10.0% 20.0%, error 2.00% 3.00%']
    """
    lines = list[str]()
    for name in dict.fromkeys(names):
        here = [row for its, row in zip(names, rows, strict=True) if its == name]
        shares = " ".join(f"{row[share]:.1%}" for row in here if share in row)
        errors = " ".join(f"{row['test_error']:.2%}" for row in here)
        lines.append(f"{name}: {f'share {shares}, ' if shares else ''}error {errors}")
    return lines


def points(total: int, count: int, whole: int = 50) -> tuple[int, ...]:
    """Updates after which the runs are measured: evenly spaced, the last one the end.

    whole: updates in one CUDA graph; points are multiples of it where there is room.

    >>> points(937_500, 20)[:2], points(937_500, 20)[-1], points(7, 3)
    ((46850, 93750), 937500, (2, 5, 7))
    """
    exact = [round(total * k / count) for k in range(1, count + 1)]
    if total >= count * whole:
        exact = [point // whole * whole for point in exact[:-1]] + [total]
    return tuple(sorted({point for point in exact if point > 0}))
