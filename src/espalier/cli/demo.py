"""`espalier demo`: networks on handwritten digits, trained and cut to size in one loop, several sizes at once."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from espalier.cost import Cost, Form
from espalier.data import Stream, load
from espalier.search import Search
from espalier.space import Bits, Space

PIXELS, HIDDEN, CLASSES = 64, 64, 10  # a network 64-64-64-10
TARGETS = (0.05, 0.1, 0.25, 0.5)
BATCH, SAMPLES = 32, 2

Layers = list[tuple[Tensor, Tensor]]  # weights (R, out, in) and biases (R, 1, out) of R networks at once


def demo(
    epochs: int = typer.Option(60, min=1, help="Passes over the training data."),
    seeds: int = typer.Option(3, min=1, help="Networks for each size."),
) -> None:
    """See it work: networks on handwritten digits, trained and cut to size in the same loop, on a CPU.

    Example: espalier demo --epochs 30
    """
    console = Console()
    started = time.perf_counter()
    data = load("digits").flatten().as_floats()
    train = data.train[0].float(), data.train[1]
    test = data.test[0].float(), data.test[1]
    total = epochs * len(train[0]) // BATCH
    targets = torch.tensor(TARGETS, dtype=torch.float64).repeat_interleave(seeds)

    space = Space([Bits("first layer", HIDDEN, least=1), Bits("second layer", HIDDEN, least=1)])
    first, second = Form.run(0, HIDDEN), Form.run(HIDDEN, 2 * HIDDEN)
    cost = (
        Cost.product([first], d=space.d, scale=PIXELS)
        + Cost.product([first, second], d=space.d)
        + Cost.product([second], d=space.d, scale=CLASSES)
    )
    search = Search(
        space,
        cost=cost,
        target=targets,
        horizon=total,
        ramp=0.3,
        learning_rate=8 / space.d,  # the run is short: the default of 1/d suits hundreds of passes
        batch=(len(targets),),
    )
    console.print(
        f"{len(targets)} networks {PIXELS}-{HIDDEN}-{HIDDEN}-{CLASSES}, each to end at its own share of the weights. "
        "In every update a network is tried under two drawn structures: its weights follow both, and the distribution "
        "of structures follows the better one, along a ramp to the target. Half way the structure is settled and the "
        "weights finish under it."
    )
    found = _train(console, "shaped while training", train, total, len(targets), search, None)
    kept = search.select()
    uniform = _uniform(cost, targets * search.full_cost, space.d)
    scratch = _train(console, "the same sizes from scratch", train, total, len(targets), None, uniform)

    errors = [_errors(layers, mask, test) for layers, mask in ((found, kept), (scratch, uniform))]
    table = Table(title=f"handwritten digits: {len(test[0])} test images, median of {seeds} networks")
    for column in ("target", "weights kept", "units kept", "test error", "uniform network from scratch"):
        table.add_column(column, justify="right")
    for i, target in enumerate(TARGETS):
        rows = slice(i * seeds, (i + 1) * seeds)
        units = [int(kept[rows, where].sum(-1).median()) for _, where in space.bits]
        medians = [f"{error[rows].median():.1%}" for error in errors]
        table.add_row(f"{target:.0%}", f"{search.usage()[rows].median():.1%}", f"{units[0]} + {units[1]}", *medians)
    console.print(table)
    over = int((search.usage() > targets).sum())
    console.print(
        f"Of {len(targets)} networks {over} exceed their target. One test image is {1 / len(test[0]):.2%}. "
        f"{2 * len(targets)} networks took {time.perf_counter() - started:.0f} s."
    )


def _train(
    console: Console,
    what: str,
    data: tuple[Tensor, Tensor],
    total: int,
    runs: int,
    search: Search | None,
    fixed: Tensor | None,
) -> Layers:
    """R networks under the search's masks, or under fixed masks ``(R, d)``: as many example-gradients either way."""
    generator = torch.Generator().manual_seed(0)
    layers = _start(runs, fixed, generator)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer], lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [total * 3 // 4, total * 9 // 10])
    order = Stream(list(range(runs)), len(data[0]), torch.device("cpu"))
    settle_at = total // 2
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        for update in range(total):
            if search is not None and update == settle_at:
                search.settle()
            searching = search is not None and not search.settled
            if search is not None:
                masks = search.ask() if searching else search.ask()[:, :1]
            else:
                assert fixed is not None
                masks = fixed.unsqueeze(1)
            chosen = order.take(1, BATCH if searching else BATCH * SAMPLES)[0]
            losses = _losses(layers, masks, data[0][chosen], data[1][chosen])  # (R, masks)
            optimizer.zero_grad()
            losses.mean(-1).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if search is not None and searching:
                search.tell(masks, losses)
            progress.update(task, advance=1)
    return layers


def _start(runs: int, masks: Tensor | None, generator: torch.Generator) -> Layers:
    """He initialisation; the fan-in is what a network's mask, where it has one, lets a layer read."""
    layers = []
    for i, (inputs, outputs) in enumerate([(PIXELS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)]):
        read = torch.full((runs,), float(inputs))
        if masks is not None and i > 0:
            read = masks[:, (i - 1) * HIDDEN : i * HIDDEN].sum(-1)
        scale = (2 / read).sqrt().view(-1, 1, 1)
        weight = (torch.randn(runs, outputs, inputs, generator=generator) * scale).requires_grad_()
        layers.append((weight, torch.zeros(runs, 1, outputs, requires_grad=True)))
    return layers


def _outputs(layers: Layers, masks: Tensor, x: Tensor) -> Tensor:
    """masks ``(R, S, d)``, x ``(R, B, pixels)``. Returns ``(R, S, B, classes)``."""
    gates = torch.split(masks.unsqueeze(2), HIDDEN, -1)
    h = x.unsqueeze(1)
    for i, (weight, bias) in enumerate(layers):
        h = h @ weight.transpose(1, 2).unsqueeze(1) + bias.unsqueeze(1)
        if i < len(gates):
            h = h.relu() * gates[i]
    return h


def _losses(layers: Layers, masks: Tensor, x: Tensor, y: Tensor) -> Tensor:
    logits = _outputs(layers, masks, x)
    labels = y.unsqueeze(1).expand(logits.shape[:-1])
    return F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape).mean(-1)


@torch.no_grad()
def _errors(layers: Layers, masks: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    x, y = data
    guessed = _outputs(layers, masks.unsqueeze(1), x.expand(len(masks), -1, -1)).argmax(-1).squeeze(1)
    return (guessed != y).double().mean(-1)


def _uniform(cost: Cost, budget: Tensor, d: int) -> Tensor:
    """Masks ``(R, d)`` with the same number of units in both layers, the largest that the budget allows."""
    widths = torch.zeros(HIDDEN + 1, d)
    for k in range(1, HIDDEN + 1):
        widths[k, :k] = widths[k, HIDDEN : HIDDEN + k] = 1.0
    return widths[(cost(widths) <= budget.unsqueeze(-1)).sum(-1) - 1]
