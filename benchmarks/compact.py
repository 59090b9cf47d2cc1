"""What cutting a found DenseNet saves: exactness, size and time of the compact network; prints one JSON object.

Masks come from the run files of a connection-selection study, or are drawn at random where there are none. The weights
are random: time and exactness do not depend on them. The whole network is timed without gates. Every time is a median
of interleaved repeats: the whole and the compact network take turns. On a GPU both are timed as they are and as one
CUDA graph, which takes the launches away, and by one process at a time. With one thread on the CPU the clock is the
processor time of this process, which other programs do not stretch.

    python benchmarks/compact.py --device cpu
    python benchmarks/compact.py --device cuda --runs results/connection-selection
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import espalier
from espalier.gates.gated import Gated
from espalier.models import DenseNet
from espalier.picture.describe import bits
from espalier.report import read
from espalier.search.recorded import WARM, Recorded
from espalier.study.study_batches import DenseNetGraph
from espalier.train.fingerprint import versions
from espalier.train.run_directory import hardware

SHARES = (0.16, 0.24, 0.42, 0.675, 0.80)
Action = Callable[[], Any]


def network(depth: int, growth: int) -> DenseNet:
    """Random weights and random statistics: where every channel differs, a wrong one is noticed."""
    torch.manual_seed(0)
    model = DenseNet(depth, growth)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


def ungated(model: nn.Module) -> nn.Module:
    """The whole network as one trains it who does not search: an open gate would still multiply by ones."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, espalier.Gate):
                setattr(module, name, nn.Identity())
    return model


