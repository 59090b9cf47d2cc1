"""`espalier train`: named networks and one's own, named data and one's own, stopped, continued, refused in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import espalier
from espalier import report
from espalier.ship import import_spec

pytest.importorskip("typer")

FAST = ("--epochs", 1, "--quiet", "--device", "cpu")


def story(folder, name="result.json"):
    return json.loads((folder / name).read_text())


def test_a_named_network_on_named_data(espal, tmp_path):
    run = tmp_path / "run"
    words = ("train", "--model", "mlp", "--model-arg", "hidden=[12, 12]", "--target", "25%", "--out", run, *FAST)
    done = espal(*words)
    assert done.code == 0, done.err
    assert "25.00% of the weights" in done.out
    assert "before the selection" in done.out
    result, ships = story(run), story(run, "result.json")
    assert result["share_after"] <= 0.25
    full = 64 * 12 + 12 * 12 + 12 * 10
    assert ships["sizes"]["weights"][1] == ships["sizes"]["macs"][1] == full
    small = espalier.load(run / "small", lambda: espalier.models.MLP(64, (12, 12), 10))
    counted = sum(p.numel() for name, p in small.named_parameters() if p.ndim == 2)
    assert counted == ships["sizes"]["weights"][0]
    assert sum(p.numel() for p in small.parameters()) == ships["sizes"]["parameters"][0]
    assert counted / full == pytest.approx(result["weight_share"])

    again = espal(*words, "--json")  # a finished run is read, not trained again
    told = json.loads(again.out.splitlines()[-1])
    assert again.out.count("\n") == 1
    assert told["run"] == str(run)
    assert told["share_after"] == result["share_after"]
    assert told["validation_error"] == result["validation_error"]
    assert told["sizes"] == ships["sizes"]
    assert report.read(run).sections[0].title == "digits, 1 epochs, MLP"  # a report knows the data by name


def test_a_network_and_data_of_ones_own_in_a_file(espal, own):
    words = ("train", "--model", "net.py:build", "--model-arg", "width=24", "--model-arg", "deep=true", *FAST)
    done = espal(*words, "--data", "net.py:data", "--target", 0.5, "--out", "run", "--batch-size", 16)
    assert done.code == 0, done.err
    call = story(own / "run", "call.json")
    assert story(own / "run", "settings.json")["command"] == call["command"]
    assert call["model"]["reference"] == "net.py:build"
    assert call["model"]["arguments"] == {"width": 24, "deep": True}
    assert story(own / "run", "result.json")["sizes"]["weights"][1] == 64 * 24 + 24 * 24 + 24 * 10
    assert "10 examples held out" in done.out  # a tenth, since there is no test part
    assert "espalier compact run --model net.py:build --to DIR" in done.out  # without it compact would refuse


@pytest.mark.parametrize(
    ("data", "judged"),
    [("net.py:parts", "32 examples"), ("net.py:loaders", "the test part"), ("net:data", "10 examples held out")],
)
def test_data_of_ones_own_in_every_form(espal, own, data, judged):
    done = espal("train", "--model", "net:Net", "--data", data, "--penalty", "2^-3", "--out", "r", *FAST)
    assert done.code == 0, done.err
    assert judged in done.out
    assert story(own / "r", "settings.json")["settings"]["penalty"] == 0.125


def test_parts_that_are_frozen_stay_so(espal, own):
    done = espal("train", "--model", "net.py:Frozen", "--data", "net.py:data", "--out", "r", *FAST)
    assert done.code == 0, done.err
    small = espalier.load("r/small", import_spec.function("net.py:Frozen", "--model"))
    assert not small.norm.running_mean.any()


def test_arrays_in_a_file(espal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 1, 6, 6), dtype=np.uint8)
    labels = rng.integers(0, 3, (60, 1), dtype=np.int32)
    np.savez("a.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    cnn = ("train", "--model", "cnn", "--model-arg", "widths=[4, 4]", "--data", "a.npz", "--batch-size", 20, *FAST)
    assert espal(*cnn, "--target", 0.6, "--cost", "macs", "--out", "r").code == 0
    settings = story(tmp_path / "r", "settings.json")["settings"]["data"]["tensors"]
    assert settings == [["torch.float32", 60, 1, 6, 6], ["torch.int64", 60]]
    assert "times 0.00392156863" in story(tmp_path / "r", "result.json")["inputs"]

    np.savez("b.npz", inputs=rng.normal(size=(40, 5)), targets=rng.normal(size=(40, 2)))
    mlp = ("train", "--model", "mlp", "--model-arg", "hidden=[6]", "--data", "b.npz", "--batch-size", 10, *FAST)
    done = espal(*mlp, "--out", "s", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["validation_error"] is None
    assert told["validation_loss"] > 0
    assert story(tmp_path / "s", "settings.json")["settings"]["loss"] == "mse_loss"


def test_an_optimizer_that_is_named_is_the_one_that_trains(espal, tmp_path):
    """Numbers to learn train by AdamW where nobody says otherwise."""
    x = np.random.default_rng(0).random((128, 64), np.float32)
    np.savez(tmp_path / "numbers.npz", x=x, y=x[:, :1])
    words = ("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--model-arg", "outputs=1", "--target", 0.5)
    for name, more in {"AdamW": (), "SGD": ("--optimizer", "sgd"), "Adam": ("--optimizer", "adam")}.items():
        done = espal(*words, "--data", tmp_path / "numbers.npz", *more, "--out", tmp_path / name, *FAST)
        assert done.code == 0, done.err
        assert list(story(tmp_path / name, "settings.json")["settings"]["optimizer"]) == [name]


def test_a_run_that_is_judged_by_nothing_has_no_validation(espal, tmp_path):
    """Also of a set known by name, whose test part is the usual one to judge by."""
    small = ("--model", "mlp", "--model-arg", "hidden=[8]", *FAST, "--validation", "none")
    done = espal("train", *small, "--target", 0.5, "--out", tmp_path / "one")
    assert done.code == 0, done.err
    ships = story(tmp_path / "one", "result.json")
    assert (ships["validation_error"], ships["test_examples"], ships["judged_on"]) == (None, 450, "nothing")
    assert ships["inputs"] == "the stored numbers times 0.0625"
    assert "validation" not in done.out
    assert espal("compact", tmp_path / "one", "--to", tmp_path / "small").code == 0
    assert espal("sweep", *small, "--targets", 0.5, "--out", tmp_path / "many", "--no-report").code == 0
    (result,) = (tmp_path / "many").rglob("result.json")
    assert story(result.parent, "result.json")["validation_error"] is None


def test_a_schedule_that_is_named_is_the_one_of_the_run(espal, tmp_path):
    """Whatever the recipe's own is, and whichever optimizer it moves."""
    small = ("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--target", 0.5, *FAST)
    for i, more in enumerate(((), ("--optimizer", "adam"))):
        assert espal(*small, *more, "--schedule", "steps", "--out", tmp_path / f"{i}").code == 0
        found = story(tmp_path / f"{i}", "settings.json")["settings"]
        assert found["scheduler"] == "Steps(at=(0.5, 0.75), by=10.0)"


