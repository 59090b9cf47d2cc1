"""Studies: all runs of some settings under one folder, batch by batch, continued after any interruption.

What is finished is a JSON-lines file for each batch. Its first line holds what the runs share: their settings, and
where, when and with what they ran. Then comes a line for each run: what was asked for, and what came out. A file for
each run would be mostly repetition, and a study may have thousands.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from espalier import files, schema
from espalier.data import Dataset, all_digits, folds, load
from espalier.records import FORMAT, runs_of
from espalier.space import BadInput, Corrupt
from espalier.study.settings import KEY, GridSettings, PaperSettings, RunSpec, StudySettings, even_widths
from espalier.study.study_batches import GridBatch, PaperBatch, Selection, Units, selection
from espalier.train import checks
from espalier.train.batched.batch import Compute
from espalier.train.checkpoint import write
from espalier.train.fingerprint import versions
from espalier.train.loop import Loop, Stop, seeded
from espalier.train.on_ray import Ray
from espalier.train.progress import Progress, choose
from espalier.train.run_directory import hardware, locked

Record = dict[str, Any]
DATA = "data_sha256"  # in the file of a batch: a hash of all data
FREE = {"precision", "points", "device"}  # what runs of one variant may differ in, though not the same run
RUNS = "runs.json"  # in the folder of a batch's state: which runs it is made of
FOLD_SEED = 0  # of the folds that are reported; what is tuned is tuned on folds of another seed
TUNING_SEED = 1


@dataclass(frozen=True)
class Part:
    """A batch there is to train. label: for messages; which: its number among others, in words. place: the folder of
    its file; state: of its checkpoints. elsewhere: what is said where another command has begun some of the same
    runs."""

    label: str
    runs: list[RunSpec]
    place: Path
    state: Path
    which: str = ""
    elsewhere: str = ""


class Study(ABC):
    """All runs of the settings under one folder: ``runs/`` for what is finished, ``state/`` for what is not.

    data: instead of a set by name, arrays of one's own as a Dataset. force: files of other data or settings count as
    finished too, and new ones say what differed. runs_at_once: how many runs at most are one batch; None: as many as
    have one shape. part_size: bytes of the largest file of a checkpoint; None: it is one file. keep_state: keep the
    last checkpoints of finished batches, and the weights of each run beside them.
    """

    settings: Any
    network: Selection
    batches: type[PaperBatch] | type[GridBatch]

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
        keep_state: bool = False,
    ) -> None:
        if runs_at_once is not None and runs_at_once < 1:
            raise BadInput(f"runs_at_once is at least 1, not {runs_at_once}")
        self.settings, self.out, self.compute, self.runs_at_once = settings, Path(out), compute, runs_at_once
        self.device, self.part_size, self.keep_state = checks.device(device), part_size, keep_state
        self.commit, self.command, self.force = commit or revision(), command, force
        data = load(settings.dataset, data_dir) if data is None else data
        self.standard, self.given = data.standard, self.read(data)
        self.sha256, self.forced = self.given.fingerprint(), list[str]()
        size, examples = settings.batch_size, len(self.data(settings.parts[0]).train_labels)
        if 2 * size > examples:
            raise BadInput(f"batch_size={size} is too large for {examples} examples: at most {examples // 2}")

    @abstractmethod
    def read(self, data: Dataset) -> Dataset:
        """The data as the study reads them."""

    def data(self, fold: int | None) -> Dataset:
        """What a fold trains and is evaluated on."""
        return self.given

    def runs(self, method: str, fold: int | None) -> list[RunSpec]:
        """Of one method on one fold; of those that depend on others, as far as these are finished."""
        return self.settings.runs(method, fold)  # type: ignore[no-any-return]

    def place(self, kind: str, *names: str) -> Path:
        """A folder below ``runs/`` or ``state/``."""
        return files.below(self.out, self.out.joinpath(kind, self.settings.folder, *names))

    def described(self, method: str) -> Record:
        """What runs of this method depend on."""
        settings: Record = self.settings.describe(method)
        return settings | self.network.describe() | {"device": self.device.type}

    # ---- what there is to train --------------------------------------------------------------------------------------

    def parts(self, methods: Sequence[str] | None = None) -> Iterable[Part]:
        """The batches there are to train, of these methods (default: all), one after another: what is trained first
        tells of what comes later.

        A batch that was begun stays what it was, whichever of its runs are finished by now: its masks come from one
        generator, and the same command finds its checkpoints. Else it is made of the runs that are not. The folder of
        its state is that of all runs the command asks for: a command that asks for others leaves it alone.
        """
        asked = self.settings.methods if methods is None else methods
        for fold in self.settings.parts:
            for group in self.settings.sharing:
                wanted = [run for method in group if method in asked for run in self.runs(method, fold)]
                if not wanted:
                    continue
                size = self.runs_at_once or len(wanted)
                place = wanted[0].variant if len(group) == 1 else "+".join(group)
                done = self.finished(wanted, place)
                for start in range(0, len(wanted), size):
                    part = self._part(wanted[start : start + size], place, size < len(wanted))
                    if missing := [run for run in part.runs if run.key not in done]:
                        runs = _begun(part.state, wanted)
                        word = "" if runs else _elsewhere(part.label, part.state, missing)
                        yield replace(part, runs=runs or missing, elsewhere=word)
                    elif not self.keep_state:
                        remove(part.state)  # a process was killed between their file and this

    def _part(self, runs: list[RunSpec], place: str, several: bool) -> Part:
        """several: the runs that the command asks for are several batches."""
        first = runs[0]
        label = first.variant if first.method == "search" else "+".join(dict.fromkeys(run.method for run in runs))
        label += "" if first.fold is None else f"-fold_{first.fold}"
        label += f"-{first.setting}-seed_{first.seed}-{len(runs)}_runs" * several
        asked = zlib.crc32("".join(sorted(json.dumps(run.describe()) for run in runs)).encode())
        return Part(label, runs, self.place("runs", place), self.place("state", f"{label}-{asked:08x}"))

    def finished(self, wanted: Sequence[RunSpec], place: str) -> dict[tuple[Any, ...], Record]:
        """The finished runs of these variants by their key; files of other settings or data are refused."""
        keys, done = {run.key for run in wanted}, dict[tuple[Any, ...], Record]()
        places = [self.place("runs", name) for name in dict.fromkeys([place, *(run.variant for run in wanted)])]
        for path in sorted(path for folder in places for path in folder.glob("*.json*")):
            runs = {tuple(record["run"].get(name) for name in KEY): record for record in runs_of(path)}
            first = next(iter(runs.values()))
            self._check(path, first, wanted[0].method, set() if keys & runs.keys() else FREE)
            done |= runs
        return done

    def _check(self, path: Path, theirs: Mapping[str, Any], method: str, free: set[str]) -> None:
        """Refuse a file (theirs: its first record) of other settings or data; the error shows each that differs.

        free: settings that may. Files of earlier versions do not say which data they are of.
        """
        settings = json.loads(json.dumps(self.described(method)))  # as a file has them
        known = {DATA: self.sha256} if DATA in theirs else {}
        there, here = {**theirs["settings"], **{key: theirs[key] for key in known}}, {**settings, **known}
        differ = [
            f"{key}: {there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
            for key in sorted((there.keys() | here.keys()) - free)
            if there.get(key, ...) != here.get(key, ...)
        ]
        if differ and not self.force:
            raise BadInput(
                f"{path} is of other settings or data: {'; '.join(differ)}. Use the same, or another folder (--force "
                "goes on all the same; the runs to come then record what differed)"
            )
        self.forced = list(dict.fromkeys([*self.forced, *differ]))

    # ---- training ----------------------------------------------------------------------------------------------------

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

    def batch(self, runs: Sequence[RunSpec]) -> PaperBatch | GridBatch:
        """Of runs of one shape, to be trained."""
        data = self.data(runs[0].fold)
        return self.batches(self.settings, self.network, data, runs, self.device, self.compute)

    def train(self, part: Part, stop: Stop, progress: Progress) -> bool:
        """One batch, to its end or until told to stop."""
        with locked(part.state, self.force):
            began = time.monotonic()
            write(part.state / RUNS, json.dumps([run.describe() for run in part.runs]).encode())
            batch = self.batch(part.runs)
            loop = batch.loop(part.state, stop, progress, anyway=self.force, part_size=self.part_size)
            loop.seconds["setup"] += time.monotonic() - began
            engine, count, label = batch.engine, len(part.runs), part.label
            words = f"{count} runs of {engine.total:,} updates as one batch{part.which} on {engine.device}"
            progress.say(f"{label}: {words}")
            with seeded(0):
                finished = loop.train()
            if not finished:
                progress.say(f"{label}: stopped after {engine.done:,} updates; the same command goes on from there")
                return False
            took = loop.elapsed
            progress.say(f"{label}: {count} runs done in {took:,.1f} s, {took / count:,.2f} s each")
            self.keep(part, batch, loop)
        return True

    def keep(self, part: Part, batch: PaperBatch | GridBatch, loop: Loop) -> None:
        """Put on record what came out of a finished batch, of the runs that are not on record yet."""
        if self.keep_state:
            loop.save()
        count, done = len(part.runs), self.finished(part.runs, part.place.name)
        stories = [story for run, story in zip(part.runs, batch.results(loop), strict=True) if run.key not in done]
        forced = list(dict.fromkeys([*self.forced, *loop.forced]))
        head = {
            "format": FORMAT,
            "study": self.settings.study,
            "settings": self.described(part.runs[0].method),
            "evaluated_on": self.settings.evaluated_on,
            "examples": {"train": len(batch.data.train_labels), "test": len(batch.data.test_labels)},
            "standard_data": self.standard,
            DATA: self.sha256,
            **({"forced": forced} if forced else {}),
            "seconds": {
                "batch": round(loop.elapsed, 3),
                "per_run": round(loop.elapsed / count, 4),
                "parts": {name: round(value, 3) for name, value in loop.seconds.items()},
            },
            "runs_in_batch": count,
            "lines": len(stories),
            "calls": loop.calls,
            "hardware": hardware(self.device),
            "versions": versions(),
            "commit": self.commit,
            "command": self.command,
            "compute": asdict(batch.engine.batch.compute) | self.network.layout(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if stories:
            name = batch_name([run for run in part.runs if run.key not in done])
            taken = (part.place / f"{name}.jsonl").exists()
            first, *lines = [files.clean(line) for line in (head, *stories)]
            words = schema.sealed(first, lines, separators=(",", ":"))
            files.write(part.place / f"{name}{part.state.name[-9:] * taken}.jsonl", words)
        if not self.keep_state:
            shutil.rmtree(part.state, ignore_errors=True)
            return
        for run, tensors in zip(part.runs, batch.ships()):
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            write(self.weights(run), safetensors.torch.save(kept))

    def weights(self, run: RunSpec) -> Path:
        """Where the weights of a finished run are kept."""
        return self.place("state", run.variant) / f"{run.setting}-seed_{run.seed}.safetensors"


class PaperStudy(Study):
    """One of the paper's two."""

    settings: PaperSettings
    batches = PaperBatch

    def read(self, data: Dataset) -> Dataset:
        if self.settings.held_out:
            data = data.hold_out(self.settings.held_out)
        data, self.network = selection(self.settings, data)
        return data

    def parts(self, methods: Sequence[str] | None = None) -> list[Part]:
        parts = list(super().parts(methods))
        for run in (run for part in parts for run in part.runs):  # what cannot be made is said before hours of work
            self.network.given(run)
        count = len(parts)
        return [replace(part, which=f" ({i} of {count})" * (count > 1)) for i, part in enumerate(parts, 1)]


