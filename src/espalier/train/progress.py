"""What a person sees of a run: how far it is, how well it goes, how long it will take."""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any, TextIO

from espalier.space import BadType
from espalier.train.callbacks import Callback
from espalier.train.loop import Loop
from espalier.train.result import Row

NARROW = 115  # columns: a bar, the time left and the numbers of an epoch


class Progress:
    """Told of every update and epoch; knows how long the rest will take, and says nothing."""

    def start(self, done: int, total: int) -> None:
        self.done = self.first = done
        self.total, self.began = total, time.monotonic()

    def left(self) -> str:
        """The time left in words, from the updates done since the start of this call."""
        done = self.done - self.first
        return span((time.monotonic() - self.began) / done * (self.total - self.done) if done else None)

    def update(self, done: int, text: str = "") -> None:
        """text: how it goes, where there is more to say than how far it is."""

    def epoch(self, text: str) -> None: ...
    def states(self, lines: list[str]) -> None:
        """Of a study: one line for each setting, with every run of it."""

    def say(self, text: str) -> None: ...
    def stop(self) -> None: ...


class Lines(Progress):
    """Plain lines for logs: the first epoch's, the last's, and between them one about every ``every`` seconds; where
    epochs are long, also inside them. Runs of hours get them less often."""

    def __init__(self, stream: TextIO, every: float = 10.0) -> None:
        self.stream, self.every = stream, every
        self.shown, self.fresh = 0.0, True  # no epoch was told of yet

    def start(self, done: int, total: int) -> None:
        super().start(done, total)
        self.shown = self.began

    def update(self, done: int, text: str = "") -> None:
        self.done = done
        if self._due():  # a line of an epoch is shown once
            self._show(text or f"update {done:,} of {self.total:,}")

    def epoch(self, text: str) -> None:
        first, self.fresh = self.fresh, False
        if first or self._due() or self.done == self.total:
            self._show(text)

    def states(self, lines: list[str]) -> None:
        if self.done == self.total:  # a log tells each run once, at its end
            for line in lines:
                self.say(f"      {line}")

    def _due(self) -> bool:
        now = time.monotonic()
        return now - self.shown >= max(self.every, (now - self.began) / 50)

    def _show(self, text: str) -> None:
        self.shown = time.monotonic()
        self.say(f"{self.done / self.total:4.0%}  {text}  {self.left()} left")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Bar(Progress):
    """A bar on a terminal, by rich; on a narrow one the numbers come first, and there is no bar."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        console = Console(stderr=True) if console is None else console
        self.narrow = console.width < NARROW
        self.bar = RichProgress(
            *([] if self.narrow else [BarColumn(bar_width=24)]),
            TaskProgressColumn(table_column=Column(no_wrap=True, min_width=len("100%"))),
            TextColumn("{task.fields[left]} left", table_column=Column(no_wrap=True, min_width=len("59 s left"))),
            TextColumn("{task.fields[text]}", markup=False),  # what is too long is cut off here, and only here
            console=console,
            refresh_per_second=4,
        )
        self.drawn = 0.0
        self.task: Any = None

    def start(self, done: int, total: int) -> None:
        super().start(done, total)
        self.task = self.bar.add_task("", total=total, completed=done, text="", left="?")
        self.bar.start()

    def update(self, done: int, text: str = "") -> None:
        self.done = done
        now = time.monotonic()
        if now - self.drawn > 0.1:  # updates may take microseconds
            self.drawn = now
            said: dict[str, Any] = {"text": text} if text else {}
            self.bar.update(self.task, completed=done, left=self.left(), **said)

    def epoch(self, text: str) -> None:
        if self.narrow:
            text = text.replace("validation if cut now", "if cut now").replace("  ", " ")
        self.bar.update(self.task, completed=self.done, text=text, left=self.left())

    def states(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    def say(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self.bar.stop()


def span(seconds: float | None) -> str:
    """A time as a person says it.

    >>> span(None), span(4.2), span(200), span(8000)
    ('?', '4 s', '3 min 20 s', '2 h 13 min')
    """
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Shown(Callback):
    """Tells a person by way of a :class:`Progress`."""

    once = True

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_begin(self, loop: Loop) -> None:
        if 0 < loop.update < loop.updates:
            self.progress.say(f"going on after update {loop.update} of {loop.updates}")
        self.progress.start(loop.update, loop.updates)

    def on_update(self, loop: Loop) -> None:
        self.progress.update(loop.update)

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        self.progress.epoch(describe(rows))

    def on_leave(self, loop: Loop) -> None:
        self.progress.stop()


def describe(rows: list[Row]) -> str:
    """Rows for a person: one run in full, of several the medians."""
    shares = "cost_share" if rows[0]["settled"] else "expected_share"  # a selection has its size before theta has
    row = rows[0] | {key: _median(rows, key) for key in ("loss", "error", "validation_error", shares)}
    parts = [f"{len(rows)} runs"] if len(rows) > 1 else []
    parts += [f"epoch {row['epoch']}", f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss none"]
    # While the structure is searched for, the one mask that would ship now may be far worse than those that are drawn;
    # before the search begins it is any mask of its size.
    validation = "validation" if row["settled"] else "validation if cut now"
    shown = [("error", "error"), (validation, "validation_error"), ("share", shares)]
    for name, key in shown if row["begun"] else shown[:1]:
        if row[key] is not None:
            parts.append(f"{name} {row[key]:.2%}")
    if row["begun"]:
        parts += _measured(rows, validation)
    phase = "settled" if row["settled"] else "" if row["begun"] else "the whole network, before the search"
    return "  ".join([*parts, phase] if phase else parts)


def _measured(rows: list[Row], validation: str) -> list[str]:
    """Metrics; and the loss, where it is all that is known of the validation."""
    names = [key for key in rows[0] if key.startswith("validation_") and key != "validation_error"]
    if _median(rows, "validation_error") is not None or len(names) > 1:
        names = [name for name in names if name != "validation_loss"]
    values = {name.removeprefix("validation_"): _median(rows, name) for name in names}
    return [f"{validation} {name} {value:.4g}" for name, value in values.items() if value is not None]


def _median(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return median(values) if values else None


def choose(quiet: bool) -> Progress:
    """Nothing, a bar on a terminal where rich is installed, or plain lines."""
    if not isinstance(quiet, (bool, int)):
        raise BadType(f"quiet is True or False, not {type(quiet).__name__}")
    if quiet:
        return Progress()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines(sys.stderr)
