"""`espalier sweep`, and `espalier study` with a network and data of one's own: by the words of `espalier train`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import espalier
from espalier import report
from espalier.cli.app import GridSettings
from espalier.study.training import Sweeping, Training
from espalier.train.batched import Run
from espalier.train.setting import declared

pytest.importorskip("typer")

OWN = ("--model", "net.py:build", "--model-arg", "width=12", "--data", "net.py:parts", "--batch-size", 16)
FAST = ("--epochs", 1, "--quiet", "--device", "cpu")


def test_a_sweep_is_that_of_the_library(espal, own):
    """Sizes and errors are those of espalier.sweep with the same words, run by run."""
    done = espal("sweep", *OWN, "--targets", "30%,0.6", "--seeds", 2, "--out", "runs", *FAST, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out.splitlines()[-1])
    assert (told["runs"], told["complete"]) == (4, True)
    assert str(own / "runs" / "report.html").endswith(next(p for p in told["wrote"] if p.endswith(".html")))
    import net

    parts = {name: tuple(map(torch.as_tensor, pair)) for name, pair in net.parts().items()}
    runs = [Run(seed, target=target) for target in (0.3, 0.6) for seed in (0, 1)]
    about = {"epochs": 1, "batch_size": 16, "recipe": "default", "device": "cpu", "quiet": True}
    results = espalier.sweep(lambda: net.build(12), parts["train"], runs=runs, validation=parts["test"], **about)
    kept = report.read(own / "runs").runs
    assert len(kept) == 4
    for run, result in zip(sorted(kept, key=lambda run: run.name), results):
        assert run.shares["weights"] == pytest.approx(result.shares["weight_share"])
        assert run.error == pytest.approx(result.validation_error)
        assert run.error_of == "validation data"


def test_a_study_of_ones_own_network_and_data(espal, own):
    words = ("study", *OWN, "--targets", "0.3,0.6", "--seeds", 2, "--out", "grid", *FAST)
    done = espal(*words, "--json")
    assert done.code == 0, done.err
    study = report.read(own / "grid")
    (section,) = study.sections
    assert {variant: len(section.of(variant)) for variant in section.variants} == {
        "search": 4,
        "found": 4,
        "permuted": 4,
    }
    searched, found = ({run.seed: [] for run in section.runs} for _ in range(2))
    for run in section.runs:
        if run.variant != "permuted":
            (searched if run.variant == "search" else found)[run.seed].append(run.kept)
    assert {s: sorted(map(str, k)) for s, k in searched.items()} == {s: sorted(map(str, k)) for s, k in found.items()}
    labels = [[run.label for run in section.of(variant)] for variant in section.variants]
    assert labels == 3 * [["target 30%", "target 30%", "target 60%", "target 60%"]]
    before = {path: path.read_bytes() for path in (own / "grid").rglob("result.json")}
    assert espal(*words).code == 0  # finished: read, not trained again
    assert {path: path.read_bytes() for path in before} == before


def test_a_time_limit_before_the_first_run_is_no_error(espal, own):
    for words in (("sweep", *OWN), ("study", *OWN, "--methods", "search")):
        done = espal(*words, "--targets", "0.3", "--out", "none", *FAST, "--time-limit", 1e-6, "--json")
        assert done.code == 0, done.err
        told = json.loads(done.out)
        assert (told["runs"], told["complete"], told["wrote"]) == (0, False, [])


def test_what_a_study_of_ones_own_network_cannot_do_is_refused(espal, own):
    for flag, value in {"--folds": 2, "--hidden": "8", "--page": "page.md"}.items():
        assert espal("study", *OWN, "--targets", "0.3", "--out", "none", *FAST, flag, value).line.startswith(
            f"espalier: {flag} is for --model mlp"
        )


def test_a_study_of_perceptrons_reads_a_file_of_arrays(espal, own):
    draw = np.random.default_rng(0)
    x, y = draw.random((80, 64), np.float32), draw.integers(0, 3, 80)
    np.savez(own / "my arrays.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    words = ("--hidden", "6,6", "--methods", "search,scratch", "--targets", 0.4, "--seeds", 1, "--points", 2)
    done = espal("study", "--data", "my arrays.npz", *words, "--batch-size", 16, "--out", "grid", "--no-report", *FAST)
    assert done.code == 0, done.err
    runs = report.read(own / "grid").runs
    assert {(run.variant, run.settings["dataset"]) for run in runs} == {
        ("search", "my_arrays"),
        ("scratch", "my_arrays"),
    }
    assert runs[0].settings["widths"] == [64, 6, 6, 3]


def test_a_slash_in_the_name_of_a_dataset_leads_to_no_other_folder(espal, own):
    (own / "data_of.py").write_text(
        "import numpy, espalier.data\n"
        "x, y = numpy.random.default_rng(0).random((80, 4), numpy.float32), numpy.arange(80) % 2\n"
        "def parts(): return espalier.data.from_arrays((x, y), (x, y), name='mine/first')\n"
    )
    words = ("--hidden", "6", "--methods", "search", "--targets", 0.4, "--seeds", 1, "--batch-size", 16)
    done = espal("study", "--data", "data_of.py:parts", *words, "--out", "grid", "--no-report", *FAST)
    assert done.code == 0, done.err
    (run,) = report.read(own / "grid").runs
    assert run.settings["dataset"] == "first"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("sweep", *OWN, "--out", "x"), "give either --targets"),
        (("sweep", *OWN, "--targets", 0.3, "--penalties", 0.1, "--out", "x"), "give either --targets"),
        (("sweep", "--model", "mpl", "--targets", 0.3, "--out", "x"), "did you mean 'mlp'"),
        (
            ("sweep", "--model", "net.py:build", "--data", "net.py:loaders", "--targets", 0.3, "--out", "x"),
            "one tensor",
        ),
        (("study", *OWN, "--hidden", "8,8", "--out", "x"), "--hidden is for --model mlp"),
        (("study", "--model-arg", "width=3", "--out", "x"), "--model-arg is for a network of your own"),
        (("study", "--data", "digitz", "--out", "x"), "did you mean 'digits'"),
    ],
)
def test_bad_words_are_refused_in_one_line(espal, own, words, why):
    assert why in espal(*words, "--quiet").line


def test_old_words_are_warned_of_in_one_line(espal, own):
    words = ("sweep", *OWN, "--targets", 0.5, "--out", "x", "--no-report", "--lr", 0.05, *FAST)
    done = espal(*words)
    assert done.code == 0, done.err
    assert done.err == "espalier: --lr is now --learning-rate; the old name is accepted in this release only\n"


def test_a_word_means_the_same_everywhere():
    """A flag that a sweep shares with a training has its help, default and bounds; those of a study have its name."""
    of_train, of_sweep = ({one.flag: one for one in declared(kind)} for kind in (Training, Sweeping))
    shared = of_train.keys() & of_sweep.keys()
    assert len(shared) > 18
    for flag in shared:
        assert (of_train[flag].help, of_train[flag].default) == (of_sweep[flag].help, of_sweep[flag].default)
    of_study = {one.flag for one in declared(GridSettings)}
    assert {"data", "model", "model-arg", "targets", "seeds", "first-seed", "cost", "epochs", "batch-size"} <= of_study
    assert {"targets", "seeds", "first-seed"} <= of_sweep.keys()


def test_code_of_ones_own_that_fails_in_a_sweep_is_one_line_and_a_log(espal, own):
    (own / "mine.py").write_text(
        "def late(outputs, targets):\n    if outputs.requires_grad:\n        raise OSError('late')\n"
        "    return (outputs.mean() - targets.float().mean()).abs()\n"
    )
    words = ("--model", "net.py:build", "--data", "net.py:parts", "--loss", "mine.py:late", "--batch-size", 16)
    line = espal("sweep", *words, "--targets", 0.5, "--out", "a", *FAST).line
    assert "code of your own failed: OSError: late (mine.py, line 3)" in line
    assert "(traceback: a/error.log)" in line
    assert "raise OSError('late')" in (own / "a" / "error.log").read_text()


def test_changed_data_are_refused_by_sweeps_and_studies_and_gone_on_with_by_force(espal, own):
    x, y = np.arange(640.0).reshape(80, 8) % 7, np.arange(80) % 2
    common = ("--data", "own.npz", "--targets", 0.5, "--batch-size", 8, *FAST, "--no-report")
    for words in (
        ("sweep", "--model", "mlp", "--model-arg", "hidden=[5]", *common),
        ("study", "--hidden", "5,4", "--seeds", 1, "--methods", "search", *common),
    ):
        np.savez(own / "own.npz", x=x, y=y)
        assert espal(*words, "--out", words[0]).code == 0
        np.savez(own / "own.npz", x=x + 1e-3 * (np.arange(640).reshape(80, 8) == 77), y=y)
        line = espal(*words, "--out", words[0]).line
        assert "there, " in line
        assert "--force" in line
        assert espal(*words, "--out", words[0], "--force").code == 0


@pytest.mark.parametrize("command", ["sweep", "study"])
def test_ctrl_c_is_said_also_when_quiet(espal, own, monkeypatch, command):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("espalier.cli.app.run_many", interrupted)
    done = espal(command, *OWN, "--targets", "0.3", "--out", "runs", *FAST)
    assert (done.code, done.err) == (130, "espalier: stopped; the same command goes on\n")
