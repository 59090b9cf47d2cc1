"""A grid study: the search, its rivals and its control at every target, seed and fold, batch by batch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from espalier import files
from espalier.data import Dataset, all_digits, folds, load
from espalier.space import BadInput
from espalier.study import run_files
from espalier.study.run_batches import GridBatch, train
from espalier.study.settings import GRID_METHODS as METHODS
from espalier.study.settings import GridRun, GridSettings, even_widths
from espalier.study.study import remove
from espalier.train import checks
from espalier.train.batched.batch import Compute
from espalier.train.lock import locked
from espalier.train.on_ray import Ray
from espalier.train.progress import Progress, choose
from espalier.train.stop import Stop

STUDY = "grid"
FOLD_SEED = 0  # of the folds that are reported; what is tuned is tuned on folds of another seed
TUNING_SEED = 1


class Grid:
    """All runs of the settings under one folder: ``runs/`` for what is finished, ``state/`` for what is not.

    data: instead of a set by name, arrays of one's own as a Dataset; named: whether it is a set by name all the same.
    at_once: the most runs in one batch.
    """

    def __init__(
        self,
        settings: GridSettings,
        out: str | os.PathLike[str],
        *,
        data: Dataset | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        compute: Compute | None = None,
        at_once: int | None = None,
        commit: str | None = None,
        command: str = "",
        force: bool = False,
        named: bool | None = None,
    ) -> None:
        self.settings, self.out, self.compute = settings, Path(out), compute
        self.device = checks.device(device)
        if at_once is not None and at_once < 1:
            raise BadInput(f"at_once is at least 1, not {at_once}")
        self.at_once = at_once
        self.given = (load(settings.dataset, data_dir) if data is None else data).flatten()
        self.named = data is None if named is None else named
        self.whole = _everything(self.given, self.named)
        inputs = self.given.train_inputs.shape[1]
        self.widths = (inputs, *(settings.hidden or (inputs,) * 3), len(self.given.classes))
        self.commit, self.command, self.force = commit or run_files.revision(), command, force
        self.ours = run_files.Ours(self.given.fingerprint(), force)
        self._check()

    def _check(self) -> None:
        """What cannot work is said before anything is trained."""
        settings, fold = self.settings, self.settings.parts[0]
        data = self.data(fold)
        if 2 * settings.batch_size > len(data.train_labels):
            most = f"{len(data.train_labels)} examples: at most {len(data.train_labels) // 2}"
            raise BadInput(f"batch_size={settings.batch_size} is too large for {most}")
        for method in settings.methods:
            if method != "found":  # those depend on what is found
                runs = settings.runs(method, fold, self._even())
                self._batch(runs[:: settings.trials], data)

    def data(self, fold: int | None) -> Dataset:
        """What a fold trains and is evaluated on."""
        settings = self.settings
        if not settings.held_out:
            if fold is None:
                return self.given
            kept, held = folds(self.whole.train_labels.numpy(), settings.folds, FOLD_SEED)[fold]
            return self.whole.take(kept, held)
        if fold is None:
            return self.given.hold_out(settings.held_out)
        kept, held = folds(self.given.train_labels.numpy(), settings.folds, TUNING_SEED)[fold]
        return self.given.take(kept, held)

    def run(self, stop: Stop, progress: Progress, elsewhere: Ray | None = None) -> bool:
        """Train what is missing, batch by batch, until told to stop. Returns whether the study is complete.

        elsewhere: as tasks of a cluster, as many at once as fit there; networks of the widths found come after those.
        """
        for method in self.settings.methods:
            for file in self.place(method).glob("*.jsonl"):  # a process was killed between such a file and the clean-up
                remove(self._state(method, file.stem))
        methods = [method for method in METHODS if method in self.settings.methods]
        if elsewhere is not None:
            found = ["found"] if "found" in methods else []
            parts = [[method for method in methods if method not in found], found]
            return all(self._train_elsewhere(part, stop, progress, elsewhere) for part in parts)
        for fold in self.settings.parts:
            data = self.data(fold)
            for method in methods:
                for runs in self.missing(method, fold):
                    if stop.now() or not self._train(runs, data, stop, progress):
                        return False
        return True

    def _train_elsewhere(self, methods: Sequence[str], stop: Stop, progress: Progress, ray: Ray) -> bool:
        """All batches of these methods that are missing, as tasks."""
        jobs = {
            f"{method} {run_files.batch_name(runs)}": (runs, fold)
            for fold in self.settings.parts
            for method in methods
            for runs in self.missing(method, fold)
        }
        if not jobs or stop.now():
            return not jobs
        about: dict[str, Any] = {"device": str(self.device), "compute": self.compute, "commit": self.commit}
        # This process holds no lock of a batch, and a worker that died on another machine may have left one.
        about |= {"command": self.command, "data": self.given, "force": True, "named": self.named}
        shared = (self.settings, self.out.resolve(), about)
        return all(ray.carry_out(_as_task, shared, jobs, self.out, stop, progress).values())

    def missing(self, method: str, fold: int | None) -> list[list[GridRun]]:
        """Batches of the runs of this method that are not on record; a record of other settings is refused."""
        done = self.ours.finished(self.place(method), self.described(method))
        found: dict[tuple[Any, ...], Sequence[int]] = dict(self._even())
        if method == "found":
            searched = self.ours.finished(self.place("search"), self.described("search"))
            found = {key: story["result"]["units"] for key, story in searched.items()}
        runs = [run for run in self.settings.runs(method, fold, found) if run.key not in done]
        most = self.at_once or max(len(runs), 1)
        return [runs[a : a + most] for a in range(0, len(runs), most)]

    def place(self, method: str) -> Path:
        return files.below(self.out, self.out / "runs" / self.settings.folder / method)

    def _state(self, method: str, name: str) -> Path:
        return files.below(self.out, self.out / "state" / self.settings.folder / method / name)

    def described(self, method: str) -> dict[str, Any]:
        return self.settings.describe(method) | {"widths": list(self.widths), "device": self.device.type}

    def _even(self) -> dict[tuple[Any, ...], tuple[int, ...]]:
        return {(target,): even_widths(self.widths, target, self.settings.cost) for target in self.settings.targets}

    def _batch(self, runs: Sequence[GridRun], data: Dataset) -> GridBatch:
        return GridBatch(self.settings, self.widths, data, runs, self.device, self.compute)

    def _train(self, runs: list[GridRun], data: Dataset, stop: Stop, progress: Progress) -> bool:
        name = run_files.batch_name(runs)
        folder = self._state(runs[0].method, name)
        with locked(folder, self.force):
            batch = self._batch(runs, data)
            loop = batch.loop(folder, stop, progress, self.force)
            if not train(loop, f"{runs[0].method} {name}", "", progress):
                return False
            took = loop.elapsed
            head = {
                "study": STUDY,
                "settings": self.described(runs[0].method),
                "evaluated_on": self.settings.evaluated_on,
                "examples": {"train": len(data.train_labels), "test": len(data.test_labels)},
                "standard_data": self.given.standard,
                **self.ours.described(*loop.forced),
                "seconds": {"batch": round(took, 3), "per_run": round(took / len(runs), 4)},
                "runs_in_batch": len(runs),
                "calls": loop.calls,
                **run_files.origin(self.commit, self.command, self.device, batch.engine.batch.compute),
            }
            run_files.save_batch(self.place(runs[0].method) / f"{name}.jsonl", head, batch.results(loop))
            shutil.rmtree(folder, ignore_errors=True)
        return True


def _as_task(
    shared: tuple[GridSettings, Path, dict[str, Any]], job: tuple[list[GridRun], int | None], seconds: float | None
) -> tuple[bool, bool]:
    """A batch on a worker of a cluster; whether it is done, twice."""
    (settings, out, about), (runs, fold) = shared, job
    grid = Grid(settings, out, **about)
    done = grid._train(runs, grid.data(fold), Stop(seconds), choose(quiet=True))
    return done, done


def _everything(data: Dataset, named: bool) -> Dataset:
    """The set with all its examples in the training part: what folds are made of. The digits in their stored order."""
    if named and data.name == "digits":
        inputs, labels = all_digits()
        inputs = inputs.flatten(1)
    else:
        inputs, labels = (torch.cat(parts) for parts in zip(data.train, data.test, strict=True))
    return Dataset(
        data.name, inputs, labels, inputs[:1], labels[:1], data.classes, data.scale, data.mean, data.std, data.standard
    )
