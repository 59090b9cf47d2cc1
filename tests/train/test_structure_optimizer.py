"""StructureOptimizer: one update of weights and theta, from any closure, around any torch optimiser."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier import Search, StructureOptimizer
from espalier.train.checkpoint import Checkpoint

(X, Y), _ = networks.digit_vectors(640)


def batch(update: int, size: int = 32) -> networks.Pair:
    start = update * size % len(X)
    return X[start : start + size], Y[start : start + size]


def parts(penalty: float = 0.1, seed: int = 0, adam: bool = False, **search):
    model = networks.mlp(seed=seed)
    gated = espalier.attach(model, X[:4])
    kind = torch.optim.AdamW(model.parameters(), 3e-3) if adam else sgd(model)
    return model, gated, kind, Search(gated.space, cost=gated.cost("weights"), penalty=penalty, seed=3, **search)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


def closure_of(model: nn.Module, update: int, optimizer: torch.optim.Optimizer | None = None):
    x, y = batch(update)

    def closure() -> torch.Tensor:
        if optimizer is not None:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def test_a_step_is_the_paper_s_update_written_out() -> None:
    model, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    by_hand, gated_by_hand, plain, asked = parts()
    for update in range(20):
        mean = structure.step(closure_of(model, update, structure))
        masks, (x, y) = asked.ask(), batch(update)
        tensors = dict(by_hand.named_parameters())
        losses = torch.stack([F.cross_entropy(gated_by_hand.call(tensors, mask, x), y) for mask in masks])
        plain.zero_grad()
        losses.mean().backward()
        plain.step()
        asked.tell(masks, losses.detach())
        assert float(mean) == pytest.approx(float(losses.detach().mean()), rel=1e-6)
        assert search.theta.equal(asked.theta)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_closure_may_zero_gradients_or_not() -> None:
    found = []
    for zeroes in (True, False):
        model, gated, inner, search = parts()
        structure = StructureOptimizer(inner, search, gated)
        for update in range(5):
            structure.step(closure_of(model, update, structure if zeroes else None))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert found[0].equal(found[1])


def test_all_gates_open_is_plain_training_bit_for_bit() -> None:
    model, gated, inner, search = parts(penalty=0.0, initial=1.0, margin=0.0)
    structure = StructureOptimizer(inner, search, gated)
    plain = networks.mlp()
    optimizer = sgd(plain)
    for update in range(20):
        structure.step(closure_of(model, update))
        optimizer.zero_grad()
        closure_of(plain, update)()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.equal(theirs)
    assert bool((search.theta == 1).all())


def test_penalty_0_is_no_penalty_step_by_step() -> None:
    model, gated, inner, search = parts(penalty=0.0)
    other, gated_other, plain, _ = parts()
    bare = Search(gated_other.space, seed=3)
    for update in range(20):
        StructureOptimizer(inner, search, gated).step(closure_of(model, update))
        StructureOptimizer(plain, bare, gated_other).step(closure_of(other, update))
        assert search.theta.equal(bare.theta)
    assert model[0].weight.equal(other[0].weight)


def test_no_finite_loss_is_divergence_and_changes_nothing() -> None:
    model, gated, inner, search = parts()
    before, theta = model[0].weight.detach().clone(), search.theta.clone()
    structure = StructureOptimizer(inner, search, gated)
    with pytest.raises(espalier.Diverged, match=r"after 0 good updates.*learning rate"):
        structure.step(lambda: torch.tensor(float("nan")))
    assert model[0].weight.equal(before)
    assert search.theta.equal(theta)
    assert bool(search.diverged)


def test_once_settled_the_closure_is_called_once_and_divergence_is_still_seen() -> None:
    model, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    search.settle()
    theta, calls = search.theta.clone(), []
    structure.step(lambda: calls.append(1) or closure_of(model, 0)())
    assert len(calls) == 1
    assert search.theta.equal(theta)
    with pytest.raises(espalier.Diverged):
        structure.step(lambda: torch.tensor(float("inf")))


def test_what_is_noted_on_a_device_is_found_at_the_next_look() -> None:
    """As on a GPU, which is not asked in every update: the first update without a finite loss is named."""
    _, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    state = structure.state_dict()
    for update, lost in enumerate([0.0, 0.0, 1.0, 0.0, 1.0], start=7):
        structure.update = update
        structure._noted(torch.tensor([0.5]), torch.tensor(lost))
    with pytest.raises(espalier.Diverged, match="update 10: every loss"):
        structure.check()
    structure.check()  # it is said once
    structure._noted(torch.tensor([0.5]), torch.tensor(1.0))
    structure.load_state_dict(state)  # of before
    structure.check()


@pytest.mark.parametrize("on_inner", [True, False])
def test_learning_rate_schedulers_work_on_either(on_inner: bool) -> None:
    model, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    scheduler = torch.optim.lr_scheduler.StepLR(inner if on_inner else structure, 2, 0.1)
    rates = []
    for update in range(4):
        structure.step(closure_of(model, update))
        scheduler.step()
        rates.append(inner.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.005, 0.005, 0.0005])
    assert structure.param_groups is inner.param_groups


def test_a_scheduler_goes_on_where_the_inner_optimiser_was_given_a_state() -> None:
    model, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    scheduler = torch.optim.lr_scheduler.StepLR(structure, 1, 0.1)
    inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    structure.step(closure_of(model, 0))
    scheduler.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_warm_up_by_update_works() -> None:
    model, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(structure, 0.1, total_steps=6)
    for update in range(5):
        structure.step(closure_of(model, update))
        scheduler.step()
    assert inner.param_groups[0]["lr"] < 0.01


def test_parameter_groups_keep_their_own_settings() -> None:
    model = networks.mlp()
    gated = espalier.attach(model, X[:4])
    inner = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.0}], lr=0.1)
    structure = StructureOptimizer(inner, Search(gated.space), gated)
    structure.add_param_group({"params": list(model[2].parameters())})
    frozen, moved, rest = (model[i].weight.detach().clone() for i in (0, 2, 4))
    structure.step(closure_of(model, 0))
    assert model[0].weight.equal(frozen)
    assert not model[2].weight.equal(moved)
    assert model[4].weight.equal(rest)  # in no group
    with pytest.raises(espalier.BadInput, match="not the model's"):
        structure.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
    assert len(inner.param_groups) == 2


def test_clipping_by_a_hook_on_the_inner_optimiser_sees_the_mean_gradient() -> None:
    model, gated, _, search = parts()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []

    def clip(*_: object) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))

    inner.register_step_pre_hook(clip)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    StructureOptimizer(inner, search, gated).step(closure_of(model, 0))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert norms[0] > 0.01
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("samples", [2, 3])
def test_what_another_optimiser_holds_gets_the_mean_gradient_too(samples: int) -> None:
    """And none where a loss is not finite. Of a parameter outside the model the gradients of the calls add up."""
    model, gated, _, search = parts(samples=samples)
    structure = StructureOptimizer(torch.optim.SGD(model[:4].parameters(), 0.0), search, gated)
    head, outside = model[4], nn.Parameter(torch.zeros(10))
    x, y = batch(0)
    spoilt = False

    def closure() -> torch.Tensor:
        loss = F.cross_entropy(model(x) + outside, y)
        loss.backward()
        return loss * spoilt.pop()

    spoilt = [torch.nan] + [1.0] * (3 * samples - 1)
    for _ in range(2):
        masks = copy.deepcopy(search).ask()
        outside.grad = None
        head.zero_grad()
        structure.step(closure)
    assert head.weight.grad is not None
    given = [head.weight.grad, head.bias.grad, outside.grad]
    expected = [torch.zeros_like(one) for one in given]
    for mask in masks:
        with gated.masked(mask):
            loss = F.cross_entropy(model(x) + outside, y)
            for total, one in zip(expected, torch.autograd.grad(loss, [head.weight, head.bias, outside])):
                total += one
    for ours, total, factor in zip(given, expected, (samples, samples, 1), strict=True):
        torch.testing.assert_close(ours, total / factor)
    kept = head.weight.grad.clone()
    structure.step(closure)
    assert head.weight.grad.equal(kept)


def test_another_optimiser_may_add_up_the_gradients_of_several_updates() -> None:
    model, gated, _, search = parts(samples=2)
    structure = StructureOptimizer(torch.optim.SGD(model[:4].parameters(), 0.0), search, gated)
    each = []
    for update in range(3):
        model[4].zero_grad()
        start = copy.deepcopy(search.state_dict())
        structure.step(closure_of(model, update))
        each.append(model[4].weight.grad.clone())
        search.load_state_dict(start)  # so that both roads draw the same masks
    model[4].zero_grad()
    for update in range(3):
        start = copy.deepcopy(search.state_dict())
        structure.step(closure_of(model, update))
        search.load_state_dict(start)
    torch.testing.assert_close(model[4].weight.grad, sum(each))


def test_accumulation_over_parts_of_a_batch_is_the_whole_batch() -> None:
    weights = []
    for pieces in (1, 4):
        model, gated, inner, search = parts()
        model.double()
        x, y = batch(0)

        def closure(model=model, pieces=pieces, x=x, y=y) -> torch.Tensor:
            total = torch.zeros(())
            for part, target in zip(x.double().chunk(pieces), y.chunk(pieces), strict=True):
                loss = F.cross_entropy(model(part), target) / pieces
                loss.backward()
                total = total + loss.detach()
            return total

        StructureOptimizer(inner, search, gated).step(closure)
        weights.append(model[0].weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-14)


def test_bf16_autocast_inside_the_closure_and_around_the_loop() -> None:
    """Around the loop, torch's cache of cast weights would go stale were it not cleared after each step."""
    found = []
    for around in (True, False):
        model, gated, inner, search = parts(initial=0.95)
        structure = StructureOptimizer(inner, search, gated)

        def closure(update: int, model=model) -> torch.Tensor:
            x, y = batch(update)
            with torch.autocast("cpu", torch.bfloat16, enabled=True):
                outputs = model(x)
                assert outputs.dtype == torch.bfloat16
                loss = F.cross_entropy(outputs.float(), y)
            loss.backward()
            return loss

        first = float(structure.step(lambda c=closure: c(0)))
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for update in range(1, 60):
                loss = structure.step(lambda c=closure, u=update: c(u))
        assert model[0].weight.dtype == torch.float32
        assert float(loss) < 0.8 * first
        found.append(model[0].weight.detach())
    assert found[0].equal(found[1])


