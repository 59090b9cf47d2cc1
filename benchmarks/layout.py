"""What gathers cost: compact networks whose readers keep different channels, beside the same shapes without a gather.

    python benchmarks/layout.py [--networks densenet40 preact20] [--batches 1 64] [--out results/ship-layout]
    python benchmarks/layout.py --device cuda --batches 1 256
    python benchmarks/layout.py --table docs/performance.md

Masks are drawn gate by gate until the network has at most this share of the MACs; the weights are random. "gathered" is
the same network with every selection a gather in the model's own order, as it was before channels were put in order.
"torch" runs the compact network itself, "python" and "onnxruntime" the files that ship. Times as in
``benchmarks/ship.py``; on a GPU each network is one CUDA graph, and one process at a time is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from compact import alone, graphed, ungated
from espalier.compact.apply import apply_plan
from espalier.compact.exported import exported, onnx_file, plain_outputs
from espalier.compact.layers import Select
from espalier.files import write
from espalier.gates import latency
from espalier.gates.gated import Gated
from espalier.gates.masking import strip
from espalier.models import DenseNet
from espalier.report.tables import put_between
from espalier.ship.delivery import FORMATS
from espalier.ship.standalone import PYTHON, WEIGHTS, _loaded
from ship import machine, marks

SHARES = (0.95, 0.9, 0.75, 0.5, 0.25)


class PreActivation(nn.Module):
    """A residual network of three stages whose every reader has a gate for each channel, or block of channels, of the
    stream."""

    def __init__(self, block: int = 1, blocks: int = 3, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        before = widths[0]
        for width in widths:
            stage = nn.Module()
            stage.enter = nn.Conv2d(before, width, 1, stride=1 if before == width else 2, bias=False)
            stage.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
            stage.gates = nn.ModuleList(espalier.Gate((block,) * (width // block)) for _ in range(blocks))
            stage.ones = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
            stage.twos = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
            self.stages.append(stage)
            before = width
        self.head = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage.enter(x)
            for norm, gate, one, two in zip(stage.norms, stage.gates, stage.ones, stage.twos):
                x = x + two(F.relu(one(gate(F.relu(norm(x))))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "densenet40": lambda: DenseNet(40, 12),
    "preact20": PreActivation,
    "preact20-16": lambda: PreActivation(16),
}


class First(nn.Module):
    """As many slices as a selection takes, but the first ones, in one chunk of memory."""

    def __init__(self, select: Select) -> None:
        super().__init__()
        self.dim, self.count = select.dim, len(select.index)

    def forward(self, x: Tensor) -> Tensor:
        return x.narrow(self.dim, 0, self.count).contiguous()


def exchanged(model: nn.Module, made: Callable[[Select], nn.Module]) -> nn.Module:
    """A copy with something else in the place of every selection."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for key, child in list(module._modules.items()):
            if type(child) is Select:
                module._modules[key] = made(child)
    return model.eval()


def variants(gated: Gated, mask: Tensor) -> dict[str, nn.Module]:
    ordered = gated.compact(mask).eval()
    segments, gated.structure.segments = gated.structure.segments, None
    gathered = strip(apply_plan(gated.model, gated.plan(mask)))
    gated.structure.segments = segments

    def gather(select: Select) -> Select:
        select.run = None
        return select

    return {
        "compact": ordered,
        "gathered": exchanged(gathered, gather),
        "no gather": exchanged(ordered, First),
    }


def drawn(gated: Gated, share: float) -> Tensor:
    """A mask drawn at random: the first of a row of fewer and fewer gates that costs no more than this share of MACs,
    or the last where none does."""
    cost = gated.cost("macs")
    most = share * float(cost(torch.ones(gated.d)))
    chance = torch.rand(gated.d, generator=torch.Generator().manual_seed(0))
    for keep in torch.linspace(1.0, 0.05, 96).tolist():
        mask = gated.canonical((chance <= keep).float())
        if float(cost(mask)) <= most:
            break
    return mask


