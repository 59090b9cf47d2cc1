"""`espalier report`: tables, figures and one page of a study or run, made from its files and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from espalier.cli import flags
from espalier.cli.config import configurable
from espalier.paper import write


@configurable
def report(
    folder: Path = typer.Argument(help="A study, a sweep or a run: the folder that its runs were written to."),
    reproduction: flags.Reproduction = None,
    figures: bool = typer.Option(True, help="Figures as SVG and PNG (needs matplotlib)."),
    as_json: bool = typer.Option(False, "--json", help="What was written, as one JSON object."),
    page: bool = typer.Option(True, help="The page report.html (needs plotly and jinja2)."),
) -> None:
    """Write report.html, a page that needs no network, and tables and figures beside it.

    Example: espalier report results/unit-selection
    """
    written, notes = write(folder, reproduction, figures=figures, page=page)
    for path in () if as_json else written:
        typer.echo(f"wrote {path}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        typer.echo(json.dumps({"wrote": [str(path) for path in written], "notes": notes}))
