"""fit on a GPU: the same loop, close to the CPU's, resumed there, and never mixed up with it."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch.nn import functional as F

import espalier
from espalier import fit
from espalier.search.recorded import Recorded
from espalier.train import Recipe, evaluate, stochastic
from espalier.train.compiling import Recording

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DATA, TEST = networks.digit_images(512)
SETTINGS = {"loss": F.cross_entropy, "epochs": 3, "batch_size": 32, "cost": "macs", "target": 0.5, "quiet": True}


def test_what_the_recipe_makes_is_fused_on_the_gpu_and_computes_the_same() -> None:
    weights = [torch.randn(30, generator=torch.Generator().manual_seed(0)).to(device) for device in ("cpu", "cuda")]
    optimizers = [Recipe().optimizer([w.requires_grad_()]) for w in weights]
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [None, True]
    for w, optimizer in zip(weights, optimizers, strict=True):
        for _ in range(3):
            w.grad = w.detach().square()
            optimizer.step()
    torch.testing.assert_close(weights[1].detach().cpu(), weights[0].detach())


def test_a_resnet_on_the_gpu() -> None:
    model = networks.resnet()
    gated = espalier.attach(model, DATA[0][:4])
    result = fit(gated, DATA, device="cuda", validation=TEST, **SETTINGS)
    assert result.theta.is_cuda
    assert next(result.model.parameters()).is_cuda
    assert result.share_after <= 0.5
    assert result.validation == evaluate(result.model, TEST, loss=F.cross_entropy)
    assert stochastic(gated, result.theta, TEST, loss=F.cross_entropy, structures=4).examples == 450
    # in float64: convolutions in tf32 differ by more than 1e-3 of their own
    model.double().eval()
    compact = result.model.double()
    x = TEST[0].cuda().double()
    with gated.masked(result.mask), torch.no_grad():
        torch.testing.assert_close(model(x), compact(x))


def test_data_may_lie_on_the_gpu_already() -> None:
    data = (DATA[0].cuda(), DATA[1].cuda())
    here, there = (fit(networks.resnet().cuda(), source, **SETTINGS) for source in (data, DATA))
    assert here.theta.shape == there.theta.shape
    assert here.history[0]["loss"] == pytest.approx(there.history[0]["loss"], rel=0.05)


def test_a_run_on_the_gpu_is_resumed_there_and_refused_elsewhere(tmp_path: Path) -> None:
    calls = 0
    while True:
        result = fit(networks.resnet(), DATA, device="cuda", checkpoint=tmp_path, time_limit=0.5, **SETTINGS)
        calls += 1
        assert calls < 50
        if result.finished:
            break
    assert result.updates == 48
    with pytest.raises(espalier.BadInput, match='device: "cuda" there, "cpu" here'):
        fit(networks.resnet(), DATA, checkpoint=tmp_path, **SETTINGS)


def test_out_of_memory_on_the_gpu_says_what_to_do() -> None:
    def greedy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return F.cross_entropy(outputs, targets)

    with pytest.raises(espalier.train.OutOfMemory, match="smaller batch_size"):
        fit(networks.resnet(), DATA, device="cuda", **SETTINGS | {"loss": greedy})


def test_bf16_autocast_on_the_gpu() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        result = fit(networks.resnet(), DATA, device="cuda", **SETTINGS)
    assert result.history[-1]["loss"] < result.history[0]["loss"]


@pytest.mark.parametrize(("signal", "samples"), [("slopes", 1), ("slopes", 2), ("ranked", 2)])
def test_an_update_never_waits_for_the_gpu(signal: str, samples: int) -> None:
    """Searching and settled."""
    model = networks.resnet().cuda()
    x, y = DATA[0][:64].cuda(), DATA[1][:64].cuda()
    gated = espalier.attach(model, x[:4])
    search = espalier.Search(
        gated.space, cost=gated.cost("macs"), target=0.5, horizon=100, signal=signal, samples=samples, device="cuda"
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    structure = espalier.StructureOptimizer(optimizer, search, gated)
    network = model

    def closure() -> torch.Tensor:
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        return loss

    def updates() -> None:
        structure.step(closure)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                structure.step(closure)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        structure.check()

    updates()
    search.settle()
    network = structure.compact()
    updates()


def test_divergence_is_noticed_on_the_gpu() -> None:
    def infinite(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) * torch.inf

    with pytest.raises(espalier.Diverged, match=r"update 1 of \d+: every loss of an update"):
        fit(networks.resnet(), DATA, device="cuda", **SETTINGS | {"loss": infinite})


def test_where_a_mask_has_no_finite_loss_the_weights_stay() -> None:
    """Those of an optimiser without momentum and decay."""
    model, x, y = networks.spoilt()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    shaping = espalier.shape(model, x[:4], inner, updates=1000, samples=4, penalty=0.0, recipe="paper")
    losses, spoilt = list[torch.Tensor](), list[bool]()

    def closure(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for part in torch.arange(64).repeat(2).split(16):
        before = model[0].weight.detach().clone()
        shaping.step(closure, x[part], y[part])
        spoilt.append(not bool(torch.stack(losses[-4:]).isfinite().all()))
        assert model[0].weight.equal(before) == spoilt[-1]
    assert any(spoilt)


@pytest.mark.parametrize("signal", ["slopes", "ranked"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_theta_is_the_same_recorded_or_not(signal: str, adaptive: bool) -> None:
    """Bit for bit: a recording runs the kernels that it saw."""
    space = espalier.Space.of(500)
    thetas = []
    for recorded in (False, True):
        search = espalier.Search(
            space, target=0.3, horizon=40, signal=signal, samples=2, adaptive=adaptive, device="cuda", even=0.5
        )
        if recorded:
            search.record()
        generator = torch.Generator("cuda").manual_seed(3)
        for update in range(30):
            masks = search.ask()
            losses = torch.rand(2, device="cuda", generator=generator)
            slopes = torch.randn(2, 500, device="cuda", generator=generator)
            if update == 20:
                losses[0] = torch.nan
            search.tell(masks, losses, slopes)
            if update == 10:
                search.load_state_dict(search.state_dict())
        assert int(search.updates) == 30
        thetas.append(search.theta)
    assert thetas[0].equal(thetas[1])
    twin = copy.deepcopy(search)
    twin.tell(twin.ask(), losses, slopes)
    search.tell(search.ask(), losses, slopes)
    assert twin.theta.equal(search.theta)


def test_an_update_of_theta_that_cannot_be_recorded_is_made_as_it_is() -> None:
    thetas = []
    for waits in (False, True):
        search = espalier.Search(50, target=0.3, horizon=40, signal="slopes", samples=1, device="cuda")
        if waits:
            search.record()
            search._learn = lambda *told, learn=search._update: (torch.cuda.synchronize(), learn(*told))[1]
        generator = torch.Generator("cuda").manual_seed(3)

        def tell(search: espalier.Search = search, generator: torch.Generator = generator) -> None:
            for _ in range(6):
                slopes = torch.randn(1, 50, device="cuda", generator=generator)
                search.tell(search.ask(), slopes.sum(1), slopes)

        with pytest.warns(UserWarning, match=r"theta's update is not recorded .*captur") if waits else nullcontext():
            tell()
        thetas.append(search.theta)
        assert int(search.updates) == 6
    assert thetas[0].equal(thetas[1])


def dropping() -> torch.nn.Module:
    return torch.nn.Sequential(networks.resnet(), torch.nn.Dropout(0.1))


@pytest.mark.parametrize(("network", "more"), [
    (networks.resnet, {}), (networks.resnet, {"samples": 2, "recipe": "finetune"}), (dropping, {}),
    (networks.resnet, {"precision": "bf16", "channels_last": True}),
])  # fmt: skip
def test_a_recorded_run_is_like_another(network, more, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(id(graph)), original(graph)))
    losses = []
    for compile in (False, True):
        torch.manual_seed(0)
        replayed.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own advice on precision
            warnings.filterwarnings("error", message="updates are not recorded|this network trains uncompiled")
            result = fit(network(), DATA, device="cuda", compile=compile, **SETTINGS | {"epochs": 6} | more)
        losses.append(result.history[-1]["loss"])
        assert result.share_after <= 0.5
    assert len(set(replayed)) >= 3  # theta, the whole or the masked network, the compact one
    assert losses[1] == pytest.approx(losses[0], rel=0.3, abs=0.05)


class Scaled(torch.nn.Module):
    """Decides in Python: by a number that others change, or by one that changes with every call."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        self.scale, self.counts = 1.0, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.scale = self.scale + 1 / 64
        logits: torch.Tensor = self.layers(x.flatten(1)) * self.scale
        return logits


