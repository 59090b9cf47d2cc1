"""`espalier train`: one run, of a network known by name or of the user's own, from flags or a TOML file."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from espalier.cli import flags
from espalier.cli.config import configurable
from espalier.cli.parsing import command_line, number, settings, share
from espalier.cli.training import Training, run
from espalier.train import Result
from espalier.train.metrics import clean


@configurable
def train(
    model: str = typer.Option(..., help="mlp, cnn, densenet; your own: package.module:function or file.py:function."),
    data: str = typer.Option(
        "digits", help="A set by name; a file.npz with x, y (or x_train, y_train, x_test, y_test); module:function."
    ),
    out: Path = typer.Option(..., help="The run directory; the same command goes on with what is in it."),
    target: str = typer.Option("", help="The share of the full cost to end at, such as 0.25 or 25%."),
    penalty: str = typer.Option("", help="Instead of a target: how strongly cost counts, such as 0.1 or 2^-6."),
    cost: str = typer.Option("weights", help="What is counted: weights, macs, units or parameters."),
    epochs: int = typer.Option(20, min=1, help="Passes over the training data."),
    batch_size: int = typer.Option(64, min=1, help="Examples of an update, read under each of its masks."),
    samples: int = typer.Option(2, min=2, help="Masks compared in an update."),
    optimizer: str = typer.Option("", help="Of the weights: sgd (default, Nesterov), adam or adamw."),
    lr: float | None = typer.Option(None, help="Learning rate of the weights; default: the preset's, 0.001 for adam."),
    momentum: float | None = typer.Option(None, help="Of sgd; default: the preset's."),
    weight_decay: float | None = typer.Option(None, help="Default: the preset's, or the optimizer's own."),
    schedule: str = typer.Option("", help="Of that rate: steps (default, the preset's), cosine or constant."),
    settle: float | None = typer.Option(None, help="The share of the run, at its end, under a fixed structure."),
    preset: str = typer.Option("default", help="default, paper, or finetune for a network that is already trained."),
    loss: str = typer.Option(
        "", help="cross-entropy, mse, binary-cross-entropy, module:function; default: by the targets."
    ),
    model_arg: list[str] = typer.Option(
        [], metavar="NAME=VALUE", help="An argument of the network, as hidden=[64,64]; may be repeated."
    ),
    weights: Path | None = typer.Option(None, help="A .safetensors file to start from, with --preset finetune."),
    validation: str = typer.Option(
        "", help="What to judge by: test, none, or a share to hold out, as 0.1; default: test, else 0.1."
    ),
    data_dir: Path | None = typer.Option(None, help="Where the sets known by name are."),
    flatten: bool = typer.Option(False, "--flatten", help="Give the network every input as a vector."),
    scale: float | None = typer.Option(None, help="What inputs of a file are multiplied by; uint8: 1/255 by default."),
    seed: int = typer.Option(0, min=0, help="Of the weights, the masks and the order of the examples."),
    device: str = typer.Option("", help="cpu, cuda, cuda:1, mps; default: cuda where there is one."),
    time_limit: float | None = typer.Option(None, help="Stop cleanly after so many seconds; exit code 0, unfinished."),
    quiet: flags.Quiet = False,
    as_json: bool = typer.Option(False, "--json", help="The result as one JSON object, the last line of stdout."),
) -> None:
    """Train one network and shape it on the way: a run directory, and in it the small network.

    Example: espalier train --model mlp --data digits --target 0.25 --out runs/digits

    Example: espalier train --model net.py:build --model-arg width=64 --data arrays.npz --target 30% --out runs/own
    """
    training = settings(
        Training,
        locals(),
        model_arg=tuple(model_arg),
        weights="" if weights is None else str(weights),
        data_dir="" if data_dir is None else str(data_dir),
        target=share(target, "--target") if target else None,
        penalty=number(penalty) if penalty else None,
    )
    try:
        result, ships = run(training, out, command_line(sys.argv[1:]), time_limit=time_limit, quiet=quiet)
    except KeyboardInterrupt:
        _stopped(out)
        raise typer.Exit(130) from None
    if not as_json:
        typer.echo(_in_words(result, ships, training, out))
    else:
        typer.echo(json.dumps(_in_json(result, ships, out), allow_nan=False))


def _stopped(out: Path) -> None:
    saved = any(out.glob("checkpoint-*.safetensors"))
    how = f"the same command goes on from {out}" if saved else "nothing was trained yet"
    typer.echo(f"espalier: stopped; {how}", err=True)


def _in_words(result: Result, ships: dict[str, Any], training: Training, out: Path) -> str:
    sizes = ships["sizes"]
    kept = ", ".join(f"{name} {small:,} of {full:,}" for name, (small, full) in sizes.items())
    before, after = f"{result.share_before:.2%}", f"{result.share_after:.2%}"
    lines = {
        "target": "none" if result.target is None else f"{result.target:.2%} of the {training.cost}",
        "reached": f"{before} before the selection, {after} after it",
        "kept": kept,
    }
    for name, where in (("validation", ships["judged_on"]), ("test", "the test part, which nothing was chosen by")):
        loss, error = ships[f"{name}_loss"], ships[f"{name}_error"]
        if loss is not None:
            lines[name] = (f"loss {loss:.4f}" if error is None else f"error {error:.2%}") + f" on {where}"
    if not result.finished:
        lines["unfinished"] = "stopped by its time limit; the same command goes on"
    lines["run"] = f"{out}; to ship it: espalier compact {shlex.quote(str(out))} --to DIR --onnx"
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def _in_json(result: Result, ships: dict[str, Any], out: Path) -> dict[str, Any]:
    return {"run": str(out), **clean(result.summary()), **ships}
