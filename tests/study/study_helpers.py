"""A study small enough for a test: digits, narrow layers, a few dozen updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from espalier.study import PaperStudy
from espalier.study.settings import RunSpec, Settings
from espalier.train.loop import Stop
from espalier.train.progress import Progress

SMALL: dict[str, Any] = {
    "dataset": "digits", "hidden": (12, 10, 8), "epochs": 2, "trials": 2, "penalties": (0.25, 0.0, -0.5),
    "sizes": (0.5, 1.0), "points": 4, "learning_rate": 0.05, "theta_rate": 0.05,
}  # fmt: skip


class StopAfter(Stop):
    """Stops at the n-th look at the clock."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def now(self, spare: float = 0.0) -> bool:
        self.looks -= 1
        return self.looks < 0


def study(out: Path, **changes: Any) -> PaperStudy:
    return PaperStudy(Settings(**(SMALL | changes)), out, device="cpu", commit="abc", command="espalier paper")


def run(out: Path, stop: Stop | None = None, **changes: Any) -> bool:
    return study(out, **changes).run(stop or Stop(), Progress())


def stories(out: Path) -> dict[str, dict[str, Any]]:
    """Every run by its section, variant and name, without what differs between two runs of the same thing; with it,
    what its batch shares."""
    found = {}
    for path in sorted(out.glob("runs/*/*/*.jsonl")):
        head, *runs = map(json.loads, path.read_text().splitlines())
        for key in ("seconds", "calls", "finished", "espalier_sha256", "lines"):
            head.pop(key)
        for run in runs:
            spec = RunSpec(**run["run"])
            found[f"{path.parent.parent.name}/{spec.variant}/{spec.setting}-seed_{spec.seed}"] = head | run
    return dict(sorted(found.items()))
