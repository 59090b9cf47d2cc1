"""The paper's first experiment: unit selection by the search, against fixed networks and dropout, batch by batch."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch

from espalier.data import Dataset, load
from espalier.space import BadInput
from espalier.study import record
from espalier.study.batch import StudyBatch
from espalier.study.network import Network
from espalier.study.spec import RunSpec, Settings
from espalier.train.batched.batch import Compute
from espalier.train.progress import Progress
from espalier.train.record import hardware, versions
from espalier.train.stop import Stop

STUDY = "unit-selection"
SHARING = (("search",), ("fixed", "dropout"))  # methods whose runs have one shape


class Study:
    """All runs of the settings under one folder: ``runs/`` for their files, ``state/`` for what is unfinished."""

    def __init__(
        self,
        settings: Settings,
        out: str | os.PathLike[str],
        *,
        data: Dataset | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        compute: Compute | None = None,
        commit: str | None = None,
        command: str = "",
        keep_state: bool = False,
    ) -> None:
        self.settings, self.out, self.compute, self.keep_state = settings, Path(out), compute, keep_state
        self.device = _device(device)
        self.data = _read(settings, data, data_dir)
        inputs = self.data.train_inputs.shape[1]
        hidden = settings.hidden or (inputs,) * 3
        self.network = Network((inputs, *hidden, len(self.data.classes)))
        self.commit, self.command = commit or record.commit(), command

    def path(self, run: RunSpec) -> Path:
        return self.out / "runs" / self.settings.folder / run.variant / f"{run.setting}-seed_{run.seed}.json"

    def missing(self, methods: tuple[str, ...]) -> list[RunSpec]:
        """The runs of these methods without a file; a file of other settings is refused."""
        wanted = [run for method in methods if method in self.settings.methods for run in self.settings.runs(method)]
        return [run for run in wanted if not record.done(self.path(run), self._described(run))]

    def run(self, stop: Stop, progress: Progress) -> bool:
        """Train what is missing, batch by batch, until told to stop. Returns whether the study is complete."""
        parts = [(methods, runs) for methods in SHARING if (runs := self.missing(methods))]
        for methods, runs in parts:
            if stop.now():
                return False
            began = time.monotonic()
            label = runs[0].variant if methods == ("search",) else "+".join(dict.fromkeys(r.method for r in runs))
            folder = self.out / "state" / self.settings.folder / label
            batch = StudyBatch(self.settings, self.network, self.data, runs, self.device, folder, self.compute)
            batch.seconds["setup"] += time.monotonic() - began
            progress.say(f"{label}: {len(runs)} runs of {batch.total:,} updates as one batch on {self.device}")
            if not batch.train(stop, progress):
                progress.say(
                    f"{label}: stopped after {batch.batch.done:,} updates; the same command goes on from there"
                )
                return False
            self._record(batch)
            if self.keep_state:
                batch.save()
            else:
                shutil.rmtree(folder, ignore_errors=True)
            took = sum(batch.seconds.values())
            progress.say(f"{label}: {len(runs)} runs done in {took:,.1f} s, {took / len(runs):,.1f} s each")
        return True

    def _described(self, run: RunSpec) -> dict[str, object]:
        shown = self.settings.describe(run.method)
        return shown | {"widths": list(self.network.widths), "device": self.device.type}

    def _record(self, batch: StudyBatch) -> None:
        common = {
            "study": STUDY,
            "evaluated_on": self.settings.evaluated_on,
            "examples": {"train": len(self.data.train_labels), "test": len(self.data.test_labels)},
            "standard_data": self.data.standard or self.settings.dataset == "digits",
            "hardware": hardware(self.device),
            "versions": versions(),
            "commit": self.commit,
            "command": self.command,
            "compute": asdict(batch.batch.compute),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        for run, story in zip(batch.runs, batch.results(), strict=True):
            record.save(self.path(run), story | {"settings": self._described(run)} | common)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"device {device!r} is not known to torch: {str(error).splitlines()[0]}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device {device!r}: torch sees no CUDA device here; use --device cpu")
    return found


def _read(settings: Settings, data: Dataset | None, data_dir: str | os.PathLike[str] | None) -> Dataset:
    """The data as vectors, pixels as stored; divided by their largest value when read (MNIST: 255)."""
    read = load(settings.dataset, data_dir) if data is None else data
    if settings.held_out:
        read = read.hold_out(settings.held_out)
    read = read.flatten()
    if settings.batch_size * 2 > len(read.train_labels):
        most = len(read.train_labels) // 2
        raise BadInput(
            f"batch_size={settings.batch_size} is too large for {len(read.train_labels)} examples: at most {most}"
        )
    return read
