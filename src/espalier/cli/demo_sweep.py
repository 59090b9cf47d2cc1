"""Many sizes at once: searches towards several targets as one batch, and uniform networks of the same sizes beside it.

Each network becomes a run file as studies write them, so that `espalier report` draws both as curves of one chart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from espalier.data import Dataset
from espalier.study import run_files
from espalier.study.settings import size as weights
from espalier.train import Result, sweep
from espalier.train.batched import Run
from espalier.train.run_directory import hardware, versions

Widths = tuple[int, ...]
CURVE = {"loss": "train_loss", "error": "train_error", "validation_loss": "test_loss", "validation_error": "test_error"}


@dataclass(frozen=True)
class Size:
    """One target: networks that were led to it, and uniform ones of as many weights, a run for each seed."""

    target: float
    found: list[Result]
    uniform: Widths
    scratch: list[Result]

    @property
    def example(self) -> Widths:
        """Of the run of the middle error: the one that the report shows."""
        ordered = sorted(self.found, key=_error)
        return widths_of(ordered[(len(ordered) - 1) // 2].model)

    @property
    def share(self) -> float:
        return median(result.shares["weight_share"] or 0.0 for result in self.found)

    @property
    def error(self) -> float:
        """The median test error of the networks that were led here."""
        return _median(self.found)

    @property
    def scratch_error(self) -> float:
        return _median(self.scratch)


def _seed(result: Result) -> int:
    assert result.run is not None
    return result.run.seed


def _error(result: Result) -> float:
    return 1.0 if result.validation_error is None else result.validation_error


def _median(results: Sequence[Result]) -> float:
    return median(map(_error, results))


def train(
    data: Dataset, widths: Widths, targets: Sequence[float], seeds: Sequence[int], epochs: int, state: Path, quiet: bool
) -> list[Size]:
    """All targets with all seeds as one batch; then uniform networks, a batch for each size. For a target of 1, which
    comes last, there is nothing to search for: the uncut network alone is trained, as the uniform ones are.

    state: the folder of the checkpoints; the same call goes on from there.
    """
    settings: dict[str, Any] = {"epochs": epochs, "batch_size": 32, "device": "cpu", "quiet": quiet}
    led = [target for target in targets if target < 1]
    found = sweep(network(widths), data, targets=led, seeds=seeds, checkpoint=state / "search", **settings)
    sizes = []
    for i, target in enumerate(targets):
        same = uniform(widths, target)
        runs = [Run(seed, all_open=True) for seed in seeds]
        scratch = sweep(network(same), data, runs=runs, checkpoint=state / f"scratch-{target:g}", **settings)
        ours = found[i * len(seeds) : (i + 1) * len(seeds)]
        sizes.append(Size(target, ours, same, scratch))
    return sizes


def write(sizes: Sequence[Size], folder: Path, widths: Widths, dataset: str, epochs: int, command: str) -> None:
    """A run file for each network: ``folder/runs/DATASET/search`` and ``scratch``."""
    shared = {"dataset": dataset, "widths": list(widths), "epochs": epochs, "batch_size": 32, "cost": "weights"}
    full = weights(widths)
    place = folder / "runs" / dataset
    searches = sum(len(size.found) for size in sizes)  # one batch, all of them
    for size in sizes:
        for result in size.found:
            run = {"method": "search", "variant": "search", "target": size.target, "seed": _seed(result)}
            path = place / "search" / f"target_{size.target:g}-seed_{_seed(result)}.json"
            run_files.save(path, _story(run, shared, result, widths, searches, command))
        for result in size.scratch:
            share = weights(size.uniform) / full
            run = {"method": "scratch", "variant": "scratch", "size": round(share, 6), "seed": _seed(result)}
            path = place / "scratch" / f"size_{size.target:g}-seed_{_seed(result)}.json"
            run_files.save(path, _story(run, shared, result, widths, len(size.scratch), command))


def _story(
    run: dict[str, Any],
    settings: dict[str, Any],
    result: Result,
    widths: Widths,
    together: int,
    command: str,
) -> dict[str, Any]:
    kept, full = widths_of(result.model), weights(widths)
    hidden = {f"layer {i}": [have, all_of] for i, (have, all_of) in enumerate(zip(kept[1:-1], widths[1:-1]), 1)}
    return {
        "command": command,
        "evaluated_on": "test set",
        "run": run,
        "settings": settings,
        "result": {
            "test_error": result.validation_error,
            "test_loss": result.validation_loss,
            "weight_share": weights(kept) / full,
            "unit_share": sum(kept[1:-1]) / sum(widths[1:-1]),
            "widths": list(kept),
            "kept": hidden,
            "updates": result.updates,
        },
        "curve": [{CURVE.get(key, key): value for key, value in row.items()} for row in result.history],
        "seconds": {"batch": round(result.seconds, 3), "per_run": round(result.seconds / together, 3)},
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
    }


def network(widths: Widths) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return build


def widths_of(model: nn.Module) -> Widths:
    """Inputs, units of each hidden layer, outputs."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return (linear[0].in_features, *(layer.out_features for layer in linear))


def uniform(widths: Widths, share: float) -> Widths:
    """The widest network with equal hidden layers that has at most this share of the weights.

    >>> uniform((64, 64, 64, 10), 0.25), uniform((64, 64, 64, 10), 1)
    ((64, 22, 22, 10), (64, 64, 64, 10))
    """
    inputs, *hidden, outputs = widths
    fitting = [
        (inputs, *[k] * len(hidden), outputs)
        for k in range(1, max(hidden) + 1)
        if weights((inputs, *[k] * len(hidden), outputs)) <= share * weights(widths)
    ]
    return fitting[-1]
