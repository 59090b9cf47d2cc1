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
import os
import shutil
import subprocess
import sys
from pathlib import Path

from espalier import paper, records

ROOT = Path(__file__).resolve().parents[1]
# What else is made from results/, by its own command.
TABLE, EVIDENCE = "benchmarks/evidence_table.py", "results/evidence"
OVERVIEW = "ours,uniform,Torch-Pruning,control"
COMMANDS = (
    f"{TABLE} {EVIDENCE}/cifar10.jsonl --into docs/evidence.md",
    f"{TABLE} {EVIDENCE}/pruning.jsonl --overview --into docs/evidence.md",
    f"{TABLE} {EVIDENCE}/tuning.jsonl --overview --into docs/recipe.md",
    f"{TABLE} {EVIDENCE}/cifar10.jsonl --overview --across --methods {OVERVIEW} --into README.md",
    f"benchmarks/evidence_picture.py {EVIDENCE}/cifar10.jsonl --out docs/pictures/evidence.svg",
    "benchmarks/signals_table.py results/signal/digits.json --into docs/signal.md --figure results/signal/digits.svg",
    "benchmarks/features.py --out results/sklearn/features.jsonl --into docs/sklearn.md",
    "benchmarks/language.py --out results/language/gpt.jsonl --into docs/evidence.md",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of the studies with this in their name")
    parser.add_argument("--tables", action="store_true", help="without the studies")
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--unpack", type=Path)
    given = parser.parse_args()
    if given.pack:
        print(records.pack(given.pack))
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
