"""`espalier study`: a grid of runs: the search at every target, its rivals and its control, on every seed and fold."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from espalier.cli import flags
from espalier.cli.config import configurable
from espalier.cli.parsing import command_line, device_and_precision, number, settings, share, words
from espalier.cli.run_study import close
from espalier.space import BadInput
from espalier.study.grid import Grid
from espalier.study.grid_spec import BATCH_SIZE, METHODS, TARGETS, GridSettings
from espalier.train import presets, progress
from espalier.train.batched import Compute
from espalier.train.presets import Recipe
from espalier.train.stop import Stop


@configurable
def study(
    out: Path = typer.Option(..., help="Folder of the runs; the same command goes on with what is in it."),
    dataset: str = typer.Option("digits", help="digits, mnist or fashion-mnist."),
    data_dir: flags.DataDir = None,
    methods: str = typer.Option(",".join(METHODS[:4]), help=f"Some of {', '.join(METHODS)}."),
    targets: str = typer.Option(
        ",".join(f"{t:g}" for t in TARGETS), help="Shares of the full cost to end at, as 0.1,0.3 or 10%,30%."
    ),
    penalties: str = typer.Option("2^-4,2^-6,2^-8", help="Of the method 'penalty', for example 2^-6,0."),
    seeds: int = typer.Option(5, help="Runs of each setting, on each fold."),
    first_seed: int = typer.Option(0, help="The first seed."),
    folds: int = typer.Option(0, help="Cross-validation over all examples; 0: the set's own test part."),
    held_out: int = typer.Option(
        0, help="For tuning: so many training examples stand in for the test part (with --folds: each fold of them)."
    ),
    epochs: str = typer.Option(
        "20", help="Of a search with two masks, one number or several; every method takes as many example-gradients."
    ),
    batch_size: int = typer.Option(
        BATCH_SIZE, help="Examples under each of two masks; twice as many where there is one."
    ),
    widths: str = typer.Option("", help="Units of the hidden layers, as 64,64,64; default: as wide as the input."),
    cost: str = typer.Option("weights", help="What a target counts: weights, macs, units or parameters."),
    samples: flags.Samples = 2,
    preset: str = typer.Option("ranked", help="The recipe that the flags below change."),
    theta_rate: float | None = typer.Option(None, help="Theta's learning rate times the degrees of freedom."),
    theta_way: float | None = typer.Option(None, help="Theta's learning rate times the updates of the search."),
    initial: float | None = typer.Option(None, help="Theta at the start."),
    begin: float | None = typer.Option(None, help="The share of the run, at its start, under the whole network."),
    ramp: float | None = typer.Option(None, help="The share of the run over which the cost is led to the target."),
    ramp_updates: int | None = typer.Option(
        None, help="The fewest updates of that, where the search can begin earlier."
    ),
    even: float | None = typer.Option(None, help="0: the ramp takes from gates by their cost; 1: from all alike."),
    settle: float | None = typer.Option(None, help="The share of the run, at its end, under the structure found."),
    adaptive: flags.Adaptive = False,
    learning_rate: float | None = typer.Option(None, help="Of the weights, of all methods."),
    drops: str = typer.Option("", help="After which shares of the run that rate is divided by ten, as 0.75,0.9."),
    points: flags.Points = 8,
    device: flags.Device = "",
    precision: flags.Precision = "",
    at_once: int | None = typer.Option(None, help="The most runs in one batch."),
    updates_at_once: flags.UpdatesAtOnce = 50,
    time_limit: flags.TimeLimit = None,
    commit: flags.Commit = "",
    report: bool = typer.Option(True, help="Write the tables of what is in the folder."),
    page: Path | None = typer.Option(None, help="A page whose generated parts are to be replaced as well."),
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """A grid of runs at equal budget: the search, networks of equal and of the found widths from scratch, the control.

    Example: espalier study --dataset digits --targets 0.1,0.3 --seeds 3 --epochs 20 --out runs/digits
    """
    flags_given, stop = locals(), Stop(time_limit)
    place, products = device_and_precision(device, precision)
    names = ("theta_rate", "theta_way", "initial", "begin", "ramp", "ramp_updates", "even", "learning_rate")
    given = {name: flags_given[name] for name in names} | {"adaptive": adaptive or None}
    given["drops"] = tuple(number(word) for word in words(drops)) or None
    parsed: dict[str, Any] = {
        "methods": words(methods),
        "targets": tuple(share(word, "a target") for word in words(targets)),
        "penalties": tuple(number(word) for word in words(penalties)),
        "hidden": tuple(_whole(word, "of units") for word in words(widths)) or None,
        "trials": seeds,
        "recipe": recipe(preset, given, settle),
        "precision": products,
    }
    each = [
        settings(GridSettings, flags_given, **parsed, epochs=_whole(length, "of epochs")) for length in words(epochs)
    ]
    if not each:
        raise BadInput("epochs is empty, so there is nothing to run")
    shown = progress.choose(quiet)
    compute = Compute(precision=each[0].precision, updates_at_once=updates_at_once)  # type: ignore[arg-type]
    whole: dict[str, Any] = {"data_dir": data_dir, "device": place, "compute": compute, "at_once": at_once}
    grids = [Grid(one, out, **whole, commit=commit or None, command=command_line(sys.argv[1:])) for one in each]
    with stop.on_interrupt():
        complete = all(grid.run(stop, shown) for grid in grids)
    written, notes = list[Path](), list[str]()
    if report and any(out.glob("runs/*/*/*.jsonl")):
        from espalier.report import grid_tables, read, write
        from espalier.report.tables import PAGES

        runs = read(out)
        written, notes = write(runs, page)
        if not as_json:
            for section in grid_tables.sections_of(runs):
                for line in grid_tables.lines(section):
                    typer.echo(line)
            readme = next(p for p in written if p.name in PAGES)
            typer.echo(f"wrote {len(written)} files: tables and figures, see {readme}")
    close(stop, shown, out, complete, written, notes, as_json)


def recipe(preset: str, given: dict[str, Any], settle: float | None) -> Recipe:
    """The recipe of that name with what is given (not None) in place of its own.

    Settling alone shortens what is the recipe's own before it, and a ramp alone lets the search begin earlier; what is
    given is taken at its word.
    """
    said = {name: value for name, value in given.items() if value is not None}
    own, ramp = presets.read(preset), said.pop("ramp", None)
    if "begin" not in said and ramp is None:
        return presets.settled(replace(own, **said), settle)
    changed = replace(own, **said | ({} if settle is None else {"settle": settle}))
    if ramp is None:
        return changed
    return replace(changed, ramp=ramp) if "begin" in said else presets.ramped(changed, ramp)


def _whole(word: str, what: str) -> int:
    if not word.isdigit():
        raise BadInput(f"{word!r} is not a number {what}")
    return int(word)