@pytest.mark.parametrize("adam", [True, False])
def test_its_state_goes_on_exactly(tmp_path: Path, adam: bool) -> None:
    whole = parts(adam=adam, samples=4)
    structure = StructureOptimizer(whole[2], whole[3], whole[1])
    for update in range(6):
        if update == 3:
            Checkpoint(tmp_path, {}).save({"model": whole[0].state_dict(), "structure": structure.state_dict()}, 3)
        structure.step(closure_of(whole[0], update))

    again = parts(adam=adam, seed=1, samples=4)
    resumed = StructureOptimizer(again[2], again[3], again[1])
    state = Checkpoint(tmp_path, {}).load()
    assert state is not None
    again[0].load_state_dict(state["model"])
    resumed.load_state_dict(state["structure"])
    assert resumed.param_groups is again[2].param_groups
    assert resumed.state is again[2].state
    for update in range(3, 6):
        resumed.step(closure_of(again[0], update))
    assert again[0][0].weight.equal(whole[0][0].weight)
    assert again[3].theta.equal(whole[3].theta)
    assert again[3].ask().equal(whole[3].ask())


class SAM(torch.optim.Optimizer):
    """As it is commonly written."""

    def first_step(self) -> None: ...
    def second_step(self) -> None: ...
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it needs a closure"


