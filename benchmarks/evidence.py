"""Named networks trained by named methods at equal budget: one resumable command, one JSON line for each run.

    python benchmarks/evidence.py --data-dir DIR --out FILE.jsonl --networks vgg16,resnet20 --costs weights,macs \\
        --targets 0.1,0.25 --methods ours,ranked,control,uniform,found,pruned --seeds 0,1,2 --epochs 20 --batch 128 \\
        --jobs 8 --device cuda

Every update of every method takes the gradient of ``--batch`` examples, and there are ``--epochs`` times examples //
batch of them. Runs that are in the file are not done again; a run that fails is told of in FILE.errors.txt. DIR holds
cifar-10-batches-bin, or the set of ``--data``, or is the word "synthetic". Methods are settings by name
(``--list-settings``); ``--settings`` adds to them or changes them. ``evidence_table.py`` makes tables of the file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from evidence_data import NAMES as SETS
from evidence_data import Images, read
from evidence_methods import SETTINGS, Budget, Case, complete, merged, resolved, run
from evidence_networks import NAMES

# What tells two runs apart. Everything else of a line is what came out, or follows from these.
KEY = (
    "data", "network", "narrow", "cost", "target", "method", "seed", "epochs", "batch", "examples", "lr",
    "weight_decay", "schedule", "held_out",
)  # fmt: skip

Run = dict[str, Any]  # a key, with its "setting", and "after": the key of the run it builds on, or None


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that was cut short by a crash is left out."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{file.name}: a line that is no JSON is left out: {text[:60]}", file=sys.stderr)
    return lines


def append(file: Path, text: str) -> None:
    """One line more, all of it or nothing, whoever else writes."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        broken = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (("\n" if broken else "") + text.rstrip("\n") + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def plan(given: argparse.Namespace, settings: dict[str, dict[str, Any]]) -> list[Run]:
    """Every run that is asked for, seed after seed, each after the one it builds on."""
    runs: dict[tuple[Any, ...], Run] = {}

    def add(network: str, cost: str, target: float, name: str, seed: int) -> Run:
        setting = resolved(settings, name)
        whole = setting.get("widths") == "whole"
        entry: Run = {
            "data": "synthetic" if given.data_dir == "synthetic" else given.data,
            "network": network,
            "narrow": given.narrow,
            "cost": None if whole else cost,
            "target": None if whole else target,
            "method": name,
            "seed": seed,
            "epochs": given.epochs,
            "batch": given.batch,
            "examples": given.examples,
            "lr": setting.get("lr", given.lr),
            "weight_decay": setting.get("weight_decay", given.weight_decay),
            "schedule": setting.get("schedule", given.schedule),
            "held_out": given.held_out,
            "setting": setting,
        }
        after = setting.get("of")
        entry["after"] = None if after is None else key_of(add(network, cost, target, after, seed))
        return runs.setdefault(key_of(entry), entry)

    for seed in given.seeds:
        for network in given.networks:
            for cost in given.costs:
                for target in given.targets:
                    for name in given.methods:
                        add(network, cost, target, name, seed)
    return list(runs.values())


def describe(entry: Run) -> str:
    size = "whole" if entry["cost"] is None else f"{entry['target']:.4g} of {entry['cost']}"
    return f"{entry['network']} {size} {entry['method']} seed {entry['seed']}"


