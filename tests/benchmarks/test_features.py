"""The comparison of feature selectors: its data, its rivals, and the table of the docs."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
from features import METHODS, TASKS, ahead, best, judged, line, lines_of, main, table

ROOT = Path(__file__).parents[2]
LINES = ROOT / "results" / "sklearn" / "features.jsonl"


def test_the_table_of_the_docs_is_that_of_the_lines(tmp_path):
    page = ROOT / "docs" / "sklearn.md"
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text())
    main(["--out", str(LINES), "--into", str(copy)])
    assert copy.read_text() == page.read_text()


def test_every_line_chose_as_many_features_as_its_task_asks_for():
    lines = lines_of(LINES)
    assert {one["task"] for one in lines} == set(TASKS)
    for one in lines:
        assert len(one["chosen"]) == one["k"] == TASKS[one["task"]][1]
    seeds = {(one["task"], one["seed"]) for one in lines if one["method"] == "ours"}
    assert len(seeds) == 5 * len(TASKS)
    assert len({(one["task"], one["method"], one["seed"]) for one in lines}) == len(lines)


def test_ours_takes_less_than_half_a_minute_on_madelons_form():
    own = [one for one in lines_of(LINES) if one["task"] == "madelon" and one["method"] == "ours"]
    assert all(one["seconds"] < 30 for one in own)


def test_what_is_informative_is_known_after_the_columns_are_shuffled():
    train, test, targets, answers, informative = TASKS["friedman"][0](0)
    assert (len(train), len(test), informative.sum()) == (500, 500, 5)
    rows = (train, test, targets, answers, informative)
    other = np.roll(informative, 50)
    assert judged(rows, informative, True) > judged(rows, other & ~informative, True) + 0.3


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ours", "lassonet"}))
@pytest.mark.parametrize("task", ["wine", "diabetes"])
def test_rivals_choose_as_many_features(method, task):
    made = line(task, method, 0)
    assert len(made["chosen"]) == 4
    assert made["score"] > (0.1 if task == "diabetes" else 0.85)


def test_differences_are_over_equal_seeds():
    own, rival = ({seed: {"score": score} for seed, score in enumerate(values)} for values in ((0.9, 0.8, 0.7), (0.8,)))
    assert ahead(own, rival, 100, ".1f") == "+10.0 (n = 1)"
    assert ahead(own, own, 100, ".1f") == "+0.0 [+0.0, +0.0]"
    assert ahead(own, {}, 100, ".1f") == ""
    assert best(np.array([0.1, 0.5, 0.3]), 2).tolist() == [False, True, True]
    assert "madelon" not in table([one for one in lines_of(LINES) if one["task"] == "wine"])
