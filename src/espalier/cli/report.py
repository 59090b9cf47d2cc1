"""`espalier report`: tables and figures of a study, made from its run files and nothing else."""

from __future__ import annotations

from pathlib import Path

import typer

from espalier.report import studies


def report(
    folder: Path = typer.Argument(help="The folder of a study, as `espalier paper` wrote it."),
    reproduction: Path | None = typer.Option(None, help="A page whose generated part is to be replaced as well."),
    figures: bool = typer.Option(True, help="Figures beside the tables (needs matplotlib)."),
) -> None:
    """Write the tables, figures and README of a study again.

    Example: espalier report results/unit-selection
    """
    for path in studies.write(folder, reproduction=reproduction, figures=figures):
        typer.echo(f"wrote {path}")
