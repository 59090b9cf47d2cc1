"""Studies made up for tests of the page: a grid of run files, and run directories, every number given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TARGETS = (0.1, 0.25, 0.5)
SEEDS = (0, 1, 2)
# error of a method at a target; the seeds add 0, 1 and 2 thousandths
ERRORS = {
    "search": {0.1: 0.060, 0.25: 0.030, 0.5: 0.020},
    "scratch": {0.1: 0.090, 0.25: 0.045, 0.5: 0.025},
    "found": {0.1: 0.070, 0.25: 0.035, 0.5: 0.010},
}
HARDWARE = {"device": "cpu", "cpu": "a processor", "cores": 2}
VERSIONS = {"espalier": "0.1.0", "torch": "2.13"}


def grid_run(folder: Path, method: str, target: float, seed: int, **changes: Any) -> Path:
    """One run file as `espalier study` writes them: no key that belongs to one study alone."""
    error = ERRORS.get(method, ERRORS["search"])[target] + 0.001 * seed
    kept = {"conv1": [round(16 * target**0.5), 16], "conv2": [round(32 * target**0.5), 32]}
    result = {
        "test_error": error, "test_loss": 3 * error, "weight_share": target, "mac_share": target * 0.9,
        "unit_share": target**0.5, "kept": kept, "updates": 400,
    }  # fmt: skip
    rows = [
        {
            "update": 100 * i,
            "train_loss": 1 / i,
            "test_error": error * (5 - i),
            "weight_share": 1 - (1 - target) * i / 4,
        }
        for i in (1, 2, 3, 4)
    ]
    record: dict[str, Any] = {
        "format": 1, "study": "digits-grid",
        "run": {"method": method, "variant": method, "seed": seed, "target": target},
        "settings": {"dataset": "digits", "epochs": 4, "batch_size": 32}, "result": result, "curve": rows,
        "seconds": {"per_run": 1.5}, "evaluated_on": "test set", "hardware": HARDWARE, "versions": VERSIONS,
        "commit": "0123456789abcdef", "command": f"espalier study --methods {method}",
        "finished": "2026-11-15T12:00:00Z",
    }  # fmt: skip
    record |= changes
    place = folder / "runs" / "digits-4_epochs" / str(record["run"]["variant"]).replace("/", "_")
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"target_{target}-seed_{seed}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def grid(folder: Path) -> None:
    for method in ERRORS:
        for target in TARGETS:
            for seed in SEEDS:
                grid_run(folder, method, target, seed)


def run_directory(
    folder: Path, *, seed: int = 0, target: float | None = 0.25, error: float | None = 0.05, **settings: Any
) -> Path:
    """A run directory as espalier.fit writes it: 6 gates in two groups, five epochs."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = {
        "model": "Sequential 0123456789abcdef", "space": json.dumps([["bits", "0", 4, 1], ["bits", "2", 2, 1]]),
        "data": {"examples": 100}, "epochs": 5, "batch_size": 20, "cost": "macs", "penalty": None, "target": target,
        "seed": seed, "recipe": {"initial": 0.5},
    }  # fmt: skip
    record = {"settings": usual | settings, "versions": VERSIONS, "hardware": HARDWARE}
    (folder / "settings.json").write_text(json.dumps(record))
    scored = error is not None
    rows = [
        {"epoch": i, "update": 5 * i, "loss": 2 / i, "error": 0.5 / i, "weight_share": 0.3, "seconds": 0.1 * i}
        | ({"validation_loss": 1 / i, "validation_error": (error or 0) * (6 - i)} if scored else {})
        for i in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    theta = np.linspace([0.5] * 6, [0.9, 0.1, 0.8, 0.2, 0.05, 0.95], 6).astype(np.float32)
    save_file({"theta": theta, "updates": np.arange(0, 30, 5, dtype=np.int64)}, folder / "theta.safetensors")
    result = {
        "finished": True, "target": target, "unit_share": 0.5, "weight_share": 0.3, "cost_share": 0.24, "penalty": 0.7,
        "validation_loss": 0.2 if scored else None, "validation_error": error, "kept": {"0": [2, 4], "2": [1, 2]},
        "updates": 25, "seconds": 0.5,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder
