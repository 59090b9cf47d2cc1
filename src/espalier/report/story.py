"""The story of one run, the same whoever wrote it: a study (run files), or fit, train and sweep (run directories)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.picture.labels import power
from espalier.report import theta

SHARES = {
    "weight_share": "weights",
    "mac_share": "MACs",
    "unit_share": "units",
    "connection_share": "connections",
    "parameter_share": "parameters",
}
LIVE = "live "  # a share of the canonical mask, without its dead parts, where that is another than the mask's
DEAD = 5e-4  # less than a digit of what is shown
AXES = (*SHARES.values(), *(f"{LIVE}{name}" for name in SHARES.values()))
COSTS = {"weights": "weights", "macs": "MACs", "units": "units", "parameters": "parameters"}
# Columns of a curve by one name. A run directory's plain "loss" and "error" are those of the training.
COLUMNS = {
    "test_error": "error", "validation_error": "error", "test_loss": "loss", "validation_loss": "loss",
    "train_error": "training error", "train_loss": "training loss", "expected_share": "expected share of the cost",
    "entropy": "entropy of the mask", "penalty": "penalty", "learning_rate": "learning rate of the weights",
    **{key: f"{name} kept" for key, name in SHARES.items()},
}  # fmt: skip
OWN = COLUMNS | {"error": "training error", "loss": "training loss"}


@dataclass(frozen=True)
class Setting:
    """What was asked of a run: a target, a penalty, the size of a given network, a rate of dropout."""

    kind: str
    value: float

    @property
    def label(self) -> str:
        if self.kind == "penalty":
            return f"penalty {power(self.value)}"
        return f"{self.kind} {100 * self.value:.4g}%" if self.kind != "rate" else f"rate {self.value:g}"


@dataclass(frozen=True)
class Story:
    """One run. What its writer did not tell is None or empty; error is 1 where training diverged and left none.

    place: what runs must share to stand in one chart. error_of: the examples that error and loss are of.
    shares: of the full network, by what is counted. kept: for each group of gates those that ship, and all.
    curve: rows of numbers by the names of COLUMNS' values, with "update". notes: what a reader should know.
    """

    name: str
    path: Path
    study: str | None
    place: tuple[str, ...]
    variant: str
    setting: Setting | None
    seed: int | None
    fold: int | None
    finished: bool
    diverged: bool
    error: float | None
    loss: float | None
    error_of: str
    shares: dict[str, float]
    kept: dict[str, tuple[int, int | None]]
    updates: int | None
    seconds: float | None
    curve: list[dict[str, float]]
    settings: dict[str, Any]
    versions: dict[str, Any]
    hardware: dict[str, Any]
    command: str
    commit: str
    ended: str
    raw: dict[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        return "diverged" if self.diverged else "finished" if self.finished else "unfinished"

    def share(self, name: str) -> float | None:
        """Of what is counted so; live things are those of the mask where nothing else is told."""
        return self.shares.get(name, self.shares.get(name.removeprefix(LIVE)))

    @property
    def machine(self) -> str:
        return str(self.hardware.get("gpu") or self.hardware.get("cpu") or "unknown hardware")

    @cached_property
    def theta(self) -> theta.Theta | None:
        """Read when asked for: of a run directory it is a file of its own."""
        if self.path.is_dir():
            return theta.from_tensors(self.path / "theta.safetensors", self.settings.get("space"))
        rows = self.raw["curve"]
        return theta.from_histograms(rows if isinstance(rows, list) else [], list(self.kept))


def shares(result: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    found = {name: share for key, name in SHARES.items() if (share := number(result.get(key))) is not None}
    for key, name in SHARES.items():
        live = number(mapping(result.get("canonical")).get(key))
        if live is not None and abs(live - found.get(name, live)) > DEAD:
            found[f"{LIVE}{name}"] = live
    searched, share = COSTS.get(str(settings.get("cost"))), number(result.get("cost_share"))
    if searched is not None and share is not None:
        found.setdefault(searched, share)
    return found


def shares_of_row(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[f"{name} kept"] for name in SHARES.values() if f"{name} kept" in row}


def kept(result: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[int, int | None]]:
    """Groups of gates: as told under ``kept``, or as the lists that the paper's studies write."""
    told, found = result.get("kept"), dict[str, tuple[int, int | None]]()
    if isinstance(told, Mapping):
        for name, pair in told.items():
            count, total, *_ = [*(whole(value) for value in (pair if isinstance(pair, list) else [pair])), None, None]
            if count is not None:
                found[str(name)] = (count, total)
        return found
    for key, word in (("units", "layer"), ("connections", "block")):
        counts = result.get(key)
        if isinstance(counts, list) and all(isinstance(count, int) for count in counts):
            totals = _totals(len(counts), result, settings)
            return {f"{word} {i}": (count, total) for i, (count, total) in enumerate(zip(counts, totals), 1)}
    return {}


def _totals(groups: int, result: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int | None]:
    widths, histogram = settings.get("widths"), result.get("theta_histogram")
    if isinstance(widths, list) and len(widths) == groups + 2:
        return [whole(width) for width in widths[1:-1]]
    if isinstance(histogram, list) and len(histogram) == groups and all(isinstance(bins, list) for bins in histogram):
        return [int(sum(count for count in bins if isinstance(count, int))) for bins in histogram]
    return [None] * groups


def named_row(row: Mapping[str, Any], names: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, float]:
    shown = {names[key]: value for key in row if key in names and (value := number(row[key])) is not None}
    told = {key: value for key in ("update", "epoch", *keep) if (value := number(row.get(key))) is not None}
    if "update" not in told and "epoch" in told:
        told["update"] = told["epoch"]
    return told | shown


def number(value: object) -> float | None:
    """The value, if it is a finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
