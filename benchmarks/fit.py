"""What shaping a network costs beside training it whole: updates of each phase over plain ones. Prints one JSON object.

    PYTHONPATH=src python benchmarks/fit.py [--device cuda] [--networks vgg16,resnet20] [--batch 128] [--rounds 5]

Each network in one process: a plain update of the whole network; a search that learns from slopes (one mask) and one
that ranks losses (two masks of half the batch), one mask at a time and, as ``fit`` does it, both in one pass; the same
for slopes of two masks; settled, which trains the compact network through our optimiser; and a plain loop on that
compact network. Rounds of all take turns, and medians are compared. On a CPU the networks are narrow.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.models import VGG, ResNet
from espalier.train.together import OnePass

Update = Callable[[], object]


class Recurrent(nn.Module):
    """An LSTM over sequences of 32 vectors, and a linear layer on its last state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


def vgg(narrow: int) -> nn.Module:
    widths = [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    return VGG([width // narrow for width in widths])


def resnet(depth: int) -> Callable[[int], nn.Module]:
    def build(narrow: int) -> nn.Module:
        streams = [max(width // narrow, 4) for width in (16, 32, 64)]
        return ResNet(depth, streams, [width for width in streams for _ in range((depth - 2) // 6)])

    return build


def mlp(narrow: int) -> nn.Module:
    width = 784 // narrow
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "vgg16": (vgg, (3, 32, 32)),
    "resnet20": (resnet(20), (3, 32, 32)),
    "resnet56": (resnet(56), (3, 32, 32)),
    "lstm": (lambda narrow: Recurrent(256 // narrow), (32, 64)),
}


class Bench:
    """One network on one device, with the updates that are compared."""

    def __init__(self, name: str, device: torch.device, batch: int, narrow: int, target: float) -> None:
        build, shape = NETWORKS[name]
        self.device, self.batch, self.target = device, batch, target
        self.build = lambda: self.place(build(narrow))
        self.x = torch.randn(batch, *shape, device=device)
        self.y = torch.randint(10, (batch,), device=device)

    def place(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return model.to(self.device)

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)

    def loss(self, model: nn.Module, examples: int) -> Tensor:
        with self.autocast():
            return F.cross_entropy(model(self.x[:examples]), self.y[:examples])

    def plain(self, model: nn.Module) -> Update:
        optimizer = self.sgd(model)

        def update() -> None:
            optimizer.zero_grad()
            self.loss(model, self.batch).backward()
            optimizer.step()

        return update

    def shaped(self, signal: str, samples: int) -> tuple[espalier.StructureOptimizer, Update]:
        model = self.build()
        gated = espalier.attach(model, self.x[:4])
        search = espalier.Search(
            gated.space, cost=gated.cost("macs"), target=self.target, horizon=10**6, signal=signal, samples=samples,
            initial=0.9, device=self.device,
        )  # fmt: skip
        structure = espalier.StructureOptimizer(self.sgd(model), search, gated)
        return structure, self.stepped(structure, model, self.batch // samples)

    def stepped(self, structure: espalier.StructureOptimizer, model: nn.Module, examples: int) -> Update:
        def closure() -> Tensor:
            loss = self.loss(model, examples)
            loss.backward()
            return loss

        return lambda: structure.step(closure)

    def in_one_pass(self, signal: str) -> tuple[Update, str]:
        """An update as ``fit`` makes it, with two masks; and why they run one at a time, if they do."""
        structure, _ = self.shaped(signal, 2)
        model, examples = structure.gated.model, self.batch if signal == "slopes" else self.batch // 2
        batch = (self.x[:examples], self.y[:examples])

        def forward(inputs: Tensor) -> Tensor:
            with self.autocast():
                outputs: Tensor = model(inputs)
            return outputs

        def closure(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(forward(inputs), targets)
            loss.backward()
            return loss

        def update() -> None:
            together = OnePass(structure.gated, batch, forward, F.cross_entropy)
            structure.step(closure, *batch, together=together)

        update()
        return update, structure.gated.one_at_a_time()

    def two_slopes(self) -> Update:
        """One mask at a time, each on its own half of the batch."""
        structure, _ = self.shaped("slopes", 2)

        def closure(inputs: Tensor, targets: Tensor) -> Tensor:
            with self.autocast():
                loss = F.cross_entropy(structure.gated.model(inputs), targets)
            loss.backward()
            return loss

        return lambda: structure.step(closure, self.x, self.y)

    def updates(self) -> dict[str, Update]:
        _, slopes = self.shaped("slopes", 1)
        _, ranked = self.shaped("ranked", 2)
        (ranked_pass, why), (slopes_pass, _) = self.in_one_pass("ranked"), self.in_one_pass("slopes")
        self.one_at_a_time = why
        structure, _ = self.shaped("slopes", 1)
        structure.search.settle()
        small = structure.compact()
        alone = structure.gated.compact(structure.search.select())
        return {
            "plain": self.plain(self.build()),
            "search, slopes": slopes,
            "search, ranked": ranked,
            "search, ranked, one pass": ranked_pass,
            "search, slopes of two masks": self.two_slopes(),
            "search, slopes of two masks, one pass": slopes_pass,
            "settled": self.stepped(structure, small, self.batch),
            "compact, plain": self.plain(alone),
        }


def measured(
    updates: dict[str, Update], device: torch.device, rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of one update each, medians over rounds that take turns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    counts = {}
    for name, update in updates.items():
        for _ in range(3):
            update()
        wait()
        began = clock()
        update()
        wait()
        counts[name] = max(1, round(seconds / (clock() - began)))
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(rounds):
        for name, update in updates.items():
            wait()
            began = clock()
            for _ in range(counts[name]):
                update()
            wait()
            times[name].append(1e3 * (clock() - began) / counts[name])
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default="mlp,vgg16,resnet20,lstm", help=", ".join(NETWORKS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--narrow", type=int, help="widths divided by this; 4 on a CPU")
    parser.add_argument("--target", type=float, default=0.2, help="share of the MACs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round of each update")
    parser.add_argument(
        "--processor-time", action="store_true", help="on one thread, for a CPU that others use too; not the clock"
    )
    given = parser.parse_args()
    if given.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if given.processor_time else time.perf_counter
    device = torch.device(given.device)
    narrow = given.narrow or (1 if device.type == "cuda" else 4)
    rows = {}
    for name in given.networks.split(","):
        bench = Bench(name, device, given.batch, narrow, given.target)
        times = measured(bench.updates(), device, given.rounds, given.seconds, clock)
        rows[name] = {
            "ms": {key: round(value, 3) for key, value in times.items()},
            "search over plain": round(times["search, slopes"] / times["plain"], 3),
            "ranked over plain": round(times["search, ranked"] / times["plain"], 3),
            "ranked, one pass, over plain": round(times["search, ranked, one pass"] / times["plain"], 3),
            "slopes of two masks over plain": round(times["search, slopes of two masks"] / times["plain"], 3),
            "slopes of two masks, one pass, over plain": round(
                times["search, slopes of two masks, one pass"] / times["plain"], 3
            ),
            "one mask at a time, because": bench.one_at_a_time,
            "settled over compact": round(times["settled"] / times["compact, plain"], 3),
            "half searched, half settled, over plain": round(
                (times["search, slopes"] + times["settled"]) / 2 / times["plain"], 3
            ),
        }
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    settings = {"batch": given.batch, "narrow": narrow, "target": given.target, "threads": torch.get_num_threads()}
    settings["times"] = "processor time" if given.processor_time else "by the clock"
    print(json.dumps({"device": place, "torch": torch.__version__, "settings": settings, "networks": rows}, indent=1))


if __name__ == "__main__":
    main()