class Worker:
    """Data on a device, and runs on them one after the other."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, device = given, torch.device(given.device)
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        if given.jobs > 0:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // given.jobs))
        self.trained: dict[Any, Any] = {}
        self.images = Images(read(given.data_dir, given.held_out, given.examples, given.data), device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        self.place = {"torch": torch.__version__, "device": name, "jobs": given.jobs, "revision": given.revision}
        if given.compile:
            self.place["compiled"] = True

    def __call__(self, entry: Run, parent: dict[str, Any] | None) -> dict[str, Any]:
        epochs, batch = entry["epochs"], entry["batch"]
        updates = epochs * (self.images.n // batch)
        if not updates:
            raise ValueError(f"a batch of {batch} is larger than the data, {self.images.n} examples")
        budget = Budget(epochs, batch, updates, entry["lr"], entry["weight_decay"], entry["schedule"])
        case = Case(
            entry["network"], entry["narrow"], entry["cost"], entry["target"], entry["seed"], entry["setting"], budget,
            self.images, parent, self.given.compile, self.trained,
        )  # fmt: skip
        line = run(case)
        if self.images.device.type == "cuda":
            torch.cuda.empty_cache()  # what the others may need
        return {name: entry[name] for name in KEY} | line | self.place | {"argv": self.given.argv}


def serve(given: argparse.Namespace, pipe: Connection) -> None:
    """A worker in a process of its own: takes runs from the pipe, gives back lines or accounts of what went wrong."""
    worker = None
    while (task := pipe.recv()) is not None:
        try:
            worker = worker or Worker(given)
            pipe.send(("line", worker(*task)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
            return  # a device may be of no use after an error: the next run gets a new process


class Book:
    """The lines so far, what is still to do, and how long it may take."""

    def __init__(self, given: argparse.Namespace, runs: list[Run]) -> None:
        self.given, self.began = given, time.monotonic()
        self.lines = {key_of(line): line for line in lines_of(given.out)}
        for entry in runs:
            line = self.lines.get(key_of(entry))
            if line is not None and complete(line["setting"]) != complete(entry["setting"]):
                raise SystemExit(
                    f"{describe(entry)} is in {given.out.name} with another setting: {line['setting']}, now "
                    f"{complete(entry['setting'])}. Give the setting another name, or write to another file"
                )
        self.waiting = [entry for entry in runs if key_of(entry) not in self.lines]
        self.total, self.done, self.failed = len(self.waiting), 0, 0

    def left(self) -> float | None:
        limit = self.given.time_limit
        return None if limit is None else limit - (time.monotonic() - self.began)

    def expected(self, entry: Run) -> float:
        """The fewest seconds of such a run: of this method, else of this network; 0 where there were none. With fewer
        runs beside it one is done in less time than most have taken; one that is not is lost."""
        alike = [
            (line["method"], line["seconds"])
            for line in self.lines.values()
            if line["jobs"] == self.given.jobs and all(line[name] == entry[name] for name in ("network", "epochs"))
        ]
        times = [seconds for method, seconds in alike if method == entry["method"]] or [second for _, second in alike]
        return min(times, default=0.0)

    def take(self) -> tuple[Run, dict[str, Any] | None] | None:
        """The next run that can start and would end in time, with the line it builds on."""
        left = self.left()
        for entry in self.waiting:
            if entry["after"] is not None and entry["after"] not in self.lines:
                continue
            if left is None or self.expected(entry) < left:
                self.waiting.remove(entry)
                return entry, self.lines.get(entry["after"])
        return None

    def write(self, entry: Run, line: dict[str, Any]) -> None:
        append(self.given.out, json.dumps(line))
        self.lines[key_of(line)] = line
        self.done += 1
        print(
            f"{self.done + self.failed}/{self.total} {describe(entry)}: error {line['error']:.2%}, "
            f"weights {line['shares']['weights']:.1%}, MACs {line['shares']['macs']:.1%}, {line['seconds']:.0f} s",
            flush=True,
        )

    def fail(self, entry: Run, account: str) -> None:
        self.failed += 1
        append(self.given.out.with_name(self.given.out.name + ".errors.txt"), f"{describe(entry)}\n{account}")
        print(f"{describe(entry)} failed: {account.strip().splitlines()[-1]}", file=sys.stderr, flush=True)


def alone(given: argparse.Namespace, book: Book) -> None:
    """All runs in this process."""
    worker = Worker(given)
    while (task := book.take()) is not None:
        try:
            line = worker(*task)
        except Exception:
            book.fail(task[0], traceback.format_exc())
        else:
            book.write(task[0], line)


def together(given: argparse.Namespace, book: Book) -> None:
    """All runs in worker processes. What is under way when time is over is given up, without a line."""
    context = multiprocessing.get_context("spawn")

    def start() -> tuple[Connection, Any]:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(given, there), daemon=True)
        process.start()
        there.close()
        return here, process

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended on the way out
    idle: list[tuple[Connection, Any]] = []
    busy: dict[Connection, tuple[Any, Run]] = {}
    try:
        while True:
            while len(busy) < given.jobs and (task := book.take()) is not None:
                pipe, process = idle.pop() if idle else start()
                busy[pipe] = process, task[0]
                pipe.send(task)
            if not busy:
                break
            left = book.left()
            ready = wait(list(busy), left if left is None else max(left, 0.0))
            if not ready and book.left() is not None and book.left() <= 0:
                print(f"time is over: {len(busy)} runs under way are given up", flush=True)
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                process, entry = busy.pop(pipe)
                try:
                    kind, answer = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    book.fail(entry, f"its process ended with exit code {process.exitcode}")
                    continue
                if kind == "line":
                    book.write(entry, answer)
                    idle.append((pipe, process))
                else:
                    book.fail(entry, answer)
        for pipe, _ in idle:
            pipe.send(None)
        for _, process in idle:
            process.join(10)
    finally:
        for process in [process for process, _ in busy.values()] + [process for _, process in idle]:
            if process.is_alive():
                process.terminate()
        signal.signal(signal.SIGTERM, before)


def revision() -> str | None:
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def cleaned(words: list[str]) -> list[str]:
    """The arguments without the paths of a machine."""
    kept = list(words)
    for flag, stand_in in (("--data-dir", "DIR"), ("--out", "FILE"), ("--settings", "SETTINGS")):
        for i, word in enumerate(kept):
            if word == flag and i + 1 < len(kept) and kept[i + 1] != "synthetic":
                kept[i + 1] = stand_in
            elif word.startswith(flag + "=") and word != f"{flag}=synthetic":
                kept[i] = f"{flag}={stand_in}"
    return kept


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="synthetic")
    parser.add_argument("--data", choices=SETS, default=SETS[0], help="the set in DIR; digits are in the package")
    parser.add_argument("--out", type=Path, default=Path("evidence.jsonl"))
    parser.add_argument("--networks", type=listed(str), default=["vgg16", "resnet20"], help=", ".join(NAMES))
    parser.add_argument("--costs", type=listed(str), default=["weights", "macs"])
    parser.add_argument("--targets", type=listed(float), default=[0.1, 0.25])
    parser.add_argument("--methods", type=listed(str), default=["ours", "ranked", "control", "uniform", "found"])
    parser.add_argument("--seeds", type=listed(int), default=[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128, help="examples whose gradient an update takes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--schedule", choices=["linear", "cosine", "steps"], default="linear")
    parser.add_argument("--held-out", type=int, default=0, help="so many training images take the test set's place")
    parser.add_argument("--examples", type=int, help="so many training images, and no more than these of the others")
    parser.add_argument("--narrow", type=int, default=1, help="all widths divided by this")
    parser.add_argument("--settings", type=Path, help="JSON: settings by name, over the known ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes; 0: in this process")
    parser.add_argument("--compile", action="store_true", help="networks: takes minutes more, and less in each update")
    parser.add_argument("--time-limit", type=float, help="seconds")
    parser.add_argument("--revision", default=revision(), help="of the code, where there is no repository to ask")
    parser.add_argument("--plan", action="store_true", help="say what would run")
    parser.add_argument("--list-settings", action="store_true")
    given = parser.parse_args(words)
    unknown = [name for name in given.networks if name not in NAMES]
    if unknown or not set(given.costs) <= {"weights", "macs", "parameters"}:
        parser.error(f"networks are {', '.join(NAMES)}; costs weights, macs, parameters")
    given.argv = cleaned(words)
    return given


def main(words: list[str] | None = None) -> None:
    given = parsed(sys.argv[1:] if words is None else words)
    settings = dict(SETTINGS)
    for name, own in (json.loads(given.settings.read_text(encoding="utf-8")) if given.settings else {}).items():
        settings[name] = merged(settings[name], own) if name in settings and "method" not in own else own
    if given.list_settings:
        for name in settings:
            print(f"{name:16s} {json.dumps(resolved(settings, name))}")
        return
    book = Book(given, plan(given, settings))
    print(f"{book.total} runs to do, {len(book.lines)} in the file", flush=True)
    if given.plan:
        for entry in book.waiting:
            print(f"  {describe(entry)}: {json.dumps(entry['setting'])}, some {book.expected(entry):.0f} s")
        return
    (alone if given.jobs == 0 else together)(given, book)
    if book.waiting or book.failed:
        print(f"{len(book.waiting)} runs not begun, {book.failed} failed", flush=True)


if __name__ == "__main__":
    main()
