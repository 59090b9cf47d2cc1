"""The figures that any study has, with matplotlib: size against error, learning curves, theta, what is kept."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from espalier.picture.labels import raised
from espalier.report.charts import MEASURES, error_axis, over_updates
from espalier.report.drawing import RULES
from espalier.report.files import put
from espalier.report.sections import Point, Section, Series
from espalier.report.statistics import quartiles
from espalier.report.structure_charts import group_label

# Okabe and Ito's colours, told apart by the colour-blind; every series has its own marker besides.
COLOURS = (
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"),
    ("#000000", "X"),
)  # fmt: skip
MOST_LAYERS = 24


def figures(section: Section) -> dict[str, Figure]:
    """Name and figure, those there are numbers for. matplotlib's global state is left alone."""
    with matplotlib.rc_context(RULES):
        made = {"trade-off": trade_off(section), "learning": learning(section), "theta": thetas(section)}
        made["kept"] = kept(section)
    return {name: figure for name, figure in made.items() if figure is not None}


def save(figure: Figure, stem: Path) -> list[Path]:
    """stem.svg and stem.png."""
    written = list[Path]()
    with matplotlib.rc_context(RULES):
        for kind, told in (("svg", {"Date": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=told, bbox_inches="tight")
            written.append(put(stem.with_name(f"{stem.name}.{kind}"), buffer.getvalue()))
    return written


def trade_off(section: Section) -> Figure | None:
    """Median error against median size, counted in each way that is known, with quartiles both ways."""
    if section.measure is None or not section.axes:
        return None
    figure = Figure(figsize=(max(5.6, 4.8 * len(section.axes)), 4.5), layout="constrained")
    grid = figure.subplots(1, len(section.axes), sharey=True, squeeze=False)[0]
    heights = list[float]()
    for axes, axis in zip(grid, section.axes):
        for i, one in enumerate(section.series):
            points = [p for p in one.points if p.shares(axis) and p.errors(section.measure)]
            if not points:
                continue
            x = np.array([quartiles(p.shares(axis)) for p in points])
            y = np.array([quartiles(p.errors(section.measure)) for p in points])
            heights += list(y.flatten())
            colour, marker = COLOURS[i % len(COLOURS)]
            axes.errorbar(
                x[:, 1], y[:, 1], xerr=_arms(x), yerr=_arms(y), color=colour, marker=marker, ms=5.5, lw=1.6,
                ls="-" if one.variant.startswith("search") else "--", elinewidth=1.1, capsize=2.5,
                label=_text(one.label),
            )  # fmt: skip
        front = section.front(axis)
        axes.step(
            [x for x, _, _ in front], [y for _, y, _ in front], where="post", color="#777777", lw=0.9, ls=":",
            marker="o", ms=11, mfc="none", mew=1.0, label="Pareto front", zorder=1,
        )  # fmt: skip
        axes.set_xlabel(f"{axis} kept")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlim(left=0)
    grid[0].set_ylabel(f"{section.measure}, {section.error_of}")
    _scaled(grid[0], section.measure, heights)
    grid[-1].legend(loc="best")
    return _finished(figure, f"Size against {section.measure}", section)


def learning(section: Section) -> Figure | None:
    """Error (or loss) and size over the updates, for the first method that tells them; a colour for each setting."""
    for one in section.series:
        told = [name for name in MEASURES if any(len(over_updates(p.runs, name)[0]) > 1 for p in one.points)]
        shown = [next((n for n in told if n.endswith(end)), None) for end in ("error", "loss", "kept")]
        names = [name for name in (shown[0] or shown[1], shown[2]) if name]
        if names:
            return _learning(section, one, names)
    return None


def _learning(section: Section, one: Series, names: Sequence[str]) -> Figure:
    figure = Figure(figsize=(5.2 * len(names) + 1.2, 4.5), layout="constrained")
    grid = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(grid, names):
        heights = list[float]()
        for point, colour in zip(one.points, shades(len(one.points))):
            updates, low, middle, high = over_updates(point.runs, name)
            axes.plot(updates, middle, color=colour, lw=1.8, label=_text(point.label))
            axes.fill_between(updates, low, high, color=colour, alpha=0.18, lw=0)
            heights += [*low, *high]
        axes.set_title(f"{name}, {section.error_of}" if name in ("error", "loss") else name)
        axes.set_xlabel("updates")
        axes.set_xlim(left=0)
        _scaled(axes, "error" if name.endswith("error") else "loss" if name.endswith("loss") else "share", heights)
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, f"Over the training ({one.label})", section)


def thetas(section: Section) -> Figure | None:
    """The smallest and the largest network that were searched for: every gate's theta, update by update."""
    found = [(one, point, theta) for one in section.series for point in one.points if (theta := point.example.theta)]
    if not found:
        return None
    chosen = [found[0], found[-1]] if len(found) > 1 else found
    figure = Figure(figsize=(5.2 * len(chosen) + 0.6, 4.2), layout="constrained")
    grid = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axes, (one, point, theta) in zip(grid, chosen):
        ends, start = [0], 0
        blocks = list[np.ndarray]()
        for size in theta.sizes.values():
            part = theta.values[:, start : start + size]
            blocks.append(part[:, np.argsort(-part[-1], kind="stable")])
            start += size
            ends.append(start)
        image = axes.pcolormesh(
            _edges(theta.updates), np.arange(start + 1), np.concatenate(blocks, 1).T, cmap="cividis", vmin=0, vmax=1,
            rasterized=True,
        )  # fmt: skip
        for end in ends[1:-1]:
            axes.axhline(end, color="white", lw=1.2)
        middles = [(a + b) / 2 for a, b in pairwise(ends)]
        few = range(0, len(middles), max(1, -(-len(middles) // 16)))
        names = [_text(group_label(name)) for name in theta.sizes]
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
    room = 0.8 / len(points)
    for k, (point, colour) in enumerate(zip(points, shades(len(points)))):
        found = np.array([_share(point, name) for name in names])
        at = np.arange(len(names)) - 0.4 + room * (k + 0.5)
        axes.bar(at, found[:, 1], width=room * 0.92, color=colour, label=_text(point.label))
        if len(point.done) > 1:
            axes.errorbar(at, found[:, 1], yerr=_arms(found), fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    axes.set_xticks(
        range(len(names)), [_text(group_label(name)) for name in names], rotation=0 if len(names) < 8 else 60
    )
    axes.set_ylabel("gates kept")
    if all(run.kept[name][1] for point in points for run in point.done for name in names if name in run.kept):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, f"What each layer keeps ({series.label})", section)


def _share(point: Point, name: str) -> tuple[float, float, float]:
    pairs = [run.kept[name] for run in point.done if name in run.kept]
    return quartiles([count / (total or 1) for count, total in pairs]) if pairs else (np.nan, np.nan, np.nan)


def _edges(updates: Sequence[int]) -> np.ndarray:
    """Between snapshots, so that each stands in the middle of its column: ``(snapshots + 1)``."""
    at = np.asarray(updates, dtype=np.float64)
    if len(at) == 1:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    between = (at[1:] + at[:-1]) / 2
    edges: np.ndarray = np.concatenate([[at[0] - (between[0] - at[0])], between, [at[-1] + (at[-1] - between[-1])]])
    return edges


def _scaled(axes: Any, measure: str, values: Sequence[float]) -> None:
    """The axis of the page, for errors; shares in percent; losses as they are."""
    if measure == "error" and values:
        shape = error_axis(values)
        if shape.get("type") == "log":
            axes.set_yscale("log")
            axes.set_ylim(10 ** shape["range"][0], 10 ** shape["range"][1])
            axes.set_yticks(shape["tickvals"], shape["ticktext"])
            axes.set_yticks([], minor=True)
            return
    if measure != "loss":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    if measure == "share":
        axes.set_ylim(0, 1.03)


def _arms(found: np.ndarray) -> np.ndarray:
    arms: np.ndarray = np.maximum(np.stack([found[:, 1] - found[:, 0], found[:, 2] - found[:, 1]]), 0)
    return arms


def _finished(figure: Figure, title: str, section: Section) -> Figure:
    figure.suptitle(_text(f"{title}: {section.title}"), x=0.01, ha="left", fontsize=12, fontweight="bold")
    several = max(len(point.runs) for point in section.points()) > 1
    note = f"median and quartiles of {section.trials}" if several else "one seed"
    figure.supxlabel(_text(f"{section.note}; {note}"), x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def shades(count: int) -> list[Any]:
    """From dark to light, even for the colour-blind, and on paper."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, max(count, 1))))


def _text(words: str) -> str:
    """As it is: a dollar would begin a formula."""
    return raised(words).replace("$", "\\$")
