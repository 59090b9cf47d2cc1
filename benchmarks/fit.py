"""What shaping a network costs beside training it whole: updates of each phase over plain ones. Prints one JSON object.

    PYTHONPATH=src python benchmarks/fit.py [--device cuda] [--networks vgg16,resnet20] [--batch 128] [--rounds 5]
    PYTHONPATH=src python benchmarks/fit.py --device cuda --compile --networks vgg16,resnet18,resnet56,vit,gpt,lstm

Each network in one process: a plain update of the whole network; a search that learns from slopes (one mask), the same
without reading them, and one that ranks losses (two masks of half the batch), one mask at a time and, as ``fit`` does
it, both in one pass; the same for slopes of two masks; settled, which trains the compact network through our optimiser;
and a plain loop on that compact network. ``--compile`` adds plain, search, settled and compact with the network
compiled, and on a GPU with the gradient recorded as a CUDA graph, for plain updates too, with theta's update compiled
beside compiled networks. Rounds of all take turns, and medians are compared. Then whole runs, a slice of each in turn:
the whole network trained; shaped by the default recipe, with settling and the cut; and trained whole for half of the
updates, pruned by Torch-Pruning to the same share of the MACs, and trained on. A network that Torch-Pruning refuses has
none. On a GPU ``--compile`` adds whole runs of recorded updates. ``--round-to 8`` adds a run in blocks of eight units,
``--limit`` a limit on its latency, that of a uniform network; what the limit takes to measure is not counted.
``--pad 8`` adds settled updates, and whole runs, whose compact network is trained with zeros up to widths that are
multiples of eight. On a CPU some networks are narrow (``ON_CPU``); on a GPU they run under bfloat16 autocast. ViT, GPT
and ResNet-18 are those of Transformers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from compact import alone
from espalier.models import VGG, ResNet
from espalier.search.recorded import WARM
from espalier.space import first_line
from espalier.train.compiling import Compiling, Recording, as_it_is
from espalier.train.gradients import Gradient, OnePass
from espalier.train.gradients import Update as UpdateOf
from espalier.train.recipes import PRESETS

Update = Callable[[], object]
FEWEST, SLICES = 100, 50  # updates of a whole run, and the slices of it that take turns with those of others
FIRST = WARM + 3  # updates until what is recorded is replayed
SEARCHED = 60  # updates of the run whose search gives the widths of settled updates


class Recurrent(nn.Module):
    """An LSTM over sequences of 32 vectors, and a linear layer on its last state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


