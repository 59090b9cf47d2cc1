"""The grid study: equal budgets, networks of given widths, folds, records, and going on after a stop."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from study_helpers import StopAfter

from espalier.data import from_arrays, load
from espalier.space import BadInput, Corrupt, Unreachable
from espalier.study import Grid
from espalier.study.settings import GRID_METHODS as METHODS
from espalier.study.settings import GridSettings, RunSpec, even_widths
from espalier.study.study_batches import GridBatch, Units
from espalier.train import PRESETS, Recipe
from espalier.train.batched.batch import Batch
from espalier.train.batched.inputs import Given
from espalier.train.batched.step import cross_entropy
from espalier.train.descent import SGD, Steps
from espalier.train.loop import Loop, Stop
from espalier.train.progress import Progress
from espalier.train.run_directory import locked

SMALL: dict[str, Any] = {
    "hidden": (10, 8), "epochs": 2, "trials": 2, "targets": (0.2, 0.6), "penalties": (0.25,), "points": 3,
}  # fmt: skip
FULL = (64, 10, 8, 10)


def grid(out: Path, **changes: Any) -> Grid:
    return Grid(GridSettings(**(SMALL | changes)), out, commit="abc", command="espalier study")


def stories(out: Path) -> dict[str, list[Any]]:
    """Every file by its place, without what differs between two runs of the same thing."""
    found = {}
    for path in sorted(out.glob("runs/**/*.jsonl")):
        head, *lines = map(json.loads, path.read_text().splitlines())
        kept = {k: v for k, v in head.items() if k not in ("seconds", "calls", "finished", "espalier_sha256")}
        found[str(path.relative_to(out))] = [kept, *lines]
    return found


def batch(method: str, **changes: Any) -> GridBatch:
    settings = GridSettings(**(SMALL | changes))
    data = load("digits").flatten()
    units = {"scratch": (3, 2), "found": (4, 6)}.get(method)
    price = {"penalty": 0.1} if method == "penalty" else {"target": 0.5}
    run = RunSpec(method, method, 0, units=units, **price)
    return GridBatch(settings, Units(FULL, least=1), data, [run], torch.device("cpu"))


@pytest.mark.parametrize("cost", ["weights", "units", "parameters"])
@pytest.mark.parametrize("full", [(64, 64, 64, 64, 10), (20, 7, 31, 3)])
def test_equal_layers_are_the_widest_that_fit(full: tuple[int, ...], cost: str) -> None:
    def price(hidden: tuple[int, ...]) -> int:
        widths = (full[0], *hidden, full[-1])
        if cost == "units":
            return sum(hidden)
        return sum(a * b for a, b in pairwise(widths)) + (sum(widths[1:]) if cost == "parameters" else 0)

    for share in (0.08, 0.3, 0.77, 1.0):
        units = even_widths(full, share, cost)
        assert price(units) <= share * price(full[1:-1]) * (1 + 1e-9)
        wider = tuple(min(u + 1, most) for u, most in zip(units, full[1:-1]))
        assert wider == units or price(wider) > share * price(full[1:-1])
    assert even_widths(full, 1.0, cost) == full[1:-1]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_gradient_of_as_many_examples(method: str) -> None:
    """In every update, before and after the structure settles: 64 examples, for as many updates."""
    engine = batch(method, samples=4).engine
    assert engine.total == 2 * (1347 // 32)
    loop, read = Loop(engine, Stop()), []
    while not loop.finished:
        position, done = engine.batch.feed.stream.position, engine.done
        loop._go_on()
        if updates := engine.done - done:  # else it was measured
            masks = engine.batch.samples if engine.batch.source.compares else 1
            read.append(masks * (engine.batch.feed.stream.position - position) / updates)
    assert set(read) == {64.0}
    assert engine.batch.source.compares == (method == "penalty")  # the others have settled, or never searched


def test_a_network_of_given_widths_is_that_small_network() -> None:
    """Computed in a wider shape under a mask, it starts with its own fan-in, and trains as the small one does."""
    settings = GridSettings(**SMALL)
    data = load("digits").flatten()
    runs = [RunSpec("found", "found", seed, target=0.5, units=units) for seed, units in enumerate([(5, 3), (9, 7)])]
    both = GridBatch(settings, Units(FULL, least=1), data, runs, torch.device("cpu"))
    assert both.network.widths == (64, 9, 7, 10)
    start = {name: p[:1].clone() for name, p in both.engine.weights().items()}
    assert start["layers.1.weight"][0, :3, :5].std().item() == pytest.approx((2 / 5) ** 0.5, rel=0.5)
    loop = both.loop(None, Stop(), Progress())
    assert loop.train()
    small = Units((64, 5, 3, 10))
    params = {
        "layers.0.weight": start["layers.0.weight"][:, :5], "layers.0.bias": start["layers.0.bias"][:, :5],
        "layers.1.weight": start["layers.1.weight"][:, :3, :5], "layers.1.bias": start["layers.1.bias"][:, :3],
        "head.weight": start["head.weight"][:, :, :3], "head.bias": start["head.bias"],
    }  # fmt: skip
    params = {name: p.clone() for name, p in params.items()}
    recipe = settings.recipe
    alone = Batch(
        small.gated.call, params, {}, data=data, seeds=[0], source=Given(torch.ones(1, 8), torch.zeros(1)),
        loss=cross_entropy, optimizer=SGD(recipe.weights_learning_rate, recipe.momentum, recipe.weight_decay),
        schedule=Steps(recipe.drops), total=loop.updates, batch_size=32, samples=2,
    )  # fmt: skip
    alone.advance(loop.updates)
    loss, error = alone.evaluate(torch.ones(1, 8), *data.test)
    story = both.results(loop)[0]
    assert story["result"]["test_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert story["result"]["test_error"] == pytest.approx(error.item(), abs=2 / 450)
    assert story["result"]["weight_share"] == pytest.approx((64 * 5 + 15 + 30) / (640 + 80 + 80))


def test_the_whole_grid(tmp_path: Path) -> None:
    study = grid(tmp_path, methods=METHODS, folds=2)
    assert study.run(Stop(), Progress())
    found = stories(tmp_path)
    runs = [line for _, *lines in found.values() for line in lines]
    cells = {(r["run"]["method"], r["run"].get("target", r["run"].get("penalty")), r["run"]["fold"], r["run"]["seed"])
             for r in runs}  # fmt: skip
    expected = set(product(METHODS[:4], (0.2, 0.6), (0, 1), (0, 1))) | set(product(["penalty"], [0.25], (0, 1), (0, 1)))
    assert cells == expected
    assert len(runs) == len(cells)
    by = {(r["run"]["method"], r["run"].get("target"), r["run"]["fold"], r["run"]["seed"]): r for r in runs}
    for (method, target, fold, seed), story in by.items():
        result = story["result"]
        widths = (64, *result["units"], 10)
        weights = sum(a * b for a, b in pairwise(widths))
        assert result["weight_share"] == pytest.approx(weights / 800, rel=1e-5)
        assert 0 <= result["test_error"] <= 1
        assert story["curve"][-1]["test_error"] == pytest.approx(result["test_error"], rel=1e-3)
        if target is not None:
            assert result["weight_share"] <= target * (1 + 1e-6)
        if method in ("search", "permuted"):
            assert result["reached_after"] <= target * (1 + 1e-6)
            assert result["gap"] == pytest.approx(result["reached_before"] - target, abs=1e-5)
        if method == "found":
            assert story["run"]["units"] == by["search", target, fold, seed]["result"]["units"]
    assert not any((tmp_path / "state").rglob("*.safetensors"))
    assert not list(study.parts())


def test_stopped_anywhere_it_goes_on_to_the_same_results(tmp_path: Path) -> None:
    changes = {"methods": ("search", "found"), "trials": 1}
    assert grid(tmp_path / "whole", **changes).run(Stop(), Progress())
    calls = 0
    while not grid(tmp_path / "parts", **changes).run(StopAfter(2), Progress()):
        calls += 1
        assert calls < 40
    assert calls > 3
    assert stories(tmp_path / "parts") == stories(tmp_path / "whole")


class Elsewhere:
    """A cluster of this process: what a task is given has been pickled, as it is on its way to another machine."""

    def carry_out(self, task: Any, shared: Any, jobs: dict[str, Any], *_: Any) -> dict[str, Any]:
        return {name: task(*pickle.loads(pickle.dumps((shared, job))), None)[1] for name, job in jobs.items()}  # noqa: S301


def test_trained_as_tasks_it_gives_the_same_results(tmp_path: Path) -> None:
    changes = {"methods": ("search", "found"), "folds": 2}
    assert grid(tmp_path / "here", **changes).run(Stop(), Progress())
    assert grid(tmp_path / "there", **changes).run(Stop(), Progress(), Elsewhere())  # type: ignore[arg-type]
    assert stories(tmp_path / "there") == stories(tmp_path / "here")
    assert not any((tmp_path / "there" / "state").rglob("*.safetensors"))


def test_more_seeds_train_only_what_is_missing(tmp_path: Path) -> None:
    assert grid(tmp_path, methods=("scratch",)).run(Stop(), Progress())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    study = grid(tmp_path, methods=("scratch",), trials=3)
    assert [[run.seed for run in part.runs] for part in study.parts()] == [[2, 2]]
    assert study.run(Stop(), Progress())
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


def test_two_processes_never_train_the_same_batch(tmp_path: Path) -> None:
    assert not grid(tmp_path).run(StopAfter(1), Progress())
    (state,) = {path.parent for path in (tmp_path / "state").rglob("lock")}
    with locked(state), pytest.raises(BadInput, match="another process trains the same runs"):
        grid(tmp_path).run(Stop(), Progress())
    assert grid(tmp_path).run(Stop(), Progress())


def test_records_of_other_settings_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    assert grid(tmp_path, methods=("scratch",), targets=(0.6,)).run(Stop(), Progress())
    other = grid(tmp_path, methods=("scratch",), recipe=Recipe(momentum=0.5))
    with pytest.raises(BadInput, match=r"momentum: 0.9 there, 0.5 here"):
        other.run(Stop(), Progress())
    assert grid(tmp_path, recipe=Recipe(weights_learning_rate=0.3)).settings.folder == "digits-rate_0.3-2_epochs"
    assert grid(tmp_path, batch_size=16).settings.folder == "digits-batch_16-2_epochs"
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(Corrupt, match=path.name):
        grid(tmp_path, methods=("scratch",)).run(Stop(), Progress())


def test_folds_test_every_example_once_and_tuning_never_sees_the_test_part(tmp_path: Path) -> None:
    whole = grid(tmp_path, folds=5)
    parts = [whole.data(fold) for fold in range(5)]
    assert sum(len(part.test_labels) for part in parts) == 1797
    assert {len(part.train_labels) for part in parts} == {1437, 1438}
    rows = torch.cat([part.test_inputs for part in parts]).sort(0).values
    assert torch.equal(rows, torch.cat([whole.given.train_inputs, whole.given.test_inputs]).sort(0).values)
    train = {tuple(row) for row in whole.given.train_inputs.tolist()}
    hidden = {tuple(row) for row in whole.given.test_inputs.tolist()} - train
    assert len(hidden) == 450
    for changes in ({"folds": 5, "held_out": 1}, {"held_out": 300}):
        for fold in GridSettings(**(SMALL | changes)).parts:
            data = grid(tmp_path, **changes).data(fold)
            seen = {tuple(row) for part in (data.train_inputs, data.test_inputs) for row in part.tolist()}
            assert not seen & hidden
            assert len(data.train_labels) + len(data.test_labels) == 1347


def test_a_penalty_of_many_digits_is_trained_once(tmp_path: Path) -> None:
    study = {"methods": ("penalty",), "penalties": (2**-9, 1 / 3), "recipe": Recipe(weights_learning_rate=1 / 7)}
    assert grid(tmp_path, **study).run(Stop(), Progress())
    assert not list(grid(tmp_path, **study).parts())


def test_data_of_ones_own(tmp_path: Path) -> None:
    x, y = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3
    x[:, 0] += 3 * y
    data = from_arrays((x[:150], y[:150]), (x[150:], y[150:]), name="mine")
    settings = GridSettings(**(SMALL | {"dataset": "mine", "hidden": (5,), "methods": ("search",), "folds": 2}))
    assert Grid(settings, tmp_path, data=data).run(Stop(), Progress())
    assert len(stories(tmp_path)) == 2
    assert next(iter((tmp_path / "runs").iterdir())).name == "mine-2_epochs"


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"targets": (0.05,)}, Unreachable, r"target 0.05 is below the smallest reachable share 0.09375"),
        ({"targets": (1.5,)}, BadInput, r"share of the full cost in \(0, 1\], not 1.5"),
        ({"methods": ("search", "luck")}, BadInput, "unknown method 'luck'"),
        ({"methods": ("found",)}, BadInput, "give both methods"),
        ({"cost": "joules"}, BadInput, "cost is one of weights, macs, units, parameters"),
        ({"folds": 1}, BadInput, "at least 2, or 0"),
        ({"batch_size": 1000}, BadInput, "at most 673"),
        ({"samples": 5}, BadInput, "divisor"),
        ({"recipe": {"begin": 0.0, "ramp": 0.9, "settle": 0.5}}, BadInput, "use settle of at most 0.1"),
        ({"recipe": {"ramp": 1.5}}, BadInput, "ramp"),
    ],
)
def test_what_cannot_work_is_said_before_training(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], said: str
) -> None:
    def build() -> Grid:
        recipe = Recipe(**changes.get("recipe", {}))
        return grid(tmp_path / "out", **(changes | {"recipe": recipe}))

    with pytest.raises(kind, match=said):
        build()
    assert not (tmp_path / "out").exists()


def test_the_masks_of_an_update_are_the_study_s_whatever_the_recipe(tmp_path):
    """A recipe says how many it would draw; a study has its own budget, and records that."""
    for samples in (2, 4):
        settings = grid(tmp_path, recipe=PRESETS["default"], samples=samples).settings
        assert settings.describe("search")["samples"] == samples
