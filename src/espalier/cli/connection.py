"""`espalier paper connection-selection`: the paper's second study, at its settings or shrunk by flags."""

from __future__ import annotations

import sys

import torch
import typer

from espalier.cli import flags
from espalier.cli.config import configurable
from espalier.cli.finish import finish
from espalier.cli.words import number, options, told, words
from espalier.study.connection_selection import CONNECTION_SELECTION
from espalier.study.connection_spec import METHODS, PENALTIES, SHARES, ConnectionSettings
from espalier.study.study import Study
from espalier.train import progress
from espalier.train.batched import Compute
from espalier.train.stop import Stop

USUAL_PENALTIES = ",".join(f"{p!r}" for p in PENALTIES)
USUAL_SHARES = ",".join(f"{s:g}" for s in SHARES)


@configurable
def connection_selection(
    out: flags.Out,
    data_dir: flags.DataDir = None,
    dataset: str = typer.Option("cifar10", help="A set of images; the paper's is cifar10."),
    methods: str = typer.Option(",".join(METHODS), help="Some of search, random, full."),
    penalties: str = typer.Option(USUAL_PENALTIES, help="For example 2^-4,0,-2^-3."),
    shares: str = typer.Option(USUAL_SHARES, help="Of the weights, of random selections."),
    trials: flags.Trials = 5,
    first_seed: flags.FirstSeed = 0,
    epochs: int = typer.Option(300, help="Of the search; the others make as many updates of as many images."),
    batch_size: flags.BatchSize = 32,
    layers: int = typer.Option(12, help="Layers of each of the three blocks."),
    growth: int = typer.Option(12, help="Channels that a layer adds."),
    learning_rate: flags.LearningRate = 0.1,
    samples: int = typer.Option(2, help="Masks compared in one update, at equal images per update."),
    settle: flags.Settle = 0.0,
    cost: str = typer.Option("weights", help="What the penalty counts: weights (the paper's) or macs."),
    adaptive: flags.Adaptive = False,
    permuted: flags.Permuted = False,
    theta_rate: flags.ThetaRate = None,
    pad: int = typer.Option(4, help="Images are padded by so much, cropped back and mirrored; 0: as they are."),
    held_out: flags.HeldOut = 0,
    points: flags.Points = 12,
    runs_at_once: int = typer.Option(8, help="How many runs are one batch; batches follow one another."),
    step: str = typer.Option("", help="readable, or fast: the same for many runs at once; default: fast on cuda."),
    device: flags.Device = "",
    precision: str = typer.Option("", help="float32, tf32 or bf16 products; default: tf32 on cuda."),
    compile: bool | None = typer.Option(None, help="Compile the update; default: on cuda."),
    autotune: flags.Autotune = False,
    inductor: flags.Inductor = "{}",
    updates_at_once: flags.UpdatesAtOnce = 5,
    time_limit: flags.TimeLimit = None,
    commit: flags.Commit = "",
    keep_state: bool = typer.Option(False, "--keep-state", help="Keep the last checkpoints, and each run's weights."),
    report: flags.Report = True,
    reproduction: flags.Reproduction = None,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Connection selection in a DenseNet: eight penalties, random selections of several sizes, the whole network.

    Example: espalier paper connection-selection --out results/connection-selection --data-dir data --device cuda
    """
    stop = Stop(time_limit)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = ConnectionSettings(
        dataset=dataset,
        methods=words(methods),
        penalties=tuple(number(word) for word in words(penalties)),
        shares=tuple(number(word) for word in words(shares)),
        trials=trials,
        first_seed=first_seed,
        epochs=epochs,
        batch_size=batch_size,
        layers=layers,
        growth=growth,
        learning_rate=learning_rate,
        samples=samples,
        settle=settle,
        cost=cost,
        adaptive=adaptive,
        permuted=permuted,
        theta_rate=theta_rate,
        pad=pad,
        held_out=held_out,
        points=points,
        step=step or ("fast" if place.startswith("cuda") else "readable"),
        precision=precision or ("tf32" if place.startswith("cuda") else "float32"),
    )
    study = Study(
        CONNECTION_SELECTION,
        settings,
        out,
        data_dir=data_dir,
        device=place,
        compute=Compute(
            precision=settings.precision,  # type: ignore[arg-type]
            compile=compile,
            autotune=autotune,
            options=options(inductor),
            updates_at_once=updates_at_once,
        ),
        commit=commit or None,
        command=told(sys.argv[1:]),
        keep_state=keep_state,
        runs_at_once=runs_at_once,
    )
    finish(study, stop, progress.choose(quiet), out, report, reproduction, as_json)
