"""The figures that any study has, with matplotlib: size against error, learning curves, theta, what is kept, rivals."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from espalier import files
from espalier.picture import raised
from espalier.report import grid_tables
from espalier.report.charts import MEASURES, error_axis, over_updates
from espalier.report.significance import Quartiles, quartiles
from espalier.report.study_reader import Point, Section, Series, numbers
from espalier.report.tables import layer

# Okabe and Ito's colours, told apart by the colour-blind; every series has its own marker besides.
COLOURS = (
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"),
    ("#000000", "X"),
)  # fmt: skip
RULES: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "espalier",  # the same runs give the same file
}
MOST_LAYERS = 24
APART = 0.2  # between rivals of one size, in steps between sizes


def figures(section: Section) -> dict[str, Figure]:
    """Name and figure, those there are numbers for. matplotlib's global state is left alone."""
    with matplotlib.rc_context(RULES):
        every = {"trade-off": trade_off(section), "learning": learning(section), "theta": thetas(section)}
        every["kept"] = kept(section)
    return {name: figure for name, figure in every.items() if figure is not None}


def save(figure: Figure, stem: Path) -> list[Path]:
    """stem.svg and stem.png."""
    written = list[Path]()
    with matplotlib.rc_context(RULES):
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata, bbox_inches="tight")
            drawn = shorter(buffer.getvalue()) if kind == "svg" else buffer.getvalue()
            written.append(files.write(stem.with_name(f"{stem.name}.{kind}"), drawn))
    return written


def shorter(svg: bytes) -> bytes:
    """With hundredths of a point in places and paths, where matplotlib writes millionths; without the white space
    inside, and with a style that all markers of a series have said once."""

    def rounded(number: re.Match[bytes]) -> bytes:
        return f"{float(number[0]):.2f}".encode()

    def places(attribute: re.Match[bytes]) -> bytes:
        return re.sub(rb"\d+\.\d{3,}", rounded, re.sub(rb"\s+", b" ", attribute[0]))

    def once(series: re.Match[bytes]) -> bytes:
        return series[1] + series[3] + b">" + series[2].replace(series[3], b"")

    svg = re.sub(rb"\n\s+<", b"\n<", re.sub(rb' (?:d|x|y|transform)="[^"]*"', places, svg))
    return re.sub(rb'(<g[^>]*)>((?=\s*<use [^>]*?( style="[^"]*")/>)(?:\s*<use [^>]*\3/>)+\s*</g>)', once, svg)


def trade_off(section: Section) -> Figure | None:
    """Median error against median size, counted in each way that is known, with quartiles both ways."""
    if section.measure is None or not section.axes:
        return None
    figure = Figure(figsize=(max(5.6, 4.8 * len(section.axes)), 4.5), layout="constrained")
    grid = figure.subplots(1, len(section.axes), sharey=True, squeeze=False)[0]
    heights = list[float]()
    for axes, axis in zip(grid, section.axes):
        for i, one in enumerate(section.series):
            if curve := one.curve(axis, section.measure):
                x, y = np.array([q for _, q, _ in curve]), np.array([q for _, _, q in curve])
                heights += list(y.flatten())
                look = (*COLOURS[i % len(COLOURS)], "-" if one.variant.startswith("search") else "--")
                crosses(axes, x, y, look, label=_text(one.label), xerr=arms(x), yerr=arms(y))
        front = section.front(axis)
        axes.step(
            [x for x, _, _ in front], [y for _, y, _ in front], where="post", color="#777777", lw=0.9, ls=":",
            marker="o", ms=11, mfc="none", mew=1.0, label="Pareto front", zorder=1,
        )  # fmt: skip
        shares_along_x(axes, f"{axis} kept")
    grid[0].set_ylabel(f"{section.measure}, {section.error_of}")
    _scaled(grid[0], section.measure, heights)
    grid[-1].legend(loc="best")
    return _finished(figure, f"Size against {section.measure}", section)


def learning(section: Section) -> Figure | None:
    """Error (or loss) and size over the updates, for the first method that tells them; a colour for each setting."""
    for one in section.series:
        known = [name for name in MEASURES if any(len(over_updates(p.runs, name)[0]) > 1 for p in one.points)]
        error, loss, share = (next((n for n in known if n.endswith(end)), None) for end in ("error", "loss", "kept"))
        names = [name for name in (error or loss, share) if name]
        if names:
            return _learning(section, one, names)
    return None


def _learning(section: Section, one: Series, names: Sequence[str]) -> Figure:
    figure = Figure(figsize=(5.2 * len(names) + 1.2, 4.5), layout="constrained")
    grid = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(grid, names):
        heights = list[float]()
        for point, colour in zip(one.points, shades(len(one.points))):
            low, high = band(axes, over_updates(point.runs, name), colour, _text(point.label))
            heights += [*low, *high]
        axes.set_title(f"{name}, {section.error_of}" if name in ("error", "loss") else name)
        axes.set_xlabel("updates")
        axes.set_xlim(left=0)
        _scaled(axes, "error" if name.endswith("error") else "loss" if name.endswith("loss") else "share", heights)
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, f"Over the training ({one.label})", section)


