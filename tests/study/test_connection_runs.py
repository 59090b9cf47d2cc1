"""Connection selection runs, stops, goes on and is recorded: the resumed study equals the uninterrupted one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from connection_helpers import run, study
from study_helpers import StopAfter, stories
from torch import nn

import espalier
from espalier.models import DenseNet
from espalier.paper import write
from espalier.picture import describe
from espalier.space import BadInput
from espalier.study.settings import ConnectionSettings, RunSpec
from espalier.study.study_batches import PaperBatch
from espalier.train.loop import Stop
from espalier.train.progress import Progress
from espalier.train.run_directory import locked

UPDATES = 48 // 4


def mask_from_hex(text: str, d: int) -> torch.Tensor:
    return torch.tensor(describe.bits(text, d), dtype=torch.float32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    assert run(out, keep_state=True)
    return out


def test_the_defaults_are_the_paper_s():
    settings = ConnectionSettings()
    assert settings.updates(50_000) == 468_750
    assert settings.penalties == (2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 0, -(2**-3), -(2**0))
    assert [len(settings.runs(m)) for m in settings.methods] == [40, 25, 5]
    assert (settings.learning_rate, settings.momentum, settings.weight_decay) == (0.1, 0.9, 1e-4)
    assert (settings.depth, settings.growth, settings.pad, settings.cost) == (40, 12, 4, "weights")
    assert (settings.batch_size, settings.samples, settings.initial) == (32, 2, 0.5)
    assert settings.variant_of("search") == "search"
    assert ConnectionSettings(cost="macs").variant_of("search") == "search+cost_macs"


def test_every_run_has_its_file_and_its_story(whole):
    found = stories(whole)
    folder = "cifar10-1_epochs-depth_10-growth_4"
    assert list(found) == [
        f"{folder}/full/share_1.0-seed_0",
        f"{folder}/random/share_0.6-seed_0",
        f"{folder}/search+theta_0.1/penalty_-0.5-seed_0",
        f"{folder}/search+theta_0.1/penalty_0.25-seed_0",
    ]
    network = study(whole).network
    prices = {kind: network.prices(kind) for kind in ("weights", "macs")}
    for name, story in found.items():
        result = story["result"]
        assert story["study"] == "connection-selection"
        assert result["updates"] == UPDATES
        assert [row["update"] for row in story["curve"]] == [UPDATES // 2, UPDATES]
        assert result["test_error"] == story["curve"][-1]["test_error"]
        mask = mask_from_hex(result["mask"], network.gated.d)
        canonical = network.gated.canonical(mask.unsqueeze(0))[0]
        for told, bits in ((result, mask), (result["canonical"], canonical)):
            blocks = [int(bits[where].sum()) for where in network.graph.blocks]
            assert told["connections"] == blocks
            assert told["connection_share"] == pytest.approx(sum(blocks) / 18)
            for kind, share in (("weights", "weight_share"), ("macs", "mac_share")):
                assert told[share] == pytest.approx(float((prices[kind] * bits).sum() / prices[kind].sum()))
        assert mask_from_hex(result["canonical"]["mask"], 18).tolist() == canonical.tolist()
        assert result["canonical"]["depth"] == network.graph.paths(mask)["depth"]
        assert (story["settings"]["depth"], story["settings"]["growth"]) == (10, 4)
        assert story["compute"]["step"] == "readable"
        assert story["commit"] == "abc"
        if "search" in name:
            assert [sum(block) for block in result["theta_histogram"]] == [6, 6, 6]
        if "random" in name:
            assert result["drawn"]["draws"] > result["drawn"]["without_path"]
            assert result["weight_share"] == pytest.approx(0.6, abs=0.005)
        if "full" in name:
            assert result["connections"] == [6, 6, 6]
            assert result["canonical"]["dead_layers"] == []


def test_the_kept_weights_are_those_that_were_measured(whole):
    """Loaded into the readable network and cut, they give the error of the run file."""
    made = study(whole)
    told = {RunSpec(**story["run"]): story for story in stories(whole).values()}
    for spec in (*made.settings.runs("random"), *made.settings.runs("search")):
        story = told[spec]
        model = DenseNet(10, 4)
        model.load_state_dict(safetensors.torch.load_file(made.weights(spec)))
        gated = espalier.attach(model, torch.zeros(1, 3, 8, 8), check=False)
        mask = mask_from_hex(story["result"]["mask"], 18)
        data = made.given.as_floats()
        with torch.no_grad(), gated.masked(gated.canonical(mask)):
            out = model.eval()(data.test_inputs)
        assert float((out.argmax(-1) != data.test_labels).double().mean()) == story["result"]["test_error"]
        loss = float(nn.functional.cross_entropy(out, data.test_labels))
        assert loss == pytest.approx(story["result"]["test_loss"], rel=1e-5)


def test_stopped_and_continued_equals_uninterrupted(whole, tmp_path):
    calls = 0
    while not run(tmp_path, StopAfter(4)):
        calls += 1
        assert calls < 40
    assert calls >= 1
    assert stories(tmp_path) == stories(whole)
    assert not list(tmp_path.glob("state/**/*.safetensors"))


class Killed(Exception):
    pass


class KilledBeforeTheLast(Progress):
    """Dies in the middle of things: when the last update is done and its measurement is about to begin."""

    def update(self, done: int, text: str = "") -> None:
        if done == UPDATES:
            raise Killed


def test_killed_before_the_last_measurement(whole, tmp_path):
    search = {"methods": ("search",)}
    assert not study(tmp_path, **search).run(StopAfter(3), Progress())  # there is a checkpoint in the middle
    with pytest.raises(Killed):
        study(tmp_path, **search).run(Stop(), KilledBeforeTheLast())
    assert run(tmp_path, **search)
    ours, theirs = stories(tmp_path), stories(whole)
    assert len(ours) == 2
    assert all(story == theirs[name] for name, story in ours.items())


def test_another_command_leaves_a_batch_that_was_begun_alone(whole, tmp_path):
    search, other = {"methods": ("search",)}, {"methods": ("search",), "penalties": (-0.5,)}
    assert not run(tmp_path, StopAfter(4), **search)
    begun = sorted(tmp_path.glob("state/*/*/checkpoint-*"))
    said = list[str]()
    heard = Progress()
    heard.say = said.append
    assert not study(tmp_path, **other).run(StopAfter(3), heard)
    assert "1 of these runs were begun by another command too" in said[0]
    assert set(begun) < set(tmp_path.glob("state/*/*/checkpoint-*"))
    assert run(tmp_path, **search, penalties=(-0.5, 0.25))  # in another order it is the same command
    ours, theirs = stories(tmp_path), stories(whole)
    assert len(ours) == 2
    assert all(story == theirs[name] for name, story in ours.items())
    assert study(tmp_path, **other).parts() == []


def test_two_processes_train_other_runs_but_never_the_same(tmp_path):
    given = {"methods": ("random", "full")}
    part = study(tmp_path, **given).parts()[0]
    with locked(part.state):  # a lock is of an open file: to take it again is to be another process
        with pytest.raises(BadInput, match="another process trains the same runs"):
            run(tmp_path, **given)
        assert run(tmp_path, methods=("search",))
    assert len(stories(tmp_path)) == 2
    assert run(tmp_path, **given)
    assert len(stories(tmp_path)) == 4
    assert not list(tmp_path.glob("state/*/*"))


def test_small_batches_one_after_another(whole, tmp_path):
    one = {"methods": ("random", "full"), "runs_at_once": 1}
    assert [part.label for part in study(tmp_path, **one).parts()] == [
        "random-share_0.6-seed_0-1_runs",
        "full-share_1.0-seed_0-1_runs",
    ]
    calls = 0
    while not run(tmp_path, StopAfter(5), **one):
        calls += 1
        assert calls < 40
    ours, theirs = stories(tmp_path), stories(whole)
    assert len(ours) == 2
    for name, story in ours.items():  # alone the same arithmetic is done in another order
        assert story["runs_in_batch"] == 1
        assert story["result"]["mask"] == theirs[name]["result"]["mask"]
        assert story["result"]["test_loss"] == pytest.approx(theirs[name]["result"]["test_loss"], rel=1e-2)
    with pytest.raises(BadInput, match="runs_at_once"):
        study(tmp_path, runs_at_once=0)


def test_other_settings_are_refused_and_both_shown(whole, tmp_path):
    with pytest.raises(BadInput, match=r"batch_size: 4 there, 8 here"):
        run(whole, batch_size=8)
    assert not run(tmp_path, StopAfter(2))
    with pytest.raises(BadInput, match=r'"learning_rate": 0.1.* there, .*"learning_rate": 0.2.* here'):
        run(tmp_path, learning_rate=0.2)


@pytest.mark.parametrize(
    "changes",
    [{"settle": 0.5, "cost": "macs"}, {"samples": 4, "permuted": True, "adaptive": True, "theta_rate": None}],
    ids=str,
)
def test_variants_run_resume_and_stay_apart(changes, tmp_path):
    small = {"penalties": (0.25,), "methods": ("search",), **changes}
    assert run(tmp_path / "whole", **small)
    while not run(tmp_path / "parts", StopAfter(3), **small):
        pass
    assert stories(tmp_path / "parts") == stories(tmp_path / "whole")
    (story,) = stories(tmp_path / "whole").values()
    assert story["run"]["variant"].startswith("search+")
    assert all(story["settings"][name] == value for name, value in changes.items())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"methods": ("fixed",)}, "fixed"),
        ({"shares": (1.0,)}, "full"),
        ({"targets": (1.5,)}, "a target is a share"),
        ({"cost": "units"}, "'weights' or 'macs'"),
        ({"layers": 0}, "layers"),
        ({"step": "quick"}, "readable"),
        ({"pad": -1}, "pad"),
        ({"samples": 3}, "divisor"),
    ],
)
def test_bad_settings_are_named(changes, word):
    with pytest.raises(BadInput, match=word):
        ConnectionSettings(**changes)


def test_the_penalty_of_macs_is_normalised_by_the_dearest_connection(tmp_path):
    made = study(tmp_path, cost="macs")
    batch = PaperBatch(
        made.settings, made.network, made.given, made.settings.runs("search"), torch.device("cpu")
    ).engine
    macs = made.network.prices("macs")
    theta = batch.search.theta.clone()
    losses = torch.zeros(2, 2)  # a tie: only the penalty moves theta
    batch.search.tell(batch.search.ask(), losses)
    moved = batch.search.theta - theta
    expected = -0.1 * torch.tensor([[0.25], [-0.5]], dtype=torch.float64) * macs / macs.max() * 0.25
    torch.testing.assert_close(moved, expected)


def moved(source: Path, target: Path) -> list[int]:
    """The newest state of every batch, carried as single files to another folder, with the run files; their sizes."""
    sizes = list[int]()
    for path in sorted(source.rglob("*")):
        newest = sorted(path.parent.glob("checkpoint-*.safetensors"))[-1:]
        old = path.name.startswith("checkpoint-") and not path.name.startswith(newest[0].stem)
        if path.is_file() and not old and path.name != "lock":
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
            sizes.append(path.stat().st_size)
    return sizes


@pytest.mark.parametrize("step", ["readable", "fast"])
def test_a_state_in_parts_goes_on_elsewhere(step, tmp_path):
    """Stopped again and again, carried in small files to another folder each time: bit for bit the same runs."""
    given = {"step": step, "penalties": (0.25, 0.0, -0.5)}
    assert run(tmp_path / "whole", **given)
    part, place, most = 40_000, 0, 0
    while not run(tmp_path / str(place), StopAfter(3), part_size=part, **given):
        sizes = moved(tmp_path / str(place), tmp_path / str(place + 1))
        assert max(sizes) <= part
        place, most = place + 1, max(most, len(sizes))
        assert place < 40
    assert place >= 3
    assert most > 5
    assert stories(tmp_path / str(place)) == stories(tmp_path / "whole")
    assert not list(tmp_path.glob(f"{place}/state/**/checkpoint-*"))


RECIPE = {"methods": ("recipe",), "targets": (0.5, 0.8), "epochs": 2, "cost": "macs", "theta_rate": None}


@pytest.fixture(scope="module")
def by_recipe(tmp_path_factory):
    out = tmp_path_factory.mktemp("recipe")
    assert run(out, **RECIPE)
    return out


def test_the_recipe_ends_at_its_target_with_the_budget_of_the_others(by_recipe):
    found = stories(by_recipe)
    assert [name.partition("/")[2] for name in found] == [
        "recipe+cost_macs/target_0.5-seed_0",
        "recipe+cost_macs/target_0.8-seed_0",
    ]
    for story in found.values():
        target, result, settings = story["run"]["target"], story["result"], story["settings"]
        assert 0.5 * target < result["mac_share"] <= target
        assert result["canonical"]["mac_share"] <= result["mac_share"]
        assert result["updates"] == 2 * UPDATES
        assert settings["recipe"]["signal"] == "slopes"
        assert (settings["learning_rate"], settings["weight_decay"]) == (0.1, 5e-4)  # the recipe's, not the study's


def test_the_recipe_reads_as_many_examples_as_the_search(tmp_path):
    made = study(tmp_path, **RECIPE)
    batch = made.batch(made.parts()[0].runs).engine.batch
    assert (batch.samples, batch.batch_size, batch.examples) == (1, 8, 8)
    assert batch.source.search.reads_slopes if batch.begun else not batch.source.compares


def test_the_fast_step_gives_the_recipe_its_slopes(by_recipe, tmp_path):
    """Also stopped again and again, with the state in parts."""
    calls = 0
    while not run(tmp_path, StopAfter(2), step="fast", part_size=40_000, **RECIPE):
        calls += 1
        assert calls < 40
    assert calls
    ours, theirs = stories(tmp_path), stories(by_recipe)
    assert ours.keys() == theirs.keys()
    for name, story in ours.items():
        assert story["result"]["mask"] == theirs[name]["result"]["mask"]
        for row, other in zip(story["curve"], theirs[name]["curve"], strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
    assert run(tmp_path / "whole", step="fast", **RECIPE)
    assert stories(tmp_path / "whole") == ours


def test_the_recipe_and_its_control_stand_beside_the_others(by_recipe):
    assert run(by_recipe, **RECIPE, permuted=True)
    assert run(by_recipe, epochs=2, cost="macs")
    written, _ = write(by_recipe)
    (page,) = (path for path in written if path.name == "README.md")
    text = page.read_text()
    assert "target 50.0%" in text
    assert "recipe+cost_macs+permuted" in text