def test_bad_input_is_named() -> None:
    model, gated, inner, search = parts()
    structure = StructureOptimizer(inner, search, gated)
    with pytest.raises(espalier.BadInput, match="needs a closure"):
        structure.step()
    with pytest.raises(espalier.BadInput, match=r"keep its state_dict\(\)"):
        copy.deepcopy(structure)
    with pytest.raises(espalier.BadInput, match="does the closure return it"):
        structure.step(lambda: None)
    with pytest.raises(espalier.BadInput, match=r"shape \(32,\).*take its mean"):
        structure.step(lambda: F.cross_entropy(model(batch(0)[0]), batch(0)[1], reduction="none"))
    with pytest.raises(espalier.BadInput, match="inner, search, compact, update and scheduler"):
        structure.load_state_dict(inner.state_dict())
    with pytest.raises(espalier.BadInput, match=r"is a torch\.optim"):
        StructureOptimizer(model, search, gated)  # type: ignore[arg-type]
    with pytest.raises(espalier.BadInput, match="LBFGS calls the closure by itself"):
        StructureOptimizer(torch.optim.LBFGS(model.parameters()), search, gated)
    sam = SAM(sgd(model).param_groups, {})
    with pytest.raises(
        espalier.BadInput, match=r"SAM calls the closure by itself.*two passes of SAM go into the closure"
    ):
        StructureOptimizer(sam, search, gated)
    with pytest.raises(espalier.BadInput, match="batch of runs"):
        StructureOptimizer(inner, Search(gated.space, batch=(2,)), gated)
    with pytest.raises(espalier.BadInput, match="the search is over"):
        StructureOptimizer(inner, Search(5), gated)
    with pytest.raises(espalier.BadInput, match="6 of 6 parameters that are not the model's"):
        StructureOptimizer(sgd(networks.mlp(seed=2)), search, gated)
