"""The records of a grid study: a JSON-lines file for each batch, what its runs share first, then a line for each run.

A grid has thousands of short runs; a file for each would be mostly repetition of settings and hardware.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.space import Corrupt
from espalier.study.record import refuse_others
from espalier.study.settings import GridRun
from espalier.train.checkpoint import write

FORMAT = 1

Key = tuple[Any, ...]


def name(runs: Sequence[GridRun]) -> str:
    """Of the file of a batch: fold, settings and seeds.

    >>> name([GridRun("search", 3, 0, target=0.25), GridRun("search", 4, 0, target=0.5)])
    'fold_0-target_0.25_to_0.5-seed_3_to_4'
    """
    parts = [] if runs[0].fold is None else [f"fold_{runs[0].fold}"]
    for label in ("target", "penalty", "seed"):
        values = [getattr(run, label) for run in runs if getattr(run, label) is not None]
        if values:
            ends = dict.fromkeys((min(values), max(values)))
            parts.append(f"{label}_" + "_to_".join(map(str, ends)))
    return "-".join(parts)


def save(path: Path, head: Mapping[str, Any], stories: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all. What is not a finite number is written as null: JSON has no word for it."""
    lines = [{"format": FORMAT} | dict(head), *stories]
    text = "".join(json.dumps(_clean(line), allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    write(path, text.encode())


def read(folder: Path, settings: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """The finished runs in a folder by their key; a file of other settings is refused."""
    found = dict[Key, dict[str, Any]]()
    for path in sorted(folder.glob("*.jsonl")):
        head, *stories = lines(path)
        refuse_others(path, "runs", head["settings"], settings)
        for story in stories:
            run = story["run"]
            found[run["method"], run.get("fold"), run.get("target"), run.get("penalty"), run["seed"]] = story
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """The head and the stories of a file, checked to be one of ours."""
    try:
        read = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a file of runs: {error}. Remove it to run them again") from None
    whole = all(isinstance(line, dict) for line in read) and bool(read) and read[0].get("format") == FORMAT
    if not whole or read[0].get("runs_in_batch") != len(read) - 1:
        raise Corrupt(f"{path} is not a whole file of runs of format {FORMAT}. Remove it to run them again")
    return read


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
