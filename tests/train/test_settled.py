"""Once settled the compact network is trained in the model's place: the same trajectory, and the model gets it back."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import Search, StructureOptimizer

X = torch.rand(96, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(5, (96,), generator=torch.Generator().manual_seed(1))
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
}


class Net(nn.Module):
    """Convolutions with BatchNorm, a residual addition, linear layers.

    No biases before BatchNorm: their gradient is nothing but rounding, which Adam would make as large as any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.outer = nn.Sequential(nn.Conv2d(12, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.middle, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.outer(self.inner(x)))
        out: Tensor = self.head(F.relu(self.middle(x.mean((2, 3)))))
        return out


class Recurrent(nn.Module):
    """A recurrent layer, whose weights are masked themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(24, 10, batch_first=True), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x.flatten(2).transpose(1, 2).reshape(len(x), 8, 24))[0][:, -1])
        return out


class Tied(nn.Module):
    """One weight under two names, as an embedding and a head have it: it is cut once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 12, bias=False), nn.Linear(12, 24, bias=False)
        self.shared, self.head = nn.Linear(24, 12, bias=False), nn.Linear(12, 5)
        self.shared.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.reshape(len(x), 8, 24).mean(1)))
        out: Tensor = self.head(torch.tanh(self.shared(self.second(x))))
        return out


def trained(
    make: type[nn.Module], optimizer: str, compact: bool, updates: int = 12, multiple: int = 1
) -> tuple[nn.Module, nn.Module]:
    """A few updates of search, then settled ones; the model afterwards, and its compact network."""
    torch.manual_seed(3)
    model = make().double()
    gated = espalier.attach(model, X[:4])
    search = Search(gated.space, cost=gated.cost("weights"), target=0.4, horizon=8, signal="slopes", samples=1, seed=2)
    structure = StructureOptimizer(OPTIMIZERS[optimizer](model.parameters()), search, gated)
    network = model
    for update in range(8 + updates):
        if update == 8:
            search.settle()
            search._settled = gated.canonical(search.select())  # the masked road, to be compared, trains under it too
            network = structure.compact(multiple) if compact else model
        part = slice(16 * (update % 6), 16 * (update % 6) + 16)

        def closure(part: slice = part, network: nn.Module = network) -> Tensor:
            loss = F.cross_entropy(network(X[part]), Y[part])
            loss.backward()
            return loss

        structure.step(closure)
    structure.write_back()
    return model, gated.compact(search.select())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [Net, Recurrent, Tied])
def test_the_trajectory_is_that_of_masked_training(make: type[nn.Module], optimizer: str) -> None:
    _, masked = trained(make, optimizer, compact=False)
    _, small = trained(make, optimizer, compact=True)
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in make().parameters())
    for (name, ours), theirs in zip(small.state_dict().items(), masked.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("multiple", [4, 100])  # 100: all are as wide as they were
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [Net, Recurrent, Tied])
def test_padded_with_zeros_it_trains_the_same(make: type[nn.Module], optimizer: str, multiple: int) -> None:
    whole, small = trained(make, optimizer, compact=True)
    wide, padded = trained(make, optimizer, compact=True, multiple=multiple)
    for (name, ours), theirs in zip(padded.state_dict().items(), small.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=name)
    for (name, ours), theirs in zip(wide.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=name)  # no zeros came back


