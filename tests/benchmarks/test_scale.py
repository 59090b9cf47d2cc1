"""The scaling benchmark: its page is made from its results, and what it counts is what is sent."""

import json
from pathlib import Path

import pytest

import scale

ROOT = Path(__file__).resolve().parents[2]


def told(name):
    return json.loads((ROOT / "results" / "scale" / name).read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_results():
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    large = told("blocks.json")
    for table in (scale.ranks_table(told("gloo.json")), scale.overhead_table(large), scale.scale_table(large)):
        assert table in page


def test_no_update_sends_less_than_the_least_or_a_thousandth_more_where_nothing_is_normed():
    for row in told("gloo.json")["rows"]:
        assert row["bytes"] >= row["least"]
        if "MLP" in row["case"]:
            assert row["bytes"] <= 1.001 * row["least"]
    for row in told("blocks.json")["rows"]:
        assert row["least"] <= row["bytes"] <= 1.001 * row["least"]


def test_bytes_do_not_grow_with_the_ranks():
    rows = told("gloo.json")["rows"]
    for name in scale.CASES:
        assert len({row["bytes"] for row in rows if row["case"] == name}) == 1


def test_two_ranks_by_the_command_count_what_the_arithmetic_says(monkeypatch):
    monkeypatch.setattr(scale, "UPDATES", 1)
    row = scale.group(scale.CASES["MLP 784-784-784-784-10, data"], 2, weak=False)
    tensors, losses, gates = 8, 1, 3 * 784
    assert row["gates"] == gates
    assert row["bytes"] == 4 * (row["parameters"] + tensors + losses + gates)
    assert row["least"] == pytest.approx(row["bytes"] - 4 * tensors)
