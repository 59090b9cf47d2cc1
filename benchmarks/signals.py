"""How well one update of theta points: each signal against the exact natural gradient, by enumeration.

Digits, a network 64-6-6-10 with a gate on each hidden unit: 12 gates, 4,096 masks. Weights are trained under masks of
the theta in question; then theta and weights stand still, and updates of 2 masks and 32 examples each are compared with
the natural gradient of the expected loss of all training images. Signals of the library are computed by it: a Search
at that theta, told ten updates with a learning rate so small that theta stays. Writes one JSON file; the table and the
figure of docs/signal.md are made of it by ``signals_table.py``.

    python benchmarks/signals.py [--out results/signal/digits.json] [--updates 1000] [--weights 5]
    python benchmarks/signals.py --units 4,4,4,4,4,4 --out results/signal/blocks.json

units: how many each of a layer's six gates opens; then sizes made of the slopes by single units are measured, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import espalier
from espalier import Search
from espalier.data import load

PIXELS, GATES, CLASSES, D = 64, 6, 10, 12  # GATES: of each of two layers
EXAMPLES, SAMPLES, SPAN = 32, 2, 10  # of one update; SPAN: the updates that a run of the search averages
LENGTHS = (100, 1500)  # updates of the weights
RATE = 1e-6  # of theta in the searches: it stands still but for the sixth digit, and its differences keep ten
MIXED = (0.49, 0.12, 0.86, 0.33, 0.71, 0.95, 0.22, 0.64, 0.78, 0.4, 0.9, 0.57)
THETAS = {"0.99": 0.99, "0.95": 0.95, "0.8": 0.8, "0.5": 0.5, "0.3": 0.3, "mixed": MIXED}
MASKS = torch.tensor(list(itertools.product([0.0, 1.0], repeat=D)), dtype=torch.float64)  # (4096, 12)

Weights = tuple[Tensor, ...]  # W1 b1 W2 b2 W3 b3, each with any leading dimensions
SINGLE = torch.arange(D)  # the gate of each unit of both layers, where each has its own


def gates_of(units: Sequence[int]) -> Tensor:
    """The gate of each unit of both layers, of how many units each gate of a layer opens."""
    return SINGLE.repeat_interleave(torch.tensor([*units, *units]))


def expectations(name: str) -> Tensor:
    """theta ``(12)`` by its name."""
    return torch.tensor(THETAS[name], dtype=torch.float64).expand(D).clone()


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.mT + bias.unsqueeze(-2)


def behind(weights: Weights, hidden: Tensor, masks: Tensor) -> Tensor:
    """Logits. hidden: the first layer's outputs ``(*, examples, width)``; masks: by units, ``(*, examples or 1, 2 x
    width)``."""
    width = hidden.shape[-1]
    h = torch.relu(layer(hidden * masks[..., :width], *weights[2:4]))
    return layer(h * masks[..., width:], *weights[4:])


def single_losses(logits: Tensor, labels: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.reshape(-1, CLASSES), labels.expand(logits.shape[:-1]).reshape(-1), reduction="none")
    return flat.reshape(logits.shape[:-1])


def trained(x: Tensor, y: Tensor, thetas: Tensor, seeds: int, gates: Tensor = SINGLE) -> dict[int, Weights]:
    """Weights after each of LENGTHS updates, for each theta ``(T, 12)`` and seed: every tensor ``(T, seeds, ..)``."""
    width = len(gates) // 2
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(seeds, *shape, generator=generator, dtype=torch.float64) * math.sqrt(2 / shape[-1])
        return drawn.expand(len(thetas), *drawn.shape).clone().requires_grad_()

    def zeros(n: int) -> Tensor:
        return torch.zeros(len(thetas), seeds, n, dtype=torch.float64, requires_grad=True)

    weights = (
        normal(width, PIXELS),
        zeros(width),
        normal(width, width),
        zeros(width),
        normal(CLASSES, width),
        zeros(10),
    )
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    snapshots: dict[int, Weights] = {}
    for update in range(max(LENGTHS)):
        rows = torch.randint(len(x), (seeds, EXAMPLES), generator=generator)
        uniform = torch.rand(seeds, SAMPLES, 1, D, generator=generator, dtype=torch.float64)
        masks = (uniform < thetas[:, None, None, None]).double()  # (T, seeds, samples, 1, d)
        hidden = torch.relu(layer(x[rows], *weights[:2])).unsqueeze(2)
        inner = tuple(w.unsqueeze(2) for w in weights)
        losses = single_losses(behind(inner, hidden, masks[..., gates]), y[rows].unsqueeze(1))
        optimizer.zero_grad()
        losses.mean((-1, -2)).sum().backward()
        optimizer.step()
        if update + 1 in LENGTHS:
            snapshots[update + 1] = tuple(w.detach().clone() for w in weights)
    return snapshots


@torch.no_grad()
def exact_gradient(weights: Weights, hidden: Tensor, y: Tensor, theta: Tensor, gates: Tensor = SINGLE) -> Tensor:
    """The natural gradient of minus the expected loss ``(12)``: -sum over all masks of p(m) f(m) (m - theta)."""
    parts = [single_losses(behind(weights, hidden, part[:, None, gates]), y).mean(-1) for part in MASKS.split(64)]
    p = (theta * MASKS + (1 - theta) * (1 - MASKS)).prod(-1)
    return -((p * torch.cat(parts)).unsqueeze(-1) * (MASKS - theta)).sum(0)


def told(signal: str, theta: Tensor, masks: Tensor, losses: Tensor, *slopes: Tensor) -> Tensor:
    """The steps ``(SPAN, runs, 12)`` of theta in searches that are told SPAN updates each, divided by their rate."""
    search = Search(D, initial=theta, margin=0.0, signal=signal, learning_rate=RATE, batch=masks.shape[1])
    steps = []
    for update in zip(masks, losses, *slopes):
        before = search.theta.clone()
        search.tell(*update)
        steps.append((search.theta - before) / RATE)
    return torch.stack(steps)


def shuffled(like: Tensor, parts: int, generator: torch.Generator) -> Tensor:
    """Places ``(SPAN, runs, 1, 12)``: an order of the gates for each update, within each of so many equal parts."""
    keys = torch.rand(*like.shape[:2], 1, parts, D // parts, generator=generator, dtype=torch.float64)
    return (keys.argsort(-1) + torch.arange(parts).unsqueeze(-1) * (D // parts)).flatten(-2)


def directions(
    weights: Weights, hidden: Tensor, y: Tensor, theta: Tensor, runs: int, seed: int, gates: Tensor = SINGLE
) -> Iterator[tuple[str, Tensor]]:
    """Name of each signal and its steps ``(SPAN, runs, 12)``."""
    generator = torch.Generator().manual_seed(seed)
    source = Search(D, initial=theta, margin=0.0, batch=(SPAN, runs), seed=seed)
    noise = source.noise()
    masks = source.draw(noise)  # (SPAN, runs, 2, 12)
    natural = theta * (1 - theta)
    rows = torch.randint(len(hidden), (SPAN, runs, SAMPLES, EXAMPLES), generator=generator)
    shared = rows[:, :, :1].expand(rows.shape)

    def losses_of(masks: Tensor) -> Tensor:
        by_unit = masks.double()[..., gates].unsqueeze(-2)
        return single_losses(behind(weights, hidden[shared], by_unit), y[shared]).mean(-1)

    def by_gate(units: Tensor) -> Tensor:  # (.., 2 x width) added up
        return units if len(gates) == D else torch.zeros(*units.shape[:-1], D).double().index_add(-1, gates, units)

    losses = losses_of(masks)
    yield "ranked", told("ranked", theta, masks, losses)
    noise[..., 1, :] = 1 - noise[..., 0, :]
    opposite = source.draw(noise)
    yield "antithetic", told("ranked", theta, opposite, losses_of(opposite))

    apart = (masks[..., 0, :] - masks[..., 1, :]).double()
    gain = losses[..., 1] - losses[..., 0]
    yield "raw", gain.unsqueeze(-1) * apart / 2
    for form, read in (("", shared), (", own", rows)):
        each = masks.double()[..., gates].unsqueeze(-2).repeat(1, 1, 1, EXAMPLES, 1).requires_grad_()
        single = single_losses(behind(weights, hidden[read], each), y[read])
        (units,) = torch.autograd.grad(single.sum(), each)
        examples = by_gate(units)
        g, square = examples.mean(-2), examples.square().mean(-2)  # (SPAN, runs, 2, 12)
        s, m, loss = square.sqrt(), masks.double(), single.detach().mean(-1)
        if not form:
            linear = g.mean(-2)
            # Of the other updates: independent of these masks, so that the estimate stays unbiased.
            independent = (linear.sum(0) - linear) / (SPAN - 1)
            for name, slope in (("varied", independent), ("varied, same masks", linear)):
                rest = gain + (slope * apart).sum(-1)
                yield name, rest.unsqueeze(-1) * apart / 2 - natural * slope
        yield f"first-order{form}", told("first-order", theta, masks, loss, g)
        yield f"probe{form}", natural * (m * EXAMPLES * g.square() / 2 - g).mean(-2)
        yield f"fisher{form}", natural * (m * square / 2 - g).mean(-2)
        yield f"slopes, mean{form}", told("slopes", theta, masks, loss, g)
        yield f"slopes{form}", told("slopes", theta, masks, loss, g, s)
        if not form:
            continue
        if len(gates) > D:  # sizes of the mean slopes by single units, and of those of single examples
            mean, one = units.mean(-2), units.square().mean(-2)
            yield "sum, own", told("slopes", theta, masks, loss, g, by_gate(mean.abs()))
            yield "norm, own", told("slopes", theta, masks, loss, g, by_gate(mean.square()).sqrt())
            yield "sum of s, own", told("slopes", theta, masks, loss, g, by_gate(one.sqrt()))
        for weight in (0.0, 0.25, 1.0):  # the library's is 0.5
            yield f"size, {weight:g}, own", natural * (s - weight * g).mean(-2)
        yield "open, own", natural * (m * s - g / 2).mean(-2)
        for name, parts in (("layer", 2), ("all", 1)):
            order = shuffled(g, parts, generator).expand(g.shape)
            others, sizes = g.gather(-1, order), s.gather(-1, order)
            yield f"permuted, {name}, own", told("slopes", theta, masks, loss, others, sizes)
            yield (
                f"permuted, {name}, masks too, own",
                told("slopes", theta, masks.gather(-1, order), loss, others, sizes),
            )
    yield "alike", natural.expand(SPAN, runs, D)


def measured(steps: Tensor, exact: Tensor) -> dict[str, float]:
    """Cosines of single updates (0 where theta does not move), of the mean of SPAN, of the mean of all; bias, noise.

    The squared length of a mean holds the noise of its n updates over n, which is taken off. bias: how far the mean
    update, times the best factor, is from the exact one; noise: the deviation of an update, times that factor; both
    in lengths of the exact one.
    """
    single = F.cosine_similarity(steps, exact, -1, eps=1e-30).flatten()
    n, mean = single.numel(), steps.mean((0, 1))
    variance = (steps - mean).square().sum() / (n - 1)
    square = (mean.square().sum() - variance / n).item()
    along, length = (mean @ exact).item(), exact.norm().item()
    cosine = min(max(along / (math.sqrt(square) * length), -1.0), 1.0) if square > 0 else math.nan
    return {
        "single": single.mean().item(),
        "single_half": 1.96 * single.std().item() / math.sqrt(n),
        "ten": F.cosine_similarity(steps.mean(0), exact, -1, eps=1e-30).mean().item(),
        "mean": cosine,
        "bias": math.sqrt(1 - cosine**2),
        "noise": abs(along / square) * variance.sqrt().item() / length if square > 0 else math.nan,
        "scale": along / length**2,
    }


def study(updates: int, seeds: int, units: Sequence[int] = (1,) * GATES) -> list[dict[str, Any]]:
    """A record for each theta, length of training and signal: its measures, a list over the seeds of the weights."""
    data = load("digits").flatten().as_floats()
    x, y, gates = data.train[0].double(), data.train[1], gates_of(units)
    stacked = trained(x, y, torch.stack([expectations(name) for name in THETAS]), seeds, gates)
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (t, name), length, seed in itertools.product(enumerate(THETAS), LENGTHS, range(seeds)):
        theta, weights = expectations(name), tuple(w[t, seed] for w in stacked[length])
        natural = theta * (1 - theta)
        hidden = torch.relu(layer(x, *weights[:2]))
        exact = exact_gradient(weights, hidden, y, theta, gates)
        for signal, steps in directions(weights, hidden, y, theta, updates // SPAN, seed, gates):
            for part in ("whole", "apart"):
                one, other = steps, exact
                if part == "apart":  # without what opens or closes all gates alike: the projection of a target
                    one, other = (v - natural * v.sum(-1, keepdim=True) / natural.sum() for v in (steps, exact))
                key = (name, length, signal, part)
                record = records.setdefault(key, dict(zip(("theta", "trained", "signal", "part"), key)))
                if signal == "alike" and part == "apart":
                    continue  # nothing is left of it
                for measure, value in measured(one, other).items():
                    record.setdefault(measure, []).append(None if math.isnan(value) else float(f"{value:.4g}"))
    return list(records.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/signal/digits.json"))
    parser.add_argument("--updates", type=int, default=1000, help="of each signal, for each theta and weights")
    parser.add_argument("--weights", type=int, default=5, help="networks, each trained from its own seed")
    parser.add_argument("--units", default=",".join("1" * GATES), help="of each of a layer's six gates")
    options = parser.parse_args(arguments)
    units = list(map(int, options.units.split(",")))
    if len(units) != GATES:
        parser.error(f"--units are numbers for {GATES} gates, not {len(units)}")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    records = study(options.updates, options.weights, units)
    of_units = {} if set(units) == {1} else {"units": units}
    more = f" --units {options.units}" if of_units else ""
    story = {
        "benchmark": "signals: single updates against the exact natural gradient",
        "command": f"python benchmarks/signals.py --updates {options.updates} --weights {options.weights}{more}",
        "settings": {
            "network": [PIXELS, sum(units), sum(units), CLASSES], "gates": D, "masks": 2**D, "precision": "float64",
            "examples": EXAMPLES, "samples": SAMPLES, "updates": options.updates, "weights": options.weights,
            "span": SPAN, "mixed": MIXED, **of_units,
        },
        "hardware": {"cpu": platform.processor() or platform.machine(), "threads": 1},
        "versions": {
            "espalier": espalier.__version__, "torch": str(torch.__version__), "python": platform.python_version(),
        },
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(story, indent=1)[:-2]  # a record is a line
    rows = ",\n  ".join(json.dumps(record) for record in records)
    options.out.write_text(f'{head},\n "records": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