class Through(nn.Module):
    """Two layers of 24 units behind what is between."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.head = nn.Linear(16, 24), nn.Sequential(*between), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.first(x)))
        return out


WAYS = {
    "relu": ((nn.ReLU(),), 8),
    "gelu, batch norm": ((nn.GELU(), nn.BatchNorm1d(24)), 8),
    "sigmoid": ((nn.Sigmoid(),), 0),  # 0.5 for a zero: weights behind it would begin to learn
    "batch norm, sigmoid": ((nn.BatchNorm1d(24), nn.Sigmoid()), 0),
    "one of two": ((nn.ReLU(), nn.Linear(24, 24), nn.Sigmoid()), 8),
    "width of a norm": ((nn.ReLU(), nn.LayerNorm(24), nn.ReLU()), 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_what_stays_zero_is_padded(way: str) -> None:
    """Each group where it is exact: how many channels the network is trained with, and what it says."""
    between, multiple = WAYS[way]
    torch.manual_seed(5)
    model = Through(*copy.deepcopy(between)).double()
    x = X[:64].flatten(1)[:, :16]
    gated = espalier.attach(model, x[:8], kinds=["units", "width"])
    search = Search(gated.space, initial=0.45, seed=4)
    structure = StructureOptimizer(torch.optim.AdamW(model.parameters(), 1e-2), search, gated)
    search.settle()
    expected = gated.compact(search.select())
    widths = {name: m.out_features for name, m in expected.named_modules() if isinstance(m, nn.Linear)}
    assert all(widths[name] % 8 for name in widths), "the masks of this seed leave nothing to pad"
    small = structure.compact(8)
    padded = {name: m.out_features for name, m in small.named_modules() if isinstance(m, nn.Linear)}
    assert all(padded[name] == -(-widths[name] // 8) * 8 for name in widths if padded[name] != widths[name])
    assert {name for name in widths if padded[name] != widths[name]} == ({"first"} if multiple else set())
    torch.testing.assert_close(small.eval()(x), expected.eval()(x), rtol=1e-12, atol=1e-12)
    small.train()
    for _ in range(5):
        structure.step(lambda: _backward(F.cross_entropy(structure.network(x), Y[:64])))
    structure.write_back()
    torch.testing.assert_close(
        gated.compact(search.select()).eval()(x), small.eval()(x), rtol=1e-10, atol=1e-10
    )  # so that what it was padded with says nothing still


def test_gates_placed_by_hand_keep_their_sizes_where_others_are_padded() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), espalier.Gate(12), nn.Linear(12, 5)).double()
    gated = espalier.attach(model, X[:4].flatten(1)[:, :16])
    search = Search(gated.space, initial=0.45, seed=4)
    structure = StructureOptimizer(torch.optim.SGD(model.parameters(), 0.1), search, gated)
    search.settle()
    expected, small = gated.compact(search.select()), structure.compact(8)
    assert [p.shape for p in small.parameters()] == [p.shape for p in expected.parameters()]


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x)


def test_zeros_are_not_proven_by_units_that_are_dead_in_the_example() -> None:
    """A cosine makes ones of the zeros. The example does not tell, since what reads them gives it nothing but zeros."""
    model = nn.Sequential(nn.Linear(1, 4), Cosine(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    for layer, weight in ((model[0], 1.0), (model[2], -5.0)):
        nn.init.constant_(layer.weight, weight)
        nn.init.zeros_(layer.bias)
    gated = espalier.attach(model, torch.zeros(3, 1, dtype=torch.float64))
    search = Search(gated.space, initial=0.3, seed=1)
    structure = StructureOptimizer(torch.optim.SGD(model.parameters(), 0.1), search, gated)
    search.settle()
    small, x = structure.compact(4), torch.full((8, 1), 3.0, dtype=torch.float64)
    before = gated.compact(search.select())(x)
    torch.testing.assert_close(small(x), before, rtol=1e-12, atol=1e-12)
    structure.step(lambda: _backward(structure.network(x).square().mean()))
    structure.write_back()
    torch.testing.assert_close(gated.compact(search.select())(x), small(x), rtol=1e-12, atol=1e-12)


class Padding(espalier.Callback):
    """As ``fit(compile=True)`` on a GPU has it: multiples of 8; and the network that is trained is remembered."""

    def on_epoch(self, loop: Any, rows: Any) -> None:
        loop.engine.structure.multiple = 8
        self.network = loop.engine.structure.network


def test_a_padded_run_of_fit_stops_and_goes_on(tmp_path: Path) -> None:
    x = X[:, :, :4, :4].flatten(1)

    def run(*callbacks: espalier.Callback, **more: Any) -> espalier.Result:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(48, 30), nn.ReLU(), nn.Linear(30, 26), nn.ReLU(), nn.Linear(26, 5)).double()
        data = {"epochs": 12, "batch_size": 32, "target": 0.4, "quiet": True, "optimizer": OPTIMIZERS["momentum"]}
        return espalier.fit(model, (x, Y), callbacks=callbacks, **data, **more)  # type: ignore[arg-type]

    expected, padding = run(), Padding()
    whole = run(padding, checkpoint=tmp_path / "whole")
    stopped = [run(Padding(), StopAt(epoch), checkpoint=tmp_path / "parts") for epoch in (8, 10, 99)][-1]
    found, trained = ([m.out_features for m in list(net)[:-1:2]] for net in (expected.model, padding.network))
    assert trained == [min(-(-width // 8) * 8, most) for width, most in zip(found, (30, 26))] != found
    for result in (whole, stopped):
        assert result.mask.equal(expected.mask)
        for ours, theirs in zip(result.model.parameters(), expected.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert all(a.equal(b) for a, b in zip(whole.model.parameters(), stopped.model.parameters(), strict=True))


class StopAt(espalier.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch(self, loop: Any, rows: Any) -> None:
        if rows[0]["epoch"] == self.epoch:
            loop.limit.end = 0.0


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def test_the_model_gets_the_slices_back_and_keeps_the_rest() -> None:
    torch.manual_seed(3)
    model = Net().double()
    gated = espalier.attach(model, X[:4])
    search = Search(gated.space, cost=gated.cost("weights"), target=0.4, horizon=8, seed=2)
    structure = StructureOptimizer(torch.optim.SGD(model.parameters(), 0.1), search, gated)
    with pytest.raises(espalier.BadInput, match=r"search.settle\(\) first"):
        structure.compact()
    search.settle()
    before = copy.deepcopy(model.state_dict())
    small = structure.compact()
    assert structure.compact() is small
    with pytest.raises(espalier.BadInput, match="takes no mask"):
        structure.step(lambda: 0.0, under=search.whole())
    held = {id(p) for group in structure.param_groups for p in group["params"]}
    assert held == {id(p) for p in small.parameters()}
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.fill_(7.0)
    assert all(model.state_dict()[name].equal(value) for name, value in before.items())
    structure.write_back()
    open_units = int(search.select()[gated.space.slices[gated.space.groups[0].name]].sum())
    assert 0 < open_units < gated.space.groups[0].size
    after = model.state_dict()
    changed = {name: int((after[name] != value).sum()) for name, value in before.items() if name.endswith("weight")}
    sizes = {id(p): p.numel() for p in small.parameters()}
    assert sum(changed.values()) == sum(p.numel() for n, p in small.named_parameters() if n.endswith("weight"))
    assert len(sizes) == len(list(model.parameters()))
    again = gated.compact(search.select())
    assert all(a.equal(b) for a, b in zip(again.state_dict().values(), small.state_dict().values(), strict=True))


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_state_goes_on_in_another_process(multiple: int) -> None:
    """Saved in the settled part: the model, then the optimiser, which cuts it again."""
    torch.manual_seed(3)
    start = Net().double().state_dict()

    def begin() -> tuple[nn.Module, StructureOptimizer]:
        model = Net().double()
        model.load_state_dict(start)
        gated = espalier.attach(model, X[:4])
        search = Search(gated.space, cost=gated.cost("weights"), target=0.4, horizon=8, seed=2)
        return model, StructureOptimizer(OPTIMIZERS["momentum"](model.parameters()), search, gated)

    def go_on(structure: StructureOptimizer, network: nn.Module, parts: range) -> None:
        for part in parts:

            def closure(part: int = part) -> Tensor:
                loss = F.cross_entropy(network(X[16 * part : 16 * part + 16]), Y[16 * part : 16 * part + 16])
                loss.backward()
                return loss

            structure.step(closure)
        structure.write_back()

    model, structure = begin()
    structure.search.settle()
    go_on(structure, structure.compact(multiple), range(3))
    assert (structure.padded is None) == (multiple == 1)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(structure.state_dict())
    go_on(structure, structure.compact(), range(3, 6))
    other, resumed = begin()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    go_on(resumed, resumed.compact(), range(3, 6))
    assert all(a.equal(b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    with pytest.raises(espalier.BadInput, match="compact network already"):
        resumed.load_state_dict(state)


def on_six_numbers(structure: StructureOptimizer) -> Callable[[], Tensor]:
    """A closure of networks that read six numbers of each image."""

    def closure() -> Tensor:
        loss = F.cross_entropy(structure.network(X[:32].flatten(1)[:, :6]), Y[:32])
        loss.backward()
        return loss

    return closure


def test_adafactor_s_sums_over_rows_and_columns_are_cut_along() -> None:
    """Its state is of other shapes than the parameter: a step of the compact network takes what is left of each."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5)).double()
    gated = espalier.attach(model, torch.zeros(2, 6, dtype=torch.float64))
    inner = torch.optim.Adafactor(model.parameters(), 1e-2)
    structure = StructureOptimizer(inner, Search(gated.space, initial=0.4, seed=2), gated)
    structure.step(closure := on_six_numbers(structure))
    before = dict(inner.state[model[2].weight])
    structure.search.settle()
    mask = gated.canonical(structure.search.select())
    small = structure.compact()
    read, written = (mask[gated.space.slices[name]].bool() for name in ("0", "2"))
    assert 0 < int(read.sum()) < 8
    after = inner.state[small[2].weight]
    assert after["row_var"].equal(before["row_var"][written])
    assert after["col_var"].equal(before["col_var"][:, read])
    structure.step(closure)


