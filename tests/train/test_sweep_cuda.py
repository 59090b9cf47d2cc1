"""The batched step on a GPU: compiled and recorded it computes what it does eagerly, and never waits for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from standin import RUNS, SAMPLES, WIDTHS, GatedMLP, data, initial
from torch import nn

import espalier
from espalier.train.batched import SGD, Adam, AdamW, Compute, Steps
from espalier.train.batched.batch import Batch
from espalier.train.batched.chain import Chain, Factors
from espalier.train.batched.inputs import Given, Searched

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHAIN = Chain(tuple((f"{i}.weight", f"{i}.bias") for i in range(3)), (slice(0, 7), slice(7, 12)))
EAGER = Compute(compile=False, capture=False)


def batch(
    compute: Compute,
    dtype: torch.dtype = torch.float64,
    source: Any = None,
    optimizer: Any = None,
    chain: Chain | None = None,
    begin: int = 0,
    signal: str = "ranked",
) -> Batch:
    models, params = initial(dtype)
    if source is None:
        price = {"penalty": [0.0, 0.3, -0.2], "signal": signal}
        search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), seed=3, device="cuda", **price)
        source = Searched(search, [False, True, False] if signal == "slopes" else ())
    x, y = data(dtype)
    return Batch(
        GatedMLP(WIDTHS).call,
        {name: p.cuda() for name, p in params.items()},
        {},
        data=(x.cuda(), y.cuda()),
        seeds=list(range(RUNS)),
        source=source,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer or SGD(0.05),
        schedule=Steps(),
        total=60,
        batch_size=8,
        samples=SAMPLES,
        begin=begin,
        compute=compute,
        chain=chain,
    )


def assert_equal(one: Batch, other: Batch, tolerance: float) -> None:
    for name, p in one.state.params.items():
        torch.testing.assert_close(p, other.state.params[name], rtol=tolerance, atol=tolerance)
    assert int(one.state.done) == int(other.state.done) == one.done == other.done


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "signal"),
    [(SGD(0.05), "ranked"), (Adam(0.01), "ranked"), (AdamW(0.01), "ranked"), (SGD(0.05), "slopes")],
)
def test_recorded_updates_equal_eager_ones(compile: bool, optimizer: Any, signal: str) -> None:
    eager = batch(EAGER, optimizer=optimizer, signal=signal)
    recorded = batch(Compute(compile=compile, capture=True, updates_at_once=7), optimizer=optimizer, signal=signal)
    for updates in (1, 30, 8):  # whole recordings, single ones, and a remainder
        eager.advance(updates)
        recorded.advance(updates)
    assert_equal(eager, recorded, 1e-9)
    torch.testing.assert_close(eager.source.search.theta, recorded.source.search.theta, rtol=1e-12, atol=1e-12)


def test_settled_and_dropped_masks_are_recorded_too() -> None:
    for rate in (0.0, 0.5):
        ends = []
        for compute in (EAGER, Compute(capture=True, updates_at_once=5)):
            source = Given(torch.ones(RUNS, 12, device="cuda"), torch.full((RUNS,), rate, device="cuda"), seed=4)
            engine = batch(compute, source=source)
            engine.advance(23)
            ends.append(engine)
        assert_equal(*ends, 1e-9)


def test_the_whole_network_before_the_search_is_recorded_and_left_again() -> None:
    eager, recorded = batch(EAGER, begin=13), batch(Compute(capture=True, updates_at_once=5), begin=13)
    for engine in (eager, recorded):
        engine.advance(30)
        assert engine.source.search.updates.tolist() == [17] * RUNS
    assert_equal(eager, recorded, 1e-9)
    torch.testing.assert_close(eager.source.search.theta, recorded.source.search.theta, rtol=1e-12, atol=1e-12)


def test_compiled_equals_eager_over_one_update_in_float32() -> None:
    eager, fast = batch(EAGER, torch.float32), batch(Compute(compile=True, capture=False), torch.float32)
    eager.advance(1)
    fast.advance(1)
    assert_equal(eager, fast, 1e-5)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("signal", "chain"), [("ranked", None), ("slopes", None), ("slopes", CHAIN)])
def test_nothing_inside_an_update_waits_for_the_host(signal: str, chain: Chain | None, compile: bool) -> None:
    compute = Compute(compile=compile, capture=True, updates_at_once=4)
    engine = batch(compute, torch.float32, signal=signal, chain=chain)
    engine.advance(12)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.advance(13)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_loss_that_is_not_finite_leaves_its_runs_weights_and_all_other_runs_alone() -> None:
    good, bad = (batch(Compute(capture=True, updates_at_once=4)) for _ in range(2))
    bad.state.params["0.weight"][1] = torch.inf
    kept = {name: p[1].clone() for name, p in bad.state.params.items()}
    for engine in (good, bad):
        engine.advance(12)
    assert bad.state.broken.tolist() == [-1, 1, -1]
    assert bad.state.skipped.tolist() == [0, 12, 0]
    for name, p in bad.state.params.items():
        assert torch.equal(p[1], kept[name])
        assert torch.equal(p[[0, 2]], good.state.params[name][[0, 2]])


def test_a_sweep_from_the_factory_to_the_compact_models(tmp_path: Any) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    settings: dict[str, Any] = {"targets": [0.3, 0.6], "epochs": 6, "batch_size": 8, "quiet": True}
    results = espalier.sweep(
        network, data(torch.float32), validation=data(torch.float32), checkpoint=tmp_path, device="cuda", **settings
    )
    for result in results:
        assert result.share_after <= result.target + 1e-12
        assert result.history[-1]["validation_loss"] == pytest.approx(result.validation_loss, rel=1e-4)
    again = espalier.sweep(
        network, data(torch.float32), validation=data(torch.float32), checkpoint=tmp_path, device="cuda", **settings
    )
    for mine, theirs in zip(again, results, strict=True):
        assert torch.equal(mine.mask, theirs.mask)


@pytest.mark.parametrize(("outputs", "inputs", "depth"), [(70, 100, 64), (10, 65, 130), (64, 784, 32), (3, 5, 7)])
def test_a_gradient_multiplied_where_it_is_applied(outputs: int, inputs: int, depth: int) -> None:
    from espalier.train.batched.fused import descend

    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=rng)

    runs = 3
    left, right = normal(runs, outputs, depth), normal(runs, inputs, depth)
    left[1] = torch.nan  # of the run that does not move
    factors = Factors("weight", "bias", left, right)
    weight, velocity = (normal(runs, outputs, inputs) for _ in range(2))
    expected, slot = weight.clone(), velocity.clone()
    rates, moves = torch.tensor([0.1, 0.2, 0.3], device="cuda"), torch.tensor([True, False, True], device="cuda")
    sgd = SGD(0.1, 0.9, 1e-2)
    sgd.move([expected], [factors.gradients()["weight"]], [[slot]], rates.unsqueeze(0), moves)
    descend(*factors.contiguous(), weight, velocity, rates, moves, sgd, tf32=False)
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(velocity, slot, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight[1], expected[1])


def test_the_slopes_of_a_chain_need_no_gradient_that_is_written_out() -> None:
    """Ten updates by the fused kernel, compiled and recorded, against the mapped step: weights and theta."""
    eager, fast = (
        batch(compute, torch.float32, chain=chain, signal="slopes")
        for compute, chain in ((EAGER, None), (Compute(capture=True, updates_at_once=4), CHAIN))
    )
    assert fast.step.fused
    for engine in (eager, fast):
        engine.advance(13)
    assert_equal(eager, fast, 1e-4)
    torch.testing.assert_close(eager.source.search.theta, fast.source.search.theta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["search", "dropout", "given"])
def test_a_chain_by_hand_compiled_and_recorded_is_the_derived_one(source: str) -> None:
    ends = []
    for compute, chain in ((EAGER, None), (Compute(capture=True, updates_at_once=4), CHAIN)):
        given = None
        if source != "search":
            rate = 0.5 if source == "dropout" else 0.0
            given = Given(torch.ones(RUNS, 12, device="cuda"), torch.full((RUNS,), rate, device="cuda"), seed=4)
        engine = batch(compute, torch.float32, given, chain=chain)
        engine.advance(13)
        ends.append(engine)
    assert_equal(*ends, 2e-5)
