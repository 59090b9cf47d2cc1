"""Golden runs: small trainings whose masks, theta, weights and tables are kept, so that a change of the source shows.

    PYTHONPATH=src OMP_NUM_THREADS=1 python tests/golden/make.py      # trains again and writes tests/golden/ anew

``runs/`` holds the records (without times, machine and command), ``hashes.json`` masks and the SHA-256 of theta and
of weights, ``reports/`` the tables made from ``runs/``. Every setting is written out here: a new default has no effect.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import espalier
from espalier.cli.app import app
from espalier.data import load
from espalier.paper import write
from espalier.schema import CHECKSUM
from espalier.study import Grid
from espalier.study.settings import GridSettings
from espalier.train import Recipe
from espalier.train.batched import Run
from espalier.train.loop import Stop
from espalier.train.progress import Progress

HERE = Path(__file__).parent
LATER = {"signal": "ranked"}  # fields that a recipe may have some day: what it does today
DEFAULT: dict[str, Any] = {
    "theta_rate": 1.0, "theta_way": 200.0, "theta_cap": 0.2, "initial": 0.95, "adaptive": False, "begin": 0.35,
    "ramp": 0.15, "ramp_updates": 2000, "even": 1.0, "settle": 0.5, "weights_learning_rate": 0.05, "momentum": 0.9,
    "weight_decay": 1e-4, "drops": (0.75, 0.9),
}  # fmt: skip
FINETUNE: dict[str, Any] = DEFAULT | {
    "theta_rate": 16.0, "theta_way": 0.0, "theta_cap": 0.2, "initial": 0.98, "begin": 0.0, "ramp": 0.4, "even": 0.0,
    "settle": 0.5, "weights_learning_rate": 0.03, "drops": (0.6, 0.85),
}  # fmt: skip
# What differs between two runs of the same thing, by what stands for it in the records that are kept.
SECONDS = {"batch": 2.0, "per_run": 1.0, "parts": {"first_updates": 0.0, "updates": 1.5, "measuring": 0.5}}
OTHERWISE: dict[str, Any] = {
    "seconds": SECONDS, "hardware": {"device": "cpu", "cpu": "a processor"}, "versions": {"espalier": "golden"},
    "command": "espalier golden", "commit": "golden", "finished": "2026-01-01T00:00:00Z", "calls": [],
}  # fmt: skip
Hashes = dict[str, dict[str, str]]


def recipe(values: Mapping[str, Any]) -> Recipe:
    known = {field.name for field in fields(Recipe)}
    return Recipe(**values, **{name: value for name, value in LATER.items() if name in known})


def machine() -> dict[str, str]:
    """What bits of floating-point results depend on: equal machines give equal hashes."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {"cpu": cpu, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10)).double()


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """640 digits to train on and 160 to test on, float64: rounding then changes no comparison of two losses."""
    data = load("digits").flatten().as_floats(torch.float64)
    return tuple((inputs[:n], labels[:n]) for (inputs, labels), n in ((data.train, 640), (data.test, 160)))  # type: ignore[return-value]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes and values, these as float64."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.detach().to(torch.float64).contiguous().numpy().tobytes())
    return hashed.hexdigest()


def hashes_of(result: Any) -> dict[str, str]:
    """The mask as it is; theta and the weights of the compact model hashed."""
    theta = {} if result.theta is None else {"theta": digest({"": result.theta})}
    mask = "".join("01"[int(bit)] for bit in result.mask.tolist())
    return {"mask": mask, **theta, "weights": digest(result.model.state_dict())}


def fitted(folder: Path, model: nn.Module, own: Mapping[str, Any], **goal: float) -> dict[str, str]:
    train, test = digits()
    result = espalier.fit(
        model, train, loss=nn.functional.cross_entropy, epochs=4, batch_size=32, samples=2, cost="weights", seed=3,
        device="cpu", validation=test, recipe=recipe(own), checkpoint=folder, quiet=True, **goal,
    )  # fmt: skip
    return hashes_of(result)


def fit(folder: Path) -> Hashes:
    return {
        "target": fitted(folder / "target", network(), DEFAULT, target=0.25),
        "penalty": fitted(folder / "penalty", network(), DEFAULT, penalty=0.5),
    }


