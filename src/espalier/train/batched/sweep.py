"""espalier.sweep: many runs of one model as one batch, each with its own seed and its own penalty, target or mask."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.data import Dataset
from espalier.space import BadInput
from espalier.train.batched import runs as run_list
from espalier.train.batched import schedule as schedules
from espalier.train.batched.batch import Compute
from espalier.train.batched.feed import Pair, check_pair
from espalier.train.batched.group import Clock, Group, Result
from espalier.train.batched.optimizers import SGD, Optimizer
from espalier.train.batched.plan import Plan
from espalier.train.batched.runs import Run
from espalier.train.batched.schedule import Schedule
from espalier.train.batched.stack import Factory


def sweep(
    factory: Factory,
    data: Dataset | Pair,
    *,
    targets: Sequence[float] | None = None,
    penalties: Sequence[float] | None = None,
    masks: Sequence[Tensor] | Tensor | None = None,
    dropouts: Sequence[float] | None = None,
    runs: Sequence[Run] | None = None,
    seeds: Sequence[int] = (0,),
    epochs: int,
    batch_size: int = 64,
    samples: int = 2,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    cost: str | Cost | Tensor = "weights",
    optimizer: Optimizer | None = None,
    schedule: str | Schedule = "steps",
    search: Mapping[str, Any] | None = None,
    settle: float | None = None,
    preset: str | None = None,
    pad: int = 0,
    validation: Pair | None = None,
    compute: Compute | None = None,
    at_once: int | None = None,
    device: str | torch.device | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
) -> list[Result]:
    """Train ``seeds`` times ``penalties`` (or targets, masks, dropouts) runs, all at once; one result each, in order.

    factory: builds the model, from torch's random state; runs of equal seed start from equal weights.
    data: (inputs, targets) tensors, or a Dataset whose test part is then the validation. They stay on the device as
    they are: uint8 inputs are divided by 255 there, and with ``pad`` images are cropped and mirrored at random.
    epochs, batch_size, samples: every update reads batch_size examples under each of ``samples`` masks; where there is
    nothing to compare (given masks, or after settling) it reads samples times as many examples under the one mask.
    optimizer: settings such as ``SGD(lr=0.1)``; schedule: "steps" (a tenth at 1/2 and 3/4), "cosine", "constant".
    search: further arguments of :class:`espalier.Search` (learning_rate, adaptive, ramp, initial, margin).
    settle: the share of the run, at its end, that trains under the structure found. at_once: most runs in a batch.
    checkpoint: a folder; the same call goes on where the last one stopped, also after ``time_limit`` seconds.
    """
    plan = Plan(
        epochs=epochs, batch_size=batch_size, samples=samples, loss=loss, cost=cost, optimizer=optimizer or SGD(),
        schedule=schedules.read(schedule), search=dict(search or {}), settle=settle or 0.0, pad=pad,
    )  # fmt: skip
    if validation is not None:
        validation = check_pair(validation, "validation")
    elif isinstance(data, Dataset):
        validation = data.test
    found = run_list.listed(runs, seeds, penalties, targets, masks, dropouts)
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(time_limit)
    results: dict[int, Result] = {}
    for number, where in enumerate(run_list.batches(found, at_once)):
        folder = None if checkpoint is None else Path(checkpoint) / f"batch-{number:03d}"
        group = Group(factory, data, validation, [found[i] for i in where], plan, place, compute or Compute(), folder)
        try:
            results.update(zip(where, group.train(clock), strict=True))
        except torch.OutOfMemoryError as error:
            fewer = max(len(where) // 2, 1)
            raise BadInput(f"{len(where)} runs do not fit into the memory of {place}; give at_once={fewer}") from error
    return [results[i] for i in range(len(found))]
