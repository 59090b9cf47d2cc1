"""espalier.sweep from the factory to the compact models: results, rows, run directories, resuming, refusals."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.data import load
from espalier.train import Recipe
from espalier.train.batched import SGD, AdamW, Compute, Cosine, Run
from espalier.train.loop import Loop

DIGITS = load("digits").flatten()
SMALL = (DIGITS.train_inputs[:256] / 255, DIGITS.train_labels[:256])
TEST = (DIGITS.test_inputs[:100] / 255, DIGITS.test_labels[:100])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10))


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def sweep(factory: Any = network, data: Any = SMALL, **given: Any) -> list[Any]:
    settings = {"epochs": 4, "batch_size": 16, "validation": TEST, "quiet": True} | given
    return espalier.sweep(factory, data, **settings)


def test_one_result_for_each_target_and_seed_within_its_target() -> None:
    results = sweep(targets=[0.2, 0.6], seeds=[3, 5])
    assert [(r.run.target, r.run.seed) for r in results] == [(0.2, 3), (0.2, 5), (0.6, 3), (0.6, 5)]
    for result in results:
        assert result.finished
        assert result.share_after <= result.target + 1e-12
        weights = sum(m.weight.numel() for m in result.model if isinstance(m, nn.Linear))
        full = sum(m.weight.numel() for m in network() if isinstance(m, nn.Linear))
        assert weights / full == pytest.approx(result.shares["weight_share"])
        with torch.no_grad():
            out = result.model(TEST[0])
        assert float((out.argmax(1) != TEST[1]).double().mean()) == pytest.approx(result.validation_error)
        # masked == compact: the last row was measured under the mask, the result on the compact model
        assert result.history[-1]["validation_loss"] == pytest.approx(result.validation_loss, rel=1e-5)
        assert result.theta.shape == result.mask.shape == (28,)


def test_it_learns_and_reads_a_dataset() -> None:
    (result,) = sweep(data=DIGITS, targets=[0.7], epochs=12, batch_size=32, validation=None)
    assert result.validation_error < 0.3
    assert result.history[-1]["loss"] < result.history[0]["loss"]


@pytest.mark.parametrize("given", [None, DIGITS, DIGITS.test, DIGITS.as_floats().test, DIGITS.as_floats()])
def test_validation_is_read_by_its_own_scale(given: object) -> None:
    (result,) = sweep(data=DIGITS, targets=[0.7], epochs=2, batch_size=32, validation=given)
    x, y = DIGITS.as_floats().test
    with torch.no_grad():
        error = float((result.model(x).argmax(1) != y).double().mean())
    assert result.validation_error == pytest.approx(error)
    assert result.history[-1]["validation_error"] == pytest.approx(error, abs=0.005)


def test_plain_bytes_are_refused_and_tokens_are_read_as_they_are() -> None:
    with pytest.raises(espalier.BadInput, match=r"uint8 is not converted: give the espalier.data.Dataset.*float"):
        sweep(data=DIGITS.train, targets=[0.5])

    def words() -> nn.Module:
        return nn.Sequential(nn.Embedding(17, 4), nn.Flatten(), nn.Linear(256, 12), nn.ReLU(), nn.Linear(12, 10))

    data, held = ((x.long(), y) for x, y in (DIGITS.train, DIGITS.test))
    (result,) = sweep(words, data, targets=[0.5], validation=held)
    assert result.history[-1]["loss"] < result.history[0]["loss"]


@pytest.mark.parametrize(
    ("factory", "said"),
    [(lambda: nn.Linear(64, 10, device="meta"), "'meta'"), (lambda: torch.jit.script(nn.ReLU()), "TorchScript")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_factory_of_what_cannot_be_trained_is_refused_as_in_fit(factory: Any, said: str) -> None:
    with pytest.raises(espalier.BadInput, match=said):
        sweep(factory, SMALL, targets=[0.5])


def test_frozen_batch_norm_is_refused() -> None:
    def frozen() -> nn.Module:
        model = images()
        model[1].eval()
        return model

    with pytest.raises(espalier.BadInput, match=r"1 is BatchNorm in eval mode.*espalier.fit"):
        sweep(frozen, (SMALL[0].reshape(-1, 1, 8, 8), SMALL[1]), targets=[0.5], validation=None)


@pytest.mark.parametrize("positions", [6, 12])
def test_a_class_for_every_position(positions: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 12, (256, positions))

    def words() -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12))

    (result,) = sweep(words, (x, x), penalties=[0.0], epochs=8, validation=(x, x))
    assert result.validation_loss < 0.3
    assert result.validation_error == (0.0 if positions == 6 else None)
    assert (result.history[-1]["error"] is None) == (positions == 12)
    assert (result.history[-1]["validation_error"] is None) == (positions == 12)


def test_rows_have_the_names_that_fit_gives_them() -> None:
    fitted = espalier.fit(
        network(),
        SMALL,
        loss=nn.functional.cross_entropy,
        epochs=2,
        batch_size=16,
        target=0.5,
        validation=TEST,
        quiet=True,
    )
    (result,) = sweep(targets=[0.5], epochs=2)
    assert result.history[-1].keys() == fitted.history[-1].keys()
    assert result.summary().keys() >= fitted.summary().keys()
    assert [row["update"] for row in result.history] == [row["update"] for row in fitted.history] == [16, 32]


def test_the_paper_preset_and_given_settings() -> None:
    results = sweep(penalties=[0.0, 2.0**-3], recipe="paper", optimizer=SGD(lr=0.1), schedule=Cosine(), epochs=2)
    assert [r.run.penalty for r in results] == [0.0, 0.125]
    assert not results[0].history[-1]["settled"]
    assert results[0].history[0]["learning_rate"] == pytest.approx(0.05)
    assert results[0].share_after > results[1].share_after or not torch.equal(results[0].theta, results[1].theta)


def test_given_masks_dropout_and_open_runs_come_back_in_order() -> None:
    mask = torch.zeros(28)
    mask[::3] = 1
    asked = [Run(1, mask=mask), Run(2, penalty=0.1), Run(3, dropout=0.5), Run(4, all_open=True), Run(5, target=0.5)]
    results = sweep(runs=asked, epochs=2)
    assert [r.run.seed for r in results] == [1, 2, 3, 4, 5]
    assert torch.equal(results[0].mask, mask)
    assert results[0].theta is None
    assert results[2].shares["unit_share"] == results[3].shares["unit_share"] == 1.0
    assert results[0].model[0].out_features == int(mask[:16].sum())


def test_equal_seeds_start_alike_and_a_run_does_not_depend_on_its_neighbours_weights() -> None:
    several = sweep(masks=torch.ones(1, 28), seeds=[0, 1], epochs=1)
    alone = sweep(masks=torch.ones(1, 28), seeds=[1], epochs=1)
    for a, b in zip(several[1].model.parameters(), alone[0].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_at_once_splits_without_changing_the_order() -> None:
    results = sweep(masks=torch.ones(1, 28), seeds=[4, 5, 6], epochs=2, at_once=2, optimizer=AdamW(0.01))
    assert [r.run.seed for r in results] == [4, 5, 6]
    for result in results:
        assert result.history[1]["loss"] < result.history[0]["loss"]
        assert {p.dtype for p in result.model.parameters()} == {torch.float32}


def test_batch_norm_trains_on_batch_statistics_and_ships_calibrated() -> None:
    x, y = SMALL[0].reshape(-1, 1, 8, 8), SMALL[1]
    held = TEST[0].reshape(-1, 1, 8, 8), TEST[1]
    results = sweep(images, (x, y), targets=[0.4, 0.8], cost="macs", epochs=8, validation=held, pad=1)
    for result in results:
        norm = next(m for m in result.model if isinstance(m, nn.BatchNorm2d))
        assert norm.track_running_stats
        with torch.no_grad():
            means = result.model[0](x).mean((0, 2, 3))
        torch.testing.assert_close(norm.running_mean, means, rtol=1e-3, atol=1e-4)
        assert result.validation_error < 0.8
        assert result.share_after <= result.target + 1e-12


def test_each_run_has_its_own_learning_rate() -> None:
    still, moving = sweep(runs=[Run(0, all_open=True, learning_rate=1e-12), Run(0, all_open=True)], epochs=1)
    torch.manual_seed(0)
    for start, end, other in zip(
        network().parameters(), still.model.parameters(), moving.model.parameters(), strict=True
    ):
        torch.testing.assert_close(start, end, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(start, other, atol=1e-4)
    assert still.history[0]["learning_rate"] == pytest.approx(1e-12)


class Killed(Exception):
    pass


def killed_after(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves whenever it may, and dies at the first chance after so many updates."""
    advance = Loop._advance
    monkeypatch.setattr("espalier.train.loop.LOOK", 0.0)  # looks after every update
    monkeypatch.setattr("espalier.train.loop.SAVING", 1e9)

    def dying(self: Loop) -> None:
        advance(self)
        if self.update >= updates:
            raise Killed

    monkeypatch.setattr(Loop, "_advance", dying)


