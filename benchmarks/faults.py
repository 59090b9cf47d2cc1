"""A campaign of faults: kills, failing disks, damaged files, two processes, changed inputs, odd arguments.

    python benchmarks/faults.py --minutes 10 --out results/faults/campaign.json
    python benchmarks/faults.py --short

Every case runs in a process of its own, forked from one that has imported everything, with tiny networks and data. It
may end well, with what an undisturbed run gives, or be refused in one of Espalier's errors (exit code 2). Counted as
failures: a wrong result, a file outside of the case's folder, a traceback, more than 10 s, more than 2 GB.
``--short`` is a seeded part of it, for `make test`. Linux.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import functools
import hashlib
import importlib
import io
import itertools
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.cli import main as command
from espalier.data import from_arrays
from espalier.paper import write as write_report
from espalier.report import read as read_report
from espalier.ship import delivery
from espalier.space import EspalierError
from espalier.study import Grid, PaperStudy
from espalier.study.settings import GridSettings, Settings
from espalier.train import fingerprint, loop
from espalier.train.checkpoint import Checkpoint
from espalier.train.loop import Stop
from espalier.train.progress import Progress
from fault_inputs import JSON, X, Y, damage, net, odd_call
from results import pack

SECONDS, MEMORY = 10, 2 << 30
CLOCK = ("seconds", "calls", "finished_at", "setup")  # what differs between two runs of the same thing
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES)
SOURCES = ("fit", "train", "sweep", "grid", "paper", "packed", "save")  # whose files are damaged
QUIET = hypothesis.settings(
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    suppress_health_check=list(hypothesis.HealthCheck),
    verbosity=hypothesis.Verbosity.quiet,
    report_multiple_bugs=False,
)
Outcome = Any


# ---- what is disturbed -----------------------------------------------------------------------------------------------


def fit(folder: Path, **changes: Any) -> None:
    given: dict[str, Any] = {"epochs": 2, "batch_size": 16, "target": 0.5, "quiet": True, "validation": (X, Y)}
    given |= changes
    espalier.fit(given.pop("model", None) or net(), given.pop("data", (X, Y)), checkpoint=folder / "run", **given)


def train(folder: Path, inputs: Tensor = X) -> None:
    np.savez(folder.parent / "data.npz", x=inputs.numpy(), y=Y.numpy())
    words = ["--model", "mlp", "--model-arg", "hidden=[6]", "--data", "data.npz", "--quiet"]
    words += ["--target", "0.5", "--epochs", "2", "--batch-size", "16", "--device", "cpu", "--out", str(folder / "run")]
    with contextlib.chdir(folder.parent):
        espal("train", *words)


def sweep(folder: Path, inputs: Tensor = X) -> None:
    given: dict[str, Any] = {"targets": [0.5], "seeds": [0, 1], "epochs": 2, "batch_size": 16, "device": "cpu"}
    espalier.sweep(net, (inputs, Y), checkpoint=folder / "run", quiet=True, **given)


def grid(folder: Path, inputs: Tensor = X) -> None:
    settings = GridSettings(
        hidden=(5, 4), epochs=1, trials=2, targets=(0.5,), points=2, batch_size=8, methods=("search", "found")
    )
    data = from_arrays((inputs, Y), (inputs, Y))
    Grid(settings, folder / "run", data=data, commit="abc", command="espalier study").run(Stop(None), Progress())


def paper(folder: Path, inputs: Tensor = X) -> None:
    settings = Settings(
        hidden=(5, 4), epochs=1, trials=2, penalties=(0.0,), sizes=(0.5,), points=2, batch_size=8,
        methods=("search", "fixed"),
    )  # fmt: skip
    data = from_arrays((inputs, Y), (inputs, Y))
    study = PaperStudy(settings, folder / "run", data=data, commit="abc", command="espalier paper")
    study.run(Stop(None), Progress())


def save(folder: Path) -> None:
    espalier.save(cut(0.3), folder / "run")


def compact(folder: Path) -> None:
    espal("compact", str(folder.parent / "trained" / "run"), "--to", str(folder / "run"))


def report(folder: Path) -> None:
    espal("report", str(folder / "run"), "--no-figures", "--no-page")


COMMANDS: dict[str, Callable[..., None]] = {
    "fit": fit, "train": train, "sweep": sweep, "grid": grid, "paper": paper, "save": save, "compact": compact,
    "report": report,
}  # fmt: skip


def cut(share: float) -> nn.Module:
    gated = espalier.attach(net(), X[:4])
    mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(int(100 * share))) < share + 0.3).float()
    return gated.compact(gated.canonical(mask))


class Exit(Exception):
    """A command ended with this code."""


def espal(*words: str) -> None:
    """A command in this process. Its exit code 2 is a refusal; another, or a traceback, is for the caller to see."""
    sys.argv = ["espalier", *words]
    try:
        command()
    except SystemExit as end:
        if end.code not in (0, None, 2):
            raise Exit(f"exit code {end.code}") from None
        if end.code == 2:
            raise EspalierError("exit code 2") from None


# ---- what came out, read by plain json -------------------------------------------------------------------------------


def outcome(folder: Path) -> Outcome:
    """What runs and models in a folder say, without clocks; read without Espalier."""
    found = dict[str, Any]()
    for path in sorted((folder / "run").rglob("*")):
        place = path.relative_to(folder).as_posix()
        if path.name == "result.json":
            found[place] = unclocked(json.loads(path.read_text()))
        elif path.name == "metrics.jsonl":
            found[place] = [unclocked(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name in ("model.safetensors", "theta.safetensors") or path.suffix == ".csv":
            found[place] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif "runs" in path.parts and path.suffix == ".jsonl":
            found[place] = [unclocked(json.loads(line)) for line in path.read_text().splitlines()[1:]]
        elif "runs" in path.parts and path.suffix == ".json":
            found[place] = {key: item for key, item in json.loads(path.read_text()).items() if key in ("run", "result")}
        elif "state" in path.parts and path.is_file():
            found[place] = "left over"
    return found


def unclocked(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in CLOCK}


def tensors(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


# ---- faults at the n-th call -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def faulty(root: Path, at: int, how: int | None) -> Iterator[list[int]]:
    """At the at-th call that writes below root: the process ends (how None), or the call fails with this errno.

    Yields a list whose only number counts the calls.
    """
    count = [0]

    def strike(half: Callable[[], Any] = lambda: None) -> None:
        count[0] += 1
        if count[0] == at:
            half()
            if how is None:
                os._exit(9)
            raise OSError(how, os.strerror(how), str(root))

    def ours(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(root))

    class Writer(io.FileIO):
        def write(self, data: Any) -> int:
            strike(lambda: super(Writer, self).write(bytes(data)[: len(data) // 2]))
            return super().write(data)

    kept = {name: getattr(os, name) for name in ("open", "replace", "fsync", "mkdir", "unlink", "rmdir", "link")}
    plain = builtins.open

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            if name == "fsync" or (ours(given[0]) and (name != "open" or given[1] & (os.O_WRONLY | os.O_RDWR))):
                strike()
            return kept[name](*given, **more)

        return call

    def opened(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        if mode in ("wb", "ab") and (isinstance(file, int) or ours(file)):
            if not isinstance(file, int):
                strike()
            return Writer(file, mode.replace("b", ""))
        return plain(file, mode, *given, **more)

    for name in kept:
        setattr(os, name, wrapped(name))
    builtins.open = opened  # type: ignore[assignment]
    try:
        yield count
    finally:
        builtins.open = plain
        for name, function in kept.items():
            setattr(os, name, function)


# ---- one case in a process of its own --------------------------------------------------------------------------------


def forked(case: Callable[[], str], seconds: int = SECONDS) -> str:
    """What the case says; "killed", "hang" or "memory" where it could not. The case runs within limits."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        signal.alarm(seconds)
        try:
            said = case()
        except MemoryError:
            said = "memory"
        except BaseException:
            said = "traceback: " + traceback.format_exc()[-1500:]
        os.write(writing, said.encode()[:60000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return "hang" if os.WTERMSIG(status) == signal.SIGALRM else f"died of signal {os.WTERMSIG(status)}"
    return "killed" if os.WEXITSTATUS(status) == 9 else said


def tried(action: Callable[[], Any]) -> str:
    """ "done", "refused", or what went wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except (EspalierError, OSError):
        return "refused"
    except MemoryError:
        return "memory"
    except Exception:
        return "traceback: " + traceback.format_exc()[-1500:]
    return "done"


class Campaign:
    """Counts, and the first failures of each kind. place: a folder for everything."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.random = place, random.Random(seed)
        self.counts, self.failures = Counter[str](), list[dict[str, str]]()
        self.number = itertools.count()
        delivery.milliseconds = lambda models, inputs: dict.fromkeys(models, 1.0)  # type: ignore[assignment]
        loop.LOOK, loop.SAVING = 0.0, 1e9  # type: ignore[misc]  # a look, and a checkpoint, after every update
        fingerprint.RECENT = -1e9  # type: ignore[misc]  # files of this moment are stamped, too
        hypothesis.configuration.set_hypothesis_home_dir(place / "hypothesis")
        self._prepare()

    def _prepare(self) -> None:
        """Whole runs of everything, and what they say."""
        hypothesis.settings(QUIET, max_examples=3)(
            hypothesis.given(JSON)(lambda value: None)
        )()  # it prepares itself, too
        self.whole, self.points = dict[str, Outcome](), dict[str, int]()
        os.makedirs(self.place / "trained")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(self.place / "trained")
            for name in (
                "fit",
                "sweep",
                "grid",
                "paper",
                "compact",
            ):  # so that all is imported before processes are forked
                COMMANDS[name](self.fresh(name))
        for name in COMMANDS:
            folder = self.fresh(name)
            points = self.place / "points"

            def case(name: str = name, folder: Path = folder, points: Path = points) -> str:
                with faulty(folder, -1, None) as count:
                    said = tried(lambda: COMMANDS[name](folder))
                points.write_text(str(count[0]))
                return said

            said = forked(case, 60)
            assert said == "done", f"{name}: {said}"
            self.whole[name], self.points[name] = outcome(folder), int(points.read_text())
            os.rename(folder, self.place / f"whole-{name}")
        shutil.copytree(self.place / "whole-grid", self.place / "whole-packed")
        pack(self.place / "whole-packed" / "run")
        shutil.rmtree(self.place / "whole-packed" / "run" / "runs")

        with contextlib.suppress(ImportError):
            importlib.import_module("espalier.report.page")

    def fresh(self, name: str) -> Path:
        """A new folder for a case, with what the command finds there."""
        folder = self.place / f"case-{next(self.number)}" / "inside"
        folder.mkdir(parents=True)
        if name in ("report",):
            shutil.copytree(self.place / "whole-sweep" / "run", folder / "run")
        if name == "save":
            espalier.save(cut(0.6), folder / "run")
        if name == "compact":
            os.symlink(self.place / "trained", folder.parent / "trained")
        return folder

    def count(self, kind: str, said: str, about: str) -> None:
        self.counts[f"{kind}: cases"] += 1
        first = said.split(":")[0] if said.startswith("traceback") else said
        good = said in ("done", "refused", "killed")
        self.counts[f"{kind}: {first if good else 'FAILED ' + first[:60]}"] += 1
        if not good:
            print(kind, about, said[-800:], file=sys.stderr, flush=True)
        if not good and len(self.failures) < 200:
            self.failures.append({"kind": kind, "case": about, "said": said[-1500:]})

    def clear(self, folder: Path) -> str:
        """Remove a case's folder. Returns what was wrong beside it."""
        beside = {path.name for path in folder.parent.iterdir()} - {"inside", "trained", "data.npz"}
        shutil.rmtree(folder.parent, ignore_errors=True)
        return f"outside: {sorted(beside)}" if beside else ""

    # ---- kinds ------------------------------------------------------------------------------------------------------

    def disturb(self, name: str, at: int, how: int | None) -> None:
        """A command with a fault at its at-th write; then the same command, which is to give what a whole run gives."""
        folder = self.fresh(name)
        kind = "kills" if how is None else "errors"

        def first() -> str:
            with faulty(folder, at, how):
                return tried(lambda: COMMANDS[name](folder))

        said = forked(first)
        if name == "save" and said in ("killed", "refused", "done"):
            loaded = forked(lambda: tensors(espalier.load(folder / "run", net)))
            if loaded not in self.models():
                said = f"wrong: after it the model is neither the old one nor the new one: {loaded[-300:]}"
        if said in ("killed", "refused", "done"):
            again = forked(lambda: tried(lambda: COMMANDS[name](folder)))
            if again != "done":
                said = f"the same command again: {again}"
            elif outcome(folder) != self.whole[name]:
                said = f"wrong: {difference(outcome(folder), self.whole[name])}"
        self.count(kind, self.clear(folder) or said, f"{name}, write {at}, {how and errno.errorcode[how]}")

    def models(self) -> list[str]:
        if not hasattr(self, "_models"):
            self._models = [tensors(cut(share)) for share in (0.6, 0.3)]
        return self._models

    def damage(self, cases: int) -> None:
        """So many damaged files, read by everything that reads them, in one process until it fails. Hypothesis makes
        them, and looks for the smallest damage that does the same; that one is told of."""
        while cases > 0:
            seed, progress, most = self.random.getrandbits(32), self.place / "damaged.jsonl", min(cases, 500)
            progress.write_text("")

            def case(seed: int = seed, progress: Path = progress, most: int = most) -> str:
                with progress.open("a") as file:

                    @hypothesis.seed(seed)
                    @hypothesis.settings(QUIET, max_examples=most)
                    @hypothesis.given(st.data())
                    def example(data: st.DataObject) -> None:
                        signal.alarm(SECONDS)
                        for said, about in self.damaged(data.draw):
                            file.write(json.dumps([said, about]) + "\n")
                            file.flush()
                        assert said in ("done", "refused")

                    with contextlib.suppress(AssertionError):
                        example()
                return "done"

            end = forked(case)
            lines = [json.loads(line) for line in progress.read_text().splitlines()]
            told = [(said, f"seed {seed}: {about}") for said, about in lines if said]
            for said, about in told:
                if said in ("done", "refused"):
                    self.count("damaged files", said, about)
            if end != "done":  # the process died of it
                told.append((end, f"seed {seed}: {lines[-1][1] if lines else ''}"))
            bad = [one for one in told if one[0] not in ("done", "refused")]
            if bad:
                self.count("damaged files", *bad[-1])
            cases -= max(len(told), 1)

    def damaged(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Iterator[tuple[str, str]]:
        """Damages a file, says which ("" and words), lets all read it, and says what came of it, and the words."""
        source: str = draw(st.sampled_from(SOURCES))
        folder = self.place / f"damaged-{os.getpid()}" / "inside"
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(self.place / f"whole-{source}" / "run", folder / "run")
        sealed: bool = draw(st.sampled_from([True, True, False]))
        if not sealed:
            for path in (folder / "run").rglob("manifest.json"):
                path.unlink()
        files = [path for path in sorted((folder / "run").rglob("*")) if path.is_file() and path.name != "lock"]
        path = draw(st.sampled_from(files))
        how = damage(draw, path, forged=not sealed)
        more: int = draw(st.integers(0, 29))  # the dearest readers read some alone
        about = f"{source}{'' if sealed else ', unsealed'}, {path.relative_to(folder)}: {how}"
        yield "", about
        said = self.readers(source, folder, path, sealed, page=more % 5 == 1, again=more == 2)
        ours = {"inside", "run", "small", "data.npz"}
        beside = {one.name for place in (folder, folder.parent) for one in place.iterdir()} - ours
        if beside or (self.place / "canary").exists():
            said = f"outside: {sorted(beside)}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        yield said, about

    def readers(self, source: str, folder: Path, path: Path, sealed: bool, page: bool, again: bool) -> str:
        """The worst that readers say of a folder; a result that differs from the whole one's is wrong, if the folder
        has checksums. page: the report has one. again: the same call is made once more, too."""
        run, said = folder / "run", list[str]()
        if source == "save" or "small" in path.parts:
            model = run if source == "save" else path.parent
            name = f"{model.relative_to(folder)}/model.safetensors"

            def load() -> None:
                found = tensors(espalier.load(model, net))
                kept = tensors(espalier.load(self.place / f"whole-{source}" / Path(name).parent, net))
                assert found == kept, "WRONG model"

            said.append(tried(load))
        if source != "save":
            whole = self.reported_whole(source)

            def report() -> None:
                for key, numbers in self.reported(run).items():
                    assert not sealed or numbers == whole.get(key), f"WRONG report {key}"
                write_report(run, figures=False, page=page)

            said.append(tried(report))
        if source == "train":
            to = folder / "small"
            said.append(tried(lambda: espalier.ship(run, to)))
            if said[-1] == "done" and sealed:
                one, other = (
                    (place / "model.safetensors").read_bytes() for place in (to, self.place / "whole-compact" / "run")
                )
                said[-1] = "done" if one == other else "wrong: another model ships"
        if again and source not in ("save", "packed"):

            def go_on() -> None:
                COMMANDS[source](folder)
                if not sealed:
                    return
                ours = {key: value for key, value in outcome(folder).items() if not key.endswith(".csv")}
                wrong = difference(ours, self.whole[source])
                assert not wrong, f"WRONG outcome of a resumed run: {wrong}"

            said.append(tried(go_on))
        if path.name.startswith("checkpoint"):
            said.append(tried(lambda: Checkpoint(path.parent, {}, anyway=True).load()))
        bad = [one for one in said if one not in ("done", "refused")]
        return bad[0] if bad else "refused" if "refused" in said else "done"

    @functools.cache  # noqa: B019 (one campaign to a process)
    def reported_whole(self, source: str) -> dict[str, Any]:
        return self.reported(self.place / f"whole-{source}" / "run")

    def reported(self, run: Path) -> dict[str, Any]:
        return {
            one.name: [one.error, one.loss, one.shares, one.kept, one.updates, one.seconds, one.curve, one.seed]
            for one in read_report(run).runs
        }

    def pair(self, name: str) -> None:
        """Two processes at once in one folder: the result is that of one, whoever was refused."""
        folder = self.fresh(name)
        pids = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if forked(lambda: tried(lambda: COMMANDS[name](folder)), 30) in ("done", "refused") else 1)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        said = forked(lambda: tried(lambda: COMMANDS[name](folder)), 30)
        if any(codes):
            said = f"traceback: exit statuses {codes}"
        elif said == "done" and outcome(folder) != self.whole[name]:
            said = f"wrong: {difference(outcome(folder), self.whole[name])}"
        self.count("two processes", self.clear(folder) or said, name)

    def changed(self) -> None:
        """Each change of a call between its two halves is refused."""
        other = X.clone()
        other[31, 5] += 1e-6
        labels = Y.clone()
        labels[17] = (labels[17] + 1) % 3
        calls = {name: partial(COMMANDS[name], inputs=other) for name in ("train", "sweep", "grid", "paper")}
        changes: dict[str, dict[str, Any]] = {
            "one number of the inputs": {"data": (other, Y)},
            "one label": {"data": (X, labels)},
            "order of the examples": {"data": (X.flip(0), Y.flip(0))},
            "type of the inputs": {"data": (X.double(), Y), "model": net().double()},
            "scale": {"data": from_arrays((X, Y), (X, Y), scale=2.0)},
            "validation": {"validation": (other, Y)},
            "width": {"model": net(7)},
            "optimizer": {"optimizer": lambda p: torch.optim.SGD(p, 0.05)},
            "weight decay": {"optimizer": lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1)},
            "scheduler": {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3)},
            "schedule": {"schedule": "cosine"},
            "loss": {"loss": lambda o, t: 2 * F.cross_entropy(o, t)},
            **{key: {key: value} for key, value in {
                "target": 0.4, "seed": 1, "epochs": 3, "batch_size": 12, "samples": 3, "cost": "macs", "settle": 0.4,
                "recipe": "ranked", "precision": "bf16",
            }.items()},
        }  # fmt: skip
        cases = [("fit", about, partial(fit, **change)) for about, change in changes.items()]
        cases += [(name, f"one number of the inputs of {name}", call) for name, call in calls.items()]
        for name, about, call in cases:
            folder = self.place / f"case-{next(self.number)}" / "inside"
            folder.mkdir(parents=True)
            shutil.copytree(self.place / f"whole-{name}" / "run", folder / "run")
            said = forked(lambda call=call, folder=folder: tried(lambda: call(folder)))
            said = "wrong: it went on" if said == "done" else said
            self.count("changed inputs", self.clear(folder) or said, about)

    def calls(self, cases: int) -> None:
        """Calls of the public functions with odd arguments, a thousand in a process."""
        while cases > 0:
            seed, some = self.random.getrandbits(32), min(cases, 1000)
            progress = self.place / "calls.jsonl"
            progress.write_text("")

            def case(seed: int = seed, some: int = some, progress: Path = progress) -> str:
                draw, folder = random.Random(seed), self.place / f"calls-{os.getpid()}"
                folder.mkdir()
                os.chdir(folder)
                with progress.open("a") as file:
                    for _ in range(some):
                        signal.alarm(SECONDS)
                        about, action = odd_call(draw, folder)
                        file.write(json.dumps([about, ""]) + "\n")
                        file.flush()
                        if (said := tried(action)) not in ("done", "refused"):
                            file.write(json.dumps([about, said]) + "\n")
                shutil.rmtree(folder, ignore_errors=True)
                return "done"

            end = forked(case)
            lines = [json.loads(line) for line in progress.read_text().splitlines()]
            begun = sum(not said for _, said in lines)
            self.counts["odd calls: cases"] += begun
            for about, said in lines:
                if said:
                    self.count("odd calls", said, about)
                    self.counts["odd calls: cases"] -= 1
            if end != "done":
                self.count("odd calls", end, lines[-1][0])
                self.counts["odd calls: cases"] -= 1
            cases -= max(begun, 1)


