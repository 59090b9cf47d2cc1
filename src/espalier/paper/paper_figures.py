"""The figures of both studies, with matplotlib: Fig. 2, learning curves, theta, what layers or blocks keep, rivals."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from espalier.paper.paper_tables import MACS, dataset, note, searches, trials
from espalier.picture import power
from espalier.report.charts import Mark, close_together, error_ticks, over_updates
from espalier.report.figures import RULES, arms, band, bars, crosses, shades, share_kept, shares_along_x, titled
from espalier.report.significance import median, quartiles
from espalier.report.study_reader import Section, numbers

# Okabe and Ito's colours, told apart by the colour-blind; every series has its own marker besides.
STYLES = {
    "search": ("#0072B2", "o", "-"),
    "fixed": ("#D55E00", "s", "--"),
    "random": ("#D55E00", "s", "--"),
    "full": ("#000000", "*", "none"),
    "dropout": ("#009E73", "D", "none"),
}
OTHERS = (("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"), ("#8C6D31", "<"), ("#7F7F7F", ">"))
PARTS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7")


LABELS = {
    "fixed": "fixed, uniform layers",
    "dropout": "dropout, all units",
    MACS: "MACs as the cost",
    "random": "random selection",
    "full": "whole network",
}


@dataclass(frozen=True)
class Names:
    """What a study calls things. shares: of the result, with titles, the one that is shown alone first. gates: in the
    plural; part: what they are counted by."""

    shares: tuple[tuple[str, str], ...]
    gates: str
    part: str


NAMES = {
    "unit-selection": Names((("unit_share", "Units kept"), ("weight_share", "Weights kept")), "units", "layer"),
    "connection-selection": Names(
        (
            ("weight_share", "Weights kept"),
            ("canonical.weight_share", "Weights shipped, without dead parts"),
            ("canonical.mac_share", "MACs shipped"),
        ),
        "connections",
        "block",
    ),
}


def figures(section: Section) -> dict[str, Figure]:
    """Name and figure, those there are runs for. matplotlib's global state is left alone."""
    drawn, names = dict[str, Figure](), NAMES[section.members[0].study]
    with matplotlib.rc_context(RULES):
        if len(section.points) > 1:  # one point is no curve
            drawn["error"] = trade_off(section, names)
        if section.of("search"):
            drawn["learning"] = learning(section, names)
            drawn["theta"] = thetas(section, names)
        if len(searches(section)) > 1:
            drawn[f"{names.part}s"] = kept(section, names)
        if section.of("search") and section.of(MACS):
            drawn["macs"] = macs(section)
    return drawn


def trade_off(section: Section, names: Names) -> Figure:
    """Fig. 2: error against shares of the network, medians with quartiles both ways."""
    count = len(names.shares)
    figure = Figure(figsize=(max(5.2 * count, 10.4) - (count > 2), 4.5), layout="constrained")
    grid = figure.subplots(1, count, sharey=True)
    labels = LABELS | {"search": f"{names.gates.removesuffix('s')} selection"}
    for axes, (share, title) in zip(grid, names.shares):
        for variant in section.variants:
            _series(axes, section, variant, share, labels.get(variant, variant.removeprefix("search+")))
        axes.set_title(title)
        shares_along_x(axes, "share of the full network")
    _errors_along_y(grid[0], section)
    _label_penalties(grid[0], section, names.shares[0][0])
    grid[0].legend(loc="upper right")
    return _finished(figure, "Size against error", section)


def macs(section: Section) -> Figure:
    """The search under both costs at equal MACs, each point with its penalty; the other methods beside them."""
    figure = Figure(figsize=(7.4, 4.8), layout="constrained")
    axes = figure.subplots()
    labels, share = LABELS | {"search": "weights as the cost"}, "canonical.mac_share"
    for variant in section.variants:
        if variant in ("search", MACS) or not variant.startswith("search"):
            _series(axes, section, variant, share, labels.get(variant, variant))
    shares_along_x(axes, "MACs shipped, share of the full network")
    _errors_along_y(axes, section)
    _label_curves(axes, section, share, ("search", MACS))
    axes.legend(loc="upper right")
    return _finished(figure, "Error at equal MACs", section)


def learning(section: Section, names: Names) -> Figure:
    """A share and the error over the updates, a colour for each penalty; medians and quartiles."""
    figure = Figure(figsize=(10.4, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (penalty, runs), colour in zip(searches(section).items(), shades(len(searches(section)))):
        for axes, column in ((left, names.shares[0][1].lower()), (right, "error")):
            band(axes, over_updates(runs, column, common=True), colour, f"$\\epsilon'$ = {_formula(penalty)}")
    if full := section.of("fixed", 1.0) or section.of("full", 1.0):
        updates, _, medians, _ = over_updates(full, "error", common=True)
        right.plot(updates, medians, color=STYLES[full[0].method][0], ls="--", lw=1.6, label="full network")
    left.set_title(names.shares[0][1])
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0, 1.03)
    right.set_title("Test error")
    _logarithmic(right)
    for axes in (left, right):
        axes.set_xlabel("updates")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1000:g}k" if n >= 1000 else f"{n:g}"))
        axes.set_xlim(left=0)
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, "Over the training", section)


