"""What runs leave on disk, read the same by whoever asks: run files of studies, the JSON files of run directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from espalier import files, schema
from espalier.schema import Spec, anything, each, flag, integer, maybe, number, record, table, text
from espalier.space.errors import Corrupt

FORMAT = 2  # of run files; 1: without a checksum
DIRECTORY_FORMAT = 1
SETTINGS, METRICS, RESULT = "settings.json", "metrics.jsonl", "result.json"
COUNTED = ("units", "weights", "macs", "parameters")
REMOVE = "Remove it and run the study again, or take it out of the folder"
AGAIN = "Run the same training again: it goes on from its checkpoint and writes its files anew"

_NAMED, _MAYBE = table(anything), maybe(number())
_OWN: dict[str, Spec] = {  # what each run of a study has for itself
    "run": _NAMED,
    "result": _NAMED,
    "curve": each(_NAMED),
}
_SHARED: dict[str, Spec] = {"settings": _NAMED, "seconds": anything, "hardware": _NAMED, "versions": _NAMED}
_MORE: dict[str, Spec] = {"data_sha256": text("[0-9a-f]{64}"), "forced": each(text())}
_HEAD = record(dict.fromkeys(("settings", "versions", "hardware"), _NAMED), {"command": text(), "dataset": text()})
_SCORES = [f"{part}_{kind}" for part in ("validation", "test") for kind in ("loss", "error", "examples")]
_RESULT = record(
    {"finished": flag},
    {
        "sizes": table(each(integer(0), 2, 2), keys="|".join(COUNTED)),
        "kept": table(each(integer(0), 2, 2)),
        "updates": integer(0),
        **dict.fromkeys(("inputs", "judged_on", "stopped"), text()),
        **dict.fromkeys((*_SCORES, "seconds", "penalty", "target", "weight_share", "unit_share", "cost_share"), _MAYBE),
    },
)


def runs_of(path: Path, parts: list[Any] | None = None) -> list[dict[str, Any]]:
    """The record of a run file; or of a ``.jsonl`` of many runs what they share, and then a record of each.

    parts: its records as they were read from a file of many; None reads the file itself."""
    many = path.suffix == ".jsonl"
    head = record({**_SHARED, "runs_in_batch": integer(0)} if many else {**_OWN, **_SHARED}, _MORE)
    if parts is not None:
        lines = schema.checked(path, parts, head, record(_OWN), newest=FORMAT, way_out=REMOVE)
    elif many:
        lines = schema.read_lines(path, head, record(_OWN), newest=FORMAT, way_out=REMOVE)
    else:
        lines = [schema.read(path, head, newest=FORMAT, way_out=REMOVE)]
    if many and lines[0]["runs_in_batch"] != len(lines) - 1:
        raise Corrupt(f"{path} is not whole: {len(lines) - 1} of {lines[0]['runs_in_batch']} runs. {REMOVE}")
    return lines


def settings_of(folder: Path) -> dict[str, Any]:
    """What the ``settings.json`` of a run directory says; :class:`Corrupt` where it is damaged."""
    files.check(folder, SETTINGS, AGAIN)
    return schema.read(folder / SETTINGS, _HEAD, way_out=AGAIN)  # type: ignore[no-any-return]


def result_of(folder: Path, name: str = RESULT) -> dict[str, Any]:
    """What its ``result.json`` says; :class:`Corrupt` where it is damaged."""
    files.check(folder, name, AGAIN)
    return schema.read(folder / name, _RESULT, way_out=AGAIN)  # type: ignore[no-any-return]


def metrics_of(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of its ``metrics.jsonl`` as far as they are whole, and what is wrong with the rest: a kill may have cut
    the last one off. :class:`Corrupt` where the run is complete and they are not those it wrote."""
    files.check(folder, METRICS, AGAIN)
    rows = list[dict[str, Any]]()
    for number_of_line, line in enumerate(schema.content(folder / METRICS).splitlines(), 1):
        try:
            rows.append(schema.parse(line, _NAMED))
        except schema.Mismatch:
            return rows, f"{METRICS} is cut off in line {number_of_line}; the rows before it are shown"
    return rows, ""


def check(path: Path) -> None:
    """A file of a run directory is a plain one, and the one that its manifest tells of; else :class:`Corrupt`."""
    if not path.is_file():
        raise Corrupt(f"{path} is not a file. {AGAIN}")
    files.check(path.parent, path.name, AGAIN)
