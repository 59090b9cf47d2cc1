"""`espalier compact`: what it writes is what was trained, the card tells the truth, and other folders are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import espalier
from espalier.compact import store

pytest.importorskip("typer")
from typer.testing import CliRunner

from espalier.cli.app import app

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.last = nn.Linear(width * 4, 10)

    def forward(self, x):
        return self.last(nn.functional.avg_pool2d(self.first(x), 4).flatten(1))

def build(width=8):
    return Net(width)
"""
TRAIN = (
    "train",
    "--model",
    "net.py:build",
    "--model-arg",
    "width=12",
    "--target",
    0.5,
    "--cost",
    "macs",
    "--epochs",
    1,
)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """One run for all tests, each of which has a copy of it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "net.py").write_text(NET)
    with contextlib.chdir(folder):
        words = [*map(str, TRAIN), "--out", "run", "--quiet", "--device", "cpu"]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def trained(once, tmp_path, monkeypatch):
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_small_network_its_card_and_its_onnx_file(espal, trained, monkeypatch):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    before = files(trained / "run")
    done = espal("compact", "run", "--model", "net.py:build", "--to", "small", "--onnx")
    assert done.code == 0, done.err
    assert sorted(files(trained / "small")) == ["README.md", "model.onnx", "model.safetensors", "plan.json"]
    assert files(trained / "run") == before
    assert "bit for bit" in done.out
    assert "times as fast" in done.out

    # The card's own code, run where it says: both roads give the same numbers.
    monkeypatch.chdir(trained / "small")
    shutil.copy("../net.py", "net.py")
    monkeypatch.syspath_prepend(str(trained / "small"))
    card = (trained / "small" / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 2
    assert '"recipe": "default"' in card  # a setting is called as its flag is
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    small = scope["small"]
    assert isinstance(small, nn.Module)
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        ours = small(x).numpy()
    theirs = scope["session"].run(None, {"inputs": x.numpy()})[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert scope["outputs"][0].shape == (1, 10)
    assert isinstance(scope["session"], onnxruntime.InferenceSession)

    # Its numbers are those of the run and of the tensors.
    ships = json.loads((trained / "run" / "result.json").read_text())
    weights = sum(p.numel() for p in small.parameters() if p.ndim > 1)
    macs = sum(p.numel() * (64 if p.ndim == 4 else 1) for p in small.parameters() if p.ndim > 1)
    assert [ships["sizes"][kind][0] for kind in ("weights", "macs")] == [weights, macs]
    assert f"| weights | {weights:,} | {12 * 9 + 480:,} |" in card
    assert f"| MACs per example | {macs:,} | {12 * 9 * 64 + 480:,} |" in card
    assert f"error {ships['validation_error']:.2%}, loss" in card
    assert "net.py:build" in card
    assert "with `net.py` beside it or its folder in `PYTHONPATH`" in card
    assert '"seed": 0' in card
    assert "torch 2" in card


def test_without_onnx_and_as_json(espal, trained):
    done = espal("compact", "run", "--model", "net.py:build", "--to", "small", "--json")
    told = json.loads(done.out.splitlines()[-1])
    assert told["files"] == ["model.safetensors", "plan.json", "README.md"]
    assert told["checks"]["difference"] == 0
    assert "onnx" not in (trained / "small" / "README.md").read_text().lower()
    assert (
        espal("compact", "run", "--model", "net.py:build", "--to", "small").code == 0
    )  # again, over what it wrote itself


def test_a_factory_that_has_moved(espal, trained, monkeypatch):
    (trained / "elsewhere").mkdir()
    monkeypatch.chdir(trained / "elsewhere")
    line = espal("compact", "../run", "--to", "small").line
    assert "net.py" in line
    assert "--model" in line
    assert espal("compact", "../run", "--to", "small", "--model", "../net.py:build").code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("avg_pool2d", "max_pool2d"), "does not answer as the trained one did"),
        (("width * 4, 10", "width * 4, 11"), "does not fit"),
        (("def build", "def make"), "--model"),
    ],
)
def test_a_factory_that_has_changed_is_refused(espal, trained, change, said):
    path = trained / "moved.py"  # a module of another name: the first one is loaded in this process
    path.write_text(NET.replace(*change))
    done = espal("compact", "run", "--to", "small", "--model", "moved.py:build", "--trust")
    assert done.code == 2
    assert said in done.err
    assert "moved.py has changed since the run" in done.err
    assert not (trained / "small").exists()
    line = espal("compact", "run", "--to", "small", "--model", "moved.py:build").line
    assert "moved.py has changed since the run (SHA-256" in line


def test_code_that_a_folder_names_is_not_run(espal, trained):
    line = espal("compact", "run", "--to", "small").line
    assert "names code, 'net.py:build'; what a file names is not run" in line
    assert "--model net.py:build" in line
    assert espal("compact", "run", "--to", "small", "--trust").code == 0
    call = json.loads((trained / "run" / "call.json").read_text())
    call["model"] |= {"reference": "subprocess:getoutput", "arguments": {"cmd": "touch harmed"}}
    (trained / "run" / "manifest.json").unlink()
    (trained / "run" / "call.json").write_text(json.dumps(call))
    for words in ((), ("--model", "net.py:build")):
        espal("compact", "run", "--to", "other", *words)
        assert not (trained / "harmed").exists()


def test_what_is_no_finished_run_is_said_in_one_line(espal, trained):
    (trained / "empty").mkdir()
    (trained / "several").mkdir()
    shutil.copytree("run", "several/a")
    shutil.copytree("run", "half")
    (trained / "half" / "result.json").unlink()
    shutil.copytree("run", "python")
    (trained / "python" / "call.json").unlink()
    for folder, said in {
        "nowhere": "no folder nowhere",
        "net.py": "a file",
        "empty": "not a run directory",
        "several": "several/a",
        "half": "same command, as espalier",
        "python": "--model file.py:function",
    }.items():
        line = espal("compact", folder, "--to", "small").line
        assert said in line, line
    x, y = torch.rand(32, 4), torch.randint(0, 2, (32,))
    espalier.sweep(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        (x, y), penalties=[0.1], epochs=1, batch_size=16, checkpoint="sweep", quiet=True, device="cpu",
    )  # fmt: skip
    assert "sweep/run-000" in espal("compact", "sweep", "--to", "small").line
    assert "--model file.py:function" in espal("compact", "sweep/run-000", "--to", "small").line
    assert not (trained / "small").exists()


KEPT = ["call.json", "settings.json", "result.json", "probe.safetensors", "small/plan.json", "small/model.safetensors"]


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("how", ["cut", "other"])
def test_a_damaged_run_is_said_in_one_line(espal, trained, name, how):
    path = trained / "run" / name
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if how == "cut" else b"{}" if name.endswith("json") else data[:-1] + b"x")
    line = espal("compact", "run", "--model", "net.py:build", "--to", "small").line
    assert name.rpartition("/")[2] in line, line


def test_nothing_of_somebody_elses_is_overwritten(espal, trained):
    (trained / "mine").mkdir()
    (trained / "mine" / "README.md").write_text("mine")
    assert "other files" in espal("compact", "run", "--to", "mine").line
    assert (trained / "mine" / "README.md").read_text() == "mine"
    assert "a file" in espal("compact", "run", "--to", "net.py").line
    for place in ("run", "run/small"):
        assert "run itself" in espal("compact", "run", "--to", place).line


def test_a_full_disk_is_one_line(espal, trained, monkeypatch):
    before = files(trained / "run")

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_beside", full)
        assert "No space left" in espal("compact", "run", "--model", "net.py:build", "--to", "small").line
    assert files(trained / "run") == before
    (trained / "small" / "model.safetensors").write_bytes(b"cut off")  # as a kill between two files leaves it
    assert espal("compact", "run", "--model", "net.py:build", "--to", "small").code == 0


def test_formats_by_name_need_nothing_of_ours(espal, trained):
    told = json.loads(
        espal("compact", "run", "--model", "net.py:build", "--to", "free", "--formats", "python, pt2", "--json").out
    )
    assert set(told["files"]) == {
        "model.safetensors", "plan.json", "README.md", "network.py", "network.safetensors", "model.pt2",
    }  # fmt: skip
    assert max(told["checks"][name]["difference"] for name in ("python", "pt2")) <= 1e-6
    text = (trained / "free" / "README.md").read_text()
    assert "from network import load" in text
    assert "torch.export.load" in text
    espal(
        "compact", "run", "--model", "net.py:build", "--to", "free", "--formats", "python"
    )  # over what it wrote itself
    assert (
        "known are torch, onnx, pt2, python"
        in espal("compact", "run", "--model", "net.py:build", "--to", "other", "--formats", "tape").line
    )


def test_amounts_and_several_costs_on_the_command_line(espal, trained):
    for target, words in (("300 parameters", "300 parameters"), ("macs=0.6,weights=0.5", "macs=0.6,weights=0.5")):
        out = f"run {target[:3]}"
        given = ["--model", "net.py:build", "--target", target, "--epochs", 1, "--out", out, "--device", "cpu"]
        assert words in espal("train", *given, "--quiet").out
        told = json.loads((trained / out / "result.json").read_text())
        assert told["share_after"] <= told["target"]
        if target.startswith("300"):
            assert told["sizes"]["parameters"][0] <= 300
        else:
            assert told["sizes"]["weights"][0] <= 0.5 * told["sizes"]["weights"][1]
        espal("compact", out, "--model", "net.py:build", "--to", f"{out} shipped")
        assert f"a target of {words}" in (trained / f"{out} shipped" / "README.md").read_text()
