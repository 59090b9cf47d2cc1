"""`espalier paper`: the paper's own studies, at its settings or shrunk by flags."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import typer

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
    out: Path = typer.Option(..., help="Folder of the run files; the same command goes on with what is in it."),
    data_dir: Path | None = typer.Option(None, help="Where the data sets are."),
    dataset: str = typer.Option("mnist", help="mnist, fashion-mnist or digits."),
    methods: str = typer.Option(",".join(METHODS), help="Some of search, fixed, dropout."),
    penalties: str = typer.Option(",".join(f"{p!r}" for p in PENALTIES), help="For example 2^-6,0,-2^-3."),
    sizes: str = typer.Option(",".join(f"{s:g}" for s in SIZES), help="Shares of the units of fixed networks."),
    trials: int = typer.Option(5, help="Runs of each setting; trial k has the seed first-seed + k."),
    first_seed: int = typer.Option(0, help="Seed of the first trial."),
    epochs: int = typer.Option(500, help="Of the search; the others make as many updates of as many examples."),
    batch_size: int = typer.Option(32, help="Of the search, under each of two masks; the others read twice as many."),
    hidden: str = typer.Option("", help="Units of the hidden layers, as 784,784,784; default: as wide as the input."),
    learning_rate: float = typer.Option(0.01, help="Of the weights; a tenth at 1/2 and at 3/4 of the run."),
    dropout: float = typer.Option(0.5, help="The rate of the dropout runs."),
    samples: int = typer.Option(2, help="Masks compared in one update, at equal examples per update."),
    settle: float = typer.Option(0.0, help="The share of the run, at its end, under the structure found."),
    cost: str = typer.Option("units", help="What the penalty counts: units (the paper's) or weights."),
    adaptive: bool = typer.Option(False, "--adaptive", help="The step size of theta adapts itself (ASNG)."),
    permuted: bool = typer.Option(False, "--permuted", help="The control: losses shuffled before they are ranked."),
    theta_rate: float | None = typer.Option(None, help="Learning rate of theta; default 1/d."),
    held_out: int = typer.Option(0, help="For tuning: so many training images stand in for the test set."),
    points: int = typer.Option(20, help="Measurements over a run."),
    device: str = typer.Option("", help="cpu or cuda; default: cuda where there is one."),
    precision: str = typer.Option("", help="float32, tf32 or bf16 matrix products; default: tf32 on cuda."),
    autotune: bool = typer.Option(False, "--autotune", help="Look longer for faster kernels."),
    inductor: str = typer.Option("{}", help="Options of torch's compiler, as JSON."),
    updates_at_once: int = typer.Option(50, help="Updates recorded as one CUDA graph."),
    time_limit: float | None = typer.Option(None, help="Stop cleanly after so many seconds."),
    commit: str = typer.Option("", help="The revision to record, where git cannot tell."),
    keep_state: bool = typer.Option(False, "--keep-state", help="Keep the last checkpoints of finished batches."),
    report: bool = typer.Option(True, help="Write tables and figures of what is in the folder."),
    reproduction: Path | None = typer.Option(None, help="A page whose generated part is to be replaced as well."),
    as_json: bool = typer.Option(False, "--json", help="The outcome as one JSON object, the last line of stdout."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
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
