"""Slopes by the gates in a batch of runs: what autograd gives one run under one mask, from slopes to results."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import networks
import pytest
import standin
import torch
from standin import RUNS, SAMPLES, SIZE, Recorder
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import espalier
from espalier import Search, StructureOptimizer
from espalier.data import Stream
from espalier.gates.masking import Channels
from espalier.train import PRESETS, recipes
from espalier.train.batched import SGD, Compute, Run, batch_engine
from espalier.train.batched.batch import Batch
from espalier.train.batched.chain import Chain, Factors, chain_of
from espalier.train.batched.inputs import Searched
from espalier.train.batched.step import Differential, Step, compiled, cross_entropy
from espalier.train.descent import Constant
from espalier.train.gradients import Update

VECTORS, _ = networks.digit_vectors(256)
IMAGES, _ = networks.digit_images(256)
DATA = {"vectors": (VECTORS[0].double(), VECTORS[1]), "images": (IMAGES[0].double(), IMAGES[1])}


def mlp() -> nn.Module:
    """Its initial weights are those of torch's present seed, unlike those of the shared networks."""
    return nn.Sequential(nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 10)).double()


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Conv2d(5, 6, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 10),
    ).double()  # fmt: skip


def resnet() -> nn.Module:
    """Channels that several layers read."""
    return networks.resnet(width=3, seed=torch.initial_seed()).double()


