"""Targets that are amounts, or of several costs at once: what ships exceeds none of them, whoever is asked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.cost import Cost
from espalier.space import BadInput, Bits, Space, Unreachable
from espalier.train import targets


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3),
    )  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(60) % 3
    return torch.randn(60, 1, 8, 8, generator=generator) + labels[:, None, None, None], labels


def counted(model: nn.Module) -> dict[str, int]:
    """Parameters and MACs of one example, counted on the layers themselves."""
    macs = 0

    def add(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal macs
        macs += layer.weight.numel() * (output[0, 0].numel() if output.ndim == 4 else 1)

    hooks = [m.register_forward_hook(add) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    with torch.no_grad():
        model(data()[0][:1])
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    return {"macs": macs, "weights": weights, "parameters": sum(p.numel() for p in model.parameters())}


ARGUMENTS: dict[str, Any] = {"epochs": 3, "batch_size": 10, "quiet": True, "device": "cpu"}


@pytest.mark.parametrize(
    ("target", "kind", "most"),
    [("700 parameters", "parameters", 700), ("2 kB", "parameters", 500), ("12k MACs", "macs", 12_000)],
)
def test_an_amount_is_met_and_not_missed_by_much(target, kind, most):
    result = espalier.fit(network(), data(), target=target, **ARGUMENTS)
    reached = counted(result.model)[kind]
    assert reached <= most
    assert reached > 0.75 * most  # no further gate fits: the dearest one is below a quarter of it
    assert result.share_after <= result.target


def test_the_first_cost_is_the_target_and_the_others_are_limits():
    full = counted(network())
    for asked in ({"macs": 0.5, "weights": 0.9}, {"macs": 0.9, "weights": 0.3}, {"weights": 0.6, "macs": "14 kMACs"}):
        result = espalier.fit(network(), data(), target=asked, **ARGUMENTS)
        reached = counted(result.model)
        for kind, share in asked.items():
            assert reached[kind] <= (14_000 if isinstance(share, str) else share * full[kind]), asked
    assert result.search.expected_cost() / result.search.full_cost <= 0.65


def test_a_sweep_and_shape_take_the_same(tmp_path):
    full = counted(network())
    results = espalier.sweep(
        network, data(), targets=[0.5, "700 parameters", {"macs": 0.5, "weights": 0.4}, {"macs": 0.7, "weights": 0.4}],
        checkpoint=tmp_path, **ARGUMENTS,
    )  # fmt: skip
    reached = [counted(result.model) for result in results]
    assert reached[0]["weights"] <= 0.5 * full["weights"]
    assert reached[1]["parameters"] <= 700
    for one, share in zip(reached[2:], (0.5, 0.7), strict=True):
        assert one["macs"] <= share * full["macs"]
        assert one["weights"] <= 0.4 * full["weights"]
    shaping = espalier.shape(network(), data()[0][:4], target={"macs": 0.5, "weights": 0.4}, updates=20)
    mask = shaping.search.select()
    assert float(shaping.gated.cost("weights")(mask)) <= 0.4 * full["weights"]


def test_select_keeps_every_limit_and_nothing_more_fits():
    """By enumeration: the mask that ships is within both budgets, and no closed gate could be added to it."""
    space = Space([Bits("a", 4, least=1), Bits("b", 4, least=1)])
    torch.manual_seed(0)
    for seed in range(20):
        first, second = (Cost.linear(torch.rand(8) + 0.1) for _ in range(2))
        search = espalier.Search(
            space,
            cost=first,
            target=0.6,
            limits={"second": (second, 0.5)},
            horizon=10,
            initial=torch.rand(8),
            seed=seed,
        )
        mask = search.select()
        ones = torch.ones(8)
        budgets = [(first, 0.6 * first(ones)), (second, 0.5 * second(ones))]
        assert all(cost(mask) <= most for cost, most in budgets)
        for i in torch.nonzero(mask == 0).flatten():
            more = mask.clone()
            more[i] = 1.0
            assert any(cost(more) > most for cost, most in budgets)


def test_expected_costs_are_led_below_all_limits():
    space = Space([Bits("cheap", 20), Bits("dear", 20)])
    cost = Cost.linear([1.0] * 40)
    other = Cost.linear([0.1] * 20 + [1.0] * 20)
    search = espalier.Search(
        space, cost=cost, target=0.6, limits={"other": (other, 0.3)}, horizon=200, ramp=0.5, initial=0.95,
        learning_rate=0.05,
    )  # fmt: skip
    worth = torch.linspace(1, 2, 40)
    for _ in range(200):
        masks = search.ask()
        search.tell(masks, -(masks * worth).sum(-1))
    ones = torch.ones(40)
    assert search.expected_cost() <= 0.6 * cost(ones) * 1.02
    assert other(search.theta) <= 0.3 * other(ones) * 1.05
    assert cost(search.select()) > 0.5 * cost(ones)  # it went into the cheap ones instead of below its target


def test_what_cannot_be_met_is_refused_with_the_smallest_of_each():
    example = data()[0][:4]
    gated = espalier.attach(network(), example)
    least = {kind: float(gated.cost(kind)(gated.canonical(torch.zeros(gated.d)))) for kind in ("macs", "weights")}
    share = {kind: value / float(gated.cost(kind)(torch.ones(gated.d))) for kind, value in least.items()}
    with pytest.raises(Unreachable, match=f"smallest {share['macs']:.5g}.*weights 0.0001, smallest") as error:
        espalier.fit(network(), data(), target={"macs": 0.5, "weights": 0.0001}, **ARGUMENTS)
    assert f"{share['weights']:.6g}" in str(error.value)
    with pytest.raises(Unreachable, match=r"'3 parameters' is below the smallest"):
        espalier.fit(network(), data(), target="3 parameters", **ARGUMENTS)


def test_amounts_are_read_and_what_is_none_is_named():
    gated = espalier.attach(network(), data()[0][:4])
    full = counted(network())
    for text, kind, amount in (
        ("0.5 kparams", "parameters", 500), ("0.5k parameters", "parameters", 500), ("2000 B", "parameters", 500),
        ("0.5K params", "parameters", 500), ("1,000 parameters", "parameters", 1000),
        ("1.953125 KiB", "parameters", 500), ("0.01 MMACs", "macs", 10_000), ("50%", "weights", full["weights"] / 2),
    ):  # fmt: skip
        asked = targets.read(gated, "weights", text)
        assert asked.share == pytest.approx(amount / full[kind], rel=1e-12), text
    assert targets.read(gated, "weights", "macs=0.4, weights=50%").limits["weights"][1] == 0.5
    assert targets.read(gated, "weights", "1 GB").share == 1.0
    for wrong in ("fast", "3 bananas", "1.2.3 ms", "1,00 MB", {"macs": 2.0}, {"macs": "3 ms"}, {}, "macs=0.4,macs=0.5"):
        with pytest.raises((BadInput, TypeError)):
            targets.read(gated, "weights", wrong)
    for target, cost in (("12k MACs", "units"), ({"macs": 0.4}, "parameters")):
        with pytest.raises(BadInput, match="leave cost away"):
            targets.read(gated, cost, target)


def test_an_amount_of_integers_is_exact():
    """The largest mask that fits the amount ships: rounding of the share loses no gate."""
    space = Space([Bits("a", 7, least=0)])

    class Handle:
        model = nn.Linear(1, 1)
        examples = 1

        def __init__(self) -> None:
            self.space = space

        def cost(self, kind: object) -> Cost:
            return Cost.linear([1.0] * 7)

    for amount, scale in itertools.product(range(1, 8), (1.0,)):
        asked = targets.read(Handle(), "units", f"{amount * scale:g} units")
        search = espalier.Search(space, cost=asked.cost, target=asked.share, horizon=1)
        assert search.select().sum() == amount


def test_a_percentage_without_its_sign_is_named():
    with pytest.raises(BadInput, match=r"not 25\.0; 25% is 0\.25"):
        espalier.fit(
            network(), (torch.randn(8, 1, 8, 8), torch.arange(8) % 3), target=25, epochs=1, batch_size=4, quiet=True
        )
