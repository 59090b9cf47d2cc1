"""`espalier train`: one run, of a network known by name or of the user's own, from flags or a TOML file."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import typer

from espalier.cli.command import Quiet, TimeLimit, command_line
from espalier.study.training import Training, run
from espalier.train import Result, ranks
from espalier.train.metrics import clean
from espalier.train.setting import usual_device


def train(
    *,
    out: Path = typer.Option(..., help="The run directory; the same command goes on with what is in it."),
    training: Training,
    time_limit: TimeLimit = None,
    force: bool = typer.Option(
        False, "--force", help="Go on although data, code or settings have changed, or another host left its lock."
    ),
    parallel: str = typer.Option(
        "", metavar="data|structure", help="Under torchrun: each rank its share of the mini-batch, or its own masks."
    ),
    rank_timeout: float = typer.Option(
        300.0, min=1.0, help="Under torchrun: seconds after which a rank that does not answer counts as lost."
    ),
    quiet: Quiet = False,
    as_json: bool = typer.Option(False, "--json", help="The result as one JSON object, the last line of stdout."),
) -> None:
    """Train one network and shape it on the way. The run directory holds the small network.

    Example: espalier train --model mlp --data digits --target 0.25 --out runs/digits

    Example: espalier train --model net.py:build --model-arg width=64 --data arrays.npz --target 30% --out runs/own

    Example: torchrun --nproc-per-node=2 -m espalier train --parallel data --model cnn --target 0.3 --out runs/two
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the network has not learned")  # said below, in one line
            with ranks.started(parallel, usual_device(training.device), rank_timeout) as several:
                about: dict[str, Any] = {"time_limit": time_limit, "quiet": quiet, "force": force, "ranks": several}
                result, ships = run(training, out, command_line(), **about)
    except KeyboardInterrupt:
        _stopped(out)
        raise typer.Exit(130) from None
    if several is not None and not several.first:
        return
    if not as_json:
        typer.echo(_in_words(result, ships, training, out))
    else:
        typer.echo(json.dumps({"run": str(out), **clean(result.summary()), **ships}, allow_nan=False))
    if result.finished and result.warning:
        typer.echo(f"espalier: warning: {result.warning}", err=True)


def _stopped(out: Path) -> None:
    saved = any(out.glob("checkpoint-*.safetensors"))
    how = f"the same command goes on from {out}" if saved else "nothing was trained yet"
    typer.echo(f"espalier: stopped; {how}", err=True)


def _in_words(result: Result, ships: dict[str, Any], training: Training, out: Path) -> str:
    sizes = ships["sizes"]
    kept = ", ".join(f"{name} {small:,} of {full:,}" for name, (small, full) in sizes.items())
    before, after = f"{result.share_before:.2%}", f"{result.share_after:.2%}"
    lines = {
        "target": "none" if result.target is None else _asked(result.target, training),
        "reached": f"{before} before the selection, {after} after it",
        "kept": kept,
    }
    for name, where in (("validation", ships["judged_on"]), ("test", "the test part, which nothing was chosen by")):
        loss, error = ships[f"{name}_loss"], ships[f"{name}_error"]
        if loss is not None:
            lines[name] = (f"loss {loss:.4f}" if error is None else f"error {error:.2%}") + f" on {where}"
    if not result.finished:
        lines["unfinished"] = "stopped by its time limit; the same command goes on"
    again = f" --model {shlex.quote(training.model)}" if ":" in training.model else ""  # code is named again
    lines["run"] = f"{out}; to ship it: espalier compact {shlex.quote(str(out))}{again} --to DIR --onnx"
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def _asked(share: float, training: Training) -> str:
    if isinstance(training.target, str):
        return f"{training.target}, {share:.2%} of the full cost"
    return f"{share:.2%} of the {'MACs' if training.cost == 'macs' else training.cost}"
