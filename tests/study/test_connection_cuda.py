"""Connection selection on a GPU: compiled and recorded, it does what it does on a CPU, and goes on after a stop."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from connection_helpers import TINY, images, run
from study_helpers import StopAfter, stories

from espalier.study import PaperStudy
from espalier.study.settings import ConnectionSettings
from espalier.train.batched import Compute
from espalier.train.loop import Stop
from espalier.train.progress import Progress

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONGER = {"epochs": 3}  # 36 updates: several recordings and a remainder
STEPS = ["readable", *(["fast"] if importlib.util.find_spec("espalier.models.densenet_fast") else [])]


def on_gpu(out, stop, **changes):
    settings = ConnectionSettings(**(TINY | LONGER | changes))
    compute = Compute(compile=settings.step == "fast", updates_at_once=3)  # to compile the readable one takes minutes
    study = PaperStudy(settings, out, data=images(), device="cuda", compute=compute, commit="abc")
    return study.run(stop, Progress())


@pytest.mark.parametrize("step", STEPS)
def test_given_networks_train_as_on_a_cpu(step, tmp_path):
    assert on_gpu(tmp_path / "gpu", Stop(), methods=("random", "full"), step=step)
    assert run(tmp_path / "cpu", methods=("random", "full"), **LONGER)
    ours, theirs = stories(tmp_path / "gpu"), stories(tmp_path / "cpu")
    assert ours.keys() == theirs.keys()
    for name, story in ours.items():
        assert story["result"]["mask"] == theirs[name]["result"]["mask"]
        first, other = story["curve"][0], theirs[name]["curve"][0]
        assert first["train_loss"] == pytest.approx(other["train_loss"], rel=0.02)
        assert story["compute"]["step"] == step


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "changes", [{}, {"settle": 0.5}, {"methods": ("recipe",), "targets": (0.5, 0.8), "theta_rate": None}], ids=str
)
def test_stopped_and_continued(step, changes, tmp_path):
    changes = {"methods": ("search",), "step": step} | changes
    assert on_gpu(tmp_path / "whole", Stop(), **changes)
    calls = 0
    while not on_gpu(tmp_path / "parts", StopAfter(3), **changes):
        calls += 1
        assert calls < 40
    assert calls
    whole, parts = stories(tmp_path / "whole"), stories(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, story in whole.items():
        # The same draws; sums in another order may turn one close comparison in hundreds.
        assert story["curve"][0]["train_loss"] == pytest.approx(parts[name]["curve"][0]["train_loss"], rel=0.05)
        assert abs(story["result"]["connection_share"] - parts[name]["result"]["connection_share"]) <= 0.35
