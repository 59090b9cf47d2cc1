"""The figures of the unit-selection study, with matplotlib: size against error, learning curves, theta, layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from espalier.report.runs import Run, Section
from espalier.report.statistics import median, quartiles
from espalier.report.table import power

# Okabe and Ito's colours, told apart by the colour-blind; every series has its own marker besides.
STYLES = {"search": ("#0072B2", "o", "-"), "fixed": ("#D55E00", "s", "--"), "dropout": ("#009E73", "D", "")}
OTHERS = (("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"), ("#8C6D31", "<"), ("#7F7F7F", ">"))
LABELS = {"search": "unit selection", "fixed": "fixed, uniform layers", "dropout": "dropout, all units"}
RULES: Any = {
    "font.family": "sans-serif",
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


def figures(section: Section) -> dict[str, Figure]:
    """Name and figure, those there are runs for. matplotlib's global state is left alone."""
    with matplotlib.rc_context(RULES):
        made = {"error": trade_off(section)}
        if section.of("search"):
            made["learning"] = learning(section)
            made["theta"] = thetas(section)
            made["layers"] = layers(section)
    return made


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.svg and stem.png."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    with matplotlib.rc_context(RULES):
        figure.savefig(paths[0], metadata={"Date": None}, bbox_inches="tight")
        figure.savefig(paths[1], dpi=160, metadata={"Software": None}, bbox_inches="tight")
    return paths


