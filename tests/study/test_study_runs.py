"""Studies run, stop, go on and are recorded: the resumed one equals the uninterrupted one."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest
import torch
from study_helpers import SMALL, StopAfter, run, stories, study

from espalier import schema
from espalier.data import load
from espalier.report import read
from espalier.space import BadInput, Corrupt
from espalier.study import Study
from espalier.study.settings import RunSpec


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    assert run(out)
    return out


def test_every_run_has_its_file_and_its_story(whole):
    found = stories(whole)
    assert len(found) == 3 * 2 + 2 * 2 + 2
    for name, story in found.items():
        result = story["result"]
        assert story["study"] == "unit-selection"
        assert result["updates"] == 84
        assert [row["update"] for row in story["curve"]] == [21, 42, 63, 84]
        assert result["test_error"] == story["curve"][-1]["test_error"]  # of the last update, not the best seen
        assert 0 <= result["test_error"] <= 1
        units, mask = result["units"], bin(int("1" + result["mask"], 16))[3:33]
        assert [mask[:12].count("1"), mask[12:22].count("1"), mask[22:].count("1")] == units
        assert result["unit_share"] == pytest.approx(sum(units) / 30)
        weights = [64, *units, 10]
        share = sum(a * b for a, b in pairwise(weights)) / (64 * 12 + 12 * 10 + 10 * 8 + 80)
        assert result["weight_share"] == pytest.approx(share)
        assert story["commit"] == "abc"
        assert story["versions"]["torch"] == torch.__version__
        assert story["hardware"]["device"] == "cpu"
        if "search" in name:
            assert [sum(layer) for layer in result["theta_histogram"]] == [12, 10, 8]
            assert result["stochastic"]["draws"] == 20
        else:
            assert "theta_histogram" not in result
    timed = json.loads(next(whole.glob("runs/**/*.jsonl")).read_text().splitlines()[0])["seconds"]
    assert timed["batch"] == pytest.approx(sum(timed["parts"].values()), abs=0.01)


def test_nothing_is_left_of_a_finished_batch_but_its_files(whole):
    assert not list(whole.glob("state/**/*.safetensors"))


class Killed(Exception):
    pass


def as_files(folder):
    """The batches of a folder as earlier versions kept them: a file for each run."""
    for path in folder.glob("runs/*/*/*.jsonl"):
        head, *runs = map(json.loads, path.read_text().splitlines())
        for record in runs:
            spec = RunSpec(**record["run"])
            place = path.parent.parent / spec.variant / f"{spec.setting}-seed_{spec.seed}.json"
            place.parent.mkdir(exist_ok=True)
            place.write_text(schema.sealed({k: v for k, v in head.items() if k != schema.CHECKSUM} | record))
        path.unlink()


@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_that_was_begun_stays_together_whichever_of_its_runs_are_finished(whole, tmp_path, monkeypatch, count):
    """Its masks come from one generator. Those that another command finished are not written again."""
    with monkeypatch.context() as patch:
        patch.setattr(Study, "keep", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(tmp_path, methods=("search",))
    assert not stories(tmp_path)
    shutil.copytree(whole / "runs", tmp_path / "runs")
    as_files(tmp_path)
    files = sorted(tmp_path.glob("runs/*/search*/*.json"))
    for path in [*files[count:], *tmp_path.glob("runs/*/[df]*/*.json")]:
        path.unlink()
    assert run(tmp_path, methods=("search",))
    ours, theirs = stories(tmp_path), stories(whole)
    assert len(ours) == 6 - count
    assert all(story == theirs[name] for name, story in ours.items())
    assert len(read(tmp_path).runs) == 6
    assert not list(tmp_path.glob("state/**/*.safetensors"))


def test_a_study_of_an_earlier_version_is_complete(whole, tmp_path):
    shutil.copytree(whole / "runs", tmp_path / "runs")
    as_files(tmp_path)
    assert len(list(tmp_path.glob("runs/*/*/*.json"))) == len(stories(whole))
    assert study(tmp_path).parts() == []
    assert len(read(tmp_path).runs) == len(stories(whole))


def test_further_trials_train_what_is_missing_alone(whole, tmp_path):
    assert run(tmp_path, methods=("search",), trials=1)
    before = stories(tmp_path)
    made = study(tmp_path, methods=("search",))
    assert [[r.seed for r in runs] for runs in (part.runs for part in made.parts())] == [[1, 1, 1]]
    assert run(tmp_path, methods=("search",))
    assert len(stories(tmp_path)) == 6
    assert all(stories(tmp_path)[name] == story for name, story in before.items())


def test_dropout_and_fixed_networks_keep_what_they_are_given(whole):
    found = stories(whole)
    assert {tuple(s["result"]["units"]) for n, s in found.items() if "share_0.5" in n} == {(6, 5, 4)}
    assert {s["result"]["unit_share"] for n, s in found.items() if "dropout" in n} == {1.0}


def test_a_negative_penalty_grows_and_a_positive_one_shrinks(whole):
    found = stories(whole)

    def shares(part):
        return [story["result"]["unit_share"] for name, story in found.items() if part in name]

    assert min(shares("penalty_-0.5")) == 1.0
    assert max(shares("penalty_0.25")) < min(shares("penalty_-0.5"))


@pytest.mark.parametrize("looks", [2, 7])
def test_stopped_and_continued_equals_uninterrupted(whole, tmp_path, looks):
    calls = 0
    while not run(tmp_path, StopAfter(looks)):
        calls += 1
        assert calls < 40
    assert calls >= 1
    assert stories(tmp_path) == stories(whole)


def test_a_complete_study_does_nothing_more(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.glob("runs/**/*.jsonl")}
    assert run(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.glob("runs/**/*.jsonl")} == before


def test_more_trials_add_runs_and_leave_the_others(whole, tmp_path):
    assert run(tmp_path, trials=1, methods=("fixed",))
    assert run(tmp_path, trials=2, methods=("fixed",))
    ours, theirs = stories(tmp_path), stories(whole)
    for name, story in ours.items():
        # A fixed run knows nothing of the runs beside it; beside dropout its arithmetic is another.
        assert story["result"]["test_loss"] == pytest.approx(theirs[name]["result"]["test_loss"], rel=1e-3)
    assert len(ours) == 4


def test_other_settings_are_refused_and_shown(whole, tmp_path):
    with pytest.raises(BadInput, match=r"batch_size: 32 there, 16 here"):
        run(whole, batch_size=16)
    assert not run(tmp_path, StopAfter(2))
    with pytest.raises(BadInput, match=r"learning_rate"):
        run(tmp_path, learning_rate=0.1)


def test_a_half_written_run_file_is_named(whole, tmp_path):
    made = study(tmp_path, trials=1, methods=("dropout",))
    path = made.parts()[0].place / "rate_0.5-seed_0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1, "ru')
    with pytest.raises(Corrupt, match=path.name):
        made.parts()


@pytest.mark.parametrize(
    "changes",
    [
        {"settle": 0.5},
        {"cost": "weights", "permuted": True},
        {"adaptive": True, "theta_rate": None, "samples": 4},
    ],
    ids=str,
)
def test_variants_run_resume_and_stay_apart(changes, tmp_path):
    small = {"trials": 1, "penalties": (0.25,), "methods": ("search",), **changes}
    assert run(tmp_path / "whole", **small)
    while not run(tmp_path / "parts", StopAfter(3), **small):
        pass
    assert stories(tmp_path / "parts") == stories(tmp_path / "whole")
    (story,) = stories(tmp_path / "whole").values()
    assert story["run"]["variant"].startswith("search+")
    for name, value in changes.items():
        assert story["settings"][name] == value
    if "settle" in changes:
        halves = [row["theta_histogram"] for row in story["curve"] if row["update"] >= 42]
        assert all(half == halves[0] for half in halves)
        assert "stochastic" not in story["result"]


def test_held_out_images_stand_in_for_the_test_set(tmp_path):
    made = study(tmp_path, held_out=300)
    data = load("digits").flatten()
    assert len(made.given.test_labels) == 300
    assert len(made.given.train_labels) == len(data.train_labels) - 300
    rows = {tuple(row.tolist()) for row in data.test_inputs}
    outside = sum(tuple(row.tolist()) not in rows for row in made.given.test_inputs)
    assert outside > 290  # digits repeats hardly any image
    assert "held_out" in made.settings.folder
    assert made.settings.evaluated_on == "300 held-out training images"


def test_bad_devices_and_batches_are_refused_at_once(tmp_path):
    from espalier.study import PaperStudy
    from espalier.study.settings import Settings

    with pytest.raises(BadInput, match="tpu9"):
        PaperStudy(Settings(**SMALL), tmp_path, device="tpu9")
    if not torch.cuda.is_available():
        with pytest.raises(BadInput, match="torch sees no CUDA device"):
            PaperStudy(Settings(**SMALL), tmp_path, device="cuda")
    with pytest.raises(BadInput, match="1000"):
        study(tmp_path, batch_size=1000)
