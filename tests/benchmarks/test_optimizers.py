"""The benchmark of optimisers: a run, its score against scikit-learn's, and the table of the page from its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("sklearn")
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import log_loss, mean_absolute_error, mean_squared_error

import optimizers

ROOT = Path(__file__).resolve().parents[2]


def test_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "UPDATES", 60)
    line = optimizers.run("diabetes", "AdamW 0.01", 0)
    assert 0.3 < line["score"] < 1.2
    assert line["updates"] == 60
    lost = optimizers.run("diabetes_raw", "SGD 0.1", 0)["score"]
    assert lost is None or lost > 1e6  # it diverges


def test_a_constant_guess_is_that_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    known, held = torch.randn(99, 1, generator=draw), torch.randn(40, 1, generator=draw)
    for loss, strategy, theirs in [
        (F.mse_loss, "mean", mean_squared_error),
        (F.l1_loss, "median", mean_absolute_error),
    ]:
        guess = DummyRegressor(strategy=strategy).fit(known, known).predict(held)
        assert optimizers.constant(loss, known, held) == pytest.approx(theirs(held, guess), rel=1e-5)
    yes, no = (known > 0.3).float(), (held > 0.3).float()
    share = DummyClassifier(strategy="prior").fit(yes, yes[:, 0]).predict_proba(no)
    ours = optimizers.constant(F.binary_cross_entropy_with_logits, yes, no)
    assert ours == pytest.approx(log_loss(no[:, 0], share), rel=1e-5)


def test_the_table_of_the_page_is_that_of_the_file() -> None:
    lines = [json.loads(line) for line in (ROOT / "results/recipe/optimizers.jsonl").read_text().splitlines()]
    page = (ROOT / "docs" / "recipe.md").read_text()
    begin, end = optimizers.MARKS
    assert page.split(begin)[1].split(end)[0].strip() == optimizers.table(lines).strip()
    scores = [line["score"] for line in lines if (line["task"], line["optimizer"]) == ("lstm", "AdamW 0.01")]
    assert f"{np.mean(scores):.3f}" in page
