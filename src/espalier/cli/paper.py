"""`espalier paper`: the paper's own studies, at its settings or shrunk by flags."""

from __future__ import annotations

import sys

import torch
import typer

from espalier.cli import flags
from espalier.cli.config import configurable
from espalier.cli.connection import connection_selection
from espalier.cli.finish import finish
from espalier.cli.words import number, options, told, whole, words
from espalier.study.spec import METHODS, PENALTIES, SIZES, Settings
from espalier.study.study import Study
from espalier.study.unit_selection import UNIT_SELECTION
from espalier.train import progress
from espalier.train.batched import Compute
from espalier.train.stop import Stop

paper = typer.Typer(help="The paper's studies.", no_args_is_help=True, rich_markup_mode=None)


@paper.callback()
def _studies() -> None:
    """The paper's studies."""


@paper.command("unit-selection")
@configurable
def unit_selection(
    out: flags.Out,
    data_dir: flags.DataDir = None,
    dataset: str = typer.Option("mnist", help="mnist, fashion-mnist or digits."),
    methods: str = typer.Option(",".join(METHODS), help="Some of search, fixed, dropout."),
    penalties: str = typer.Option(",".join(f"{p!r}" for p in PENALTIES), help="For example 2^-6,0,-2^-3."),
    sizes: str = typer.Option(",".join(f"{s:g}" for s in SIZES), help="Shares of the units of fixed networks."),
    trials: flags.Trials = 5,
    first_seed: flags.FirstSeed = 0,
    epochs: int = typer.Option(500, help="Of the search; the others make as many updates of as many examples."),
    batch_size: flags.BatchSize = 32,
    hidden: str = typer.Option("", help="Units of the hidden layers, as 784,784,784; default: as wide as the input."),
    learning_rate: flags.LearningRate = 0.01,
    dropout: float = typer.Option(0.5, help="The rate of the dropout runs."),
    samples: flags.Samples = 2,
    settle: flags.Settle = 0.0,
    cost: str = typer.Option("units", help="What the penalty counts: units (the paper's) or weights."),
    adaptive: flags.Adaptive = False,
    permuted: flags.Permuted = False,
    theta_rate: flags.ThetaRate = None,
    held_out: flags.HeldOut = 0,
    points: flags.Points = 20,
    device: flags.Device = "",
    precision: flags.Precision = "",
    autotune: flags.Autotune = False,
    inductor: flags.Inductor = "{}",
    updates_at_once: flags.UpdatesAtOnce = 50,
    time_limit: flags.TimeLimit = None,
    commit: flags.Commit = "",
    keep_state: bool = typer.Option(False, "--keep-state", help="Keep the last checkpoints of finished batches."),
    report: flags.Report = True,
    reproduction: flags.Reproduction = None,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Unit selection: seven penalties, fixed networks of several sizes, and dropout, as two batches of runs.

    Example: espalier paper unit-selection --out results/unit-selection --data-dir data --device cuda
    """
    stop = Stop(time_limit)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(
        dataset=dataset,
        methods=words(methods),
        penalties=tuple(number(word) for word in words(penalties)),
        sizes=tuple(number(word) for word in words(sizes)),
        dropout=dropout,
        trials=trials,
        first_seed=first_seed,
        epochs=epochs,
        batch_size=batch_size,
        samples=samples,
        hidden=tuple(whole(word) for word in words(hidden)) or None,
        learning_rate=learning_rate,
        theta_rate=theta_rate,
        settle=settle,
        cost=cost,
        adaptive=adaptive,
        permuted=permuted,
        held_out=held_out,
        points=points,
        precision=precision or ("tf32" if place.startswith("cuda") else "float32"),
    )
    shown = progress.choose(quiet)
    study = Study(
        UNIT_SELECTION,
        settings,
        out,
        data_dir=data_dir,
        device=place,
        compute=Compute(
            precision=settings.precision,  # type: ignore[arg-type]
            autotune=autotune,
            options=options(inductor),
            updates_at_once=updates_at_once,
        ),
        commit=commit or None,
        command=told(sys.argv[1:]),
        keep_state=keep_state,
    )
    finish(study, stop, shown, out, report, reproduction, as_json)


paper.command("connection-selection")(connection_selection)
