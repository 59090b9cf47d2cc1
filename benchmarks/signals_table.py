"""The tables and the figure of docs/signal.md, from the file of ``signals.py``.

    python benchmarks/signals_table.py FILE.json [--into PAGE.md] [--figure FILE.svg]
    python benchmarks/signals_table.py FILE.json --all     # every signal, both gradients, each theta: printed

A number is a mean over the trained networks; after the sign, half of its 95% interval by Student's t.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from espalier.report.tables import put_between
from evidence_table import deviation, mean, quantile

MARKS = ("<!-- generated: signals -->", "<!-- end of generated: signals -->")
PARTS = {"apart": "what tells gates apart", "whole": "the whole gradient"}
# Names in signals.py, in the order of the tables.
ROWS = {
    "ranked": 'ranked losses (`"ranked"`)',
    "antithetic": "ranked losses, antithetic masks",
    "raw": "differences of losses",
    "varied": "differences of losses, control variate",
    "varied, same masks": "the same, slopes of the same masks (biased)",
    "first-order": 'slopes (`"first-order"`), same examples',
    "first-order, own": 'slopes (`"first-order"`)',
    "probe": "B g^2 / 2 where open, - g; same examples",
    "probe, own": "B g^2 / 2 where open, - g",
    "fisher": "s^2 / 2 where open, - g; same examples",
    "fisher, own": "s^2 / 2 where open, - g",
    "slopes, mean": 'sizes, \\|g\\| for s (`"slopes"`), same examples',
    "slopes, mean, own": 'sizes, \\|g\\| for s (`"slopes"`)',
    "slopes": 'sizes (`"slopes"`), same examples',
    "slopes, own": '**sizes (`"slopes"`)**',
    "sum, own": "sum over units of their \\|g\\|",
    "norm, own": "root of the sum over units of their g^2",
    "sum of s, own": "sum over units of their s",
    "size, 0, own": "s, no direction",
    "size, 0.25, own": "s - g / 4",
    "size, 1, own": "s - g",
    "open, own": "s where open, - g / 2",
    "permuted, layer, own": "control: slopes permuted in each layer",
    "permuted, layer, masks too, own": "control: masks and slopes permuted in each layer",
    "permuted, all, own": "control: slopes permuted among all",
    "permuted, all, masks too, own": "control: masks and slopes permuted among all",
    "alike": "all gates alike",
}
OF_UNITS = ("norm, own", "sum, own", "sum of s, own")
BY_UNITS = ("slopes, mean, own", "norm, own", "sum, own", "slopes, own", "sum of s, own")  # of gates on several units
PAGE = [
    name
    for name in ROWS
    if name in ("ranked", "antithetic", "raw", "varied") or (name.endswith(", own") and name not in OF_UNITS)
]
SHORT = (
    "ranked", "antithetic", "varied", "first-order, own", "probe, own", "fisher, own", "slopes, mean, own",
    "slopes, own", "open, own", "permuted, layer, own", "permuted, all, own", "permuted, all, masks too, own",
    "alike",
)  # fmt: skip
DRAWN = {  # name: label, colour (Okabe and Ito), marker
    "slopes, own": ('"slopes"', "#0072B2", "o"),
    "slopes, mean, own": ('"slopes", |g| for s', "#56B4E9", "P"),
    "fisher, own": ("s^2 / 2 - g", "#009E73", "D"),
    "probe, own": ("B g^2 / 2 - g", "#E69F00", "v"),
    "varied": ("losses, control variate", "#000000", "X"),
    "first-order, own": ('"first-order"', "#CC79A7", "^"),
    "ranked": ('"ranked"', "#D55E00", "s"),
    "permuted, all, masks too, own": ("control", "#7F7F7F", "x"),
}
Records = dict[tuple[str, int, str, str], dict[str, Any]]


def read(path: Path) -> tuple[dict[str, Any], Records]:
    """The story of the file, and its records by theta, length of training, signal and part."""
    story: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return story, {(one["theta"], one["trained"], one["signal"], one["part"]): one for one in story["records"]}


def half(values: Sequence[float]) -> float:
    """Half of the 95% interval of their mean."""
    n = len(values)
    return quantile(n - 1) * deviation(values) / n**0.5 if n > 1 else float("nan")


def cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return ""
    shown = f"{mean(known):.2f}"
    return f"{'0.00' if shown == '-0.00' else shown} ± {half(known):.2f}"


def lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def by_theta(records: Records, length: int, part: str) -> str:
    """Cosines of single updates: a row for each signal, a column for each theta."""
    thetas = list(dict.fromkeys(key[0] for key in records))
    rows = [
        [ROWS[signal], *(cell(records[theta, length, signal, part].get("single", [])) for theta in thetas)]
        for signal in SHORT
        if (part, signal) != ("apart", "alike")
    ]
    return lines(["theta", *thetas], rows)


def over_all(records: Records, part: str, signals: Iterable[str] = ROWS) -> str:
    """A row for each signal, averaged over thetas and lengths of training for each network."""

    def average(signal: str, measure: str) -> list[float | None]:
        lists = [record.get(measure, []) for key, record in records.items() if key[2:] == (signal, part)]
        columns = zip(*lists, strict=True)
        return [None if None in column else mean(column) for column in columns]

    rows, best = [], average("slopes, own", "single")
    for signal in signals:
        if (part, signal) == ("apart", "alike") or not any(key[2] == signal for key in records):
            continue
        control = signal.startswith(("permuted", "alike"))
        measures = ["single", "ten"] if control else ["single", "ten", "mean", "bias", "noise"]
        cells = [cell(average(signal, measure)) for measure in measures]
        pairs = zip(best, average(signal, "single"))
        ahead = cell([None if one is None or two is None else one - two for one, two in pairs])
        rows.append([ROWS[signal], *cells, *[""] * (5 - len(cells)), "" if signal == "slopes, own" else ahead])
    return lines(["signal", "one update", "mean of ten", "mean update", "bias", "noise", '`"slopes"` ahead'], rows)


def text(path: Path) -> str:
    """What stands between the marks of the page: the signals that read examples of their own, and the figure."""
    story, records = read(path)
    settings = story["settings"]
    shape = "-".join(map(str, settings["network"]))
    table = "python benchmarks/signals_table.py results/signal/digits.json"
    return "\n\n".join(
        [
            f"Digits, {shape}, {settings['gates']} gates. {settings['weights']} networks for each theta, "
            f"{settings['updates']:,} updates of {settings['samples']} masks and {settings['examples']} examples for "
            f"each. torch {story['versions']['torch']}, {story['hardware']['cpu']}, {story['seconds']:.0f} seconds. "
            "A number is a mean over the networks, the six thetas and both lengths of training. After the sign stands "
            "half of its 95% interval.",
            over_all(records, "apart", PAGE),
            "![How well a single update points, for each theta](../results/signal/digits.svg)",
            f"```console\n$ {story['command']}\n$ {table} --all\n```",
        ]
    )


def everything(path: Path) -> str:
    """All signals, for what tells gates apart and for the whole gradient, over all thetas and for each."""
    _, records = read(path)
    pieces = []
    for part, name in PARTS.items():
        title = f"**{name.capitalize()}: means over the six thetas and both lengths of training**"
        pieces += [title, over_all(records, part)]
    for part, name in PARTS.items():
        for length in sorted({key[1] for key in records}, reverse=True):
            title = f"**{name.capitalize()}: cosine of a single update, weights trained for {length:,} updates**"
            pieces += [title, by_theta(records, length, part)]
    return "\n\n".join(pieces)


def draw(path: Path, save: Callable[[Any], None]) -> None:
    """Cosines of single updates over theta, for both lengths and both parts."""
    import matplotlib
    from matplotlib.figure import Figure

    from espalier.report.figures import RULES

    _, records = read(path)
    thetas = list(dict.fromkeys(key[0] for key in records))
    lengths = sorted({key[1] for key in records})
    with matplotlib.rc_context(RULES):
        figure = Figure(figsize=(9.2, 6.6), layout="constrained")
        grid = figure.subplots(2, len(lengths), sharex=True, sharey=True)
        for row, (part, name) in zip(grid, PARTS.items()):
            for axes, length in zip(row, lengths):
                for i, (signal, (label, colour, marker)) in enumerate(DRAWN.items()):
                    values = [records[theta, length, signal, part]["single"] for theta in thetas]
                    at = [x + 0.05 * (i - len(DRAWN) / 2) for x in range(len(thetas))]  # side by side
                    axes.errorbar(
                        at, [mean(v) for v in values], [half(v) for v in values], label=label, color=colour,
                        marker=marker, markersize=5, linewidth=0, elinewidth=1.2, capsize=0,
                    )  # fmt: skip
                    axes.plot(at[:-1], [mean(v) for v in values[:-1]], color=colour, linewidth=0.9, alpha=0.6)
                if part == "whole":
                    values = [records[theta, length, "alike", part]["single"] for theta in thetas]
                    for x, v in enumerate(values):
                        axes.hlines(mean(v), x - 0.3, x + 0.3, color="#7F7F7F", linestyle=":", linewidth=1.4)
                axes.axhline(0, color="#666666", linewidth=0.8)
                axes.set_title(f"{name.capitalize()}; weights: {length:,} updates", fontsize=9.5)
                axes.set_xticks(range(len(thetas)), thetas)
                axes.set_ylim(-0.5, 1.03)
        for axes in grid[-1]:
            axes.set_xlabel("theta of all gates")
        for axes in grid[:, 0]:
            axes.set_ylabel("cosine of one update")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        dotted = grid[-1, 0].plot([], [], color="#7F7F7F", linestyle=":", linewidth=1.4)
        figure.legend(
            [*handles, *dotted], [*labels, "all gates alike"], loc="outside lower center", ncols=5, frameon=False
        )
        save(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--into", type=Path, help="the page whose generated part is replaced; else it is printed")
    parser.add_argument("--all", action="store_true", help="print every table instead")
    parser.add_argument("--figure", type=Path, help="a file to draw into, by its ending: .svg or .png")
    options = parser.parse_args(arguments)
    if options.into:
        put_between(options.into, [(MARKS, text(options.file))])
    else:
        print(everything(options.file) if options.all else text(options.file))
    if options.figure:

        def save(figure: Any) -> None:
            buffer, kind = io.BytesIO(), options.figure.suffix[1:]
            figure.savefig(buffer, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)
            options.figure.write_bytes(buffer.getvalue())

        draw(options.file, save)


if __name__ == "__main__":
    main()
