"""The one loop of every run: updates, measurements, settling, checkpoints, the clock, random states.

What trains is an engine: one model at a time (:mod:`espalier.train.eager`), or many runs at once
(:mod:`espalier.train.batched.batch_engine`). A loop is stopped after any update, and resumed there exactly.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from espalier.gates.verify import isolated_random, seed_all
from espalier.search.arguments import real
from espalier.space import BadInput, EspalierError, first_line
from espalier.train.callbacks import Callback
from espalier.train.checkpoint import Checkpoint
from espalier.train.ranks import Ranks
from espalier.train.result import Result, Row, Thinned

SAVING = 0.05  # of the time may go into checkpoints
LOOK = 0.5  # seconds between two looks at the clock, about; four times that on a GPU, which is waited for then
MOST = 2000  # updates between two looks
SNAPSHOTS = 1 << 24  # numbers kept of theta over time, 64 MB; every checkpoint holds them


class OutOfMemory(EspalierError, MemoryError):
    """The device has not enough memory for one update."""


@contextmanager
def out_of_memory(way_out: str) -> Iterator[None]:
    """Where memory runs out inside, say what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text
        if not full or isinstance(error, EspalierError):
            raise
        raise OutOfMemory(f"out of memory: {first_line(error)}. {way_out}") from error