@pytest.mark.parametrize("round_to", [None, 4])
def test_a_state_of_the_compact_network_is_whole_without_write_back(round_to: int | None) -> None:
    """Kept beside the model's, in one dict as people write it; blocks are those of the state, or refused."""
    x = X[:64].flatten(1)[:, :16]

    def begin(seed: int, blocks: object = round_to) -> tuple[nn.Module, StructureOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)).double()
        return model, espalier.shape(model, x[:4], target=0.4, updates=20, round_to=blocks)  # type: ignore[arg-type]

    def go_on(shaping: StructureOptimizer, updates: range) -> None:
        for update in updates:

            def closure(update: int = update) -> Tensor:
                loss = F.cross_entropy(shaping.network(x[update : update + 32]), Y[update : update + 32])
                loss.backward()
                return loss

            shaping.step(closure)

    model, shaping = begin(0)
    go_on(shaping, range(15))
    assert shaping.phase == "settled"
    saved = copy.deepcopy({"model": model.state_dict(), "shaping": shaping.state_dict()})
    go_on(shaping, range(15, 20))
    expected = shaping.finish((x, Y[:64]))

    if round_to is not None:
        with pytest.raises(espalier.BadInput, match=r'round_to=state\["blocks"\]'):
            begin(1)[1].load_state_dict(saved["shaping"])
    with pytest.warns(UserWarning, match="load the model before the state"):
        begin(1, saved["shaping"].get("blocks"))[1].load_state_dict(saved["shaping"])
    again, resumed = begin(1, saved["shaping"].get("blocks"))
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["shaping"])
    go_on(resumed, range(15, 20))
    result = resumed.finish((x, Y[:64]))
    assert result.mask.equal(expected.mask)
    assert all(a.equal(b) for a, b in zip(result.model.parameters(), expected.model.parameters(), strict=True))


