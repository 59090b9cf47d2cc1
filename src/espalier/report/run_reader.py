"""One run, the same whoever wrote it: a run file of a study, a line of a batch of short runs, or a run directory.

A run file is written whole or not at all, so that a broken one is refused. A run directory of ``fit``, ``train`` or
``sweep`` may be half-written, and is read as far as it goes. What a writer did not say is None or empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from espalier import records, schema
from espalier.files import MANIFEST
from espalier.picture import power, whole_power
from espalier.space import Corrupt

LABELS = {
    "search": "search",
    "scratch": "uniform, from scratch",
    "found": "found structure, from scratch",
    "permuted": "control: losses permuted",
    "fixed": "fixed structure",
    "dropout": "dropout",
    "random": "random structure",
    "full": "full network",
}
SETTINGS = ("target", "penalty", "size", "share", "rate", "dropout")  # what may tell runs of one variant apart
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
GROUPS = {"units": "layer", "connections": "block"}  # of gates, as the paper's studies count them
# Columns of a curve by one name, in the order they are offered. A run directory's plain "loss" and "error" are those of
# the training.
COLUMNS = {
    "test_error": "error", "validation_error": "error", "test_loss": "loss", "validation_loss": "loss",
    "train_error": "training error", "train_loss": "training loss",
    **{key: f"{name} kept" for key, name in SHARES.items()},
    "expected_share": "expected share of the cost", "entropy": "entropy of the mask", "penalty": "penalty",
    "learning_rate": "learning rate of the weights",
}  # fmt: skip
DIRECTORY_COLUMNS = COLUMNS | {"error": "training error", "loss": "training loss"}


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
class Theta:
    """Theta over time, gates grouped. values: ``(snapshots, d)`` in [0, 1]; sizes: gates of each group, d in all.

    ranked: a row is a rank, not a gate: at each update the gates of a group stand in order of their theta.
    """

    updates: list[int]
    values: np.ndarray
    sizes: dict[str, int]
    ranked: bool


@dataclass(frozen=True)
class Run:
    """One run; of a study error is 1 where training diverged and left none.

    place: what runs must share to stand in one chart. error_of: the examples that error and loss are of.
    shares: of the full network, by what is counted. kept: for each group of gates those that ship, and all.
    curve: rows of numbers by the names of COLUMNS' values, with "update". notes: what a reader should know.
    record: the content of its file, for what is told of a few kinds of runs only.
    """

    name: str
    path: Path
    study: str
    place: tuple[str, ...]
    method: str
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
    record: dict[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        return "diverged" if self.diverged else "finished" if self.finished else "unfinished"

    @property
    def machine(self) -> str:
        return str(self.hardware.get("gpu") or self.hardware.get("cpu") or "unknown hardware")

    @property
    def label(self) -> str:
        return self.setting.label if self.setting else ""

    @property
    def signal(self) -> str:
        """What theta learns from, if it searches, and what its control has permuted."""
        told = self.settings.get("signal") or mapping(self.settings.get("recipe")).get("signal")
        return "losses" if told in (None, "ranked") else "slopes"

    @property
    def called(self) -> str:
        """Its variant in words."""
        name, *more = self.variant.split(", ")
        words = LABELS.get(name, name.replace("+", ", ").replace("_", " "))
        return ", ".join([words.replace("losses", self.signal), *more])

    @property
    def result(self) -> dict[str, Any]:
        return mapping(self.record.get("result"))

    @property
    def searches(self) -> bool:
        """Whether its structure was searched for, not given."""
        return self.method in ("search", "permuted", "penalty")

    @property
    def settled_at(self) -> int | None:
        """After how many updates the structure was fixed, so that the weights finished under what ships."""
        if not self.searches:
            return None
        at, share = integer(self.settings.get("settle_at")), number(self.settings.get("settle"))
        if at is None and share:
            at = round((1 - share) * (self.updates or 0))
        return at if at is not None and 0 < at < (self.updates or 0) else None

    def score(self, measure: str) -> float | None:
        return self.error if measure == "error" else self.loss

    def share(self, name: str) -> float | None:
        """Its share of what is counted. Without a count of live parts, that of the mask."""
        return self.shares.get(name, self.shares.get(name.removeprefix(LIVE)))

    def number(self, name: str) -> float:
        """The "error", 1 where there is none, or a number of the result: "weight_share", "canonical.depth"."""
        if name == "error":
            return 1.0 if self.error is None else self.error
        value: Any = self.result
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, (int, float)):
            raise Corrupt(f"{self.path} has no {name}, as runs of its study have. {records.REMOVE}")
        return float(value)

    @cached_property
    def theta(self) -> Theta | None:
        """Read when asked for: of a run directory it is a file of its own."""
        if self.path.is_dir():
            return _theta_of_snapshots(self.path / "theta.safetensors", self.settings.get("space"), list(self.kept))
        return _theta_of_histograms(self.record["curve"], list(self.kept))


# ---- run files -------------------------------------------------------------------------------------------------------


def from_file(path: Path, root: Path, parts: list[Any] | None = None) -> list[Run]:
    """The runs of ``runs/<section>/<variant>/<setting>-seed_N.json``, or of the ``.jsonl`` of a whole batch: what its
    runs share stands in the first line, their own in one line each.

    parts: its JSON, where that was packed with others.
    """
    place, runs = path.relative_to(root / "runs"), records.runs_of(path, parts)
    if path.suffix != ".jsonl":
        return [_of_record(path, place.with_suffix(""), one) for one in runs]
    names = ("fold", *SETTINGS, "seed")  # what tells a run of a batch from its others, as run files are called
    asked = [{key: one["run"][key] for key in names if one["run"].get(key) is not None} for one in runs]
    stems = ["-".join(f"{key}_{value}" for key, value in one.items()) for one in asked]
    return [_of_record(path, place.parent / stem, one) for stem, one in zip(stems, runs)]


def _of_record(path: Path, name: Path, record: dict[str, Any]) -> Run:
    settings = mapping(record["settings"])
    place = (path.parent.parent.name, *(str(settings.get(key, "")) for key in ("dataset", "epochs")))
    error_of = str(record.get("evaluated_on") or "test set")
    curve = _named(record["curve"], COLUMNS)
    return _run(record, record["result"], curve, name=name.as_posix(), path=path, place=(*place, error_of),
                error_of=error_of)  # fmt: skip


def _run(record: dict[str, Any], outcome: object, curve: list[dict[str, float]], **more: Any) -> Run:
    """outcome: the result, or what is told in its place. more: what a run file and a run directory say differently."""
    run, result, settings = (mapping(part) for part in (record["run"], outcome, record["settings"]))
    diverged = result.get("diverged_at") is not None or ("test_error" in result and result["test_error"] is None)
    error = number(result.get("test_error", result.get("validation_error")))
    if "test_error" in result and error is None:  # of a study, all of which count errors: it diverged
        error = 1.0
    seconds = record["seconds"]
    about = {
        "method": str(run.get("method") or ""),
        "variant": str(run.get("variant") or run.get("method") or "run"),
        "setting": _setting(run),
        "finished": True,
        "diverged": diverged,
        "error": error,
        "loss": number(result.get("test_loss", result.get("validation_loss"))),
        "shares": _shares(result, settings),
        "kept": _kept(result, settings),
        "updates": integer(result.get("updates")),
        "seconds": number(seconds.get("per_run") if isinstance(seconds, Mapping) else seconds),
        **{key: str(record.get(key) or "") for key in ("study", "command", "commit")},
        **{key: mapping(record[key]) for key in ("versions", "hardware")},
        **{key: integer(run.get(key)) for key in ("seed", "fold")},
        "ended": str(record.get("finished") or ""),
    }
    return Run(**about | more, settings=settings, curve=curve, record=record)


def _setting(run: Mapping[str, Any]) -> Setting | None:
    for kind in SETTINGS:
        value = number(run.get(kind))
        if value is not None:
            return Setting("rate" if kind == "dropout" else kind, whole_power(value) if kind == "penalty" else value)
    return None


# ---- run directories -------------------------------------------------------------------------------------------------


def from_folder(folder: Path, root: Path) -> Run:
    """The run of a run directory; without a whole ``result.json`` it is unfinished, and its last row speaks."""
    head, notes = records.settings_of(folder), list[str]()
    try:
        rows, damage = records.metrics_of(folder)  # as far as they are whole; the last may have been cut off by a kill
    except OSError:
        rows, damage = [], "metrics.jsonl cannot be read, so there is no learning curve"
    notes += [damage] if damage else []
    settings, result = head["settings"], _result(folder, notes)
    last = rows[-1] if rows else {}
    outcome = (result or last | {"updates": last.get("update")}) | {"diverged_at": result.get("diverged")}
    if outcome.get("test_error") is None:  # `espalier train` writes None where the test part was the one to judge by
        outcome = {name: value for name, value in outcome.items() if name not in ("test_error", "test_loss")}
    scores = [outcome.get("validation_loss"), *(last.get(f"validation_{name}") for name in ("error", "loss"))]
    scores.append(result.get("validation_examples"))  # of a run that diverged the only number
    scored = any(number(score) is not None for score in scores)
    if not scored:
        outcome |= {"validation_error": last.get("error"), "validation_loss": last.get("loss")}
    rate = settings.get("learning_rate")  # of this run alone; that of all runs is the optimiser's
    method, asked = _asked(settings, result)
    run = {"method": method, "variant": method if rate is None else f"{method}, learning rate {rate}"} | asked
    model = " ".join(str(settings.get("model", "network")).split()[:2])  # the rest is a hash of the initial weights
    # As run files of a study call the same data; ``espalier train`` says which part it judged by.
    judged_on = "test set" if str(result.get("judged_on") or "").startswith("the test part") else "validation data"
    more: dict[str, Any] = {
        "name": folder.relative_to(root).as_posix() if folder != root else folder.resolve().name,
        "place": (model, *(json.dumps(settings.get(key)) for key in ("space", "data", "epochs"))),
        "finished": bool(result.get("finished")),
        "error_of": judged_on if scored else "training data",
        "notes": tuple(notes),
    }
    record = head | {"run": run | {key: settings.get(key) for key in ("seed", "fold")}, "result": result}
    record |= {"seconds": outcome.get("seconds")}
    return _run(record, outcome, _named(rows, DIRECTORY_COLUMNS), path=folder, **more)


def _result(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return records.result_of(folder)
    except FileNotFoundError:
        return {}
    except (OSError, Corrupt):
        if (folder / MANIFEST).exists():
            raise
        notes.append("result.json is not whole, so the run is shown as unfinished")
        return {}


def _asked(settings: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method and what was asked of it: a run directory says where its masks came from, not what that is called."""
    if settings.get("dropout"):
        return "dropout", {"rate": settings["dropout"]}
    if number(settings.get("found")) is not None:
        return "found", {"target": settings["found"]}
    if settings.get("mask") is not None or settings.get("all_open"):
        return "fixed", {"size": result.get("unit_share")}
    price = {"penalty": settings.get("penalty") or 0.0}
    asked = price if number(settings.get("target")) is None else {"target": settings["target"]}
    return "permuted" if settings.get("permuted") else "search", asked


