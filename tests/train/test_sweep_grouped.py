"""A network that computes all runs and masks together trains as one that is mapped over them, compiled and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from standin import RUNS, SAMPLES, SIZE, WIDTHS, GatedMLP, data, initial
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import espalier
from espalier.space import BadInput
from espalier.train.batched.batch import Batch
from espalier.train.batched.inputs import Given, Searched
from espalier.train.batched.step import compiled
from espalier.train.descent import SGD, Steps
from oracle.gradients import Together


def together(params: dict[str, Tensor], masks: Tensor, x: Tensor) -> Tensor:
    """params ``(R, ...)``, masks ``(R, S, d)``, x ``(R, B, inputs)``: logits ``(R, S, B, classes)``."""
    start, x = 0, x.unsqueeze(1)
    for i, width in enumerate(WIDTHS[1:]):
        x = x @ params[f"{i}.weight"].mT.unsqueeze(1) + params[f"{i}.bias"][:, None, None]
        if i < len(WIDTHS) - 2:
            x = x.relu() * masks[:, :, None, start : start + width]
            start += width
    return x


WAYS = {"mapped": None, "own": Together(together)}


def trained(way: str, updates: int, backend: Any = None, dtype: torch.dtype = torch.float64) -> tuple[Batch, Any]:
    models, params = initial(dtype)
    search = espalier.Search(models[0].d, penalty=[0.0, 0.3, -0.2], samples=SAMPLES, batch=(RUNS,), seed=3)
    engine = Batch(
        GatedMLP(WIDTHS).call,
        params,
        {},
        data=data(dtype),
        seeds=list(range(RUNS)),
        source=Searched(search),
        loss=nn.functional.cross_entropy,
        optimizer=SGD(0.05),
        schedule=Steps(),
        total=20,
        batch_size=SIZE,
        samples=SAMPLES,
        gradient=WAYS[way],
    )
    if backend is not None:
        engine._update = compiled(engine.step, backend=backend)
    engine.advance(updates)
    return engine, search


@pytest.mark.parametrize("way", ["own"])
def test_together_is_the_same_as_mapped(way):
    (ours, search), (theirs, other) = trained(way, 20), trained("mapped", 20)
    for name, p in theirs.state.params.items():
        torch.testing.assert_close(ours.state.params[name], p, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(search.theta, other.theta, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.state.sums, theirs.state.sums)


@pytest.mark.parametrize("way", ["own"])
def test_the_rest_of_an_update_compiles_once_without_the_network(way):
    counter = CompileCounterWithBackend("aot_eager")
    ours, search = trained(way, 1, counter, torch.float32)
    frames = counter.frame_count
    expected, other = trained("mapped", 1, None, torch.float32)
    for name, p in expected.state.params.items():
        torch.testing.assert_close(ours.state.params[name], p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(search.theta, other.theta)
    assert not any("mm" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    ours.advance(5)
    assert counter.frame_count == frames > 0


@pytest.mark.parametrize("way", ["own"])
def test_a_mask_for_each_example_is_refused(way):
    engine, search = trained(way, 1)
    dropped = Given(search.select(), torch.full((RUNS,), 0.5))
    with pytest.raises(BadInput, match="masks that all examples share"):
        engine._start(dropped)


@pytest.mark.parametrize("way", ["own"])
def test_a_mask_without_a_finite_loss_leaves_the_weights_alone(way):
    """As the mapped network does it."""
    ends = []
    for one in (way, "mapped"):
        engine, search = trained(one, 1)
        with torch.no_grad():
            engine.state.params["2.weight"][1, :, 0] = 1e308  # infinite where the unit it reads is open and large
            engine.state.params["1.bias"][1, 0] = 10.0
        engine.advance(1)
        assert SAMPLES < int(engine.state.sums[1, 1]) < 2 * SAMPLES  # some masks of the second update, not all
        ends.append((engine.state.params, search.theta, engine.state.skipped, engine.state.broken))
    for name, p in ends[0][0].items():
        torch.testing.assert_close(p, ends[1][0][name], rtol=1e-9, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])
    assert torch.equal(ends[0][3], ends[1][3])
