"""Studies: all runs of some settings under one folder, batch by batch, continued after any interruption.

Of the paper's two a file is kept for each run; of a grid, the search, its rivals and its control at every target, seed
and fold, a file for each batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from espalier import files, schema
from espalier.data import Dataset, all_digits, folds, load
from espalier.space import BadInput, Corrupt
from espalier.study import run_files
from espalier.study.networks import Units, selection
from espalier.study.run_batches import GridBatch, PaperBatch, train
from espalier.study.settings import GRID_METHODS, GridSettings, PaperSettings, RunSpec, StudySettings, even_widths
from espalier.train import checks
from espalier.train.batched.batch import Compute
from espalier.train.checkpoint import write
from espalier.train.loop import Loop, Stop
from espalier.train.on_ray import Ray
from espalier.train.progress import Progress, choose
from espalier.train.run_directory import locked

RUNS = "runs.json"  # in the folder of a batch's state: which runs it is made of
FOLD_SEED = 0  # of the folds that are reported; what is tuned is tuned on folds of another seed
TUNING_SEED = 1


@dataclass(frozen=True)
class Part:
    """A batch there is to train. label: for messages; which: its number among others, in words. state: the folder of
    its checkpoints. elsewhere: what is said where another command has begun some of the same runs."""

    label: str
    runs: list[RunSpec]
    state: Path
    which: str = ""
    elsewhere: str = ""


class Study(ABC):
    """All runs of the settings under one folder: ``runs/`` for what is finished, ``state/`` for what is not.

    data: instead of a set by name, arrays of one's own as a Dataset. runs_at_once: how many runs at most are one batch;
    None: as many as have one shape. part_size: bytes of the largest file of a checkpoint; None: it is one file.
    """

    settings: Any

    def __init__(
        self,
        settings: StudySettings,
        out: str | os.PathLike[str],
        *,
        data: Dataset | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        compute: Compute | None = None,
        commit: str | None = None,
        command: str = "",
        force: bool = False,
        runs_at_once: int | None = None,
        part_size: int | None = None,
    ) -> None:
        if runs_at_once is not None and runs_at_once < 1:
            raise BadInput(f"runs_at_once is at least 1, not {runs_at_once}")
        self.settings, self.out, self.compute, self.runs_at_once = settings, Path(out), compute, runs_at_once
        self.device, self.part_size = checks.device(device), part_size
        self.commit, self.command, self.force = commit or run_files.revision(), command, force
        self.given = self.read(load(settings.dataset, data_dir) if data is None else data)
        self.ours = run_files.Ours(self.given.fingerprint(), force)

    @abstractmethod
    def read(self, data: Dataset) -> Dataset:
        """The data as the study reads them."""

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """The batches there are to train."""

    @abstractmethod
    def batch(self, part: Part) -> PaperBatch | GridBatch:
        """The runs of a part, to be trained."""

    @abstractmethod
    def keep(self, part: Part, batch: Any, loop: Loop) -> None:
        """Put on record what came out of a finished batch."""

    def place(self, kind: str, *names: str) -> Path:
        """A folder below ``runs/`` or ``state/``."""
        return files.below(self.out, self.out.joinpath(kind, self.settings.folder, *names))

    def check_size(self, data: Dataset) -> None:
        size, examples = self.settings.batch_size, len(data.train_labels)
        if 2 * size > examples:
            raise BadInput(f"batch_size={size} is too large for {examples} examples: at most {examples // 2}")

    def run(self, stop: Stop, progress: Progress) -> bool:
        """Train what is missing, batch by batch, until told to stop. Returns whether the study is complete."""
        for part in self.parts():
            if stop.now():
                return False
            if part.elsewhere:
                progress.say(part.elsewhere)
            if not self.train(part, stop, progress):
                return False
        return True

    def train(self, part: Part, stop: Stop, progress: Progress) -> bool:
        """One batch, to its end or until told to stop."""
        with locked(part.state, self.force):
            began = time.monotonic()
            batch = self.batch(part)
            loop = batch.loop(part.state, stop, progress, anyway=self.force, part_size=self.part_size)
            loop.seconds["setup"] += time.monotonic() - began
            if not train(loop, part.label, part.which, progress):
                return False
            self.keep(part, batch, loop)
        return True

    def about(self, batch: PaperBatch | GridBatch, loop: Loop) -> dict[str, Any]:
        """What is recorded of every run of a batch."""
        return {
            "study": self.settings.study,
            "evaluated_on": self.settings.evaluated_on,
            "examples": {"train": len(batch.data.train_labels), "test": len(batch.data.test_labels)},
            "standard_data": self.given.standard,
            **self.ours.described(*loop.forced),
            **run_files.origin(self.commit, self.command, self.device, batch.engine.batch.compute),
        }


class PaperStudy(Study):
    """One of the paper's two. keep_state: keep the last checkpoints of finished batches, and the weights of each run
    beside them."""

    settings: PaperSettings

    def __init__(self, *given: Any, keep_state: bool = False, **more: Any) -> None:
        self.keep_state = keep_state
        super().__init__(*given, **more)

    def read(self, data: Dataset) -> Dataset:
        if self.settings.held_out:
            data = data.hold_out(self.settings.held_out)
        data, self.network = selection(self.settings, data)
        self.check_size(data)
        return data

    def path(self, run: RunSpec) -> Path:
        return self.place("runs", run.variant) / f"{run.setting}-seed_{run.seed}.json"

    def weights(self, run: RunSpec) -> Path:
        """Where the weights of a finished run are kept."""
        return self.place("state", run.variant) / f"{run.setting}-seed_{run.seed}.safetensors"

    def parts(self) -> list[Part]:
        """The batches there are to train.

        A batch that was begun stays what it was, whichever of its files are there: its masks come from one generator,
        and the same command finds its checkpoints. Else it is made of the runs without a file. The folder of its state
        is that of all runs the command asks for: a command that asks for others leaves it alone.
        """
        parts, settings = list[Part](), self.settings
        for methods in settings.sharing:
            wanted = [run for method in methods if method in settings.methods for run in settings.runs(method)]
            size = self.runs_at_once or max(len(wanted), 1)
            for start in range(0, len(wanted), size):
                near = wanted[start : start + size]
                label = near[0].variant if methods == ("search",) else "+".join(dict.fromkeys(r.method for r in near))
                if size < len(wanted):
                    label += f"-{near[0].setting}-seed_{near[0].seed}-{len(near)}_runs"
                asked = zlib.crc32("".join(sorted(json.dumps(run.describe()) for run in near)).encode())
                state = self.place("state", f"{label}-{asked:08x}")
                if missing := [run for run in near if not self._done(run)]:
                    runs = _begun(state, wanted)
                    word = "" if runs else _elsewhere(label, state, missing)
                    parts.append(Part(label, runs or missing, state, elsewhere=word))
                elif not self.keep_state:
                    remove(state)  # a process that was killed between its last file and this
        for run in (run for part in parts for run in part.runs):  # what cannot be made is said before hours of work
            self.network.given(run)
        count = len(parts)
        return [replace(part, which=f" ({i} of {count})" * (count > 1)) for i, part in enumerate(parts, 1)]

    def batch(self, part: Part) -> PaperBatch:
        write(part.state / RUNS, json.dumps([run.describe() for run in part.runs]).encode())
        return PaperBatch(self.settings, self.network, self.given, part.runs, self.device, self.compute)

    def _described(self, run: RunSpec) -> dict[str, Any]:
        return self.settings.describe(run.method) | self.network.describe() | {"device": self.device.type}

    def _done(self, run: RunSpec) -> bool:
        """Whether it has a file; one of other settings is refused."""
        return self.ours.done(self.path(run), self._described(run))

    def keep(self, part: Part, batch: PaperBatch, loop: Loop) -> None:
        loop.save()  # a kill between two files must not change what the others will say
        common = self.about(batch, loop)
        common["standard_data"] |= self.settings.dataset == "digits"
        common["compute"] |= self.network.layout()
        for run, story in zip(part.runs, batch.results(loop), strict=True):
            if not self._done(run):
                run_files.save(self.path(run), story | {"settings": self._described(run)} | common)
        if not self.keep_state:
            shutil.rmtree(part.state, ignore_errors=True)
            return
        for run, tensors in zip(part.runs, batch.ships()):
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            write(self.weights(run), safetensors.torch.save(kept))


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


def _begun(state: Path, wanted: list[RunSpec]) -> list[RunSpec]:
    """The runs of a batch that has been begun in this folder, if all of them are wanted."""
    begun = _told(state / RUNS)
    known = {json.dumps(run.describe()): run for run in wanted}
    return [known[one] for one in begun] if all(one in known for one in begun) else []


def _elsewhere(label: str, state: Path, runs: list[RunSpec]) -> str:
    """What is said where another command has begun some of the same runs; nothing where none has."""
    ours = {json.dumps(run.describe()) for run in runs}
    for path in sorted(state.parent.glob(f"*/{RUNS}")):
        if path.parent != state and (shared := ours & set(_told(path))):
            return (
                f"{label}: {len(shared)} of these runs were begun by another command too, in {path.parent}; "
                "that command goes on with them, this one begins anew"
            )
    return ""


class Grid(Study):
    """A grid: the search, its rivals and its control at every target, seed and fold. named: whether the data are a set
    by name although they are given."""

    settings: GridSettings

    def __init__(self, *given: Any, named: bool | None = None, **more: Any) -> None:
        self.named = more.get("data") is None if named is None else named
        super().__init__(*given, **more)
        self._check()

    def read(self, data: Dataset) -> Dataset:
        data = data.flatten()
        self.full = Units.of(self.settings.hidden, data, least=1)  # what ships is to compute something of its input
        self.whole = _everything(data, self.named)
        return data

    def _check(self) -> None:
        """What cannot work is said before anything is trained."""
        settings, fold = self.settings, self.settings.parts[0]
        self.check_size(self.data(fold))
        for method in settings.methods:
            if method != "found":  # those depend on what is found
                self.batch(self.part(settings.runs(method, fold, self._even())[:: settings.trials]))

    def data(self, fold: int | None) -> Dataset:
        """What a fold trains and is evaluated on."""
        settings = self.settings
        if fold is None:
            return self.given.hold_out(settings.held_out) if settings.held_out else self.given
        whole, seed = (self.given, TUNING_SEED) if settings.held_out else (self.whole, FOLD_SEED)
        return whole.take(*folds(whole.train_labels.numpy(), settings.folds, seed)[fold])

    def methods(self) -> list[str]:
        return [method for method in GRID_METHODS if method in self.settings.methods]

    def run(self, stop: Stop, progress: Progress, elsewhere: Ray | None = None) -> bool:
        """Train what is missing, batch by batch, until told to stop. Returns whether the study is complete.

        elsewhere: as tasks of a cluster, as many at once as fit there; networks of the widths found come after those.
        """
        for method in self.methods():
            for file in self.place("runs", method).glob("*.jsonl"):
                remove(self.place("state", method, file.stem))  # a process was killed between such a file and this
        if elsewhere is None:
            return super().run(stop, progress)
        found = [[method for method in self.methods() if (method == "found") == last] for last in (False, True)]
        return all(self._train_elsewhere(methods, stop, progress, elsewhere) for methods in found)

    def _train_elsewhere(self, methods: Sequence[str], stop: Stop, progress: Progress, ray: Ray) -> bool:
        """All batches of these methods that are missing, as tasks."""
        jobs = {part.label: part.runs for part in self.parts(methods)}
        if not jobs or stop.now():
            return not jobs
        about: dict[str, Any] = {"device": str(self.device), "compute": self.compute, "commit": self.commit}
        # This process holds no lock of a batch, and a worker that died on another machine may have left one.
        about |= {"command": self.command, "data": self.given, "force": True, "named": self.named}
        shared = (self.settings, self.out.resolve(), about)
        return all(ray.carry_out(_as_task, shared, jobs, self.out, stop, progress).values())

    def parts(self, methods: Sequence[str] | None = None) -> Iterator[Part]:
        """Of these methods, default all; found one after another: what is trained first tells of what comes later."""
        for fold in self.settings.parts:
            for method in self.methods() if methods is None else methods:
                for runs in self.missing(method, fold):
                    yield self.part(runs)

    def part(self, runs: list[RunSpec]) -> Part:
        method, name = runs[0].method, run_files.batch_name(runs)
        return Part(f"{method} {name}", runs, self.place("state", method, name))

    def missing(self, method: str, fold: int | None) -> list[list[RunSpec]]:
        """Batches of the runs of this method that are not on record; a record of other settings is refused."""
        done = self.ours.finished(self.place("runs", method), self.described(method))
        found: dict[tuple[Any, ...], Sequence[int]] = dict(self._even())
        if method == "found":
            searched = self.ours.finished(self.place("runs", "search"), self.described("search"))
            found = {key: story["result"]["units"] for key, story in searched.items()}
        runs = [run for run in self.settings.runs(method, fold, found) if run.key not in done]
        most = self.runs_at_once or max(len(runs), 1)
        return [runs[a : a + most] for a in range(0, len(runs), most)]

    def described(self, method: str) -> dict[str, Any]:
        return self.settings.describe(method) | self.full.describe() | {"device": self.device.type}

    def _even(self) -> dict[tuple[Any, ...], tuple[int, ...]]:
        widths, settings = self.full.widths, self.settings
        return {(target,): even_widths(widths, target, settings.cost) for target in settings.targets}

    def batch(self, part: Part) -> GridBatch:
        data = self.data(part.runs[0].fold)
        return GridBatch(self.settings, self.full, data, part.runs, self.device, self.compute)

    def keep(self, part: Part, batch: GridBatch, loop: Loop) -> None:
        took, count, method = loop.elapsed, len(part.runs), batch.method
        head = self.about(batch, loop) | {
            "settings": self.described(method),
            "seconds": {"batch": round(took, 3), "per_run": round(took / count, 4)},
            "runs_in_batch": count,
            "calls": loop.calls,
        }
        run_files.save_batch(self.place("runs", method) / f"{part.state.name}.jsonl", head, batch.results(loop))
        shutil.rmtree(part.state, ignore_errors=True)


def _as_task(
    shared: tuple[GridSettings, Path, dict[str, Any]], runs: list[RunSpec], seconds: float | None
) -> tuple[bool, bool]:
    """A batch on a worker of a cluster; whether it is done, twice."""
    settings, out, about = shared
    grid = Grid(settings, out, **about)
    done = grid.train(grid.part(runs), Stop(seconds), choose(quiet=True))
    return done, done


def _everything(data: Dataset, named: bool) -> Dataset:
    """The set with all its examples in the training part: what folds are made of. The digits in their stored order."""
    if named and data.name == "digits":
        inputs, labels = all_digits()
        inputs = inputs.flatten(1)
    else:
        inputs, labels = (torch.cat(parts) for parts in zip(data.train, data.test, strict=True))
    return replace(data, train_inputs=inputs, train_labels=labels, test_inputs=inputs[:1], test_labels=labels[:1])
