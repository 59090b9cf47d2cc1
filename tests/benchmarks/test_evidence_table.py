"""The tables of the evidence: their numbers, computed a second time by other means."""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import evidence_picture
from evidence_table import MARKS, compared, interval, main, overview, quantile, tables
from results import OVERVIEW

stats = pytest.importorskip("scipy.stats")
BASE = {
    "data": "cifar10", "network": "vgg16", "narrow": 1, "cost": "weights", "target": 0.1, "epochs": 20, "batch": 128,
    "examples": None, "lr": 0.05, "weight_decay": 5e-4, "schedule": "linear", "held_out": 0, "seconds": 60.0,
    "device": "a GPU",
}  # fmt: skip


def lines():
    rng = np.random.default_rng(0)
    return [
        BASE | {"method": method, "seed": seed, "error": error, "shares": {"weights": 0.1, "macs": macs}}
        for method, macs, level, seeds in (("uniform", 0.11, 0.13, 4), ("ours", 0.4, 0.11, 5), ("dense", 1.0, 0.07, 1))
        for seed, error in enumerate(level + 0.003 * rng.normal(size=seeds))
    ]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 31])
def test_quantiles_are_those_of_student(freedom):
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_differences_and_intervals_are_those_of_a_paired_test():
    ours, rival = np.array([0.11, 0.12, 0.115, 0.118]), np.array([0.13, 0.129, 0.131, 0.125])
    expected = stats.ttest_rel(ours, rival).confidence_interval()
    assert interval(list(ours - rival)) == pytest.approx(((ours - rival).mean(), expected.low, expected.high))
    both = compared(dict(enumerate(ours)), {9: 0.5, **dict(enumerate(rival))})
    low, high = 100 * expected.low, 100 * expected.high
    assert both == f"**{100 * (ours - rival).mean():+.2f} [{low:+.2f}, {high:+.2f}] (lower in 4 of 4)**"
    behind = compared({0: 0.1, 1: 0.1, 2: 0.1}, {0: 0.09, 1: 0.1, 2: 0.9})  # an equal seed is not ahead
    assert behind.endswith("(lower in 1 of 3)")
    assert compared({0: 0.1}, {1: 0.2}) == ""
    assert compared({0: 0.1}, {0: 0.2}) == "-10.00 (n = 1)"


def test_six_pairs_of_one_sign_are_shown_whatever_one_of_them_does_to_the_interval():
    ours, failed = dict.fromkeys(range(6), 0.17), dict(enumerate([0.25, 0.28, 0.24, 0.9, 0.3, 0.28]))
    assert stats.binomtest(6, 6).pvalue < 0.05 < stats.binomtest(5, 5).pvalue
    assert interval([ours[s] - failed[s] for s in ours])[2] > 0
    assert compared(ours, failed).startswith("**")
    assert compared(failed, ours).startswith("**")
    assert not compared({s: ours[s] for s in range(5)}, failed).startswith("**")
    assert not compared(ours | {0: 0.26}, failed).startswith("**")


def test_seconds_are_of_the_device_that_most_runs_had():
    given = [line for line in lines() if line["method"] == "ours"]
    slow = given[0] | {"seed": 9, "device": "a CPU", "seconds": 2800.0}
    assert next(row for row in tables([*given, slow]).splitlines() if row.startswith("| ours")).endswith("| 60 |  |")


def test_a_table_has_a_row_for_each_method_and_goes_between_marks(tmp_path):
    rows = [row.split(" | ") for row in tables(lines()).splitlines() if row.startswith("| ")]
    assert [row[0] for row in rows] == ["| method", "| ours", "| uniform", "| dense"]
    errors = {m: [100 * line["error"] for line in lines() if line["method"] == m] for m in ("ours", "uniform")}
    for row, (method, macs) in zip(rows[1:], [("ours", "40.0"), ("uniform", "11.0")]):
        own = errors[method]
        assert row[1:5] == [f"{np.mean(own):.2f} ± {np.std(own, ddof=1):.2f}", str(len(own)), "10.0", macs]
    test = stats.ttest_rel(errors["ours"][:4], errors["uniform"])
    ends = test.confidence_interval()
    middle = np.mean(errors["ours"][:4]) - np.mean(errors["uniform"])
    assert f"{middle:+.2f} [{ends.low:+.2f}, {ends.high:+.2f}] (lower in " in rows[2][-1]
    file, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    page.write_text("before\n" + "\n".join(MARKS) + "\nafter\n")
    main([str(file), "--into", str(page), "--methods", "uniform,ours"])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| uniform |" in text
    assert "| dense |" not in text


