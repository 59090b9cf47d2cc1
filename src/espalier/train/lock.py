"""One process at a time: what two at once would write over each other is refused to the second."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from espalier.files import NotSaved
from espalier.space import BadInput

try:
    import fcntl
except ImportError:  # not posix: nothing is refused there
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


@contextmanager
def locked(folder: Path, force: bool = False) -> Iterator[None]:
    """Hold a folder, which is made if need be. The system lets go of it when the process ends, however it ends.

    Who holds it is in the file, and is taken out at the end: a process that was killed leaves its name. On this host it
    is dead then; one of another host may live where locks do not reach this one, so it is passed over with ``force``
    alone.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        file = open(os.open(folder / LOCK, flags, 0o666), "r+", encoding="utf-8", errors="replace")  # noqa: SIM115
    except OSError as error:
        why = error.strerror or str(error)
        raise NotSaved(
            error.errno, f"{folder} could not be written: {why}. Choose a folder that can be made and written to"
        ) from error
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read(200).strip()
                raise BadInput(
                    f"another process trains the same runs{f' ({holder})' if holder else ''}, and keeps their state in "
                    f"{folder}; wait for it, or use another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
        file.seek(0)
        holder, host = file.read(200).strip(), platform.node()
        named = re.fullmatch(r"process \d+ on (.*), since .*", holder)
        if named and named[1] != host and not force:
            raise BadInput(
                f"{folder} is held by {holder}, on another host, where it may still train; when it does not, go on by "
                '--force (resume="anyway"), or use another folder'
            )
        if holder and not holder.startswith("process "):
            raise BadInput(f"{folder / LOCK} is not a lock of ours, and would be written over; use another folder")
        _say(file, f"process {os.getpid()} on {host}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        try:
            yield
        finally:
            _say(file, "")


def _say(file: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk takes no name
        file.seek(0)
        file.truncate(0)
        file.write(text)
        file.flush()