def finetune(folder: Path) -> Hashes:
    """From trained weights, by the recipe for those."""
    model, ((inputs, labels), _) = network(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows in torch.arange(len(inputs)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    return {"target": fitted(folder / "target", model, FINETUNE, target=0.5)}


def sweep(folder: Path) -> Hashes:
    """Targets, penalties, dropout and the whole network at once."""
    train, test = digits()
    runs = [Run(seed, target=0.25) for seed in (0, 1)] + [Run(0, penalty=0.5), Run(0, dropout=0.25)]
    runs += [Run(1, all_open=True)]
    results = espalier.sweep(
        network, train, runs=runs, epochs=4, batch_size=32, samples=2, cost="weights", recipe=recipe(DEFAULT),
        validation=test, device="cpu", checkpoint=folder, quiet=True,
    )  # fmt: skip
    return {f"run-{i:03d}": hashes_of(result) for i, result in enumerate(results)}


def command(*words: object) -> None:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    if done.exit_code:
        raise RuntimeError(done.output)


def unit_selection(folder: Path) -> Hashes:
    command(
        "paper", "unit-selection", "--out", folder, "--data", "digits", "--methods", "search,fixed,dropout",
        "--hidden", "12,10,8", "--epochs", 2, "--trials", 2, "--penalties", "0.25,0,-0.5", "--sizes", "0.5,1",
        "--points", 3, "--batch-size", 32, "--learning-rate", 0.05, "--dropout", 0.5, "--samples", 2, "--settle", 0,
        "--cost", "units", "--theta-rate", 0.05, "--device", "cpu", "--precision", "float32", "--commit", "golden",
        "--keep-state", "--no-report", "--quiet",
    )  # fmt: skip
    return kept_states(folder)


def connection_selection(folder: Path) -> Hashes:
    """On noise in CIFAR-10's own format: 30 images to train on and 6 to test on."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "cifar10").mkdir()
        draw = np.random.default_rng(0)
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            labels, images = draw.integers(0, 10, 6), draw.integers(0, 256, (6, 3072), dtype=np.uint8)
            part = b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True))
            (Path(place) / "cifar10" / f"{name}.bin").write_bytes(part)
        command(
            "paper", "connection-selection", "--out", folder, "--data-dir", place, "--data", "cifar10",
            "--methods", "search,random,full", "--layers", 2, "--growth", 4, "--epochs", 2, "--trials", 1,
            "--batch-size", 4, "--penalties", "0.25,-1", "--shares", 0.5, "--points", 2, "--pad", 1,
            "--learning-rate", 0.1, "--samples", 2, "--settle", 0, "--cost", "weights", "--theta-rate", 0.1,
            "--runs-at-once", 8, "--step", "readable", "--device", "cpu", "--precision", "float32", "--no-compile",
            "--updates-at-once", 5, "--commit", "golden", "--keep-state", "--no-report", "--quiet",
        )  # fmt: skip
    return kept_states(folder)


def kept_states(folder: Path) -> Hashes:
    """Of what a study keeps beside its records: the last states of its batches, or each run's weights. When a batch was
    saved before its end the clock decides."""
    paths = sorted((folder / "state").rglob("*.safetensors"))
    last = {path.parent: path for path in paths if path.name.startswith("checkpoint-")}
    paths = [path for path in paths if last.get(path.parent, path) == path]
    return {path.relative_to(folder / "state").as_posix(): {"state": digest(load_file(path))} for path in paths}


def grid(folder: Path) -> Hashes:
    settings = GridSettings(
        dataset="digits", methods=("search", "scratch", "found", "permuted", "penalty"), targets=(0.2, 0.6),
        penalties=(0.25,), hidden=(10, 8), trials=2, first_seed=0, folds=0, held_out=0, epochs=2, batch_size=32,
        samples=2, cost="weights", recipe=recipe(DEFAULT), points=3, precision="float32",
    )  # fmt: skip
    Grid(settings, folder, device="cpu", commit="golden", command="espalier golden").run(Stop(), Progress())
    return {}


CASES: dict[str, Callable[[Path], Hashes]] = {
    "fit": fit, "finetune": finetune, "sweep": sweep, "unit-selection": unit_selection,
    "connection-selection": connection_selection, "grid": grid,
}  # fmt: skip
RECORDS = ("settings.json", "metrics.jsonl", "theta.safetensors", "result.json")


def train(case: str, to: Path) -> Hashes:
    """Trains the runs of a case on one thread and leaves their records in a folder; returns hashes by run."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with tempfile.TemporaryDirectory() as place:
            hashes = CASES[case](Path(place) / case)
            keep(Path(place) / case, to)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    return hashes


def keep(folder: Path, to: Path) -> None:
    """The records of a folder, without what differs between two runs of the same thing."""
    for path in sorted(folder.rglob("*")):
        place = to / path.relative_to(folder)
        if path.name not in RECORDS and not ("runs" in path.parts and path.suffix in (".json", ".jsonl")):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            shutil.copyfile(path, place)
            continue
        text = path.read_text(encoding="utf-8")
        parts = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
        lines = [json.dumps(settled(part, path.name), separators=(",", ":")) for part in parts]
        place.write_text("\n".join(lines) + "\n", encoding="utf-8")


def settled(record: dict[str, Any], name: str) -> dict[str, Any]:
    otherwise = {key: value for key, value in OTHERWISE.items() if key in record}
    if name in ("metrics.jsonl", "result.json"):  # of a run directory, where finished is yes or no
        otherwise = {"seconds": 1.0} if "seconds" in record else {}
    kept = record | otherwise
    if kept.pop(CHECKSUM, None):
        kept["format"] = 1  # what is kept is not what was written, so it has no checksum
    return kept


def numbers(folder: Path) -> dict[str, Any]:
    """What came of each run: run, result and curve of its record, or result, metrics and theta of its directory."""
    outcome = dict[str, Any]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name in ("metrics.jsonl", "result.json"):
            outcome[name] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        elif path.name == "theta.safetensors":
            outcome[name] = {key: tensor.tolist() for key, tensor in load_file(path).items()}
        elif path.suffix in (".json", ".jsonl") and path.name != "settings.json":
            for one in (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()):
                if "run" in one:  # not the head of a batch; whether a batch has a file, or each of its runs, is all one
                    parts = {key: one[key] for key in ("run", "result", "curve")}
                    outcome[f"{path.parent.parent.name}/{json.dumps(one['run'], sort_keys=True)}"] = parts
    return outcome


def report(runs: Path, to: Path) -> None:
    """The tables of a folder of records, and its README where it has one."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / runs.name
        shutil.copytree(runs, folder)
        paths, _ = write(folder, figures=False, page=False)
        for path in paths:
            copy = to / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def main() -> None:
    hashes = dict[str, Hashes]()
    for part in ("runs", "reports"):
        shutil.rmtree(HERE / part, ignore_errors=True)
    for case in CASES:
        hashes[case] = train(case, HERE / "runs" / case)
        report(HERE / "runs" / case, HERE / "reports" / case)
        print(f"{case}: {len(numbers(HERE / 'runs' / case))} records", file=sys.stderr)
    text = json.dumps({"machine": machine(), "hashes": hashes}, indent=1)
    (HERE / "hashes.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
