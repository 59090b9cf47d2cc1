"""The part that the commands of studies share: train what is missing, report what is there, say how it ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from espalier.cli.parsing import command_line, options, settings
from espalier.study.study import Experiment, Study
from espalier.train import progress
from espalier.train.batched import Compute
from espalier.train.progress import Progress
from espalier.train.stop import Stop


def run_paper_study(experiment: Experiment, plan: Any, device: str, flags: Mapping[str, Any]) -> None:
    """plan: the settings of the study; flags: of the command. Exit code 130 where somebody pressed Ctrl-C; a time limit
    is no error."""
    out, as_json, stop = flags["out"], flags["as_json"], Stop(flags["time_limit"])
    compute = settings(Compute, flags, precision=plan.precision, options=options(flags["inductor"]))
    origin: dict[str, Any] = {"commit": flags["commit"] or None, "command": command_line(sys.argv[1:])}
    kept = {name: flags[name] for name in ("data_dir", "keep_state", "runs_at_once") if name in flags}
    study = Study(experiment, plan, out, device=device, compute=compute, **origin, **kept)
    shown = progress.choose(flags["quiet"])
    written, notes = list[Path](), list[str]()
    with stop.on_interrupt():
        complete = study.run(stop, shown)
    if flags["report"] and any(out.glob("runs/**/*.json")):
        from espalier.paper import write

        written, notes = write(out, flags["reproduction"])
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
        typer.echo(outcome(out, complete, written, notes))


def outcome(out: Path, complete: bool, written: list[Path], notes: list[str]) -> str:
    """What became of a study as one JSON object, for scripts."""
    runs = sum(1 for _ in out.glob("runs/*/*/*.json"))
    for path in out.glob("runs/*/*/*.jsonl"):  # a head, then a line for each run
        runs += max(len(path.read_text(encoding="utf-8").splitlines()) - 1, 0)
    words = {"out": str(out), "complete": complete, "runs": runs, "wrote": [str(p) for p in written], "notes": notes}
    return json.dumps(words)