class Grid(Study):
    """A grid: the search, its rivals and its control at every target, seed and fold."""

    settings: GridSettings
    network: Units
    batches = GridBatch

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        for method in self.settings.methods:  # what cannot work is said before anything is trained
            if method != "found":  # those depend on what is found
                self.batch(self.runs(method, self.settings.parts[0])[:: self.settings.trials])

    def read(self, data: Dataset) -> Dataset:
        data = data.flatten()
        self.network = Units.of(self.settings.hidden, data, least=1)  # what ships is to compute something of its input
        self.whole = _everything(data)
        return data

    def data(self, fold: int | None) -> Dataset:
        settings = self.settings
        if fold is None:
            return self.given.hold_out(settings.held_out) if settings.held_out else self.given
        whole, seed = (self.given, TUNING_SEED) if settings.held_out else (self.whole, FOLD_SEED)
        return whole.take(*folds(whole.train_labels.numpy(), settings.folds, seed)[fold])

    def runs(self, method: str, fold: int | None) -> list[RunSpec]:
        settings, runs = self.settings, super().runs(method, fold)
        if method == "scratch":
            even = {target: even_widths(self.network.widths, target, settings.cost) for target in settings.targets}
            return [replace(run, units=even[run.target]) for run in runs if run.target is not None]
        if method == "found":
            searched = self.finished(settings.runs("search", fold), "search")
            pairs = [(run, searched.get(("search", *run.key[1:]))) for run in runs]
            return [replace(run, units=tuple(story["result"]["units"])) for run, story in pairs if story is not None]
        return runs

    def run(self, stop: Stop, progress: Progress, elsewhere: Ray | None = None) -> bool:
        """Train what is missing, batch by batch, until told to stop. Returns whether the study is complete.

        elsewhere: as tasks of a cluster, as many at once as fit there; networks of the widths found come after those.
        """
        if elsewhere is None:
            return super().run(stop, progress)
        methods = self.settings.methods
        waves = [[method for method in methods if (method == "found") == last] for last in (False, True)]
        return all(self._train_elsewhere(some, stop, progress, elsewhere) for some in waves)

    def _train_elsewhere(self, methods: Sequence[str], stop: Stop, progress: Progress, ray: Ray) -> bool:
        """All batches of these methods that are missing, as tasks."""
        jobs = {
            part.label: replace(part, place=part.place.resolve(), state=part.state.resolve())
            for part in self.parts(methods)
        }
        if not jobs or stop.now():
            return not jobs
        about: Record = {"device": str(self.device), "compute": self.compute, "commit": self.commit}
        # This process holds no lock of a batch, and a worker that died on another machine may have left one.
        about |= {"command": self.command, "data": self.given, "force": True}
        shared = (self.settings, self.out.resolve(), about)
        return all(ray.carry_out(_as_task, shared, jobs, self.out, stop, progress).values())