def difference(ours: Outcome, whole: Outcome) -> str:
    keys = [key for key in sorted({*ours, *whole}) if ours.get(key) != whole.get(key)]
    return f"{keys[:3]}: {str(ours.get(keys[0]))[:300]} instead of {str(whole.get(keys[0]))[:300]}" if keys else ""


# ---- the campaign ----------------------------------------------------------------------------------------------------


def run(minutes: float, seed: int, short: bool) -> Campaign:
    """Kinds in turn until the time is over; short: a fixed part."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        campaign = Campaign(Path(place), seed)
        end = time.monotonic() + 60 * minutes
        points = [(name, at) for name in COMMANDS for at in range(1, campaign.points[name] + 1)]
        campaign.counts["write points"] = len(points)
        draw = campaign.random
        if short:
            for name, at in draw.sample(points, 16):
                campaign.disturb(name, at, draw.choice([None, *ERRNOS]))
            campaign.damage(150)
            campaign.pair("fit")
            campaign.changed()
            campaign.calls(300)
            return campaign
        campaign.changed()
        kills, errors = (itertools.cycle(draw.sample(points, len(points))) for _ in range(2))
        for turn in itertools.count():
            if time.monotonic() > end:
                break
            campaign.disturb(*next(kills), None)
            if turn % 6 == 0:
                campaign.disturb(*next(errors), draw.choice(ERRNOS))
            if turn % 25 == 0:
                campaign.damage(500)
                campaign.calls(2500)
            if turn % 50 == 0:
                campaign.pair(draw.choice(["fit", "train", "sweep", "grid", "paper"]))
        return campaign


def part(minutes: float, seed: int, short: bool) -> tuple[Counter[str], list[dict[str, str]]]:
    """What one process counted, and its failures."""
    campaign = run(minutes, seed, short)
    return campaign.counts, campaign.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a fixed, seeded part of about half a minute")
    parser.add_argument("--out", type=Path, help="a JSON file of the figures")
    parser.add_argument("--processes", type=int, default=1, help="so many campaigns at once, of seeds that follow")
    given = parser.parse_args()
    began = time.monotonic()
    if given.processes == 1:
        parts = [part(given.minutes, given.seed, given.short)]
    else:
        with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
            each = [pool.submit(part, given.minutes, given.seed + i, given.short) for i in range(given.processes)]
            parts = [one.result() for one in each]
    counts = sum((counted for counted, _ in parts), Counter[str]())
    counts["write points"] = parts[0][0]["write points"]
    failed = sum(count for name, count in counts.items() if "FAILED" in name)
    words = "--short" if given.short else f"--minutes {given.minutes:g} --processes {given.processes}"
    story = {
        "command": f"python benchmarks/faults.py {words} --seed {given.seed}",
        "seconds": round(time.monotonic() - began, 1),
        "versions": {"espalier": espalier.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "counts": dict(sorted(counts.items())),
        "failed": failed,
        "failures": [failure for _, failures in parts for failure in failures],
    }
    print(json.dumps(story, indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(story, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