def trade_off(section: Section) -> Figure:
    """Fig. 2(a): error against unit share and against weight share, medians with quartiles both ways."""
    figure = Figure(figsize=(10.4, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, title in ((left, "unit_share", "Units kept"), (right, "weight_share", "Weights kept")):
        for i, variant in enumerate(section.variants):
            _series(axes, section, variant, name, *style(variant, i))
        axes.set_title(title)
        axes.set_xlabel("share of the full network")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlim(left=0)
    left.set_ylabel("test error" if section.evaluated_on == "test set" else "error, held-out images")
    _errors_on(left)
    _label_penalties(left, section)
    left.legend(loc="upper right")
    return _finished(figure, "Size against error", section)


def learning(section: Section) -> Figure:
    """Share of units and error over the updates, a colour for each penalty; medians and quartiles."""
    figure = Figure(figsize=(10.4, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    penalties = section.settings("search")
    for penalty, colour in zip(penalties, _shades(len(penalties))):
        runs = section.of("search", penalty)
        for axes, name in ((left, "unit_share"), (right, "test_error")):
            updates, low, middle, high = over_updates(runs, name)
            axes.plot(updates, middle, color=colour, lw=1.8, label=f"$\\epsilon'$ = {_maths(penalty)}")
            axes.fill_between(updates, low, high, color=colour, alpha=0.18, lw=0)
    if full := section.of("fixed", 1.0):
        updates, _, middle, _ = over_updates(full, "test_error")
        right.plot(updates, middle, color=STYLES["fixed"][0], ls="--", lw=1.6, label="full network")
    left.set_title("Units kept")
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0, 1.03)
    right.set_title("Test error")
    _errors_on(right)
    for axes in (left, right):
        axes.set_xlabel("updates")
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.set_xlim(left=0)
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, "Over the training", section)


def thetas(section: Section) -> Figure:
    """Where theta ends, all layers together: how decided the structures are."""
    penalties = section.settings("search")
    figure = Figure(figsize=(10.4, 2.7), layout="constrained")
    grid = figure.subplots(1, len(penalties), sharey=True, squeeze=False)[0]
    for axes, penalty, colour in zip(grid, penalties, _shades(len(penalties))):
        runs = section.of("search", penalty)
        counts = np.sum([r.story["result"]["theta_histogram"] for r in runs], axis=(0, 1))
        edges = np.linspace(0, 1, len(counts) + 1)
        axes.bar(edges[:-1], counts / counts.sum(), width=1 / len(counts), align="edge", color=colour, lw=0)
        axes.set_title(f"$\\epsilon'$ = {_maths(penalty)}", fontsize=10)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_xlabel("$\\theta$")
        axes.grid(axis="x", visible=False)
    grid[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    grid[0].set_ylabel("share of the units")
    return _finished(figure, "Probabilities at the end", section)


def layers(section: Section) -> Figure:
    """What each layer keeps under each penalty: medians and quartiles."""
    penalties = section.settings("search")
    figure = Figure(figsize=(8.6, 4.0), layout="constrained")
    axes = figure.subplots()
    widths = section.widths[1:-1]
    room = 0.8 / len(widths)
    for i, (width, colour) in enumerate(zip(widths, ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7") * 9)):
        found = [quartiles([r.units[i] / width for r in section.of("search", p)]) for p in penalties]
        at = [k - 0.4 + room * (i + 0.5) for k in range(len(penalties))]
        middle = np.array([q[1] for q in found])
        spread = np.array([[q[1] - q[0] for q in found], [q[2] - q[1] for q in found]])
        axes.bar(at, middle, width=room * 0.92, color=colour, label=f"layer {i + 1}")
        axes.errorbar(at, middle, yerr=spread, fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    axes.set_xticks(range(len(penalties)), [f"${_maths(p)[1:-1]}$" for p in penalties])
    axes.set_xlabel("penalty $\\epsilon'$")
    axes.set_ylabel("units kept")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.05)
    axes.legend(loc="upper left", ncols=len(widths))
    return _finished(figure, "What each layer keeps", section)


def style(variant: str, i: int) -> tuple[str, str, str]:
    if variant in STYLES:
        return STYLES[variant]
    colour, marker = OTHERS[i % len(OTHERS)]
    return colour, marker, ":" if "permuted" in variant else "-"


def over_updates(runs: Sequence[Run], name: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Updates, and the quartiles over runs of one column of their curves at each."""
    updates = [row["update"] for row in runs[0].curve]
    table = [[row[name] if row[name] is not None else np.nan for row in run.curve] for run in runs]
    found = [quartiles(column) for column in zip(*table)]
    return updates, [q[0] for q in found], [q[1] for q in found], [q[2] for q in found]


def _series(axes: Axes, section: Section, variant: str, name: str, colour: str, marker: str, line: str) -> None:
    settings = section.settings(variant)
    x = np.array([quartiles([getattr(r, name) for r in section.of(variant, s)]) for s in settings])
    y = np.array([quartiles([r.error for r in section.of(variant, s)]) for s in settings])
    y = np.maximum(y, 1e-5)  # no error at all has no place on a logarithmic axis
    axes.errorbar(
        x[:, 1], y[:, 1], xerr=_arms(x), yerr=_arms(y), color=colour, marker=marker, ls=line or "none", ms=5.5,
        lw=1.6, elinewidth=1.1, capsize=2.5, label=LABELS.get(variant, variant.removeprefix("search+")), zorder=3,
    )  # fmt: skip


def _arms(found: np.ndarray) -> np.ndarray:
    arms: np.ndarray = np.maximum(np.stack([found[:, 1] - found[:, 0], found[:, 2] - found[:, 1]]), 0)
    return arms


def _label_penalties(axes: Axes, section: Section) -> None:
    """Each point of the search with its penalty; points on top of each other share a label."""
    groups: list[tuple[float, float, list[str]]] = []
    for penalty in section.settings("search"):
        runs = section.of("search", penalty)
        x, y = median([r.unit_share for r in runs]), median([r.error for r in runs])
        if groups and abs(groups[-1][0] - x) < 0.08:
            groups[-1][2].append(_maths(penalty))
        else:
            groups.append((x, y, [_maths(penalty)]))
    for x, y, names in groups:
        beside = x < 0.15  # there the curve is steep, and would run through a label below
        axes.annotate(
            ", ".join(names), (x, y), xytext=(9, -3) if beside else (0, -15), textcoords="offset points",
            ha="left" if beside else "center", fontsize=8.5, color=STYLES["search"][0],
        )  # fmt: skip


def _errors_on(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] * 0.96)  # room for labels below the lowest point
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    low, high = axes.get_ylim()
    steps = [s * 10.0**k for k in range(-5, 1) for s in (1, 1.2, 1.5, 2, 3, 5, 7)]
    inside = [s for s in steps if low <= s <= high]
    if high / low > 8:
        inside = [s for s in inside if round(s / 10 ** np.floor(np.log10(s)), 3) in (1, 2, 5)]
    axes.set_yticks(inside)
    axes.set_yticks([], minor=True)


def _finished(figure: Figure, title: str, section: Section) -> Figure:
    held = "" if section.evaluated_on == "test set" else f" ({section.evaluated_on})"
    figure.suptitle(f"{title}: {section.dataset}{held}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    trials = max(len(section.of(v, s)) for v in section.variants for s in section.settings(v))
    note = f"median and quartiles of {trials} trials" if trials > 1 else "one trial"
    figure.supxlabel(f"{section.note}; {note}", x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def _shades(count: int) -> list[Any]:
    """From dark to light, even for the colour-blind, and on paper."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, max(count, 1))))


def _maths(penalty: float) -> str:
    text = power(penalty)
    base, _, exponent = text.partition("^")
    return f"${base}^{{{exponent}}}$" if exponent else f"${text}$"


def _percent(value: float, _: object = None) -> str:
    return f"{100 * value:.3g}%"


def _thousands(value: float, _: object = None) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
