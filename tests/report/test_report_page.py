"""The page and the files beside it: what they hold, that data stay data, and what is refused."""

from __future__ import annotations

import base64
import csv
import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from studies import ERRORS, grid, grid_run, run_directory

from espalier import files
from espalier.cli import main
from espalier.paper import write
from espalier.report import read
from espalier.report.page import NAME, render
from espalier.report.tables import headline
from paper import synthetic_connections
from paper.synthetic import as_the_paper_says

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&%{x}'


class Outline(HTMLParser):
    """The tags of a page with their attributes, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


@pytest.fixture
def command(monkeypatch, capsys):
    """The command line as its entry point runs it: exit code, output, error output."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["espalier", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("grid")
    grid(root)
    paths, notes = write(root)
    return root, paths, notes


def views(text):
    """The charts' views, with their hover labels in place."""
    data = json.loads(Outline(text).scripts[1])
    for trace in (t for views in data["charts"].values() for view in views.values() for t in view["traces"]):
        if "text" in trace:
            trace["text"] = [data["texts"][i] for i in trace["text"]]
    return data["charts"]


def test_a_study_gets_a_page_tables_and_figures(written):
    root, paths, notes = written
    stem = "digits_4_epochs"
    expected = {"report.html", "tables/runs.md", "tables/runs.csv", f"tables/{stem}-trade-off.md"}
    expected |= {f"tables/{stem}-trade-off.csv"}
    expected |= {
        f"figures/{stem}-{name}.{kind}" for name in ("trade-off", "learning", "kept") for kind in ("svg", "png")
    }
    assert {path.relative_to(root).as_posix() for path in paths} == expected
    assert notes == []
    assert not list(root.rglob("*.partial"))
    text = (root / NAME).read_text(encoding="utf-8")
    linked = {attrs["href"] for tag, attrs in Outline(text).tags if tag == "a" and not attrs["href"].startswith("#")}
    assert linked == expected - {"report.html"}


