"""The report of the connection-selection study: tables, figures and a README in its folder, a section for the docs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.picture import Drawing, of_run
from espalier.picture.labels import power
from espalier.report import documents, paper_values
from espalier.report.connection_claims import verdicts
from espalier.report.connection_tables import MACS, block_medians, compared, tables
from espalier.report.runs import Section
from espalier.report.statistics import median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PENALTIES = (*paper_values.TABLE_2, 0.0, -(2**-3))
FAR = 8  # connections of 91, and 15%
FAR_SHARE = 0.05  # of the weights


def write(
    folder: str | os.PathLike[str], reproduction: str | os.PathLike[str] | None = None, *, figures: bool = True
) -> list[Path]:
    """See :func:`espalier.report.documents.write`."""
    return documents.write(REPORT, folder, reproduction, figures)


def _figures(section: Section) -> dict[str, Figure]:
    from espalier.report import figures  # matplotlib may be absent

    layers = (section.network[1] - 4) // 3
    per_block = (layers + 1) * (layers + 2) // 2
    words = figures.Words(
        shares=(
            ("weight_share", "Weights kept"),
            ("shipped_weight_share", "Weights shipped, without dead parts"),
            ("shipped_mac_share", "MACs shipped"),
        ),
        labels={
            "search": "connection selection",
            "search+cost_macs": "MACs as the cost",
            "random": "random selection",
            "full": "whole network",
        },
        full="full",
        gates="connections",
        part="block",
        kept=lambda run: [kept / per_block for kept in run.connections],
        rival=figures.Rival(
            variant=MACS,
            figure="macs",
            title="Error at equal MACs",
            share="shipped_mac_share",
            axis="MACs shipped, share of the full network",
            costs=("weights as the cost", "MACs as the cost"),
        ),
    )
    return figures.figures(section, words)


def _pictures(section: Section) -> dict[str, Drawing]:
    """Fig. 3: the first trial's network at 2^-4, or at the penalty that ends nearest to the paper's 42%."""
    whole = [run for run in section.of("search") if run.canonical["depth"]]
    if not whole:
        return {}
    share = paper_values.TABLE_2[2**-4].share
    nearest = min(whole, key=lambda run: abs(run.weight_share - share))
    chosen = min((run for run in whole if run.setting == 2**-4), key=lambda run: run.seed, default=nearest)
    return {"network": of_run(chosen.story)}


def _missing(section: Section) -> str:
    lacks = [m for m in ("search", "random", "full") if not section.of(m)]
    if section.of("search"):
        had = set(section.settings("search"))
        absent = [power(p) for p in sorted(PENALTIES, reverse=True) if p not in had]
        if absent:
            lacks.append(f"the penalties {', '.join(absent)}")
    return documents.trials(section, lacks, paper_values.DENSENET_EPOCHS)


def _far(section: Section) -> str:
    """Which cells of Table 2 differ from the paper's by more than a little."""
    if not compared(section):
        return ""
    cells = list[str]()
    for p in section.settings("search"):
        if (printed := paper_values.TABLE_2.get(p)) is None:
            continue
        pairs = enumerate(zip(block_medians(section.of("search", p)), printed.connections, strict=True), 1)
        names = [f"block {i}" for i, (ours, theirs) in pairs if abs(ours - theirs) > max(0.15 * theirs, FAR)]
        share = median([run.weight_share for run in section.of("search", p)])
        names += ["weight share"] if abs(share - printed.share) > FAR_SHARE else []
        cells += [f"{power(p)}: {', '.join(names)}"] if names else []
    if not cells:
        near = f"within 15% or {FAR} connections of the paper's, every weight share within {100 * FAR_SHARE:g} points"
        return f"Every cell of Table 2 is {near}."
    limits = f"15% and {FAR} connections, or than {100 * FAR_SHARE:g} points of the weight share,"
    return f"Cells of Table 2 further than {limits} from the paper's: {'; '.join(cells)}."


REPORT = documents.Report(
    study="connection-selection",
    title="Connection selection",
    titles={
        "error": "Size against error (Fig. 2b)",
        "learning": "Over the training",
        "theta": "Probabilities at the end of the training",
        "blocks": "What each block keeps",
        "macs": "Error at equal MACs: MACs as the cost against weights as the cost",
        "network": "A network found (Fig. 3)",
    },
    tables=tables,
    figures=_figures,
    verdicts=verdicts,
    missing=_missing,
    far=_far,
    pictures=_pictures,
    documented=("trade-off", "macs"),
)
