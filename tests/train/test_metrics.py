"""Metrics of the validation: by name, as functions, of torchmetrics; in rows, lines and folders; the best epoch."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import Callback, fit, sweep
from espalier.train import EarlyStopping, evaluate
from espalier.train import loop as loops
from espalier.train.progress import describe
from espalier.train.scoring import KNOWN

sklearn = pytest.importorskip("sklearn.metrics")
DATA, TEST = networks.digit_vectors(320)
SHORT: dict[str, Any] = {"epochs": 4, "batch_size": 32, "quiet": True, "validation": TEST}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_known_ones_are_those_of_scikit_learn() -> None:
    numbers, guesses = draw(200), draw(200) + 0.3 * draw(199 + 1)
    for name, theirs in [
        ("rmse", sklearn.root_mean_squared_error), ("mae", sklearn.mean_absolute_error), ("r2", sklearn.r2_score),
    ]:  # fmt: skip
        assert KNOWN[name](guesses.unsqueeze(1), numbers) == pytest.approx(theirs(numbers, guesses))
    several, near = draw(50, 3), draw(50, 3) + draw(3, 50).T
    assert KNOWN["r2"](near, several) == pytest.approx(sklearn.r2_score(several, near))
    yes, logits = (draw(300) > 0.4).long(), (draw(301)[1:] * 4).round() / 4  # with ties
    for scores, targets in [(logits, yes), (logits.unsqueeze(1), yes.float().unsqueeze(1))]:
        assert KNOWN["auc"](scores, targets) == pytest.approx(sklearn.roc_auc_score(yes, logits))
        assert KNOWN["f1"](scores, targets) == pytest.approx(sklearn.f1_score(yes, logits > 0))
        assert KNOWN["accuracy"](scores, targets) == pytest.approx(sklearn.accuracy_score(yes, logits > 0))
    two = torch.stack([-logits, logits], 1)
    assert KNOWN["auc"](two, yes) == pytest.approx(sklearn.roc_auc_score(yes, logits))
    assert KNOWN["f1"](two + torch.tensor([0.0, 1e-3]), yes) == pytest.approx(sklearn.f1_score(yes, logits >= 0))
    classes, scores = (draw(400).abs() * 3).long().clamp(max=5), draw(400, 7)
    predicted = scores.argmax(1)
    assert KNOWN["f1"](scores, classes) == pytest.approx(sklearn.f1_score(classes, predicted, average="macro"))
    assert KNOWN["accuracy"](scores, classes) == pytest.approx(sklearn.accuracy_score(classes, predicted))


class Counts:
    """As objects of torchmetrics: told of batches, asked at the end."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.seen)


METRICS = {"f1": "f1", "mine": lambda out, y: float(out.shape[0] == len(y) == len(TEST[1])), "counted": Counts()}


def test_no_class_to_compare_gives_no_number() -> None:
    scores, ignored = torch.randn(4, 3), torch.full((4,), -100)
    assert all(math.isnan(KNOWN[name](scores, ignored)) for name in ("accuracy", "f1"))


@pytest.mark.parametrize("network", [networks.mlp, networks.mixed_network])
@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_they_are_in_every_row_and_in_the_folder(how: str, network: Any, tmp_path: Path) -> None:
    if how == "fit":
        result = fit(network(), DATA, target=0.4, metrics=METRICS, checkpoint=tmp_path, **SHORT)
    else:
        result = sweep(network, DATA, targets=[0.4, 0.6], metrics=METRICS, checkpoint=tmp_path, **SHORT)[0]
    assert result.validation is not None
    with torch.no_grad():
        predicted = result.model(TEST[0]).argmax(1)
    assert result.validation.metrics["f1"] == pytest.approx(sklearn.f1_score(TEST[1], predicted, average="macro"))
    assert result.validation.metrics["counted"] == pytest.approx(1 - result.validation.error)
    for row in result.history:
        assert row["validation_mine"] == 1
        assert row["validation_counted"] == pytest.approx(1 - row["validation_error"], abs=2e-3)
    folder = tmp_path if how == "fit" else tmp_path / "run-000"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["validation_f1"] for row in rows] == [row["validation_f1"] for row in result.history]
    assert json.loads((folder / "result.json").read_text())["validation_f1"] == result.validation.metrics["f1"]
    assert f"validation f1 {result.history[-1]['validation_f1']:.4g}" in describe([result.history[-1]])
    assert "f1 0." in str(result)


def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassF1Score(10, average="macro")
    result = fit(networks.mlp(), DATA, target=0.4, metrics={"f1": metric, "ours": "f1"}, **SHORT)
    for row in result.history[2:]:
        assert row["validation_f1"] == pytest.approx(row["validation_ours"], abs=1e-6)


