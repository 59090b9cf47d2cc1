"""What gates cost in training and what cutting saves afterwards: prints one JSON object.

Masked against plain training steps, compact against uncut inference, and the time `attach` takes. Every figure is a
median of interleaved repeats: the rivals take turns within one run, so that a slow minute of the machine hits both.
With one thread on the CPU the clock is the processor time of this process, which other programs do not stretch.

    python benchmarks/gates.py                      # CPU, everything
    python benchmarks/gates.py --device cuda --parts step
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the networks are those of the proving ground

from tests.zoo.configured import configured
from tests.zoo.convolutional import mlp, resnet
from tests.zoo.sequences import GPT

import espalier


def subjects(device: torch.device) -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]]:
    """Name -> (factory, inputs of a batch size)."""
    return {
        "MLP 784-784-784-784-10": (
            lambda: mlp((784, 784, 784, 784, 10)).to(device),
            lambda batch: torch.randn(batch, 784, device=device),
        ),
        "ResNet-20": (lambda: resnet().to(device), lambda batch: torch.randn(batch, 3, 32, 32, device=device)),
        "small GPT": (
            lambda: GPT(vocabulary=256, width=192, heads=6, layers=4, context=64).to(device),
            lambda batch: torch.randint(0, 256, (batch, 64), device=device),
        ),
    }


def clock(device: torch.device) -> Callable[[], float]:
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    now = clock(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = now()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now() - start


def interleaved(actions: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each action, the actions taking turns; the order within a turn alternates."""
    for action in actions.values():  # warm-up: compilation, caches, allocator
        for _ in range(3):
            action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats):
        for name in list(actions) if turn % 2 else reversed(list(actions)):
            times[name].append(seconds(actions[name], device))
    return times


def summary(times: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(times, n=4)
    return {"median_ms": 1e3 * quarters[1], "q25_ms": 1e3 * quarters[0], "q75_ms": 1e3 * quarters[2]}


def trainer(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """One training step: forward, loss, backward, SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = forward(x)
        targets = x if output.ndim == 3 else torch.zeros(len(x), dtype=torch.long, device=x.device)
        F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def random_masks(gated: Any, share: float, count: int, device: torch.device) -> list[Tensor]:
    """Masks with that share of every group open, canonical. Shape each: (d,)."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(count):
        mask = torch.zeros(gated.d)
        for group, where in gated.space.bits:
            order = torch.randperm(group.size, generator=generator)
            mask[where][order[: max(group.least, round(share * group.size))]] = 1.0
        drawn.append(gated.canonical(mask).to(device))
    return drawn


def measure_steps(repeats: int, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Masked against plain training step. Every masked step takes another mask, as training does."""
    rows = []
    for name, (factory, inputs) in subjects(device).items():
        x = inputs(batch)
        for how in ("eager", "compiled"):
            torch._dynamo.reset()
            plain, model = factory(), factory()
            gated = espalier.attach(model, inputs(2))
            masks = random_masks(gated, 0.5, 16, device)
            run_plain = torch.compile(plain) if how == "compiled" else plain
            run_masked = torch.compile(model) if how == "compiled" else model
            step = trainer(model, run_masked, x)
            turn = 0

            def masked_step(gated: Any = gated, masks: list[Tensor] = masks, step: Callable[[], None] = step) -> None:
                nonlocal turn
                turn += 1
                with gated.masked(masks[turn % len(masks)]):
                    step()

            times = interleaved({"plain": trainer(plain, run_plain, x), "masked": masked_step}, repeats, device)
            ratios = [m / p for m, p in zip(times["masked"], times["plain"])]
            rows.append(
                {
                    "model": name,
                    "mode": how,
                    "batch": batch,
                    "gates": gated.d,
                    "plain": summary(times["plain"]),
                    "masked": summary(times["masked"]),
                    "ratio": statistics.median(ratios),
                }
            )
            print(f"step  {name:24} {how:9} {rows[-1]['ratio']:.3f}", file=sys.stderr)
    return rows


def measure_compact(repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Uncut against compact inference, speed-up beside the ratio of MACs."""
    rows = []
    for name, (factory, inputs) in subjects(device).items():
        model = factory().eval()
        uncut = copy.deepcopy(model)  # timed without the handle's hooks: the rival is the user's own model
        gated = espalier.attach(model, inputs(2))
        macs = gated.cost("macs")
        small = {share: gated.compact(random_masks(gated, share, 1, device)[0]).eval() for share in (0.25, 0.5, 0.75)}
        kept = {share: float(macs(random_masks(gated, share, 1, device)[0])) for share in small}
        full = float(macs(torch.ones(gated.d)))
        for batch in (1, 64):
            x = inputs(batch)
            models = {"uncut": uncut} | {str(share): module for share, module in small.items()}
            with torch.inference_mode():
                actions = {key: (lambda module=module, x=x: module(x)) for key, module in models.items()}
                times = interleaved(actions, repeats, device)
            for share in small:
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "share_of_gates": share,
                        "share_of_macs": kept[share] / full,
                        "macs_ratio": full / kept[share],
                        "speed_up": statistics.median(u / c for u, c in zip(times["uncut"], times[str(share)])),
                        "uncut": summary(times["uncut"]),
                        "compact": summary(times[str(share)]),
                    }
                )
                row = rows[-1]
                print(
                    f"compact {name:22} batch {batch:2} gates {share:.2f} "
                    f"macs /{row['macs_ratio']:.2f} time /{row['speed_up']:.2f}",
                    file=sys.stderr,
                )
    return rows


def measure_attach(device: torch.device, repeats: int = 3) -> list[dict[str, Any]]:
    """How long `attach` takes on large models, with and without the numerical check."""
    large = {
        "ResNet-50": (
            configured("ResNetForImageClassification", "ResNetConfig"),
            lambda: {"pixel_values": torch.randn(2, 3, 64, 64, device=device)},
        ),
        "GPT of 124M parameters": (
            lambda: GPT(vocabulary=50257, width=768, heads=12, layers=12, context=1024),
            lambda: torch.randint(0, 50257, (1, 16), device=device),
        ),
    }
    rows = []
    for name, (factory, inputs) in large.items():
        model = factory().to(device)
        for check in (True, False):
            times = []
            for _ in range(repeats):
                start = clock(device)()
                gated = espalier.attach(model, inputs(), check=check)
                times.append(clock(device)() - start)
                gates = gated.d
                gated.detach()
            rows.append(
                {
                    "model": name,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "gates": gates,
                    "check": check,
                    "median_s": statistics.median(times),
                }
            )
            print(f"attach {name} check={check} {rows[-1]['median_s']:.2f} s", file=sys.stderr)
    return rows


def hardware(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "clock": clock(device).__name__,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--parts", nargs="+", default=["step", "compact", "attach"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    found: dict[str, Any] = {"benchmark": "gates", "repeats": options.repeats, **hardware(device)}
    if "step" in options.parts:
        found["training_step"] = measure_steps(options.repeats, options.batch, device)
    if "compact" in options.parts:
        found["compact_inference"] = measure_compact(options.repeats, device)
    if "attach" in options.parts:
        found["attach"] = measure_attach(device)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
