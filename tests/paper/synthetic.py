"""Run files made up for tests of the report: each number is given, so that each verdict is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

PAPER = (784, 784, 784, 784, 10)
UPDATES = 937_500


def weights(units: Sequence[int], widths: Sequence[int]) -> int:
    line = [widths[0], *units, widths[-1]]
    return sum(a * b for a, b in pairwise(line))


def write(
    folder: Path,
    method: str,
    setting: float,
    seed: int,
    *,
    error: float,
    units: Sequence[int] = (784, 784, 784),
    variant: str | None = None,
    dataset: str = "mnist",
    widths: Sequence[int] = PAPER,
    epochs: int = 500,
    seconds: float = 600.0,
    runs_in_batch: int = 35,
    **changes: Any,
) -> Path:
    hidden = widths[1:-1]
    row = {
        "update": UPDATES, "units": list(units), "train_loss": 0.01, "train_error": 0.0, "test_loss": 0.1,
        "test_error": error, "unit_share": sum(units) / sum(hidden),
        "weight_share": weights(units, widths) / weights(hidden, widths),
    }  # fmt: skip
    if method == "search":
        row["theta_histogram"] = [[w - u, *[0] * 18, u] for u, w in zip(units, hidden)]
    name = {"search": "penalty", "fixed": "size", "dropout": "rate"}[method]
    label = variant or method
    record: dict[str, Any] = {
        "format": 1,
        "study": "unit-selection",
        "run": {"method": method, "variant": label, "seed": seed, name: setting},
        "settings": {"dataset": dataset, "epochs": epochs, "widths": list(widths), "settle": 0.0},
        "result": {"updates": UPDATES, **{k: v for k, v in row.items() if not k.startswith("train")}},
        "curve": [row | {"update": UPDATES // 2}, row],
        "seconds": {"batch": seconds, "per_run": seconds / runs_in_batch, "parts": {"updates": seconds - 10.0}},
        "runs_in_batch": runs_in_batch,
        "evaluated_on": "test set",
        "hardware": {"device": "cuda", "cpu": "a processor", "gpu": "an accelerator"},
        "versions": {"espalier": "0.1.0", "torch": "2.11"},
        "commit": "0123456789",
        "command": "espalier paper unit-selection --out here",
        "finished": "2026-11-15T12:00:00Z",
    }
    if method == "search":
        record["result"]["stochastic"] = {"draws": 20, "test_loss": 0.1, "test_error": error * 0.9}
    record |= changes
    path = folder / "runs" / f"{dataset}-{epochs}_epochs" / label.replace("/", "_") / f"{setting}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


TABLE = {
    2**-6: (92, 31, 24),
    2**-7: (340, 141, 126),
    2**-8: (599, 380, 379),
    2**-9: (704, 544, 567),
    0.0: (770, 717, 724),
    -0.125: (784, 784, 784),
    -1.0: (784, 784, 784),
}


def as_the_paper_says(folder: Path, trials: int = 5) -> None:
    """A study in which every claim holds: its own Table 1, errors below the fixed networks', dropout between."""
    for i, (penalty, units) in enumerate(TABLE.items()):
        for seed in range(trials):
            error = 0.05 if i == 0 else 0.012 - 0.0001 * i
            write(folder, "search", penalty, seed, error=error + 1e-5 * seed, units=units, seconds=600)
    for size in (0.066, 0.13, 0.261, 0.578, 0.777, 1.0):
        for seed in range(trials):
            kept = [round(784 * size)] * 3
            error = 0.015 + 0.01 * (1 - size) + 2e-5 * seed
            write(folder, "fixed", size, seed, error=error, units=kept, seconds=580)
    for seed in range(trials):
        write(folder, "dropout", 0.5, seed, error=0.0125 + 1e-5 * seed, seconds=580)