# ---- parts of both ---------------------------------------------------------------------------------------------------


def _shares(result: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    shares = {name: share for key, name in SHARES.items() if (share := number(result.get(key))) is not None}
    for key, name in SHARES.items():
        live = number(mapping(result.get("canonical")).get(key))
        if live is not None and abs(live - shares.get(name, live)) > DEAD:
            shares[f"{LIVE}{name}"] = live
    counted, share = records.COUNTED.get(str(settings.get("cost"))), number(result.get("cost_share"))
    if counted is not None and share is not None:
        shares.setdefault(counted, share)
    return shares


def _kept(result: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[int, int | None]]:
    """Groups of gates: those under ``kept``, or the lists that the paper's studies write."""
    if isinstance(groups := result.get("kept"), Mapping):
        return {name: (count, total) for name, (count, total) in groups.items()}
    key = next((key for key in GROUPS if isinstance(result.get(key), list)), None)
    if key is None:
        return {}
    counts, widths, histogram = result[key], settings.get("widths", [])[1:-1], result.get("theta_histogram", [])
    totals: list[int | None] = [None] * len(counts)
    if len(widths) == len(counts):
        totals = widths
    elif len(histogram) == len(counts):
        totals = [sum(bins) for bins in histogram]
    return {f"{GROUPS[key]} {i}": (count, total) for i, (count, total) in enumerate(zip(counts, totals), 1)}


def _named(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, float]]:
    """The numbers of a curve by their names, with the updates they are of."""
    known = {"update": "update", **names}
    return [
        {known[key]: value for key in row if key in known and (value := number(row[key])) is not None} for row in rows
    ]


