"""A loop of one's own with the recipe in it: what fit gives on the same batches, with one mask to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import fit, shape
from espalier.train import feed
from espalier.train.batched import AdamW

DATA, TEST = networks.digit_vectors(320)


def batches(
    samples: int, compared: range, epochs: int = 4, size: int = 32, data: tuple[Tensor, Tensor] = DATA
) -> Iterator[tuple[Tensor, Tensor]]:
    """What fit reads, in its order."""
    reading = feed.read(data, size, seed=3)
    for epoch in range(epochs):
        yield from reading.epoch(epoch * reading.updates, (epoch + 1) * reading.updates, compared, samples)


def own_loop(
    model: nn.Module, samples: int, data: tuple[Tensor, Tensor] = DATA, **settings: Any
) -> tuple[Any, list[str]]:
    torch.manual_seed(3)
    shaping = shape(model, data[0][:4], updates=40, samples=samples, seed=3, **settings)
    compared = range(0) if shaping.search.reads_slopes else shaping.phases.compared
    phases = []

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()
        return loss

    model.train()
    for x, y in batches(samples, compared, data=data):
        shaping.step(closure, x, y)
        phases.append(shaping.phase)
    return shaping, phases


@pytest.mark.parametrize("network", [networks.mlp, networks.mixed_network])
@pytest.mark.parametrize("settings", [{}, {"optimizer": AdamW(1e-2), "schedule": "cosine"}], ids=["recipe", "adamw"])
def test_it_is_fit_to_the_last_bit(network: Any, settings: dict[str, Any]) -> None:
    theirs = network()
    expected = fit(
        theirs, DATA, epochs=4, batch_size=32, samples=1, target=0.4, seed=3, validation=TEST, quiet=True,
        **settings,
    )  # fmt: skip
    ours = network()
    shaping, phases = own_loop(ours, 1, target=0.4, **settings)
    assert [phases.count(name) for name in ("whole", "searching", "settled")] == [3, 17, 20]
    result = shaping.finish(DATA, validation=TEST)
    assert result.theta.equal(expected.theta)
    assert result.mask.equal(expected.mask)
    for a, b in zip(result.model.state_dict().values(), expected.model.state_dict().values(), strict=True):
        assert a.equal(b)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.equal(b)
    assert result.validation == expected.validation
    assert (result.share_before, result.share_after) == (expected.share_before, expected.share_after)


@pytest.mark.parametrize("recipe", ["default", "ranked"])
@pytest.mark.parametrize("network", [networks.mlp, networks.mixed_network])
def test_two_masks_are_those_of_fit_but_for_the_order_of_sums(network: Any, recipe: str) -> None:
    """fit runs both in one pass, the loop one after the other; in float64 and without dropout nothing else differs."""
    data = DATA[0].double(), DATA[1]
    ours, theirs = network().double(), network().double()
    for module in (*ours.modules(), *theirs.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = fit(theirs, data, epochs=4, batch_size=32, samples=2, target=0.4, seed=3, recipe=recipe, quiet=True)
    shaping, _ = own_loop(ours, 2, data, target=0.4, recipe=recipe)
    result = shaping.finish(data)
    torch.testing.assert_close(result.theta, expected.theta, rtol=1e-9, atol=1e-10)
    assert result.mask.equal(expected.mask)
    torch.testing.assert_close(result.model.state_dict(), expected.model.state_dict(), rtol=1e-7, atol=1e-9)


def test_stopped_and_loaded_it_goes_on_to_the_last_bit() -> None:
    whole, _ = own_loop(networks.mlp(), 1, target=0.4)
    first, second = networks.mlp(), networks.mlp()
    shaping = shape(first, DATA[0][:4], updates=40, samples=1, seed=3, target=0.4)

    def step(one: Any, x: Tensor, y: Tensor) -> None:
        def closure(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(one.network(inputs), targets)
            loss.backward()
            return loss

        one.step(closure, x, y)

    read = batches(1, range(0))
    for _ in range(25):  # settled, and compact
        step(shaping, *next(read))
    shaping.write_back()
    again = shape(second, DATA[0][:4], updates=40, samples=1, seed=3, target=0.4)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(shaping.state_dict())
    for x, y in read:
        step(again, x, y)
    ours, theirs = again.finish(DATA), whole.finish(DATA)
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"updates": 0}, "updates"),
        ({"example": None}, "example inputs"),
        ({"target": 1.5}, "target"),
        ({"optimizer": 3}, "optimizer is a function"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)}, "not the model's"),
        ({"recipe": "papr"}, "did you mean 'paper'"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"example": DATA[0][:4], "updates": 10, "target": 0.5}
    with pytest.raises(espalier.EspalierError, match=said):
        shape(networks.mlp(), **usual | settings)


@pytest.mark.parametrize("recipe", ["default", "ranked"])
def test_a_closure_that_trains_nothing_is_named(recipe: str) -> None:
    """It forgets to go backwards; or, once settled, it runs the whole network on, whose weights nobody moves."""
    model = networks.mlp()
    shaping = shape(model, DATA[0][:4], updates=10, target=0.5, recipe=recipe)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    with pytest.raises(espalier.BadInput, match="the closure has to go backwards"):
        shaping.step(lambda x, y: F.cross_entropy(model(x), y), *DATA)
    assert shaping.phases is not None
    for _ in range(shaping.phases.settle):
        shaping.step(closure, *DATA)
    with pytest.raises(espalier.BadInput, match="the closure has to run the compact network"):
        shaping.step(closure, *DATA)


def test_other_numbers_of_updates_than_were_said_are_named() -> None:
    """Stopped before it has settled, the weights are of no structure; beyond the end, the schedule has a rate of 0."""
    shaping = shape(networks.mlp(), DATA[0][:4], updates=8, target=0.5)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()
        return loss

    for _ in range(3):
        shaping.step(closure, *DATA)
    assert not shaping.finish(DATA, finished=False).finished  # a look at it
    with pytest.warns(UserWarning, match="not settled after 3 of 8 updates"):
        assert not shaping.finish(DATA).finished
    for _ in range(5):
        shaping.step(closure, *DATA)
    assert shaping.finish(DATA).finished
    with pytest.warns(UserWarning, match="the schedule has ended, after updates=8"):
        shaping.step(closure, *DATA)


def test_layers_are_unfrozen_before_and_after_it_settles() -> None:
    for late in (False, True):
        model = networks.mlp()
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
        shaping = shape(model, DATA[0][:4], sgd, updates=8, target=0.5)

        def closure(inputs: Tensor, targets: Tensor, shaping: Any = shaping) -> Tensor:
            loss = F.cross_entropy(shaping.network(inputs), targets)
            loss.backward()
            return loss

        for update in range(8):
            if update == (6 if late else 2):
                assert model[0].weight.equal(before)
                first = shaping.network[0].requires_grad_(True)
                shaping.add_param_group({"params": list(first.parameters()), "lr": 0.01})
            shaping.step(closure, *DATA)
        shaping.finish(DATA)
        assert not model[0].weight.equal(before)
        sgd.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})  # as those of the whole network, once settled
        with pytest.raises(espalier.BadInput, match="1 of 7 parameters that are not the model's"):
            shaping.step(closure, *DATA)


@pytest.mark.parametrize("schedule", ["linear", "steps", "constant"])
@pytest.mark.parametrize("on_inner", [False, True])
def test_groups_that_are_added_follow_the_schedule(schedule: str, on_inner: bool) -> None:
    model = networks.mlp()
    model[0].requires_grad_(False)
    shaping = shape(model, DATA[0][:4], target=0.5, updates=8, schedule=schedule)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()
        return loss

    for update in range(8):
        if update == 2:
            first = {"params": list(model[0].requires_grad_(True).parameters()), "lr": 0.01}
            (shaping.inner if on_inner else shaping).add_param_group(first)
            before = model[0].weight.clone()
        if update < 7:  # then linear is at 0
            shaping.step(closure, *DATA)
        if update >= 2:
            ours, added = (group["lr"] for group in shaping.param_groups)
            assert added == pytest.approx(0.1 * ours)
    assert not model[0].weight.equal(before)
    kept = shaping.state_dict()
    assert len(kept["inner"]["param_groups"]) == 2


@pytest.mark.parametrize("given", [lambda loss: (loss, {"loss": 1.0}), lambda loss: {"cross entropy": loss}])
def test_a_loss_in_parts_is_refused_with_the_way_out(given: Any) -> None:
    model = networks.mlp()
    shaping = shape(model, DATA[0][:4], updates=10, target=0.5)

    def closure(inputs: Tensor, targets: Tensor) -> Any:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return given(loss)

    with pytest.raises(espalier.BadInput, match=r"one scalar tensor, not a .* of .: add the parts"):
        shaping.step(closure, *DATA)
    with pytest.raises(espalier.BadInput, match="add the parts"):
        espalier.fit(
            networks.mlp(), DATA, loss=lambda o, y: given(F.cross_entropy(o, y)), epochs=1, target=0.5, quiet=True
        )


def test_a_step_that_was_left_in_the_loop_is_named() -> None:
    """The weights move twice by one gradient."""
    model = networks.mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    shaping = shape(model, DATA[0][:4], sgd, updates=8, target=0.5)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()
        return loss

    shaping.step(closure, *DATA)
    sgd.step()
    with pytest.warns(UserWarning, match="the inner optimiser is stepped on its own, too"):
        shaping.step(closure, *DATA)
    sgd.step()
    shaping.step(closure, *DATA)  # it is said once


def test_a_network_that_ran_before_the_step_is_named() -> None:
    """As where log-probabilities are kept while an agent acts: no mask was on it."""
    model = networks.mlp()
    shaping = shape(model, DATA[0][:4], updates=10, target=0.5, recipe="finetune")
    kept = F.cross_entropy(model(DATA[0]), DATA[1])

    def closure() -> Tensor:
        kept.backward()
        return kept

    with pytest.raises(espalier.BadInput, match="run the masked model, as inside the closure"):
        shaping.step(closure)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["before", "after", "in parts"])
def test_a_closure_that_runs_without_masks_is_named_with_ranked_losses_too(way: str) -> None:
    """As what was compiled before gates were attached; what is compiled afterwards, or runs in parts, has masks."""
    torch._dynamo.reset()  # else what was compiled of another such network is taken, which had no gates
    model = networks.mlp()
    run: Any = torch.compile(model, backend="eager") if way == "before" else None
    if way == "before":
        run(DATA[0]).sum().backward()
    shaping = shape(
        model, DATA[0][:4], torch.optim.SGD(model.parameters(), 0.0), target=0.5, updates=8, recipe="ranked"
    )
    calls = []
    if way == "after":
        run = torch.compile(model, backend="eager")
    if way == "in parts":
        run = lambda x: model[4](model[:4](x))  # noqa: E731

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(shaping.phase)
        loss = F.cross_entropy(run(inputs) if shaping.phase == "searching" else shaping.network(inputs), targets)
        loss.backward()
        return loss

    while shaping.phase == "whole":
        shaping.step(closure, *DATA)
    if way == "before":
        with pytest.raises(espalier.BadInput, match=r"the closure does not run the masked model.*torch\.compile"):
            shaping.step(closure, *DATA)
        return
    for first in (True, False):
        masks, before = copy.deepcopy(shaping.search).ask(), len(calls)
        shaping.step(closure, *DATA)
        assert len(calls) - before == 2 + first  # one more, once
        expected = torch.zeros_like(model[0].weight)
        for mask in masks:
            with shaping.gated.masked(mask):
                expected += torch.autograd.grad(F.cross_entropy(model(DATA[0]), DATA[1]), model[0].weight)[0] / 2
        torch.testing.assert_close(model[0].weight.grad, expected)


def test_copies_that_the_closure_trains_run_in_the_network_s_place() -> None:
    """As those of Reptile, which moves the weights to where the copies got; they run under the mask."""
    model = networks.mlp()
    inner = torch.optim.SGD(model.parameters(), 0.5)
    shaping = shape(model, DATA[0][:4], inner, target=0.5, updates=12, recipe="ranked")

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        twin = copy.deepcopy(shaping.network)
        steps = torch.optim.SGD(twin.parameters(), 0.1)
        loss = F.cross_entropy(twin(inputs), targets)
        loss.backward()
        steps.step()
        for own, other in zip(shaping.network.parameters(), twin.parameters(), strict=True):
            own.grad = (own - other).detach()
        return loss

    losses = [float(shaping.step(closure, *DATA)) for _ in range(12)]
    assert losses[-1] < losses[0]