class Doubled(espalier.Callback):
    """After the second epoch the network gives twice as much, and after the fourth it does not."""

    def on_epoch(self, loop: Any, rows: Any) -> None:
        loop.engine.gated.model.scale = 2.0 if loop.engine.done // 16 in (2, 3) else 1.0


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, which takes an error for its own
@pytest.mark.parametrize("counts", [False, True])
def test_a_long_run_that_is_recorded_is_the_same(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[None] = []
    record = Recorded._record
    monkeypatch.setattr(Recorded, "_record", lambda self, *given: (recordings.append(None), record(self, *given)))
    monkeypatch.setattr("espalier.train.eager.LONG", 90)
    ends, counted = [], []
    for compile in (False, None):
        torch.manual_seed(0)
        recordings.clear()
        model = Scaled(counts).double()
        data = (DATA[0].double(), DATA[1])
        callbacks = [] if counts else [Doubled()]
        result = fit(model, data, device="cuda", compile=compile, callbacks=callbacks, **SETTINGS | {"epochs": 6})
        ends.append([*model.parameters(), result.theta])
        counted.append(len(recordings))
    # Of theta alone; and of the whole network, the masked one, that with another scale, the compact one.
    assert counted[1] == counted[0] if counts else counted[1] >= counted[0] + 4
    for one, other in zip(*ends):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@torch.compiler.allow_in_graph
def waiting(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x * 1


@pytest.mark.filterwarnings("ignore")
def test_what_waits_for_the_gpu_is_not_recorded_and_nothing_is_left_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    given_up = Recording._give_up
    monkeypatch.setattr(Recording, "_give_up", lambda self, reason: (failed.append(reason), given_up(self, reason)))
    monkeypatch.setattr("espalier.train.eager.LONG", 10)
    settings = SETTINGS | {"loss": lambda outputs, targets: F.cross_entropy(waiting(outputs), targets)}
    result = fit(dropping(), DATA, device="cuda", compile=None, **settings)
    assert len(failed) == 1
    assert "captur" in failed[0]
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    after = fit(dropping(), DATA, device="cuda", compile=None, **SETTINGS)
    assert len(failed) == 1
    assert after.finished
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
