"""Training and reports give what they gave when tests/golden/ was made; ``make.py`` beside this file makes it anew.

Masks, theta and weights are compared bit for bit on the machine that the hashes are of; elsewhere (other vector
instructions round otherwise) the numbers of the records are compared with a tolerance. Tables are made from the kept
records, and are equal everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
assert spec is not None
assert spec.loader is not None
make = importlib.util.module_from_spec(spec)
sys.modules["golden_make"] = make
spec.loader.exec_module(make)
KEPT = json.loads((HERE / "hashes.json").read_text(encoding="utf-8"))
TOLERANCE = 0.01  # two images of the smallest test part


def differences(ours: Any, kept: Any, place: str = "") -> list[str]:
    """Where two records differ by more than rounding."""
    if isinstance(ours, dict) and isinstance(kept, dict) and ours.keys() == kept.keys():
        return [line for key in kept for line in differences(ours[key], kept[key], f"{place}/{key}")]
    if isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        return [line for i, pair in enumerate(zip(ours, kept)) for line in differences(*pair, f"{place}/{i}")]
    if isinstance(ours, float) and isinstance(kept, float):
        return (
            [] if math.isclose(ours, kept, rel_tol=TOLERANCE, abs_tol=TOLERANCE) else [f"{place}: {ours}, not {kept}"]
        )
    return [] if ours == kept else [f"{place}: {str(ours)[:80]}, not {str(kept)[:80]}"]


def masks(hashes: dict[str, dict[str, str]]) -> dict[str, str | None]:
    return {run: parts.get("mask") for run, parts in hashes.items()}


@pytest.mark.parametrize("case", list(make.CASES))
def test_training_gives_what_it_gave(case: str, tmp_path: Path) -> None:
    hashes = make.train(case, tmp_path)
    ours, kept = make.numbers(tmp_path), make.numbers(HERE / "runs" / case)
    if make.machine() == KEPT["machine"]:
        assert hashes == KEPT["hashes"][case]
        assert ours == kept
    else:
        assert masks(hashes) == masks(KEPT["hashes"][case])
        assert differences(ours, kept) == []


@pytest.mark.parametrize("case", list(make.CASES))
def test_tables_of_the_kept_runs_are_the_kept_tables(case: str, tmp_path: Path) -> None:
    make.report(HERE / "runs" / case, tmp_path)
    ours, kept = (
        {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.*")}
        for folder in (tmp_path, HERE / "reports" / case)
    )
    assert ours.keys() == kept.keys()
    for name, text in kept.items():
        assert ours[name] == text, name


def test_a_difference_beyond_rounding_is_named() -> None:
    kept = {"theta": [0.5, 0.25], "mask": "f0", "updates": 3}
    assert differences({"theta": [0.5 + 1e-6, 0.25], "mask": "f0", "updates": 3}, kept) == []
    assert differences({"theta": [0.6, 0.25], "mask": "f1", "updates": 3}, kept) == [
        "/theta/0: 0.6, not 0.5", "/mask: f1, not f0",
    ]  # fmt: skip
    assert differences({"theta": [0.5]}, kept)
