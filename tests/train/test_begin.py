"""Before the search begins: the whole network trains as it would without gates, and theta rests."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import Bits, Choice, Search, Space, StructureOptimizer, fit
from espalier.data import Stream
from espalier.train import Recipe, loop
from espalier.train.batched.batch import Batch
from espalier.train.batched.inputs import Given, Searched
from espalier.train.batched.step import cross_entropy
from espalier.train.descent import SGD, Steps
from espalier.train.eager import EagerEngine
from espalier.train.progress import describe

X, Y = networks.digit_vectors(256)[0]
RECIPE = Recipe(begin=0.25, ramp=0.25, settle=0.5, ramp_updates=0, drops=(0.75,))


class Weighed(networks.Watched):
    """Keeps the first layer's weights at every training call, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and len(x) > 4:
            self.weights.append(self.inner[0].weight.detach().clone())
        return super().forward(x)


def run(model: nn.Module, **given: Any) -> Any:
    settings = {"loss": F.cross_entropy, "epochs": 4, "batch_size": 32, "target": 0.4, "quiet": True, "seed": 5}
    return fit(model, (X, Y), **(settings | {"recipe": RECIPE} | given))


def test_the_whole_network_trains_first_as_without_gates() -> None:
    """32 updates: 8 under the whole network, 8 of search, 16 settled; the first 8 again by torch alone."""
    watched = Weighed()
    result = run(watched)
    different = [len({tuple(row) for row in x.tolist()}) for x in watched.seen]
    assert different == [64] * 8 + [32] * 8 + [64] * 16  # while losses are ranked each example is read twice
    plain = networks.mlp()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for index in Stream(5, len(X)).take(8, 64):
        sgd.zero_grad()
        F.cross_entropy(plain(X[index]), Y[index]).backward()
        sgd.step()
    torch.testing.assert_close(watched.weights[8], plain[0].weight.detach(), rtol=1e-5, atol=1e-6)
    start = sum(-p * math.log2(p) for p in (RECIPE.initial, 1 - RECIPE.initial))
    assert result.history[0]["entropy"] == pytest.approx(start)
    assert result.history[0]["expected_share"] > result.history[1]["expected_share"]
    assert result.share_after <= 0.4


def test_the_ramp_ends_at_its_share_of_the_run() -> None:
    rows = run(networks.mlp(), epochs=8).history
    shares = [row["expected_share"] for row in rows]
    assert shares[0] == shares[1] > shares[2] > shares[3]
    assert shares[3] == pytest.approx(0.4, abs=0.02)
    assert shares[4:] == [shares[3]] * 4
    assert [row["settled"] for row in rows] == [False] * 4 + [True] * 4
    assert [row["begun"] for row in rows] == [False] * 2 + [True] * 6
    told = [describe([row]) for row in rows]
    assert ["before the search" in line for line in told] == [True] * 2 + [False] * 6
    assert ["share" in line for line in told] == [False] * 2 + [True] * 6