def found(folder: Path, depth: int, growth: int) -> Iterator[tuple[str, Tensor]]:
    """Name and mask of every run of this network under the folder."""
    packed = (folder / "runs.jsonl").is_file()
    for run in read(folder).runs if packed or any(folder.glob("runs/*/*/*.json")) else ():
        if (run.settings.get("depth"), run.settings.get("growth")) == (depth, growth):
            yield (
                run.name,
                torch.tensor(bits(run.result["mask"], DenseNetGraph((depth - 4) // 3).d), dtype=torch.float32),
            )


def drawn(gated: Gated, depth: int) -> Iterator[tuple[str, Tensor]]:
    prices = gated.cost("weights").gradient(torch.zeros(gated.d))
    for share in SHARES:
        yield f"random, {share:.1%} of the weights", DenseNetGraph((depth - 4) // 3).draw(share, prices, 0)[0]


def exactness(gated: Gated, mask: Tensor, side: int) -> dict[str, float]:
    """The largest difference between masked and compact outputs over the largest output, float64, both modes."""
    x = torch.randn(4, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    small, differences = gated.compact(mask), dict[str, float]()
    for mode in ("eval", "train"):
        gated.model.train(mode == "train")
        small.train(mode == "train")
        with torch.no_grad(), gated.masked(gated.canonical(mask)):
            masked = gated.model(x)
            compact = small(x)
        differences[mode] = float((masked - compact).abs().max() / masked.abs().max())
    gated.model.eval()
    return differences


def counted(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Weights and MACs of convolutions and linear layers, from the tensors and from what a forward pass makes."""
    weights, macs, hooks = 0, 0, []

    def count(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        nonlocal macs
        positions = out.numel() // (out.shape[0] * out.shape[1])
        macs += module.weight.numel() * positions

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weights += module.weight.numel()
            hooks.append(module.register_forward_hook(count))
    with torch.no_grad():
        model(x[:1])
    for hook in hooks:
        hook.remove()
    return weights, macs


def clock(device: torch.device) -> Callable[[], float]:
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def seconds(action: Action, device: torch.device) -> float:
    now = clock(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = now()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now() - start


def milliseconds(actions: dict[str, Action], repeats: int, device: torch.device) -> dict[str, float]:
    """Medians of each action, the actions taking turns after a warm-up."""
    for action in actions.values():
        for _ in range(3):
            action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats):
        for name in list(actions) if turn % 2 else reversed(list(actions)):
            times[name].append(1e3 * seconds(actions[name], device))
    return {name: round(statistics.median(t), 4) for name, t in times.items()}


def graphed(model: nn.Module, x: Tensor) -> Action:
    """What runs it as one CUDA graph. It holds the model and the input too: the graph reads their memory."""
    recorded = Recorded()
    with torch.no_grad():
        for _ in range(WARM + 1):
            recorded(model, x)
    graph, held = recorded.graph, (recorded, model)
    if graph is None:
        raise RuntimeError(f"not recorded as a CUDA graph: {recorded.trouble}")

    def replay() -> Any:
        graph.replay()
        return held

    return replay


@contextmanager
def alone(*, timing: bool = True) -> Iterator[None]:
    """The GPU for one process at a time, of all benchmarks that time networks there: others get theirs ready then, and
    those who need it for that (``timing=False``) do so together."""
    with open(Path(tempfile.gettempdir()) / "espalier-timing.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if timing else fcntl.LOCK_SH)
        yield


def timed(full: nn.Module, small: nn.Module, x: Tensor, repeats: int) -> dict[str, Any]:
    """ms of the whole and of the compact network, and how many times faster that is."""
    ways: dict[str, dict[str, Action]] = {"eager": {"full": lambda: full(x), "compact": lambda: small(x)}}
    if x.is_cuda:
        ways["graph"] = {"full": graphed(full, x), "compact": graphed(small, x)}
    result = dict[str, Any]()
    with torch.no_grad():
        for way, actions in ways.items():
            took = milliseconds(actions, repeats, x.device)
            result[way] = {"full_ms": took["full"], "compact_ms": took["compact"]}
            result[way]["speed_up"] = round(took["full"] / took["compact"], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("results/connection-selection"))
    parser.add_argument("--batches", default="1,128", help="images at once")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--depth", type=int, default=40)
    parser.add_argument("--growth", type=int, default=12)
    parser.add_argument("--side", type=int, default=32, help="height and width of the images")
    parser.add_argument("--only", default="", help="runs whose name has this in it, such as 60_epochs/search/")
    parser.add_argument("--most", type=int, default=0, help="at most so many masks; 0: all")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_float32_matmul_precision("high")  # tf32 on a GPU, for both
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    example = torch.zeros(1, 3, given.side, given.side, dtype=torch.float64)
    gated = espalier.attach(network(given.depth, given.growth).double(), example, check=False)
    full = ungated(network(given.depth, given.growth))
    masks = [one for one in found(given.runs, given.depth, given.growth) if given.only in one[0]]
    if given.only and not masks:
        parser.error(f"no run of this network under {given.runs} has {given.only!r} in its name")
    source = f"{len(masks)} run files" if masks else "random masks: there are no run files"
    rows = list[dict[str, Any]]()
    whole = counted(network(given.depth, given.growth), torch.zeros(1, 3, given.side, given.side))
    for name, mask in (masks or list(drawn(gated, given.depth)))[: given.most or None]:
        print(name, file=sys.stderr)
        canonical = gated.canonical(mask)
        row: dict[str, Any] = {"mask": name, "connections": int(canonical.sum())}
        rows.append(row)
        if not canonical.any():
            row["note"] = "no path from the image to the classes: there is no compact network to time"
            continue
        small = gated.compact(mask)
        sizes = counted(small, example)
        costs = tuple(int(gated.cost(kind)(canonical)) for kind in ("weights", "macs"))
        row |= {"difference_float64": exactness(gated, mask, given.side), "counted_as_costed": sizes == costs}
        row |= {"weight_share": round(sizes[0] / whole[0], 4), "mac_share": round(sizes[1] / whole[1], 4)}
        with alone() if device.type == "cuda" else nullcontext():
            full, small = full.to(device), small.float().eval().to(device)
            for batch in map(int, given.batches.split(",")):
                x = torch.randn(batch, 3, given.side, given.side, device=device)
                row[f"batch_{batch}"] = timed(full, small, x, given.repeats)
    told = {"benchmark": "compact", "network": f"DenseNet, depth {given.depth}, growth {given.growth}", "masks": source}
    told |= {"shares": "of the whole network's weights and MACs, its stem included", "repeats": given.repeats}
    told |= {"command": shlex.join(["python", "benchmarks/compact.py", *sys.argv[1:]]), "clock": clock(device).__name__}
    told |= {"runs": rows, "hardware": hardware(device), "versions": versions()}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
