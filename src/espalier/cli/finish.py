"""The last part of a study's command: train what is missing, report what is there, say how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from espalier.study.study import Study
from espalier.train.progress import Progress
from espalier.train.stop import Stop


def finish(study: Study[Any], stop: Stop, shown: Progress, out: Path, report: bool, reproduction: Path | None) -> None:
    """Exit code 130 where somebody pressed Ctrl-C; a time limit is no error."""
    with stop.on_interrupt():
        complete = study.run(stop, shown)
    if report and any(out.glob("runs/**/*.json")):
        from espalier.report.write import write

        written, notes = write(out, reproduction)
        for path in written:
            typer.echo(f"wrote {path}")
        for note in notes:
            typer.echo(f"note: {note}", err=True)
    if stop.interrupted:
        typer.echo("espalier: stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130)
    if complete:
        shown.say(f"every run is in {out}")
