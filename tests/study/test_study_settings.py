"""The paper's settings are the defaults, and everything else has its own name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from study_helpers import study

from espalier.space import BadInput
from espalier.study.settings import ConnectionSettings, GridSettings, RunSpec, Settings
from espalier.study.study_batches import PaperBatch
from espalier.study.training import Training
from espalier.train.setting import declared


def batch_of(tmp_path, method, **changes):
    made = study(tmp_path, **changes)
    return PaperBatch(made.settings, made.network, made.given, made.settings.runs(method), torch.device("cpu")).engine


def test_the_defaults_are_the_paper_s():
    settings = Settings()
    assert settings.updates(60_000) == 937_500
    assert settings.penalties == (2**-6, 2**-7, 2**-8, 2**-9, 0, -(2**-3), -(2**0))
    assert [len(settings.runs(m)) for m in settings.methods] == [35, 30, 5]
    assert (settings.learning_rate, settings.momentum, settings.weight_decay) == (0.01, 0.9, 1e-4)
    assert (settings.initial, settings.samples, settings.batch_size, settings.dropout) == (0.5, 2, 32, 0.5)
    assert (settings.cost, settings.settle, settings.adaptive, settings.permuted) == ("units", 0.0, False, False)
    assert settings.variant_of("search") == "search"


def test_every_method_reads_as_many_examples_in_as_many_updates(tmp_path):
    search = batch_of(tmp_path, "search", theta_rate=None)
    fixed, dropout = batch_of(tmp_path, "fixed"), batch_of(tmp_path, "dropout")
    assert search.total == fixed.total == dropout.total == 2 * 1347 // 32
    assert search.batch.examples * 2 == fixed.batch.examples == dropout.batch.examples == 64
    assert search.search.theta.shape == (6, 30)
    assert torch.all(search.search.theta == 0.5)
    assert torch.all(search.search.learning_rate == 1 / 30)
    four = batch_of(tmp_path, "search", samples=4)
    assert (four.total, four.batch.examples, four.search.samples) == (search.total, 16, 4)


def test_the_learning_rate_drops_at_a_half_and_at_three_quarters(tmp_path):
    batch = batch_of(tmp_path, "fixed")
    rates = []
    for done in (0, batch.total // 2 - 1, batch.total // 2, batch.total * 3 // 4 - 1, batch.total * 3 // 4):
        batch.batch.state.done.fill_(done)
        rates.append(float(batch.batch.learning_rates()[0]))
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "search"),
        ({"settle": 0.25}, "search+settle_0.25"),
        ({"cost": "weights"}, "search+cost_weights"),
        ({"adaptive": True}, "search+adaptive"),
        ({"samples": 8}, "search+samples_8"),
        ({"permuted": True, "settle": 0.5}, "search+settle_0.5+permuted"),
    ],
)
def test_variants_have_names_of_their_own(changes, name):
    assert Settings(**changes).variant_of("search") == name
    assert {run.variant for run in Settings(**changes).runs("search")} == {name}
    assert {run.variant for run in Settings(**changes).runs("fixed")} == {"fixed"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"methods": ("serach",)}, "serach"),
        ({"methods": ()}, "methods"),
        ({"penalties": (0.1, 0.1)}, "twice"),
        ({"penalties": (float("nan"),)}, "finite"),
        ({"sizes": (0.0,)}, r"\(0, 1\]"),
        ({"samples": 3}, "divisor"),
        ({"samples": 1}, "at least 2"),
        ({"settle": 1.0}, "settle"),
        ({"cost": "macs"}, "macs"),
        ({"trials": 0}, "trials"),
        ({"hidden": (0,)}, "hidden"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_bad_settings_are_named(changes, word):
    with pytest.raises(BadInput, match=word):
        Settings(**changes)


@pytest.mark.parametrize("kind", [Settings, ConnectionSettings, GridSettings, Training])
def test_every_setting_is_defined_once_with_its_help(kind):
    definitions = {one.name: one for one in declared(kind)}
    fields = {one.name for one in dataclasses.fields(kind)}
    assert fields - definitions.keys() <= {"recipe"}
    assert all(one.help for one in definitions.values())
    assert len({one.flag for one in definitions.values()}) == len(definitions)
    for one in definitions.values():  # the flag that is not given gives the default
        if not one.required:
            assert one.parse(one.flag_default) == one.default, one.name


def test_records_keep_their_keys():
    shared = ["dataset", "epochs", "batch_size", "learning_rate", "momentum", "weight_decay", "held_out", "points"]
    search = ["samples", "theta_rate", "initial", "settle", "cost", "adaptive", "permuted"]
    assert list(Settings().describe("fixed")) == [*shared, "precision"]
    assert list(Settings().describe("search")) == [*shared, "precision", *search]
    assert set(ConnectionSettings().describe("search")) == {*shared, "precision", *search, "pad"}
    first = ["dataset", "epochs", "batch_size", "folds", "held_out", "points", "precision", "cost"]
    weights = ["learning_rate", "momentum", "weight_decay", "drops"]
    assert list(GridSettings().describe("scratch")) == [*first, *weights]
    assert list(GridSettings().describe("search"))[: len(first) + 5] == [*first, *weights, "samples"]
    record = Training("mlp", learning_rate=0.1, recipe="paper").to_json()
    assert (record["lr"], record["preset"]) == (0.1, "paper")
    assert not {"learning_rate", "recipe"} & record.keys()
    json.dumps(record)


def test_settings_need_no_command_line():
    program = "import sys; import espalier.study.settings, espalier.study.training; print('typer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_file_names_tell_every_penalty_apart():
    names = {RunSpec("search", "search", 0, penalty=2.0**-k).setting for k in range(40)}
    assert len(names) == 40
