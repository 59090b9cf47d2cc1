"""What every figure of a study is drawn with: colours, axes, series, and how a figure is signed and saved."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from espalier.picture.labels import power
from espalier.report.runs import Run, Section
from espalier.report.statistics import median, quartiles

# Okabe and Ito's colours, told apart by the colour-blind; every series has its own marker besides.
STYLES = {
    "search": ("#0072B2", "o", "-"),
    "fixed": ("#D55E00", "s", "--"),
    "random": ("#D55E00", "s", "--"),
    "full": ("#000000", "*", ""),
    "dropout": ("#009E73", "D", ""),
}
OTHERS = (("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"), ("#8C6D31", "<"), ("#7F7F7F", ">"))
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


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.svg and stem.png."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    with matplotlib.rc_context(RULES):
        figure.savefig(paths[0], metadata={"Date": None}, bbox_inches="tight")
        figure.savefig(paths[1], dpi=160, metadata={"Software": None}, bbox_inches="tight")
    return paths


def style(variant: str, i: int) -> tuple[str, str, str]:
    if variant in STYLES:
        return STYLES[variant]
    colour, marker = OTHERS[i % len(OTHERS)]
    return colour, marker, ":" if "permuted" in variant else "-"


def over_updates(runs: Sequence[Run], name: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Updates, and the quartiles over runs of one column of their curves at each."""
    rows = [{row["update"]: row[name] if row[name] is not None else np.nan for row in run.curve} for run in runs]
    updates = [update for update in rows[0] if all(update in each for each in rows)]  # runs may be measured at others
    table = [[each[update] for update in updates] for each in rows]
    found = [quartiles(column) for column in zip(*table)]
    return updates, [q[0] for q in found], [q[1] for q in found], [q[2] for q in found]


def series(axes: Axes, section: Section, variant: str, name: str, label: str, i: int) -> None:
    """The errors of one variant against a share of the runs: medians with quartiles both ways."""
    colour, marker, line = style(variant, i)
    settings = section.settings(variant)
    x = np.array([quartiles([getattr(r, name) for r in section.of(variant, s)]) for s in settings])
    y = np.array([quartiles([r.error for r in section.of(variant, s)]) for s in settings])
    y = np.maximum(y, 1e-5)  # no error at all has no place on a logarithmic axis
    axes.errorbar(
        x[:, 1], y[:, 1], xerr=_arms(x), yerr=_arms(y), color=colour, marker=marker, ls=line or "none", ms=5.5,
        lw=1.6, elinewidth=1.1, capsize=2.5, label=label, zorder=3,
    )  # fmt: skip


def _arms(found: np.ndarray) -> np.ndarray | None:
    """None where there is one trial of each: bars of no length would be told in the legend."""
    arms: np.ndarray = np.maximum(np.stack([found[:, 1] - found[:, 0], found[:, 2] - found[:, 1]]), 0)
    return arms if arms.any() else None


def label_penalties(axes: Axes, section: Section, name: str) -> None:
    """Each point of the search with its penalty; points close to each other share a label."""
    groups: list[tuple[list[float], list[float], list[str]]] = []
    for x, y, text in _penalties(section, "search", name):
        if not groups or abs(groups[-1][0][0] - x) >= 0.09 or not 0.88 < y / groups[-1][1][-1] < 1.14:
            groups.append(([], [], []))
        xs, ys, names = groups[-1]
        xs.append(x)
        ys.append(y)
        names.append(text)
    for xs, ys, names in groups:
        # Where the curve is steep it would run through a label below; at the right end other points stand there.
        place, side = (0, -15), "center"
        if xs[0] < 0.15:
            place, side = (9, -3), "left"
        elif max(xs) > 0.85:
            place, side = (-4, -13), "right"
        axes.annotate(
            ", ".join(names), (min(xs), min(ys)), xytext=place, textcoords="offset points", ha=side, fontsize=8.5,
            color=STYLES["search"][0],
        )  # fmt: skip


def label_curves(axes: Axes, section: Section, name: str, variants: tuple[str, str]) -> None:
    """The points of two curves with their penalties: those of the lower curve below, those of the other above."""
    curves = [sorted(_penalties(section, variant, name)) for variant in variants]
    first, second = ([[x, y] for x, y, _ in curve] for curve in curves)
    line = np.array(first)
    gaps = [y - float(np.interp(x, line[:, 0], line[:, 1])) for x, y in second]
    lower = int(median(gaps) < 0)
    for i, (variant, curve) in enumerate(zip(variants, curves)):
        place, side = ((-5, -13), "right") if i == lower else ((5, 6), "left")
        colour = style(variant, section.variants.index(variant))[0]
        joined = list[tuple[float, float, str]]()
        for x, y, text in curve:
            if joined and x - joined[-1][0] < 0.02 and 0.95 < y / joined[-1][1] < 1.05:
                x, y, text = *joined[-1][:2], f"{joined.pop()[2]}, {text}"
            joined.append((x, y, text))
        for x, y, text in joined:
            if i != lower and x > 0.9:  # a label to the right would leave the figure
                side = "right"
            axes.annotate(
                text, (x, y), xytext=place, textcoords="offset points", ha=side, fontsize=8.5, color=colour
            )  # fmt: skip


def _penalties(section: Section, variant: str, name: str) -> list[tuple[float, float, str]]:
    """Share, error and penalty of each point of a search."""
    found = list[tuple[float, float, str]]()
    for penalty in section.settings(variant):
        runs = section.of(variant, penalty)
        share = median([getattr(r, name) for r in runs])
        found.append((share, median([r.error for r in runs]), maths(penalty)))
    return found


def errors_on(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] * 0.96)  # room for labels below the lowest point
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    low, high = axes.get_ylim()
    steps = [s * 10.0**k for k in range(-5, 1) for s in (1, 1.2, 1.5, 2, 3, 5, 7)]
    inside = [s for s in steps if low <= s <= high]
    if high / low > 8:
        inside = [s for s in inside if round(s / 10 ** np.floor(np.log10(s)), 3) in (1, 2, 5)]
    axes.set_yticks(inside)
    axes.set_yticks([], minor=True)


def finished(figure: Figure, title: str, section: Section) -> Figure:
    held = "" if section.evaluated_on == "test set" else f" ({section.evaluated_on})"
    figure.suptitle(f"{title}: {section.dataset}{held}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    counts = [len(section.of(v, s)) for v in section.variants for s in section.settings(v)]
    trials = f"{max(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    note = f"median and quartiles of {trials} trials" if max(counts) > 1 else "one trial"
    text = textwrap.fill(f"{section.note}; {note}", int(14 * figure.get_figwidth()))  # about what fits in its width
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def shades(count: int) -> list[Any]:
    """From dark to light, even for the colour-blind, and on paper."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, max(count, 1))))


def maths(penalty: float) -> str:
    text = power(penalty)
    base, _, exponent = text.partition("^")
    return f"${base}^{{{exponent}}}$" if exponent else f"${text}$"


def percent(value: float, _: object = None) -> str:
    return f"{100 * value:.3g}%"


def thousands(value: float, _: object = None) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
