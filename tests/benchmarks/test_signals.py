"""The study of signals: its exact gradient by a second road, its measures by hand, its page from its file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import signals
from oracle.structures import raw_loss_direction
from signals_table import MARKS, everything, half, mean, read, text

ROOT = Path(__file__).parents[2]
FILE = ROOT / "results" / "signal" / "digits.json"


def test_the_page_says_what_the_file_says():
    page = (ROOT / "docs" / "signal.md").read_text(encoding="utf-8")
    begin, end = (page.index(mark) for mark in MARKS)
    assert page[begin + len(MARKS[0]) : end].strip() == text(FILE).strip()


def test_the_control_tells_nothing_and_the_exact_signals_are_unbiased():
    story, records = read(FILE)
    assert story["settings"]["updates"] >= 400
    for (theta, trained, signal, part), record in records.items():
        if signal == "permuted, all, masks too, own" and part == "apart" and theta != "mixed":
            assert abs(mean(record["single"])) < half(record["single"]), (theta, trained)
        if signal in ("raw", "varied"):
            assert mean(record["mean"]) > 0.97, (theta, trained, signal, part)


def network(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 64), (6,), (6, 6), (6,), (10, 6), (10,)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) / 3 for shape in shapes)


@pytest.fixture
def some_data():
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(7, 64, generator=generator, dtype=torch.float64)
    return x, torch.randint(10, (7,), generator=generator)


def test_the_exact_gradient_is_that_of_the_definition(some_data):
    """One mask at a time, the network written out."""
    x, y = some_data
    weights, theta = network(1), torch.tensor(signals.MIXED, dtype=torch.float64)

    def loss(mask):
        m = torch.from_numpy(mask)
        h = torch.relu(x @ weights[0].T + weights[1]) * m[:6]
        h = torch.relu(h @ weights[2].T + weights[3]) * m[6:]
        return torch.nn.functional.cross_entropy(h @ weights[4].T + weights[5], y).item()

    hidden = torch.relu(signals.layer(x, *weights[:2]))
    exact = signals.exact_gradient(weights, hidden, y, theta)
    np.testing.assert_allclose(exact, -raw_loss_direction([1] * 12, theta.numpy(), loss), rtol=0, atol=1e-12)


def test_signals_read_the_network_as_it_is(some_data):
    """Ranked by hand; the order of gates is kept; what is permuted stays in its layer."""
    x, y = some_data
    weights, theta = network(2), torch.full((12,), 0.7, dtype=torch.float64)
    hidden = torch.relu(signals.layer(x, *weights[:2]))
    steps = dict(signals.directions(weights, hidden, y, theta, runs=3, seed=4))
    assert all(step.shape == (signals.SPAN, 3, 12) for step in steps.values())
    signs = torch.unique((steps["ranked"] * 2).round(decimals=6))
    assert set(signs.tolist()) <= {-1.0, 0.0, 1.0}
    # The ranked step is the sign of the raw one, gate by gate.
    assert torch.equal(steps["ranked"].round(decimals=6).sign(), steps["raw"].sign())
    places = signals.shuffled(torch.zeros(signals.SPAN, 3, 2, 12), 2, torch.Generator().manual_seed(0))
    assert torch.equal(places.sort(-1).values, torch.arange(12).expand_as(places))
    assert bool((places[..., :6] < 6).all())


def test_measures_by_hand():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    same = signals.measured(2 * exact.expand(10, 4, 2), exact)
    assert same == pytest.approx(
        {"single": 1, "single_half": 0, "ten": 1, "mean": 1, "bias": 0, "noise": 0, "scale": 2}, abs=1e-7
    )
    steps = torch.zeros(2, 2, 2, dtype=torch.float64)  # two of four updates along the first axis, two stand still
    steps[:, 0, 0] = 1.0
    values = signals.measured(steps, exact)
    assert values["single"] == pytest.approx(0.3)
    square = 0.25 - (4 * 0.25 / 3) / 4
    assert values["mean"] == pytest.approx(1.5 / (square**0.5 * 5))


def test_a_small_study_is_written_and_can_be_tabled(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "THETAS", {"0.8": 0.8})
    monkeypatch.setattr(signals, "LENGTHS", (3,))
    out = tmp_path / "folder" / "small.json"
    signals.main(["--out", str(out), "--updates", "20", "--weights", "2"])
    story = json.loads(out.read_text())
    assert {"command", "settings", "versions", "hardware", "seconds", "records"} <= story.keys()
    assert {len(values) for r in story["records"] for values in r.values() if isinstance(values, list)} == {2}
    assert "weights trained for 3 updates" in everything(out)
    assert "20 updates of 2 masks" in text(out)