def test_ours_at_the_size_of_a_rival_is_compared_with_that_rival():
    rivals = [line | {"method": "oto"} for line in lines() if line["method"] == "uniform"]
    small = [line | {"method": "ours-oto", "error": line["error"] - 0.01} for line in rivals]
    rows = {row.split(" | ")[0]: row for row in tables([*lines(), *rivals, *small]).splitlines()}
    assert "it minus oto: **-1.00 [-1.00, -1.00] (lower in 4 of 4)**" in rows["| ours-oto"]
    assert rows["| oto"].split(" | ")[-1] == rows["| uniform"].split(" | ")[-1]


@pytest.mark.parametrize(
    ("page", "file", "flags"),
    [
        ("docs/evidence.md", "cifar10.jsonl", []),
        ("docs/recipe.md", "tuning.jsonl", ["--overview"]),
        ("docs/evidence.md", "pruning.jsonl", ["--overview"]),
        ("docs/evidence.md", "peers.jsonl", ["--part", "peers"]),
        ("docs/recipe.md", "finetune.jsonl", ["--overview", "--part", "finetune"]),
        ("README.md", "cifar10.jsonl", ["--overview", "--across", "--methods", OVERVIEW]),
    ],
)
def test_the_tables_of_the_docs_are_those_of_the_lines(tmp_path, page, file, flags):
    root = Path(__file__).parents[2]
    copy = tmp_path / "page.md"
    copy.write_text((root / page).read_text())
    main([str(root / "results" / "evidence" / file), *flags, "--into", str(copy)])
    assert copy.read_text() == (root / page).read_text()


def test_an_overview_has_the_means_of_its_lines():
    table = overview([*lines(), *(line | {"cost": "macs", "label": "other"} for line in lines()[:2])])
    rows = dict(
        row.strip("| ").split(" | ", 1) for row in table.splitlines() if row.startswith("| ") and "of" not in row
    )
    ours = [100 * line["error"] for line in lines() if line["method"] == "ours"]
    assert rows["ours"].split(" | ")[-1].strip() == f"{np.mean(ours):.2f}"
    assert rows["other"].startswith(f"{100 * np.mean([line['error'] for line in lines()[:2]]):.2f}")
    assert "up to 5 runs" in table


def test_an_overview_across_is_the_same_table_turned_and_says_how_far_ahead_the_first_is():
    def rows(text):
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row[:1] == "|"]

    more = [*lines(), *(line | {"cost": "macs", "error": line["error"] + 0.01} for line in lines())]
    upright, turned = rows(overview(more)), rows(overview(more, across=True))
    del upright[1], turned[1]  # the rule below the head
    assert turned == [list(column) for column in zip(*upright)]
    gaps = {name: [float(cell) for cell in cells] for name, *cells in upright[1:]}
    first, *others = gaps
    said = overview(more, across=True).splitlines()[-1]
    for name in others:
        points = np.subtract(gaps[name], gaps[first])
        assert f"of {name} by {points.min():.1f} to {points.max():.1f}" in said


def test_what_has_few_runs_is_shown_only_where_nothing_has_more():
    """A cell, or a network, of one run of each method stands beside none of three and more."""
    several = [line | {"held_out": 0} for line in lines() if line["method"] != "dense"]
    few = [line | {"network": "resnet20", "target": 0.25} for line in several if line["seed"] == 0]
    lacking = [line | {"target": 0.5} for line in several if line["method"] == "ours" or line["seed"] < 2]
    assert overview([*several, *few, *lacking], across=True) == overview(several, across=True)
    assert "ResNet-20, 25% of weights" in overview(few, across=True)
    titles = [
        [axes.get_title("left") for part in evidence_picture.picture(given).subfigs for axes in part.axes]
        for given in ([*several, *few], few)
    ]
    assert titles == [["VGG-16"], ["ResNet-20"]]


def test_the_picture_shows_the_means_of_the_lines(tmp_path):
    figure = evidence_picture.picture([line | {"held_out": 0} for line in lines()])
    (axes,) = figure.subfigs[0].axes
    drawn = {str(bar.get_label()): bar.lines[0].get_ydata() for bar in axes.containers}
    for method, name in (("ours", "Espalier"), ("uniform", "narrower, from scratch")):
        errors = [100 * line["error"] for line in lines() if line["method"] == method]
        assert drawn[name] == pytest.approx([np.mean(errors)])
    assert axes.lines[-1].get_label() == "the whole network"


def test_the_picture_of_the_readme_is_that_of_the_lines(tmp_path):
    root = Path(__file__).parents[2]
    kept = (root / "docs" / "pictures" / "evidence.svg").read_text()
    evidence_picture.main([str(root / "results/evidence/cifar10.jsonl"), "--out", str(tmp_path / "new.svg")])
    if f"v{matplotlib.__version__}," in kept:
        assert (tmp_path / "new.svg").read_text() == kept
