"""The report's tables, figures and pages, with every number recomputed here from the run files."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
from synthetic import TABLE, as_the_paper_says, write

from espalier import paper
from espalier.space import BadInput, Corrupt
from study.study_helpers import run as run_study

BEGIN, END = paper.REPORTS["unit-selection"].marks


def report(folder, reproduction=None, *, figures=True):
    """Everything but the page."""
    return paper.write(folder, reproduction, figures=figures, page=False)[0]


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A real study, shrunk, interrupted by nothing; and its report."""
    out = tmp_path_factory.mktemp("digits")
    assert run_study(out, theta_rate=None, trials=3)
    return out, report(out)


def test_the_numbers_of_a_real_study_are_those_of_its_files(digits):
    out, written = digits
    batches = [path.read_text().splitlines() for path in out.glob("runs/**/*.jsonl")]
    records = [json.loads(head) | json.loads(line) for head, *lines in batches for line in lines]
    (table,) = [path for path in written if path.name.endswith("table-1.csv")]
    by_penalty = {row["penalty eps'"]: row for row in rows(table)}
    assert set(by_penalty) == {"2^-2", "0", "-2^-1"}
    for penalty, name in ((0.25, "2^-2"), (0.0, "0"), (-0.5, "-2^-1")):
        results = [s["result"] for s in records if s["run"].get("penalty") == penalty]
        assert int(by_penalty[name]["runs"]) == len(results) == 3
        for layer in range(3):
            median = statistics.median(r["units"][layer] for r in results)
            assert float(by_penalty[name][f"layer {layer + 1}"]) == median
        assert float(by_penalty[name]["unit share"]) == pytest.approx(
            statistics.median(r["unit_share"] for r in results)
        )
        assert float(by_penalty[name]["weight share"]) == pytest.approx(
            statistics.median(r["weight_share"] for r in results)
        )
    (table,) = [path for path in written if path.name.endswith("trade-off.csv")]
    lines = rows(table)
    assert [line["variant"] for line in lines] == ["search"] * 3 + ["fixed"] * 2 + ["dropout"]
    for line in lines[3:5]:
        size = {"50.0% of the units": 0.5, "100.0% of the units": 1.0}[line["setting"]]
        errors = sorted(s["result"]["test_error"] for s in records if s["run"].get("size") == size)
        assert float(line["error, median"]) == pytest.approx(errors[1])
        assert float(line["error, 25%"]) == pytest.approx((errors[0] + errors[1]) / 2)
        assert float(line["error, 75%"]) == pytest.approx((errors[1] + errors[2]) / 2)
    (table,) = [path for path in written if path.name.endswith("time.csv")]
    seconds = {s["seconds"]["batch"] for s in records}
    assert {float(line["seconds"]) for line in rows(table)} == seconds
    assert len(rows(table)) == 2  # two batches, which may take equally long


def test_every_table_and_figure_says_runs_epochs_and_hardware(digits):
    out, written = digits
    for path in written:
        if path.suffix in (".md", ".svg"):
            text = path.read_text(encoding="utf-8")
            assert "18 runs (9 search, 6 fixed, 3 dropout), 2 epochs" in text, path
    figures = {path.name for path in written if path.parent.name == "figures"}
    stem = "digits-2_epochs-12_10_8"
    assert figures == {f"{stem}-{n}.{k}" for n in ("error", "learning", "theta", "layers") for k in ("svg", "png")}
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            assert path.stat().st_size > 10_000
    page = (out / "README.md").read_text(encoding="utf-8")
    assert "Partial results" in page
    assert "these runs for 2" in page


def test_the_same_files_give_the_same_report(digits):
    out, written = digits
    before = {path: path.read_bytes() for path in written}
    assert report(out) == written
    assert {path: path.read_bytes() for path in written} == before


def test_table_1_stands_beside_the_paper_s(tmp_path):
    as_the_paper_says(tmp_path)
    for seed in range(5):  # 2^-7: layer 1 is 15% and a unit off, layer 2 within, layer 3 12 units off, not more
        write(tmp_path, "search", 2**-7, seed, error=0.0119, units=(392, 141, 138))
    report(tmp_path, figures=False)
    by_penalty = {row["penalty eps'"]: row for row in rows(tmp_path / "tables/mnist-500_epochs-table-1.csv")}
    row = by_penalty["2^-7"]
    assert (row["layer 1"], row["layer 1, paper"], row["layer 1, difference"]) == ("392.0", "340", "52.0")
    assert row["further than 15% and 12 units"] == "layer 1"
    assert float(row["unit share, paper"]) == 0.261
    assert float(row["unit share"]) == pytest.approx((392 + 141 + 138) / 2352)
    assert by_penalty["-2^0"]["layer 1, paper"] == ""  # the paper prints no such row
    assert {name for name in by_penalty if by_penalty[name]["further than 15% and 12 units"]} == {"2^-7"}
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "further than 15% and 12 units from the paper's: 2^-7: layer 1." in page
    assert "Partial" not in page


def test_variants_stand_beside_the_paper_s_form(tmp_path):
    for seed in range(5):
        write(tmp_path, "search", 2**-7, seed, error=0.02 + 1e-4 * seed, units=TABLE[2**-7], epochs=100)
        write(
            tmp_path, "search", 2**-7, seed, error=0.01 + 1e-4 * seed, units=(200, 100, 100), epochs=100,
            variant="search+settle_0.25",
        )  # fmt: skip
    report(tmp_path)
    (row,) = rows(tmp_path / "tables/mnist-100_epochs-variants.csv")
    assert row["variant"] == "search+settle_0.25"
    assert float(row["difference"]) == pytest.approx(-0.01)
    assert float(row["p, two-sided"]) == pytest.approx(2 / 252)
    assert float(row["95% from"]) <= -0.01 <= float(row["95% to"]) < 0


