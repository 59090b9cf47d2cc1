"""The run directory, of ``fit``, of each run of ``sweep`` and of `espalier train` alike: for reports, and for shipping.

``settings.json``  what was asked for, the seed, versions and hardware (of the last call that trained); its format
``metrics.jsonl``  one row for each epoch, JSON lines
``theta.safetensors``  ``theta`` ``(snapshots, d)`` float32 and ``updates`` ``(snapshots)`` int64
``result.json``    what came out, and the sizes that are kept and in full; with ``finished`` false, what would ship
                   where a time limit stopped the run
``small/``         the compact model, as ``espalier.save`` writes it
``probe.safetensors`` a few real inputs and the small network's outputs, by which every later copy of it is checked
``checkpoint-*``   the last two checkpoints
``call.json``      of `espalier train` alone: the command, the network's factory, the settings
``manifest.json``  the SHA-256 of these files, written last; a run that is going on has none
``lock``           who trains it now
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TextIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from espalier import files, schema
from espalier.compact import save
from espalier.compact.apply import without_graphs
from espalier.files import clean
from espalier.records import DIRECTORY_FORMAT as FORMAT
from espalier.records import METRICS, RESULT, SETTINGS, result_of, settings_of
from espalier.space import BadInput, Corrupt
from espalier.train import fingerprint
from espalier.train.callbacks import Callback
from espalier.train.checkpoint import NotSaved, pack, split_state, write
from espalier.train.loop import Loop
from espalier.train.result import Result, Row
from espalier.train.scoring import answers

try:
    import fcntl
except ImportError:  # not posix: nothing is refused there
    fcntl = None  # type: ignore[assignment]

SMALL, PROBE, LEFT, CALL = "small", "probe.safetensors", "left.txt", "call.json"
NAMES = (SETTINGS, METRICS, "theta.safetensors", RESULT)
SEALED = (*NAMES, PROBE, CALL, *(f"{SMALL}/{name}" for name in ("plan.json", "model.safetensors")))
LOCK = "lock"


class RunDirectory:
    """One run's folder: writes what came of it, refuses what is not its own."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.metrics = self.folder / METRICS

    def start(
        self, settings: Mapping[str, Any], device: torch.device, history: Sequence[Row], forced: Sequence[str] = ()
    ) -> None:
        """forced: in what the run was gone on with although it differed.

        Also puts the metrics back to what the checkpoint knows: rows written after it will be written again.
        """
        self.check()
        files.unseal(self.folder)
        head = {
            "format": FORMAT,
            "settings": dict(settings),
            "versions": fingerprint.versions(),
            "hardware": hardware(device),
        }
        head |= {"forced": list(forced)} if forced else {}
        write(self.folder / SETTINGS, _json(head))
        write(self.metrics, b"".join(_line(row) for row in history))

    def check(self) -> None:
        """Refuse a folder that holds files of these names which no run has written.

        What can be written anew is no reason to refuse: a folder with a manifest, or a checkpoint, is a run's.
        """
        files.below(self.folder, self.folder / SMALL)
        with contextlib.suppress(OSError, Corrupt):
            settings_of(self.folder)
            return
        there = [name for name in NAMES if (self.folder / name).exists()]
        ours = (self.folder / files.MANIFEST).exists() or any(self.folder.glob("checkpoint-*.safetensors"))
        if there and not ours:
            raise BadInput(
                f"{self.folder / there[0]} was not written by a run and would be overwritten; use another folder for "
                "checkpoint"
            )

    def recorded(self) -> dict[str, Any]:
        """The settings of the run in this folder; empty where there is none."""
        try:
            return dict(settings_of(self.folder)["settings"])
        except (OSError, Corrupt):
            return {}

    def complete(self) -> bool:
        """Whether a finished run has been written here, and is whole: then it is not written again."""
        try:
            for name in files.manifest(self.folder):
                files.check(self.folder, name)
            return bool(result_of(self.folder)["finished"])
        except (OSError, Corrupt):
            return False

    def epoch(self, row: Row) -> None:
        try:
            with open(self.metrics, "ab") as file:
                file.write(_line(row))
        except OSError as error:
            raise NotSaved(error.errno, f"{self.metrics} could not be written: {error.strerror}") from error

    def finish(self, result: Result, theta: Mapping[str, Tensor]) -> None:
        write(self.folder / "theta.safetensors", safetensors.torch.save(dict(theta)))
        small = deepcopy(result.model, without_graphs(result.model)).cpu()  # what ships runs anywhere
        if hasattr(small, "espalier_plan"):  # gates of one's own may cut in a way that cannot be saved
            save(small, self.folder / SMALL)
            structure, tensors = split_state({"inputs": result.examples, "outputs": answers(small, result.examples)})
            write(self.folder / PROBE, pack({"format": FORMAT, "state": structure}, tensors))
        write(self.folder / RESULT, _json(clean(result.summary())))
        self.seal()

    def seal(self) -> None:
        files.seal(self.folder, SEALED)

    def add(self, numbers: Mapping[str, Any], origin: Mapping[str, str]) -> dict[str, Any]:
        """Add to what came out, and to the settings where it came from. Returns all that came out."""
        settings = settings_of(self.folder)
        result: dict[str, Any] = result_of(self.folder) | clean(numbers)
        files.unseal(self.folder)
        write(self.folder / SETTINGS, _json({**settings, **origin}))
        write(self.folder / RESULT, _json(result))
        self.seal()
        return result

    def leave(self, weights: str | None) -> None:
        """Note the weights (a hash) with which an unfinished run was left, where they are ahead of its checkpoint."""
        path = self.folder / LEFT
        if weights is None:
            path.unlink(missing_ok=True)
        else:
            write(path, f"{weights}\n".encode())

    def left_with(self, weights: str) -> bool:
        """Whether the run was left with weights of this hash."""
        try:
            return schema.content(self.folder / LEFT, most=1 << 10).strip() == weights.encode()
        except (OSError, Corrupt):
            return False