def _as_task(shared: tuple[GridSettings, Path, Record], part: Part, seconds: float | None) -> tuple[bool, bool]:
    """A batch on a worker of a cluster; whether it is done, twice."""
    settings, out, about = shared
    done = Grid(settings, out, **about).train(part, Stop(seconds), choose(quiet=True))
    return done, done


def remove(state: Path) -> None:
    """The state of a finished batch, unless another process is about to do so."""
    if state.exists():
        with contextlib.suppress(BadInput), locked(state):
            shutil.rmtree(state, ignore_errors=True)


def _runs_in(path: Path) -> list[str]:
    """The runs that a batch was begun with, each described in JSON; none where there is no such file."""
    try:
        return [json.dumps(one) for one in schema.read(path, schema.each(schema.anything))]
    except (OSError, Corrupt):
        return []


def _begun(state: Path, wanted: list[RunSpec]) -> list[RunSpec]:
    """The runs of a batch that has been begun in this folder, if all of them are wanted."""
    begun = _runs_in(state / RUNS)
    known = {json.dumps(run.describe()): run for run in wanted}
    return [known[one] for one in begun] if all(one in known for one in begun) else []


def _elsewhere(label: str, state: Path, runs: list[RunSpec]) -> str:
    """What is said where another command has begun some of the same runs; nothing where none has."""
    ours = {json.dumps(run.describe()) for run in runs}
    for path in sorted(state.parent.glob(f"*/{RUNS}")):
        if path.parent != state and (shared := ours & set(_runs_in(path))):
            return (
                f"{label}: {len(shared)} of these runs were begun by another command too, in {path.parent}; "
                "that command goes on with them, this one begins anew"
            )
    return ""


