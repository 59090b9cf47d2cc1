"""One process at a time: what two at once would write over each other is refused to the second."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from espalier.files import NotSaved
from espalier.space import BadInput

try:
    import fcntl
except ImportError:  # not posix: nothing is refused there
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if need be. The system lets go of it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
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
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield
