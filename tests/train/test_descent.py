"""The optimiser of the weights where none is given: SGD for classes, AdamW for the rest; the same in fit and sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from espalier import fit, shape, sweep
from espalier.train import PRESETS, Recipe

X, Y = networks.digit_vectors(128)[0]
NUMBERS = X.mean(1, keepdim=True)


class Normed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 12), nn.Linear(12, 8), nn.Linear(8, 10)
        layers: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "own": OwnLayerNorm}
        self.norm = layers[kind](12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(self.norm(self.first(x)))))


class OwnLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - x.mean(-1, keepdim=True))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.reshape(-1, 8, 8))[0][:, -1])


def used(how: str, model: Any, data: Any, folder: Path, **settings: Any) -> Any:
    """The optimiser that a run says it had, and its rate at the start."""
    usual = {"epochs": 1, "batch_size": 32, "checkpoint": folder, "quiet": True, "schedule": "constant"} | settings
    if how == "fit":
        result = fit(model(), data, target=0.9, **usual)
        story = json.loads((folder / "settings.json").read_text())["settings"]["optimizer"]
        kind = next(iter(story))
    else:
        (result,) = sweep(model, data, targets=[0.9], **usual)
        kind = json.loads((folder / "run-000" / "settings.json").read_text())["settings"]["optimizer"].split("(")[0]
        kind = "AdamW" if kind.startswith("Adam") else kind
    return kind, result.history[-1]["learning_rate"]


@pytest.mark.parametrize("how", ["fit", "sweep"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("classes", ("SGD", 0.1)), ("numbers", ("AdamW", 0.01)), ("layer", ("AdamW", 0.003)),
        ("rms", ("AdamW", 0.003)), ("own", ("AdamW", 0.003)), ("finetune", ("AdamW", 0.005)),
        ("lstm", ("AdamW", 0.01)), ("paper", ("SGD", 0.01)), ("mine", ("SGD", 0.02)), ("loader", ("AdamW", 0.01)),
    ],
)  # fmt: skip
def test_which_one(how: str, what: str, expected: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    model, data = networks.mlp, (X, Y)
    if what == "lstm":
        if how == "sweep":
            pytest.skip("a sweep follows no recurrent layer")
        model = Recurrent
    elif what in ("layer", "rms", "own"):
        model = lambda: Normed(what)  # noqa: E731
    elif what != "classes":
        model, data = (lambda: nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))), (X, NUMBERS)
        settings["loss"] = F.mse_loss
    if what in ("finetune", "paper"):
        settings["recipe"] = what
        settings |= {"samples": 2}
    if what == "mine":
        settings["recipe"] = replace(PRESETS["default"], weights_learning_rate=0.02)
    if what == "loader":
        data = DataLoader(TensorDataset(X, NUMBERS), 32)
    kind, rate = used(how, model, data, tmp_path, **settings)
    assert (kind, rate) == (expected[0], pytest.approx(expected[1]))


def test_an_own_loop_knows_the_network_alone() -> None:
    assert isinstance(shape(networks.mlp(), X[:4], target=0.9, updates=10).inner, torch.optim.SGD)
    assert isinstance(shape(Normed("layer"), X[:4], target=0.9, updates=10).inner, torch.optim.AdamW)
    own = Recipe(weights_learning_rate=0.3)
    assert isinstance(shape(Normed("layer"), X[:4], target=0.9, updates=10, recipe=own).inner, torch.optim.SGD)


def test_a_recipe_may_leave_the_weights_as_they_are() -> None:
    model = networks.mlp()
    before = [parameter.clone() for parameter in model.parameters()]
    still = replace(PRESETS["default"], weights_learning_rate=0.0)
    result = fit(model, (X, Y), target=0.9, epochs=1, recipe=still, quiet=True)
    assert result.share_after <= 0.9
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_ordinary_regression_is_learned(scale: float) -> None:
    """Targets of large scale made the recipe's SGD diverge."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=draw)
    y = scale * (x[:, :1] + x[:, 1:2] * x[:, 2:3] + 1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    result = fit(network, (x, y), loss=F.mse_loss, epochs=25, batch_size=16, target=0.5, validation=(x, y), quiet=True)
    assert result.validation_loss is not None
    assert result.validation_loss < 0.3 * float(y.var())