class Records(Callback):
    """A run directory for each run of a loop. settings: of each run, what it is told by."""

    once = True

    def __init__(self, folders: Sequence[Path], settings: Sequence[Mapping[str, Any]]) -> None:
        self.directories, self.settings = [RunDirectory(folder) for folder in folders], settings
        self.written = False  # whether all of it is there already
        for directory in self.directories:
            directory.check()

    def on_begin(self, loop: Loop) -> None:
        self.written = loop.finished and all(directory.complete() for directory in self.directories)
        if not self.written:
            for directory, settings, history in zip(self.directories, self.settings, loop.histories, strict=True):
                directory.start(settings, loop.engine.device, history, loop.forced)

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        for directory, row in zip(self.directories, rows, strict=True):
            directory.epoch(row)

    def on_end(self, loop: Loop, results: list[Result]) -> None:
        if self.written:
            for directory in self.directories:  # a process that was killed may have come to all but this
                directory.seal()
        else:
            for i, (directory, result) in enumerate(zip(self.directories, results, strict=True)):
                if not (directory.folder / SETTINGS).exists():  # somebody has removed the folder on the way
                    directory.start(self.settings[i], loop.engine.device, loop.histories[i], loop.forced)
                directory.finish(result, loop.thetas.table(i))


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine as far as it tells, and the device the run was on."""
    story: dict[str, Any] = {
        "device": str(device),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        story["gpu"] = torch.cuda.get_device_name(device)
        story["gpu_memory"] = torch.cuda.get_device_properties(device).total_memory
        story["cuda"] = torch.version.cuda
    return story


def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # there on Linux alone
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _line(row: Row) -> bytes:
    return (json.dumps(clean(row), allow_nan=False) + "\n").encode()


# ---- one process at a time: what two at once would write over each other is refused to the second --------------------


@contextlib.contextmanager
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
