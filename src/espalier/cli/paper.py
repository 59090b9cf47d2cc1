"""`espalier paper`: the paper's own studies, at its settings or shrunk by flags."""

from __future__ import annotations

import typer

from espalier.cli import flags
from espalier.cli.config import configurable
from espalier.cli.parsing import device_and_precision, number, settings, whole, words
from espalier.cli.run_study import run_paper_study
from espalier.study.connection_spec import METHODS as CONNECTION_METHODS
from espalier.study.connection_spec import PENALTIES as CONNECTION_PENALTIES
from espalier.study.connection_spec import SHARES, ConnectionSettings
from espalier.study.spec import METHODS, PENALTIES, SIZES, Settings
from espalier.study.study import CONNECTION_SELECTION, UNIT_SELECTION

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
    flags_given = locals()
    place, products = device_and_precision(device, precision)
    plan = settings(
        Settings,
        flags_given,
        methods=words(methods),
        penalties=tuple(number(word) for word in words(penalties)),
        sizes=tuple(number(word) for word in words(sizes)),
        hidden=tuple(whole(word) for word in words(hidden)) or None,
        precision=products,
    )
    run_paper_study(UNIT_SELECTION, plan, place, flags_given)


@paper.command("connection-selection")
@configurable
def connection_selection(
    out: flags.Out,
    data_dir: flags.DataDir = None,
    dataset: str = typer.Option("cifar10", help="A set of images; the paper's is cifar10."),
    methods: str = typer.Option(",".join(CONNECTION_METHODS), help="Some of search, random, full."),
    penalties: str = typer.Option(",".join(f"{p!r}" for p in CONNECTION_PENALTIES), help="For example 2^-4,0,-2^-3."),
    shares: str = typer.Option(",".join(f"{s:g}" for s in SHARES), help="Of the weights, of random selections."),
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
    flags_given = locals()
    place, products = device_and_precision(device, precision)
    plan = settings(
        ConnectionSettings,
        flags_given,
        methods=words(methods),
        penalties=tuple(number(word) for word in words(penalties)),
        shares=tuple(number(word) for word in words(shares)),
        step=step or ("fast" if place.startswith("cuda") else "readable"),
        precision=products,
    )
    run_paper_study(CONNECTION_SELECTION, plan, place, flags_given)