def _theta_of_snapshots(path: Path, space: Any, order: Sequence[str]) -> Theta | None:
    """``theta.safetensors`` of a run directory; space: its groups of gates, as JSON; order: from the input to the
    output. None where they do not fit."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        records.check(path)
        tensors = load_file(path)
        values, updates = tensors["theta"], tensors["updates"]
        rows = schema.parse(space.encode(), schema.each(schema.each(schema.anything, 3)))
        sizes = {str(row[1]): int(row[2]) for row in rows}
    except (OSError, KeyError, TypeError, AttributeError, ValueError, SafetensorError):
        return None
    if values.ndim != 2 or not values.size or values.shape != (len(updates), sum(sizes.values())):
        return None
    if set(order) == set(sizes):
        starts = dict(zip(sizes, np.cumsum([0, *sizes.values()])))
        values = np.concatenate([values[:, starts[name] : starts[name] + sizes[name]] for name in order], axis=1)
        sizes = {name: sizes[name] for name in order}
    return Theta([int(u) for u in updates], np.clip(np.nan_to_num(values), 0, 1), sizes, ranked=False)


def _theta_of_histograms(curve: Sequence[Any], names: Sequence[str]) -> Theta | None:
    """Ranks, from counts of theta in equal bins: the k-th smallest theta of a group, as the middle of its bin."""
    rows = [row for row in curve if row.get("theta_histogram")]
    try:
        counts = np.array([row["theta_histogram"] for row in rows], dtype=np.int64)  # (snapshots, groups, bins)
        updates = [int(row["update"]) for row in rows]
    except (KeyError, TypeError, ValueError):
        return None
    if counts.ndim != 3 or counts.shape[1] != len(names) or (counts.sum(2) != counts[0].sum(1)).any():
        return None
    middles = (np.arange(counts.shape[2]) + 0.5) / counts.shape[2]
    values = np.array([np.concatenate([np.repeat(middles, bins) for bins in groups]) for groups in counts])
    return Theta(updates, values, dict(zip(names, map(int, counts[0].sum(1)))), ranked=True)


def number(value: object) -> float | None:
    """The value, if it is a finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def integer(value: object) -> int | None:
    finite = number(value)
    return None if finite is None else int(finite)


def mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
