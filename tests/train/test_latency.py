"""Latency as a cost: what is fitted to measured variants predicts others, is met, and is corrected where it is wrong.

The machine is replaced: a runtime whose time is known from the shapes of the cut layers, so that nothing here depends
on the clock.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import espalier
from espalier.gates import latency
from espalier.space import BadInput, Choice, Space
from espalier.train import targets


def tiles(width: int, tile: int = 8) -> int:
    return math.ceil(width / tile)


class Machine:
    """Times by the shapes of a model: layers in tiles, a constant, and something that no model of widths knows."""

    def __init__(self, odd: float = 0.0) -> None:
        self.odd, self.built, self.measured = odd, 0, 0

    def time(self, model: nn.Module) -> float:
        total, count = 0.05, 0
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                total += 1e-2 * tiles(layer.in_features) * tiles(layer.out_features) + 1e-3 * layer.out_features
                count += layer.out_features
        return total * (1 + self.odd * (count < 130))

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self.built += 1
        time = self.time(model)
        return lambda: time

    def timed(self, runs: Any, rounds: int, seconds: float = 0.0, wait: bool = False) -> list[float]:
        self.measured += 1
        return [run() for run in runs]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Machine:
    own = Machine()
    monkeypatch.setitem(latency.RUNTIMES, "torch", own)
    monkeypatch.setattr(latency, "timed", own.timed)
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path))
    return own


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :3].argmax(1)


def test_networks_that_were_not_measured_are_predicted(machine):
    gated = espalier.attach(network(), data()[0][:4])
    cost = gated.cost("latency", batch=16)
    told = gated.latency(batch=16)
    assert told.tile == 8
    assert told.residual < 0.03
    generator = torch.Generator().manual_seed(1)
    errors = []
    for share in (0.2, 0.35, 0.5, 0.7, 0.9) * 4:
        mask = gated.canonical((torch.rand(gated.d, generator=generator) < share).float())
        errors.append(abs(float(cost(mask)) / machine.time(gated.compact(mask)) - 1))
    assert sorted(errors)[17] < 0.1  # nine of ten
    assert cost.gradient(torch.ones(gated.d)).min() >= 0
    theta = torch.rand(gated.d, generator=generator, dtype=torch.float64)
    draws = (torch.rand(20_000, gated.d, generator=generator) < theta).double()
    assert float(cost(draws).mean()) == pytest.approx(float(cost(theta)), rel=5e-3)  # law 4: the expectation is exact


def test_what_was_measured_is_kept_for_this_machine_and_these_versions(machine, monkeypatch):
    first = espalier.attach(network(), data()[0][:4]).cost("latency")
    built = machine.built
    gated = espalier.attach(network(), data()[0][:4])
    again = gated.cost("latency", device=torch.device("cpu"))
    assert machine.built == built
    mask = torch.ones(gated.d)
    assert again(mask) == first(mask)
    assert gated.cost("latency", batch=9) is not again
    assert machine.built > built
    built = machine.built
    monkeypatch.setattr(torch, "__version__", "another")
    espalier.attach(network(), data()[0][:4]).cost("latency")
    assert machine.built > built


def test_a_target_in_milliseconds_is_met_by_measurement(machine, tmp_path):
    whole = machine.time(network())
    result = espalier.fit(
        network(), data(), target=f"{0.4 * whole:.4f} ms", epochs=4, batch_size=16, quiet=True, device="cpu"
    )
    assert machine.time(result.model) <= 0.4 * whole * 1.001
    assert result.latency["measured"] == machine.time(result.model)
    assert result.latency["full"] == pytest.approx(whole)
    assert result.latency["predicted"] <= 0.4 * whole
    assert f"{result.latency['measured']:.3g} ms measured" in str(result)
    assert result.summary()["latency"]["predicted"] == result.latency["predicted"]
    espalier.ship(result, tmp_path / "shipped", model=network)
    text = (tmp_path / "shipped" / "README.md").read_text()
    assert f"{result.latency['predicted']:.3g} ms predicted, {result.latency['measured']:.3g} ms measured" in text


def test_a_target_that_the_prediction_misses_is_corrected(machine):
    gated = espalier.attach(network(), data()[0][:4])
    gated.cost("latency")
    machine.odd = 0.25  # small networks take longer than when they were measured
    whole = machine.time(network())
    result = espalier.fit(gated, data(), cost="latency", target=0.4, epochs=4, batch_size=16, quiet=True, device="cpu")
    assert result.latency["corrections"] > 0
    assert machine.time(result.model) <= 0.4 * whole * 1.01
    assert machine.time(result.model) > 0.25 * whole
    assert result.target == 0.4


def test_more_time_than_the_whole_network_takes_cuts_nothing(machine, monkeypatch):
    gated = espalier.attach(network(), data()[0][:4])
    gated.cost("latency")
    # What ships is measured beside the whole network, and takes a little longer by chance.
    monkeypatch.setattr(latency, "timed", lambda runs, *_, **__: [1.02 * runs[0](), *(run() for run in runs[1:])])
    result = espalier.fit(gated, data(), target="3 ms", epochs=4, batch_size=16, quiet=True, device="cpu")
    assert result.mask.all()
    assert result.latency["corrections"] == 0
    assert "misses" not in str(result)


def test_what_is_predicted_after_a_correction_knows_the_error_measured_before(machine):
    gated = espalier.attach(network(), data()[0][:4])
    cost = gated.cost("latency")
    machine.odd = 0.25
    result = espalier.fit(gated, data(), cost="latency", target=0.4, epochs=4, batch_size=16, quiet=True, device="cpu")
    told = result.latency
    assert abs(told["predicted"] / told["compared"] - 1) < 0.05 < abs(float(cost(result.mask)) / told["compared"] - 1)


def test_a_machine_that_is_slower_at_moments_is_seen_through():
    draw = np.random.default_rng(0)
    true = np.exp(draw.uniform(0, 2, 40))
    turns, slow = np.concatenate([draw.permutation(40) for _ in range(12)]), [1.0]
    for _ in turns[1:]:  # three quarters of the time, for some dozens of runs on end
        slow.append(draw.choice([1.0, 1.9, 1.9, 1.9]) if draw.random() < 0.05 else slow[-1])
    taken = true[turns] * slow * np.exp(np.abs(draw.normal(0, 0.02, len(turns))))
    ratio = latency.steadied(turns, taken) / true
    least = np.array([taken[turns == i].min() for i in range(40)]) / true
    assert np.abs(ratio / np.median(ratio) - 1).max() < 0.04 < np.abs(least / np.median(least) - 1).max()
    assert latency.steadied(np.array([0]), np.array([3.0])).tolist() == [3.0]


def test_a_target_that_cannot_be_met_by_measurement_is_said(machine):
    gated = espalier.attach(network(), data()[0][:4])
    cost = gated.cost("latency")
    machine.odd = 9.0
    result = espalier.fit(gated, data(), cost="latency", target=0.3, epochs=4, batch_size=16, quiet=True, device="cpu")
    assert float(cost(result.mask)) == pytest.approx(float(cost(smallest_mask(gated))))  # a gate within a tile is free
    assert result.latency["most"] < result.latency["smallest"] <= result.latency["compared"]
    assert f"misses its {result.latency['most']:.3g} ms; the smallest network takes" in str(result)


@pytest.mark.parametrize(
    ("times", "lowered"),
    [
        ([0.9], []),  # far enough below 1 to be sure
        ([0.99, 0.98], []),
        ([0.99, 1.02, 0.9], [0.995 / 1.02]),  # met once, by luck
        ([1.1, 0.99, 0.99], [0.995 / 1.1]),
    ],
)
def test_what_is_near_its_limit_has_to_meet_it_twice(monkeypatch, times, lowered):
    rows = iter([[{"name": "target", "predicted": 1.0, "most": 1.0, "compared": time}] for time in times])
    monkeypatch.setattr(targets, "measured_again", lambda *_, **__: next(rows))
    factors = []
    search = SimpleNamespace(target=0.5, select=lambda: None, tighten=lambda _, by: factors.append(by) or True)
    gated = SimpleNamespace(latencies=[1], canonical=lambda mask: mask, compact=lambda _: nn.Identity())
    assert targets.correct(search, gated)[0] == len(lowered)
    assert factors == pytest.approx(lowered)
    assert next(rows, None) is None  # all were taken


def test_each_limit_is_lowered_by_its_own_measurement(monkeypatch):
    tables = iter([{"a": 1.2, "b": 0.99, "c": 0.5}, {"a": 0.98, "b": 0.9, "c": 0.5}, {"a": 0.97}, {"d": 0.0}])
    asked = []

    def measured(*_, names=None):
        asked.append(names)
        return [{"name": n, "predicted": 1.0, "most": 1.0, "compared": t} for n, t in next(tables).items()]

    monkeypatch.setattr(targets, "measured_again", measured)
    factors = []
    search = SimpleNamespace(target=0.5, select=lambda: None, tighten=lambda *of: factors.append(of) or True)
    gated = SimpleNamespace(latencies=[1], canonical=lambda mask: mask, compact=lambda _: nn.Identity())
    rounds, errors = targets.correct(search, gated)
    assert (rounds, errors, asked) == (1, {"a": 1.2}, [None, None, ["a"]])  # what is met and near, once more
    assert factors == [("a", pytest.approx(0.995 / 1.2))]

    tables = iter([{"a": 1.1, "b": 1.3}, {"a": 0.9, "b": 1.3}, {"a": 0.9, "b": 0.9}])
    factors.clear()
    assert targets.correct(search, gated)[0] == 2
    wanted = [("a", 0.995 / 1.1), ("b", 0.995 / 1.3), ("b", 0.995**2 / 1.3)]
    assert factors == [(name, pytest.approx(factor)) for name, factor in wanted]


class Other(Machine):
    """Another runtime: a unit costs what it costs in no tiles, those of the last hidden layer most."""

    def time(self, model: nn.Module) -> float:
        widths = [layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)]
        return (0.1 + sum(4e-3 * at * width for at, width in enumerate(widths))) * (1 + self.odd * (sum(widths) < 130))


@pytest.fixture
def other(machine, monkeypatch: pytest.MonkeyPatch) -> Other:
    pytest.importorskip("onnxruntime")
    own = Other()
    monkeypatch.setitem(latency.RUNTIMES, "onnxruntime", own)
    return own


def test_limits_in_two_runtimes_are_met_in_both(machine, other, tmp_path):
    gated = espalier.attach(network(), data()[0][:4])
    costs = [gated.cost("latency"), gated.cost("latency", runtime="onnxruntime", batch=64)]
    machine.odd, other.odd = 0.1, 0.3  # small networks take longer than when they were measured
    target = {"macs": 0.5, **dict.fromkeys(costs, "uniform")}
    result = espalier.fit(gated, data(), target=target, epochs=4, batch_size=16, quiet=True, device="cpu")
    asked = targets.read(gated, "weights", target)
    assert list(asked.limits) == [cost.label for cost in costs]
    assert [row["name"] for row in result.latencies] == [cost.label for cost in costs]
    assert [(row["runtime"], row["batch"]) for row in result.latencies] == [("torch", 1), ("onnxruntime", 64)]
    for runtime, row, (_, share) in zip((machine, other), result.latencies, asked.limits.values(), strict=True):
        assert row["measured"] == runtime.time(result.model) <= share * runtime.time(network()) * 1.01
        assert row["full"] == pytest.approx(runtime.time(network()))
    assert result.latency["corrections"] > 0
    assert result.latency in result.latencies
    assert result.latency["compared"] / result.latency["most"] == max(
        row["compared"] / row["most"] for row in result.latencies
    )
    assert json.loads(json.dumps(result.summary()))["latencies"][1]["runtime"] == "onnxruntime"
    espalier.ship(result, tmp_path / "shipped", model=network)
    card = (tmp_path / "shipped" / "README.md").read_text()
    for row in result.latencies:
        assert f"{row['measured']:.3g} ms measured in {row['runtime']} of {row['batch']} at once" in str(result)
        assert f"led by the latency in {row['runtime']} of {row['batch']} at once: {row['predicted']:.3g} ms" in card


def test_a_runtime_and_a_batch_in_one_word(machine, other):
    gated = espalier.attach(network(), data()[0][:4])
    words = "macs=0.3,latency=uniform,latency:onnxruntime:7=uniform,latency:7=0.9"
    limits = targets.read(gated, "weights", words).limits
    assert list(limits) == ["latency", "latency:onnxruntime:7", "latency:7"]
    measured = [gated.latencies[cost.label] for cost, _ in limits.values()]
    assert [(one.runtime, one.batch) for one in measured] == [("torch", 1), ("onnxruntime", 7), ("torch", 7)]
    half = 0.5 * other.time(network())
    for asked in (
        targets.read(gated, "latency:onnxruntime", f"{half} ms"),
        targets.read(gated, "weights", {"latency:onnxruntime": f"{half} ms"}),
    ):
        assert asked.name == "latency:onnxruntime"
        assert asked.share == pytest.approx(0.5, rel=1e-3)
    for kind, said in (("latency:abacus", "torch, onnxruntime"), ("latency:7:8", "latency:onnxruntime:64")):
        with pytest.raises(BadInput, match=said):
            gated.cost(kind)
    with pytest.raises(BadInput, match="amount of parameters"):
        targets.read(gated, "weights", {"latency:onnxruntime": "3 parameters"})


def test_costs_of_one_name_are_limits_of_their_own():
    gated = espalier.attach(network(), data()[0][:4])
    costs = [espalier.Cost.linear(torch.rand(gated.d)) for _ in range(3)]
    named = replace(espalier.Cost.linear(torch.ones(gated.d)), label="target")
    asked = targets.read(gated, "weights", dict(zip([*costs, named], (0.5, 0.6, 0.7, 0.8), strict=True)))
    assert asked.words == {"given": 0.5, "given 2": 0.6, "given 3": 0.7, "target 2": 0.8}
    assert {name: share for name, (_, share) in asked.limits.items()} == {
        "given 2": 0.6,
        "given 3": 0.7,
        "target 2": 0.8,
    }


def smallest_mask(gated):
    """One gate of every group, by hand."""
    mask = torch.zeros(gated.d)
    for where in gated.space.slices.values():
        mask[where.start] = 1.0
    return mask


def test_the_smallest_network_is_measured_so_that_a_target_below_it_is_refused_before_the_run(machine):
    gated = espalier.attach(network(), data()[0][:4])
    cost = gated.cost("latency")
    whole, least = machine.time(network()), machine.time(gated.compact(smallest_mask(gated)))
    assert float(cost(smallest_mask(gated))) == pytest.approx(least, rel=0.05)
    for target in (0.9 * least / whole, f"{0.9 * least} ms"):
        with pytest.raises(espalier.Unreachable, match="smallest"):
            espalier.fit(gated, data(), cost="latency", target=target, epochs=4, batch_size=16, quiet=True)


def test_a_limit_may_be_the_time_of_the_uniform_network_of_equal_cost(machine):
    gated = espalier.attach(network(), data()[0][:4])
    latency_cost, macs = gated.cost("latency"), gated.cost("macs")
    asked = targets.read(gated, "weights", {"macs": 0.3, "latency": "uniform"})
    (_, share) = asked.limits["latency"]
    squares, lines = 48 * 64 + 64 * 32, 8 * 48 + 32 * 3  # MACs by hand, of layers with two cut widths and with one
    chance = max(np.roots([squares, lines, -0.3 * (squares + lines)]))
    draws = (torch.rand(20_000, gated.d, generator=torch.Generator().manual_seed(0)) < chance).double()
    time = float(latency_cost(draws).mean() / latency_cost(torch.ones(gated.d)))
    assert share == pytest.approx(time, rel=5e-3)
    result = espalier.fit(
        gated, data(), target={"macs": 0.3, "latency": "uniform"}, epochs=4, batch_size=16, quiet=True, device="cpu"
    )
    assert machine.time(result.model) <= share * machine.time(network()) * 1.001
    assert float(macs(result.mask)) <= 0.3 * float(macs(torch.ones(gated.d)))
    with pytest.raises(BadInput, match="uniform"):  # of what it would be the limit is not said
        targets.read(gated, "weights", {"latency": "uniform"})
    assert targets.read(gated, "weights", "macs=0.3,latency=uniform").limits["latency"][1] == share


def test_the_uniform_network_keeps_of_a_group_in_blocks_what_must_stay():
    """8-64-16-4: two blocks of 32, and eight of 2. A quarter of the MACs is 0.4 of all widths, but one block is a half
    of its layer: 34 of 80 units stay, more than 0.4."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16), torch.nn.ReLU())
    model.append(torch.nn.Linear(16, 4))
    gated = espalier.attach(model, torch.zeros(2, 8), round_to={"0": 32, "2": 2})
    asked = targets.read(gated, "weights", {"macs": 0.246, "units": "uniform"})
    second = (0.246 * (8 * 64 + 64 * 16 + 16 * 4) - 8 * 32) / (32 + 4)  # beside 32 units, to the same MACs
    assert asked.limits["units"][1] == pytest.approx((32 + second) / 80)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    made = {"target": {"macs": 0.246, "units": "uniform"}, "epochs": 3, "batch_size": 16, "quiet": True}
    result = espalier.fit(gated, (inputs, (inputs[:, 0] > 0).long()), device="cpu", **made)
    assert sum(layer.out_features for layer in (result.model[0], result.model[2])) <= 32 + second


