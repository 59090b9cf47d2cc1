"""A run directory of fit, train or sweep, read as a story; what is half-written is told as far as it goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.report.story import OWN, Setting, Story, kept, mapping, named_row, number, shares, shares_of_row, whole


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
        seed=whole(settings.get("seed")),
        fold=whole(settings.get("fold")),
        finished=finished,
        diverged=diverged,
        error=1.0 if diverged and error is None else error,
        loss=loss,
        error_of="validation data" if scored else "training data",
        shares=shares(result, settings) if result else shares_of_row(last),
        kept=kept(result, settings),
        updates=whole(result.get("updates", last.get("update"))),
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
            rows.append(named_row(json.loads(line), OWN, keep=("seconds",)))
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
