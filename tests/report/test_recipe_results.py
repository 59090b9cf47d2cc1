"""The committed tables of the recipe say what the committed runs say, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from espalier.report import recipe

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "results" / "recipe").glob("*/runs"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_are_made_of_the_runs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    page = tmp_path / "page.md"
    shutil.copyfile(ROOT / "docs" / "recipe.md", page)
    for made in recipe.write(tmp_path, page):
        if made != page:
            assert made.read_text() == (folder / made.relative_to(tmp_path)).read_text(), made.name
    assert page.read_text() == (ROOT / "docs" / "recipe.md").read_text()


def test_there_is_something_to_compare() -> None:
    assert "digits" in [folder.name for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_pair_is_complete_and_no_run_exceeds_its_target(folder: Path) -> None:
    for section in recipe.read(folder):
        for target in section.targets:
            ours = section.of("search", target)
            assert all(run.result("reached_after") <= target * (1 + 1e-6) for run in ours.values())
            for rival in recipe.RIVALS:
                theirs = section.of(rival, target)
                assert not theirs or theirs.keys() == ours.keys()
            for pairing, found in section.of("found", target).items():
                assert found.result("units") == ours[pairing].result("units")
