"""What several ranks cost: seconds and bytes of an update by 1, 2 and 4 of them, and arithmetic for many GPUs.

    python benchmarks/scale.py ranks --out results/scale/gloo.json       # this machine's cores, by gloo
    python benchmarks/scale.py blocks --out results/scale/blocks.json    # one block of each large network, one thread
    python benchmarks/scale.py tables --into docs/scale.md

Every rank is a process of one thread. Strong scaling: 32 examples, shared by all ranks; weak: 32 for each rank. Seconds
are the wall's, medians of interleaved rounds; processor seconds are of one rank. Bytes are what one rank hands over to
be summed in an update. The least: the gradient once, a loss for each mask, a slope for each gate of each mask where
slopes are read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import espalier
from espalier.models import MLP
from espalier.report.tables import put_between
from espalier.train.fingerprint import versions
from espalier.train.run_directory import hardware
from evidence_networks import build, seen_layers, whole_widths

BATCH, ROUNDS, UPDATES = 32, 3, 5
CASES: dict[str, dict[str, Any]] = {
    "MLP 784-784-784-784-10, data": {"network": "mlp", "parallel": "data"},
    "MLP 784-784-784-784-10, structure, 4 masks": {"network": "mlp", "parallel": "structure", "samples": 4},
    "ResNet-20 on 32 x 32, data": {"network": "resnet20", "parallel": "data"},
}
MARKS = {name: (f"<!-- generated: {name} -->", f"<!-- end of generated: {name} -->") for name in ("ranks", "scale")}

# What is assumed of a GPU and of what connects them, in the tables for many: an H100 or H200 at 40% of its peak in
# bfloat16; NVLink inside a machine of eight; 400 Gb/s for each GPU between machines; what the smallest message takes.
FLOPS, INSIDE, BETWEEN, LATENCY = 400e12, 300e9, 45e9, 20e-6
GPUS = (8, 64, 1024)


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(784, [784, 784, 784], 10), (784,)
    return build(name, whole_widths(name)), (3, 32, 32)


def shaping_of(model: nn.Module, example: Any, parallel: str, **more: Any) -> espalier.StructureOptimizer:
    """In the middle of a search: no update trains the whole network, none is settled."""
    ranked = parallel == "structure"
    recipe = espalier.train.Recipe(begin=0.0, settle=0.1, ramp=0.5, signal="ranked" if ranked else "slopes")
    inner = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    given: dict[str, Any] = {"samples": 1, "target": 0.5, "recipe": recipe, "updates": 100_000} | more
    return espalier.shape(model, example, inner, parallel=parallel, **given)


def least(model: nn.Module, shaping: Any) -> int:
    """Bytes that an update cannot do without."""
    masks, slopes = shaping.search.samples, shaping.search.space.d if shaping.search.reads_slopes else 0
    return 4 * (sum(p.numel() for p in model.parameters() if p.requires_grad) + masks * (1 + slopes))


def measured(case: dict[str, Any], count: int, rank: int, weak: bool) -> dict[str, float]:
    """A few updates of this rank: wall and processor seconds of one, bytes of one."""
    model, shape = network(case["network"])
    examples = BATCH * (count if weak else 1)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(examples, *shape, generator=generator), torch.arange(examples) % 10
    more = {"samples": case["samples"]} if "samples" in case else {}
    shaping = shaping_of(model, batch[0][:4], case["parallel"], **more)
    assert shaping.ranks is not None
    if case["parallel"] == "data":
        batch = shaping.ranks.share(batch)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(2):
        shaping.step(closure, *batch)
    dist.barrier()
    sent, began, worked = shaping.ranks.sent, time.perf_counter(), time.process_time()
    for _ in range(UPDATES):
        shaping.step(closure, *batch)
    dist.barrier()
    return {
        "seconds": (time.perf_counter() - began) / UPDATES,
        "processor": (time.process_time() - worked) / UPDATES,
        "bytes": (shaping.ranks.sent - sent) / UPDATES,
        "least": least(model, shaping),
        "parameters": sum(p.numel() for p in model.parameters()),
        "gates": shaping.search.space.d,
    }


def joined(folder: Path, count: int, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))


def group(case: dict[str, Any], count: int, weak: bool) -> dict[str, float]:
    """What the first of so many ranks measured, each of them a fork."""
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        for rank in range(count):
            child = os.fork()
            if child == 0:
                try:
                    joined(folder, count, rank)
                    told = measured(case, count, rank, weak)
                    if rank == 0:
                        (folder / "told").write_text(json.dumps(told))
                    dist.barrier()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise SystemExit("a rank failed")
        return json.loads((folder / "told").read_text())  # type: ignore[no-any-return]


def ranks(counts: Sequence[int]) -> dict[str, Any]:
    espalier.attach(network("mlp")[0], torch.zeros(4, 784))  # imports what the forks then need not
    rows = dict[tuple[str, bool, int], list[dict[str, float]]]()
    for round_ in range(ROUNDS):
        for name, case in CASES.items():
            for weak in (False, True):
                for count in counts:
                    rows.setdefault((name, weak, count), []).append(group(case, count, weak))
        print(f"round {round_ + 1} of {ROUNDS}", flush=True)
    lines = [
        {"case": name, "scaling": "weak" if weak else "strong", "ranks": count}
        | {key: statistics.median(one[key] for one in several) for key in several[0]}
        for (name, weak, count), several in rows.items()
    ]
    return {"rows": lines, "rounds": ROUNDS, "updates": UPDATES, "batch": BATCH}


# ---- one block of a large network ------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A block of a language model of seven thousand million parameters: the shapes of Llama 2 7B."""

    def __init__(self, width: int = 4096, heads: int = 32, hidden: int = 11008) -> None:
        super().__init__()
        self.heads = heads
        self.norm_one, self.norm_two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm_one(x)
        q, k, v = (layer(read).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        read = self.norm_two(x)
        return x + self.down(F.silu(self.gate(read)) * self.up(read))


def vgg16() -> nn.Module:
    """With BatchNorm, for 224 x 224; the pooling in front of its classifier lets it read smaller images too."""
    layers, channels = list[nn.Module](), 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(4096, 1000))


