"""The charts of a study, with matplotlib: size against error, learning curves, theta, what layers keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from espalier.report.drawing import (
    RULES,
    STYLES,
    errors_on,
    finished,
    label_curves,
    label_penalties,
    maths,
    over_updates,
    series,
    shades,
    thousands,
)  # fmt: skip
from espalier.report.runs import Run, Section
from espalier.report.statistics import quartiles


@dataclass(frozen=True)
class Rival:
    """A variant of the search that has a figure of its own. share: what it is compared at; cost: what each counts."""

    variant: str
    figure: str
    title: str
    share: str
    axis: str
    costs: tuple[str, str]


@dataclass(frozen=True)
class Words:
    """What a study calls things. shares: names and titles, the one that is shown alone first. full: the method that
    trains the whole network. gates: in the plural; part: what they are counted by; kept: the shares each part keeps."""

    shares: tuple[tuple[str, str], ...]
    labels: Mapping[str, str]
    full: str
    gates: str
    part: str
    kept: Callable[[Run], list[float]]
    rival: Rival | None = None


UNITS = Words(
    shares=(("unit_share", "Units kept"), ("weight_share", "Weights kept")),
    labels={"search": "unit selection", "fixed": "fixed, uniform layers", "dropout": "dropout, all units"},
    full="fixed",
    gates="units",
    part="layer",
    kept=lambda run: [kept / width for kept, width in zip(run.units, run.widths[1:-1], strict=True)],
)


def figures(section: Section, words: Words = UNITS) -> dict[str, Figure]:
    """Name and figure, those there are runs for. matplotlib's global state is left alone."""
    with matplotlib.rc_context(RULES):
        made = dict[str, Figure]()
        if sum(len(section.settings(variant)) for variant in section.variants) > 1:  # one point is no curve
            made["error"] = trade_off(section, words)
        if section.of("search"):
            made["learning"] = learning(section, words)
            made["theta"] = thetas(section, words)
        if len(section.settings("search")) > 1:
            made[f"{words.part}s"] = kept(section, words)
        if words.rival is not None and section.of("search") and section.of(words.rival.variant):
            made[words.rival.figure] = rivals(section, words, words.rival)
    return made


def trade_off(section: Section, words: Words) -> Figure:
    """Fig. 2: error against shares of the network, medians with quartiles both ways."""
    figure = Figure(figsize=(max(5.2 * len(words.shares), 10.4) - (len(words.shares) > 2), 4.5), layout="constrained")
    grid = figure.subplots(1, len(words.shares), sharey=True)
    left = grid[0]
    for axes, (name, title) in zip(grid, words.shares):
        for i, variant in enumerate(section.variants):
            series(axes, section, variant, name, words.labels.get(variant, variant.removeprefix("search+")), i)
        axes.set_title(title)
        axes.set_xlabel("share of the full network")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlim(left=0)
    left.set_ylabel("test error" if section.evaluated_on == "test set" else "error, held-out images")
    errors_on(left)
    label_penalties(left, section, words.shares[0][0])
    left.legend(loc="upper right")
    return finished(figure, "Size against error", section)


def rivals(section: Section, words: Words, rival: Rival) -> Figure:
    """The search and a variant of it at equal shares, each point with its penalty; the other methods beside them."""
    figure = Figure(figsize=(7.4, 4.8), layout="constrained")
    axes = figure.subplots()
    labels = dict(words.labels) | dict(zip(("search", rival.variant), rival.costs))
    for i, variant in enumerate(section.variants):
        if variant in ("search", rival.variant) or not variant.startswith("search"):
            series(axes, section, variant, rival.share, labels.get(variant, variant), i)
    axes.set_xlabel(rival.axis)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)
    axes.set_ylabel("test error" if section.evaluated_on == "test set" else "error, held-out images")
    errors_on(axes)
    label_curves(axes, section, rival.share, ("search", rival.variant))
    axes.legend(loc="upper right")
    return finished(figure, rival.title, section)


def learning(section: Section, words: Words) -> Figure:
    """A share and the error over the updates, a colour for each penalty; medians and quartiles."""
    figure = Figure(figsize=(10.4, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    penalties = section.settings("search")
    for penalty, colour in zip(penalties, shades(len(penalties))):
        runs = section.of("search", penalty)
        for axes, name in ((left, words.shares[0][0]), (right, "test_error")):
            updates, low, middle, high = over_updates(runs, name)
            axes.plot(updates, middle, color=colour, lw=1.8, label=f"$\\epsilon'$ = {maths(penalty)}")
            axes.fill_between(updates, low, high, color=colour, alpha=0.18, lw=0)
    if full := section.of(words.full, 1.0):
        updates, _, middle, _ = over_updates(full, "test_error")
        right.plot(updates, middle, color=STYLES[words.full][0], ls="--", lw=1.6, label="full network")
    left.set_title(words.shares[0][1])
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0, 1.03)
    right.set_title("Test error")
    errors_on(right)
    for axes in (left, right):
        axes.set_xlabel("updates")
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        axes.set_xlim(left=0)
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finished(figure, "Over the training", section)


def thetas(section: Section, words: Words) -> Figure:
    """Where theta ends, all gates together: how decided the structures are."""
    penalties = section.settings("search")
    figure = Figure(figsize=(10.4, 2.7), layout="constrained")
    grid = figure.subplots(1, len(penalties), sharey=True, squeeze=False)[0]
    for axes, penalty, colour in zip(grid, penalties, shades(len(penalties))):
        runs = section.of("search", penalty)
        counts = np.sum([r.story["result"]["theta_histogram"] for r in runs], axis=(0, 1))
        edges = np.linspace(0, 1, len(counts) + 1)
        axes.bar(edges[:-1], counts / counts.sum(), width=1 / len(counts), align="edge", color=colour, lw=0)
        axes.set_title(f"$\\epsilon'$ = {maths(penalty)}", fontsize=10)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_xlabel("$\\theta$")
        axes.grid(axis="x", visible=False)
    grid[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    grid[0].set_ylabel(f"share of the {words.gates}")
    return finished(figure, "Probabilities at the end", section)


def kept(section: Section, words: Words) -> Figure:
    """What each layer, or block, keeps under each penalty: medians and quartiles."""
    penalties = section.settings("search")
    figure = Figure(figsize=(8.6, 4.0), layout="constrained")
    axes = figure.subplots()
    shares = {p: [words.kept(r) for r in section.of("search", p)] for p in penalties}
    count = len(shares[penalties[0]][0])
    room = 0.8 / count
    for i, colour in zip(range(count), ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7") * 9):
        found = [quartiles([share[i] for share in shares[p]]) for p in penalties]
        at = [k - 0.4 + room * (i + 0.5) for k in range(len(penalties))]
        middle = np.array([q[1] for q in found])
        spread = np.array([[q[1] - q[0] for q in found], [q[2] - q[1] for q in found]])
        axes.bar(at, middle, width=room * 0.92, color=colour, label=f"{words.part} {i + 1}")
        if spread.any():
            axes.errorbar(at, middle, yerr=spread, fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    axes.set_xticks(range(len(penalties)), [f"${maths(p)[1:-1]}$" for p in penalties])
    axes.set_xlabel("penalty $\\epsilon'$")
    axes.set_ylabel(f"{words.gates} kept")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.05)
    axes.legend(loc="upper left", ncols=count)
    return finished(figure, f"What each {words.part} keeps", section)
