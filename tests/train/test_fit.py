"""fit: from any data and network to the compact model, by a recipe that can be checked."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import Search, StructureOptimizer, fit
from espalier.train import PRESETS

DATA, TEST = networks.digit_vectors()
SMALL, _ = networks.digit_vectors(256)


def short(model: nn.Module | None = None, data: object = SMALL, **settings):
    """A run of two epochs of eight updates."""
    settings = {"loss": F.cross_entropy, "epochs": 2, "batch_size": 32, "quiet": True} | settings
    return fit(networks.mlp() if model is None else model, data, **settings)


# What comes out


def test_a_target_is_met_and_the_compact_model_is_what_was_trained() -> None:
    model = networks.mlp(48, 2)
    gated = espalier.attach(model, DATA[0][:4])
    result = fit(gated, DATA, loss=F.cross_entropy, epochs=15, target=0.25, batch_size=32, validation=TEST, quiet=True)
    assert result.finished
    assert 0.2 < result.share_after <= 0.25
    counted = sum(m.weight.numel() for m in result.model.modules() if isinstance(m, nn.Linear))
    full = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert counted / full == pytest.approx(result.shares["weight_share"])
    assert not result.model.training
    with gated.masked(result.mask), torch.no_grad():
        torch.testing.assert_close(model.eval()(TEST[0]), result.model(TEST[0]), rtol=1e-5, atol=1e-5)
    wrong = (result.model(TEST[0]).argmax(1) != TEST[1]).double().mean()
    assert result.validation is not None
    assert result.validation.error == pytest.approx(float(wrong))
    assert wrong < 0.12
    assert result.gated is gated
    assert len(result.history) == 15


def test_a_plain_module_is_trained_in_place_and_left_without_gates() -> None:
    model = networks.mlp()
    before = model[0].weight.detach().clone()
    model.eval()
    result = short(model, target=0.5)
    assert not model[0].weight.equal(before)
    assert result.gated is None
    assert not model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert isinstance(espalier.attach(model, DATA[0][:4]).d, int)  # it can be attached again


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    runs = [short(seed=seed, target=0.5) for seed in (1, 1, 2)]
    assert runs[0].theta.equal(runs[1].theta)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert a.equal(b)
    assert not runs[0].theta.equal(runs[2].theta)


def test_random_numbers_outside_are_left_alone() -> None:
    model = networks.mlp()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002
    short(model)
    assert torch.rand(3).equal(expected[0])
    assert random.random() == expected[1]
    assert np.random.rand() == expected[2]  # noqa: NPY002


# The updates


def test_fit_is_the_structure_optimizer_in_a_loop() -> None:
    """The same masks, batches and weights as a loop written out by hand."""
    watched = networks.Watched()
    result = short(watched, penalty=0.05, recipe="paper", seed=4)
    model = networks.mlp()
    gated = espalier.attach(model, DATA[0][:4])
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    search = Search(gated.space, cost=gated.cost("weights"), penalty=0.05, seed=4)
    structure = StructureOptimizer(inner, search, gated)
    for update in range(16):
        inner.param_groups[0]["lr"] = 0.01 * 0.1 ** ((update >= 8) + (update >= 12))
        x = watched.seen[update][::2]  # each example is there twice, under one mask and the other
        index = (SMALL[0][None] == x[:, None]).all(-1).int().argmax(1)

        def closure(x=x, y=SMALL[1][index]) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        structure.step(closure)
    assert search.theta.equal(result.theta)
    for ours, theirs in zip(watched.inner.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_all_masks_of_an_update_share_one_mini_batch_and_an_epoch_reads_every_example() -> None:
    watched = networks.Watched()
    short(watched, samples=3, settle=0.0)
    assert len(watched.seen) == 2 * 8
    for seen in watched.seen:
        assert len(seen) == 3 * 32
        assert all(seen[::3].equal(seen[other::3]) for other in (1, 2))
    epoch = torch.cat([seen[::3] for seen in watched.seen[:8]])
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, SMALL[0].tolist()))
    assert not epoch.equal(torch.cat([seen[::3] for seen in watched.seen[8:]]))  # in another order


@pytest.mark.parametrize("iterable", [False, True])
def test_once_settled_an_update_reads_other_examples_instead_of_other_masks(iterable: bool) -> None:
    watched = networks.Watched()
    data = networks.loader(SMALL, 32) if iterable else SMALL
    result = short(watched, data, samples=2, settle=0.5, epochs=4)
    searching, settled = watched.seen[:16], watched.seen[16:]
    assert [len({tuple(row) for row in x.tolist()}) for x in searching] == [32] * 16  # each under both masks
    assert [len(x) for x in (*searching, *settled)] == [64] * 32  # the same number of updates, the same work
    for x in settled:
        assert len({tuple(row) for row in x.tolist()}) == 64
    assert result.history[1]["settled"] is False
    assert result.history[2]["settled"] is True
    assert result.updates == 32


def test_the_structure_is_fixed_from_the_settling_on() -> None:
    result = short(settle=0.5, target=0.5, epochs=4)
    assert result.history[-1]["entropy"] == result.history[2]["entropy"]
    assert result.history[-1]["cost_share"] == result.history[2]["cost_share"]
    moving = short(settle=0.0, target=0.5, epochs=4)
    assert moving.history[-1]["entropy"] != moving.history[2]["entropy"]


def test_penalty_0_is_no_penalty() -> None:
    zero, none = short(penalty=0.0), short()
    assert zero.theta.equal(none.theta)
    for a, b in zip(zero.model.parameters(), none.model.parameters(), strict=True):
        assert a.equal(b)


def test_a_penalty_closes_gates_and_a_negative_one_opens_them() -> None:
    shares = [short(penalty=p, epochs=6, settle=0.0).history[-1]["expected_share"] for p in (1.0, 0.0, -1.0)]
    assert shares[0] < shares[1] < shares[2]


def test_the_paper_s_preset_is_the_paper_s_settings() -> None:
    seen = {}

    def spy(self, *args, **settings) -> None:
        seen.update(settings)
        original(self, *args, **settings)

    original = Search.__init__
    Search.__init__ = spy  # type: ignore[method-assign]
    try:
        result = short(recipe="paper", epochs=8, penalty=2**-6)
    finally:
        Search.__init__ = original  # type: ignore[method-assign]
    d = len(result.theta)
    assert seen["learning_rate"] == pytest.approx(1 / d)
    assert seen["initial"] == 0.5
    assert seen["samples"] == 2
    assert not seen["adaptive"]
    assert not result.search.settled
    rates = [row["learning_rate"] for row in result.history]
    assert rates == pytest.approx([0.01] * 3 + [0.001] * 2 + [0.0001] * 3)
    inner = PRESETS["paper"].optimizer([nn.Parameter(torch.zeros(2))])
    assert inner.defaults["nesterov"]
    assert (inner.defaults["momentum"], inner.defaults["weight_decay"]) == (0.9, 1e-4)


# What is recorded


def test_a_run_directory_tells_its_whole_story(tmp_path: Path) -> None:
    result = short(target=0.5, checkpoint=tmp_path, validation=TEST, epochs=3, seed=9)
    story = json.loads((tmp_path / "settings.json").read_text())
    assert story["settings"]["seed"] == 9
    assert story["settings"]["target"] == 0.5
    assert story["settings"]["recipe"]["theta_rate"] == PRESETS["default"].theta_rate
    assert story["versions"]["torch"] == torch.__version__
    assert story["hardware"]["device"] == "cpu"
    assert story["hardware"]["cores"] >= 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.history
    wanted = {"loss", "error", "unit_share", "weight_share", "expected_cost", "penalty", "entropy", "seconds"}
    for row in rows:
        assert wanted | {"distance_to_target", "validation_error", "learning_rate"} <= row.keys()
        assert all(value is None or math.isfinite(value) for value in row.values())
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["share_after"] == result.share_after
    assert told["finished"] is True
    assert told["kept"] == {
        name: [int(result.mask[where].sum()), 16] for name, where in result.search.space.slices.items()
    }
    from safetensors.numpy import load_file

    theta = load_file(tmp_path / "theta.safetensors")
    assert theta["updates"].tolist() == [0, 8, 16, 24]
    np.testing.assert_allclose(theta["theta"][-1], result.theta.numpy(), atol=1e-7)
    assert not list(tmp_path.glob("*.partial"))


def test_a_row_says_what_is_true() -> None:
    result = short(target=0.5, epochs=4, settle=0.0)
    row, search = result.history[-1], result.search
    weights = search.cost
    assert row["expected_cost"] == pytest.approx(float(weights(search.theta)))
    assert row["expected_share"] == pytest.approx(row["expected_cost"] / float(weights(torch.ones(search.space.d))))
    assert row["unit_share"] == pytest.approx(float(result.mask.mean()))
    assert row["cost_share"] == row["weight_share"] == pytest.approx(result.shares["weight_share"])
    p = search.theta
    bits = -(p * p.log2() + (1 - p) * (1 - p).log2()).mean()
    assert row["entropy"] == pytest.approx(float(bits))
    assert row["distance_to_target"] == pytest.approx(result.share_before - 0.5)


def test_progress_is_told_in_lines_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    short(target=0.5, quiet=False, epochs=3)
    said = capsys.readouterr()
    assert not said.out
    lines = said.err.splitlines()
    assert lines[0].lstrip().startswith("33%  epoch 1  loss")
    assert lines[0].endswith(" left")
    assert lines[1].startswith("100%  epoch 3")
    assert lines[2].startswith("target 50.00% of the weights, reached")
    short(target=0.5)
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_drawn_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    short(target=0.5, quiet=False, epochs=3)
    said = capsys.readouterr().err
    assert "epoch 3" in said
    assert "100%" in said
    assert "reached" in said


def test_a_result_says_when_nothing_is_left() -> None:
    result = short(target=0.5)
    assert "No gate is left" not in str(result)
    assert "No gate is left" in str(replace(result, mask=torch.zeros_like(result.mask)))
