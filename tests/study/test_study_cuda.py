"""The study on a GPU: compiled and recorded, it does what it does on a CPU, and goes on after a stop."""

from __future__ import annotations

import pytest
import torch
from study_helpers import SMALL, StopAfter, run, stories

from espalier.study import PaperStudy
from espalier.study.settings import Settings
from espalier.train.loop import Stop
from espalier.train.progress import Progress

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONGER = {"epochs": 8, "trials": 1}  # 336 updates: several recordings and a remainder


def on_gpu(out, stop, **changes):
    return PaperStudy(Settings(**(SMALL | LONGER | changes)), out, device="cuda", commit="abc").run(stop, Progress())


def test_given_masks_train_as_on_a_cpu(tmp_path):
    assert on_gpu(tmp_path / "gpu", Stop(), methods=("fixed",))
    assert run(tmp_path / "cpu", methods=("fixed",), **LONGER)
    ours, theirs = stories(tmp_path / "gpu"), stories(tmp_path / "cpu")
    assert ours.keys() == theirs.keys()
    for name, story in ours.items():
        assert story["result"]["test_loss"] == pytest.approx(theirs[name]["result"]["test_loss"], rel=0.02, abs=0.01)
        assert story["hardware"]["gpu"]


@pytest.mark.parametrize("changes", [{"methods": ("search",)}, {"methods": ("dropout",)}, {"settle": 0.5}], ids=str)
def test_stopped_and_continued(changes, tmp_path):
    assert on_gpu(tmp_path / "whole", Stop(), **changes)
    calls = 0
    while not on_gpu(tmp_path / "parts", StopAfter(3), **changes):
        calls += 1
        assert calls < 40
    assert calls
    whole, parts = stories(tmp_path / "whole"), stories(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, story in whole.items():
        other = parts[name]["result"]
        # The same draws; sums in another order may turn one close comparison in hundreds.
        assert abs(story["result"]["unit_share"] - other["unit_share"]) <= 0.1
        assert story["result"]["test_error"] == pytest.approx(other["test_error"], abs=0.1)
