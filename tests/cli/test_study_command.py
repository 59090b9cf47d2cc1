"""`espalier study` from the command line: small, stopped, continued, from a file, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from espalier.cli.app import RecipeChanges, app  # noqa: E402

SMALL = [
    "study", "--data", "digits", "--device", "cpu", "--hidden", "8,6", "--epochs", "1", "--seeds", "2",
    "--targets", "0.2,0.6", "--points", "2", "--quiet", "--commit", "abc",
]  # fmt: skip


def invoke(*words):
    return CliRunner().invoke(app, [*SMALL, *map(str, words)])


def heads(folder: Path):
    return [json.loads(path.read_text().splitlines()[0]) for path in sorted(folder.rglob("*.jsonl"))]


def test_a_target_may_be_given_in_per_cent_as_to_train(tmp_path):
    done = invoke("--out", tmp_path, "--methods", "search", "--targets", "20%", "--seeds", "1", "--no-report")
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["target_0.2-seed_0.jsonl"]


def test_the_command_runs_and_reports(tmp_path):
    done = invoke("--out", tmp_path, "--methods", "search,scratch,found,permuted,penalty", "--penalties", "2^-3")
    assert done.exit_code == 0, done.output
    places = sorted(str(p.relative_to(tmp_path / "runs" / "digits-1_epochs")) for p in tmp_path.rglob("*.jsonl"))
    assert places == [
        "found/target_0.2_to_0.6-seed_0_to_1.jsonl", "penalty/penalty_0.125-seed_0_to_1.jsonl",
        "permuted/target_0.2_to_0.6-seed_0_to_1.jsonl", "scratch/target_0.2_to_0.6-seed_0_to_1.jsonl",
        "search/target_0.2_to_0.6-seed_0_to_1.jsonl",
    ]  # fmt: skip
    told = [line for line in done.output.splitlines() if "target 20.00% of the cost, reached" in line]
    assert len(told) == 1
    for word in ("before the selection", "after it, error", "scratch", "found", "permuted", "medians of 2"):
        assert word in told[0]
    page = (tmp_path / "README.md").read_text()
    for word in ("reached before selection", "reached after", "ours minus permuted", "2^-3", "64-8-6-10"):
        assert word in page
    assert {head["commit"] for head in heads(tmp_path)} == {"abc"}
    assert {head["settings"].get("signal") for head in heads(tmp_path)} == {None}  # it ranks losses, as all runs did


def test_a_study_reads_slopes_if_it_is_told_to(tmp_path):
    done = invoke("--out", tmp_path, "--methods", "search,scratch,found,permuted", "--recipe", "default")
    assert done.exit_code == 0, done.output
    signals = {head["settings"].get("signal") for head in heads(tmp_path)}
    assert signals == {None, "slopes"}  # scratch and found do not search
    assert "ours minus permuted" in (tmp_path / "README.md").read_text()


def test_fixed_penalties_alone_are_reported_beside_a_readme_of_one_s_own(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    done = invoke("--out", tmp_path, "--methods", "penalty", "--penalties", "2^-3")
    assert done.exit_code == 0, done.output
    assert "REPORT.md" in done.output
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "| 2^-3 | 2 |" in (tmp_path / "REPORT.md").read_text()


def test_a_limit_of_time_stops_it_and_the_same_command_goes_on(tmp_path):
    stopped = invoke("--out", tmp_path, "--methods", "search", "--time-limit", "1e-6")
    assert stopped.exit_code == 0, stopped.output
    assert stopped.stdout.endswith("stopped by its time limit; the same command goes on\n")
    assert not list(tmp_path.rglob("*.jsonl"))
    done = invoke("--out", tmp_path, "--methods", "search", "--no-report")
    assert done.exit_code == 0
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1
    assert not (tmp_path / "README.md").exists()


def test_settings_from_a_file_and_the_flags_of_the_recipe(tmp_path):
    config = tmp_path / "grid.toml"
    config.write_text('targets = [0.4]\nmethods = ["search"]\nramp = 0.25\nsettle = 0.25\ninitial = 0.8\n')
    words = ["--out", tmp_path / "out", "--settle", "0.5", "--drops", "0.5,0.6", "--theta-rate", "3", "--even", "0"]
    kept = [word for word in SMALL[1:] if word not in ("--targets", "0.2,0.6")]
    done = CliRunner().invoke(app, ["study", str(config), *kept, *map(str, words)])
    assert done.exit_code == 0, done.output
    (head,) = heads(tmp_path)
    wanted = {"ramp": 0.25, "settle": 0.5, "initial": 0.8, "theta_rate": 3.0, "even": 0.0, "drops": [0.5, 0.6]}
    assert wanted.items() <= head["settings"].items()


@pytest.mark.parametrize(
    ("given", "settle", "wanted"),
    [
        ({}, None, (0.35, 0.15, 0.5)),
        ({"ramp": 0.4}, None, (0.1, 0.4, 0.5)),
        ({"ramp": 0.4}, 0.3, (0.3, 0.4, 0.3)),
        ({}, 0.75, (0.175, 0.075, 0.75)),
        ({"begin": 0.1}, 0.75, (0.1, 0.15, 0.75)),
        ({"begin": 0.2, "ramp": 0.3}, None, (0.2, 0.3, 0.5)),
        ({"begin": 0.5, "ramp": 0.3}, 0.4, (0.5, 0.3, 0.4)),  # as it was said; no run has such phases
    ],
)
def test_what_is_given_is_taken_at_its_word_and_the_rest_fits(given, settle, wanted):
    recipe = RecipeChanges(**given, settle=settle).apply()
    assert (recipe.begin, recipe.ramp, recipe.settle) == pytest.approx(wanted)


def test_the_rate_of_the_weights_is_changed_without_a_warning():
    assert RecipeChanges(learning_rate=0.1).apply().weights_learning_rate == 0.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--targets", "0.2,tiny"], "tiny"),
        (["--targets", "0.001"], "below the smallest reachable share"),
        (["--methods", "search,magic"], "magic"),
        (["--hidden", "6,six"], "six"),
        (["--device", "abacus"], "abacus"),
        (["--recipe", "papers"], "did you mean 'paper'"),
        (["--ramp", "0.8", "--settle", "0.5"], "settle of at most 0.2"),
        (["--ramp", "2"], "ramp of a recipe is a share"),
        (["--cost", "joules"], "joules"),
        (["--data", "letters"], "letters"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_trained(tmp_path, words, said):
    done = invoke("--out", tmp_path / "out", *words)
    assert done.exit_code != 0
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_target_out_of_reach_is_one_line(espal, tmp_path):
    assert "0.001" in espal(*SMALL, "--out", tmp_path / "out", "--targets", "0.001").line


def test_scripts_get_one_json_object_and_people_every_run(tmp_path):
    words = [word for word in SMALL if word != "--quiet"] + ["--methods", "search,scratch", "--targets", "0.3,0.5"]
    said = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--json"])
    assert said.exit_code == 0, said.output
    (line,) = said.stdout.splitlines()
    story = json.loads(line)
    assert story["complete"]
    assert story["runs"] == 8
    assert any(path.endswith("report.html") for path in story["wrote"])
    states = [line.strip() for line in said.stderr.splitlines() if "error" in line and "search 30%:" in line]
    assert len(states) == 1  # in a log every run is told once, at its end
    assert states[0].count("%") == 1 + 2 + 2  # the target, two shares, two errors