@pytest.mark.parametrize("updates", [1, 7, 8, 9, 15, 16, 20])
def test_stopped_in_any_phase_the_run_goes_on_and_ends_the_same(
    updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(networks.mlp())
    step = EagerEngine.step

    def dying(self: EagerEngine, batch: Any) -> None:
        step(self, batch)
        if self.done == updates:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "SAVING", 1e9)  # after every update
    monkeypatch.setattr(loop, "LOOK", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(EagerEngine, "step", dying)
        with pytest.raises(KeyboardInterrupt):
            run(networks.mlp(), checkpoint=tmp_path)
    found = run(networks.mlp(), checkpoint=tmp_path)
    assert found.theta.equal(expected.theta)
    for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert a.equal(b)


def test_a_step_under_a_mask_leaves_theta_alone() -> None:
    model = networks.mlp()
    gated = espalier.attach(model, X[:4])
    search = Search(gated.space, penalty=0.1)
    before, weights = search.theta.clone(), model[0].weight.detach().clone()
    structure = StructureOptimizer(torch.optim.SGD(model.parameters(), 0.1), search, gated)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    loss = structure.step(closure, under=search.whole())
    assert calls == 1
    assert search.theta.equal(before)
    assert int(search.updates) == 0
    assert not model[0].weight.equal(weights)
    assert float(loss) == pytest.approx(F.cross_entropy(networks.mlp()(X), Y).item(), rel=1e-5)


def test_the_whole_of_bits_and_choices() -> None:
    space = Space([Bits("a", 3), Choice("b", 4), Bits("c", 2)])
    search = Search(space, batch=(200,), seed=1, initial=0.3)
    mask = search.whole()
    assert mask.shape == (200, space.d)
    space.check_mask(mask)
    assert (mask[:, :3] == 1).all()
    assert (mask[:, -2:] == 1).all()
    assert (mask[:, 3:7].mean(0) > 0.15).all()  # each option is tried
    assert search.whole(search.noise()).shape == mask.shape
    assert Search(5).whole().equal(torch.ones(5))


def test_in_a_batch_it_is_the_open_mask_that_is_given() -> None:
    """The same ten updates of three runs, and theta where it began; the search goes on from there."""

    def batch(given: bool) -> tuple[Batch, Search]:
        search = Search(12, target=[0.3, 0.5, 0.7], horizon=20, batch=(3,), seed=1)
        torch.manual_seed(0)
        params = {"w": 0.3 * torch.randn(3, 12, 64), "v": 0.3 * torch.randn(3, 10, 12)}

        def call(tensors: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
            return F.linear(F.relu(F.linear(x, tensors["w"])) * mask, tensors["v"])

        open_masks = Given(torch.ones(3, 12), torch.zeros(3))
        return Batch(
            call, params, {}, data=(X, Y), seeds=[0, 1, 2], source=open_masks if given else Searched(search),
            loss=cross_entropy, optimizer=SGD(0.1), schedule=Steps((0.5,)), total=30, batch_size=16, samples=2,
            begin=10,
        ), search  # fmt: skip

    (ours, search), (theirs, _) = batch(False), batch(True)
    start = search.theta.clone()
    for part in (4, 6):
        ours.advance(part)
        theirs.advance(part)
    for name, p in ours.state.params.items():
        assert p.equal(theirs.state.params[name])
    assert search.theta.equal(start)
    saved = copy.deepcopy(ours.state_dict())
    ours.advance(7)
    assert search.updates.tolist() == [7, 7, 7]
    assert ours.examples == 16
    (again, second) = batch(False)
    again.load_state_dict(saved)
    again.advance(7)
    assert second.theta.equal(search.theta)


def test_a_ramp_given_to_a_sweep_lets_its_search_begin_earlier() -> None:
    given = {"loss": F.cross_entropy, "epochs": 4, "batch_size": 32, "recipe": RECIPE, "quiet": True}
    late = espalier.sweep(networks.mlp, (X, Y), targets=[0.4], search={"ramp": 0.5}, **given)[0]
    assert [row["begun"] for row in late.history] == [True] * 4
    assert [row["settled"] for row in late.history] == [False, False, True, True]
    assert late.history[0]["expected_share"] > late.history[1]["expected_share"]


def test_rows_of_a_sweep_say_when_the_search_has_begun() -> None:
    given = {"loss": F.cross_entropy, "epochs": 4, "batch_size": 32, "recipe": RECIPE, "quiet": True}
    late = espalier.sweep(networks.mlp, (X, Y), targets=[0.4], **given)[0]
    assert [row["begun"] for row in late.history] == [False, True, True, True]
    never = espalier.sweep(networks.mlp, (X, Y), dropouts=[0.1], **given)[0]
    assert all(row["begun"] for row in never.history)  # there is no search to wait for
