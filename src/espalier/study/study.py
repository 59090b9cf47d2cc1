"""A study: all runs of an experiment's settings under one folder, batch by batch, continued after any interruption."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from espalier import files, schema
from espalier.data import Dataset, load
from espalier.space import BadInput, Corrupt
from espalier.study import run_files
from espalier.study.networks import Selection, connections_of, units_of
from espalier.study.run_batches import PaperBatch, train
from espalier.study.settings import PaperSettings, RunSpec
from espalier.train import checks
from espalier.train.batched.batch import Compute
from espalier.train.checkpoint import write
from espalier.train.lock import locked
from espalier.train.loop import Loop
from espalier.train.progress import Progress
from espalier.train.stop import Stop

RUNS = "runs.json"  # in the folder of a batch's state: which runs it is made of


@dataclass(frozen=True)
class Experiment:
    """name: of the study, in its run files. sharing: methods whose runs have one shape, and may be one batch. reading:
    how the experiment reads its data. network: what it trains on them."""

    name: str
    sharing: tuple[tuple[str, ...], ...]
    reading: Callable[[Dataset], Dataset]
    network: Callable[[Any, Dataset], Selection]


class Part(NamedTuple):
    """A batch there is to train. label: for messages; state: the folder of its checkpoints."""

    label: str
    runs: list[RunSpec]
    state: Path


class Study:
    """All runs of the settings under one folder: ``runs/`` for their files, ``state/`` for what is unfinished.

    runs_at_once: how many runs at most are one batch; None: as many as have one shape. keep_state: keep the last
    checkpoints of finished batches, and the weights of each run beside them.
    """

    def __init__(
        self,
        experiment: Experiment,
        settings: PaperSettings,
        out: str | os.PathLike[str],
        *,
        data: Dataset | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        compute: Compute | None = None,
        commit: str | None = None,
        command: str = "",
        force: bool = False,
        keep_state: bool = False,
        runs_at_once: int | None = None,
    ) -> None:
        if runs_at_once is not None and runs_at_once < 1:
            raise BadInput(f"runs_at_once is at least 1, not {runs_at_once}")
        self.experiment, self.settings, self.out = experiment, settings, Path(out)
        self.compute, self.keep_state, self.runs_at_once = compute, keep_state, runs_at_once
        self.device = checks.device(device)
        self.data = _read(settings, experiment.reading, data, data_dir)
        self.network = experiment.network(settings, self.data)
        self.commit, self.command, self.force = commit or run_files.revision(), command, force
        self.ours = run_files.Ours(self.data.fingerprint(), force)

    def path(self, run: RunSpec) -> Path:
        folder = files.below(self.out, self.out / "runs" / self.settings.folder / run.variant)
        return folder / f"{run.setting}-seed_{run.seed}.json"

    def wanted(self, methods: tuple[str, ...]) -> list[RunSpec]:
        return [run for method in methods if method in self.settings.methods for run in self.settings.runs(method)]

    def missing(self, methods: tuple[str, ...]) -> list[RunSpec]:
        """The runs of these methods without a file; a file of other settings is refused."""
        return self._without_file(self.wanted(methods))

    def _without_file(self, runs: list[RunSpec]) -> list[RunSpec]:
        return [run for run in runs if not self.ours.done(self.path(run), self._described(run))]

    def parts(self) -> list[Part]:
        """The batches there are to train.

        A batch that was begun stays what it was, whichever of its files are there: its masks come from one generator,
        and the same command finds its checkpoints. Else it is made of the runs without a file. The folder of its state
        is that of all runs the command asks for: a command that asks for others leaves it alone.
        """
        found = list[Part]()
        for methods in self.experiment.sharing:
            wanted = self.wanted(methods)
            size = self.runs_at_once or max(len(wanted), 1)
            for start in range(0, len(wanted), size):
                near = wanted[start : start + size]
                missing = self._without_file(near)
                label = near[0].variant if methods == ("search",) else "+".join(dict.fromkeys(r.method for r in near))
                if size < len(wanted):
                    label += f"-{near[0].setting}-seed_{near[0].seed}-{len(near)}_runs"
                asked = zlib.crc32("".join(sorted(json.dumps(run.describe()) for run in near)).encode())
                state = files.below(self.out, self.out / "state" / self.settings.folder / f"{label}-{asked:08x}")
                if missing:
                    found.append(Part(label, self._begun(state, wanted) or missing, state))
                elif not self.keep_state:
                    remove(state)  # a process that was killed between its last file and this
        return found

    def _begun(self, state: Path, wanted: list[RunSpec]) -> list[RunSpec] | None:
        """The runs of a batch that has been begun in this folder, if all of them are wanted."""
        begun = _told(state / RUNS)
        known = {json.dumps(run.describe()): run for run in wanted}
        runs = [known[one] for one in begun if one in known]
        return runs if begun and len(runs) == len(begun) else None

    def _elsewhere(self, part: Part) -> str:
        """What is said where another command has begun some of the same runs; nothing where none has."""
        ours = {json.dumps(run.describe()) for run in part.runs}
        for path in sorted(part.state.parent.glob(f"*/{RUNS}")):
            if path.parent != part.state and (shared := ours & set(_told(path))):
                return (
                    f"{part.label}: {len(shared)} of these runs were begun by another command too, in {path.parent}; "
                    "that command goes on with them, this one begins anew"
                )
        return ""

    def run(self, stop: Stop, progress: Progress) -> bool:
        """Train what is missing, batch by batch, until told to stop. Returns whether the study is complete."""
        parts = self.parts()
        for part in parts:  # what cannot be made is said before hours of work on the rest
            for run in part.runs:
                self.network.given(run)
        for number, part in enumerate(parts, 1):
            which = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
            if stop.now():
                return False
            if (word := self._elsewhere(part)) and not (part.state / RUNS).exists():
                progress.say(word)
            with locked(part.state, self.force):
                if not self._train(part, which, stop, progress):
                    return False
        return True

    def _train(self, part: Part, which: str, stop: Stop, progress: Progress) -> bool:
        """One batch, to its end or until told to stop; which: its number among others, in words."""
        began, runs = time.monotonic(), part.runs
        write(part.state / RUNS, json.dumps([run.describe() for run in runs]).encode())
        batch = PaperBatch(self.settings, self.network, self.data, runs, self.device, self.compute)
        loop = batch.loop(part.state, stop, progress, self.force)
        loop.seconds["setup"] += time.monotonic() - began
        if not train(loop, part.label, which, progress):
            return False
        loop.save()  # a kill between two files must not change what the others will say
        self._record(batch, loop)
        if self.keep_state:
            self._ship(batch)
        else:
            shutil.rmtree(part.state, ignore_errors=True)
        return True

    def weights(self, run: RunSpec) -> Path:
        """Where the weights of a finished run are kept."""
        folder = files.below(self.out, self.out / "state" / self.settings.folder / run.variant)
        return folder / f"{run.setting}-seed_{run.seed}.safetensors"

    def _ship(self, batch: PaperBatch) -> None:
        for run, tensors in zip(batch.specs, batch.ships()):
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            write(self.weights(run), safetensors.torch.save(kept))

    def _described(self, run: RunSpec) -> dict[str, Any]:
        return self.settings.describe(run.method) | self.network.describe() | {"device": self.device.type}

    def _record(self, batch: PaperBatch, loop: Loop) -> None:
        common = {
            "study": self.experiment.name,
            "evaluated_on": self.settings.evaluated_on,
            "examples": {"train": len(self.data.train_labels), "test": len(self.data.test_labels)},
            "standard_data": self.data.standard or self.settings.dataset == "digits",
            **self.ours.described(*loop.forced),
            **run_files.origin(self.commit, self.command, self.device, batch.engine.batch.compute),
        }
        common["compute"] |= self.network.layout()
        for run, story in zip(batch.specs, batch.results(loop), strict=True):
            if not self.ours.done(self.path(run), self._described(run)):
                run_files.save(self.path(run), story | {"settings": self._described(run)} | common)


def remove(state: Path) -> None:
    """The state of a finished batch, unless another process is about to do so."""
    if state.exists():
        with contextlib.suppress(BadInput), locked(state):
            shutil.rmtree(state, ignore_errors=True)


def _told(path: Path) -> list[str]:
    """The runs that a batch was begun with, each described in JSON; none where there is no such file."""
    try:
        return [json.dumps(one) for one in schema.read(path, schema.each(schema.anything))]
    except (OSError, Corrupt):
        return []


def _read(
    settings: PaperSettings,
    reading: Callable[[Dataset], Dataset],
    data: Dataset | None,
    data_dir: str | os.PathLike[str] | None,
) -> Dataset:
    read = load(settings.dataset, data_dir) if data is None else data
    if settings.held_out:
        read = read.hold_out(settings.held_out)
    read = reading(read)
    if settings.batch_size * 2 > len(read.train_labels):
        most = len(read.train_labels) // 2
        raise BadInput(
            f"batch_size={settings.batch_size} is too large for {len(read.train_labels)} examples: at most {most}"
        )
    return read


UNIT_SELECTION = Experiment("unit-selection", (("search",), ("fixed", "dropout")), Dataset.flatten, units_of)
# Images are read as they are stored, each channel standardised.
CONNECTION_SELECTION = Experiment(
    "connection-selection", (("search",), ("random", "full")), lambda data: data, connections_of
)
