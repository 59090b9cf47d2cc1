"""Law 7 for runs as a batch: R batched runs equal R single runs, written with torch.optim and one mask at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import RUNS, SAMPLES, SIZE, WIDTHS, GatedMLP, Recorder, batch, data, initial
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import espalier
from espalier.data import Stream
from espalier.train.batched.batch import Compute
from espalier.train.batched.inputs import Given, Searched
from espalier.train.batched.step import compiled
from espalier.train.descent import SGD, Adam, AdamW, Constant, Cosine, Steps

PENALTIES = [0.0, 0.3, -0.2]
OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD(0.05, 0.9, 1e-2), lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=1e-2)),
    "heavy ball": (SGD(0.05, 0.8, 0, False), lambda p: torch.optim.SGD(p, 0.05, 0.8)),
    "plain": (SGD(0.05, 0, 1e-2, False), lambda p: torch.optim.SGD(p, 0.05, weight_decay=1e-2)),
    "adam": (Adam(0.01, weight_decay=1e-2), lambda p: torch.optim.Adam(p, 0.01, weight_decay=1e-2)),
    "adamw": (AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
}
SCHEDULES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "constant": (Constant(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    "steps": (Steps(), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 15])),
    "cosine": (Cosine(), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
}


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [*((name, "steps") for name in OPTIMIZERS), ("sgd", "cosine"), ("adam", "constant")]
)
def test_batched_runs_equal_single_runs(optimizer: str, schedule: str) -> None:
    models, params = initial()
    search = espalier.Search(models[0].d, penalty=PENALTIES, samples=SAMPLES, batch=(RUNS,), seed=3)
    source = Recorder(Searched(search))
    engine = batch(params, source, OPTIMIZERS[optimizer][0], SCHEDULES[schedule][0])
    engine.advance(20)
    read = Stream(list(range(RUNS)), 50).take(20, SIZE)
    inputs, targets = data()
    for run, model in enumerate(models):
        alone = espalier.Search(models[0].d, penalty=PENALTIES[run], samples=SAMPLES)
        inner = OPTIMIZERS[optimizer][1](model.model.parameters())
        scheduler = SCHEDULES[schedule][1](inner)
        for update in range(20):
            masks, x, y = source.seen[update][run], inputs[read[update, run]], targets[read[update, run]]
            tensors = dict(model.model.named_parameters())
            losses = torch.stack([nn.functional.cross_entropy(model.call(tensors, m.double(), x), y) for m in masks])
            torch.testing.assert_close(source.told[update][run], losses.detach(), rtol=1e-10, atol=1e-10)
            inner.zero_grad()
            losses.mean().backward()
            inner.step()
            scheduler.step()
            alone.tell(masks, losses.detach())
        torch.testing.assert_close(search.theta[run], alone.theta, rtol=1e-10, atol=1e-10)
        for name, p in model.model.named_parameters():
            torch.testing.assert_close(engine.state.params[name][run], p.detach(), rtol=1e-10, atol=1e-10)


def test_penalty_zero_equals_the_unpenalised_method() -> None:
    thetas = []
    for penalty in (torch.zeros(RUNS), None):
        models, params = initial()
        search = espalier.Search(models[0].d, penalty=penalty, batch=(RUNS,), samples=SAMPLES, seed=1)
        engine = batch(params, Searched(search), SGD(), Constant())
        engine.advance(10)
        thetas.append((search.theta.clone(), engine.state.params))
    assert torch.equal(thetas[0][0], thetas[1][0])
    for name, p in thetas[0][1].items():
        assert torch.equal(p, thetas[1][1][name])


def test_all_gates_open_equals_the_ungated_model_bit_for_bit() -> None:
    widths = [6, 7, 5, 3]

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))

    torch.manual_seed(0)
    plain = network()
    gated = espalier.attach(network(), torch.rand(4, widths[0]))
    ends = []
    for call in (gated.call, lambda tensors, mask, x: torch.func.functional_call(plain, tensors, (x,))):
        params = {name: p.detach().clone()[None] for name, p in plain.named_parameters()}
        engine = batch(params, Given(torch.ones(1, gated.d), torch.zeros(1)), SGD(), Constant(), call=call)
        engine.advance(10)
        ends.append(engine.state.params)
    for name, p in ends[0].items():
        assert torch.equal(p, ends[1][name])


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_diverged_run_keeps_its_weights_and_disturbs_no_other(exactly: bool, optimizer: str) -> None:
    ends = []
    for broken in (False, True):
        models, params = initial()
        if broken:
            params["0.weight"][1] = torch.inf
        kept = {name: p[1].clone() for name, p in params.items()}
        search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), penalty=PENALTIES, seed=3)
        engine = batch(params, Searched(search), OPTIMIZERS[optimizer][0], Constant())
        engine._update = engine.step.exactly if exactly else engine.step
        engine.advance(5)
        ends.append((search.theta.clone(), engine.state.params, engine.state.broken.tolist()))
        if broken:
            assert all(torch.equal(engine.state.params[name][1], p) for name, p in kept.items())
            assert search.diverged.tolist() == [False, True, False]
    assert ends[0][2] == [-1, -1, -1]
    assert ends[1][2] == [-1, 1, -1]
    for run in (0, 2):
        assert torch.equal(ends[0][0][run], ends[1][0][run])
        for name, p in ends[0][1].items():
            assert torch.equal(p[run], ends[1][1][name][run])


def one_update(update: Callable[[Any], Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    models, params = initial(dtype)
    search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), penalty=PENALTIES, seed=3)
    engine = batch(params, Searched(search), SGD(0.05), Steps())
    engine._update = update(engine.step)
    engine.advance(1)
    return engine.state.params, search.theta


def test_the_step_compiles_whole_once_and_equals_eager() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    models, params = initial(torch.float32)
    search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), penalty=PENALTIES, seed=3)
    engine = batch(params, Searched(search), SGD(0.05), Steps())
    engine._update = compiled(engine.step, backend=counter)
    engine.advance(1)
    frames = counter.frame_count  # not always 1: the compiler may look at a frame twice before it is content
    expected, theta = one_update(lambda step: step.exactly, torch.float32)
    for name, p in expected.items():
        torch.testing.assert_close(engine.state.params[name], p, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(search.theta, theta, rtol=1e-5, atol=1e-5)
    engine.advance(11)
    assert counter.frame_count == frames > 0


@pytest.mark.long
def test_compiled_for_this_machine_equals_eager() -> None:
    found, theta = one_update(compiled, torch.float32)
    expected, eager = one_update(lambda step: step.exactly, torch.float32)
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theta, eager, rtol=1e-5, atol=1e-5)


def test_a_run_that_has_skipped_updates_goes_on_bit_for_bit() -> None:
    """Adam corrects for the number of its steps, which is that of the updates less the skipped ones."""
    mask = torch.ones(RUNS, GatedMLP(WIDTHS).d)
    ours, again = (batch(initial()[1], Given(mask, torch.zeros(RUNS)), AdamW(0.01), Constant()) for _ in range(2))
    ours.advance(3)
    ours.state.skipped[1] = 2
    ours.advance(1)
    saved = copy.deepcopy(ours.state_dict())
    again.load_state_dict(saved)
    for engine in (ours, again):
        engine.advance(3)
    for name, p in ours.state.params.items():
        assert torch.equal(again.state.params[name], p)


def test_settled_updates_read_samples_times_as_many_examples_under_the_one_mask() -> None:
    models, params = initial()
    search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), seed=3)
    engine = batch(params, Searched(search), SGD(0.05, 0, 0, False), Constant())
    engine.advance(2)
    mask = search.select()
    engine.settle(mask)
    before = {name: p.clone() for name, p in engine.state.params.items()}
    theta = search.theta.clone()
    stream = Stream(list(range(RUNS)), 50)
    stream.position = 2 * SIZE
    read = stream.take(1, SAMPLES * SIZE)[0]
    engine.advance(1)
    assert engine.feed.stream.position == 2 * SIZE + SAMPLES * SIZE
    assert torch.equal(search.theta, theta)
    inputs, targets = data()
    for run in range(RUNS):
        assert len(set(read[run].tolist())) == SAMPLES * SIZE
        tensors = {name: p[run].clone().requires_grad_() for name, p in before.items()}
        out = models[run].call(tensors, mask[run].double(), inputs[read[run]])
        nn.functional.cross_entropy(out, targets[read[run]]).backward()
        for name, p in tensors.items():
            expected = p.detach() - 0.05 * p.grad
            torch.testing.assert_close(engine.state.params[name][run], expected, rtol=1e-10, atol=1e-10)


def test_dropout_beside_a_fixed_mask_and_all_open() -> None:
    models, params = initial()
    d = models[0].d
    mask = torch.ones(RUNS, d)
    mask[2, ::2] = 0
    rate = torch.tensor([0.5, 0.0, 0.0])
    source = Recorder(Given(mask, rate, seed=4))
    engine = batch(params, source, SGD(0.05, 0, 0, False), Constant())
    before = {name: p.clone() for name, p in params.items()}
    engine.advance(1)
    masks = source.seen[0]
    assert masks.shape == (RUNS, SIZE * SAMPLES, d)
    assert set(masks[0].unique().tolist()) == {0.0, 2.0}
    assert 0.3 < (masks[0] == 0).float().mean() < 0.7
    assert torch.equal(masks[1], torch.ones_like(masks[1]))
    assert torch.equal(masks[2], mask[2].expand_as(masks[2]))
    inputs, targets = data()
    read = Stream(list(range(RUNS)), 50).take(1, SAMPLES * SIZE)[0]
    for run in range(RUNS):
        tensors = {name: p[run].clone().requires_grad_() for name, p in before.items()}
        out = models[run].call(tensors, masks[run].double(), inputs[read[run]], each=True)
        nn.functional.cross_entropy(out, targets[read[run]]).backward()
        for name, p in tensors.items():
            expected = p.detach() - 0.05 * p.grad
            torch.testing.assert_close(engine.state.params[name][run], expected, rtol=1e-10, atol=1e-10)


def test_permuted_losses_reach_the_permuted_runs_only() -> None:
    thetas = []
    for permuted in ([False] * 3, [False, True, False]):
        models, params = initial()
        search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), seed=3)
        told: list[Tensor] = []
        learn = search.learn
        search.learn = lambda m, losses, *_, told=told, learn=learn: (told.append(losses), learn(m, losses))[1]  # type: ignore[method-assign]
        source = Recorder(Searched(search, permuted))
        batch(params, source, SGD(0.05), Constant()).advance(6)
        for given, seen in zip(source.told, told):
            assert torch.equal(given.sort(-1).values, seen.sort(-1).values)
            assert torch.equal(given[[0, 2]], seen[[0, 2]])
        thetas.append(any(not torch.equal(given[1], seen[1]) for given, seen in zip(source.told, told)))
    assert thetas == [False, True]


def test_bfloat16_computes_in_it_and_keeps_float32_masters() -> None:
    models, params = initial(torch.float32)
    dtypes = set()
    inner = GatedMLP([6, 7, 5, 3]).call

    def call(tensors: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
        dtypes.update({t.dtype for t in tensors.values()} | {mask.dtype, x.dtype})
        return inner(tensors, mask, x)

    search = espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,), seed=3)
    engine = batch(params, Searched(search), SGD(0.05), Constant(), Compute(precision="bf16"), call=call)
    before = torch.get_float32_matmul_precision()
    engine.advance(20)
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in engine.state.params.values()} == {torch.float32}
    start, _ = engine.read_sums()
    engine.advance(80)
    assert (engine.read_sums()[0] < start).all()
    assert torch.get_float32_matmul_precision() == before


def test_deterministic_mode_is_on_inside_and_put_back() -> None:
    seen = []
    inner = GatedMLP([6, 7, 5, 3]).call

    def call(tensors: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return inner(tensors, mask, x)

    models, params = initial()
    source = Searched(espalier.Search(models[0].d, samples=SAMPLES, batch=(RUNS,)))
    batch(params, source, SGD(), Constant(), Compute(deterministic=True), call=call).advance(1)
    assert seen
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