def batch_name(runs: Sequence[RunSpec]) -> str:
    """Of the file of a batch: fold, settings and seeds.

    >>> batch_name([RunSpec("search", "search", seed, 0, seed / 16) for seed in (4, 8)])
    'fold_0-target_0.25_to_0.5-seed_4_to_8'
    """
    parts = [] if runs[0].fold is None else [f"fold_{runs[0].fold}"]
    for label in ("target", "penalty", "size", "rate", "seed"):
        values = [getattr(run, label) for run in runs if getattr(run, label) is not None]
        if values:
            ends = dict.fromkeys((min(values), max(values)))
            parts.append(f"{label}_" + "_to_".join(map(str, ends)))
    return "-".join(parts)


def revision() -> str:
    """The revision of the source that runs, marked if files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.strip() + ("-modified" if changes.strip() else "")


def _everything(data: Dataset) -> Dataset:
    """The set with all its examples in the training part: what folds are made of. The digits in their stored order."""
    if data.standard and data.name == "digits":
        inputs, labels = all_digits()
        inputs = inputs.flatten(1)
    else:
        inputs, labels = (torch.cat(parts) for parts in zip(data.train, data.test, strict=True))
    return replace(data, train_inputs=inputs, train_labels=labels, test_inputs=inputs[:1], test_labels=labels[:1])