def prepared(model: nn.Module, runtime: str, device: str) -> Callable[[Tensor], Callable[[], object]]:
    """From inputs to what runs the model on them."""
    if device != "cpu":
        model = copy.deepcopy(model).to(device)

        def graph(x: Tensor) -> Callable[[], object]:
            replay = graphed(model, x)
            return lambda: (replay(), torch.cuda.synchronize())

        return graph
    if runtime == "onnxruntime":
        import onnxruntime

        file = onnx_file(exported(plain_outputs(model), (torch.randn(3, 3, 32, 32),), {}), ["x"], batch="batch")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return lambda x: partial(session.run, None, {"x": x.numpy()})
    if runtime == "python":
        with tempfile.TemporaryDirectory() as folder:
            FORMATS["python"](model, torch.randn(3, 3, 32, 32), Path(folder))
            model = _loaded(Path(folder) / PYTHON, Path(folder) / WEIGHTS)
    return lambda x: latency.prepared("torch", model, (x,), {})


def benchmark(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = NETWORKS[name]().eval()
    gated = espalier.attach(model, torch.randn(2, 3, 32, 32))
    full = float(gated.cost("macs")(torch.ones(gated.d)))
    rows = []
    masks = [drawn(gated, share) for share in SHARES]
    for mask in {tuple(mask.tolist()): mask for mask in masks}.values():  # the last may be the same
        models = {"whole": ungated(copy.deepcopy(model)), **variants(gated, mask)}
        selections = [m for m in models["compact"].modules() if isinstance(m, Select)]
        row: dict[str, Any] = {"network": name, "macs": round(float(gated.cost("macs")(mask)) / full, 4)}
        row |= {"selections": len(selections), "gathers": sum(m.run is None for m in selections), "milliseconds": {}}
        on_gpu = given.device != "cpu"
        for runtime in ["graph"] if on_gpu else given.runtimes:
            with alone() if on_gpu else nullcontext():
                ready = [prepared(one, runtime, given.device) for one in models.values()]
                for batch in given.batches:
                    x = torch.randn(batch, 3, 32, 32, device=given.device)
                    times = latency.timed([one(x) for one in ready], given.rounds, seconds=40, wait=on_gpu)
                    key = f"{runtime}, batch {batch}"
                    row["milliseconds"][key] = {label: round(t, 4) for label, t in zip(models, times)}
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def table(folder: Path, device: str) -> str:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{device}-*.json"))]
    keys = list(dict.fromkeys(key for told in files for key in told["rows"][0]["milliseconds"]))
    lines = ["| | MACs | selections, of them gathers | " + " | ".join(keys) + " |", "|" + "---|" * (3 + len(keys))]
    for row in (row for told in files for row in told["rows"]):
        cells = []
        files = any(key.startswith("python") for key in row["milliseconds"])
        for key in keys:
            ms = row["milliseconds"].get(key, {})
            shown = {one: f"{ms[one] / ms['compact']:.2f}" for one in ("whole", "no gather", "gathered") if ms}
            if files and ms and not key.startswith("torch"):  # a file drops what "no gather" does not read: no rival
                shown["no gather"] = "-"
            cells.append("; ".join(shown.values()) or "-")
        head = f"| {row['network']} | {row['macs']:.1%} | {row['selections']}, {row['gathers']} | "
        lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--runtimes", nargs="+", default=["torch", "python", "onnxruntime"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("results/ship-layout"))
    parser.add_argument("--table", type=Path, help="The page whose generated part is to be replaced.")
    given = parser.parse_args()
    device = given.device.partition(":")[0]
    if given.table is not None:
        put_between(given.table, [(marks("layout", device), table(given.out, device))])
        return
    torch.set_num_threads(1)
    for name in given.networks:
        told = {**machine("benchmarks/layout.py", given.device), "rounds": given.rounds, "rows": benchmark(name, given)}
        write(given.out / f"{device}-{name}.json", json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
