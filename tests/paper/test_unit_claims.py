"""Verdicts on run files whose outcome is known: what holds, what does not, and what cannot be told."""

from __future__ import annotations

import pytest
from synthetic import TABLE, as_the_paper_says, write

from espalier.paper.claims import interpolated, on_units
from espalier.report import read


def judged(folder):
    (section,) = read(folder).sections
    return {v.claim: v for v in on_units(section)}


def test_where_everything_is_as_the_paper_says_everything_is_confirmed(tmp_path):
    as_the_paper_says(tmp_path)
    verdicts = judged(tmp_path)
    assert {claim: v.verdict for claim, v in verdicts.items()} == dict.fromkeys(verdicts, "confirmed")
    assert list(verdicts) == ["C1", "C2", "C3", "C4", "C5", "C9", "C10"]
    assert {claim: v.n for claim, v in verdicts.items()} == {
        "C1": 35, "C2": 30 + 30, "C3": 15, "C4": 25, "C5": 10, "C9": 70, "C10": 35,
    }  # fmt: skip


def test_where_everything_is_the_other_way_round_claims_are_refuted(tmp_path):
    for i, units in enumerate(reversed(TABLE.values())):
        penalty = list(TABLE)[i]  # sizes grow with the penalty, and layers the other way
        for seed in range(5):
            kept = [max(u - seed, 0) for u in reversed(units)]
            write(tmp_path, "search", penalty, seed, error=0.03 + 1e-5 * seed, units=kept, seconds=1200)
    for size in (0.066, 0.5, 1.0):
        for seed in range(5):
            write(tmp_path, "fixed", size, seed, error=0.01 + 1e-5 * seed, units=[round(784 * size)] * 3)
    for seed in range(5):
        write(tmp_path, "dropout", 0.5, seed, error=0.02 + 1e-5 * seed)
    verdicts = judged(tmp_path)
    verdict = {claim: v.verdict for claim, v in verdicts.items()}
    assert verdict == dict.fromkeys(("C1", "C2", "C3", "C4", "C5", "C9"), "refuted") | {"C10": "confirmed"}


def test_equal_errors_decide_nothing(tmp_path):
    for penalty, units in TABLE.items():
        for seed in range(5):
            write(tmp_path, "search", penalty, seed, error=0.015 + 1e-4 * seed, units=units)
    for size in (0.25, 1.0):
        for seed in range(5):
            write(tmp_path, "fixed", size, seed, error=0.015 + 1e-4 * seed, units=[round(784 * size)] * 3)
    for seed in range(5):
        write(tmp_path, "dropout", 0.5, seed, error=0.015 + 1e-4 * seed)
    verdicts = judged(tmp_path)
    assert [verdicts[c].verdict for c in ("C2", "C3", "C5")] == ["undecided"] * 3
    assert "better in 0 of" in verdicts["C2"].evidence


def test_three_trials_are_too_few_for_a_rank_test_of_several_settings(tmp_path):
    as_the_paper_says(tmp_path, trials=3)
    assert judged(tmp_path)["C2"].verdict == "undecided"


def test_what_is_missing_is_said(tmp_path):
    write(tmp_path, "search", 2**-7, 0, error=0.02, units=(340, 141, 126))
    verdicts = judged(tmp_path)
    for claim in ("C1", "C2", "C3", "C4", "C5", "C9"):
        assert verdicts[claim].verdict == "undecided"
        assert verdicts[claim].evidence.startswith("not enough runs")


def test_a_settled_run_is_another_variant_and_does_not_count(tmp_path):
    as_the_paper_says(tmp_path)
    before = {claim: (v.verdict, v.n) for claim, v in judged(tmp_path).items()}
    for seed in range(5):
        write(tmp_path, "search", 0.0, seed, error=0.9, units=(1, 1, 1), variant="search+settle_0.25")
    assert {claim: (v.verdict, v.n) for claim, v in judged(tmp_path).items()} == before


def test_times_on_two_machines_are_not_compared(tmp_path):
    as_the_paper_says(tmp_path)
    for path in tmp_path.glob("runs/*/fixed/*.json"):
        path.write_text(path.read_text().replace("an accelerator", "another"))
    for path in tmp_path.glob("runs/*/dropout/*.json"):
        path.write_text(path.read_text().replace("an accelerator", "another"))
    assert judged(tmp_path)["C9"].verdict == "undecided"


def test_fixed_networks_between_two_sizes_are_interpolated(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.01)):
        write(tmp_path, "fixed", 0.25, seed, error=0.04 + shift, units=[196] * 3)
        write(tmp_path, "fixed", 0.75, seed, error=0.02 + shift, units=[588] * 3)
    (section,) = read(tmp_path).sections
    assert interpolated(section, 0.5, "unit_share") == pytest.approx([0.03, 0.04])
    assert interpolated(section, 0.25, "unit_share") == pytest.approx([0.04, 0.05])
