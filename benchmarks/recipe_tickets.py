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
from torch import Tensor

from espalier.report.significance import paired_interval
from espalier.study import Grid, revision
from espalier.study.settings import PAIR, GridSettings
from espalier.study.study_batches import GridBatch
from espalier.train.batched.batch import Batch
from espalier.train.batched.inputs import Given
from espalier.train.batched.runs import Run
from espalier.train.batched.step import cross_entropy
from espalier.train.fingerprint import versions
from espalier.train.loop import Stop
from espalier.train.progress import Progress
from espalier.train.run_directory import hardware

FRESH = 100_000  # added to a seed for initial weights that no other run has
CPU = torch.device("cpu")
RIVALS = ("ticket", "scaled", "fresh, wide", "fresh", "torch")


def start(found: GridBatch, seeds: list[int], masks: Tensor) -> dict[str, Tensor]:
    """Initial weights ``(R, ...)`` of these seeds, at the scale of what is read under these masks."""
    models = [found.network.build(Run(seed, mask=mask)) for seed, mask in zip(seeds, masks, strict=True)]
    names = [name for name, _ in models[0].named_parameters()]
    return {name: torch.stack([model.get_parameter(name).detach() for model in models]) for name in names}


def as_torch(found: GridBatch, seeds: list[int], masks: Tensor) -> dict[str, Tensor]:
    """Weights and biases uniform within one over the root of the fan-in that is left."""
    tensors = start(found, seeds, masks)
    kept = [torch.full((len(masks),), found.network.widths[0])] + [masks[:, w].sum(-1) for w in found.network.groups]
    draws = [torch.Generator().manual_seed(seed + FRESH) for seed in seeds]
    for place, tensor in enumerate(tensors.values()):  # a weight and a bias of each layer
        bound = kept[place // 2].clamp(min=1).rsqrt()
        for run, rng in enumerate(draws):
            tensor[run] = (2 * torch.rand(tensor[run].shape, generator=rng) - 1) * bound[run]
    return tensors


def again(found: GridBatch, tensors: dict[str, Tensor]) -> list[float]:
    """The errors of the structures that a batch found, trained from these weights for as many updates."""
    engine, masks = found.engine, found.engine.masks()
    batch = Batch(
        engine.gated.call,
        tensors,
        {},
        data=found.data,
        seeds=[run.seed for run in engine.runs],
        source=Given(masks, torch.zeros(len(masks))),
        loss=cross_entropy,
        optimizer=engine.plan.optimizer,
        schedule=engine.plan.schedule,
        total=engine.total,
        batch_size=found.settings.batch_size,
        samples=PAIR,
    )
    batch.advance(engine.total)
    return batch.evaluate(masks, *found.data.test)[1].tolist()


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
        data, runs = grid.data(fold), settings.runs("search", fold)
        found = GridBatch(settings, grid.network, data, runs, CPU)
        loop = found.loop(None, Stop(), Progress())
        loop.train()
        masks = found.engine.masks()
        seeds = [run.seed for run in runs]
        others = [seed + FRESH for seed in seeds]
        rows = {
            "ours": [record["result"]["test_error"] for record in found.results(loop)],
            "ticket": again(found, start(found, seeds, torch.ones_like(masks))),
            "scaled": again(found, start(found, seeds, masks)),
            "fresh, wide": again(found, start(found, others, torch.ones_like(masks))),
            "fresh": again(found, start(found, others, masks)),
            "torch": again(found, as_torch(found, seeds, masks)),
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
        "commit": revision(),
        "table": table,
        "errors": {name: {str(t): [round(e, 4) for e in es] for t, es in by.items()} for name, by in errors.items()},
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
