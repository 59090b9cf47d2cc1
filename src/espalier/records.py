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

_NAMED, _MAYBE, _COUNT = table(anything), maybe(number()), integer(0)


def _all(names: str, spec: Spec) -> dict[str, Spec]:
    return dict.fromkeys(names.split(), spec)


_COUNTS = each(_COUNT, most=1 << 16)
_BINS = {"theta_histogram": each(_COUNTS)}
_FOUND = {**_all("units connections dead_layers", _COUNTS), **_all("weight_share unit_share", _MAYBE)}
_FOUND |= {**_all("connection_share mac_share", _MAYBE), "block_depths": each(maybe(_COUNT)), "mask": text()}
_ROW = record({}, {"update": _COUNT, **_BINS, **_all("train_loss train_error test_loss test_error", _MAYBE), **_FOUND})
_OWN: dict[str, Spec] = {  # what each run of a study has for itself
    "run": record(
        {},
        {
            **_all("method variant", text()),
            **_all("seed fold", maybe(_COUNT)),
            **_all("target penalty size rate dropout", _MAYBE),
            "units": maybe(_COUNTS),
        },
    ),
    "result": record(
        {},
        {
            "updates": _COUNT,
            **_all("test_error test_loss validation_error validation_loss", _MAYBE),
            **_all("reached_before reached_after gap", _MAYBE),
            **_all("diverged_at skipped_updates", maybe(_COUNT)),
            "stochastic": record(_all("draws test_loss test_error", _MAYBE)),
            "drawn": table(_MAYBE),
            "canonical": record({}, {"depth": maybe(_COUNT), **_FOUND}),
            **_FOUND,
            **_BINS,
        },
    ),
    "curve": each(_ROW),
}
_SETTINGS = record(
    {},
    {
        **_all("dataset cost device precision signal network", text()),
        **_all("epochs batch_size", integer(1)),
        **_all("folds held_out points samples pad depth growth ramp_updates", _COUNT),
        **_all("learning_rate momentum weight_decay theta_rate theta_way theta_cap initial", _MAYBE),
        **_all("settle begin ramp even", _MAYBE),
        **_all("adaptive permuted", flag),
        "drops": maybe(each(number())),
        "widths": _COUNTS,
    },
)
_SHARED: dict[str, Spec] = {"settings": _SETTINGS, "seconds": anything, "hardware": _NAMED, "versions": _NAMED}
_MORE: dict[str, Spec] = {
    "data_sha256": text("[0-9a-f]{64}"),
    "forced": each(text()),
    "examples": table(_COUNT),
    "runs_in_batch": _COUNT,
    **_all("study evaluated_on commit command finished", text()),
}
_MACHINE = record({}, _all("system cpu gpu", text()))
_HEAD = record(
    {**_all("settings versions", _NAMED), "hardware": _MACHINE},
    {**_all("command dataset", text()), "forced": each(text())},
)
_LATENCY = record({"runtime": text(), "batch": integer(1), **_all("predicted measured full compared most", number(0))})
_SCORES = [f"{part}_{kind}" for part in ("validation", "test") for kind in ("loss", "error", "examples")]
_RESULT = record(
    {"finished": flag},
    {
        "sizes": table(each(integer(0), 2, 2), keys="|".join(COUNTED)),
        "kept": table(each(integer(0), 2, 2)),
        "updates": integer(0),
        "latency": maybe(_LATENCY),
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
