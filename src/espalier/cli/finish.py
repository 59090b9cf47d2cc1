"""The last part of a study's command: train what is missing, report what is there, say how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from espalier.study.study import Study
from espalier.train.progress import Progress
from espalier.train.stop import Stop


def finish(
    study: Study[Any], stop: Stop, shown: Progress, out: Path, report: bool, reproduction: Path | None, as_json: bool
) -> None:
    """Exit code 130 where somebody pressed Ctrl-C; a time limit is no error."""
    written, notes = list[Path](), list[str]()
    with stop.on_interrupt():
        complete = study.run(stop, shown)
    if report and any(out.glob("runs/**/*.json")):
        from espalier.paper import write

        written, notes = write(out, reproduction)
        for path in () if as_json else written:
            typer.echo(f"wrote {path}")
    close(stop, shown, out, complete, written, notes, as_json)


def close(
    stop: Stop, shown: Progress, out: Path, complete: bool, written: list[Path], notes: list[str], as_json: bool
) -> None:
    """Say how a study ended, to people and to scripts."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if stop.interrupted:
        typer.echo("espalier: stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130)
    if complete:
        shown.say(f"every run is in {out}")
    if as_json:
        typer.echo(told(out, complete, written, notes))


def told(out: Path, complete: bool, written: list[Path], notes: list[str]) -> str:
    """What became of a study as one JSON object, for scripts."""
    runs = sum(1 for _ in out.glob("runs/*/*/*.json"))
    for path in out.glob("runs/*/*/*.jsonl"):  # a head, then a line for each run
        runs += max(len(path.read_text(encoding="utf-8").splitlines()) - 1, 0)
    story = {"out": str(out), "complete": complete, "runs": runs, "wrote": [str(p) for p in written], "notes": notes}
    return json.dumps(story)
