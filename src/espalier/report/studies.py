"""The report of a study by the name its run files give: tables, figures and a README in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from espalier.report import unit_selection


def write(
    folder: str | os.PathLike[str], reproduction: str | os.PathLike[str] | None = None, *, figures: bool = True
) -> list[Path]:
    return unit_selection.write(folder, reproduction, figures=figures)