def test_regression_shows_its_loss_and_its_metrics() -> None:
    x = draw(128, 8)
    y = x[:, :1] - x[:, 1:2]
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 32, "quiet": True, "loss": F.mse_loss, "target": 0.5}
    network = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))
    result = fit(network, (x, y), validation=(x, y), metrics=["rmse", "r2"], **settings)
    last = result.history[-1]
    assert last["validation_rmse"] == pytest.approx(last["validation_loss"] ** 0.5)
    assert last["validation_r2"] == pytest.approx(1 - last["validation_loss"] / float(y.var(correction=0)))
    assert "rmse" in describe([last])
    plain = {key: value for key, value in last.items() if key not in ("validation_rmse", "validation_r2")}
    assert f"validation loss {last['validation_loss']:.4g}" in describe([plain])
    assert evaluate(result.model, (x, y), loss=F.mse_loss, metrics=["mae"]).metrics["mae"] > 0


class Told(Callback):
    """Makes a number of each epoch what the test says, and keeps the weights that had it."""

    def __init__(self, values: list[float], name: str = "validation_accuracy") -> None:
        self.values, self.name, self.weights = values, name, dict[int, list[Tensor]]()

    def on_epoch(self, loop: Any, rows: list[dict[str, Any]]) -> None:
        epoch = rows[0]["epoch"]
        rows[0][self.name] = self.values[epoch - 1]
        self.weights[epoch] = [p.detach().clone() for p in loop.engine.structure.network.parameters()]


def test_the_best_settled_epoch_ships_also_of_a_run_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch is the best, but not settled; of the settled ones it is the fourth, before the stop."""
    values = [0.9, 0.1, 0.2, 0.5, 0.3, 0.4]
    told = Told(values)
    settings = SHORT | {"epochs": 6, "settle": 0.6, "metrics": ["accuracy"], "monitor": "accuracy", "target": 0.4}
    result = fit(networks.mlp(), DATA, callbacks=[told], **settings)
    assert result.updates == 60
    for ours, fourth in zip(result.model.parameters(), told.weights[4], strict=True):
        assert ours.equal(fourth)

    class Interrupts(Callback):
        def on_epoch(self, loop: Any, rows: list[dict[str, Any]]) -> None:
            if rows[0]["epoch"] == 5:
                raise ZeroDivisionError

    monkeypatch.setattr(loops, "SAVING", 1e9)  # a checkpoint at every look
    with pytest.raises(ZeroDivisionError):
        fit(networks.mlp(), DATA, callbacks=[Told(values), Interrupts()], checkpoint=tmp_path, **settings)
    again = fit(networks.mlp(), DATA, callbacks=[Told(values)], checkpoint=tmp_path, **settings)  # one is gone
    for ours, fourth in zip(again.model.parameters(), told.weights[4], strict=True):
        assert ours.equal(fourth)


class Right(Counts):
    """As an accuracy of torchmetrics."""

    higher_is_better = True


def right(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).float().mean())


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(
    ("metric", "monitor"),
    [(Right(), "acc"), ("accuracy", "acc"), (KNOWN["accuracy"], "validation_acc"), (right, "max acc")],
)
def test_which_is_better_is_known_or_said(metric: Any, monitor: str, stops: bool) -> None:
    """Of the settled epochs the fourth has the largest number, the second the smallest."""
    told = Told([0.9, 0.1, 0.2, 0.5, 0.3, 0.4], "validation_acc")
    settings = SHORT | {"epochs": 6, "settle": 0.6, "metrics": {"acc": metric}, "target": 0.4}
    how = {"callbacks": [told, EarlyStopping(monitor, None, best=True)]} if stops else {"monitor": monitor}
    result = fit(networks.mlp(), DATA, **settings, **({"callbacks": [told]} | how))
    for ours, fourth in zip(result.model.parameters(), told.weights[4], strict=True):
        assert ours.equal(fourth)


def test_which_is_better_is_not_guessed() -> None:
    for function in (partial(fit, networks.mlp(), target=0.4), partial(sweep, networks.mlp, targets=[0.4])):
        for how in ({"monitor": "acc"}, {"callbacks": [EarlyStopping("acc")]}):
            with pytest.raises(espalier.BadInput, match='say "max acc" or "min acc"'):
                function(DATA, metrics={"acc": right}, **SHORT, **how)
    with pytest.raises(espalier.BadInput, match="opposite"):
        EarlyStopping("max acc", largest=False)
    losses = ("loss", "error", "validation_loss", "rmse", "mae")
    for name in losses:
        stopping = EarlyStopping(name)
        stopping.know({})
        assert stopping.largest is False


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"metrics": {"f 1": "f1"}}, "a word of letters"),
        ({"metrics": {"loss": "f1"}}, "not loss or error"),
        ({"metrics": {"f1": 3}}, "metric 'f1' is a function"),
        ({"metrics": "f1"}, "metrics is a dict"),
        ({"metrics": ["rmse"]}, "compares numbers"),
        ({"metrics": {"all": lambda out, y: out}}, "gives one number"),
        ({"metrics": ["f1"], "validation": None}, "give validation="),
        ({"monitor": "f1"}, "no 'f1' to monitor"),
    ],
)
@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str, how: str) -> None:
    if how == "sweep" and "monitor" in wrong:
        return
    call = partial(fit, networks.mlp(), target=0.4) if how == "fit" else partial(sweep, networks.mlp, targets=[0.4])
    with pytest.raises(espalier.EspalierError, match=said):
        call(DATA, **SHORT | wrong)
