"""The story of one run, the same whoever wrote it: a run file of a study, or a run directory of fit, train or sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.report import theta
from espalier.report.runs import whole_power
from espalier.report.table import power
from espalier.space import Corrupt

FORMAT = 1
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
SETTINGS = ("target", "penalty", "size", "share", "rate", "dropout")  # what may tell runs of one variant apart
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
    """One run. What its writer did not tell is None or empty; error is 1 where training diverged.

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


def load_file(path: Path) -> dict[str, Any]:
    """A run file of a study, whole; they are written whole or not at all, so that a broken one is refused."""
    try:
        story = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a run file: {error}. Remove it and run the study again") from None
    needed = {"run", "settings", "result", "curve", "seconds", "hardware", "versions"}
    if not isinstance(story, dict) or story.get("format") != FORMAT or needed - story.keys():
        raise Corrupt(f"{path} is not a run file of format {FORMAT}; take it out of the folder")
    return story


def from_file(path: Path, root: Path) -> Story:
    """The story of ``runs/<section>/<variant>/<setting>-seed_N.json``."""
    raw = load_file(path)
    run, result, settings = (mapping(raw[part]) for part in ("run", "result", "settings"))
    diverged = result.get("diverged_at") is not None or ("test_error" in result and result["test_error"] is None)
    error = number(result.get("test_error", result.get("validation_error")))
    if diverged and result.get("test_error", 0) is None:
        error = 1.0
    place = (path.parent.parent.name, *(str(settings.get(key, "")) for key in ("dataset", "epochs")))
    of = str(raw.get("evaluated_on") or "test set")
    seconds, rows = raw["seconds"], raw["curve"] if isinstance(raw["curve"], list) else []
    return Story(
        name=path.relative_to(root / "runs").with_suffix("").as_posix() if root in path.parents else path.stem,
        path=path,
        study=None if raw.get("study") is None else str(raw["study"]),
        place=(*place, of),
        variant=str(run.get("variant") or run.get("method") or "run"),
        setting=_setting(run),
        seed=_whole(run.get("seed")),
        finished=True,
        diverged=diverged,
        error=error,
        loss=number(result.get("test_loss", result.get("validation_loss"))),
        error_of=of,
        shares=_shares(result, settings),
        kept=_kept(result, settings),
        updates=_whole(result.get("updates")),
        seconds=number(seconds.get("per_run") if isinstance(seconds, Mapping) else seconds),
        curve=[_row(row, COLUMNS) for row in rows if isinstance(row, Mapping)],
        settings=settings,
        versions=mapping(raw["versions"]),
        hardware=mapping(raw["hardware"]),
        command=str(raw.get("command") or ""),
        commit=str(raw.get("commit") or ""),
        ended=str(raw.get("finished") or ""),
        raw=raw,
    )


def from_folder(folder: Path, root: Path) -> Story:
    """The story of a run directory; without a whole ``result.json`` it is unfinished, and its last row speaks."""
    told = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    settings, notes = mapping(told["settings"]), list[str]()
    curve = _metrics(folder / "metrics.jsonl", notes)
    result = _result(folder / "result.json", notes)
    last = curve[-1] if curve else {}
    finished = bool(result.get("finished"))
    diverged = result.get("diverged") is not None
    scored = "error" in last or "loss" in last or number(result.get("validation_loss")) is not None
    error = number(result.get("validation_error"))
    loss = number(result.get("validation_loss"))
    if not scored:
        error, loss = last.get("training error"), last.get("training loss")
    elif not result:
        error, loss = last.get("error"), last.get("loss")
    name = folder.relative_to(root).as_posix() if folder != root else folder.resolve().name
    shown = " ".join(str(settings.get("model", "network")).split()[:2])  # the rest is a hash of the initial weights
    return Story(
        name=name,
        path=folder,
        study=None if told.get("study") is None else str(told["study"]),
        place=(shown, *(json.dumps(settings.get(key)) for key in ("space", "data", "epochs"))),
        variant=_variant(settings),
        setting=_asked(settings, result),
        seed=_whole(settings.get("seed")),
        finished=finished,
        diverged=diverged,
        error=1.0 if diverged and error is None else error,
        loss=loss,
        error_of="validation data" if scored else "training data",
        shares=_shares(result, settings) if result else _shares_of_row(last),
        kept=_kept(result, settings),
        updates=_whole(result.get("updates", last.get("update"))),
        seconds=number(result.get("seconds", last.get("seconds"))),
        curve=curve,
        settings=settings,
        versions=mapping(told["versions"]),
        hardware=mapping(told["hardware"]),
        command=str(told.get("command") or ""),
        commit=str(told.get("commit") or ""),
        ended="",
        raw={"settings": told, "result": result},
        notes=tuple(notes),
    )


