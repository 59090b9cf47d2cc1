"""What is committed under results/: run files packed, and everything derived from them made anew.

    python benchmarks/results.py                     # tables, figures and generated parts of the docs, of everything
    python benchmarks/results.py --only mnist        # of the studies with this in their name
    python benchmarks/results.py --tables            # what `COMMANDS` below make, without the studies: seconds
    python benchmarks/results.py --pack FOLDER       # FOLDER/runs into FOLDER/runs.jsonl, and FOLDER/runs goes
    python benchmarks/results.py --unpack FOLDER     # FOLDER/runs again

Tracked are ``runs.jsonl`` (:mod:`espalier.records`), the README.md of each study, its SVG figures, and the tables
of the paper. PNG twins, CSV and tables of single runs are made by the first command and are not tracked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from espalier import files, paper, records, schema
from espalier.space import BadInput, Corrupt

ROOT = Path(__file__).resolve().parents[1]
# What else is made from results/, by its own command.
TABLE, EVIDENCE = "benchmarks/evidence_table.py", "results/evidence"
OVERVIEW = "ours,uniform,Torch-Pruning,control"
COMMANDS = (
    f"{TABLE} {EVIDENCE}/cifar10.jsonl --into docs/evidence.md",
    f"{TABLE} {EVIDENCE}/pruning.jsonl --overview --into docs/evidence.md",
    f"{TABLE} {EVIDENCE}/peers.jsonl --part peers --into docs/evidence.md",
    f"{TABLE} {EVIDENCE}/tuning.jsonl --overview --into docs/recipe.md",
    f"{TABLE} {EVIDENCE}/finetune.jsonl --overview --part finetune --into docs/recipe.md",
    f"{TABLE} {EVIDENCE}/cifar10.jsonl --overview --across --methods {OVERVIEW} --into README.md",
    f"benchmarks/evidence_picture.py {EVIDENCE}/cifar10.jsonl --out docs/pictures/evidence.svg",
    "benchmarks/signals_table.py results/signal/digits.json --into docs/signal.md --figure results/signal/digits.svg",
    "benchmarks/features.py --out results/sklearn/features.jsonl --into docs/sklearn.md",
    "benchmarks/language.py --out results/language/gpt.jsonl --into docs/evidence.md",
    "benchmarks/language.py --out results/language/tuning.jsonl --tune --into docs/evidence.md",
    "benchmarks/scale.py tables --into docs/scale.md",
    "benchmarks/optimizers.py --out results/recipe/optimizers.jsonl --into docs/recipe.md",
    "benchmarks/predictions.py --table docs/latency.md",
    "benchmarks/layout.py --table docs/performance.md",
    "benchmarks/ship.py --table docs/performance.md",
    "benchmarks/encoders.py --into docs/performance.md",
    "-m tests.zoo.table",
    "docs/pages.py",
)


def studies(root: Path = ROOT) -> list[Path]:
    """The folders of packed runs."""
    return sorted(path.parent for path in (root / "results").rglob(records.PACKED))


def page_of(folder: Path, root: Path = ROOT) -> Path | None:
    """The page with parts that are made from a study, if there is one."""
    if folder.parent.name == "recipe":
        return root / "results" / "recipe" / "notebook.md"
    return root / "docs" / "reproduction.md" if folder.name.endswith("-selection") else None


def pack(folder: Path) -> Path:
    """``folder/runs.jsonl`` from the files under ``folder/runs``, which are left alone."""
    paths = sorted(path for kind in ("json", "jsonl") for path in (folder / "runs").glob(f"*/*/*.{kind}"))
    if not paths:
        raise BadInput(f"{folder} has no run files (runs/*/*/*.json or .jsonl) to pack")
    content = {path.relative_to(folder / "runs").as_posix(): _documents(path) for path in paths}
    lines, count = list[str](), 0
    for variant in dict.fromkeys(name.rpartition("/")[0] for name in content):
        inside = {name: parts for name, parts in content.items() if name.rpartition("/")[0] == variant}
        flat = {name: [(_shape(part), _leaves(part)) for part in parts] for name, parts in inside.items()}
        shapes: dict[str, list[list[Any]]] = {}
        for shape, leaves in (pair for pairs in flat.values() for pair in pairs):
            shapes.setdefault(shape, []).append(leaves)
        templates = dict[str, tuple[int, list[int]]]()
        for shape, rows in shapes.items():
            varying = [i for i, column in enumerate(zip(*rows)) if len(set(map(records.as_line, column))) > 1]
            holes = {i: {records.HOLE: k} for k, i in enumerate(varying)}
            filled = iter([holes.get(i, leaf) for i, leaf in enumerate(rows[0])])
            of = _each(lambda _, filled=filled: next(filled), json.loads(shape))  # type: ignore[misc]
            lines.append(records.as_line({"template": count, "of": of}))
            templates[shape], count = (count, varying), count + 1
        for name, pairs in flat.items():
            lines.append(records.as_line({"file": name}))
            for shape, leaves in pairs:
                which, varying = templates[shape]
                lines.append(records.as_line([which, *(leaves[i] for i in varying)]))
    body = "".join(f"{line}\n" for line in lines)
    head = {"schema": records.PACKED_SCHEMA, "files": len(content), "sha256": hashlib.sha256(body.encode()).hexdigest()}
    path = files.write(folder / records.PACKED, f"{records.as_line(head)}\n{body}")
    if records.packed(path) != content:
        raise Corrupt(f"{path} does not hold what is in {folder / 'runs'}; keep the files there")
    return path


def _documents(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    first, *others = [json.loads(part) for part in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    first.pop(schema.CHECKSUM, None)  # of its own bytes; here one is of all of them
    return [first, *others]


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
    line = records.as_line(_each(lambda leaf: None, record))
    if f'"{records.HOLE}":' in line:
        raise BadInput(f"a record with a key {records.HOLE!r} cannot be packed")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of the studies with this in their name")
    parser.add_argument("--tables", action="store_true", help="without the studies")
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--unpack", type=Path)
    given = parser.parse_args()
    if given.pack:
        print(pack(given.pack))
        shutil.rmtree(given.pack / "runs")
        return
    if given.unpack:
        print(f"{len(records.unpack(given.unpack))} files in {given.unpack / 'runs'}")
        return
    for folder in () if given.tables else studies():
        if given.only in folder.as_posix():
            written, _ = paper.write(folder, page_of(folder), page=False)
            print(f"{folder.relative_to(ROOT)}: {len(written)} files")
    if not given.only:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        for command in COMMANDS:
            print(command, flush=True)
            subprocess.run(
                [sys.executable, *command.split()], cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": paths}
            )


if __name__ == "__main__":
    main()
