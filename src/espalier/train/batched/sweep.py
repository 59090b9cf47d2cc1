"""espalier.sweep: many runs of one model as one batch, each with its own seed and its own penalty, target or mask."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier import files
from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.blocks import RoundTo
from espalier.space import BadInput, BadType, first_line, whole_number
from espalier.train import checks, descent, feed, on_ray, progress, recipes, scoring
from espalier.train.batched import runs as run_list
from espalier.train.batched.batch import Compute
from espalier.train.batched.batch_engine import BatchEngine, Factory
from espalier.train.batched.inputs import resident
from espalier.train.batched.runs import Plan, Run
from espalier.train.batched.step import cross_entropy
from espalier.train.callbacks import Callback
from espalier.train.callbacks import check as callbacks_checked
from espalier.train.checkpoint import Checkpoint
from espalier.train.descent import Optimizer, Schedule
from espalier.train.feed import Adapter
from espalier.train.fingerprint import Hashes
from espalier.train.loop import Loop, Stop, out_of_memory, seeded
from espalier.train.on_ray import Ray
from espalier.train.recipes import OptimizerFactory, Recipe
from espalier.train.result import Result
from espalier.train.run_directory import Records, locked
from espalier.train.targets import Target


def sweep(
    factory: Factory,
    data: Any,
    *,
    targets: Sequence[Target] | None = None,
    penalties: Sequence[float] | None = None,
    masks: Sequence[Tensor] | Tensor | None = None,
    dropouts: Sequence[float] | None = None,
    runs: Sequence[Run] | None = None,
    seeds: Sequence[int] = (0,),
    epochs: int,
    batch_size: int = 64,
    samples: int | None = None,
    round_to: RoundTo | None = None,
    kinds: Collection[str] | None = None,
    ignore: Collection[str] = (),
    loss: Callable[[Any, Any], Tensor] | None = cross_entropy,
    batch: Adapter | None = None,
    cost: str | Cost | Tensor = "weights",
    optimizer: Optimizer | OptimizerFactory | None = None,
    schedule: str | Schedule | None = None,
    search: Mapping[str, Any] | None = None,
    settle: float | None = None,
    recipe: str | Recipe | None = None,
    pad: int = 0,
    points: int | None = None,
    validation: Any = None,
    metrics: scoring.Metrics = None,
    monitor: str | None = None,
    compute: Compute | None = None,
    at_once: int | None = None,
    device: str | torch.device | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str = "same",
    time_limit: float | None = None,
    callbacks: Sequence[Callback] = (),
    executor: str | Ray | None = None,
    quiet: bool = False,
) -> list[Result]:
    """Train every penalty (or target, mask, dropout rate) with every seed, all at once; one result each, in that order.

    factory: builds the model, from torch's random state; runs of equal seed start from equal weights and read the data
        in equal order. runs: instead of settings times seeds, any list of :class:`Run`.
    data: as in ``fit``: (inputs, targets), which the network reads as they are, or a Dataset, which is read as it says;
        its test part is then the validation. They stay on the device as they are stored; with ``pad`` images are
        cropped and mirrored at random. What loaders and torch Datasets give is read once, before the runs.
    loss, batch: as in ``fit``.
    points: measure so many times, evenly spaced, instead of after every epoch.
    validation: (inputs, targets), or a Dataset, its test part; read as ``data`` are.
    metrics: of the validation, beside the loss, as in ``fit``; one run after the other, which takes time.
    monitor: as in ``fit``: each run ships its own best measurement, of those with a settled structure.
    batch_size: what each of the ``samples`` masks of an update reads (default: the recipe's, as in ``fit``): the same
        examples where their losses are ranked, else its own. Under one mask (a given one, or after settling) an update
        reads samples times as many examples.
    round_to: widths in multiples, as in ``fit``; the first run of a batch says which units make a block. kinds,
        ignore: as there.
    optimizer: settings such as ``SGD(lr=0.1)``, ``Adam()``, ``AdamW()`` of espalier.train.batched; or a function as in
        ``fit`` that gives torch's SGD, Adam or AdamW. Default: as in ``fit``.
    schedule: "steps" (a tenth at 1/2 and at 3/4), "cosine", "linear", "constant", or one of their classes. Default: the
        recipe's; for an optimizer that is a function, "constant".
    search: arguments of :class:`espalier.Search` (learning_rate, adaptive, ramp, even, initial, margin). What is not
        given comes from the recipe.
    recipe: a :class:`espalier.train.Recipe` or the name of one, as in ``fit``; by default "ranked" for all runs where
        one has a penalty, else "default" (slopes of the gates as the signal).
    settle: the share of the run, at its end, that trains under the structure found.
    compute: precision, compilation, determinism. at_once: the most runs in one batch; a batch has to fit in memory.
    checkpoint: a folder; the same call goes on where the last one stopped, by a kill or after ``time_limit`` seconds.
        Every run has its own run directory in it. resume: as in ``fit``.
    callbacks: as in ``fit``; told of each batch of runs, with a row for each run.
    executor: "ray", or :class:`espalier.train.on_ray.Ray`: batches of ``at_once`` runs as tasks of a cluster, with the
        same run directories; needs ``checkpoint``, a folder that all machines see. See docs/scale.md.
    """
    measured = scoring.read_metrics(metrics)
    watching, anyway = callbacks_checked(callbacks, monitor, measured), checks.resume(resume)
    at_once = None if at_once is None else whole_number(at_once, "at_once", 1)
    asked = run_list.listed(runs, seeds, penalties, targets, masks, dropouts)
    recipe = recipes.chosen(recipe, settle, any(run.shape == "penalty" for run in asked))
    if search is not None and "ramp" in search:  # so that it is held against what settles
        recipe = recipes.ramped(recipe, search["ramp"])
    plan = Plan(
        epochs=epochs,
        batch_size=batch_size,
        samples=recipe.samples if samples is None else samples,
        loss=scoring.own_loss if loss is None else loss,
        cost=cost,
        recipe=recipe,
        optimizer=None if optimizer is None else descent.read_optimizer(optimizer),
        schedule=descent.read_schedule(schedule, recipe.schedule, optimizer),
        search=search,
        pad=pad,
        points=points,
        how=checks.attaching(round_to, kinds, ignore),
        metrics=measured,
    )
    if metrics and validation is None and not isinstance(data, Dataset):
        raise BadInput("metrics are of held-out data: give validation=")
    adapt = feed.adapter(batch, own_loss=loss is None)
    data, validation = feed.split_off(data, validation, 0, adapt)
    data = resident(data, adapt)
    validation = None if validation is None else resident(validation, adapt)
    elsewhere = on_ray.read(executor)
    usual = torch.cuda.is_available() if elsewhere is None else elsewhere.gpus > 0
    given = device if device is not None else "cuda" if usual else "cpu"
    place = checks.device(given) if elsewhere is None else torch.device(given)
    root = None if checkpoint is None else checks.folder(checkpoint)
    if compute is not None and not isinstance(compute, Compute):
        raise BadType(f"compute is settings such as Compute(precision='bf16'), not {compute!r}")
    stop, shown = Stop(time_limit), progress.choose(quiet)
    of_all = Shared(factory, data, validation, asked, plan, place, compute or Compute(), root, anyway)
    batches = list(enumerate(run_list.batches(asked, at_once)))
    results: dict[int, Result] = {}
    with nullcontext() if root is None else locked(root, anyway):
        if elsewhere is None:
            for job in batches:
                results.update(zip(job[1], trained(of_all, job, stop, watching, shown), strict=True))
        else:
            if root is None or watching:
                missing = "needs checkpoint=, a folder that all machines see" if root is None else "takes no callbacks"
                raise BadInput(f"executor='ray' {missing}")
            jobs = {f"batch {number}, {len(where)} runs": (number, where) for number, where in batches}
            done = elsewhere.carry_out(_as_task, of_all, jobs, root, stop, shown)
            for name, (_, where) in jobs.items():
                results.update(zip(where, done[name], strict=True))
    return [results[i] for i in range(len(asked))]


@dataclass(frozen=True)
class Shared:
    """What all batches of a sweep have in common."""

    factory: Factory
    data: Any
    validation: Any
    runs: Sequence[Run]
    plan: Plan
    device: torch.device
    compute: Compute
    root: Path | None
    anyway: bool


Job = tuple[int, Sequence[int]]  # the number of a batch, and which of all runs it holds


def trained(
    of_all: Shared, job: Job, stop: Stop, watching: Sequence[Callback], shown: progress.Progress
) -> list[Result]:
    """One batch, from where its checkpoint stands to its end or as far as time allows."""
    root, place, (number, where) = of_all.root, of_all.device, job
    runs = [of_all.runs[i] for i in where]
    fewer = f"These are {len(runs)} runs at once: give at_once={max(len(runs) // 2, 1)}, or a smaller batch_size"
    with out_of_memory(fewer), explained():
        engine = BatchEngine(of_all.factory, of_all.data, of_all.validation, runs, of_all.plan, place, of_all.compute)
        records, store = list[Callback](), None
        if root is not None:
            hashes = Hashes(root)
            shared, each = engine.settings(hashes), [run.describe() for run in engine.runs]
            hashes.keep()
            folders = [files.below(root, root / f"run-{i:03d}") for i in where]
            records = [Records(folders, [shared | own for own in each])]
            place_of_state = files.below(root, root / f"batch-{number:03d}")
            store = Checkpoint(place_of_state, shared | {"runs": each}, of_all.anyway)
        loop = Loop(engine, stop, [*watching, *records, progress.Shown(shown)], store)
        with seeded(engine.seed):
            loop.train()
        if stop.interrupted:
            shown.say(f"stopped after update {loop.update}; the same call goes on from {root}")
            raise KeyboardInterrupt
        return loop.results()


def _as_task(of_all: Shared, job: Job, seconds: float | None) -> tuple[bool, list[Result]]:
    """A batch on a worker of a cluster."""
    checks.device(of_all.device)
    results = trained(of_all, job, Stop(seconds), (), progress.choose(True))
    return all(result.finished for result in results), results


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do with models that cannot be computed many at once."""
    try:
        yield
    except RuntimeError as error:
        if not re.search("vmap|batching rule", str(error), re.IGNORECASE):
            raise
        raise BadInput(
            "this model cannot compute many runs at once (torch.func.vmap does not follow it: recurrent layers, "
            f"and branches or shapes that depend on values); use espalier.fit. {first_line(error)}"
        ) from error
