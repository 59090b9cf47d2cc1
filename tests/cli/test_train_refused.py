"""What `espalier train` refuses: one clear line, exit code 2, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from espalier.train import checkpoint as checkpoints

pytest.importorskip("typer")
from espalier.cli import main

FAST = ("--epochs", 1, "--quiet", "--device", "cpu")


def story(folder, name="result.json"):
    return json.loads((folder / name).read_text())


REFUSED = {
    "a network nobody knows": (["--model", "mpl"], ["'mpl'", "'mlp'"]),
    "no such file": (["--model", "nett.py:build"], ["nett.py"]),
    "no such module": (["--model", "nett:build"], ["'nett'"]),
    "no such function": (["--model", "net.py:biuld"], ["'biuld'", "'build'"]),
    "a network itself": (["--model", "net.py:model"], ["net.py:model", "function"]),
    "a factory that fails": (["--model", "net.py:broken"], ["TypeError", "width"]),
    "a factory that fails inside": (["--model", "net.py:broken", "--model-arg", "width=3"], ["no width 3", "line 46"]),
    "a network that asks for something else": (
        ["--model", "net.py:Picky"],
        ["AssertionError", "three", "net.py, line 62"],
    ),
    "a factory of something else": (["--model", "net.py:nothing"], ["int", "torch.nn.Module"]),
    "a file with a mistake": (["--model", "wrong.py:build"], ["wrong.py", "line 2"]),
    "a strange argument": (["--model-arg", "width"], ["'width'", "name=value"]),
    "data nobody knows": (["--data", "minst"], ["'minst'", "'mnist'"]),
    "no such arrays": (["--data", "none.npz"], ["none.npz"]),
    "arrays of other names": (["--data", "odd.npz"], ["odd.npz", "images", "x_train"]),
    "pickled arrays": (["--data", "pickled.npz"], ["pickled.npz"]),
    "what is no file of arrays": (["--data", "text.npz"], ["text.npz", "numpy.savez"]),
    "an input that is no number": (["--data", "hole.npz", "--scale", "0.5"], ["hole.npz", "inputs", "not finite"]),
    "a target that is no number": (["--data", "hole_y.npz"], ["hole_y.npz", "targets", "not finite"]),
    "no examples": (["--data", "empty.npz"], ["empty.npz", "no training examples"]),
    "a scale of nothing": (["--data", "high.npz", "--scale", "0"], ["--scale", "0"]),
    "a scale of a set by name": (["--scale", "0.5"], ["--scale", "digits"]),
    "a row of numbers to predict": (
        ["--data", "row.npz", "--model", "net.py:one", "--batch-size", "2"],
        ["(4, 1)", "(4,)", "y[:, None]"],
    ),
    "classes beyond the outputs": (
        ["--data", "high.npz", "--model", "net.py:build", "--batch-size", "2"],
        ["from 1 to 10", "10 apart"],
    ),
    "inputs alone": (["--data", "net.py:alone"], ["net.py:alone", "Tensor", "(inputs, targets)"]),
    "lists of numbers": (["--data", "net.py:lists"], ["net.py:lists", "tensors or arrays"]),
    "a number as data": (["--data", "net.py:nothing"], ["net.py:nothing", "int"]),
    "a loss of other arguments": (["--loss", "net.py:broken"], ["net.py:broken", "(4, 10)", "(4,)"]),
    "a loss for other targets": (["--loss", "mse"], ["(4, 10)", "(4,)", "cross-entropy"]),
    "an unknown penalty": (["--penalty", "strong"], ["'strong'", "2^-6"]),
    "a power of nothing": (["--penalty", "0^-1"], ["'0^-1'", "2^-6"]),
    "a power beyond all numbers": (["--penalty", "2^9999"], ["'2^9999'", "2^-6"]),
    "an unknown target": (["--target", "half"], ["'half'", "25%"]),
    "a target of nothing": (["--target", "0"], ["target", "0"]),
    "a target nobody can reach": (["--target", "1e-6"], ["target"]),
    "both": (["--target", "0.5", "--penalty", "0.1"], ["--target", "--penalty"]),
    "an unknown cost": (["--cost", "weight"], ["'weight'", "weights"]),
    "an unknown recipe": (["--recipe", "fintune"], ["'fintune'", "finetune"]),
    "an unknown optimizer": (["--optimizer", "adamm"], ["'adamm'", "adam"]),
    "an unknown schedule": (["--schedule", "cosin"], ["'cosin'", "cosine"]),
    "an unknown loss": (["--loss", "mae"], ["'mae'", "mse"]),
    "momentum of adam": (["--optimizer", "adam", "--momentum", "0.9"], ["--momentum", "adam"]),
    "a negative rate": (["--learning-rate", "-1"], ["--learning-rate", "-1"]),
    "a device that is not there": (["--device", "abacus"], ["abacus"]),
    "a share that is none": (["--validation", "1.5"], ["1.5"]),
    "too large a batch": (["--batch-size", "5000"], ["5000"]),
    "no epochs": (["--epochs", "0"], ["--epochs is at least 1, not 0"]),
    "a flag that does not exist": (["--epoch", "3"], ["--epoch", "--epochs"]),
    "too long a settling": (["--settle", "1.5", "--target", "0.5"], ["settle", "1.5"]),
    "a file that is not there": (["nowhere.toml"], ["nowhere.toml"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_clear_line(espal, own, name):
    words, said = REFUSED[name]
    (own / "wrong.py").write_text("x = 1\ny = = 2\n")
    (own / "text.npz").write_text("not arrays")
    np.savez(own / "odd.npz", images=np.zeros((4, 4)))
    np.savez(own / "pickled.npz", x=np.array([{}], dtype=object), y=np.zeros(1, int))
    rows, row = np.zeros((11, 64), np.float32), np.zeros(11, np.float32)
    hole = np.where(np.arange(11) == 3, np.nan, row)
    np.savez(own / "hole.npz", x=rows + hole[:, None], y=np.arange(11))
    np.savez(own / "hole_y.npz", x=rows, y=hole)
    np.savez(own / "empty.npz", x=rows[:0], y=row[:0])
    np.savez(own / "row.npz", x=rows, y=row)
    np.savez(own / "high.npz", x=np.zeros((11, 64), np.float32), y=np.arange(11))
    given = {"--model": "mlp", "--data": "digits", "--out": "run"} | dict(zip(words[::2], words[1::2]))
    flat = [word for flag, value in given.items() for word in (flag, value)]
    line = espal("train", *(flat if len(words) % 2 == 0 else [*words, *flat]), "--quiet").line
    for part in said:
        assert part in line, line
    assert not (own / "run" / "settings.json").exists()


def test_code_of_ones_own_that_fails_in_the_training_is_one_line_with_its_place(espal, own):
    (own / "mine.py").write_text(
        "from torch import nn\nfrom net import absolute\n"
        "class Norm(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)\n"
        "def late(outputs, targets):\n"
        "    if outputs.requires_grad:\n"
        "        raise KeyError('late')\n"
        "    return absolute(outputs, targets)\n"
    )
    words = ("train", "--data", "net.py:data", "--target", 0.5, *FAST)
    line = espal(*words, "--model", "mine.py:Norm", "--batch-size", 1, "--recipe", "ranked", "--out", "a").line
    assert "your own failed: ValueError: Expected more than 1 value per channel" in line
    assert "(mine.py, line 7)" in line
    assert "(traceback: a/error.log)" in line
    log = (own / "a" / "error.log").read_text()
    assert log.startswith("Traceback (most recent call last)")
    assert "return super().forward(x)" in log
    line = espal(*words, "--model", "net.py:build", "--loss", "mine:late", "--out", "b").line
    assert "your own failed: KeyError: 'late' (mine.py, line 10)" in line
    done = espal(*words, "--model", "net.py:build", "--loss", "mine:late", "--out", "b", "--traceback")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err


def test_code_that_fails_in_a_file_beside_the_one_that_is_named(espal, own):
    (own / "beside.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        if self.training:\n"
        "            raise OverflowError('beside')\n"
        "        return super().forward(x)\n"
        "def net():\n"
        "    return Net(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))\n"
        "def net():\n"
        "    return Net(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))\n"
    )
    (own / "front.py").write_text("import beside\ndef build():\n    return beside.net()\n")
    line = espal("train", "--model", "front.py:build", "--data", "net.py:data", "--out", "c", *FAST).line
    assert "OverflowError: beside (beside.py, line 5)" in line


def test_a_fault_of_ours_is_not_blamed_on_the_user(espal, own, monkeypatch):
    ours = {}
    exec(compile("def broken(*_, **__):\n    1 / 0\n", checkpoints.__file__, "exec"), ours)
    monkeypatch.setattr("espalier.study.training.fit", ours["broken"])
    monkeypatch.setattr(
        "sys.argv", ["espalier", "train", "--model", "net.py:build", "--data", "net.py:data", "--out", "r"]
    )
    with pytest.raises(ZeroDivisionError):
        main()


def test_after_a_refusal_the_right_call_is_taken(espal, tmp_path):
    words = ("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--out", tmp_path / "r", *FAST)
    assert "target" in espal(*words, "--target", "1e-6").line
    assert espal(*words, "--target", "0.5").code == 0


def test_a_folder_of_another_run_is_refused(espal, tmp_path):
    words = ("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--out", tmp_path, *FAST)
    (tmp_path / "settings.json").write_text("{}")
    assert "did not begin" in espal(*words).line
    (tmp_path / "settings.json").unlink()
    (tmp_path / "call.json").write_text("[1]")
    assert "call.json" in espal(*words).line
    assert (tmp_path / "call.json").read_text() == "[1]"


def test_an_unwritable_folder(espal, tmp_path, monkeypatch):
    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)  # root, as which tests may run, could write anywhere
    line = espal("train", "--model", "mlp", "--out", tmp_path / "r", *FAST).line
    assert str(tmp_path / "r") in line
    assert "Permission denied" in line


def test_a_folder_below_a_file(espal, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file" in espal("train", "--model", "mlp", "--out", tmp_path / "file" / "r", *FAST).line
    assert "file" in espal("train", "--model", "mlp", "--out", tmp_path / "file", *FAST).line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_one_line_and_nothing_is_lost(espal, tmp_path, monkeypatch):
    words = ("train", "--model", "mlp", "--model-arg", "hidden=[8]", "--target", 0.5, "--out", tmp_path / "r", *FAST)
    real, writes = os.fsync, 0

    def full(handle):
        nonlocal writes
        writes += 1
        if writes > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", full)
        assert espal(*words).line.startswith(f"espalier: {tmp_path / 'r'}")
    assert espal(*words).code == 0
    assert story(tmp_path / "r")["finished"]


def test_any_other_refusal_of_the_system_is_one_line(espal, tmp_path, monkeypatch):
    from espalier.cli import app

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "x"))

    monkeypatch.setattr(app, "training_run", refused)
    assert espal("train", "--model", "mlp", "--out", tmp_path, *FAST).line == (
        f"espalier: {tmp_path / 'x'}: Permission denied\n"
    )
