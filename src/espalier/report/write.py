"""The report of any study, a folder of runs: its tables, its figures, and one page."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from espalier.report import connection_selection, recipe, run_tables, unit_selection
from espalier.report.files import put, told
from espalier.report.sections import Study, read

# Studies that have tables and figures of their own; every other one gets those of plots.py and run_tables.py.
OWN: dict[str, Callable[..., list[Path]]] = {
    "unit-selection": unit_selection.write,
    "connection-selection": connection_selection.write,
}


def write(
    folder: str | os.PathLike[str],
    reproduction: str | os.PathLike[str] | None = None,
    *,
    figures: bool = True,
    page: bool = True,
) -> tuple[list[Path], list[str]]:
    """Make everything anew from the runs. Returns the files written, and notes: what is not whole, what is missing.

    reproduction: a page of a study with a part that is made from its runs, which is replaced as well.
    """
    study = read(folder)
    notes = list(study.notes)
    if study.kind in OWN:
        with told():
            written = OWN[study.kind](folder, reproduction, figures=figures)
    else:
        written = _general(study, figures, notes)
        if study.kind == "grid":
            with told():
                written += recipe.write(folder, reproduction)
            if figures and importlib.util.find_spec("matplotlib") is not None:
                from espalier.report import plots, recipe_plot

                for one in recipe.read(folder):
                    if (drawn := recipe_plot.rivals(one)) is not None:
                        written += plots.save(drawn, study.root / "figures" / f"{one.name}-rivals")
    if page:
        lacking = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
        if lacking:
            notes.append(
                f"there is no page, for {' and '.join(lacking)} is not installed: pip install 'espalier[report]'"
            )
        else:
            from espalier.report import page as pages

            pages.check_place(study.root / pages.NAME)
            beside = [path for path in written if path.is_relative_to(study.root)]
            written.append(put(study.root / pages.NAME, pages.render(study, beside)))
    return written, notes


def _general(study: Study, figures: bool, notes: list[str]) -> list[Path]:
    written = run_tables.runs(study).write(study.root / "tables" / "runs")
    for section in study.sections:
        if section.measure and section.axes:
            written += run_tables.trade_off(section).write(study.root / "tables" / f"{section.name}-trade-off")
    if figures and importlib.util.find_spec("matplotlib") is None:
        notes.append("there are no figures, for matplotlib is not installed: pip install 'espalier[report]'")
    elif figures:
        from espalier.report import plots

        for section in study.sections:
            for name, figure in plots.figures(section).items():
                written += plots.save(figure, study.root / "figures" / f"{section.name}-{name}")
    return written