def test_settings_reach_the_training(espal, tmp_path):
    words = [
        "--optimizer",
        "adamw",
        "--learning-rate",
        "0.002",
        "--weight-decay",
        0.1,
        "--schedule",
        "cosine",
        "--samples",
        4,
    ]
    words += ["--settle", 0.25, "--seed", 7, "--batch-size", 100, "--validation", 0.2, "--cost", "parameters"]
    small = ("--model", "mlp", "--model-arg", "hidden=[8]", "--target", 0.5, *FAST)
    done = espal("train", *small, *words, "--out", tmp_path / "a", "--save-config", tmp_path / "c.toml")
    assert done.code == 0, done.err
    found = story(tmp_path / "a", "settings.json")["settings"]
    group = found["optimizer"]["AdamW"][0]
    assert (group["lr"], group["weight_decay"]) == (0.002, 0.1)
    assert found["scheduler"] == "Cosine(end=0.0)"
    assert (found["samples"], found["seed"], found["batch_size"], found["cost"]) == (4, 7, 100, "parameters")
    assert found["data"]["examples"] == 1347 - 269
    assert found["settle_at"] == 10 - round(0.25 * 10)
    ships = story(tmp_path / "a", "result.json")
    assert ships["validation_examples"] == 269
    assert ships["test_examples"] == 450

    # The file that was saved is the same run; a flag makes another of it.
    assert espal("train", tmp_path / "c.toml", "--out", tmp_path / "b").code == 0
    assert story(tmp_path / "b")["kept"] == story(tmp_path / "a")["kept"]
    line = espal("train", tmp_path / "c.toml", "--seed", 8).line
    assert "--seed 7 there, 8 here" in line
    assert story(tmp_path / "a", "call.json")["settings"]["seed"] == 7