FAULTS = """
import resource
import torch
from espalier.gates import latency

def faults(size):
    for _ in range(2):
        torch.ones(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults(1 << 24)
with latency.kept_memory():
    kept = faults(1 << 24)
print(before, kept, faults(1 << 26))  # of this size nothing lies on the heap yet
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no such setting")
def test_memory_is_kept_while_networks_are_timed_and_returned_afterwards():
    """By the number of page faults: large tensors made again and again need none, once one was. In a process of its
    own, since what other tests left on the heap decides as well."""
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=True)
    before, kept, after = map(int, done.stdout.split())
    assert kept < before / 2
    assert kept < after / 2


def test_latency_beside_another_cost(machine):
    result = espalier.fit(
        network(), data(), target={"weights": 0.5, "latency": 0.4}, epochs=4, batch_size=16, quiet=True, device="cpu"
    )
    assert machine.time(result.model) <= 0.4 * machine.time(network()) * 1.02
    assert result.shares["weight_share"] <= 0.5
    gated = espalier.attach(network(), data()[0][:4])
    target = {"weights": 0.5, gated.cost("latency", batch=7): 0.4}  # a cost of one's own choice as the limit
    result = espalier.fit(gated, data(), target=target, epochs=4, batch_size=16, quiet=True, device="cpu")
    assert result.latency["batch"] == 7
    assert machine.time(result.model) <= 0.4 * machine.time(network()) * 1.02
    assert json.dumps(result.summary())


def test_bad_input_is_named(machine):
    gated = espalier.attach(network(), data()[0][:4])
    for how, said in (
        ({"runtime": "abacus"}, "torch, onnxruntime"), ({"runtime": "onnxruntime", "device": "cuda"}, "on the CPU"),
        ({"batch": 0}, "number of examples"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=said):
            gated.cost("latency", **how)
    with pytest.raises(BadInput, match="only the latency"):
        gated.cost("weights", runtime="torch")
    gated.space = Space([Choice("act", 3)])
    with pytest.raises(BadInput, match="choices"):
        gated.cost("latency", batch=3)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_the_runtimes_run_the_network(runtime):
    """Without the clock: each runtime computes, at the batch asked for, what can be timed."""
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime")
    inputs = data()[0][:5]
    model = network().train()
    run = latency.prepared(runtime, model, (inputs,), {})
    assert model.training
    told = run()
    if runtime == "onnxruntime":
        assert told[0].shape == (5, 3)
    best = latency.timed([run], rounds=2)
    assert len(best) == 1
    assert best[0] > 0


def test_a_network_before_its_training_is_measured_with_its_biases(capfd):
    """Exporters leave out what is 0; and what the older one cannot write, it does not print."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")

    class Differs(nn.Linear):
        def forward(self, x):  # the older exporter knows no diff, and the newer one leaves out what adds 0
            return torch.addmm(self.bias, x.diff(dim=1), self.weight)

    model = Differs(4, 4)
    with torch.no_grad():
        model.bias.zero_()
    written = []

    def keep(*given):
        written.append(latency.onnx_file(latency.exported(latency.plain_outputs(given[0]), *given[1:3]), given[3]))
        return written[0]

    inputs = torch.randn(5, 5)
    latency._opened(keep, copy.deepcopy(model), (inputs,), {})()
    (layer,) = [node for node in onnx.load_from_string(written[0]).graph.node if node.op_type == "Gemm"]
    assert len(layer.input) == 3
    latency.prepared("onnxruntime", model, (inputs,), {})()
    assert not model.bias.any()  # it is a copy that is changed
    assert capfd.readouterr().out == ""


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_the_older_exporter_cannot_write_is_measured_all_the_same():
    pytest.importorskip("onnxscript")
    emptied = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 3)).eval()
    with torch.no_grad():
        emptied[1].bias += torch.arange(3)
    inputs = data()[0][:5]
    told = latency.prepared("onnxruntime", emptied, (inputs,), {})()
    assert torch.equal(torch.from_numpy(told[0]), emptied(inputs))
