"""One view of every kind of run: run files, directories of fit and of sweep, whole and half-written."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from studies import grid, grid_run, run_directory
from torch import nn

import espalier
from espalier.report import Setting, read
from espalier.report.figures import figures
from espalier.report.tables import trade_off
from espalier.space import BadInput, Corrupt
from espalier.train.batched import Run
from paper import synthetic


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)


def test_a_run_of_fit_is_told_as_its_result_says(tmp_path):
    arguments = {"loss": nn.functional.cross_entropy, "epochs": 3, "batch_size": 16, "cost": "macs", "target": 0.5}
    result = espalier.fit(network(), data(), validation=data(), checkpoint=tmp_path / "one", quiet=True, **arguments)
    study = read(tmp_path)
    (run,) = study.runs
    assert (run.name, run.variant, run.setting, run.seed, run.state) == (
        "one",
        "search",
        Setting("target", 0.5),
        0,
        "finished",
    )
    assert run.error == pytest.approx(result.validation.error)
    assert run.shares == pytest.approx(
        {
            "weights": result.shares["weight_share"],
            "units": result.shares["unit_share"],
            "MACs": result.shares["cost_share"],
        }
    )
    assert run.kept == {"0": (int(result.mask.sum()), 8)}
    assert [row["error"] for row in run.curve] == [row["validation_error"] for row in result.history]
    assert [row["training loss"] for row in run.curve] == [row["loss"] for row in result.history]
    assert run.theta.sizes == {"0": 8}
    assert run.theta.values[-1] == pytest.approx(result.theta.numpy(), abs=1e-6)
    assert run.error_of == "validation data"
    assert read(tmp_path / "one").runs[0].name == "one"


def test_a_sweep_is_a_section_of_points_with_their_seeds(tmp_path):
    asked = [Run(seed, penalty=p) for p in (0.0, 0.5) for seed in (0, 1)] + [
        Run(0, dropout=0.25),
        Run(1, all_open=True),
    ]
    results = espalier.sweep(network, data(), runs=asked, epochs=2, batch_size=32, checkpoint=tmp_path, quiet=True)
    (section,) = read(tmp_path).sections
    summary = {
        (one.variant, point.label): [run.seed for run in point.runs] for one in section.series for point in one.points
    }
    assert summary == {
        ("search", "penalty 2^-1"): [0, 1], ("search", "penalty 0"): [0, 1], ("fixed", "size 100%"): [1],
        ("dropout", "rate 0.25"): [0],
    }  # fmt: skip
    # Without validation data the training's own error speaks, and is called so.
    assert section.error_of == "training data"
    first = next(run for run in section.runs if run.name == "run-000")
    assert first.error == results[0].history[-1]["error"]


def test_a_grid_has_a_series_for_each_method_and_a_front(tmp_path):
    grid(tmp_path)
    study = read(tmp_path)
    (section,) = study.sections
    assert (study.kind, study.name, section.title) == ("digits-grid", "Digits grid", "digits, 4 epochs")
    assert [one.variant for one in section.series] == ["search", "scratch", "found"]
    assert section.axes == ["weights", "MACs", "units"]
    front = [(x, round(y, 6), point.variant) for x, y, point in section.front("weights")]
    # medians: search 6.1%, 3.1%, 2.1%; found 1.1% at one half is better and not larger
    assert front == [(0.1, 0.061, "search"), (0.25, 0.031, "search"), (0.5, 0.011, "found")]
    assert study.runs[0].kept == {"conv1": (5, 16), "conv2": (10, 32)}


def as_lines(folder, paths):
    """The run files as one file of a batch: what they share first."""
    records = [json.loads(path.read_text()) for path in paths]
    own = [{key: record.pop(key) for key in ("run", "result", "curve")} for record in records]
    for i, line in enumerate(own):
        line["run"]["fold"] = i % 2
    for path in paths:
        path.unlink()
    batch = paths[0].with_name("batch.jsonl")
    head = records[0] | {"runs_in_batch": len(own)}
    batch.write_text("".join(json.dumps(line) + "\n" for line in [head, *own]))
    return batch


def test_a_batch_of_short_runs_is_one_file_of_lines(tmp_path):
    batch = as_lines(tmp_path, [grid_run(tmp_path, "search", 0.25, seed) for seed in range(4)])
    grid_run(tmp_path, "scratch", 0.25, 0)
    (section,) = read(tmp_path).sections
    summary = [(run.name, run.fold, run.seed, run.error) for run in section.runs]
    assert summary[:2] == [
        ("digits-4_epochs/search/fold_0-target_0.25-seed_0", 0, 0, 0.03),
        ("digits-4_epochs/search/fold_1-target_0.25-seed_1", 1, 1, 0.031),
    ]
    assert [len(point.runs) for point in section.points] == [4, 1]
    complete = batch.read_text()
    for cut in (complete[:-40], "\n".join(complete.splitlines()[:-1]), complete.splitlines()[1]):
        batch.write_text(cut)
        with pytest.raises(Corrupt, match=r"batch.jsonl is (damaged|not whole)"):
            read(tmp_path)


@pytest.mark.parametrize(("folder", "name"), [("fashion-mnist", "Fashion-MNIST"), ("my_own-runs", "My own runs")])
def test_a_folder_named_as_its_data_is_called_as_people_call_them(tmp_path, folder, name):
    run_directory(tmp_path / folder / "run-000", seed=0)
    assert read(tmp_path / folder).name == name


def test_files_and_directories_below_one_folder_are_one_study(tmp_path):
    grid_run(tmp_path, "search", 0.25, 0)
    for seed in (0, 1):
        run_directory(tmp_path / "more" / f"run-{seed:03d}", seed=seed)
    study = read(tmp_path)
    assert sorted(run.name for run in study.runs) == [
        "digits-4_epochs/search/target_0.25-seed_0", "more/run-000", "more/run-001",
    ]  # fmt: skip
    assert len(study.sections) == 2  # other data, another network: not one curve


def test_the_paper_s_studies_tell_layers_by_lists(tmp_path):
    synthetic.write(tmp_path, "search", 2**-7, 0, error=0.02, units=(340, 141, 126))
    (run,) = read(tmp_path).runs
    assert run.kept == {"layer 1": (340, 784), "layer 2": (141, 784), "layer 3": (126, 784)}
    assert run.theta.ranked
    assert run.theta.values.shape == (2, 3 * 784)
    assert np.count_nonzero(run.theta.values[-1] > 0.5) == 340 + 141 + 126
    path = synthetic.write(tmp_path / "blocks", "search", 2**-7, 0, error=0.02)
    record = json.loads(path.read_text())
    record["result"] = {"test_error": 0.1, "connections": [36, 6, 20], "weight_share": 0.158, "mac_share": 0.2}
    record["result"]["theta_histogram"] = [[55, 36], [85, 6], [71, 20]]
    record["settings"] = {"dataset": "cifar10", "epochs": 300}
    path.write_text(json.dumps(record))
    (run,) = read(tmp_path / "blocks").runs
    assert run.kept == {"block 1": (36, 91), "block 2": (6, 91), "block 3": (20, 91)}
    assert run.shares == {"weights": 0.158, "MACs": 0.2}
    record["result"]["canonical"] = {"weight_share": 0.1, "mac_share": 0.2}
    path.write_text(json.dumps(record))
    (section,) = read(tmp_path / "blocks").sections
    assert section.runs[0].shares == {"weights": 0.158, "live weights": 0.1, "MACs": 0.2}
    assert section.axes == ["weights", "MACs", "live weights"]


@pytest.mark.parametrize(
    ("name", "keep", "note"),
    [
        ("result.json", None, None),
        ("result.json", 40, "result.json is not whole"),
        ("metrics.jsonl", 300, "cut off in line 3"),
    ],
)
def test_a_half_written_run_is_shown_as_far_as_it_goes(tmp_path, name, keep, note):
    run_directory(tmp_path / "whole", seed=1)
    path = run_directory(tmp_path / "half") / name
    if keep is None:
        path.unlink()
    else:
        path.write_text(path.read_text()[:keep])
    study = read(tmp_path)
    half = next(run for run in study.runs if run.name == "half")
    if name == "result.json":
        assert half.state == "unfinished"
        assert half.error == pytest.approx(0.05)  # of its last row
        (point,) = study.sections[0].points
        assert [run.name for run in point.done] == ["whole"]  # a number that is not final counts nowhere
    else:
        assert half.state == "finished"
        assert len(half.curve) == 2
    assert study.notes == (
        () if note is None else (next(n for n in study.notes if note in n and n.startswith("half")),)
    )


def test_a_run_without_its_settings_is_named_and_left_out(tmp_path):
    run_directory(tmp_path / "whole")
    (run_directory(tmp_path / "broken") / "settings.json").write_text('{"settings": {"mod')
    study = read(tmp_path)
    assert [run.name for run in study.runs] == ["whole"]
    assert study.notes[0].startswith("broken is left out: settings.json is damaged: it is not JSON")
    with pytest.raises(Corrupt, match="no run that can be read: broken"):
        read(tmp_path / "broken")


def test_theta_of_other_gates_is_not_shown(tmp_path):
    folder = run_directory(tmp_path)
    assert read(tmp_path).runs[0].theta.values.shape == (6, 6)
    record = json.loads((folder / "settings.json").read_text())
    record["settings"]["space"] = json.dumps([["bits", "0", 4, 1]])
    (folder / "settings.json").write_text(json.dumps(record))
    assert read(tmp_path).runs[0].theta is None
    (folder / "theta.safetensors").write_bytes(b"no tensors")
    assert read(tmp_path).runs[0].theta is None


def test_a_diverged_run_counts_as_an_error_of_one_and_says_so(tmp_path):
    path = grid_run(tmp_path, "search", 0.25, 0)
    record = json.loads(path.read_text())
    record["result"] |= {"test_error": None, "test_loss": None, "diverged_at": 7}
    path.write_text(json.dumps(record))
    (run,) = read(tmp_path).runs
    assert (run.state, run.error, run.loss) == ("diverged", 1.0, None)


def test_a_diverged_run_that_ended_with_an_error_counts_with_it(tmp_path):
    path = grid_run(tmp_path, "search", 0.25, 0)
    record = json.loads(path.read_text())
    record["result"] |= {"test_error": 0.4, "diverged_at": 7}
    path.write_text(json.dumps(record))
    (run,) = read(tmp_path).runs
    assert (run.state, run.error) == ("diverged", 0.4)


def test_a_diverged_run_of_a_regression_has_no_error(tmp_path):
    def factory(run):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            model[0].weight.mul_(1e30 if run.seed == 1 else 1)
            model[2].weight.mul_(1e30 if run.seed == 1 else 1)
        return model

    x = data()[0]
    pair = (x, x[:, :1])
    common = {"loss": nn.functional.mse_loss, "epochs": 2, "batch_size": 32, "checkpoint": tmp_path, "quiet": True}
    results = espalier.sweep(factory, pair, targets=[0.5], seeds=[0, 1, 2], validation=pair, **common)
    (section,) = read(tmp_path).sections
    assert [(run.state, run.error) for run in section.runs] == [
        ("finished", None), ("diverged", None), ("finished", None)
    ]  # fmt: skip
    assert (section.measure, section.error_of) == ("loss", "validation data")
    both = [results[0].validation.loss, results[2].validation.loss]
    assert trade_off(section).rows[0][5] == pytest.approx(np.median(both))


def test_sections_that_a_study_keeps_apart_have_titles_of_their_own(tmp_path):
    common = {"dataset": "digits", "epochs": 4}
    for part, rate, size in (("-rate_0.1", 0.1, 32), ("-held_out", 0.05, 32), ("-batch_8", 0.05, 8), ("", 0.05, 32)):
        grid_run(tmp_path, "search", 0.25, 0, settings=common | {"learning_rate": rate, "batch_size": size})
        if part:
            (tmp_path / "runs" / "digits-4_epochs").rename(tmp_path / "runs" / f"digits{part}-4_epochs")
    sections = read(tmp_path).sections
    assert sorted(section.title for section in sections) == [
        "digits, 4 epochs", "digits, 4 epochs, batch 8", "digits, 4 epochs, held-out images",
        "digits, 4 epochs, learning rate 0.1",
    ]  # fmt: skip
    assert len({section.name for section in sections}) == 4


def folded(folder, pairs):
    """A run of search at 0.25 for each fold and seed."""
    for fold, seed in pairs:
        path = grid_run(folder, "search", 0.25, seed)
        record = json.loads(path.read_text())
        record["run"]["fold"] = fold
        path.write_text(json.dumps(record))
        path.rename(path.with_name(f"fold_{fold}-{path.name}"))


@pytest.mark.parametrize(
    ("pairs", "trials", "over"),
    [
        ([(fold, seed) for fold in range(2) for seed in range(3)], "3 seeds on 2 folds", "seeds and folds"),
        ([(0, 0), (0, 1), (1, 0)], "3 runs", "seeds and folds"),
        ([(fold, 7) for fold in range(2)], "1 seed on 2 folds", "seeds and folds"),
        ([(None, seed) for seed in range(4)], "4 seeds", "seeds"),
        ([(None, 0)], "1 seed", "seeds"),
    ],
)
def test_seeds_and_folds_are_counted_apart(tmp_path, pairs, trials, over):
    folded(tmp_path, pairs)
    (section,) = read(tmp_path).sections
    assert (section.trials, section.over) == (trials, over)
    words = " ".join(text.get_text() for figure in figures(section).values() for text in figure.findobj(Text))
    assert (f"median and quartiles of {trials}" in words) == (len(pairs) > 1)
    assert f"medians over {over})" in trade_off(section).caption


def test_values_of_the_wrong_kind_are_refused_with_their_place(tmp_path):
    path = grid_run(tmp_path, "search", 0.25, 0)
    whole = json.loads(path.read_text())
    wrong = {"result.test_error": "0.1", "result.weight_share": True, "result.updates": None, "run.seed": "x"}
    wrong["result.kept"] = [1, 2]
    for place, value in (wrong | {"settings.epochs": -1}).items():
        part, name = place.split(".")
        path.write_text(json.dumps(whole | {part: whole[part] | {name: value}}))
        with pytest.raises(Corrupt, match=rf"seed_0\.json is damaged: {place} is"):
            read(tmp_path)
    path.write_text(json.dumps(whole | {"curve": [{"update": "never"}]}))
    with pytest.raises(Corrupt, match=r"curve\.update is a whole number"):
        read(tmp_path)
    path.write_text(json.dumps(whole | {"result": whole["result"] | {"later": [1, 2]}}))  # beyond what is described
    assert read(tmp_path).runs[0].result["later"] == [1, 2]


def test_mixed_studies_are_refused(tmp_path):
    grid_run(tmp_path, "search", 0.25, 0)
    grid_run(tmp_path, "search", 0.25, 1, settings={"dataset": "digits", "epochs": 4, "batch_size": 64})
    with pytest.raises(BadInput, match=r"a mixed study: batch_size is 32 in .*seed_0.json and 64 in .*seed_1.json"):
        read(tmp_path)
    rate = {"dataset": "digits", "epochs": 4, "batch_size": 32, "learning_rate": 0.1}
    grid_run(tmp_path, "search", 0.25, 1, settings=rate)
    with pytest.raises(BadInput, match=r"a mixed study: learning_rate is null in .*seed_0.json and 0.1 in "):
        read(tmp_path)
    grid_run(tmp_path, "search", 0.25, 1, study="another")
    with pytest.raises(BadInput, match=r'a mixed study: study is "digits-grid" in .* and "another" in '):
        read(tmp_path)


def test_a_folder_of_other_things_is_no_study(tmp_path):
    for name, text in (("settings.json", '{"editor": "x"}'), ("notes/result.json", "{}"), ("runs/a.json", "{}")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match="holds no finished run"):
        read(tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        read(tmp_path / "settings.json")
