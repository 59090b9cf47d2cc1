"""What runs leave on disk, read the same by whoever asks: run files of studies, the JSON files of run directories.

The run files of a study may be packed into one, ``runs.jsonl``: plain JSON lines, what runs share written once, a
checksum. Its first line is ``{"schema": "espalier.runs/1", "files": n, "sha256": of all that follows}``. After it come,
for each file, ``{"file": "section/variant/name.jsonl"}`` and a line for each record in it: ``[t, v0, v1, ...]``, the
values that fill template t. A template, ``{"template": t, "of": record}``, stands before its first use: a record in
which ``{"?": i}`` stands for the value i.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier import files, schema
from espalier.schema import Spec, anything, each, flag, integer, maybe, number, record, table, text
from espalier.space import Corrupt

FORMAT = 2  # of run files; 1: without a checksum
DIRECTORY_FORMAT = 1
SETTINGS, METRICS, RESULT = "settings.json", "metrics.jsonl", "result.json"
PACKED, PACKED_SCHEMA, HOLE = "runs.jsonl", "espalier.runs/1", "?"
VALUES = 1 << 22  # of all packed records together: a template may stand for many
COUNTED = {"units": "units", "weights": "weights", "macs": "MACs", "parameters": "parameters"}  # and in words
REMOVE = "Remove it and run the study again, or take it out of the folder"
AGAIN = "Run the same training again: it goes on from its checkpoint and writes its files anew"

_NAMED, _MAYBE, _COUNT = table(anything), maybe(number()), integer(0)


def _all(names: str, spec: Spec) -> dict[str, Spec]:
    return dict.fromkeys(names.split(), spec)


_COUNTS = each(_COUNT, most=1 << 16)
_PAIRS = table(each(_COUNT, 2, 2))
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
            "kept": _PAIRS,
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
    **_all("runs_in_batch lines", _COUNT),
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
        "sizes": table(each(_COUNT, 2, 2), keys="|".join(COUNTED)),
        "kept": _PAIRS,
        "updates": integer(0),
        "latency": maybe(_LATENCY),
        "latencies": each(_LATENCY),
        **_all("inputs judged_on stopped", text()),
        **dict.fromkeys((*_SCORES, "seconds", "penalty", "target", "weight_share", "unit_share", "cost_share"), _MAYBE),
    },
)
_PACKED = record({"schema": text(re.escape(PACKED_SCHEMA)), "files": _COUNT, "sha256": text("[0-9a-f]{64}")})


def runs_of(path: Path, parts: list[Any] | None = None) -> list[dict[str, Any]]:
    """A record for each run of a run file. In a ``.jsonl`` the first line is what its runs share.

    parts: its records as they were read from a file of many; None reads the file itself."""
    many = path.suffix == ".jsonl"
    head = record({**_SHARED, "runs_in_batch": integer(0)} if many else {**_OWN, **_SHARED}, _MORE)
    if many or parts is not None:
        lines = schema.read_lines(path, head, record(_OWN), newest=FORMAT, values=parts, way_out=REMOVE)
    else:
        lines = [schema.read(path, head, newest=FORMAT, way_out=REMOVE)]
    if not many:
        return lines
    shared, *runs = lines
    if (count := shared.get("lines", shared["runs_in_batch"])) != len(runs) or not runs:
        raise Corrupt(f"{path} is not whole: {len(runs)} of {count} runs. {REMOVE}")
    return [shared | own for own in runs]


def settings_of(folder: Path) -> dict[str, Any]:
    """What the ``settings.json`` of a run directory says; :class:`Corrupt` where it is damaged."""
    files.check(folder, SETTINGS, AGAIN)
    return schema.read(folder / SETTINGS, _HEAD, way_out=AGAIN)  # type: ignore[no-any-return]


def result_of(folder: Path) -> dict[str, Any]:
    """What its ``result.json`` says; :class:`Corrupt` where it is damaged."""
    files.check(folder, RESULT, AGAIN)
    return schema.read(folder / RESULT, _RESULT, way_out=AGAIN)  # type: ignore[no-any-return]


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


# ---- packed run files ------------------------------------------------------------------------------------------------


def unpack(folder: Path) -> list[Path]:
    """The files under ``folder/runs`` again, those that are not there; their content is the same, spaces may differ."""
    written = list[Path]()
    for name, parts in packed(folder / PACKED).items():
        path = files.below(folder, (folder / "runs" / name).parent) / Path(name).name
        if not path.exists():
            text = "".join(f"{as_line(part)}\n" for part in parts)
            if parts[0].get("format", 1) > 1:
                text = schema.sealed(parts[0], parts[1:], separators=(",", ":"))
            written.append(files.write(path, text))
    return written


def packed(path: Path) -> dict[str, list[Any]]:
    """The records of each file; refused where a line is not of the schema, or a byte is not what was written."""
    try:
        head, _, body = schema.content(path).partition(b"\n")
        about = schema.parse(head, _PACKED)
        if hashlib.sha256(body).hexdigest() != about["sha256"]:
            raise ValueError("its checksum is of another content")
        content, templates, values = dict[str, list[Any]](), list[tuple[Any, int]](), 0
        for line in (schema.parse(line) for line in body.splitlines()):
            if isinstance(line, list):
                template, size = templates[line[0]]
                values += size
                if values > VALUES:
                    raise ValueError(f"its runs are of more than {VALUES} values")
                content[next(reversed(content))].append(_record(template, line[1:]))
            elif line.keys() == {"template", "of"} and line["template"] == len(templates):
                templates.append((line["of"], _count(line["of"])))
            else:
                content[_inside(line["file"])] = []
        if len(content) != about["files"]:
            raise ValueError(f"it holds {len(content)} files, not {about['files']}")
    except (Corrupt, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise Corrupt(f"{path} is not a file of packed runs: {error}. Take it from a copy that is whole") from None
    return content


def _inside(name: str) -> str:
    """A name of three parts below ``runs``, and nothing that leads elsewhere."""
    parts = name.split("/")
    if len(parts) != 3 or any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise ValueError(f"{name!r} is no name of a run file")
    return name


def as_line(value: Any) -> str:
    """A value as JSON in as few characters as there are."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _count(value: Any) -> int:
    """Of all values in it, containers too."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count, parts))


def _record(template: Any, values: Sequence[Any]) -> Any:
    if isinstance(template, dict):
        if template.keys() == {HOLE}:
            return values[template[HOLE]]
        return {key: _record(part, values) for key, part in template.items()}
    return [_record(part, values) for part in template] if isinstance(template, list) else template
