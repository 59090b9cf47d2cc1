"""When a run stops before its end: its time is over, or it is told to end. Both end an update, never cut one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from espalier.space import BadInput, BadType


class Stop:
    """Whether to stop after this update. time_limit: seconds from now; None: no limit."""

    def __init__(self, time_limit: float | None = None) -> None:
        if time_limit is not None:
            if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)):
                raise BadType(f"time_limit is a number of seconds, not {time_limit!r}")
            if not time_limit > 0:
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
