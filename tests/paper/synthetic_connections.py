"""Run files of connection selection made up for tests of the report: each number is given, each verdict known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UPDATES = 93_750
FULL = (91, 91, 91)


def write(
    folder: Path,
    method: str,
    setting: float,
    seed: int,
    *,
    error: float,
    share: float,
    connections: Sequence[int] = FULL,
    block_depths: Sequence[int] = (12, 12, 12),
    shipped: float | None = None,
    mac_share: float | None = None,
    variant: str | None = None,
    epochs: int = 60,
    seconds: float = 2000.0,
    runs_in_batch: int = 8,
    depth: int = 40,
    **changes: Any,
) -> Path:
    shipped = share if shipped is None else shipped
    macs = shipped if mac_share is None else mac_share
    row = {
        "update": UPDATES, "connections": list(connections), "connection_share": sum(connections) / 273,
        "weight_share": share, "mac_share": macs, "train_loss": 0.2, "train_error": 0.05, "test_loss": 0.3,
        "test_error": error,
    }  # fmt: skip
    if method == "search":
        row["theta_histogram"] = [[91 - k, *[0] * 18, k] for k in connections]
    name = "penalty" if method == "search" else "size"
    label = variant or method
    dead = [] if shipped == share else [5, 9]
    record: dict[str, Any] = {
        "format": 1,
        "study": "connection-selection",
        "run": {"method": method, "variant": label, "seed": seed, name: setting},
        "settings": {
            "dataset": "cifar10", "epochs": epochs, "network": "DenseNet", "depth": depth, "growth": 12, "settle": 0.0,
            "pad": 4,
        },
        "result": {
            "updates": UPDATES,
            "mask": "f" * 68 + "8",  # 273 gates, all open, whatever is told of them
            **{k: v for k, v in row.items() if not k.startswith("train") and k != "update"},
            "canonical": {
                "connections": list(connections), "weight_share": shipped, "mac_share": macs,
                "depth": 4 + sum(block_depths), "block_depths": list(block_depths), "dead_layers": dead,
            },
        },
        "curve": [row | {"update": UPDATES // 2, "test_error": 2 * error, "weight_share": (1 + share) / 2}, row],
        "seconds": {"batch": seconds, "per_run": seconds / runs_in_batch, "parts": {"updates": seconds - 10.0}},
        "runs_in_batch": runs_in_batch,
        "evaluated_on": "test set",
        "examples": {"train": 50_000, "test": 10_000},
        "hardware": {"device": "cuda", "cpu": "a processor", "gpu": "an accelerator"},
        "versions": {"espalier": "0.1.0", "torch": "2.11"},
        "commit": "0123456789",
        "command": f"espalier paper connection-selection --epochs {epochs} --out here",
        "finished": "2026-11-15T12:00:00Z",
    }  # fmt: skip
    if method == "random":
        record["result"]["drawn"] = {"draws": 50, "without_path": 10 + seed, "away_from_share": 45}
    record |= changes
    path = folder / "runs" / f"cifar10-{epochs}_epochs" / label / f"{setting}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


TABLE = {  # penalty: weight share, connections, longest path through each block, error
    2**-2: (0.158, (36, 6, 20), (9, 2, 8), 0.081),
    2**-3: (0.241, (45, 8, 49), (10, 3, 9), 0.071),
    2**-4: (0.423, (57, 39, 67), (11, 7, 10), 0.060),
    2**-5: (0.675, (59, 61, 76), (12, 11, 12), 0.0552),
    2**-6: (0.803, (65, 64, 80), (12, 12, 12), 0.0541),
    0.0: (0.95, (80, 82, 88), (12, 12, 12), 0.0535),
    -0.125: (1.0, FULL, (12, 12, 12), 0.053),
    -1.0: (1.0, FULL, (12, 12, 12), 0.053),
}


def as_the_paper_says(folder: Path, trials: int = 5, epochs: int = 60) -> None:
    """A study in which C6 to C9 hold."""
    for penalty, (share, connections, depths, error) in TABLE.items():
        for seed in range(trials):
            write(
                folder, "search", penalty, seed, error=error + 1e-5 * seed, share=share, connections=connections,
                block_depths=depths, epochs=epochs, shipped=share * (0.97 if share < 0.5 else 1.0),
            )  # fmt: skip
    for share, error in ((0.16, 0.115), (0.24, 0.092), (0.42, 0.067), (0.675, 0.0555), (0.80, 0.0543)):
        for seed in range(trials):
            where = {"share": share, "shipped": share * 0.7, "connections": [round(91 * share)] * 3}
            write(folder, "random", share, seed, error=error + 2e-5 * seed, epochs=epochs, seconds=1950, **where)
    for seed in range(trials):
        write(folder, "full", 1.0, seed, error=0.0530 + 1e-5 * seed, share=1.0, epochs=epochs, seconds=1950)
