"""`espalier data`, `espalier report`, `espalier demo` and the entry point: what they print, refuse and exit with."""

from __future__ import annotations

import gzip

import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from espalier.cli.app import app  # noqa: E402


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPALIER_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_data_list_names_every_set_and_its_state():
    done = invoke("data", "list")
    assert done.exit_code == 0
    words = {line.split()[0]: line.split()[1] for line in done.output.splitlines() if not line.startswith(" ")}
    assert words == {"digits": "embedded", "mnist": "missing", "fashion-mnist": "missing", "cifar10": "missing"}


def test_data_verify_exits_with_2_for_a_damaged_set(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (folder / f"{name}.gz").write_bytes(gzip.compress(b"not idx at all"))
    done = invoke("data", "verify", "mnist", "--data-dir", tmp_path)
    assert done.exit_code == 2
    assert "mnist: corrupt" in done.output
    assert invoke("data", "verify", "digits").exit_code == 0
    assert invoke("data", "verify", "cifar10", "--data-dir", tmp_path).exit_code == 2
    assert invoke("data", "verify").exit_code == 0  # what is missing is no fault unless it was asked for


def test_data_get_of_what_is_embedded():
    done = invoke("data", "get", "digits")
    assert done.exit_code == 0
    assert "embedded" in done.output


def test_unknown_names_are_one_clear_line(espal):
    line = espal("data", "get", "minst").line
    assert "minst" in line
    assert "mnist" in line


def test_report_of_what_is_no_study_is_one_clear_line(espal, tmp_path):
    assert str(tmp_path) in espal("report", tmp_path).line


def test_report_writes_the_tables_of_a_study(tmp_path):
    small = ["--data", "digits", "--device", "cpu", "--hidden", "4,4,4", "--epochs", "1", "--trials", "1"]
    small += ["--methods", "search", "--penalties", "2^-2", "--points", "1", "--quiet", "--no-report"]
    assert invoke("paper", "unit-selection", "--out", tmp_path, *small).exit_code == 0
    assert not (tmp_path / "README.md").exists()
    done = invoke("report", tmp_path, "--no-figures")
    assert done.exit_code == 0
    assert (tmp_path / "README.md").exists()
    assert list(tmp_path.glob("tables/*.csv"))
