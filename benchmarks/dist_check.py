"""The wheel with the extra ``all``, from nothing: a new environment, an install under constraints.txt, demo, examples.

    python benchmarks/dist_check.py dist [--log FILE] [--pythons python3.12,python3.13]

The wheel's dependencies are resolved for Python 3.11 to 3.13; no extra may bring a package of CUDA. This interpreter,
and those that are named and found, go through all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("cnn_to_onnx", "lstm", "own_loop", "sweep_and_report", "features", "placed_gates")
VERSIONS = ("3.11", "3.12", "3.13")
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(*words: object, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=cwd, env=CLEAN)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def resolved(requirement: str, version: str) -> list[str]:
    """Which packages pip would install for another Python, all of them as built packages."""
    report = run(
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
        "--python-version", version, "--only-binary", ":all:", "--target", "nowhere", "-c", ROOT / "constraints.txt",
        requirement,
    )  # fmt: skip
    items = json.loads(report[report.index("{") :])["install"]
    return [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items]


def of_cuda(names: Sequence[str]) -> set[str]:
    return {name for name in names if re.match(r"nvidia|cuda|triton", name, re.IGNORECASE) or "+cu" in name}


def dependencies(wheel: Path, version: str) -> str:
    """In one line: no extra of ours may bring a package of CUDA that torch itself does not bring."""
    names = resolved(f"{wheel}[all]", version)
    torch = next(name for name in names if name.startswith("torch=="))
    brought = of_cuda(names) - of_cuda(resolved("torch", version))
    if brought:
        raise SystemExit(f"packages of CUDA that torch does not need, for Python {version}: {sorted(brought)}")
    return f"Python {version}: {len(names)} packages, none of CUDA but those of {torch} ({len(of_cuda(names))})"


def tried(wheel: Path, python: str, folder: Path) -> list[str]:
    """A new environment of one interpreter, and what it did."""
    run(python, "-m", "venv", folder / "env")
    inside = folder / "env" / "bin"
    run(inside / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[all]")
    names = run(inside / "python", "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check").split()
    lines = [f"installed with [all]: {len(names)} packages, of CUDA: {', '.join(sorted(of_cuda(names))) or 'none'}"]
    lines += sorted(names, key=str.lower)
    lines += ["", f"$ espalier --version\n{run(inside / 'espalier', '--version').strip()}"]
    lines.append("\n$ espalier demo --epochs 20 --seeds 2")
    said = run(inside / "espalier", "demo", "--epochs", 20, "--seeds", 2, "--quiet", cwd=folder)
    lines.append(said.strip())
    for name in EXAMPLES:
        said = run(inside / "python", ROOT / "examples" / f"{name}.py", cwd=folder)
        lines.append(f"\n$ python examples/{name}.py\n{said.strip()}")
    return [line.replace(f"{folder}/", "") for line in lines]


def found(python: str) -> bool:
    """Whether there is such an interpreter, and it starts: a shim may stand for one that is not there."""
    return (
        shutil.which(python) is not None and not subprocess.run([python, "--version"], capture_output=True).returncode
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--pythons", default="python3.12,python3.13")
    given = parser.parse_args()
    (wheel,) = (path.resolve() for path in given.dist.glob("*.whl"))
    lines = [
        f"{wheel.name}, {platform.system()} {platform.machine()}",
        "",
        "Dependencies of [all] under constraints.txt:",
    ]
    lines += [dependencies(wheel, version) for version in VERSIONS]
    others = [python for python in given.pythons.split(",") if found(python)]
    for python in (sys.executable, *others):
        version = run(python, "-c", "import platform; print(platform.python_version())").strip()
        with tempfile.TemporaryDirectory() as folder:
            lines += ["", f"Python {version}", *tried(wheel, python, Path(folder))]
    missing = sorted(set(given.pythons.split(",")) - set(others))
    lines += ["", f"not tried, for there is no such interpreter here: {', '.join(missing)}"] if missing else []
    print("\n".join(lines))
    if given.log:
        given.log.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
