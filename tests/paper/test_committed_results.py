"""What is committed under results/ and in the docs says what the committed runs say, byte for byte."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import matplotlib
import pytest

from espalier import paper
from espalier.report import read
from espalier.report.grid_tables import RIVALS, by_pair, sections_of, targets

ROOT = Path(__file__).parents[2]
GRIDS = sorted(path.parent for path in (ROOT / "results" / "recipe").glob("*/runs.jsonl"))
STUDIES = sorted(path.parent for path in (ROOT / "results").glob("*-selection/runs.jsonl"))
DRAWN = {"mnist", "connection-selection", "unit-selection"}  # the others have the same figures, and more of them


@pytest.mark.parametrize("folder", [*GRIDS, *STUDIES], ids=lambda folder: folder.name)
def test_tables_figures_and_pages_are_made_of_the_runs(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    copy.mkdir()
    shutil.copyfile(folder / "runs.jsonl", copy / "runs.jsonl")
    docs = ROOT / "results" / "recipe" / "notebook.md" if folder in GRIDS else ROOT / "docs" / "reproduction.md"
    page = tmp_path / docs.name
    shutil.copyfile(docs, page)
    paths, _ = paper.write(copy, page, figures=folder.name in DRAWN, page=False)
    compared = set[str]()
    for path in paths:
        kept = folder / path.relative_to(copy) if path != page else docs
        if path.suffix == ".png" or not kept.exists():  # what `make results` makes is not all tracked
            continue
        text = kept.read_text(encoding="utf-8")
        if path.suffix != ".svg" or "Matplotlib v" not in text or f"v{matplotlib.__version__}," in text:
            assert path.read_text(encoding="utf-8") == text, path.name
            compared.add(path.suffix)
    assert ".md" in compared
    if folder.name in DRAWN:
        tracked = {path.relative_to(folder) for path in folder.rglob("*.svg")}
        assert tracked <= {path.relative_to(copy) for path in copy.rglob("*.svg")}


def test_what_is_tracked_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "results"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {path: path.stat().st_size for path in paths if path.exists()}
    assert 0 < len(sizes) <= 150
    assert sum(sizes.values()) <= 10_000_000
    assert not [path for path in sizes if path.suffix in (".png", ".csv")]


def test_there_is_something_to_compare() -> None:
    assert "digits" in [folder.name for folder in GRIDS]
    assert [folder.name for folder in STUDIES] == ["connection-selection", "unit-selection"]


@pytest.mark.parametrize("folder", GRIDS, ids=lambda folder: folder.name)
def test_every_pair_is_complete_and_no_run_exceeds_its_target(folder: Path) -> None:
    for section in sections_of(read(folder)):
        for target in targets(section):
            ours = by_pair(section.of("search", target))
            assert all(run.number("reached_after") <= target * (1 + 1e-6) for run in ours.values())
            for rival in RIVALS:
                theirs = by_pair(section.of(rival, target))
                assert not theirs or theirs.keys() == ours.keys()
            for pairing, run in by_pair(section.of("found", target)).items():
                assert run.result["units"] == ours[pairing].result["units"]
