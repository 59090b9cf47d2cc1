"""The paper's own: the reports of its two studies, with its tables, its values, its figures and its claims."""

from __future__ import annotations

import os
from pathlib import Path

from espalier import report
from espalier.paper.study_reports import REPORTS

__all__ = ["REPORTS", "write"]


def write(
    folder: str | os.PathLike[str] | report.Study,
    reproduction: str | os.PathLike[str] | None = None,
    *,
    figures: bool = True,
    page: bool = True,
) -> tuple[list[Path], list[str]]:
    """What :func:`espalier.report.write` does, and of the paper's studies their own tables and figures."""
    own = {study: paper.write for study, paper in REPORTS.items()}
    return report.write(folder, reproduction, figures=figures, page=page, own=own)