def test_a_state_that_cannot_be_cut_is_begun_anew() -> None:
    """As of an Adafactor that keeps one number for each row, which no shape tells from one for each column."""

    class ByRows(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["rows"] = torch.zeros(len(parameter), dtype=parameter.dtype)
                state["rows"] += parameter.grad.flatten(1).square().sum(1) if parameter.ndim > 1 else 0
                parameter -= 0.1 * parameter.grad

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    gated = espalier.attach(model, torch.zeros(2, 6, dtype=torch.float64))
    structure = StructureOptimizer(ByRows(model.parameters()), Search(gated.space, initial=0.4, seed=2), gated)
    structure.step(closure := on_six_numbers(structure))
    structure.search.settle()
    small = structure.compact()
    structure.step(closure)
    assert structure.state[small[0].weight]["rows"].shape == (small[0].out_features,)
    assert 0 < small[0].out_features < 6


class Lookahead(torch.optim.Optimizer):
    """As timm's: it has the groups of another optimiser, and a state of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            OrderedDict[Any, Any](),
            OrderedDict[Any, Any](),
        )
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state: Any = defaultdict(dict)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", [parameter.clone()])[0]  # in a list
            if self.steps % 3 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


def test_the_state_of_an_optimiser_inside_another_is_cut_too() -> None:
    """And tensors in lists: the trajectory is that of masked training, which a state begun anew would not give."""

    def trained(compact: bool) -> tuple[nn.Module, Lookahead]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
        gated = espalier.attach(model, torch.zeros(2, 6, dtype=torch.float64))
        inner = Lookahead(torch.optim.AdamW(model.parameters(), 1e-2))
        structure = StructureOptimizer(inner, Search(gated.space, initial=0.4, seed=2), gated)
        closure = on_six_numbers(structure)
        for _ in range(4):
            structure.step(closure)
        structure.search.settle()
        if compact:
            structure.compact()
        for _ in range(6):
            structure.step(closure)
        structure.state_dict()
        return gated.compact(structure.search.select()), inner

    (ours, inner), (masked, _) = trained(True), trained(False)
    held = [parameter for group in inner.param_groups for parameter in group["params"]]
    assert all(inner.base.state[parameter]["step"] == 10 for parameter in held)
    assert len(inner.base.state) == len(inner.state) == len(held) == 4
    for a, b in zip(ours.parameters(), masked.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("way", ["its own list", "groups", "data"])
def test_an_optimiser_that_keeps_its_own_list_is_named(way: str, recwarn: pytest.WarningsRecorder) -> None:
    """Once, at the first step of the settled network that has a gradient and a rate."""

    class ByHand(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            self.own = list(parameters)
            super().__init__(self.own, {"lr": 0.0})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for parameter in self.own if way == "its own list" else self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    moved = parameter.data if way == "data" else parameter
                    moved -= self.param_groups[0]["lr"] * parameter.grad

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    gated = espalier.attach(model, torch.zeros(2, 6, dtype=torch.float64))
    structure = StructureOptimizer(ByHand(model.parameters()), Search(gated.space, initial=0.4, seed=2), gated)
    closure = on_six_numbers(structure)
    structure.search.settle()
    structure.compact()
    for update in range(4):
        structure.inner.param_groups[0]["lr"] = 0.1 if update else 0.0
        structure.step(closure)
        said = [str(warning.message) for warning in recwarn if "list of parameters" in str(warning.message)]
        assert len(said) == (way == "its own list" and update > 0)


MISSED: dict[str, Callable[[nn.Module], object]] = {
    "has run": lambda model: model(torch.zeros(2, 6).double()),
    "has a gradient at 0.weight": lambda model: model.get_parameter("0.weight").sum().backward(),
    "has another requires_grad at 0.weight": lambda model: model.get_parameter("0.weight").requires_grad_(False),
    "is in eval mode": lambda model: model.eval(),
}


@pytest.mark.parametrize("said", MISSED)
def test_what_is_done_to_the_model_that_stands_still_is_named_once(said: str, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    gated = espalier.attach(model, torch.zeros(2, 6, dtype=torch.float64))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    structure = StructureOptimizer(inner, Search(gated.space, initial=0.4, seed=2), gated)
    closure = on_six_numbers(structure)
    structure.search.settle()
    network = structure.compact()
    for own in (model, network) if "mode" in said else (network,):
        MISSED[said](own)
    structure.step(closure)
    assert not [warning for warning in recwarn if "stands still" in str(warning.message)]
    network.train()
    MISSED[said](model)
    for _ in range(2):
        structure.step(closure)
    assert [said in str(warning.message) for warning in recwarn if "stands still" in str(warning.message)] == [True]


@pytest.mark.parametrize("steps", [True, False])
def test_another_optimiser_of_the_whole_network_is_named_when_it_settles(
    steps: bool, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)).double()
    other = torch.optim.SGD(model[2].parameters(), 0.1)
    x = X[:64].flatten(1)[:, :16]
    shaping = espalier.shape(model, x[:4], torch.optim.SGD(model[0].parameters(), 0.1), target=0.6, updates=10)

    def closure() -> Tensor:
        loss = F.cross_entropy(shaping.network(x), Y[:64])
        loss.backward()
        return loss

    for _ in range(10):
        shaping.step(closure)
        if steps:
            other.step()
    said = [str(warning.message) for warning in recwarn if "anew" in str(warning.message)]
    assert len(said) == steps
    assert all(word.startswith("2.weight is moved by something else") for word in said)


def test_hooks_of_parameters_are_named_when_it_settles() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)).double()
    x = X[:64].flatten(1)[:, :16]
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.warns(UserWarning, match=r"2\.weight has hooks.*register them anew"):
        espalier.fit(model, (x, Y[:64]), epochs=4, batch_size=32, target=0.6, quiet=True)


class Kept(nn.Module):
    """Keeps an activation, for a loss to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(48, 20), nn.Linear(20, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = F.relu(self.first(x))
        out: Tensor = self.head(F.relu(self.second(self.hidden)))
        return out


def test_in_fit_the_users_module_is_what_is_trained_for_losses_and_callbacks(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model, x = Kept().double(), X[:, :, :4, :4].flatten(1)
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    sizes, learning, hidden, frozen = list[int](), list[bool](), list[Tensor](), list[Tensor]()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            sizes.append(sum(p.numel() for p in model.parameters()))
            learning.append(model.hidden.requires_grad and len(model.hidden) == len(outputs))
            hidden.append(model.hidden.detach())
        return F.cross_entropy(outputs, targets) + 1e-3 * sum(p.abs().sum() for p in model.parameters())

    class Looking(espalier.Callback):
        def on_epoch(self, loop: Any, rows: Any) -> None:
            if loop.phase == "settled":
                error = float((model(x).argmax(1) != Y).double().mean())
                assert error == pytest.approx(rows[0]["validation_error"])
            if rows[0]["epoch"] == 10:
                model.first.requires_grad_(False)
            if rows[0]["epoch"] >= 10:
                frozen.append(model.first.weight.detach().clone())

    result = espalier.fit(
        model, (x, Y), loss=loss, epochs=12, batch_size=32, target=0.4, validation=(x, Y), quiet=True,
        callbacks=[Looking()], checkpoint=tmp_path,
    )  # fmt: skip
    assert all(learning[: 3 * 10])  # until its layer is frozen
    assert sizes[0] > sizes[-1] == sum(p.numel() for p in result.model.parameters())
    assert hidden[-1].shape[1] == result.model.first.out_features < 20
    assert frozen[0].equal(frozen[-1])
    assert result.model.first.weight.equal(frozen[-1])
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == before
    small = Kept().double()
    small.load_state_dict(model.state_dict())  # the whole network again, with the trained weights in it
    assert small.second.weight.abs().sum() >= result.model.second.weight.abs().sum()


def test_no_gradient_of_before_is_left_at_the_model() -> None:
    model, _ = trained(Net, "momentum", compact=True)
    assert all(parameter.grad is None for parameter in model.parameters())
