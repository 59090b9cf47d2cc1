"""The recipe against its rivals, with matplotlib: how much of a rival's error ours saves, and how surely."""

from __future__ import annotations

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from espalier.picture.labels import raised
from espalier.report.drawing import RULES
from espalier.report.plots import COLOURS
from espalier.report.recipe import RIVALS, Comparison, Section, compare

APART = 0.2  # between rivals of one size, in steps between sizes


def rivals(section: Section) -> Figure | None:
    """Ours minus each rival at each size, as a share of the rival's mean error; None without a rival."""
    present = {rival: cells for rival in RIVALS if (cells := _cells(section, rival))}
    if not present:
        return None
    with matplotlib.rc_context(RULES):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0.0, color="#333333", lw=1.0)
        for i, (rival, mine) in enumerate(present.items()):
            x = [place + APART * (i - (len(present) - 1) / 2) for place, _, _ in mine]
            y = [found.mean / of for _, found, of in mine]
            ends = [(f.mean - f.low, f.high - f.mean, of) for _, f, of in mine]  # of equal pairs below 0 by rounding
            arms = [[max(low, 0.0) / of for low, _, of in ends], [max(high, 0.0) / of for _, high, of in ends]]
            colour, marker = COLOURS[1 + list(RIVALS).index(rival)]
            axes.errorbar(
                x, y, yerr=arms, color=colour, marker=marker, ms=6, ls="", elinewidth=1.6, capsize=3,
                label=RIVALS[rival].replace("control:", "the control,"),
            )  # fmt: skip
            for at, (_, found, _), value in zip(x, mine, y):
                if found.verdict == "level":  # hollow: nothing is sure
                    axes.plot([at], [value], marker=marker, ms=6, ls="", color=colour, mfc="white", zorder=3)
        axes.set_xticks(range(len(section.targets)), [f"{100 * target:g}%" for target in section.targets])
        axes.set_xlabel("of the full cost")
        axes.set_ylabel("ours minus the rival, of its error")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(y=0.12)
        axes.legend(  # above, off the bars
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, fontsize=8.5, handletextpad=0.2, columnspacing=1.2
        )
        figure.suptitle(raised(f"Ours and its rivals: {section.title}"), x=0.01, ha="left", fontsize=11, weight="bold")
        note = "below 0 ours is better; bars: 95% bootstrap over pairs; hollow: level"
        figure.supxlabel(raised(f"{note}\n{section.note}"), x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def _cells(section: Section, rival: str) -> list[tuple[int, Comparison, float]]:
    """The place of each size, the comparison there, and the rival's mean error; without those that have no share."""
    cells = list[tuple[int, Comparison, float]]()
    for place, target in enumerate(section.targets):
        theirs = section.of(rival, target)
        found = compare(section.of("search", target), theirs)
        error = sum(run.error for run in theirs.values()) / max(len(theirs), 1)
        if found is not None and error > 0:
            cells.append((place, found, error))
    return cells
