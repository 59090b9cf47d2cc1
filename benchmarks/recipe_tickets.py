"""What makes the network that is found good: its widths, the initial weights of its units, or their trained ones?

    PYTHONPATH=src python benchmarks/recipe_tickets.py --seeds 10 --epochs 20 > results/recipe/tickets.json

On every fold of the digits the default recipe finds a network. Its units are then trained once more, from update 0 and
for the whole budget, under the mask that was found: with the initial weights they had in the wide network ("ticket"),
with those at the scale of the fan-in that is left ("scaled"), and with other ones: at the scale of the wide network
("fresh, wide"), at that of the fan-in that is left ("fresh"), and as torch's linear layers start by default ("torch").
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from espalier.study.grid_batch import CHUNK, GridBatch
from torch import Tensor

from espalier.report.significance import paired_interval
from espalier.study import record
from espalier.study.grid import Grid
from espalier.study.settings import PAIR, GridSettings
from espalier.train.batched.batch import Batch
from espalier.train.batched.mask_sources import Given
from espalier.train.batched.optimizers import SGD
from espalier.train.batched.step import cross_entropy
from espalier.train.progress import Silent
from espalier.train.run_directory import hardware, versions
from espalier.train.schedule import Steps
from espalier.train.stop import Stop

FRESH = 100_000  # added to a seed for initial weights that no other run has
CPU = torch.device("cpu")
RIVALS = ("ticket", "scaled", "fresh, wide", "fresh", "torch")


def as_torch(found: GridBatch, masks: Tensor) -> dict[str, Tensor]:
    """Weights and biases uniform within one over the root of the fan-in that is left."""
    start = found.network.start([run.seed for run in found.runs], masks, CPU)
    kept = [torch.full((len(masks),), found.network.widths[0])] + [masks[:, w].sum(-1) for w in found.network.layers]
    draws = [torch.Generator().manual_seed(run.seed + FRESH) for run in found.runs]
    for name, tensor in start.items():
        bound = kept[int(name.split(".")[0])].clamp(min=1).rsqrt()
        for run, rng in enumerate(draws):
            tensor[run] = (2 * torch.rand(tensor[run].shape, generator=rng) - 1) * bound[run]
    return start


def again(found: GridBatch, data: Any, start: dict[str, Tensor]) -> list[float]:
    """The errors of the structures that a batch found, trained from these weights for as many updates."""
    masks, own = found.masks(), found.recipe
    batch = Batch(
        found.network.call,
        start,
        {},
        data=data,
        seeds=[run.seed for run in found.runs],
        source=Given(masks, torch.zeros(len(masks))),
        loss=cross_entropy,
        optimizer=SGD(own.learning_rate, own.momentum, own.weight_decay, own.momentum > 0),
        schedule=Steps(own.drops),
        total=found.total,
        batch_size=found.settings.batch_size,
        samples=PAIR,
        chain=found.network.chain,
    )
    batch.advance(found.total)
    return batch.evaluate(masks, *found.test, chunk=CHUNK)[1].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.03, 0.06, 0.12, 0.25, 0.5])
    given = parser.parse_args()
    settings = GridSettings(
        methods=("search",), targets=tuple(given.targets), trials=given.seeds, first_seed=given.first_seed, folds=5,
        epochs=given.epochs,
    )  # fmt: skip
    grid = Grid(settings, tempfile.gettempdir())
    errors: dict[str, dict[float, list[float]]] = {}
    folds: dict[float, list[int | None]] = {target: [] for target in settings.targets}
    for fold in settings.parts:
        data, runs = grid.data(fold), settings.runs("search", fold, {})
        found = GridBatch(settings, grid.widths, data, runs, CPU, None)
        found.train(Stop(), Silent())
        masks, network = found.masks(), found.network
        seeds = [run.seed for run in runs]
        others = [seed + FRESH for seed in seeds]
        rows = {
            "ours": [story["result"]["test_error"] for story in found.results()],
            "ticket": again(found, data, network.start(seeds, torch.ones_like(masks), CPU)),
            "scaled": again(found, data, network.start(seeds, masks, CPU)),
            "fresh, wide": again(found, data, network.start(others, torch.ones_like(masks), CPU)),
            "fresh": again(found, data, network.start(others, masks, CPU)),
            "torch": again(found, data, as_torch(found, masks)),
        }
        for i, run in enumerate(runs):
            assert run.target is not None
            folds[run.target].append(fold)
            for name, row in rows.items():
                errors.setdefault(name, {}).setdefault(run.target, []).append(row[i])
        print(f"fold {fold} done", file=sys.stderr, flush=True)
    table = []
    for target in settings.targets:
        ours = np.array(errors["ours"][target])
        row: dict[str, Any] = {"target": target, "runs": len(ours), "ours": round(100 * ours.mean(), 2)}
        for name in RIVALS:
            theirs = np.array(errors[name][target])
            low, high = paired_interval(list(ours - theirs), folds[target])
            row[name] = round(100 * theirs.mean(), 2)
            row[f"ours minus {name}"] = [round(100 * v, 2) for v in (float((ours - theirs).mean()), low, high)]
        table.append(row)
    told = {
        "command": " ".join(["benchmarks/recipe_tickets.py", *sys.argv[1:]]),
        "settings": grid.described("search"),
        "hardware": hardware(CPU),
        "versions": versions(),
        "commit": record.commit(),
        "table": table,
        "errors": {name: {str(t): [round(e, 4) for e in es] for t, es in by.items()} for name, by in errors.items()},
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