def test_momentum_and_rate_of_the_recipe_s_own_descent(espal, tmp_path):
    words = (
        "--model",
        "mlp",
        "--model-arg",
        "hidden=[8]",
        "--recipe",
        "paper",
        "--learning-rate",
        0.3,
        "--momentum",
        0.5,
    )
    assert espal("train", *words, "--settle", 0.1, *FAST, "--out", tmp_path).code == 0
    found = story(tmp_path, "settings.json")["settings"]
    group = found["optimizer"]["SGD"][0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.5, True)
    assert found["recipe"]["theta_rate"] == 1.0


def test_a_time_limit_is_no_failure_and_the_same_command_goes_on(espal, tmp_path):
    words = ("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--target", 0.5, "--out", tmp_path / "r")
    stopped = espal(*words, *FAST, "--time-limit", "1e-6")
    assert stopped.code == 0
    assert "unfinished" in stopped.out
    assert story(tmp_path / "r")["finished"] is False
    assert story(tmp_path / "r", "result.json")["finished"] is False
    done = espal(*words, *FAST, "--json")
    assert json.loads(done.out)["finished"] is True
    whole = espal(*words[:-1], tmp_path / "s", *FAST, "--json")
    different = {"run", "seconds"}
    first, second = json.loads(done.out), json.loads(whole.out)
    assert {k: v for k, v in first.items() if k not in different} == {
        k: v for k, v in second.items() if k not in different
    }


def test_a_trained_network_to_start_from(espal, tmp_path):
    torch.manual_seed(5)
    trained = espalier.models.MLP(64, (16,), 10)
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    small = (
        "train",
        "--model",
        "mlp",
        "--model-arg",
        "hidden=[16]",
        "--recipe",
        "finetune",
        "--learning-rate",
        0,
        *FAST,
    )
    assert espal(*small, "--target", 0.5, "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "r").code == 0
    cut = espalier.load(tmp_path / "r" / "small", lambda: espalier.models.MLP(64, (16,), 10))
    kept = cut.layers[0].weight
    assert len(kept) <= 8
    assert all(any(torch.equal(row, whole) for whole in trained.layers[0].weight) for row in kept)  # a rate of 0
    (tmp_path / "w.safetensors").write_bytes(b"cut off")
    again = ("--target", 0.5, "--out", tmp_path / "s", "--weights")
    assert "w.safetensors" in espal(*small, *again, tmp_path / "w.safetensors").line
    assert "pickle" in espal(*small, *again, tmp_path / "w.pt").line
    assert "no file" in espal(*small, *again, tmp_path / "none.safetensors").line
    save_file({"head.bias": torch.zeros(10)}, tmp_path / "w.safetensors")
    assert "does not fit" in espal(*small, *again, tmp_path / "w.safetensors").line


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path):
    words = [
        sys.executable,
        "-m",
        "espalier",
        "train",
        "--model",
        "mlp",
        "--out",
        str(tmp_path / "r"),
        "--device",
        "cpu",
    ]
    words += ["--model-arg", "hidden=[8]", "--epochs", "4000", "--validation", "none"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while "epoch 1" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip().endswith(f"espalier: stopped; the same command goes on from {tmp_path / 'r'}")
    assert "Traceback" not in said
    assert "\r" not in said  # no bars where there is no terminal
    assert not out
    assert list((tmp_path / "r").glob("checkpoint-*.safetensors"))


def test_weights_come_from_the_seed(espal, tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(hash(name) % 100)  # whatever was before
        assert espal("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--out", tmp_path / name, *FAST).code == 0
    first, second = (espalier.train.checkpoint.unpack(_last(tmp_path / name))[1] for name in ("a", "b"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def _last(folder):
    return sorted(folder.glob("checkpoint-*.safetensors"))[-1].read_bytes()


def test_a_target_too_small_to_learn_is_a_warning_and_no_error(espal, tmp_path):
    """Of 100 examples 95 are of one class, and nothing is learned at this rate: to guess that class is no worse."""
    arrays = {"x": np.random.default_rng(0).random((100, 64), np.float32), "y": np.arange(100) % 20 // 19}
    np.savez(tmp_path / "arrays.npz", **{f"{k}_{part}": v for k, v in arrays.items() for part in ("train", "test")})
    words = ("train", "--model", "mlp", "--data", tmp_path / "arrays.npz", "--target", "0.02", "--learning-rate", 1e-9)
    done = espal(*words, "--out", tmp_path / "run", "--json", *FAST)
    assert done.code == 0, done.err
    (line,) = done.err.splitlines()
    assert line.startswith("espalier: warning: the network has not learned: on the validation data its error of ")
    assert line.endswith("use a larger target than 2.00%, or train longer")
    assert json.loads(done.out.splitlines()[-1])["warning"] in line
