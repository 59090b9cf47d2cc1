"""What it would gain to cut out closed gates while the search still goes on. Prints one JSON object.

    PYTHONPATH=src python benchmarks/shrinking.py --data-dir DIR [--networks resnet20,vgg16] [--updates 800]

A run by the default recipe on CIFAR-10 (DIR holds ``cifar-10-batches-bin``). At several shares of its ramp, gates whose
theta has come to its lower bound count as closed for good: the network without them is cut, gates are attached to it,
and an update of its search is timed beside one of the whole network. ``saved`` is what a whole run would save if it
were cut at each of these shares and a cut took no time; ``cut_seconds`` is what one takes. ``came_back`` counts gates
that were at the bound then, and open in what shipped. Networks and narrow forms on a CPU are those of ``fit.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import espalier
from espalier.train import PRESETS
from evidence_data import read
from fit import ON_CPU, Bench, measured, processor

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the ramp, after which the network would be cut
CLOSED = 2.0  # times the lower bound of theta, at most


class Trained(Bench):
    """The networks and updates of ``fit.py``, on images that can be learned from."""

    def __init__(self, given: argparse.Namespace, name: str) -> None:
        device = torch.device(given.device)
        narrow = given.narrow or (ON_CPU.get(name, 1) if device.type == "cpu" else 1)
        super().__init__(name, device, given.batch, narrow, given.target)
        data = read(given.data_dir, 0, given.batch * given.updates)
        (self.images, self.labels), self.updates_of_run = data.train, given.updates
        self.gain, self.shift = data.affine()
        self.x, self.y = self.examples(0)

    def examples(self, update: int) -> tuple[Tensor, Tensor]:
        first = update * self.batch % (len(self.labels) - self.batch + 1)
        part = slice(first, first + self.batch)
        images = self.images[part] * self.gain + self.shift
        return images.to(self.device), self.labels[part].to(self.device)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def thetas(self) -> tuple[espalier.StructureOptimizer, dict[float, Tensor]]:
        """A whole run, and theta after each share of its ramp."""
        torch.manual_seed(0)
        model, updates = self.build(), self.updates_of_run
        target = {"macs": self.target}
        structure = espalier.shape(model, self.x[:4], self.sgd(model), updates=updates, target=target)
        begin, ramp = structure.phases.begin, structure.phases.ramp
        at = {begin + round(share * ramp): share for share in SHARES}
        kept: dict[float, Tensor] = {}
        for update in range(updates):
            if update == structure.phases.settle:
                structure.settle()
            structure.step(self.closure(structure.network), *self.examples(update))
            if update + 1 in at:
                kept[at[update + 1]] = structure.search.theta.clone()
        return structure, kept

    def row(self, rounds: int, seconds: float, clock: Any) -> dict[str, Any]:
        structure, thetas = self.thetas()
        gated, ships = structure.gated, structure.search.select()
        macs, bound = gated.cost("macs"), float(structure.search.theta.min())
        full = macs(torch.ones(gated.d, dtype=torch.float64, device=self.device))
        updates = {"plain": self.plain(self.build()), "search": self.shaped(self.structure("slopes", 1))}
        told: dict[str, Any] = {}
        for share, theta in thetas.items():
            closed = theta <= CLOSED * bound
            mask = gated.canonical((~closed).float())
            began = clock()
            small = gated.compact(mask)
            updates[f"{share}"] = self.shaped(self.structure("slopes", 1, small))
            told[f"{share}"] = {
                "closed": round(float(closed.double().mean()), 3),
                "macs": round(float(macs(mask.double()) / full), 3),
                "expected_macs": round(float(macs(theta) / full), 3),
                "came_back": int((closed & (ships > 0)).sum()),
                "cut_seconds": round(clock() - began, 2),
            }
        updates["compact"] = self.plain(gated.compact(ships))
        times = measured(updates, self.device, rounds, seconds, clock)[0]
        over = {name: value / times["plain"] for name, value in times.items()}
        for share, one in told.items():
            one["over_plain"] = round(over[share], 3)
        parts = [after - before for before, after in itertools.pairwise([*SHARES, 1.0])]
        gains = [part * (over["search"] - over[f"{share}"]) for share, part in zip(SHARES, parts)]
        return {
            "gates": gated.d,
            "plain_ms": round(times["plain"], 2),
            "search_over_plain": round(over["search"], 3),
            "compact_over_plain": round(over["compact"], 3),
            "shares_of_the_ramp": told,
            "saved": round(PRESETS["default"].ramp * sum(gains), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="synthetic")
    parser.add_argument("--networks", default="vgg16,resnet18,resnet20,resnet56")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--narrow", type=int, help="widths divided by this; default: as in fit.py")
    parser.add_argument("--target", type=float, default=0.2, help="share of the MACs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each round of each update")
    parser.add_argument("--processor-time", action="store_true", help="on one thread; not the clock")
    given = parser.parse_args()
    if given.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if given.processor_time else time.perf_counter
    rows = {}
    for name in given.networks.split(","):
        rows[name] = Trained(given, name).row(given.rounds, given.seconds, clock)
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    place = torch.cuda.get_device_name() if given.device != "cpu" else processor()
    settings = {"command": " ".join(["python", "benchmarks/shrinking.py", *sys.argv[1:]])}
    settings |= {"threads": torch.get_num_threads(), "load average": [round(load, 1) for load in os.getloadavg()]}
    versions = {"torch": torch.__version__, "espalier": espalier.__version__}
    print(json.dumps({"device": place, **versions, "settings": settings, "networks": rows}, indent=1))


if __name__ == "__main__":
    main()
