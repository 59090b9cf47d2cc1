"""Many sizes at once: searches towards several targets and their control as one batch, and as another uniform networks
of the same sizes from scratch.

Each network becomes a run file as studies write them, so that `espalier report` draws both as curves of one chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from espalier.data import Dataset
from espalier.study import run_files
from espalier.study.networks import Units
from espalier.study.settings import size as weights
from espalier.train import Result, sweep
from espalier.train.batched import Run
from espalier.train.fingerprint import versions
from espalier.train.run_directory import hardware

Widths = tuple[int, ...]
MASKS, BATCH = 2, 32  # of the search: in every update two masks, and the examples that each of them reads
# Of networks from scratch, in every update: the best of 16, 32 and 64 on held-out folds of the training part, by
# `espalier study` (results/demo; a test compares them). All read as many examples.
RIVALS_BATCH = 32
CURVE = {"loss": "train_loss", "error": "train_error", "validation_loss": "test_loss", "validation_error": "test_error"}


@dataclass(frozen=True)
class Size:
    """One target: networks that were led to it, and uniform ones of as many weights, a run for each seed. control: led
    there by a search whose signal was shuffled among the gates."""

    target: float
    found: list[Result]
    uniform: Widths
    scratch: list[Result]
    control: list[Result] = field(default_factory=list)

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

    @property
    def control_error(self) -> float:
        return _median(self.control)


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
    """All targets with all seeds, and their controls, as one batch; then all uniform networks as another. For a target
    of 1, which comes last, there is nothing to search for: the uncut network alone is trained, as the uniform ones are.

    state: the folder of the checkpoints; the same call goes on from there.
    """
    settings: dict[str, Any] = {"epochs": epochs, "samples": MASKS, "device": "cpu", "quiet": quiet}
    units = Units(widths, least=1)
    led = [(target, seed, control) for control in (False, True) for target in targets if target < 1 for seed in seeds]
    runs = [Run(seed, target=target, permuted=control) for target, seed, control in led]
    found = sweep(units.build, data, runs=runs, batch_size=BATCH, checkpoint=state / "search", **settings)
    same = {target: uniform(widths, target) for target in targets}
    runs = [Run(seed, mask=units.first(same[target][1:-1])) for target in targets for seed in seeds]
    batch = RIVALS_BATCH // MASKS  # under one mask an update reads as many examples as under all of them
    scratch = sweep(units.build, data, runs=runs, batch_size=batch, checkpoint=state / "scratch", **settings)
    sizes = list[Size]()
    for i, target in enumerate(targets):
        ours, control = ([r for r, one in zip(found, led) if one[0] == target and one[2] == c] for c in (False, True))
        rivals = scratch[i * len(seeds) : (i + 1) * len(seeds)]
        sizes.append(Size(target, ours, same[target], rivals, control))
    return sizes


def write(sizes: Sequence[Size], folder: Path, widths: Widths, dataset: str, epochs: int, command: str) -> None:
    """A run file for each network: ``folder/runs/DATASET/search``, ``permuted`` and ``scratch``."""
    shared = {"dataset": dataset, "widths": list(widths), "epochs": epochs, "cost": "weights"}
    led = shared | {"batch_size": BATCH, "masks": MASKS}
    alone = shared | {"batch_size": RIVALS_BATCH, "masks": 1}
    full, place = weights(widths), folder / "runs" / dataset
    together = {kind: sum(len(getattr(size, kind)) for size in sizes) for kind in ("found", "control", "scratch")}
    searched = together["found"] + together["control"]  # one batch
    for size in sizes:
        for method, results in (("search", size.found), ("permuted", size.control)):
            for result in results:
                run = {"method": method, "variant": method, "target": size.target, "seed": _seed(result)}
                path = place / method / f"target_{size.target:g}-seed_{_seed(result)}.json"
                run_files.save(path, _story(run, led, result, widths, searched, command))
        for result in size.scratch:
            share = weights(size.uniform) / full
            run = {"method": "scratch", "variant": "scratch", "size": round(share, 6), "seed": _seed(result)}
            path = place / "scratch" / f"size_{size.target:g}-seed_{_seed(result)}.json"
            run_files.save(path, _story(run, alone, result, widths, together["scratch"], command))


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
