"""The fast step in the study: the same runs as with the readable one, packed weights, stopped and continued."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from connection_helpers import run, study
from study_helpers import StopAfter, stories

from espalier.space import BadInput
from espalier.train.batched.step import compiled

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


def test_the_rest_of_an_update_with_slopes_compiles(tmp_path):
    """On a GPU the kernels give slopes, and what theta learns from them is compiled behind them."""
    made = study(tmp_path, step="fast", methods=("recipe",), targets=(0.5,), epochs=2)
    compiled_one, eager = (made.batch(made.parts()[0].runs).engine for _ in range(2))
    begin = eager.phases.begin
    for engine in (compiled_one, eager):
        engine.batch.advance(begin + 1)
        assert engine.batch.source.reads_slopes
    compiled_one.batch._update = compiled(compiled_one.batch.step, backend="aot_eager")
    for engine in (compiled_one, eager):
        engine.batch.advance(4)
    torch.testing.assert_close(compiled_one.search.theta, eager.search.theta, rtol=1e-4, atol=1e-5)
    assert not torch.equal(eager.search.theta, torch.full_like(eager.search.theta, 0.99))
    for name, p in eager.batch.state.params.items():
        torch.testing.assert_close(compiled_one.batch.state.params[name], p, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_the_other_step_is_refused(tmp_path):
    assert not run(tmp_path, StopAfter(2), step="fast", **GIVEN)
    with pytest.raises(BadInput, match='step: "fast" there, "readable" here'):
        run(tmp_path, **GIVEN)