def thetas(section: Section) -> Figure | None:
    """The smallest and the largest network that were searched for: every gate's theta, update by update."""
    known = [(one, point, theta) for one in section.series for point in one.points if (theta := point.example.theta)]
    if not known:
        return None
    ends = [known[0], known[-1]] if len(known) > 1 else known
    figure = Figure(figsize=(5.2 * len(ends) + 0.6, 4.2), layout="constrained")
    grid = figure.subplots(1, len(ends), squeeze=False)[0]
    for axes, (one, point, theta) in zip(grid, ends):
        borders = [0, *np.cumsum(list(theta.sizes.values())).tolist()]
        parts = [theta.values[:, a:b] for a, b in pairwise(borders)]
        rows = np.concatenate([part[:, np.argsort(-part[-1], kind="stable")] for part in parts], 1).T
        image = axes.pcolormesh(
            _edges(theta.updates), np.arange(borders[-1] + 1), rows, cmap="cividis", vmin=0, vmax=1, rasterized=True
        )
        for border in borders[1:-1]:
            axes.axhline(border, color="white", lw=1.2)
        middles = [(a + b) / 2 for a, b in pairwise(borders)]
        few = range(0, len(middles), max(1, -(-len(middles) // 16)))
        names = [_text(layer(i, name)) for i, name in enumerate(theta.sizes, 1)]
        axes.set_yticks([middles[i] for i in few], [names[i] for i in few])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_title(_text(f"{one.label}, {point.label}"), fontsize=10)
        axes.set_xlabel("updates")
    figure.colorbar(image, ax=list(grid), label="theta", shrink=0.9)
    return _finished(figure, "Theta over time", section)


def kept(section: Section) -> Figure | None:
    """What each group of gates keeps under each setting of the first method that tells it: medians and quartiles."""
    series = next((one for one in section.series if any(run.kept for run in one.runs)), None)
    if series is None:
        return None
    points = [point for point in series.points if any(run.kept for run in point.done)]
    names = list(dict.fromkeys(name for point in points for run in point.done for name in run.kept))[:MOST_LAYERS]
    if not points or not names:
        return None
    figure = Figure(figsize=(min(14.0, 4.0 + 1.1 * len(names)), 4.0), layout="constrained")
    axes = figure.subplots()
    for k, (point, colour) in enumerate(zip(points, shades(len(points)))):
        shares = np.array([share_kept(point, name) for name in names])
        bars(axes, k, len(points), shares, colour, _text(point.label), spread=len(point.done) > 1)
    axes.set_xticks(
        range(len(names)),
        [_text(layer(i, name)) for i, name in enumerate(names, 1)],
        rotation=0 if len(names) < 8 else 60,
    )
    axes.set_ylabel("gates kept")
    if all(run.kept[name][1] for point in points for run in point.done for name in names if name in run.kept):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, f"What each layer keeps ({series.label})", section)


def rivals(section: Section) -> Figure | None:
    """Of a grid: ours minus each rival at each size, as a share of the rival's mean error; None without a rival."""
    sizes = grid_tables.targets(section)
    present = {rival: cells for rival in grid_tables.RIVALS if (cells := _cells(section, rival))}
    if not present:
        return None
    with matplotlib.rc_context(RULES):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0.0, color="#333333", lw=1.0)
        for i, (rival, cells) in enumerate(present.items()):
            x = [sizes.index(target) + APART * (i - (len(present) - 1) / 2) for target in cells]
            y = [cell.mean / of for cell, of in cells.values()]
            ends = [(c.mean - c.low, c.high - c.mean, of) for c, of in cells.values()]  # below 0 by rounding, if equal
            bars = [[max(low, 0.0) / of for low, _, of in ends], [max(high, 0.0) / of for _, high, of in ends]]
            colour, marker = COLOURS[1 + list(grid_tables.RIVALS).index(rival)]
            axes.errorbar(
                x, y, yerr=bars, color=colour, marker=marker, ms=6, ls="", elinewidth=1.6, capsize=3,
                label=grid_tables.rivals(section)[rival].replace("control:", "the control,"),
            )  # fmt: skip
            for at, (cell, _), value in zip(x, cells.values(), y):
                if cell.verdict == "level":  # hollow: nothing is sure
                    axes.plot([at], [value], marker=marker, ms=6, ls="", color=colour, mfc="white", zorder=3)
        axes.set_xticks(range(len(sizes)), [f"{100 * target:g}%" for target in sizes])
        axes.set_xlabel("of the full cost")
        axes.set_ylabel("ours minus the rival, of its error")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(y=0.12)
        axes.legend(  # above, off the bars
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, fontsize=8.5, handletextpad=0.2, columnspacing=1.2
        )
        title = raised(f"Ours and its rivals: {grid_tables.title(section)}")
        note = "below 0 ours is better; bars: 95% bootstrap over pairs; hollow: level"
        return titled(figure, title, raised(f"{note}\n{grid_tables.note(section)}"), size=11)


def _cells(section: Section, rival: str) -> dict[float, tuple[grid_tables.Comparison, float]]:
    """By size the comparison there, and the rival's mean error; without those that have no share."""
    cells = dict[float, tuple[grid_tables.Comparison, float]]()
    for target, cell in grid_tables.comparisons(section, rival).items():
        errors = numbers(section.of(rival, target), "error")
        if sum(errors) > 0:
            cells[target] = cell, sum(errors) / len(errors)
    return cells


def _edges(updates: Sequence[int]) -> np.ndarray:
    """Between snapshots, so that each stands in the middle of its column: ``(snapshots + 1)``."""
    at = np.asarray(updates, dtype=np.float64)
    if len(at) == 1:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    between = (at[1:] + at[:-1]) / 2
    edges: np.ndarray = np.concatenate([[at[0] - (between[0] - at[0])], between, [at[-1] + (at[-1] - between[-1])]])
    return edges


def _scaled(axes: Axes, measure: str, values: Sequence[float]) -> None:
    """The axis of the page, for errors; shares in percent; losses as they are."""
    if measure == "error" and values:
        shape = error_axis(values)
        if shape.get("type") == "log":
            axes.set_yscale("log")
            axes.set_ylim(*shape["range"])
            axes.set_yticks(*zip(*shape["ticks"]))
            axes.set_yticks([], minor=True)
            return
    if measure != "loss":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    if measure == "share":
        axes.set_ylim(0, 1.03)


def _finished(figure: Figure, title: str, section: Section) -> Figure:
    several = max(len(point.runs) for point in section.points) > 1
    note = f"median and quartiles of {section.trials}" if several else "one seed"
    return titled(figure, _text(f"{title}: {section.title}"), _text(f"{section.note}; {note}"))


def _text(words: str) -> str:
    """As it is: a dollar would begin a formula."""
    return raised(words).replace("$", "\\$")


# ---- for figures of any kind -----------------------------------------------------------------------------------------


def titled(figure: Figure, title: str, note: str, *, size: int = 12) -> Figure:
    """note: what it is made of, small, below."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=size, fontweight="bold")
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def band(axes: Axes, curve: Any, colour: Any, label: str) -> tuple[list[float], list[float]]:
    """Medians over updates in a band from quartile to quartile; curve: of ``over_updates``. Returns the quartiles."""
    updates, low, middle, high = curve
    axes.plot(updates, middle, color=colour, lw=1.8, label=label)
    axes.fill_between(updates, low, high, color=colour, alpha=0.18, lw=0)
    return low, high


def crosses(axes: Axes, x: np.ndarray, y: np.ndarray, look: tuple[str, str, str], **more: Any) -> None:
    """Medians joined by a line. x, y: quartiles ``(points, 3)``; look: colour, marker and line; more: the arms, ..."""
    colour, marker, line = look
    axes.errorbar(
        x[:, 1], y[:, 1], color=colour, marker=marker, ls=line, ms=5.5, lw=1.6, elinewidth=1.1, capsize=2.5, **more
    )


def bars(
    axes: Axes, place: int, count: int, quarters: np.ndarray, colour: Any, label: str, *, spread: bool = True
) -> None:
    """Medians as bars, of several side by side those at a place; spread: with arms to the quartiles ``(bars, 3)``."""
    width = 0.8 / count
    at = np.arange(len(quarters)) - 0.4 + width * (place + 0.5)
    axes.bar(at, quarters[:, 1], width=width * 0.92, color=colour, label=label)
    if spread:
        axes.errorbar(at, quarters[:, 1], yerr=arms(quarters), fmt="none", ecolor="#333333", elinewidth=1, capsize=2)


def share_kept(point: Point, name: str) -> Quartiles:
    """What a group of gates keeps of all that it has: quartiles over the runs of a point."""
    pairs = [run.kept[name] for run in point.done if name in run.kept]
    return quartiles([count / (total or 1) for count, total in pairs]) if pairs else (np.nan, np.nan, np.nan)


def shares_along_x(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)


def arms(quarters: np.ndarray) -> np.ndarray:
    """From quartiles ``(points, 3)`` the lengths of error bars ``(2, points)``."""
    lengths: np.ndarray = np.maximum(np.stack([quarters[:, 1] - quarters[:, 0], quarters[:, 2] - quarters[:, 1]]), 0)
    return lengths


def shades(count: int) -> list[Any]:
    """From dark to light, even for the colour-blind, and on paper."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, max(count, 1))))
