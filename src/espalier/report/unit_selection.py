"""The report of the unit-selection study: tables, figures and a README in its folder, and a section for the docs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.picture.labels import power
from espalier.report import documents, paper_values
from espalier.report.claims import verdicts
from espalier.report.runs import Section
from espalier.report.unit_tables import compared, far_cells, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(
    folder: str | os.PathLike[str], reproduction: str | os.PathLike[str] | None = None, *, figures: bool = True
) -> list[Path]:
    """See :func:`espalier.report.documents.write`."""
    return documents.write(REPORT, folder, reproduction, figures)


def _figures(section: Section) -> dict[str, Figure]:
    from espalier.report import figures  # matplotlib may be absent

    return figures.figures(section)


def _missing(section: Section) -> str:
    """What a whole study of this form would have and this one does not."""
    lacks = [m for m in ("search", "fixed", "dropout") if not section.of(m)]
    if section.of("search"):
        had = set(section.settings("search"))
        absent = [power(p) for p in paper_values.TABLE_1 if p not in had]
        if absent:
            lacks.append(f"the penalties {', '.join(absent)}")
    return documents.trials(section, lacks, paper_values.EPOCHS)


def _far(section: Section) -> str:
    if not compared(section):
        return ""
    cells = [
        f"{power(p)}: {', '.join(found)}"
        for p in section.settings("search")
        if (found := far_cells(section.of("search", p), p))
    ]
    if not cells:
        return "Every cell of Table 1 is within 15% or 12 units of the paper's."
    return f"Cells of Table 1 further than 15% and 12 units from the paper's: {'; '.join(cells)}."


REPORT = documents.Report(
    study="unit-selection",
    title="Unit selection",
    titles={
        "error": "Size against error (Fig. 2a)",
        "learning": "Over the training",
        "theta": "Probabilities at the end of the training",
        "layers": "What each layer keeps",
    },
    tables=tables,
    figures=_figures,
    verdicts=verdicts,
    missing=_missing,
    far=_far,
)
BEGIN, END = REPORT.marks
