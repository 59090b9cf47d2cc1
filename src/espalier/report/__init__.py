"""Reports: a folder of runs, read once, and the tables, figures and page made from it and nothing else."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from espalier import files
from espalier.records import REMOVE
from espalier.report import grid_tables, tables
from espalier.report.run_reader import Run, Setting
from espalier.report.study_reader import Point, Section, Series, Study, read
from espalier.space import Corrupt, EspalierError

__all__ = ["Point", "Run", "Section", "Series", "Setting", "Study", "read", "write"]
Own = Callable[[Study, "str | os.PathLike[str] | None", bool], list[Path]]


def write(
    folder: str | os.PathLike[str] | Study,
    reproduction: str | os.PathLike[str] | None = None,
    *,
    figures: bool = True,
    page: bool = True,
    own: Mapping[str, Own] | None = None,
) -> tuple[list[Path], list[str]]:
    """Make everything anew from the runs. Returns the files written, and notes: what is incomplete or missing.

    folder: of the runs, or what :func:`espalier.report.read` made of it.
    reproduction: a page of a study with a part that is made from its runs, which is replaced as well.
    own: for a kind of study what writes its tables and figures, instead of those that any study has; it is given the
    study, ``reproduction`` and ``figures``.
    """
    study = folder if isinstance(folder, Study) else read(folder)
    notes = list(study.notes)
    for name in ("tables", "figures"):
        files.below(study.root, study.root / name)
    make = own[study.kind] if own and study.kind in own else partial(_general, notes=notes)
    with _fitting(study):
        written = make(study, reproduction, figures)
    if page:
        if importlib.util.find_spec("jinja2") is None:
            notes.append("there is no page, for jinja2 is not installed: pip install 'espalier[report]'")
        else:
            from espalier.report import page as pages

            pages.check_place(study.root / pages.NAME)
            beside = [path for path in written if path.is_relative_to(study.root)]
            with _fitting(study):
                text = pages.render(study, beside)
            written.append(files.write(study.root / pages.NAME, text))
    return written, notes


@contextmanager
def _fitting(study: Study) -> Iterator[None]:
    """Each file may be as its format says, and yet they do not make one study: other layers, a part left out."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, EspalierError):
            raise
        what = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise Corrupt(f"the runs in {study.root} do not make a report together ({what}). {REMOVE}") from error


def _general(study: Study, reproduction: str | os.PathLike[str] | None, figures: bool, notes: list[str]) -> list[Path]:
    written = tables.runs(study).write(study.root / "tables" / "runs")
    for section in study.sections:
        if section.measure and section.axes:
            written += tables.trade_off(section).write(study.root / "tables" / f"{section.name}-trade-off")
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if figures and not can_draw:
        notes.append("there are no figures, for matplotlib is not installed: pip install 'espalier[report]'")
    if figures and can_draw:
        from espalier.report import figures as drawing

        for section in study.sections:
            for name, figure in drawing.figures(section).items():
                written += drawing.save(figure, study.root / "figures" / f"{section.name}-{name}")
    if study.kind == "grid":
        written += grid_tables.write(study, reproduction)
        for section in grid_tables.sections_of(study) if figures and can_draw else ():
            if (rivals := drawing.rivals(section)) is not None:
                written += drawing.save(rivals, study.root / "figures" / f"{section.folder}-rivals")
    return written
