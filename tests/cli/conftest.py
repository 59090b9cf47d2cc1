"""The command line as a person calls it, in this process: exit code, stdout, stderr."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one clear line of bad input."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("espalier: "), self.err
        return self.err


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    """Files of a test's own are not found, nor taken for another's, by the next one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in {"net", "neighbour", "mine"} or name.startswith("espalier_own_"):
            del sys.modules[name]


@pytest.fixture
def espal(monkeypatch, capsys):
    pytest.importorskip("typer")
    from espalier.cli import main

    def call(*words) -> Done:
        monkeypatch.setattr(sys, "argv", ["espalier", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return Done(0 if ended.value.code is None else ended.value.code, told.out, told.err)

    return call


OWN = """
import torch
from torch import nn
import neighbour

def build(width=16, deep=False):
    layers = [nn.Linear(64, width), nn.ReLU()]
    if deep:
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, neighbour.CLASSES))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build(8)
    def forward(self, x):
        return self.body(x.flatten(1))

def data():
    g = torch.Generator().manual_seed(0)
    return (torch.rand(96, 64, generator=g), torch.randint(0, 10, (96,), generator=g))

def parts():
    x, y = data()
    return {"train": (x.numpy(), y.numpy()), "test": (x[:32], y[:32])}

def loaders():
    from torch.utils.data import DataLoader, TensorDataset
    return DataLoader(TensorDataset(*data()), 32, shuffle=True), DataLoader(TensorDataset(*data()), 32)

def absolute(outputs, targets):
    return (outputs.softmax(1)[:, 0] - targets.float()).abs().mean()

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64).eval()
        self.body = build(8)
    def forward(self, x):
        assert not self.norm.training
        return self.body(self.norm(x))

model = build()

def broken(width):
    raise RuntimeError(f"no width {width}\\nand more")

def nothing():
    return 3

def alone():
    return torch.rand(50, 64)

def one():
    return nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 1))

def lists():
    return [[1.0, 2.0], [3.0, 4.0]], [0, 1]

class Picky(Net):
    def forward(self, x):
        assert x.shape[1] == 3, "three channels\\nand more"
        return self.body(x)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(OWN)
    (tmp_path / "neighbour.py").write_text("CLASSES = 10\n")
    return tmp_path