# depth: how often the block that is measured is there. rest: parameters beside the blocks. examples: of one GPU in an
# update. macs: of one example in one block, with the products of attention.
BLOCKS: dict[str, dict[str, Any]] = {
    "VGG-16": {"depth": 1, "rest": 0, "examples": 64, "unit": "images", "inputs": (2, 3, 64, 64)},
    "ViT-B/16": {
        "depth": 12, "rest": 768 * 16 * 16 * 3 + 198 * 768 + 769 * 1000, "examples": 64, "unit": "images",
        "inputs": (2, 197, 768), "places": 197, "width": 768,
    },
    "7B language model": {
        "depth": 32, "rest": 2 * 32000 * 4096, "examples": 4, "unit": "texts of 2,048 tokens",
        "inputs": (2, 16, 4096), "places": 2048, "width": 4096,
    },
}  # fmt: skip


def block(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "VGG-16":
        return vgg16()
    if name == "ViT-B/16":
        return nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
    return Decoder()


def macs_of(name: str, model: nn.Module) -> int:
    """Of one example in the block."""
    about = BLOCKS[name]
    if name == "VGG-16":
        return sum(read * written * taps * places for read, written, taps, places in seen_layers(model, (3, 224, 224)))
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    return int(about["places"] * weights + 2 * about["places"] ** 2 * about["width"])


def blocks() -> dict[str, Any]:
    """One rank, one thread: bytes of an update, and the processor time of a plain one and of one of the search."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        joined(Path(folder), 1, 0)
        for name, about in BLOCKS.items():
            model = block(name)
            macs = macs_of(name, model)
            x = torch.randn(about["inputs"], generator=torch.Generator().manual_seed(1))
            shaping = shaping_of(model, x, "data")
            assert shaping.ranks is not None

            def closure(inputs: Tensor, network: nn.Module = model) -> Tensor:
                loss = network(inputs).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            alike = type(shaping.inner)(model.parameters(), **shaping.inner.defaults)

            def plain(inner: Any = alike, run: Any = closure, inputs: Tensor = x) -> None:
                inner.zero_grad()
                run(inputs)
                inner.step()

            times: dict[str, list[float]] = {"plain": [], "search": [], "messages": []}
            sent = 0
            for _ in range(ROUNDS + 1):
                for which in ("plain", "search"):
                    began, before = time.process_time(), shaping.ranks.sent
                    plain() if which == "plain" else shaping.step(closure, x)
                    times[which].append(time.process_time() - began)
                    sent = shaping.ranks.sent - before or sent
                began = time.process_time()
                shaping.ranks.add_up(list(model.parameters()), 1.0)
                times["messages"].append(time.process_time() - began)
            rows.append(
                {"network": name, "parameters": sum(p.numel() for p in model.parameters()), "macs": macs}
                | {"gates": shaping.search.space.d, "bytes": sent, "least": least(model, shaping)}
                | {"norms": sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())}
                | {f"{key}_seconds": statistics.median(value[1:]) for key, value in times.items()}
            )
            print(json.dumps(rows[-1]), flush=True)
        dist.destroy_process_group()
    return {"rows": rows, "rounds": ROUNDS}


# ---- tables ----------------------------------------------------------------------------------------------------------


def ranks_table(told: dict[str, Any]) -> str:
    lines = ["| case | scaling | ranks | ms an update | processor ms of a rank | KB sent by a rank | least KB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in told["rows"]:
        times = f"{1e3 * row['seconds']:.1f} | {1e3 * row['processor']:.1f}"
        sizes = f"{row['bytes'] / 1e3:,.1f} | {row['least'] / 1e3:,.1f}"
        lines.append(f"| {row['case']} | {row['scaling']} | {row['ranks']} | {times} | {sizes} |")
    about = told["hardware"]
    load = f"which others used too (load average of 15 minutes: {told['load'][2]:.0f})"
    where = f"{about['cpu']}, {about['cores']} cores, {load}, torch {told['versions']['torch']}"
    return "\n".join(
        [f"Medians of {told['rounds']} interleaved rounds of {told['updates']} updates; {where}.", "", *lines]
    )


def scale_table(told: dict[str, Any]) -> str:
    lines = ["| network | parameters | gates | computing, ms | sent, MB | GPUs | sending, ms | computing, share |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in told["rows"]:
        about = BLOCKS[row["network"]]
        parameters = row["parameters"] * about["depth"] + about["rest"]
        gates, extra = row["gates"] * about["depth"], (row["bytes"] - 4 * row["parameters"]) * about["depth"]
        sent = 4 * parameters + extra
        computing = 6 * row["macs"] * about["depth"] * about["examples"] / FLOPS
        for gpus in GPUS:
            speed = INSIDE if gpus <= 8 else BETWEEN
            messages = -(-parameters // (1 << 24)) + 2 + 3 * row["norms"]
            sending = 2 * (gpus - 1) / gpus * sent / speed + messages * LATENCY
            first = (
                row["network"],
                f"{parameters / 1e6:,.0f} M",
                f"{gates:,}",
                f"{1e3 * computing:,.1f}",
                f"{sent / 1e6:,.0f}",
            )
            cells = first if gpus == GPUS[0] else ("",) * len(first)
            share = computing / (computing + sending)
            lines.append(f"| {' | '.join(cells)} | {gpus:,} | {1e3 * sending:,.1f} | {share:.0%} |")
    return "\n".join(lines)


def overhead_table(told: dict[str, Any]) -> str:
    lines = [
        "| measured block | bytes sent | least | plain update, s | update of the search, s | of that, adding up, s |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row in told["rows"]:
        times = " | ".join(f"{row[f'{key}_seconds']:.2f}" for key in ("plain", "search", "messages"))
        lines.append(f"| {row['network']} | {row['bytes']:,} | {row['least']:,} | {times} |")
    about = told["hardware"]
    where = f"one thread of {about['cpu']}, torch {told['versions']['torch']}"
    return "\n".join([f"Processor seconds, medians of {told['rounds']} interleaved rounds, {where}.", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ranks", "blocks", "tables"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--into", type=Path, default=Path("docs/scale.md"))
    parser.add_argument("--results", type=Path, default=Path("results/scale"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "tables":
        gloo, large = (json.loads((given.results / name).read_text()) for name in ("gloo.json", "blocks.json"))
        both = f"{overhead_table(large)}\n\n{scale_table(large)}"
        put_between(given.into, [(MARKS["ranks"], ranks_table(gloo)), (MARKS["scale"], both)])
        return
    told = ranks(given.counts) if given.what == "ranks" else blocks()
    command = f"python benchmarks/scale.py {given.what} --out {given.out}"
    told |= {
        "command": command,
        "load": os.getloadavg(),
        "versions": versions(),
        "hardware": hardware(torch.device("cpu")),
    }
    if given.out is None:
        print(json.dumps(told))
    else:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
