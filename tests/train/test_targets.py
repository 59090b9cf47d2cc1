"""Targets end to end through fit and sweep: every kind of cost, from the smallest share to 1, and what is refused."""

from __future__ import annotations

from typing import Any

import networks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.space import BadInput, EspalierError, Unreachable
from espalier.train import Recipe, fit, sweep

DATA, TEST = networks.digit_vectors(256)
IMAGES, _ = networks.digit_images(128)
KINDS = ("weights", "macs", "units", "parameters")


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 16, 12), nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


def counted(model: nn.Module, kind: str) -> float:
    """By hand, from the tensors of the layers: images of 8 x 8, then 4 x 4."""
    total = 0.0
    places = {0: 64, 1: 16}
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for i, layer in enumerate(layers):
        weights = layer.weight.numel()
        if kind in ("weights", "parameters"):
            total += weights + (layer.bias.numel() if kind == "parameters" and layer.bias is not None else 0)
        elif kind == "macs":
            total += weights * (places[i] if isinstance(layer, nn.Conv2d) else 1)
        elif i < len(layers) - 1:
            total += layer.weight.shape[0]
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_fit_ends_at_or_below_the_target_in_what_was_asked_for(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    full = counted(convolutional(), kind)
    for target in (0.3, 0.9):
        result = fit(
            convolutional(), IMAGES, loss=F.cross_entropy, epochs=2, batch_size=32, cost=kind, target=target, seed=1
        )
        share = counted(result.model, kind) / full
        assert share <= target + 1e-9
        assert share > target - 0.12  # one more channel of the first layer would not fit
        assert result.share_after == pytest.approx(share, rel=1e-6)
        said = capsys.readouterr().err
        name = kind.replace("macs", "MACs")
        assert f"target {target:.2%} of the {name}, reached {result.share_before:.2%} before the selection" in said
        assert f"and {result.share_after:.2%} after it" in said


@pytest.mark.parametrize("kind", KINDS)
def test_sweep_gives_each_run_its_own_target(kind: str) -> None:
    full = counted(convolutional(), kind)
    space = espalier.attach(convolutional(), IMAGES[0][:2])
    cost = space.cost(kind)
    least = torch.zeros(space.d)
    for group, where in space.space.bits:
        least[where.start : where.start + group.least] = 1.0
    smallest = float(cost(least) / cost(torch.ones(space.d)))
    targets = [smallest * (1 + 1e-6), 0.3, 0.6, 1.0]
    results = sweep(convolutional, IMAGES, targets=targets, epochs=1, batch_size=32, cost=kind, quiet=True)
    for target, result in zip(targets, results, strict=True):
        share = counted(result.model, kind) / full
        assert share <= target * (1 + 1e-9)
        assert result.share_after == pytest.approx(share, rel=1e-6)
        assert result.share_before is not None
        assert result.summary()["target"] == target
    assert counted(results[0].model, kind) / full == pytest.approx(smallest)
    assert counted(results[-1].model, kind) == full
    assert len({result.share_after for result in results}) == 4


class Count:
    """A loss that knows whether it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets)


def smallest_share() -> float:
    gated = espalier.attach(networks.mlp(8, 1), DATA[0][:2])
    return float(gated.cost("parameters")(torch.eye(8)[0]) / gated.cost("parameters")(torch.ones(8)))


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"cost": torch.zeros(8), "target": 0.5}, BadInput, "every cost is zero.*at least one gate"),
        (
            {"cost": espalier.Cost.product([espalier.Form((), 5.0)], d=8), "target": 0.5},
            BadInput,
            "no gate changes this cost.*give another cost",
        ),
        ({"cost": "parameters", "target": 0.01}, Unreachable, "below the smallest reachable share.*what no gate cuts"),
        ({"target": 0.5, "recipe": {"ramp": 1.2}}, BadInput, r"ramp of a recipe is a share of the run in \(0, 1\]"),
        ({"target": 0.5, "recipe": {"begin": 0.0, "ramp": 0.8, "settle": 0.5}}, BadInput, "use settle of at most 0.2"),
        ({"target": 0.5, "batch_size": 512}, BadInput, "batch_size=512 is larger than the data, 256 examples"),
        ({"target": 1.1}, BadInput, r"share of the full cost in \(0, 1\]"),
    ],
    ids=["zero", "constant", "unreachable", "long ramp", "settled on the ramp", "horizon of no update", "above all"],
)
@pytest.mark.parametrize("way", ["fit", "sweep"])
def test_what_cannot_work_is_said_before_training(
    way: str, settings: dict[str, Any], kind: type[EspalierError], said: str
) -> None:
    loss = Count()
    given: dict[str, Any] = {"batch_size": 32, "epochs": 2, "loss": loss, "quiet": True} | settings

    def run() -> object:
        if isinstance(given.get("recipe"), dict):
            given["recipe"] = Recipe(**given["recipe"])
        if way == "fit":
            return fit(networks.mlp(8, 1), DATA, **given)
        return sweep(lambda: networks.mlp(8, 1), DATA, targets=[given.pop("target")], **given)

    with pytest.raises(kind, match=said):
        run()
    assert loss.calls == 0


def test_the_smallest_share_that_is_named_can_be_met() -> None:
    with pytest.raises(Unreachable) as error:
        fit(networks.mlp(8, 1), DATA, loss=F.cross_entropy, epochs=1, cost="parameters", target=0.01, quiet=True)
    assert "The parameters that always stay are of 0.weight (64), 2.weight (10)," in str(error.value)
    assert str(error.value).endswith("espalier.attach(model, inputs).explain() says why")
    named = float(str(error.value).split("share ")[1].split(";")[0])
    assert named == pytest.approx(smallest_share(), rel=1e-5)
    result = fit(networks.mlp(8, 1), DATA, loss=F.cross_entropy, epochs=1, cost="parameters", target=named, quiet=True)
    assert int(result.mask.sum()) == 1
