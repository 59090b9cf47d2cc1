"""The commands: those of one function are here, the others in files of their own."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import typer

from espalier import __version__
from espalier.cli.command import Quiet, TimeLimit, command_line, register
from espalier.cli.demo import demo
from espalier.cli.studies import connection_selection, study, sweep, unit_selection
from espalier.data import available, get, names, verify
from espalier.files import clean
from espalier.paper import write
from espalier.ship import FORMATS, Shipped, ship
from espalier.study.training import Training
from espalier.study.training import run as training_run
from espalier.train import Result, ranks
from espalier.train.setting import usual_device

PLAIN: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "rich_markup_mode": None}
app = typer.Typer(
    name="espalier",
    help="Train a neural network and shape it in the same loop: a plain, smaller network at the size you ask for.",
    pretty_exceptions_enable=False,
    **PLAIN,
)
paper = typer.Typer(help="The paper's studies.", **PLAIN)
data = typer.Typer(help="The data sets known by name: list, get, verify.", **PLAIN)

FOLDER = typer.Option(None, "--data-dir", help="Where to look first; then ESPALIER_DATA and the cache folder.")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"espalier {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


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
                result, ships = training_run(training, out, command_line(), **about)
    except KeyboardInterrupt:
        saved = any(out.glob("checkpoint-*.safetensors"))
        how = f"the same command goes on from {out}" if saved else "nothing was trained yet"
        typer.echo(f"espalier: stopped; {how}", err=True)
        raise typer.Exit(130) from None
    if several is not None and not several.first:
        return
    if not as_json:
        typer.echo(_in_words(result, ships, training, out))
    else:
        typer.echo(json.dumps({"run": str(out), **clean(result.summary()), **ships}, allow_nan=False))
    if result.finished and result.warning:
        typer.echo(f"espalier: warning: {result.warning}", err=True)


def _in_words(result: Result, ships: dict[str, Any], training: Training, out: Path) -> str:
    asked = "none" if result.target is None else f"{result.target:.2%} of the "
    if result.target is not None and isinstance(training.target, str):
        asked = f"{training.target}, {asked}full cost"
    elif result.target is not None:
        asked += "MACs" if training.cost == "macs" else training.cost
    lines = {
        "target": asked,
        "reached": f"{result.share_before:.2%} before the selection, {result.share_after:.2%} after it",
        "kept": ", ".join(f"{name} {small:,} of {full:,}" for name, (small, full) in ships["sizes"].items()),
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


def compact(
    run: Path = typer.Argument(help="The run directory of `espalier train`."),
    to: Path = typer.Option(..., help="The folder to write."),
    onnx: bool = typer.Option(False, "--onnx", help="Write model.onnx too, checked with onnxruntime."),
    formats: str = typer.Option("", help=f"Further formats, by commas: {', '.join(FORMATS)}."),
    model: str = typer.Option("", help="The factory of the uncut network; needed where it is code of your own."),
    trust: bool = typer.Option(False, "--trust", help="Run the code that the run names, although it may have changed."),
    as_json: bool = typer.Option(False, "--json", help="What was written and checked as one JSON object."),
) -> None:
    """Write the small network of a run, ready to ship. A card says what it is and how to load it.

    Example: espalier compact runs/digits --to digits-small --onnx
    """
    wanted = [name.strip() for name in formats.split(",") if name.strip()]
    shipped = ship(run, to, model=model or None, formats=("torch", *(["onnx"] if onnx else []), *wanted), trust=trust)
    for note in shipped.notes:
        typer.echo(f"espalier: {note}", err=True)
    if as_json:
        written = {"to": str(to), "files": shipped.files, "sizes": shipped.sizes, "checks": shipped.checks}
        typer.echo(json.dumps(written | {"milliseconds": shipped.speed}))
    else:
        _say(shipped, to)


def _say(shipped: Shipped, to: Path) -> None:
    checks, speed = shipped.checks, shipped.speed
    typer.echo(f"wrote {', '.join(shipped.files)} to {to}")
    typer.echo(f"checked: saved and loaded, {checks['examples']} real examples give the same outputs bit for bit")
    for name, what in (("onnx", "onnxruntime"), ("pt2", "model.pt2"), ("python", "network.py")):
        if name in checks:
            sizes = ", ".join(map(str, checks[name]["batches"]))
            typer.echo(f"checked: {what} differs by {checks[name]['difference']:.1g} at most, batches of {sizes}")
    for batch, times in speed.items():
        small, full = times["small"], times["full"]
        typer.echo(f"{batch} at once: {small:.3f} ms, uncut {full:.3f} ms: {full / small:.2f} times as fast")


def report(
    folder: Path = typer.Argument(help="A study, a sweep or a run: the folder that its runs were written to."),
    reproduction: Path | None = typer.Option(None, help="A page whose generated part is to be replaced as well."),
    figures: bool = typer.Option(True, help="Figures as SVG and PNG (needs matplotlib)."),
    as_json: bool = typer.Option(False, "--json", help="What was written, as one JSON object."),
    page: bool = typer.Option(True, help="The page report.html (needs jinja2)."),
) -> None:
    """Write a page about runs, report.html. Tables and figures are written beside it.

    Example: espalier report results/unit-selection
    """
    written, notes = write(folder, reproduction, figures=figures, page=page)
    for path in () if as_json else written:
        typer.echo(f"wrote {path}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        typer.echo(json.dumps({"wrote": [str(path) for path in written], "notes": notes}))


@data.command("list")
def list_sets(data_dir: Path | None = FOLDER) -> None:
    """List the sets, and whether they are on this machine.

    Example: espalier data list --data-dir data
    """
    for status in available(data_dir):
        typer.echo(f"{status.name:<14} {status.state:<11} {status.title}\n{'':<26} {status.detail}")


@data.command("get")
def get_set(
    name: str = typer.Argument(help="A set by name: see espalier data list."), data_dir: Path | None = FOLDER
) -> None:
    """Download a set, if it is not here yet, and check it.

    Example: espalier data get mnist --data-dir data
    """
    status = get(name, data_dir)
    typer.echo(f"{status.name}: {status.state}; {status.detail}")


@data.command("verify")
def verify_sets(
    which: list[str] = typer.Argument(None, help="Sets; default: every one that is here."),
    data_dir: Path | None = FOLDER,
) -> None:
    """Check every byte of sets that are here. Exit code 2 if one is corrupt, or was named and is not usable.

    Example: espalier data verify mnist cifar10 --data-dir data
    """
    bad = False
    for name in which or names():
        status = verify(name, data_dir)
        typer.echo(f"{status.name}: {status.state}; {status.detail}")
        bad |= status.state == "corrupt" or (bool(which) and not status.usable)
    if bad:
        raise typer.Exit(2)


for command in (demo, train, sweep, compact, report, study):
    register(app, command)
register(paper, unit_selection, "unit-selection")
register(paper, connection_selection, "connection-selection")
app.add_typer(paper, name="paper")
app.add_typer(data, name="data")
