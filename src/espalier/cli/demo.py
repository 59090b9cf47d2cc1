"""`espalier demo`: networks on handwritten digits, trained and cut to size in one loop, several sizes at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from espalier.cli.config import configurable
from espalier.compact import save
from espalier.data import load
from espalier.train import evaluate, sweep
from espalier.train.batched import Run, SweepResult

WIDTHS = (64, 64, 64, 10)  # pixels, two hidden layers, classes
TARGETS = (0.05, 0.1, 0.25, 0.5)


@configurable
def demo(
    epochs: int = typer.Option(40, min=1, help="Passes over the training data."),
    seeds: int = typer.Option(3, min=1, help="Networks of each size."),
    out: Path = typer.Option(Path("espalier-demo"), help="Where one of the small networks is saved."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
) -> None:
    """See it work: networks on handwritten digits, trained and cut to size in the same loop, on a CPU.

    Example: espalier demo --epochs 20
    """
    console = Console()
    started = time.perf_counter()
    data = load("digits").flatten()
    examples, labels = data.as_floats().test
    test = examples.float(), labels
    chosen = range(seeds)

    console.print(
        f"{len(TARGETS) * seeds} networks {_shape(WIDTHS)} as one batch, each to end at its own share of the weights. "
        "In every update a network is tried under two drawn structures: its weights follow both, and the distribution "
        "of structures follows the better one, along a ramp to the target. Half way the structure settles, and the "
        "weights finish under what ships."
    )
    ours = sweep(_network(WIDTHS), data, targets=TARGETS, seeds=chosen, epochs=epochs, batch_size=32, quiet=quiet)
    console.print("For comparison: uniform networks of the same numbers of weights, trained from scratch, as long.")
    theirs = list[SweepResult]()
    for target in TARGETS:
        runs = [Run(seed, all_open=True) for seed in chosen]
        theirs += sweep(_network(_uniform(target)), data, runs=runs, epochs=epochs, batch_size=32, quiet=quiet)

    table = Table(title=f"Handwritten digits: {len(labels)} test images, medians of {seeds}")
    for column in ("target", "weights kept", "for example", "test error", "uniform", "its test error"):
        table.add_column(column, justify="right")
    for i, target in enumerate(TARGETS):
        rows = slice(i * seeds, (i + 1) * seeds)
        errors = [median(_error(result.model, test) for result in results[rows]) for results in (ours, theirs)]
        kept = median(_weights(_widths(result.model)) / _weights(WIDTHS) for result in ours[rows])
        shapes = _shape(_widths(ours[rows][0].model)), _shape(_uniform(target))
        table.add_row(f"{target:.0%}", f"{kept:.1%}", shapes[0], f"{errors[0]:.1%}", shapes[1], f"{errors[1]:.1%}")
    console.print(table)

    over = sum(_weights(_widths(result.model)) > (result.target or 0) * _weights(WIDTHS) for result in ours)
    small = ours[2 * seeds].model
    save(small, out)
    full, cut = (_milliseconds(model, test[0]) for model in (_network(WIDTHS)(), small))
    console.print(
        f"{over} of {len(ours)} networks exceed their target. One test image is {1 / len(labels):.2%}.\n"
        f"The network of {TARGETS[2]:.0%} is a plain {type(small).__name__} {_shape(_widths(small))}, saved in {out}: "
        f"{cut:.2f} ms for {len(labels)} images, the full one {full:.2f} ms.\n"
        f"{len(ours) + len(theirs)} networks took {time.perf_counter() - started:.0f} s."
    )


def _network(widths: tuple[int, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return build


def _widths(model: nn.Module) -> tuple[int, ...]:
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return (linear[0].in_features, *(layer.out_features for layer in linear))


def _weights(widths: tuple[int, ...]) -> int:
    return sum(a * b for a, b in pairwise(widths))


def _uniform(target: float) -> tuple[int, ...]:
    """The widest network with equal hidden layers that has at most this share of the weights."""
    inputs, *_, classes = WIDTHS
    fitting = [k for k in range(1, WIDTHS[1] + 1) if _weights((inputs, k, k, classes)) <= target * _weights(WIDTHS)]
    return (inputs, fitting[-1], fitting[-1], classes)


def _shape(widths: tuple[int, ...]) -> str:
    return "-".join(str(width) for width in widths)


def _error(model: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    error = evaluate(model, test, loss=cross_entropy).error
    assert error is not None
    return error


@torch.no_grad()
def _milliseconds(model: nn.Module, x: torch.Tensor) -> float:
    """Median time of one forward pass."""
    times = []
    for _ in range(50):
        began = time.perf_counter()
        model(x)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times)
