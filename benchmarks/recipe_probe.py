"""A first look at the default recipe: theta's rate, start and ramp on held-out digits. Prints one JSON object.

347 training images are held out and stand in for the test set, which is not touched. Medians of the held-out error of
the compact models, and of uniform networks of the same numbers of weights trained from scratch as long.

    python benchmarks/recipe_probe.py [--seeds 6] [--epochs 20 60]
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from statistics import median

import torch
from torch import nn

import espalier
from espalier.data import load
from espalier.train import Recipe
from espalier.train.batched import Run

WIDTHS = (64, 64, 64, 10)
TARGETS = (0.05, 0.1, 0.25, 0.5)
SETTINGS = [
    (8, 0.5, 0.3), (16, 0.5, 0.3), (32, 0.5, 0.3), (8, 0.9, 0.4), (16, 0.9, 0.4), (32, 0.9, 0.4), (16, 0.7, 0.3),
    (32, 0.9, 0.25), (16, 0.5, 0.15),
]  # fmt: skip


def network(widths):
    def build():
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return build


def weights(widths):
    return sum(a * b for a, b in pairwise(widths))


def uniform(target):
    fits = [k for k in range(1, 65) if weights((64, k, k, 10)) <= target * weights(WIDTHS)]
    return (64, fits[-1], fits[-1], 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, nargs="+", default=[20, 60])
    given = parser.parse_args()
    data, seeds = load("digits").flatten().hold_out(347, seed=0), range(given.seeds)
    rows = []
    for epochs in given.epochs:
        common = {"epochs": epochs, "batch_size": 32, "quiet": True, "validation": data.test}
        scratch = []
        for target in TARGETS:
            runs = espalier.sweep(network(uniform(target)), data, runs=[Run(s, all_open=True) for s in seeds], **common)
            scratch.append(median(run.validation_error for run in runs))
        rows.append({"epochs": epochs, "from": "scratch", "errors": scratch})
        for rate, initial, ramp in SETTINGS:
            recipe = Recipe(theta_rate=rate, initial=initial, ramp=ramp)
            runs = espalier.sweep(network(WIDTHS), data, targets=TARGETS, seeds=seeds, preset=recipe, **common)
            errors = [median(run.validation_error for run in runs if run.target == target) for target in TARGETS]
            setting = {"theta_rate": rate, "initial": initial, "ramp": ramp}
            rows.append({"epochs": epochs, "from": "search", **setting, "errors": errors})
    found = {"benchmark": "recipe probe", "data": "digits, 347 held out", "network": WIDTHS, "targets": TARGETS}
    found |= {"seeds": given.seeds, "torch": torch.__version__, "rows": rows}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
