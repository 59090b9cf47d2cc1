"""What a user may do on the way of a run: callbacks, which ``fit`` and ``sweep`` take as a list.

Progress bars, run directories, early stopping and loggers are such callbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from espalier.space import BadType
from espalier.train.metrics import Row

if TYPE_CHECKING:
    from espalier.train.loop import Loop
    from espalier.train.result import Result


class Callback:
    """Override what is wanted; every method does nothing here. ``loop`` knows how far the runs are.

    A sweep trains batches of runs, one loop for each; ``rows`` and ``results`` have an entry for each run of the batch.

    >>> class Patient(Callback):
    ...     def on_epoch(self, loop, rows):
    ...         if loop.phase == "settled" and rows[0]["validation_error"] < 0.01:
    ...             loop.stop("the error is small enough")
    """

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


def check(given: Sequence[Callback]) -> list[Callback]:
    """The callbacks of a call; anything else is named."""
    if isinstance(given, Callback) or not isinstance(given, Sequence):
        raise BadType(f"callbacks is a list of espalier.Callback, not {type(given).__name__}")
    for one in given:
        if isinstance(one, type) or not isinstance(one, Callback):
            raise BadType(f"a callback is an object of a class made from espalier.Callback, not {one!r}")
    return list(given)