def _metrics(path: Path, notes: list[str]) -> list[dict[str, float]]:
    """Rows as far as they are whole; the last may have been cut off by a kill."""
    rows = list[dict[str, float]]()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        notes.append("metrics.jsonl cannot be read, so there is no learning curve")
        return rows
    for i, line in enumerate(lines, 1):
        try:
            rows.append(_row(json.loads(line), OWN, keep=("seconds",)))
        except (ValueError, AttributeError):
            notes.append(f"metrics.jsonl is cut off in line {i}; the rows before it are shown")
            break
    return rows


def _result(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        notes.append("result.json is not whole, so the run is shown as unfinished")
        return {}
    return found


def _variant(settings: Mapping[str, Any]) -> str:
    """A run directory tells what its masks came from, not what that is called."""
    if settings.get("dropout"):
        name = "dropout"
    elif settings.get("mask") is not None or settings.get("all_open"):
        name = "fixed"
    else:
        name = "permuted" if settings.get("permuted") else "search"
    rate = settings.get("learning_rate")  # of this run alone; that of all runs is the optimiser's
    return name if rate is None else f"{name}, learning rate {rate}"


def _asked(settings: Mapping[str, Any], result: Mapping[str, Any]) -> Setting | None:
    variant = _variant(settings).partition(",")[0]
    if variant in ("search", "permuted"):
        target = number(settings.get("target"))
        return (
            Setting("penalty", number(settings.get("penalty")) or 0.0) if target is None else Setting("target", target)
        )
    if variant == "dropout":
        return Setting("rate", number(settings["dropout"]) or 0.0)
    share = number(result.get("unit_share"))
    return None if share is None else Setting("size", share)


def _setting(run: Mapping[str, Any]) -> Setting | None:
    for kind in SETTINGS:
        value = number(run.get(kind))
        if value is not None:
            return Setting("rate" if kind == "dropout" else kind, whole_power(value) if kind == "penalty" else value)
    return None


def _shares(result: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    found = {name: share for key, name in SHARES.items() if (share := number(result.get(key))) is not None}
    for key, name in SHARES.items():
        live = number(mapping(result.get("canonical")).get(key))
        if live is not None and abs(live - found.get(name, live)) > DEAD:
            found[f"{LIVE}{name}"] = live
    searched, share = COSTS.get(str(settings.get("cost"))), number(result.get("cost_share"))
    if searched is not None and share is not None:
        found.setdefault(searched, share)
    return found


def _shares_of_row(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[f"{name} kept"] for name in SHARES.values() if f"{name} kept" in row}


def _kept(result: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[int, int | None]]:
    """Groups of gates: as told under ``kept``, or as the lists that the paper's studies write."""
    told, found = result.get("kept"), dict[str, tuple[int, int | None]]()
    if isinstance(told, Mapping):
        for name, pair in told.items():
            count, total, *_ = [*(_whole(value) for value in (pair if isinstance(pair, list) else [pair])), None, None]
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
        return [_whole(width) for width in widths[1:-1]]
    if isinstance(histogram, list) and len(histogram) == groups and all(isinstance(bins, list) for bins in histogram):
        return [int(sum(count for count in bins if isinstance(count, int))) for bins in histogram]
    return [None] * groups


def _row(row: Mapping[str, Any], names: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, float]:
    shown = {names[key]: value for key in row if key in names and (value := number(row[key])) is not None}
    told = {key: value for key in ("update", "epoch", *keep) if (value := number(row.get(key))) is not None}
    if "update" not in told and "epoch" in told:
        told["update"] = told["epoch"]
    return told | shown


def number(value: object) -> float | None:
    """The value, if it is a finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def _whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
