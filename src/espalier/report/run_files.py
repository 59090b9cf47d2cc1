"""The run files of a study, read as stories: a JSON file for each run, or JSON lines for each batch of short runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.picture.labels import whole_power
from espalier.report.story import COLUMNS, Setting, Story, kept, mapping, named_row, number, shares, whole
from espalier.space import Corrupt

FORMAT = 1
NEEDED = {"run", "settings", "result", "curve", "seconds", "hardware", "versions"}
SETTINGS = ("target", "penalty", "size", "share", "rate", "dropout")  # what may tell runs of one variant apart


def load_file(path: Path) -> dict[str, Any]:
    """A run file of a study, whole; they are written whole or not at all, so that a broken one is refused."""
    try:
        story = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a run file: {error}. Remove it and run the study again") from None
    if not isinstance(story, dict) or story.get("format") != FORMAT or NEEDED - story.keys():
        raise Corrupt(f"{path} is not a run file of format {FORMAT}; take it out of the folder")
    return story


def load_lines(path: Path) -> list[dict[str, Any]]:
    """The runs of a file of JSON lines: what they share stands in its first line, their own in one line each."""
    try:
        head, *own = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a file of runs: {error}. Remove it and run the study again") from None
    whole_file = all(isinstance(line, dict) for line in (head, *own)) and head.get("format") == FORMAT
    if not whole_file or head.get("runs_in_batch") != len(own) or any(NEEDED - (head | line).keys() for line in own):
        raise Corrupt(f"{path} is not a whole file of runs of format {FORMAT}. Remove it and run the study again")
    return [head | line for line in own]


def _name(raw: dict[str, Any]) -> str:
    """What tells a run of a batch from its others, as run files are called."""
    run = mapping(raw["run"])
    return "-".join(f"{key}_{run[key]}" for key in ("fold", *SETTINGS, "seed") if run.get(key) is not None)


def from_file(path: Path, root: Path) -> list[Story]:
    """The stories of ``runs/<section>/<variant>/<setting>-seed_N.json``, or of the ``.jsonl`` of a whole batch."""
    if path.suffix == ".jsonl":
        return [_story(path, path.relative_to(root / "runs").parent / _name(raw), raw) for raw in load_lines(path)]
    return [_story(path, path.relative_to(root / "runs").with_suffix(""), load_file(path))]


def _story(path: Path, name: Path, raw: dict[str, Any]) -> Story:
    run, result, settings = (mapping(raw[part]) for part in ("run", "result", "settings"))
    diverged = result.get("diverged_at") is not None or ("test_error" in result and result["test_error"] is None)
    error = number(result.get("test_error", result.get("validation_error")))
    if diverged and result.get("test_error", 0) is None:
        error = 1.0
    place = (path.parent.parent.name, *(str(settings.get(key, "")) for key in ("dataset", "epochs")))
    of = str(raw.get("evaluated_on") or "test set")
    seconds, rows = raw["seconds"], raw["curve"] if isinstance(raw["curve"], list) else []
    return Story(
        name=name.as_posix(),
        path=path,
        study=None if raw.get("study") is None else str(raw["study"]),
        place=(*place, of),
        variant=str(run.get("variant") or run.get("method") or "run"),
        setting=_setting(run),
        seed=whole(run.get("seed")),
        fold=whole(run.get("fold")),
        finished=True,
        diverged=diverged,
        error=error,
        loss=number(result.get("test_loss", result.get("validation_loss"))),
        error_of=of,
        shares=shares(result, settings),
        kept=kept(result, settings),
        updates=whole(result.get("updates")),
        seconds=number(seconds.get("per_run") if isinstance(seconds, Mapping) else seconds),
        curve=[named_row(row, COLUMNS) for row in rows if isinstance(row, Mapping)],
        settings=settings,
        versions=mapping(raw["versions"]),
        hardware=mapping(raw["hardware"]),
        command=str(raw.get("command") or ""),
        commit=str(raw.get("commit") or ""),
        ended=str(raw.get("finished") or ""),
        raw=raw,
    )


def _setting(run: Mapping[str, Any]) -> Setting | None:
    for kind in SETTINGS:
        value = number(run.get(kind))
        if value is not None:
            return Setting("rate" if kind == "dropout" else kind, whole_power(value) if kind == "penalty" else value)
    return None
