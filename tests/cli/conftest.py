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
        if name in {"net", "neighbour"} or name.startswith("espalier_own_"):
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
