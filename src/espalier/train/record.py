"""The run directory: settings, versions, hardware, metrics, theta over time and the result, for reports to read.

``settings.json``  what was asked for, the seed, versions and hardware (of the last call that trained)
``metrics.jsonl``  one row for each epoch, JSON lines
``theta.safetensors``  ``theta`` ``(snapshots, d)`` float32 and ``updates`` ``(snapshots)`` int64
``result.json``    what came out; with ``finished`` false, what would ship where a time limit stopped the run
``checkpoint-*``   the last two checkpoints
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import safetensors
import safetensors.torch
import torch

from espalier.space import BadInput
from espalier.train.checkpoint import NotSaved, write
from espalier.train.metrics import Row, Thinned, clean

NAMES = ("settings.json", "metrics.jsonl", "theta.safetensors", "result.json")


class Record:
    """Writes one run directory."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.metrics = self.folder / "metrics.jsonl"

    def start(self, settings: Mapping[str, Any], device: torch.device, history: Sequence[Row]) -> None:
        """Also puts the metrics back to what the checkpoint knows: rows written after it will be written again."""
        self.check()
        story = {"settings": dict(settings), "versions": versions(), "hardware": hardware(device)}
        write(self.folder / "settings.json", _json(story))
        write(self.metrics, b"".join(_line(row) for row in history))

    def check(self) -> None:
        """Refuse a folder that holds files of these names which no run has written."""
        try:
            story = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            story = None
        if isinstance(story, dict) and story.keys() >= {"settings", "versions", "hardware"}:
            return
        found = [name for name in NAMES if (self.folder / name).exists()]
        if found:
            raise BadInput(
                f"{self.folder / found[0]} was not written by a run and would be overwritten; use another folder for "
                "checkpoint"
            )

    def complete(self) -> bool:
        """Whether a finished run has been written here: then it is not written again."""
        try:
            return bool(json.loads((self.folder / "result.json").read_text())["finished"])
        except (OSError, ValueError, KeyError):
            return False

    def epoch(self, row: Row) -> None:
        try:
            with open(self.metrics, "ab") as file:
                file.write(_line(row))
        except OSError as error:
            raise NotSaved(error.errno, f"{self.metrics} could not be written: {error.strerror}") from error

    def finish(self, result: Mapping[str, Any], theta: Thinned) -> None:
        table = {"theta": theta.table(), "updates": torch.tensor(theta.updates, dtype=torch.int64)}
        write(self.folder / "theta.safetensors", safetensors.torch.save(table))
        write(self.folder / "result.json", _json(clean(result)))


def versions() -> dict[str, str]:
    package = sys.modules[__name__.partition(".")[0]]  # importing it here would point up the layers
    return {
        "espalier": package.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }


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
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or "unknown"


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _line(row: Row) -> bytes:
    return (json.dumps(clean(row), allow_nan=False) + "\n").encode()