class Encoder(nn.Module):
    """Rows of an image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 5))
        self.head = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = (torch.softmax(q @ k.transpose(2, 3), -1) @ v).transpose(1, 2).flatten(2)  # torch maps no fused attention
        return self.head(torch.tanh(self.out(y)).mean(1))


WAYS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "chain": (mlp, "vectors", {}),
    "mapped": (mlp, "vectors", {}),
    "conv": (conv, "images", {}),
    "resnet": (resnet, "images", {}),
    "blocks of units": (mlp, "vectors", {"round_to": 4}),  # of nine units the last block holds one
    "blocks of channels": (conv, "images", {"round_to": 2}),
    "heads": (lambda: Encoder().double(), "images", {}),
    "residual blocks": (resnet, "images", {"kinds": ("channels", "blocks")}),
}
WIDE = ("blocks of units", "blocks of channels", "heads", "residual blocks")


class Case:
    """A network of every run as one stack, and each by itself with gates of its own."""

    def __init__(self, way: str, runs: int = RUNS) -> None:
        factory, kind, how = WAYS[way]
        self.data = DATA[kind]
        example = self.data[0][:4]
        self.gated, self.params, fixed = batch_engine.stacked(
            factory, [Run(seed) for seed in range(runs)], example, torch.device("cpu"), how=how
        )
        assert not fixed
        how = how | ({"round_to": self.gated.blocks} if self.gated.blocks else {})  # those of the first run
        self.singles = [batch_engine.build(factory, Run(seed), example, how=how) for seed in range(runs)]
        first = {name: p[0] for name, p in self.params.items()}
        gates = [where for _, where in self.gated.space.bits]
        self.chain: Chain | None = None
        if way == "chain":
            self.chain = chain_of(self.gated.model, gates, self.gated.call, first, example)
            assert self.chain is not None

    def sized(self, masks: Tensor, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor | None]:
        """By the batched road: gradients, losses, slopes and their sizes; x ``(R, S, B, ...)``."""
        if self.chain is None:
            differential = Differential(self.gated.call, cross_entropy, channels=self.gated.channels)
            grads, (losses, _), both = differential(self.params, {}, masks, x, y, each=False, slopes=True)
            assert both is not None
            return grads, losses, *both
        factors, (losses, _), slopes = self.chain(self.params, masks, x, y, slopes=True)
        return {name: g for one in factors for name, g in one.gradients().items()}, losses, slopes, None

    def slopes(self, masks: Tensor, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        return self.sized(masks, x, y)[:3]


def examples(data: tuple[Tensor, Tensor], runs: int, samples: int, size: int) -> tuple[Tensor, Tensor]:
    index = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(2))[: runs * samples * size]
    shape = index.view(runs, samples, size)
    return data[0][shape], data[1][shape]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_slopes_are_those_of_each_run_alone_closed_gates_included(way: str, samples: int) -> None:
    case = Case(way)
    rng = torch.Generator().manual_seed(1)
    masks = (torch.rand(RUNS, samples, case.gated.space.d, generator=rng) < 0.7).float()
    x, y = examples(case.data, RUNS, samples, 6)
    grads, losses, slopes, sizes = case.sized(masks, x, y)
    assert (sizes is not None) == (way in WIDE)
    for run, gated in enumerate(case.singles):
        parts = iter(zip(x[run], y[run], strict=True))
        parameters = dict(gated.model.named_parameters())

        def closure(gated: Any = gated, parts: Any = parts) -> Tensor:
            inputs, targets = next(parts)
            loss = F.cross_entropy(gated.model(inputs), targets)
            loss.backward()
            return loss

        update = Update(gated, masks[run], [()], list(parameters.values()), closure, slopes=True)
        alone, sized = update.one_at_a_time()
        assert sized is not None
        by_gate, own_sizes = sized
        torch.testing.assert_close(losses[run], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slopes[run], by_gate, rtol=1e-12, atol=1e-12)
        if sizes is None:
            assert own_sizes is None
        else:
            torch.testing.assert_close(sizes[run], own_sizes, rtol=1e-12, atol=1e-12)
        for name, parameter in parameters.items():
            torch.testing.assert_close(grads[name][run], parameter.grad, rtol=1e-11, atol=1e-12)
    assert (slopes[masks == 0].abs() > 1e-6).any()


def test_an_example_that_is_not_a_number_is_one_masks_own_trouble() -> None:
    for way in ("mapped", "chain"):
        case = Case(way)
        masks = torch.ones(RUNS, 2, case.gated.space.d)
        masks[:, :, ::3] = 0.0
        x, y = examples(case.data, RUNS, 2, 6)
        _, _, expected = case.slopes(masks[:, 1:], x[:, 1:], y[:, 1:])
        x = x.clone()
        x[0, 0, 0, 0] = torch.nan
        _, losses, slopes = case.slopes(masks, x, y)
        assert losses.isfinite().tolist() == [[False, True], [True, True], [True, True]]
        torch.testing.assert_close(slopes[:, 1:], expected, rtol=1e-12, atol=1e-12)


# Updates


SEARCH: dict[str, dict[str, Any]] = {
    "target": {"target": [0.3, 0.5, 0.7], "horizon": 30, "even": 0.5},
    "penalty": {"penalty": [0.0, 0.3, -0.2]},
    "adaptive": {"penalty": [0.0, 0.3, -0.2], "adaptive": True},
    "first-order": {"penalty": [0.0, 0.3, -0.2], "signal": "first-order"},
}


def engine(case: Case, price: dict[str, Any], loss: Any = F.cross_entropy, **given: Any) -> tuple[Batch, Search, Any]:
    settings = {"samples": SAMPLES, "batch": (RUNS,), "seed": 3, "initial": 0.8, "signal": "slopes"} | price
    search = Search(case.gated.space, cost=case.gated.cost("weights"), **settings)
    source = Recorder(Searched(search, given.pop("permuted", ())))
    batch = Batch(
        case.gated.call,
        {name: p.clone() for name, p in case.params.items()},
        {},
        data=given.pop("data", case.data),
        seeds=list(range(len(next(iter(case.params.values()))))),
        source=source,
        loss=loss,
        optimizer=SGD(0.05, 0.9, 1e-2),
        schedule=Constant(),
        total=20,
        batch_size=given.pop("batch_size", SIZE),
        samples=given.pop("samples", SAMPLES),
        chain=case.chain,
        channels=case.gated.channels,
        even=search.even,
        **given,
    )
    if case.chain is not None:
        assert batch.step.chain is not None
        batch._update = batch.step  # as on a GPU; on a CPU the mapped step is taken
    return batch, search, source


def alone(search: dict[str, Any], gated: Any, run: int) -> Search:
    """The same search of one run."""
    own = {name: value[run] if isinstance(value, list) else value for name, value in search.items()}
    settings = {"samples": SAMPLES, "initial": 0.8, "signal": "slopes"} | own
    return Search(gated.space, cost=gated.cost("weights"), **settings)


@pytest.mark.parametrize(
    ("way", "price"),
    [
        *itertools.product(("chain", "mapped"), SEARCH),
        ("conv", "target"),
        ("resnet", "penalty"),
        *((way, "target") for way in WIDE),
    ],
)
def test_batched_runs_equal_single_ones(way: str, price: str) -> None:
    """Twenty updates of StructureOptimizer, given the same masks, batches and initial weights."""
    case = Case(way)
    batch, search, source = engine(case, SEARCH[price])
    batch.advance(20)
    assert batch.feed.stream.position == 20 * SAMPLES * SIZE
    read = Stream(list(range(RUNS)), len(case.data[0])).take(20, SAMPLES * SIZE)
    for run, gated in enumerate(case.singles):
        single = alone(SEARCH[price], gated, run)
        given = iter([masks[run] for masks in source.seen])
        single.ask = lambda given=given: next(given)  # type: ignore[method-assign]
        parameters = dict(gated.model.named_parameters())
        inner = torch.optim.SGD(parameters.values(), 0.05, 0.9, nesterov=True, weight_decay=1e-2)
        structure = StructureOptimizer(inner, single, gated)
        for update in range(20):
            parts = iter(read[update, run].view(SAMPLES, SIZE))

            def closure(gated: Any = gated, parts: Any = parts) -> Tensor:
                index = next(parts)
                loss = F.cross_entropy(gated.model(case.data[0][index]), case.data[1][index])
                loss.backward()
                return loss

            structure.step(closure)
        torch.testing.assert_close(search.theta[run], single.theta, rtol=1e-10, atol=1e-10)
        for name, parameter in parameters.items():
            torch.testing.assert_close(batch.state.params[name][run], parameter.detach(), rtol=1e-10, atol=1e-10)


def blow_up(out: Tensor, y: Tensor) -> Tensor:
    """Infinite, with a gradient that is not a number, wherever the first output is large."""
    return F.cross_entropy(out, y) / (out[:, 0].mean() <= 0.19).to(out.dtype)


def test_theta_follows_the_slopes_of_finite_losses_where_the_weights_stay() -> None:
    case = Case("mapped")
    batch, search, source = engine(case, SEARCH["penalty"], blow_up)
    batch.advance(10)
    finite = torch.stack(source.told).isfinite()  # (updates, R, samples)
    assert (finite.any(-1) & ~finite.all(-1)).any(), "the case is to occur"
    read = Stream(list(range(RUNS)), len(case.data[0])).take(10, SAMPLES * SIZE)
    for run, gated in enumerate(case.singles):
        single = alone(SEARCH["penalty"], gated, run)
        parameters = dict(gated.model.named_parameters())
        inner = torch.optim.SGD(parameters.values(), 0.05, 0.9, nesterov=True, weight_decay=1e-2)
        for update in range(10):
            parts = iter(read[update, run].view(SAMPLES, SIZE))

            def closure(gated: Any = gated, parts: Any = parts) -> Tensor:
                index = next(parts)
                loss = blow_up(gated.model(case.data[0][index]), case.data[1][index])
                loss.backward()
                return loss

            masks = source.seen[update][run]
            update_of = Update(gated, masks, [()], list(parameters.values()), closure, slopes=True)
            losses, sized = update_of.one_at_a_time()
            single.learn(masks, losses, *(sized or ()))
            if bool(losses.isfinite().all()):
                inner.step()
        torch.testing.assert_close(search.theta[run], single.theta, rtol=1e-10, atol=1e-10)
        for name, parameter in parameters.items():
            torch.testing.assert_close(batch.state.params[name][run], parameter.detach(), rtol=1e-10, atol=1e-10)
    assert torch.equal(batch.state.skipped, (~finite.all(-1)).sum(0))
    assert torch.equal(search.diverged, (~finite.any(-1)).any(0))


@pytest.mark.parametrize("way", ["chain", "mapped", "mapped, unseen"])
def test_a_diverged_run_keeps_its_weights_and_disturbs_no_other(way: str) -> None:
    ends = []
    for broken in (False, True):
        case = Case(way.split(",")[0])
        if broken:
            case.params["0.weight"][1] = torch.inf
        batch, search, _ = engine(case, SEARCH["penalty"])
        if "unseen" in way:  # as on a GPU, without a look at the losses
            batch._update = batch.step
        kept = {name: p[1].clone() for name, p in batch.state.params.items()}
        batch.advance(5)
        ends.append((search.theta.clone(), batch.state.params, batch.state.broken.tolist()))
        if broken:
            assert all(torch.equal(batch.state.params[name][1], p) for name, p in kept.items())
            assert search.diverged.tolist() == [False, True, False]
    assert ends[0][2] == [-1, -1, -1]
    assert ends[1][2] == [-1, 1, -1]
    for run in (0, 2):
        assert torch.equal(ends[0][0][run], ends[1][0][run])
        for name, p in ends[0][1].items():
            assert torch.equal(p[run], ends[1][1][name][run])


@pytest.mark.parametrize("way", ["chain", "mapped"])
def test_the_step_compiles_whole_once_and_equals_eager(way: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    ends = []
    for backend in (None, counter):
        batch, search, _ = engine(Case(way), SEARCH["target"], permuted=[False, True, False])
        batch.source = batch.source.source  # what a test remembers is not compiled
        batch._update = batch.step if backend is None else compiled(batch.step, backend=backend)
        batch.advance(1)
        frames = counter.frame_count
        batch.advance(4)
        ends.append((batch.state.params, search.theta))
    assert counter.frame_count == frames > 0
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-10, atol=1e-10)
    for name, p in ends[0][0].items():
        torch.testing.assert_close(p, ends[1][0][name], rtol=1e-10, atol=1e-10)


def test_factors_that_a_kernel_applies_give_slopes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: two factors of each weight's gradient leave the update, laid out plainly; torch applies them."""

    def descend(left: Tensor, right: Tensor, p: Tensor, v: Tensor, *rest: Any, tf32: bool) -> None:
        assert all(part.is_contiguous() for part in (left, right))
        rates, moves, sgd = rest
        gradient = Factors("weight", "bias", left, right).gradients()["weight"]
        sgd.move([p], [gradient], [[v]], rates.unsqueeze(0), moves)

    monkeypatch.setitem(sys.modules, "espalier.train.batched.fused", SimpleNamespace(descend=descend))
    ends = []
    for fused in (False, True):
        batch, search, _ = engine(Case("chain"), SEARCH["target"])
        batch.step.fused = fused
        batch.advance(10)
        ends.append((batch.state.params, search.theta))
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-12, atol=1e-12)
    for name, p in ends[0][0].items():
        torch.testing.assert_close(p, ends[1][0][name], rtol=1e-12, atol=1e-12)