class Engine(Protocol):
    """Runs that train together, one or many.

    ``done``: updates so far, of ``total``. ``points``: the updates after which they are measured. ``settle_at``: the
    update before which their structure is fixed, if it is not ``settled``. ``stride``: updates that are best made
    together. ``resumable``: whether they can go on from the present update.
    """

    total: int
    settle_at: int
    stride: int
    device: torch.device
    points: Sequence[int]
    runs: Sequence[Any]
    gated: Any

    @property
    def done(self) -> int: ...
    @property
    def settled(self) -> bool: ...
    @property
    def phase(self) -> str: ...
    @property
    def resumable(self) -> bool:
        return True

    @property
    def thetas(self) -> Tensor | None:
        """``(R, d)``; None where masks are given."""

    def keep(self, best: dict[str, Tensor] | None, better: Sequence[bool]) -> dict[str, Tensor]:
        """``best`` with the present weights of those runs that are better now; None: of all."""
        ...

    def put_back(self, best: dict[str, Tensor]) -> None:
        """Go on, or end, with weights that were kept."""

    def advance(self, updates: int, stop: Stop) -> None:
        """So many updates; an engine that makes them one by one ends after the present one if it is interrupted."""

    def settle(self) -> None: ...

    def measure(self, last: bool) -> list[Row]:
        """A row for each run; last: at the end of the runs."""
        ...

    def reads(self, last: bool) -> int:
        """How much a measurement reads, in any unit: an estimate of its time."""
        return 1

    def check(self) -> None:
        """Raise where a checkpoint would be of no use: not for one broken run of many."""
        return

    def close(self) -> None:
        """However the runs end, the model holds what was trained."""
        return

    def results(self, loop: Loop) -> list[Result]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loop:
    """The way of an engine's runs to their end.

    histories: of each run, its rows so far. seconds: what the time went into, in all calls together; calls: how many.
    stopped: why a callback ended the runs before their end, or "".
    ranks: the processes that go this way together: they stop and save after the same update, and the first one writes.
    """

    def __init__(
        self,
        engine: Engine,
        stop: Stop,
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.engine, self.limit, self.callbacks, self.checkpoint = engine, stop, list(callbacks), checkpoint
        self.ranks = ranks
        self.histories: list[list[Row]] = [[] for _ in engine.runs]
        self.seconds = {"setup": 0.0, "first_updates": 0.0, "updates": 0.0, "measuring": 0.0, "saving": 0.0}
        self.calls, self.stopped = 0, ""
        self.measured = 0  # the update after which the runs last were
        numbers = 1 if engine.thetas is None else engine.thetas.numel()
        self.thetas = Thinned(max(2, min(128, SNAPSHOTS // numbers)))
        self._rate: float | None = None  # updates in a second
        self._reading = 0.0  # seconds for one unit of what a measurement reads
        self._saved, self._since, self._cost = -1.0, time.monotonic(), 0.0  # the last checkpoint, and what it cost

    # ---- what a callback asks --------------------------------------------------------------------------------------

    @property
    def update(self) -> int:
        return self.engine.done

    @property
    def updates(self) -> int:
        return self.engine.total

    @property
    def phase(self) -> str:
        """ "whole" before the search begins, then "searching", and "settled" once the structure is fixed."""
        return self.engine.phase

    @property
    def finished(self) -> bool:
        """Whether the runs are at their end: not where a time limit or Ctrl-C came first."""
        return bool(self.stopped) or (self.engine.done >= self.engine.total and not self._due)

    @property
    def forced(self) -> Sequence[str]:
        """In what the runs were gone on with although it differed."""
        return () if self.checkpoint is None else self.checkpoint.forced

    @property
    def elapsed(self) -> float:
        """Seconds spent on these runs, in all calls together."""
        return sum(self.seconds.values())

    @property
    def pace(self) -> str:
        """Updates done, and updates in a second, in words."""
        text = f"{self.update:,} of {self.updates:,} updates"
        if self._rate is not None:
            text += f", {self._rate:,.0f}/s" if self._rate >= 20 else f", {self._rate:.2g}/s"
        return text

    def stop(self, why: str) -> None:
        """End the runs here, for good: what they have come to is their result."""
        self.stopped = why or "stopped by a callback"

    # ---- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Go on to the end, or until it is time to stop. Returns whether it is the end."""
        with self.timed("setup"):
            self._resume()
            self.calls += 1
            if not self.thetas.updates:
                self._keep_theta()
        self._since = time.monotonic()
        self._tell("on_begin")
        try:
            # Where there are checkpoints, Ctrl-C ends an update and not the process.
            with self.limit.on_interrupt() if self.checkpoint is not None else nullcontext():
                self._go_to_the_end()
        finally:
            self.engine.close()
            self._tell("on_leave")
        return self.finished

    def _go_to_the_end(self) -> None:
        while not self.finished:
            self._go_on()
            stopping = not self.finished and self.limit.now(spare=self._cost + self._ahead())
            saving = time.monotonic() - self._since >= self._cost / SAVING
            if self.ranks is not None:
                stopping, saving = self._agreed(stopping, saving)
            if stopping or self.finished or saving:
                self.save()
            if stopping:
                return

    def _agreed(self, stopping: bool, saving: bool) -> tuple[bool, bool]:
        """What one rank wants all of them do."""
        assert self.ranks is not None
        words = (stopping, saving, bool(self.stopped), self.limit.interrupted)
        stopping, saving, ended, interrupted = (bool(word) for word in self.ranks.most(*map(float, words)))
        if ended:
            self.stopped = self.stopped or "stopped by a callback of another rank"
        self.limit.interrupted |= interrupted
        return stopping and not ended, saving

    def results(self) -> list[Result]:
        """What came of each run so far; the state of the runs, which a checkpoint holds, is not changed by it."""
        results = self.engine.results(self)
        self._tell("on_end", results)
        return results

    def _tell(self, event: str, *about: Any) -> None:
        for callback in self.callbacks:
            if self.ranks is None or self.ranks.first or not callback.once:
                getattr(callback, event)(self, *about)

    @property
    def _due(self) -> bool:
        """Whether the runs are to be measured now."""
        return self.engine.done in self.engine.points and self.measured < self.engine.done

    def _go_on(self) -> None:
        """What is due: a measurement, or updates up to the next thing that is."""
        if self._due:
            self._measure()
        else:
            self._advance()
            self._tell("on_update")

    def _measure(self) -> None:
        last = self.engine.done >= self.engine.total
        with self.timed("measuring"):
            began = time.monotonic()
            rows = self.engine.measure(last)
            self._reading = (time.monotonic() - began) / max(self.engine.reads(last), 1)
        for row in rows:
            row["seconds"] = round(self.elapsed, 3)
        for history, row in zip(self.histories, rows, strict=True):
            history.append(row)
        self.measured = self.engine.done
        self._keep_theta()
        self._tell("on_epoch", rows)

    def _advance(self) -> None:
        """On to where something is due: a measurement, settling, a look at the clock."""
        engine, began, first = self.engine, time.monotonic(), self._rate is None
        with self.timed("first_updates" if first else "updates"):
            if engine.done >= engine.settle_at and not engine.settled:
                engine.settle()
                self._tell("on_settle")
                first = True  # another step is compiled and recorded
            done = engine.done
            points = [point for point in (engine.settle_at, *engine.points) if point > done]
            ahead = min([*points, done + self._slice()]) - done
            if self.ranks is not None:
                ahead = -int(self.ranks.most(-ahead)[0])
            engine.advance(ahead, self.limit)
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)  # the clock is to know what is done, not what is asked for
        rate = (engine.done - done) / max(time.monotonic() - began, 1e-9)
        self._rate = rate if self._rate is None or not first else self._rate

    def _slice(self) -> int:
        """Updates until the next look at the clock; a new process compiles and records in its first ones.

        It ends where a whole CUDA graph can, so that no updates are left to be done one by one.
        """
        stride, done, on_gpu = self.engine.stride, self.engine.done, self.engine.device.type == "cuda"
        if self._rate is None:
            most = 2 * stride if on_gpu else 1
        else:
            most = max(int(min((4 * LOOK if on_gpu else LOOK) * self._rate, MOST)), 1)
        aligned = (done + most) // stride * stride
        return aligned - done if aligned > done else most

    def _ahead(self) -> float:
        """Seconds that what comes next will take, about."""
        if self._due:
            return self._reading * self.engine.reads(self.engine.done >= self.engine.total)
        return 0.0 if self._rate is None else self._slice() / self._rate

    def _keep_theta(self) -> None:
        if self.engine.thetas is not None:
            self.thetas.offer(self.engine.done, self.engine.thetas)

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def save(self, again: bool = False) -> None:
        """Write a checkpoint of where the runs are, if they can go on from here and, unless ``again``, it is not there
        yet."""
        here = self.engine.done + (0.5 if self.measured == self.engine.done else 0.0)
        if self.checkpoint is None or not self.engine.resumable or (self._saved == here and not again):
            return
        with self.timed("saving"):
            before = time.monotonic()
            self.engine.check()
            if self.ranks is None or self.ranks.first:
                self.checkpoint.save(self._state(), self.engine.done)
        self._saved, self._since = here, time.monotonic()
        self._cost = self._since - before

    def _state(self) -> dict[str, Any]:
        state = {
            "engine": self.engine.state_dict(),
            "histories": self.histories,
            "thetas": self.thetas.state_dict(),
            "measured": self.measured,
            "reading": self._reading,
            "seconds": self.seconds,
            "calls": self.calls,
            "stopped": self.stopped,
            "random": random_states(self.engine.device),
        }
        kept = dict[str, list[dict[str, Any]]]()  # by class: the next call may have others beside them
        for callback in self.callbacks:
            kept.setdefault(type(callback).__qualname__, []).append(callback.state_dict())
        kept = {kind: states for kind, states in kept.items() if any(states)}
        return state | {"callbacks": kept} if kept else state

    def _resume(self) -> None:
        if self.checkpoint is None:
            return
        if self.ranks is None:
            state = self.checkpoint.load()
        else:
            state = self.ranks.from_first(lambda: self.checkpoint.load() or {})  # type: ignore[union-attr]
        if not state:
            return
        try:
            self._restore(state)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, EspalierError):
                raise
            where, why = self.checkpoint.folder, first_line(error)
            raise BadInput(f"the checkpoint in {where} does not fit this run: {why}. Use another folder") from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        self.histories = [list(history) for history in state["histories"]]
        self.thetas.load_state_dict(state["thetas"])
        self.measured, self._reading = int(state["measured"]), float(state["reading"])
        self.seconds, self.calls, self.stopped = dict(state["seconds"]), int(state["calls"]), str(state["stopped"])
        self._saved = self.engine.done + (0.5 if self.measured == self.engine.done else 0.0)
        kept = state.get("callbacks", {})
        for place, callback in enumerate(self.callbacks):
            states = kept.get(type(callback).__qualname__, []) if isinstance(kept, dict) else kept[place : place + 1]
            if states:
                callback.load_state_dict(states.pop(0))
        restore_random(state["random"], self.engine.device)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - began


# ---- when a run stops before its end ---------------------------------------------------------------------------------


class Stop:
    """Whether to stop after this update: the time is over, or the run is told to end. Neither cuts an update.

    time_limit: seconds from now; None: no limit."""

    def __init__(self, time_limit: float | None = None) -> None:
        if time_limit is not None and not real(time_limit, "time_limit", "a number of seconds") > 0:
            raise BadInput(f"time_limit is a positive number of seconds, not {time_limit!r}")
        self.end = None if time_limit is None else time.monotonic() + time_limit
        self.interrupted = False

    def now(self, spare: float = 0.0) -> bool:
        """spare: seconds that what follows will take."""
        return self.interrupted or (self.end is not None and time.monotonic() + spare >= self.end)

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C, or polite request to end (SIGTERM), is noted and the update finished; a second one ends it
        at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        before = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else somebody has plans of their own
            before[signal.SIGTERM] = signal.SIG_DFL

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            restore()

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            restore()


# ---- every global random state a run may draw from: dropout, somebody else's loader, their augmentation --------------


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of torch (and of the device), NumPy and Python, ready for a checkpoint."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  the global state is what loaders use
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(value) for value in rest)),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where :func:`random_states` stood."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed`` on inside; outside, everything draws on as if nothing had happened."""
    with isolated_random():
        seed_all(seed)
        yield
