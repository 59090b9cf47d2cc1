"""`espalier paper connection-selection`: the paper's second study, at its settings or shrunk by flags."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import typer

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
    out: Path = typer.Option(..., help="Folder of the run files; the same command goes on with what is in it."),
    data_dir: Path | None = typer.Option(None, help="Where the data sets are."),
    dataset: str = typer.Option("cifar10", help="A set of images; the paper's is cifar10."),
    methods: str = typer.Option(",".join(METHODS), help="Some of search, random, full."),
    penalties: str = typer.Option(USUAL_PENALTIES, help="For example 2^-4,0,-2^-3."),
    shares: str = typer.Option(USUAL_SHARES, help="Of the weights, of random selections."),
    trials: int = typer.Option(5, help="Runs of each setting; trial k has the seed first-seed + k."),
    first_seed: int = typer.Option(0, help="Seed of the first trial."),
    epochs: int = typer.Option(300, help="Of the search; the others make as many updates of as many images."),
    batch_size: int = typer.Option(32, help="Of the search, under each of two masks; the others read twice as many."),
    layers: int = typer.Option(12, help="Layers of each of the three blocks."),
    growth: int = typer.Option(12, help="Channels that a layer adds."),
    learning_rate: float = typer.Option(0.1, help="Of the weights; a tenth at 1/2 and at 3/4 of the run."),
    samples: int = typer.Option(2, help="Masks compared in one update, at equal images per update."),
    settle: float = typer.Option(0.0, help="The share of the run, at its end, under the structure found."),
    cost: str = typer.Option("weights", help="What the penalty counts: weights (the paper's) or macs."),
    adaptive: bool = typer.Option(False, "--adaptive", help="The step size of theta adapts itself (ASNG)."),
    permuted: bool = typer.Option(False, "--permuted", help="The control: losses shuffled before they are ranked."),
    theta_rate: float | None = typer.Option(None, help="Learning rate of theta; default 1/d."),
    pad: int = typer.Option(4, help="Images are padded by so much, cropped back and mirrored; 0: as they are."),
    held_out: int = typer.Option(0, help="For tuning: so many training images stand in for the test set."),
    points: int = typer.Option(12, help="Measurements over a run."),
    runs_at_once: int = typer.Option(8, help="How many runs are one batch; batches follow one another."),
    step: str = typer.Option("", help="readable, or fast: the same for many runs at once; default: fast on cuda."),
    device: str = typer.Option("", help="cpu or cuda; default: cuda where there is one."),
    precision: str = typer.Option("", help="float32, tf32 or bf16 products; default: tf32 on cuda."),
    compile: bool | None = typer.Option(None, help="Compile the update; default: on cuda."),
    autotune: bool = typer.Option(False, "--autotune", help="Look longer for faster kernels."),
    inductor: str = typer.Option("{}", help="Options of torch's compiler, as JSON."),
    updates_at_once: int = typer.Option(5, help="Updates recorded as one CUDA graph."),
    time_limit: float | None = typer.Option(None, help="Stop cleanly after so many seconds."),
    commit: str = typer.Option("", help="The revision to record, where git cannot tell."),
    keep_state: bool = typer.Option(False, "--keep-state", help="Keep the last checkpoints, and each run's weights."),
    report: bool = typer.Option(True, help="Write tables and figures of what is in the folder."),
    reproduction: Path | None = typer.Option(None, help="A page whose generated part is to be replaced as well."),
    as_json: bool = typer.Option(False, "--json", help="The outcome as one JSON object, the last line of stdout."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
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
