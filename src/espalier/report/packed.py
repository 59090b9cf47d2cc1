"""The run files of a study packed into one, ``runs.jsonl``: plain JSON lines, what runs share written once, a checksum.

The first line is ``{"schema": "espalier.runs/1", "files": n, "sha256": of all that follows}``. After it come, for each
file, ``{"file": "section/variant/name.jsonl"}`` and a line for each record in it: ``[t, v0, v1, ...]``, the values that
fill template t. A template, ``{"template": t, "of": record}``, stands before its first use: a record in which
``{"?": i}`` stands for the value i. What all records of a variant have in common is so written once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from espalier import files, schema
from espalier.space import BadInput, Corrupt

NAME = "runs.jsonl"
SCHEMA = "espalier.runs/1"
HOLE = "?"
VALUES = 1 << 22  # of all records together: a template may stand for many
_HEAD = schema.record(
    {"schema": schema.text(re.escape(SCHEMA)), "files": schema.integer(0), "sha256": schema.text("[0-9a-f]{64}")}
)


def pack(folder: Path) -> Path:
    """``folder/runs.jsonl`` from the files under ``folder/runs``, which are left alone."""
    paths = sorted(path for kind in ("json", "jsonl") for path in (folder / "runs").glob(f"*/*/*.{kind}"))
    if not paths:
        raise BadInput(f"{folder} has no run files (runs/*/*/*.json or .jsonl) to pack")
    content = {path.relative_to(folder / "runs").as_posix(): _documents(path) for path in paths}
    lines, numbers = list[str](), 0
    variants = dict.fromkeys(name.rpartition("/")[0] for name in content)
    for variant in variants:
        inside = {name: records for name, records in content.items() if name.rpartition("/")[0] == variant}
        shapes: dict[str, list[list[Any]]] = {}
        for records in inside.values():
            for record in records:
                shapes.setdefault(_shape(record), []).append(_leaves(record))
        templates = dict[str, tuple[int, list[int]]]()
        for shape, rows in shapes.items():
            varying = [i for i, column in enumerate(zip(*rows)) if len(set(map(_line, column))) > 1]
            holes = {i: {HOLE: k} for k, i in enumerate(varying)}
            filled = iter([holes.get(i, leaf) for i, leaf in enumerate(rows[0])])
            of = _each(lambda _, filled=filled: next(filled), json.loads(shape))  # type: ignore[misc]
            lines.append(_line({"template": numbers, "of": of}))
            templates[shape], numbers = (numbers, varying), numbers + 1
        for name, records in inside.items():
            lines.append(_line({"file": name}))
            for record in records:
                number, varying = templates[_shape(record)]
                leaves = _leaves(record)
                lines.append(_line([number, *(leaves[i] for i in varying)]))
    body = "".join(f"{line}\n" for line in lines)
    head = {"schema": SCHEMA, "files": len(content), "sha256": hashlib.sha256(body.encode()).hexdigest()}
    path = files.write(folder / NAME, f"{_line(head)}\n{body}")
    if dict(read(path)) != content:
        raise Corrupt(f"{path} does not hold what is in {folder / 'runs'}; keep the files there")
    return path


def unpack(folder: Path) -> list[Path]:
    """The files under ``folder/runs`` again, those that are not there; their content is the same, spaces may differ."""
    written = list[Path]()
    for name, records in read(folder / NAME):
        path = files.below(folder, (folder / "runs" / name).parent) / Path(name).name
        if not path.exists():
            text = "".join(f"{_line(record)}\n" for record in records)
            if records[0].get("format", 1) > 1:
                text = schema.sealed(records[0], records[1:], separators=(",", ":"))
            written.append(files.write(path, text))
    return written


def read(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Name and records of each file; refused where a line is not of the schema, or a byte is not what was written."""
    try:
        head, _, body = schema.content(path).partition(b"\n")
        told = schema.parse(head, _HEAD)
        if hashlib.sha256(body).hexdigest() != told["sha256"]:
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
        if len(content) != told["files"]:
            raise ValueError(f"it holds {len(content)} files, not {told['files']}")
    except (Corrupt, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise Corrupt(f"{path} is not a file of packed runs: {error}. Take it from a copy that is whole") from None
    yield from content.items()


def _inside(name: str) -> str:
    """A name of three parts below ``runs``, and nothing that leads elsewhere."""
    parts = name.split("/")
    if len(parts) != 3 or any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise ValueError(f"{name!r} is no name of a run file")
    return name


def _documents(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    first, *others = [json.loads(part) for part in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    first.pop(schema.CHECKSUM, None)  # of its own bytes; here one is of all of them
    return [first, *others]


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """The same record with the function applied to every leaf: a number, a text, an empty list."""
    if isinstance(value, dict) and value:
        return {key: _each(function, part) for key, part in value.items()}
    return [_each(function, part) for part in value] if isinstance(value, list) and value else function(value)


def _leaves(value: Any) -> list[Any]:
    leaves = list[Any]()
    _each(leaves.append, value)
    return leaves


def _shape(record: Any) -> str:
    """The record with null for every leaf, as a line."""
    line = _line(_each(lambda leaf: None, record))
    if f'"{HOLE}":' in line:
        raise BadInput(f"a record with a key {HOLE!r} cannot be packed")
    return line


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