def test_permuted_slopes_reach_the_permuted_runs_only() -> None:
    case = Case("mapped")
    batch, search, source = engine(case, SEARCH["penalty"], permuted=[False, True, False])
    seen: list[Tensor] = []
    learn = search.learn
    search.learn = lambda m, losses, slopes, _: (seen.append(slopes), learn(m, losses, slopes))[1]  # type: ignore[method-assign]
    batch.advance(6)
    for given, shuffled in zip(source.slopes, seen, strict=True):
        assert torch.equal(given.sort(-1).values, shuffled.sort(-1).values)
        assert torch.equal(given[[0, 2]], shuffled[[0, 2]])
        assert not torch.equal(given[1], shuffled[1])
        assert sorted(given[1].T.tolist()) == sorted(shuffled[1].T.tolist())  # all masks of an update alike
    assert not torch.equal(seen[0][1].argsort(-1), seen[1][1].argsort(-1))


@pytest.mark.parametrize(("n", "size", "read"), [(256, 8, 32), (30, 8, 28), (30, 1, 4), (7, 2, 7)])
def test_parts_are_of_one_size_and_hold_two_examples(n: int, size: int, read: int) -> None:
    """Where the data are too few for that, every mask reads all that an update does."""
    case = Case("mapped")
    batch, _, source = engine(case, SEARCH["penalty"], data=(case.data[0][:n], case.data[1][:n]), batch_size=size)
    batch.advance(1)
    assert batch.examples == batch.feed.stream.position == read
    index = Stream(list(range(RUNS)), n).take(1, read)[0]
    each = read // SAMPLES if read >= 2 * SAMPLES else read
    x = case.data[0][index]
    for sample in range(SAMPLES):
        own = slice(sample * each, (sample + 1) * each) if read >= 2 * SAMPLES else slice(None)
        first = {name: p[0] for name, p in case.params.items()}
        out = case.gated.call(first, source.seen[0][0, sample].double(), x[0, own])
        expected = F.cross_entropy(out, case.data[1][index[0, own]])
        torch.testing.assert_close(source.told[0][0, sample], expected, rtol=1e-12, atol=1e-12)
    assert float(batch.state.sums[3, 0]) == (read if read >= 2 * SAMPLES else SAMPLES * read)  # predictions


