"""The fast step in the study: the same runs as with the readable one, packed weights, stopped and continued."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from connection_helpers import run, study
from study_helpers import StopAfter, stories

from espalier.space import BadInput

pytest.importorskip("espalier.models.densenet_fast")
GIVEN = {"methods": ("random", "full")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("fast")
    assert run(out, step="fast", keep_state=True, **GIVEN)
    return out


def test_it_trains_what_the_readable_step_trains(whole, tmp_path):
    assert run(tmp_path, keep_state=True, **GIVEN)
    ours, theirs = stories(whole), stories(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, story in ours.items():
        assert story["settings"] == theirs[name]["settings"]
        assert (story["compute"]["step"], theirs[name]["compute"]["step"]) == ("fast", "readable")
        for row, other in zip(story["curve"], theirs[name]["curve"], strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
            assert row["test_loss"] == pytest.approx(other["test_loss"], rel=1e-3)
    made, other = study(whole, **GIVEN), study(tmp_path, **GIVEN)
    for spec in made.settings.runs("full"):
        kept, readable = (safetensors.torch.load_file(s.weights(spec)) for s in (made, other))
        assert kept.keys() == readable.keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor, readable[name], rtol=1e-3, atol=1e-3)


def test_stopped_and_continued_equals_uninterrupted(whole, tmp_path):
    calls = 0
    while not run(tmp_path, StopAfter(4), step="fast", **GIVEN):
        calls += 1
        assert calls < 20
    assert calls
    assert stories(tmp_path) == stories(whole)


def test_a_checkpoint_of_the_other_step_is_refused(tmp_path):
    assert not run(tmp_path, StopAfter(2), step="fast", **GIVEN)
    with pytest.raises(BadInput, match='step: "fast" there, "readable" here'):
        run(tmp_path, **GIVEN)
