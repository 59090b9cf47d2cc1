"""Tables of a grid study from synthetic run files: pairs, intervals, verdicts, targets."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from studies import run_directory

from espalier.files import NotSaved
from espalier.report import grid_tables, read
from espalier.report import write as report
from espalier.report.grid_tables import BEGIN, END, by_pair, compare, comparisons
from espalier.report.significance import paired_interval
from espalier.report.tables import made_by
from espalier.space import BadInput, Corrupt

HEAD = {
    "format": 1, "study": "grid", "evaluated_on": "5-fold cross-validation", "command": "espalier study --x",
    "settings": {"dataset": "digits", "epochs": 20, "widths": [64, 64, 10]}, "hardware": {"cpu": "a machine"},
    "seconds": {"per_run": 1.0}, "versions": {},
}  # fmt: skip


def record(method: str, target: float, fold: int, seed: int, error: float | None, **more: Any) -> dict[str, Any]:
    result = {"test_error": error, "weight_share": target * 0.99, "units": [4], "reached_before": target + 0.01}
    result |= {"reached_after": target * 0.99, "gap": 0.01} | more
    return {"run": {"method": method, "seed": seed, "fold": fold, "target": target}, "result": result, "curve": []}


def save(folder: Path, method: str, records: list[dict[str, Any]], **head: Any) -> Path:
    path = folder / "runs" / "digits-20_epochs" / method / "fold_0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [HEAD | {"runs_in_batch": len(records)} | head, *records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write(folder: Path, page: Path | None = None) -> list[Path]:
    return grid_tables.write(read(folder), page)


def study(folder: Path) -> None:
    """Against scratch: better at 0.1, level at 0.3, worse at 0.5, in noise that the pairs share."""
    noise = np.random.default_rng(1).normal(0, 0.02, (5, 4))
    small = np.random.default_rng(2).normal(0, 0.001, (5, 4))
    for method, gain in (("search", 0.0), ("scratch", 1.0), ("permuted", 2.0)):
        shift = {0.1: 0.004 * gain, 0.3: 0.0, 0.5: -0.004 * gain}
        records = [
            record(method, target, fold, seed, 0.1 + noise[fold, seed] + shift[target] + small[fold, seed] * (gain > 0))
            for target in shift for fold in range(5) for seed in range(4)
        ]  # fmt: skip
        save(folder, method, records)


def test_verdicts_are_of_pairs(tmp_path: Path) -> None:
    study(tmp_path)
    (section,) = read(tmp_path).sections
    verdicts = {target: cell.verdict for target, cell in comparisons(section, "scratch").items()}
    assert verdicts == {0.1: "won", 0.3: "level", 0.5: "lost"}
    cell = compare(by_pair(section.of("search", 0.1)), by_pair(section.of("scratch", 0.1)))
    assert cell is not None
    assert cell.pairs == 20
    assert cell.low < -0.004 < cell.high
    assert cell.high - cell.low < 0.002  # the noise that pairs share is out
    assert comparisons(section, "found") == {}


def test_an_interval_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        low, high = paired_interval((0.3 + rng.normal(0, 1, 50)).tolist(), [None] * 50)
        inside += low <= 0.3 <= high
    assert 180 <= inside <= 199


def test_the_tables(tmp_path: Path) -> None:
    study(tmp_path)
    docs = tmp_path / "page.md"
    marks = [mark.format(name="digits-20_epochs") for mark in (BEGIN, END)]
    docs.write_text(f"before\n{marks[0]}\nSTALE\n{marks[1]}\nafter\n")
    written = write(tmp_path, docs)
    assert docs in written
    text = docs.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "STALE" not in text
    assert "ours minus scratch" in text
    assert tmp_path / "README.md" in written
    against = list(csv.reader((tmp_path / "tables" / "digits-20_epochs-recipe.csv").read_text().splitlines()))
    assert [row[0] for row in against] == ["% of cost", "10.0", "30.0", "50.0"]
    assert [row[5] for row in against] == ["cell", "won", "level", "lost"]
    target = (tmp_path / "tables" / "digits-20_epochs-target.csv").read_text().splitlines()
    assert [float(x) for x in target[1].split(",")[:7]] == pytest.approx([10, 20, 11, 1, 9.9, 9.9, 0])
    page = (tmp_path / "README.md").read_text()
    assert "espalier study --x" in page
    assert "180 runs (60 permuted, 60 scratch, 60 search); a machine" in page


def test_a_run_without_a_finite_error_counts_as_all_wrong(tmp_path: Path) -> None:
    save(tmp_path, "search", [record("search", 0.1, 0, seed, None) for seed in range(2)])
    (section,) = read(tmp_path).sections
    assert [run.error for run in section.runs] == [1.0, 1.0]


def test_a_run_above_its_target_is_counted(tmp_path: Path) -> None:
    over = [record("search", 0.1, 0, seed, 0.1, reached_after=0.1 + 0.01 * seed) for seed in range(3)]
    save(tmp_path, "search", over)
    write(tmp_path)
    target = (tmp_path / "tables" / "digits-20_epochs-target.csv").read_text().splitlines()
    assert target[1].split(",")[6] == "2"


def test_fixed_penalties_without_a_search_have_no_target_beside_them(tmp_path: Path) -> None:
    plain = [record("penalty", 0.1, 0, seed, 0.2) for seed in range(3)]
    for one in plain:
        del one["run"]["target"]
        one["run"]["penalty"] = 0.25
    save(tmp_path, "penalty", plain)
    write(tmp_path)
    (row,) = csv.DictReader((tmp_path / "tables" / "digits-20_epochs-penalty.csv").read_text().splitlines())
    assert (row["penalty"], row["runs"], float(row["mean error %"])) == ("2^-2", "3", pytest.approx(20))
    assert [row[name] for name in ("nearest target %", "ours there: mean error %", "ours minus plain [95%]")] == [
        ""
    ] * 3


def test_a_readme_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    study(tmp_path)
    own = tmp_path / "README.md"
    own.write_text("# My notes\n")
    assert own not in write(tmp_path)
    assert own.read_text() == "# My notes\n"
    report = (tmp_path / "REPORT.md").read_text()
    own.unlink()
    write(tmp_path)
    assert own.read_text() == report
    write(tmp_path)  # its own is made anew
    for page in (own, tmp_path / "REPORT.md"):
        page.write_text("# My notes\n")
    with pytest.raises(BadInput, match=r"README.md and a REPORT.md"):
        write(tmp_path)


@pytest.mark.parametrize("text", [None, "no marks\n", "{end}\n{begin}\n", "{begin}\n{begin}\n{end}\n", "{begin}\n"])
def test_a_page_without_a_place_for_the_tables_is_refused(tmp_path: Path, text: str | None) -> None:
    study(tmp_path)
    docs = tmp_path / "page.md"
    if text is not None:
        begin, end = (mark.format(name="digits-20_epochs") for mark in (BEGIN, END))
        docs.write_text(text.format(begin=begin, end=end))
    before = docs.read_text() if docs.exists() else None
    with pytest.raises(BadInput, match=r"page.md (cannot be read|has no place for generated text)"):
        write(tmp_path, docs)
    assert (docs.read_text() if docs.exists() else None) == before


def test_a_page_with_room_for_only_some_sections_is_left_as_it_is(tmp_path: Path) -> None:
    study(tmp_path)
    (tmp_path / "runs" / "digits-20_epochs").rename(tmp_path / "runs" / "a-20_epochs")
    study(tmp_path)
    docs = tmp_path / "page.md"
    docs.write_text("".join(mark.format(name="a-20_epochs") + "\n" for mark in (BEGIN, END)))
    before = docs.read_text()
    with pytest.raises(BadInput, match="recipe digits-20_epochs"):
        write(tmp_path, docs)
    assert docs.read_text() == before


def test_what_cannot_be_put_in_place_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(tmp_path)
    write(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    save(tmp_path, "found", [record("found", 0.1, fold, 0, 0.5) for fold in range(5)])

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("espalier.files.os.fsync", full)
    with pytest.raises(NotSaved, match="the disk is full"):
        write(tmp_path)
    assert {path: path.read_bytes() for path in files} == files


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "search", [record("search", 0.1, 0, 0, 0.1)], runs_in_batch=2)
    with pytest.raises(Corrupt, match=path.name):
        read(tmp_path)
    path.write_text("{")
    with pytest.raises(Corrupt, match=path.name):
        read(tmp_path)


def test_commands_are_told_without_what_changes_no_run() -> None:
    base = "espalier study --out 'my runs' --epochs 20"
    few = [f"{base} --seeds {n} --commit abc --quiet --time-limit=5" for n in (1, 2)]
    assert made_by([*few, *few, ""]) == [f"{base} --seeds 1", f"{base} --seeds 2"]
    many = [f"{base} --penalties '2^-{n}' --no-report" for n in range(1, 7)]
    (line,) = made_by(many)
    assert line.startswith(f"{base}   # in 6 calls, which share out --penalties;")
    other = "espalier study --out elsewhere --epochs 20 --seeds 3"
    assert made_by([*many, other]) == [line, other]
    assert made_by(["not 'one of ours"]) == ["not 'one of ours"]


def test_the_figure_shows_differences_as_shares_of_the_rivals_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from espalier.report.figures import rivals

    study(tmp_path)
    (section,) = read(tmp_path).sections
    figure = rivals(section)
    assert figure is not None
    (axes,) = figure.axes
    scratch, permuted = axes.containers  # there is no run of found widths, and nothing is drawn for them
    wanted = [
        np.mean([r.error for r in section.of("search", t)]) / np.mean([r.error for r in section.of("scratch", t)]) - 1
        for t in (0.1, 0.3, 0.5)
    ]
    np.testing.assert_allclose(np.asarray(scratch[0].get_ydata(), float), wanted, atol=1e-12)
    (bars,) = scratch[2]
    low, high = np.array([segment[:, 1] for segment in bars.get_segments()]).T
    assert high[0] < 0 < low[2]  # won, and lost
    assert low[1] < 0 < high[1]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == [scratch[0].get_xdata()[1], permuted[0].get_xdata()[1]]
    (alone,) = read(only_ours(tmp_path / "alone")).sections
    assert rivals(alone) is None


def test_the_legend_of_three_rivals_lies_above_the_bars_and_takes_them_no_room(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from espalier.report.figures import rivals

    for method, error in (("search", 0.1), ("scratch", 0.12), ("found", 0.11), ("permuted", 0.1)):
        save(tmp_path, method, [record(method, 0.1, 0, seed, error + 0.01 * seed) for seed in range(3)])
    (section,) = read(tmp_path).sections
    figure = rivals(section)
    assert figure is not None
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 3
    drawn, listed = axes.get_window_extent(), legend.get_window_extent()
    assert listed.y0 >= drawn.y1
    assert drawn.width > 0.75 * figure.bbox.width


def only_ours(folder: Path) -> Path:
    save(folder, "search", [record("search", 0.1, 0, seed, 0.1) for seed in range(3)])
    return folder


@pytest.mark.parametrize(
    ("signal", "word"), [({}, "losses"), ({"signal": "slopes"}, "slopes")], ids=["ranked", "slopes"]
)
def test_the_control_is_called_by_what_was_permuted(tmp_path: Path, signal: dict[str, str], word: str) -> None:
    pytest.importorskip("matplotlib")
    for method in ("search", "permuted", "scratch"):
        runs = [record(method, 0.3, fold, seed, 0.1 + 0.01 * fold) for fold in range(2) for seed in range(2)]
        save(tmp_path, method, runs, settings=HEAD["settings"] | (signal if method != "scratch" else {}))
    written, _ = report(tmp_path)
    label, other = f"control: {word} permuted", {"losses": "slopes", "slopes": "losses"}[word]
    pages = {path.name: path.read_text() for path in written if path.suffix in (".md", ".csv", ".html", ".svg")}
    assert {name for name, text in pages.items() if label.partition(": ")[2] in text} >= {
        "README.md", "report.html", "runs.csv", "digits-20_epochs-medians.md", "digits-20_epochs-rivals.svg",
    }  # fmt: skip
    assert not any(f"{other} permuted" in text for text in pages.values())


def test_the_control_of_a_sweep_is_called_by_what_was_permuted(tmp_path: Path) -> None:
    for signal in ("ranked", "slopes"):
        run_directory(tmp_path / signal, permuted=True, recipe={"signal": signal}, learning_rate=0.1)
    words = {run.called for run in read(tmp_path / "ranked").runs + read(tmp_path / "slopes").runs}
    assert words == {f"control: {what} permuted, learning rate 0.1" for what in ("losses", "slopes")}