class Logits(nn.Module):
    """A network of Transformers that gives its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x).logits
        return out


def vgg(narrow: int) -> nn.Module:
    widths = [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    return VGG([width // narrow for width in widths])


def resnet(depth: int) -> Callable[[int], nn.Module]:
    def build(narrow: int) -> nn.Module:
        streams = [max(width // narrow, 4) for width in (16, 32, 64)]
        return ResNet(depth, streams, [width for width in streams for _ in range((depth - 2) // 6)])

    return build


def resnet18(narrow: int) -> nn.Module:
    import transformers

    widths = [width // narrow for width in (64, 128, 256, 512)]
    config = transformers.ResNetConfig(
        embedding_size=widths[0], hidden_sizes=widths, depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return Logits(transformers.ResNetForImageClassification(config))


def vit(narrow: int) -> nn.Module:
    import transformers

    width = 256 // narrow
    config = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=6, num_attention_heads=4, intermediate_size=4 * width, image_size=32,
        patch_size=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Logits(transformers.ViTForImageClassification(config))


def gpt(narrow: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=256 // narrow, n_layer=6, n_head=4, n_positions=128, vocab_size=1024, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return Logits(transformers.GPT2LMHeadModel(config))


def mlp(narrow: int) -> nn.Module:
    width = 784 // narrow
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


IMAGE = (3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "vgg16": (vgg, IMAGE),
    "resnet18": (resnet18, IMAGE),
    "resnet20": (resnet(20), IMAGE),
    "resnet56": (resnet(56), IMAGE),
    "vit": (vit, IMAGE),
    "gpt": (gpt, (64,)),
    "lstm": (lambda narrow: Recurrent(256 // narrow), (32, 64)),
}
# What the widths are divided by on a CPU. Others have their own widths: with a few channels a layer takes its time
# whatever it computes, so that a fifth of the MACs is little faster.
ON_CPU = {"vgg16": 4, "resnet18": 2, "vit": 4, "gpt": 4}


class Plain(UpdateOf):
    """The gradient of a network without gates, and nothing else."""

    def one_at_a_time(self, masks: Tensor | None = None, parts: Sequence[Any] | None = None) -> Gradient:
        self.forget()
        loss: Any = self.closure(*(self.parts if parts is None else parts)[0])
        return loss.detach(), None


class Bench:
    """One network on one device, with the updates that are compared."""

    def __init__(self, name: str, device: torch.device, batch: int, narrow: int, target: float) -> None:
        build, shape = NETWORKS[name]
        self.device, self.batch, self.target = device, batch, target
        self.build = lambda: self.place(build(narrow))
        self.x = torch.randn(batch, *shape, device=device)
        self.y = torch.randint(10, (batch,), device=device)
        if name == "gpt":
            self.x = torch.randint(1024, (batch, *shape), device=device)
            self.y = self.x.roll(-1, 1)

    def place(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return model.to(self.device)

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda"
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=fused)

    def loss(self, network: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        with self.autocast():
            logits = network(x)
            return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def closure(self, network: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def closure(x: Tensor, y: Tensor) -> Tensor:
            loss = self.loss(network, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return closure

    def plain(self, model: nn.Module, *, compile: bool = False) -> Update:
        optimizer, network = self.sgd(model), Compiling().form(model) if compile else model

        def update() -> None:
            optimizer.zero_grad()
            self.loss(network, self.x, self.y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return update

    def plain_recorded(self, model: nn.Module, **settings: Any) -> Update:
        """The gradient recorded as that of a search is, nothing else of ours. settings: of ``Compiling``."""
        optimizer, closure = self.sgd(model), self.closure(Compiling(**settings).form(model))
        parameters, recording, no_mask = list(model.parameters()), Recording(), torch.ones(1, device=self.device)
        plain = Plain(None, no_mask, [(self.x, self.y)], parameters, closure)

        def update() -> None:
            recording(plain)
            optimizer.step()

        return update

    def structure(self, signal: str, samples: int, model: nn.Module | None = None) -> espalier.StructureOptimizer:
        model = self.build() if model is None else model
        gated = espalier.attach(model, self.x[:4])
        search = espalier.Search(
            gated.space, cost=gated.cost("macs"), target=self.target, horizon=10**6, signal=signal, samples=samples,
            initial=0.9, device=self.device,
        )  # fmt: skip
        return espalier.StructureOptimizer(self.sgd(model), search, gated)

    def shaped(
        self,
        structure: espalier.StructureOptimizer,
        *,
        compile: bool = False,
        record: bool = False,
        reads: bool = True,
        **settings: Any,
    ) -> Update:
        """Updates of a structure as it is now: searching, or settled. Ranked losses share one part of the batch.
        reads: the slopes of every update; else the search is told those of its first again. settings: of
        ``Compiling``."""
        network = structure.network
        closure = self.closure(Compiling(**settings).form(network) if compile else network)
        if compile and not settings and self.device.type == "cuda":  # as `fit` does
            structure.search.compile()
        ranked = not structure.search.reads_slopes and not structure.search.settled
        examples = self.batch // structure.search.samples if ranked else self.batch
        batch, recording = (self.x[:examples], self.y[:examples]), Recording() if record else None
        if reads:
            return lambda: structure.step(closure, *batch, together=recording)
        gradient, first = recording or UpdateOf.one_at_a_time, []

        def together(update: UpdateOf) -> Gradient:
            if not first:
                first.append(update.one_at_a_time()[1])
            return gradient(replace(update, slopes=False))[0], first[0]

        return lambda: structure.step(closure, *batch, together=together)

    def in_one_pass(self, signal: str) -> tuple[Update, str]:
        """An update as ``fit`` makes it, with two masks; and why they run one at a time, if they do."""
        structure = self.structure(signal, 2)
        model, examples = structure.gated.model, self.batch if signal == "slopes" else self.batch // 2
        batch = (self.x[:examples], self.y[:examples])

        def forward(inputs: Tensor) -> Tensor:
            with self.autocast():
                outputs: Tensor = model(inputs)
            return outputs

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

        def update() -> None:
            together = OnePass(forward, loss)
            structure.step(self.closure(model), *batch, together=together)

        update()
        return update, structure.gated.one_at_a_time()

    @functools.cached_property
    def search(self) -> espalier.Search:
        """Settled on widths of the wanted size, which a short search finds: theta alone would cut layer by layer."""
        model = self.build()
        gated = espalier.attach(model, self.x[:4])
        structure = espalier.shape(gated, None, self.sgd(model), updates=SEARCHED, target={"macs": self.target})
        assert structure.phases is not None
        closure = self.closure(model)
        for _ in range(structure.phases.settle):
            structure.step(closure, self.x, self.y)
        structure.search.settle()
        return structure.search

    def settled(self, pad: int = 1) -> tuple[espalier.StructureOptimizer, nn.Module]:
        """Settled, and padded to multiples of so many channels; and the compact network alone."""
        model = self.build()
        structure = espalier.StructureOptimizer(self.sgd(model), self.search, espalier.attach(model, self.x[:4]))
        structure.compact(pad)
        return structure, structure.gated.compact(self.search.select())

    def run_shaped(
        self, updates: int, record: bool, *, round_to: int | None = None, limit: bool = False, pad: int = 1
    ) -> Update:
        """The updates of a run by the default recipe, all of its phases; in blocks, with a limit on latency, or padded
        once settled."""
        model = self.build()
        gated = espalier.attach(model, self.x[:4], round_to=round_to)
        target: dict[Any, Any] = {"macs": self.target}
        if limit:
            target[gated.cost("latency", device=self.device, batch=self.batch)] = "uniform"
        structure = espalier.shape(gated, None, self.sgd(model), updates=updates, target=target)
        structure.multiple = pad
        compiling, recording = Compiling(backend=as_it_is), Recording() if record else None

        def update() -> None:
            if structure.update == structure.phases.settle:  # as `fit` does, so that the closure has the network
                structure.settle()
            network = compiling.form(structure.network) if record else structure.network
            structure.step(self.closure(network), self.x, self.y, together=recording)

        return update

    def run_plain(self, record: bool) -> Update:
        return self.plain_recorded(self.build(), backend=as_it_is) if record else self.plain(self.build())

    def run_pruned(self, updates: int, record: bool) -> Update:
        """Trained whole, pruned by Torch-Pruning after half of the updates, trained on."""
        model = self.build()
        # What it refuses, it refuses here: on the CPU, since an index that is out of bounds ends the work of a GPU.
        self.pruned(copy.deepcopy(model).cpu())

        def trained() -> Update:
            return self.plain_recorded(model, backend=as_it_is) if record else self.plain(model)

        state = {"left": updates // 2, "update": trained()}

        def update() -> None:
            if state["left"] == 0:
                self.pruned(model)
                state["update"] = trained()
            state["left"] -= 1
            state["update"]()

        return update

    def pruned(self, model: nn.Module) -> nn.Module:
        """By magnitude, the same share of every layer, to the largest that has at most the wanted share of the MACs."""
        import torch_pruning as tp

        heads = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        x = self.x[:2].to(next(model.parameters()).device)
        pruner = tp.pruner.MagnitudePruner(
            model, x, importance=tp.importance.MagnitudeImportance(p=2), iterative_steps=40,
            pruning_ratio=0.95, global_pruning=False, ignored_layers=heads,
        )  # fmt: skip
        full = tp.utils.count_ops_and_params(model, x)[0]
        for _ in range(40):
            pruner.step()
            if tp.utils.count_ops_and_params(model, x)[0] <= self.target * full:
                return model
        raise ValueError("Torch-Pruning does not make it so small")

    def whole_runs(self, updates: int, record: bool, round_to: int | None, limit: bool, pad: int | None) -> WholeRuns:
        """Whole runs of so many updates, that of the whole network first."""
        runs = WholeRuns(updates, self.device)
        runs.add("plain", lambda: self.run_plain(record))
        runs.add("shaped", lambda: self.run_shaped(updates, record))
        if round_to is not None:
            runs.add("shaped in blocks", lambda: self.run_shaped(updates, record, round_to=round_to, limit=limit))
        if pad is not None:
            runs.add("shaped, padded", lambda: self.run_shaped(updates, record, pad=pad))
        runs.add("pruned", lambda: self.run_pruned(updates, record))
        return runs

    def updates(self, *, one_pass: bool, compile: bool, pad: int | None) -> dict[str, Update]:
        settled, alone = self.settled()
        updates = {
            "plain": self.plain(self.build()),
            "search, slopes": self.shaped(self.structure("slopes", 1)),
            "search, no slopes": self.shaped(self.structure("slopes", 1), reads=False),
            "settled": self.shaped(settled),
            "compact, plain": self.plain(alone),
        }
        if pad is not None:
            updates["padded"] = self.shaped(self.settled(pad)[0])
        if one_pass:
            (ranked_pass, self.one_at_a_time), (slopes_pass, _) = self.in_one_pass("ranked"), self.in_one_pass("slopes")
            updates |= {
                "search, ranked": self.shaped(self.structure("ranked", 2)),
                "search, ranked, one pass": ranked_pass,
                "search, slopes of two masks": self.shaped(self.structure("slopes", 2)),
                "search, slopes of two masks, one pass": slopes_pass,
            }
        if compile:
            settled, alone = self.settled()
            updates["plain, compiled"] = self.plain(self.build(), compile=True)
            if self.device.type == "cuda":
                updates |= self.recorded(", recorded", backend=as_it_is) | self.recorded(", compiled and recorded")
                for kind, how in ((", recorded", {"backend": as_it_is}), (", compiled and recorded", {})):
                    if pad is not None:
                        padded = self.settled(pad)[0]
                        updates[f"padded{kind}"] = self.shaped(padded, compile=True, record=True, **how)
            else:
                updates |= {
                    "search, slopes, compiled": self.shaped(self.structure("slopes", 1), compile=True),
                    "settled, compiled": self.shaped(settled, compile=True),
                    "compact, plain, compiled": self.plain(alone, compile=True),
                }
        return updates

    def recorded(self, kind: str, **settings: Any) -> dict[str, Update]:
        """On a GPU: the kernels of torch as they are (``as_it_is``), or compiled ones, recorded."""
        settled, alone = self.settled()
        return {
            f"plain{kind}": self.plain_recorded(self.build(), **settings),
            f"search, slopes{kind}": self.shaped(self.structure("slopes", 1), compile=True, record=True, **settings),
            f"search, no slopes{kind}": self.shaped(
                self.structure("slopes", 1), compile=True, record=True, reads=False, **settings
            ),
            f"settled{kind}": self.shaped(settled, compile=True, record=True, **settings),
            f"compact, plain{kind}": self.plain_recorded(alone, **settings),
        }


class WholeRuns:
    """Whole runs of so many updates, a slice of each in turn.

    What takes a run of any length as long is told apart: the first updates of a network, which trace and record it and,
    where one settles, cut it. They are the same updates of every run: at its start, where the search begins, where it
    settles, and where a rival prunes.
    """

    def __init__(self, updates: int, device: torch.device) -> None:
        self.updates, self.device = updates, device
        phases = PRESETS["default"].phases(updates, "a target")
        self.new = {0, phases.begin, phases.settle, updates // 2}
        self.runs, self.failed = dict[str, Update](), dict[str, str]()

    def add(self, name: str, make: Callable[[], Update]) -> None:
        try:
            self.runs[name] = make()
        except Exception as error:  # a network that a rival refuses
            self.failed[name] = f"-: {type(error).__name__}: {first_line(error)}"

    def measure(self, clock: Callable[[], float]) -> dict[str, Any]:
        """Seconds of each run, and over those of the first."""
        seconds, once = dict.fromkeys(self.runs, 0.0), dict.fromkeys(self.runs, 0.0)
        marks = {round(place * self.updates / SLICES) for place in range(SLICES + 1)}
        marks |= {update + more for update in self.new for more in (0, FIRST)}
        for start, stop in itertools.pairwise(sorted(mark for mark in marks if mark <= self.updates)):
            apart = any(update <= start < update + FIRST for update in self.new)
            for name, update in self.runs.items():
                (once if apart else seconds)[name] += timed(update, stop - start, self.device, clock)
        told: dict[str, Any] = {"updates": self.updates, **self.failed}
        for key, times in (("seconds", seconds), ("seconds of first updates", once)):
            told[key] = {name: round(value, 3) for name, value in times.items()}
        first, *others = self.runs
        return told | {f"{name} over {first}": round(seconds[name] / seconds[first], 3) for name in others}


RATIOS = {
    "search over plain": ("search, slopes", "plain"),
    "settled over compact": ("settled", "compact, plain"),
    "ranked over plain": ("search, ranked", "plain"),
    "ranked, one pass, over plain": ("search, ranked, one pass", "plain"),
    "slopes of two masks over plain": ("search, slopes of two masks", "plain"),
    "slopes of two masks, one pass, over plain": ("search, slopes of two masks, one pass", "plain"),
}
KINDS = ("", ", compiled", ", recorded", ", compiled and recorded")


def ratios(times: dict[str, float]) -> dict[str, float]:
    pairs = dict(RATIOS)
    for kind in KINDS[1:]:
        pairs[f"search over plain{kind}"] = f"search, slopes{kind}", f"plain{kind}"
        pairs[f"settled over compact{kind}"] = f"settled{kind}", f"compact, plain{kind}"
    found = {
        name: round(times[ours] / times[other], 3)
        for name, (ours, other) in pairs.items()
        if ours in times and other in times
    }
    for kind in KINDS:
        if f"search, no slopes{kind}" in times:
            more = times[f"search, slopes{kind}"] - times[f"search, no slopes{kind}"]
            found[f"price of slopes, share of plain{kind}"] = round(more / times[f"plain{kind}"], 3)
        for form in ("settled", "padded"):
            if f"{form}{kind}" in times:
                mean = (times[f"search, slopes{kind}"] + times[f"{form}{kind}"]) / 2
                found[f"half searched, half {form}, over plain{kind}"] = round(mean / times[f"plain{kind}"], 3)
    return found


def timed(update: Update, count: int, device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of so many updates."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = clock()
    for _ in range(count):
        update()
    wait()
    return clock() - began


def ready(
    updates: dict[str, Update], device: torch.device, clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of one update of each that works, compiled and recorded by now; and what failed, by its name."""
    seconds, failed = dict[str, float](), dict[str, str]()
    for name, update in updates.items():
        began = time.perf_counter()
        try:
            timed(update, 5, device, clock)
            seconds[name] = timed(update, 1, device, clock)
        except Exception as error:  # torch.compile refuses an LSTM
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
        told = failed.get(name, "ready")
        print(f"{name}: {told}, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return seconds, failed


def measured(
    updates: dict[str, Update], device: torch.device, rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of one update each, medians over rounds that take turns."""
    counts = {name: max(1, round(seconds / timed(update, 1, device, clock))) for name, update in updates.items()}
    times: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(rounds):
        for name, count in counts.items():
            times[name].append(1e3 * timed(updates[name], count, device, clock) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def processor() -> str:
    """The name of the CPU where Linux tells it, and its number of cores."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--narrow", type=int, help="widths divided by this; default: ON_CPU, or 1")
    parser.add_argument("--target", type=float, default=0.2, help="share of the MACs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round of each update")
    parser.add_argument("--run", type=float, default=10.0, help="seconds of a plain run beside whole runs; 0: none")
    parser.add_argument("--round-to", type=int, help="and a whole run in blocks of so many units")
    parser.add_argument("--limit", action="store_true", help="on the latency of that run: a uniform network's")
    parser.add_argument("--pad", type=int, help="and settled in widths that are multiples of so many, by zeros")
    parser.add_argument("--one-pass", action=argparse.BooleanOptionalAction, default=True, help="and two masks")
    parser.add_argument("--compile", action="store_true", help="and compiled; on a GPU recorded, too")
    parser.add_argument(
        "--processor-time", action="store_true", help="on one thread, for a CPU that others use too; not the clock"
    )
    given = parser.parse_args()
    if given.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if given.processor_time else time.perf_counter
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    rows: dict[str, dict[str, Any]] = {}
    for name in given.networks.split(","):
        narrow = given.narrow or (ON_CPU.get(name, 1) if device.type == "cpu" else 1)
        bench = Bench(name, device, given.batch, narrow, given.target)
        runs: dict[str, WholeRuns] = {}
        try:
            with alone(timing=False) if on_gpu else nullcontext():
                updates = bench.updates(one_pass=given.one_pass, compile=given.compile, pad=given.pad)
                first, failed = ready(updates, device, clock)
                for kind in ("", ", recorded") if given.run else ():
                    if f"plain{kind}" in first:
                        count = max(FEWEST, round(given.run / first[f"plain{kind}"]))
                        runs[kind] = bench.whole_runs(count, bool(kind), given.round_to, given.limit, given.pad)
            with alone() if on_gpu else nullcontext():
                times = measured({key: updates[key] for key in first}, device, given.rounds, given.seconds, clock)
                rows[name] = {"narrow": narrow, "ms": {key: round(value, 3) for key, value in times.items()}}
                rows[name] |= ratios(times) | ({"failed": failed} if failed else {})
                for kind, whole in runs.items():
                    print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
                    rows[name][f"whole run{kind}"] = whole.measure(clock)
        except Exception as error:  # one network that fails is told of in its place, with what was measured before
            rows[name] = rows.get(name, {}) | {"failed": f"{type(error).__name__}: {error}"}
            continue
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
        if given.one_pass:
            rows[name]["one mask at a time, because"] = bench.one_at_a_time
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    settings = {"batch": given.batch, "target": given.target, "threads": torch.get_num_threads()}
    settings["times"] = "processor time" if given.processor_time else "by the clock"
    settings["command"] = " ".join(["python", "benchmarks/fit.py", *sys.argv[1:]])
    settings["load average"] = [round(load, 1) for load in os.getloadavg()]
    versions = {"torch": torch.__version__, "python": platform.python_version(), "espalier": espalier.__version__}
    print(json.dumps({"device": place, **versions, "settings": settings, "networks": rows}, indent=1))


if __name__ == "__main__":
    main()