def test_runs_of_other_lengths_and_data_have_sections_of_their_own(tmp_path):
    write(tmp_path, "search", 0.0, 0, error=0.02)
    write(tmp_path, "search", 0.0, 0, error=0.03, epochs=100)
    write(tmp_path, "search", 0.0, 0, error=0.1, dataset="fashion-mnist")
    report(tmp_path, figures=False)
    names = sorted(path.name for path in (tmp_path / "tables").glob("*table-1.csv"))
    expected = ["fashion-mnist-500_epochs", "mnist-100_epochs", "mnist-500_epochs"]
    assert names == [f"{name}-table-1.csv" for name in expected]
    # The paper's numbers stand beside its own data only.
    assert "layer 1, paper" not in rows(tmp_path / "tables/fashion-mnist-500_epochs-table-1.csv")[0]


def test_the_generated_part_of_a_page_is_replaced_and_the_rest_kept(tmp_path):
    as_the_paper_says(tmp_path)
    page = tmp_path / "reproduction.md"
    page.write_text(f"# Ours\n\n{BEGIN}\nold\n{END}\n\nwritten by hand\n", encoding="utf-8")
    report(tmp_path, page, figures=False)
    once = page.read_text(encoding="utf-8")
    assert "old" not in once
    assert once.startswith("# Ours\n")
    assert once.endswith("written by hand\n")
    assert "C9" in once
    assert "espalier paper unit-selection --out here" in once
    report(tmp_path, page, figures=False)
    assert page.read_text(encoding="utf-8") == once
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(BadInput, match="no place"):
        report(tmp_path, page, figures=False)


def test_a_run_called_script_is_text(tmp_path):
    write(tmp_path, "search", 0.0, 0, error=0.02, variant="search+<script>alert(1)</script>|")
    report(tmp_path)
    for path in tmp_path.rglob("*.md"):
        assert "<script>" not in path.read_text(encoding="utf-8")


def test_a_diverged_run_counts_as_an_error_of_one(tmp_path):
    for seed in range(3):
        path = write(tmp_path, "search", 0.0, seed, error=0.02)
        record = json.loads(path.read_text())
        record["result"]["test_error"] = None
        record["curve"][-1]["test_error"] = None
        path.write_text(json.dumps(record))
    report(tmp_path)
    (row,) = rows(tmp_path / "tables/mnist-500_epochs-trade-off.csv")
    assert float(row["error, median"]) == 1.0


def test_folders_without_runs_and_broken_files_are_refused(tmp_path):
    with pytest.raises(BadInput, match="not a folder"):
        report(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no finished run"):
        report(tmp_path)
    path = write(tmp_path, "search", 0.0, 0, error=0.02)
    path.write_text(path.read_text()[:100])
    with pytest.raises(Corrupt, match=path.name):
        report(tmp_path)
    path.write_text('{"format": 1, "run": {}}')
    with pytest.raises(Corrupt, match=path.name):
        report(tmp_path)


def test_a_mixed_study_is_refused(tmp_path):
    for seed, rate in enumerate((0.01, 0.05)):
        path = write(tmp_path, "search", 0.0, seed, error=0.02)
        record = json.loads(path.read_text())
        record["settings"]["learning_rate"] = rate
        path.write_text(json.dumps(record))
    with pytest.raises(BadInput, match=r"learning_rate is 0.01 in .* and 0.05 in "):
        report(tmp_path)


def test_a_page_that_no_report_has_made_is_not_overwritten(tmp_path):
    write(tmp_path, "search", 0.0, 0, error=0.02)
    (tmp_path / "README.md").write_text("# My project\n")
    for _ in range(2):
        assert tmp_path / "REPORT.md" in report(tmp_path, figures=False)
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    (tmp_path / "REPORT.md").write_text("# My report\n")
    with pytest.raises(BadInput, match=r"README.md and a REPORT.md that no report has made"):
        report(tmp_path, figures=False)
    (tmp_path / "README.md").unlink()
    for _ in range(2):
        assert tmp_path / "README.md" in report(tmp_path, figures=False)
    assert (tmp_path / "REPORT.md").read_text() == "# My report\n"


def test_runs_are_looked_for_only_where_a_study_writes_them(tmp_path):
    path = write(tmp_path, "search", 0.0, 0, error=0.02)
    for place in ("runs/other.json", "runs/a/b/c/other.json", "deeper/runs/a/b/other.json"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("{}")
    report(tmp_path, figures=False)
    assert path.is_relative_to(tmp_path / "runs")


@pytest.mark.parametrize("name", ["../../elsewhere", "/tmp/elsewhere/x"])
@pytest.mark.parametrize("part", ["dataset", "variant"])
def test_a_run_file_names_no_place_outside_its_study(tmp_path, part, name):
    root = tmp_path / "a" / "b" / "study"
    as_the_paper_says(root, trials=1)
    for path in root.rglob("*.json"):
        record = json.loads(path.read_text())
        (record["settings"] if part == "dataset" else record["run"])[part] = name
        path.write_text(json.dumps(record))
    before = set(tmp_path.rglob("*"))
    written, _ = paper.write(root, figures=False, page=False)
    assert written
    assert all(root in path.parents for path in set(tmp_path.rglob("*")) - before)
    assert not Path("/tmp/elsewhere").exists()
