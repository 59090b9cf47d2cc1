"""The report of a study by the name its run files give: tables, figures and a README in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from espalier.report import connection_selection, unit_selection
from espalier.report.runs import read

OWN = {"unit-selection": unit_selection.write, "connection-selection": connection_selection.write}


def write(
    folder: str | os.PathLike[str], reproduction: str | os.PathLike[str] | None = None, *, figures: bool = True
) -> list[Path]:
    """See :func:`espalier.report.documents.write`."""
    study = read(folder)[0].runs[0].study
    return OWN.get(study, unit_selection.write)(folder, reproduction, figures=figures)