SETTINGS = [
    {"targets": [0.3, 0.6], "settle": 0.5, "epochs": 3},
    {"targets": [0.3, 0.6], "settle": 0.5, "epochs": 3, "recipe": "ranked"},
    {"runs": [Run(0, target=0.3), Run(0, target=0.3, permuted=True)], "epochs": 3},
    {"targets": [0.3, 0.6], "recipe": Recipe(begin=0.25, ramp=0.25, settle=0.5, ramp_updates=0), "epochs": 3},
    {"penalties": [0.1], "recipe": "paper", "seeds": [0, 1], "epochs": 2, "search": {"adaptive": True}},
    {"dropouts": [0.5, 0.2], "epochs": 2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sweep(checkpoint=tmp_path / "whole", **settings)
    for updates in (3, 12, 19, 26):
        with monkeypatch.context() as patch:
            killed_after(updates, patch)
            with pytest.raises(Killed):
                sweep(checkpoint=tmp_path / "killed", **settings)
    found = sweep(checkpoint=tmp_path / "killed", **settings)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.mask, theirs.mask)
        assert mine.theta is None or torch.equal(mine.theta, theirs.theta)
        for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
            assert torch.equal(a, b)
        assert [without_time(row) for row in mine.history] == [without_time(row) for row in theirs.history]
    for run in range(len(found)):
        rows = [read_rows(tmp_path / where / f"run-{run:03d}") for where in ("killed", "whole")]
        assert rows[0] == rows[1]


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [without_time(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_time_limit_stops_cleanly_and_the_same_call_goes_on(tmp_path: Path) -> None:
    (part,) = sweep(targets=[0.5], epochs=4000, checkpoint=tmp_path, time_limit=0.8)
    assert not part.finished
    assert 0 < part.updates < 4000 * 16
    (more,) = sweep(targets=[0.5], epochs=4000, checkpoint=tmp_path, time_limit=0.8)
    assert more.updates > part.updates


def test_an_interrupt_ends_the_update_saves_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sweep(penalties=[0.1], epochs=2, checkpoint=tmp_path / "whole")
    advance = Loop._advance

    def interrupted(self: Loop) -> None:
        advance(self)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(penalties=[0.1], epochs=2, checkpoint=tmp_path / "stopped")
    found = sweep(penalties=[0.1], epochs=2, checkpoint=tmp_path / "stopped")
    assert torch.equal(found[0].theta, expected[0].theta)
    for a, b in zip(found[0].model.parameters(), expected[0].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_directory_tells_its_story(tmp_path: Path) -> None:
    results = sweep(targets=[0.3, 0.6], epochs=2, checkpoint=tmp_path)
    for run, result in enumerate(results):
        folder = tmp_path / f"run-{run:03d}"
        story = json.loads((folder / "settings.json").read_text())
        assert story["settings"]["target"] == result.target
        assert {"settings", "versions", "hardware"} <= story.keys()
        assert len(read_rows(folder)) == 2
        written = json.loads((folder / "result.json").read_text())
        assert written == result.summary()
        assert written["sizes"]["units"] == [int(result.mask.sum()), len(result.mask)]
        parameters = sum(parameter.numel() for parameter in result.model.parameters())
        assert written["sizes"]["parameters"] == [parameters, sum(p.numel() for p in network().parameters())]
        assert (folder / "theta.safetensors").is_file()


def test_a_checkpoint_of_other_settings_is_refused_and_both_are_shown(tmp_path: Path) -> None:
    sweep(targets=[0.5], epochs=1, checkpoint=tmp_path)
    with pytest.raises(espalier.BadInput, match="batch_size: 16 there, 32 here"):
        sweep(targets=[0.5], epochs=1, checkpoint=tmp_path, batch_size=32)


def test_a_checkpoint_of_another_network_or_other_weights_is_refused(tmp_path: Path) -> None:
    def other() -> nn.Module:
        return nn.Sequential(*[nn.Tanh() if isinstance(m, nn.ReLU) else m for m in network()])

    def moved() -> nn.Module:
        model = network()
        nn.init.ones_(model[0].bias)
        return model

    sweep(targets=[0.5], epochs=1, checkpoint=tmp_path)
    for factory in (other, moved):
        with pytest.raises(espalier.BadInput, match=r"model: .*there.*here"):
            sweep(factory, targets=[0.5], epochs=1, checkpoint=tmp_path)
    assert sweep(targets=[0.5], epochs=1, checkpoint=tmp_path)[0].finished


def test_somebody_else_s_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run-000").mkdir()
    (tmp_path / "run-000" / "settings.json").write_text("[1]")
    with pytest.raises(espalier.BadInput, match="was not written by a run"):
        sweep(targets=[0.5], epochs=1, checkpoint=tmp_path)
    assert (tmp_path / "run-000" / "settings.json").read_text() == "[1]"


def test_one_diverged_run_stops_no_other() -> None:
    def factory() -> nn.Module:
        model = network()
        if torch.initial_seed() == 7:
            nn.init.constant_(model[0].weight, torch.inf)
        return model

    good, bad = sweep(factory, penalties=[0.1], seeds=[0, 7], epochs=2)
    assert good.diverged is None
    assert good.validation_loss is not None
    assert bad.diverged == 1
    assert bad.history[-1]["loss"] is None


def loss_of_each(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, y, reduction="none")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x if x.sum() > 0 else -x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.mix, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.read(x.reshape(-1, 8, 8))[0][:, -1]).relu())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"targets": [0.5], "penalties": [0.1], "runs": [Run()]}, "either runs or"),
    ({"targets": []}, "targets is empty"),
    ({"targets": [0.5], "seeds": []}, "seeds is empty"),
    ({"targets": [0.5], "batch_size": 300}, "larger than the data, 256 examples"),
    ({"targets": [0.5], "epochs": 0}, "epochs is at least 1"),
    ({"targets": [0.5], "samples": 1, "recipe": "ranked"}, "samples is at least 2"),
    ({"targets": [0.5], "samples": 0}, "samples is at least 1"),
    ({"targets": [0.5], "recipe": Recipe(begin=0.0, ramp=0.3, settle=0.9)}, "settle of at most"),
    ({"targets": [0.5], "schedule": "exponential"}, "schedule is one of"),
    ({"targets": [0.5], "search": {"momentum": 1}}, "search holds some of"),
    ({"targets": [0.5], "pad": 2}, "cropping needs images"),
    ({"targets": [0.5], "recipe": "papre"}, "did you mean 'paper'"),
    ({"targets": [0.5], "time_limit": 0}, "time_limit is a positive number"),
    ({"targets": [0.5], "at_once": 0}, "at_once is at least 1"),
    ({"targets": [0.5], "loss": loss_of_each}, "scalar"),
    ({"targets": [0.5], "data": (SMALL[0], SMALL[1][:5])}, "256 inputs, but 5 targets"),
    ({"targets": [0.5], "data": (SMALL[0][:0], SMALL[1][:0])}, "empty"),
    ({"targets": [0.5], "factory": lambda: 3}, "factory\\(\\) builds a module"),
    ({"masks": [torch.ones(5)]}, "28 entries"),
    ({"masks": [torch.full((28,), 0.5)]}, "0 and 1"),
    ({"dropouts": [1.0]}, "rate in \\[0, 1\\)"),
    ({"targets": 0.3}, r"targets is a list, as targets=\[0.3\], not float"),
    ({"targets": ["a"]}, "a target is a share such as 0.25 or 25%, or an amount"),
    ({"targets": [0.5], "seeds": 3}, r"seeds is a list, as seeds=\[3\], not int"),
    ({"targets": [0.5], "seeds": [0.5]}, "seed of a run is an integer, not 0.5"),
    ({"targets": [0.5], "optimizer": 0.1}, r"SGD\(lr=0.1\) of espalier.train.batched, or lambda p: .* not 0.1"),
    ({"targets": [0.5], "optimizer": torch.optim.RMSprop}, "by SGD, Adam or AdamW, not by RMSprop"),
    ({"targets": [0.5], "optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)}, "amsgrad"),
    ({"targets": [0.5], "compute": "bf16"}, r"Compute\(precision='bf16'\), not 'bf16'"),
    ({"targets": [0.5], "factory": network()}, "a function without arguments.*not Sequential"),
    ({"targets": [0.5], "device": "gpu"}, "device 'gpu' is not known"),
    ({"targets": [0.5], "checkpoint": ""}, "not ''; use '.'"),
    ({"targets": [0.5], "loss": nn.CrossEntropyLoss}, "is a class: give CrossEntropyLoss"),
    ({"targets": [0.5], "factory": lambda: Branching()}, "cannot compute many runs at once.*use espalier.fit"),
    ({"targets": [0.5], "factory": lambda: Recurrent()}, "cannot compute many runs at once.*use espalier.fit"),
    ({"targets": [0.5], "compute": Compute(capture=True), "device": "cpu"}, "on a CPU"),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, before it gives up on a recurrent layer
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_bad_input_is_named_with_the_way_out(given: dict[str, Any], message: str) -> None:
    with pytest.raises(espalier.EspalierError, match=message):
        sweep(**given)


class Buffered(nn.Module):
    """A buffer and a frozen parameter of each run's own, beside what is trained."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 12), nn.Linear(12, 10)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.register_buffer("scale", torch.rand(64) + 0.5)
        self.frozen = nn.Parameter(torch.rand(12) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.inner(x * self.scale))) * self.frozen)


@pytest.mark.parametrize("norm", [False, True])
def test_buffers_and_frozen_parameters_are_each_run_s_own(norm: bool) -> None:
    results = sweep(lambda: Buffered(norm), targets=[0.5], seeds=[3, 4], epochs=2, validation=SMALL)
    for result, seed in zip(results, (3, 4), strict=True):
        torch.manual_seed(seed)
        built = Buffered(norm)
        assert result.model.scale.equal(built.scale)
        assert result.model.frozen.equal(built.frozen[result.mask.bool()])
        # What is measured under the mask at the end of the last epoch is what the compact model gives.
        assert result.history[-1]["validation_loss"] == pytest.approx(result.validation_loss, rel=1e-4)