def test_in_bfloat16() -> None:
    models, params = standin.initial(torch.float32)
    search = Search(models[0].d, samples=SAMPLES, batch=(RUNS,), seed=3, signal="slopes", initial=0.9)
    batch = standin.batch(params, Searched(search), SGD(0.05), Constant(), Compute(precision="bf16"))
    before = search.theta.clone()
    batch.advance(20)
    start, _ = batch.read_sums()
    batch.advance(80)
    assert (batch.read_sums()[0] < start).all()
    assert not torch.equal(search.theta, before)


# Whole runs


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("way", ["chain", "mapped", "conv"])
@pytest.mark.parametrize("preset", ["default", "finetune"])
def test_a_sweep_of_one_run_is_fit(way: str, samples: int, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All phases: the whole network, the search, the settled structure. The masks of a sweep come from a seed of its
    own; here it is that of the single run."""
    factory, kind, _ = WAYS[way]
    monkeypatch.setattr(batch_engine.zlib, "crc32", lambda _: 5)
    if way == "chain":
        monkeypatch.setattr(Step, "exactly", Step.__call__)
    settings: dict[str, Any] = {"epochs": 4, "batch_size": 16, "samples": samples, "quiet": True, "recipe": preset}
    (ours,) = espalier.sweep(factory, DATA[kind], targets=[0.4], seeds=[5], device="cpu", **settings)
    torch.manual_seed(5)
    theirs = espalier.fit(factory(), DATA[kind], loss=F.cross_entropy, target=0.4, seed=5, device="cpu", **settings)
    torch.testing.assert_close(ours.theta, theirs.theta, rtol=1e-9, atol=1e-9)
    assert torch.equal(ours.mask, theirs.mask)
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert ours.share_after == pytest.approx(theirs.share_after)


def test_the_default_is_that_of_fit() -> None:
    given: dict[str, Any] = {"targets": [0.4], "epochs": 1, "batch_size": 16, "quiet": True, "device": "cpu"}
    (plain,) = espalier.sweep(mlp, DATA["vectors"], **given)
    (named,) = espalier.sweep(mlp, DATA["vectors"], recipe="default", **given)
    (ranked,) = espalier.sweep(mlp, DATA["vectors"], recipe="ranked", **given)
    assert recipes.read(None).signal == "slopes"
    assert torch.equal(plain.theta, named.theta)
    assert not torch.equal(plain.theta, ranked.theta)
    runs = [Run(0, penalty=0.1), Run(0, all_open=True), Run(0, target=0.4)]
    given = {"epochs": 1, "batch_size": 16, "quiet": True, "device": "cpu"}
    plain, named = (espalier.sweep(mlp, DATA["vectors"], runs=runs, recipe=p, **given) for p in (None, "ranked"))
    for one, other in zip(plain, named, strict=True):
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_batch_that_is_saved_in_the_search_goes_on_bit_for_bit() -> None:
    case = Case("mapped")
    ours, search, _ = engine(case, SEARCH["target"], permuted=[False, True, False])
    ours.source = ours.source.source
    ours.advance(6)
    saved, state = copy.deepcopy(ours.state_dict()), copy.deepcopy(search.state_dict())
    ours.advance(6)
    again, second, _ = engine(case, SEARCH["target"], permuted=[False, True, False])
    again.source = again.source.source
    assert isinstance(again.source, Searched)
    second.load_state_dict(state)
    again.load_state_dict(saved)
    again.advance(6)
    assert torch.equal(second.theta, search.theta)
    for name, p in ours.state.params.items():
        assert torch.equal(again.state.params[name], p)


@pytest.mark.parametrize("even", [0.0, 0.5])
def test_fit_and_sweep_make_sizes_by_the_recipe(monkeypatch: pytest.MonkeyPatch, even: float) -> None:
    evens = list[float]()
    sized = Channels.sized
    monkeypatch.setattr(Channels, "sized", lambda own, slopes, even: (evens.append(even), sized(own, slopes, even))[1])
    data = torch.randn(64, 6), torch.arange(64) % 3
    given: dict[str, Any] = {
        "target": 0.5, "recipe": replace(PRESETS["default"], even=even), "epochs": 4, "batch_size": 16, "quiet": True
    }  # fmt: skip

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    espalier.fit(network(), data, round_to=4, **given)
    single = len(evens)
    targets = {"targets": [given.pop("target")]}
    espalier.sweep(network, data, round_to=4, **targets, **given)
    assert 0 < single < len(evens)
    assert set(evens) == {even}


@pytest.mark.parametrize("form", ["linear", "normed"])
def test_a_run_of_a_sweep_has_the_rows_of_one_alone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several masks of slopes, and an epoch in which the search begins and one in which it settles: losses and errors
    of all masks, and statistics of BatchNorm of as many examples at once."""
    monkeypatch.setattr(batch_engine, "zlib", SimpleNamespace(crc32=lambda _: 3))  # the masks of fit(seed=3)
    inputs, targets = networks.digit_vectors(640)[0]

    def network() -> nn.Module:
        norms = [nn.BatchNorm1d(9)] if form == "normed" else []
        return nn.Sequential(nn.Linear(64, 9), *norms, nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 10)).double()

    recipe = espalier.train.Recipe(
        signal="slopes", samples=2, begin=0.125, ramp=0.5, settle=0.375, ramp_updates=0, initial=0.9, drops=None
    )
    given = {"recipe": recipe, "epochs": 4, "batch_size": 32, "samples": 2, "loss": cross_entropy, "quiet": True}
    data = inputs.double(), targets
    (one,) = espalier.sweep(network, data, seeds=[3], targets=[0.6], **given)
    torch.manual_seed(3)
    other = espalier.fit(network(), data, seed=3, target=0.6, **given)
    torch.testing.assert_close(one.theta, other.theta, rtol=0, atol=1e-9)
    for ours, theirs in zip(one.history, other.history, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours["error"] == pytest.approx(theirs["error"], abs=1e-12)
    for ours, theirs in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