def test_the_numbers_beside_the_page_are_those_of_the_runs(written):
    root, _, _ = written
    with open(root / "tables" / "digits_4_epochs-trade-off.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["setting"]) for row in rows[:4]] == [
        ("search", "target 10%"),
        ("search", "target 25%"),
        ("search", "target 50%"),
        ("uniform, from scratch", "target 10%"),
    ]
    middle = {row["setting"]: float(row["error, median"]) for row in rows if row["method"] == "search"}
    assert middle == pytest.approx({f"target {100 * t:g}%": error + 0.001 for t, error in ERRORS["search"].items()})
    assert [row["Pareto front"] for row in rows] == ["yes", "yes", "", "", "", "", "", "", "yes"]
    with open(root / "tables" / "runs.csv", newline="", encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 27
    assert {row["state"] for row in runs} == {"finished"}
    assert float(runs[0]["error"]) == pytest.approx(0.06)


def test_the_trade_off_has_medians_quartiles_runs_and_a_front(written):
    root, _, _ = written
    view = views((root / NAME).read_text(encoding="utf-8"))["s0-trade-off"]
    assert set(view) == {"weights", "MACs", "units"}
    traces = view["weights"]["traces"]
    assert len(traces) == 2 * 3 + 1  # runs and medians of each method, and the front
    medians = traces[1]
    assert medians["x"] == [0.1, 0.25, 0.5]
    assert medians["y"] == pytest.approx([0.061, 0.031, 0.021])
    arms = np.array(medians["arms"]["y"]) - np.array([[0.061], [0.031], [0.021]])
    assert arms == pytest.approx(np.array([[-0.0005, 0.0005]] * 3))  # quartiles of three seeds 0.001 apart
    assert view["MACs"]["traces"][1]["x"] == pytest.approx([0.09, 0.225, 0.45])
    assert traces[-1]["y"] == pytest.approx([0.061, 0.031, 0.011])
    assert [label["text"] for label in view["weights"]["layout"]["labels"]] == ["10%", "25%", "50%"]
    facts = traces[0]["text"][0]
    for words in (
        "method: search",
        "target 10%",
        "seed: 0",
        "6.00%",
        "weights kept: 10.0%",
        "5/16, 10/32",
        "a processor",
    ):
        assert words in facts


def test_the_page_tells_command_versions_hardware_and_settings(written):
    root, _, _ = written
    text = (root / NAME).read_text(encoding="utf-8")
    body = text[: text.index("<script type=")]
    for words in ("espalier study --methods found", "0123456789ab", "a processor", "2.13", "batch_size"):
        assert words in body


def test_nothing_of_the_page_lies_elsewhere(written):
    root, _, _ = written
    for tag, attrs in Outline((root / NAME).read_text(encoding="utf-8")).tags:
        assert "src" not in attrs, tag
        assert tag != "link"
        assert not re.match(r"[a-z]+:|//", attrs.get("href") or "")


def test_the_same_runs_give_the_same_page(written):
    root, paths, _ = written
    before = {path: path.read_bytes() for path in paths}
    again, _ = write(root)
    assert again == paths
    assert {path: path.read_bytes() for path in paths} == before


def test_what_runs_are_called_is_text_wherever_it_stands(tmp_path):
    described = {"method": EVIL, "variant": EVIL, "seed": 0, "target": 0.25}
    settings = {"dataset": EVIL, "epochs": 4, EVIL: EVIL}
    changes = {"study": EVIL, "hardware": {EVIL: EVIL, "cpu": EVIL}, "versions": {EVIL: EVIL}, "evaluated_on": EVIL}
    path = grid_run(tmp_path, "search", 0.25, 0, run=described, settings=settings, command=EVIL, commit=EVIL, **changes)
    record = json.loads(path.read_text())
    record["result"]["kept"] = {EVIL: [1, 2]}
    path.write_text(json.dumps(record))
    run_directory(tmp_path / "d<script>alert(3)<")
    text = render(read(tmp_path))
    plain = render(read(run_directory(tmp_path / "plain")))
    outlined, usual = Outline(text), Outline(plain)
    assert len(outlined.scripts) == len(usual.scripts) == 3
    assert (outlined.scripts[0], outlined.scripts[2:]) == (usual.scripts[0], usual.scripts[2:])
    assert not [attrs for tag, attrs in outlined.tags if tag == "img" or any(name.startswith("on") for name in attrs)]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    data = outlined.scripts[1]
    assert "<" not in data
    assert "alert(1)" in data


def test_the_headline_names_its_section_where_another_holds_a_lower_error(tmp_path):
    run_directory(tmp_path / "a", error=0.05)
    run_directory(tmp_path / "b", error=0.06, seed=1)
    write(tmp_path, figures=False)
    alone = re.search(r'class="headline">(.*?)<', (tmp_path / NAME).read_text(encoding="utf-8"))[1]
    assert alone == "The median error is 5.50% (validation data), at 30.0% of the weights."
    run_directory(tmp_path / "longer", error=0.01, epochs=50)
    write(tmp_path, figures=False)
    named = re.search(r'class="headline">(.*?)<', (tmp_path / NAME).read_text(encoding="utf-8"))[1]
    assert named == f"100 examples, 5 epochs, Sequential: t{alone[1:]}"


@pytest.mark.parametrize(("small", "enough"), [(0.9999, False), (0.4, True)])
def test_the_headline_saves_nothing_that_it_cannot_show(small, enough):
    """99.99% of the weights are no news beside 100% of them."""
    front = [(small, 0.067, []), (1.0, 0.063, [])]
    section = SimpleNamespace(axes=["weights"], measure="error", middle="", marks=[1, 2], front=lambda *_: front)
    described = headline(section)
    assert described.startswith("The lowest error of the search is 6.30%, at 100% of the weights")
    assert ("40.0% of them are enough" in described) == ("are enough" in described) == enough


def test_an_unfinished_run_is_on_the_page_but_in_no_median(tmp_path):
    run_directory(tmp_path / "whole", error=0.05)
    (run_directory(tmp_path / "half", seed=1, error=0.5) / "result.json").unlink()
    (run_directory(tmp_path / "torn", seed=2, error=0.5) / "result.json").write_text('{"fini')
    _, notes = write(tmp_path, figures=False)
    text = (tmp_path / NAME).read_text(encoding="utf-8")
    assert notes == ["torn: result.json is not whole, so the run is shown as unfinished"]
    assert "To know first" in text
    assert "1 finished, 2 unfinished" in text or "2 unfinished, 1 finished" in text
    assert "The error is 5.00% (validation data), at 30.0% of the weights." in text
    assert len(views(text)["s0-learning"]["0|error"]["traces"]) == 2  # a band: their curves are drawn


def test_theta_is_a_heat_map_of_the_snapshots(tmp_path):
    run_directory(tmp_path)
    (view,) = views(render(read(tmp_path)))["s0-theta"].values()
    (trace,) = view["traces"]
    z = np.frombuffer(base64.b64decode(trace["z"]), np.uint8).reshape(6, 6)
    assert trace["shape"] == [6, 6]
    assert trace["x"] == [0, 5, 10, 15, 20, 25]
    assert z[:, 0].tolist() == [50] * 6
    assert z[:, -1].tolist() == [90, 80, 20, 10, 95, 5]  # each group sorted, the open gates first
    assert [tick[1] for tick in view["layout"]["yaxis"]["ticks"]] == ["layer 1 (4)", "layer 2 (2)"]


def test_long_curves_are_thinned(tmp_path):
    path = grid_run(tmp_path, "search", 0.25, 0)
    record = json.loads(path.read_text())
    record["curve"] = [{"update": i, "test_error": 1 / i} for i in range(1, 5001)]
    path.write_text(json.dumps(record))
    (trace,) = views(render(read(tmp_path)))["s0-learning"]["0|error"]["traces"]
    assert (trace["x"][0], trace["x"][-1]) == (1, 5000)
    assert len(trace["x"]) <= 120


def test_unit_selection_keeps_its_own_tables_and_gets_the_page(tmp_path):
    as_the_paper_says(tmp_path, trials=2)
    paths, notes = write(tmp_path, figures=False)
    names = {path.name for path in paths}
    assert {"README.md", "report.html", "mnist-500_epochs-table-1.csv"} <= names
    assert "runs.csv" not in names
    assert notes == []
    text = (tmp_path / NAME).read_text(encoding="utf-8")
    assert "Unit selection" in text
    # 0, -2^-3 and -2^0 keep nearly everything: they share a label
    labels = views(text)["s0-trade-off"]["units"]["layout"]["labels"]
    assert [label["text"] for label in labels] == ["2⁻⁶", "2⁻⁷", "2⁻⁸", "2⁻⁹", "0, -2⁻³, -2⁰"]


def test_a_network_whose_gates_are_connections_is_drawn_as_a_graph(tmp_path):
    synthetic_connections.write(tmp_path, "search", 2.0**-4, 0, error=0.06, share=1.0)
    synthetic_connections.write(tmp_path, "search", 2.0**-3, 0, error=0.05, share=1.0, epochs=300)
    synthetic_connections.write(tmp_path, "search", 2.0**-3, 0, error=0.07, share=0.5)
    write(tmp_path, figures=False)
    text = (tmp_path / NAME).read_text()
    assert (
        "CIFAR-10, 60 epochs, DenseNet: the lowest error of the search is 6.00%" in text
    )  # of the section with most runs
    assert "What each block keeps" in text
    assert "One line for each setting, of one run." in text
    outline = Outline(text)
    graphs = [attrs for tag, attrs in outline.tags if tag == "svg" and "espalier-picture" in attrs.get("class", "")]
    assert len(graphs) == 3
    ids = {attrs.get("id") for _, attrs in outline.tags}
    assert set(graphs[0]["aria-labelledby"].split()) <= ids


def test_the_command_tells_scripts_what_it_wrote(tmp_path, command):
    grid(tmp_path)
    code, out, _ = command("report", tmp_path, "--json", "--no-figures")
    assert code == 0
    (line,) = out.splitlines()
    assert str(tmp_path / NAME) in json.loads(line)["wrote"]


def test_the_command_writes_the_page_of_a_run_and_says_what_is_not_whole(tmp_path, command):
    run_directory(tmp_path / "run")
    (run_directory(tmp_path / "broken") / "settings.json").unlink()
    code, out, err = command("report", tmp_path, "--no-figures")
    assert code == 0, err
    assert f"wrote {tmp_path / NAME}" in out
    assert err == "note: broken is left out: settings.json: No such file or directory\n"


def test_what_is_not_installed_is_left_out_and_named(tmp_path, monkeypatch):
    run_directory(tmp_path)
    there = importlib.util.find_spec
    absent = ("jinja2", "matplotlib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else there(name))
    paths, notes = write(tmp_path)
    assert {path.parent.name for path in paths} == {"tables"}
    assert len(notes) == 2
    assert all("is not installed: pip install 'espalier[report]'" in note for note in notes)


def torn_run_file(root):
    path = grid_run(root, "search", 0.25, 0)
    path.write_text(path.read_text()[:200])


def mixed(root):
    grid_run(root, "search", 0.25, 0)
    grid_run(root, "search", 0.25, 1, study="another")


def unwritable(root):
    grid_run(root, "search", 0.25, 0)
    (root / "tables").write_text("a file, where a folder is needed")


def unwritable_paper_study(root):
    as_the_paper_says(root, trials=1)
    (root / "tables").write_text("a file, where a folder is needed")


def full_disk(root):
    grid_run(root, "search", 0.25, 0)
    (root / NAME).write_text('<meta name="generator" content="espalier report">the report before')


def somebody_s(root):
    grid_run(root, "search", 0.25, 0)
    (root / NAME).write_text("<p>my own page</p>")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: None, "holds no finished run"),
        (torn_run_file, "is damaged"),
        (mixed, "a mixed study"),
        (unwritable, "could not be written"),
        (unwritable_paper_study, "could not be written"),
        (full_disk, "the disk is full"),
        (somebody_s, "was not written by a report"),
    ],
    ids=["nothing", "torn", "mixed", "unwritable", "unwritable paper's", "full", "somebody's"],
)
def test_bad_input_is_one_clear_line_and_nothing_is_lost(tmp_path, command, spoil, words, monkeypatch):
    spoil(tmp_path)
    if spoil is full_disk:  # a device that is always full, in the place of the page's new file
        beside = files.write_beside

        def full(path, data):
            if path.name != NAME:
                return beside(path, data)
            with open("/dev/full", "wb") as device:
                device.write(data)

        monkeypatch.setattr(files, "write_beside", full)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".partial"}
    code, out, err = command("report", tmp_path, "--no-figures")
    assert code == 2, out
    assert err.count("\n") == 1
    assert words in err
    assert str(tmp_path) in err
    assert {path: path.read_bytes() for path in before} == before
    assert not list(tmp_path.rglob(f"*{files.PARTIAL}"))