def thetas(section: Section, names: Names) -> Figure:
    """Where theta ends, all gates together: how decided the structures are."""
    figure = Figure(figsize=(10.4, 2.7), layout="constrained")
    count = len(searches(section))
    grid = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, (penalty, runs), colour in zip(grid, searches(section).items(), shades(count)):
        counts = np.sum([r.result["theta_histogram"] for r in runs], axis=(0, 1))
        edges = np.linspace(0, 1, len(counts) + 1)
        axes.bar(edges[:-1], counts / counts.sum(), width=1 / len(counts), align="edge", color=colour, lw=0)
        axes.set_title(f"$\\epsilon'$ = {_formula(penalty)}", fontsize=10)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_xlabel("$\\theta$")
        axes.grid(axis="x", visible=False)
    grid[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    grid[0].set_ylabel(f"share of the {names.gates}")
    return _finished(figure, "Probabilities at the end", section)


def kept(section: Section, names: Names) -> Figure:
    """What each layer, or block, keeps under each penalty: medians and quartiles."""
    figure = Figure(figsize=(8.6, 4.0), layout="constrained")
    axes = figure.subplots()
    points = section.of_each(["search"])
    groups = list(points[0].runs[0].kept)
    for i, (group, colour) in enumerate(zip(groups, PARTS * 9)):
        quarters = np.array([share_kept(point, group) for point in points])
        bars(axes, i, len(groups), quarters, colour, f"{names.part} {i + 1}", spread=bool(arms(quarters).any()))
    axes.set_xticks(range(len(points)), [_formula(point.value) for point in points])
    axes.set_xlabel("penalty $\\epsilon'$")
    axes.set_ylabel(f"{names.gates} kept")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.05)
    axes.legend(loc="upper left", ncols=len(groups))
    return _finished(figure, f"What each {names.part} keeps", section)


def _style(section: Section, variant: str) -> tuple[str, str, str]:
    if variant in STYLES:
        return STYLES[variant]
    colour, marker = OTHERS[section.variants.index(variant) % len(OTHERS)]
    return colour, marker, ":" if "permuted" in variant else "-"


def _series(axes: Axes, section: Section, variant: str, share: str, label: str) -> None:
    """The errors of one variant against a share of the runs: medians with quartiles both ways."""
    points = section.of_each([variant])
    x, y = (np.array([quartiles(numbers(p.runs, name)) for p in points]) for name in (share, "error"))
    y = np.maximum(y, 1e-5)  # no error at all has no place on a logarithmic axis
    xerr, yerr = (ends if ends.any() else None for ends in (arms(x), arms(y)))  # the legend would show empty ones
    crosses(axes, x, y, _style(section, variant), label=label, zorder=3, xerr=xerr, yerr=yerr)


def _penalties(section: Section, variant: str, share: str) -> list[Mark]:
    """Share, error and penalty of each point of a search."""
    return [(p.median(share), p.median("error"), _formula(p.value)) for p in section.of_each([variant])]


def _label_penalties(axes: Axes, section: Section, share: str) -> None:
    """Each point of the search with its penalty; points close to each other share a label."""
    for group in close_together(_penalties(section, "search", share), 0.09, 0.88, 1.14):
        xs, ys, names = zip(*group)
        # Where the curve is steep it would run through a label below; at the right end other points stand there.
        place, side = (0, -15), "center"
        if xs[0] < 0.15:
            place, side = (9, -3), "left"
        elif max(xs) > 0.85:
            place, side = (-4, -13), "right"
        _label(axes, ", ".join(names), (min(xs), min(ys)), place, side, STYLES["search"][0])


def _label_curves(axes: Axes, section: Section, share: str, variants: tuple[str, str]) -> None:
    """The points of two curves with their penalties: those of the lower curve below, those of the other above."""
    curves = [sorted(_penalties(section, variant, share)) for variant in variants]
    line = np.array([[x, y] for x, y, _ in curves[0]])
    gaps = [y - float(np.interp(x, line[:, 0], line[:, 1])) for x, y, _ in curves[1]]
    lower = int(median(gaps) < 0)
    for i, (variant, curve) in enumerate(zip(variants, curves)):
        place, side = ((-5, -13), "right") if i == lower else ((5, 6), "left")
        for group in close_together(curve, 0.02, 0.95, 1.05):
            x, y, _ = group[0]
            if i != lower and x > 0.9:  # a label to the right would leave the figure
                side = "right"
            names = ", ".join(text for _, _, text in group)
            _label(axes, names, (x, y), place, side, _style(section, variant)[0])


def _label(axes: Axes, text: str, point: tuple[float, float], place: tuple[int, int], side: str, colour: str) -> None:
    axes.annotate(text, point, xytext=place, textcoords="offset points", ha=side, fontsize=8.5, color=colour)


def _errors_along_y(axes: Axes, section: Section) -> None:
    axes.set_ylabel("test error" if section.error_of == "test set" else "error, held-out images")
    _logarithmic(axes)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] * 0.96)  # room for labels below the lowest point
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.set_yticks(error_ticks(*axes.get_ylim()))
    axes.set_yticks([], minor=True)


def _finished(figure: Figure, title: str, section: Section) -> Figure:
    held = "" if section.error_of == "test set" else f" ({section.error_of})"
    words = f"median and quartiles of {trials(section)} trials" if section.middle else "one trial"
    wrapped = textwrap.fill(f"{note(section)}; {words}", int(14 * figure.get_figwidth()))  # what fits
    return titled(figure, f"{title}: {dataset(section)}{held}", wrapped)


def _formula(penalty: float) -> str:
    base, _, exponent = power(penalty).partition("^")
    return f"${base}^{{{exponent}}}$" if exponent else f"${base}$"
