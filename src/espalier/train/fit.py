"""``espalier.fit``: train a network and shape it in the same loop, from the arguments to the compact model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.compact.apply import uncompiled
from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.blocks import RoundTo
from espalier.gates.recalibrate import training
from espalier.search import Search
from espalier.space import BadInput, BadType, Diverged, RankLost
from espalier.space import whole_number as whole
from espalier.train import checks, descent, feed, fingerprint, progress, pytree, ranks, recipes, scoring
from espalier.train.batched.batch import Compute, Precision
from espalier.train.callbacks import Callback
from espalier.train.callbacks import check as callbacks_checked
from espalier.train.checkpoint import Checkpoint
from espalier.train.descent import Optimizer, Schedule
from espalier.train.eager import EagerEngine, Scheduler
from espalier.train.feed import Adapter
from espalier.train.fingerprint import Hashes
from espalier.train.gradients import Gated
from espalier.train.loop import Loop, Stop, out_of_memory, seeded
from espalier.train.optimizer import shape
from espalier.train.ranks import Ranks
from espalier.train.recipes import OptimizerFactory, Recipe, SchedulerFactory
from espalier.train.result import Result
from espalier.train.run_directory import Records, RunDirectory, locked
from espalier.train.scoring import Loss
from espalier.train.targets import Target


def fit(
    model: nn.Module | Gated,
    data: Any,
    *,
    epochs: int,
    loss: Loss | None = F.cross_entropy,
    cost: str | Cost | Tensor | Sequence[float] = "weights",
    penalty: float | None = None,
    target: Target | None = None,
    batch_size: int = 64,
    batch: Adapter | None = None,
    samples: int | None = None,
    round_to: RoundTo | None = None,
    kinds: Collection[str] | None = None,
    ignore: Collection[str] = (),
    optimizer: Optimizer | OptimizerFactory | None = None,
    schedule: str | Schedule | None = None,
    scheduler: SchedulerFactory | None = None,
    settle: float | None = None,
    recipe: str | Recipe | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    precision: Precision | None = None,
    channels_last: bool = False,
    compile: bool | None = None,
    validation: Any = None,
    metrics: scoring.Metrics = None,
    monitor: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str = "same",
    time_limit: float | None = None,
    callbacks: Sequence[Callback] = (),
    parallel: str | Ranks | None = None,
    quiet: bool = False,
) -> Result:
    """Train the module in place, shape it on the way, and return the compact model that comes out.

    model: a module, to which gates are attached, or what :func:`espalier.attach` gave. New or already trained. Parts of
        it in eval mode (frozen BatchNorm) stay so and keep their statistics, unless the whole model is in eval mode.
    data: ``(inputs, targets)`` with examples first: tensors, NumPy arrays or tables of pandas; a
        :class:`espalier.data.Dataset` (its training part); a torch Dataset; or an iterable of batches that can be read
        again, such as a DataLoader. Inputs may be a tensor, a tuple (positional arguments) or a dict (keyword
        arguments); targets may be several tensors, too. Inputs reach the model as they are, also uint8; what is stored
        in a Dataset, and its ``test`` as validation, as the Dataset says.
    batch: makes ``(inputs, targets)`` of what such an iterable gives. Default: a tuple is its inputs and last its
        targets; a dict has its targets as "labels", and the rest of it are keyword arguments.
    loss: ``loss(outputs, targets)`` gives a scalar, the mean over the mini-batch. None: the model's own,
        ``outputs.loss``, as of Transformers; the labels then stay among the inputs.
    cost: "weights", "macs", "units", "parameters", "latency" (measured here, see ``Gated.cost``), or a cost of one's
        own over the gates.
    penalty: how strongly cost counts; target: the share of the full cost to end at. One of them, or neither.
        A target may also be an amount: "250k parameters", "30 MMACs" (for one example), "10 MB" (of parameters), "3
        ms". Or a dict of kinds of cost, {"macs": 0.4, "weights": "10 MB"}, or of costs that ``gated.cost`` gave: the
        first is the target, the others are limits. What ships exceeds none of them.
    samples: masks per update; default the recipe's: one where slopes are read, two where losses are ranked. Ranked
        losses share one mini-batch of batch_size examples; with slopes each mask has its own. Under one mask, as once
        settled, an update reads samples times batch_size examples.
    round_to: widths in multiples: one gate for each block of so many channels; a number, "auto", or a dict by group, as
        in :func:`espalier.attach`. kinds, ignore: which gates to find, and where not, as there.
    optimizer: called with the parameters, gives a torch optimiser; or settings such as ``SGD(lr=0.1)`` of
        espalier.train.batched. Default: the recipe's SGD with Nesterov momentum; AdamW where targets are not classes
        or the network has LayerNorm, attention or recurrent layers (docs/recipe.md).
    schedule: of the weights' learning rate: "steps" (a tenth at 1/2 and at 3/4), "cosine", "linear", "constant", or one
        of their classes in espalier.train.batched. Default: the recipe's; for an optimizer that is a function, none.
    scheduler: instead of a schedule: called with the optimiser, gives a torch scheduler, which is stepped after every
        epoch; OneCycleLR over more steps than epochs, and CyclicLR, after every update.
    settle: the share of the run, at its end, in which the structure is fixed; the ramp to a target ends before it.
        The phases before it are shortened where needed.
    recipe: a :class:`espalier.train.Recipe`, or the name of one: "default" (slopes of the gates as the signal),
        "ranked" (the order of losses; the default where there is no target), "paper", "finetune".
    seed: of the masks, of the order of the examples, and of everything random inside the call.
    precision: of matrix products while training: "float32", "tf32" (on a GPU), or "bf16" (autocast; weights stay as
        they are). None leaves torch's own switches alone. channels_last: images and weights lie so in memory.
    compile: None: on a GPU, in a run of 5,000 updates or more, updates are recorded as a CUDA graph: the same kernels,
        without the time that it takes to launch them. What cannot be recorded is trained as it is. True: the network,
        the loss and theta's update by ``torch.compile``, once for each phase of the run, and on a GPU recorded, too. It
        takes from seconds to a minute, which a long run earns back; a warning says what does not work. False: neither.
    validation: data as above, of a Dataset its test part, which is the default where ``data`` is one; or a share of
        the data to hold out, such as 0.1, each class in proportion. Evaluated after every epoch under the mask that
        would ship.
    metrics: of the validation, beside the loss: functions of (outputs, targets) by name, objects of torchmetrics, or
        the names of known ones: "accuracy", "auc", "f1", "mae", "r2", "rmse". A row has them as "validation_f1".
    monitor: ship the epoch with the best of this number, of those with a settled structure: a metric, or
        "validation_loss"; "max acc" or "min acc" says which is better, where that is not known. To stop early by it,
        use :class:`espalier.train.EarlyStopping`. Default: the last epoch.
    checkpoint: the folder of the run. The same call goes on where it was stopped, killed, or out of time.
    resume: "same" goes on only with the same data, network, code and settings, and shows what differs; "anyway" goes on
        all the same, also where another host has left its lock, and the run records what differed.
    time_limit: seconds after which this call stops, with a checkpoint.
    callbacks: objects of classes made from :class:`espalier.Callback`, called at epochs, at settling and at the end.
    parallel: inside a process group of several ranks: "data", each reads its share of every mini-batch, or "structure",
        each has masks of its own, of at least as many samples; "none" where each trains a run of its own. Every rank
        makes the same call with the same data. What comes out is that of one process, to rounding; see docs/scale.md.
    """
    stop, measured = Stop(time_limit), scoring.read_metrics(metrics)
    watching = callbacks_checked(callbacks, monitor, measured)
    anyway = checks.resume(resume)
    checks.loss(loss)
    folder = None if checkpoint is None else checks.folder(checkpoint)
    seed = whole(seed, "seed", 0)
    if precision is not None:
        Compute(precision)  # what it does not know is named here
    model = uncompiled(model)
    module = checks.module_of(model)
    if device is not None:
        module.to(checks.device(device))
    where = next(module.parameters()).device
    several = ranks.read(parallel)
    if several is not None:
        _check_ranks(several, batch_size, compile)
        several.begin(module)
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    adapt = feed.adapter(batch, own_loss=loss is None)
    data, validation = feed.split_off(data, validation, seed, adapt)
    loss = scoring.own_loss if loss is None else loss
    feeding = feed.read(data, whole(batch_size, "batch_size", 1), seed, pytree.dtype(module), adapt)
    recipe = recipes.chosen(recipe, settle, penalised=target is None)
    horizon = whole(epochs, "epochs", 1) * feeding.updates
    held_out = None
    validation = data if validation is None and isinstance(data, Dataset) else validation
    if validation is not None:
        beside = data if isinstance(data, Dataset) else None
        held_out = feed.read_held_out(validation, batch_size, pytree.dtype(module), beside, adapt)
    elif measured:
        raise BadInput("metrics are of held-out data: give validation=")
    example = checks.few(module, pytree.each(lambda t: t.to(where), feeding.first(4)[0]))
    if loss is F.cross_entropy:
        outputs = checks.readable(module, example)
        for part in (feeding, held_out):
            if part is not None:
                checks.cross_entropy(outputs, part.targets if isinstance(part, feed.Tensors) else part.first()[1])
    if schedule is not None and scheduler is not None:
        raise BadInput("schedule and scheduler both say how the learning rate goes; give one of them")
    if scheduler is not None:
        schedule = "constant"
    if optimizer is None:
        optimizer = recipes.usual_optimizer(recipe, module, feeding.first()[1])
    rates = descent.read_schedule(schedule, recipe.schedule, optimizer)
    directory = None if folder is None else RunDirectory(folder)
    known_blocks = {} if directory is None or round_to is None else directory.recorded().get("blocks", {})
    structure = shape(
        model,
        example,
        optimizer,
        updates=horizon,
        target=target,
        penalty=penalty,
        cost=cost,
        samples=samples,
        round_to=known_blocks or round_to,
        kinds=kinds,
        ignore=ignore,
        schedule=rates,
        recipe=recipe,
        seed=seed,
        parallel="none" if several is None else several,
    )
    gated, inner, phases, asked = structure.gated, structure.inner, structure.phases, structure.asked
    assert phases is not None
    assert asked is not None
    with ExitStack() as left, seeded(seed):
        if model is module:
            left.callback(structure.gated.detach)  # type: ignore[attr-defined]
        steps = None if scheduler is None else _scheduler(scheduler, inner)
        each_update = steps is not None and _goes_by_updates(steps, epochs, phases.end)
        if each_update:
            structure.scheduler = steps
        hashes, settings = Hashes(folder), dict[str, Any]()
        if folder is not None or several is not None:  # there is something to resume, or somebody to compare with
            parts = {"data": feeding, "validation": held_out}
            settings = {
                **_settings(module, gated, inner, structure.search),
                **{name: part and part.describe(hashes) for name, part in parts.items()},
                "loss": fingerprint.function(loss),
                "epochs": epochs,
                "batch_size": batch_size,
                "cost": asked.name,
                "penalty": penalty,
                "target": asked.share,
                "settle_at": phases.settle,
                "recipe": asdict(recipe),
                "seed": seed,
                "device": where.type,
                "precision": precision,
            }
            settings |= {} if asked.words is None else {"asked": asked.words}
            settings["scheduler"] = repr(rates) if steps is None else fingerprint.settings(steps, "optimizer")
        if several is not None:
            several.agree(settings | {"checkpoint": folder is not None})
            several.agreed = True
        engine = EagerEngine(
            structure,
            feeding,
            loss,
            scheduler=None if each_update else steps,
            validation=held_out,
            metrics=measured,
            device=where,
            precision=precision,
            channels_last=channels_last,
            compile=compile,
            began_with="" if folder is None else fingerprint.weights(module.parameters()),
            known=lambda weights: anyway or (directory is not None and directory.left_with(weights)),
        )
        first = several is None or several.first
        records = [] if folder is None else [Records([folder], [settings])]
        store = None if folder is None else Checkpoint(folder, settings, anyway)
        shown = progress.choose(quiet or not first)
        loop = Loop(engine, stop, [*watching, *records, progress.Shown(shown)], store, several)
        computing = nullcontext() if precision is None else Compute(precision).applied()
        with computing, _held(folder, anyway, several), training(module):
            if first:
                hashes.keep()
            result = _carry_out(loop, directory, shown)
    return result if model is not module else replace(result, gated=None)


def _carry_out(loop: Loop, directory: RunDirectory | None, shown: progress.Progress) -> Result:
    """From where the folder's checkpoint stands to the end, or as far as time allows."""
    engine, folder = loop.engine, None if directory is None else directory.folder
    model, first = engine.gated.model, loop.ranks is None or loop.ranks.first
    try:
        with out_of_memory("Use a smaller batch_size, or accumulate its parts by espalier.StructureOptimizer"):
            finished = loop.train()
    except (Diverged, RankLost) as error:
        kind = type(error)
        raise error if folder is None else kind(f"{error}. What was saved in {folder} is intact") from None
    finally:
        if directory is not None and engine.done and first:
            directory.leave(None if loop.finished else fingerprint.weights(model.parameters()))
    again = "" if folder is None else f"; the same call goes on from {folder}"
    if loop.limit.interrupted:
        shown.say(f"interrupted after update {engine.done} of {engine.total}{again}")
        raise KeyboardInterrupt
    result = loop.results()[0]
    shown.say(str(result))
    if finished and result.warning and first:
        warnings.warn(result.warning, stacklevel=3)
    if result.stopped:
        shown.say(f"ended after update {engine.done} of {engine.total}: {result.stopped}")
    if not finished:
        if folder is not None and not engine.resumable:
            again += ", at the start of the epoch it was in: somebody else's loader cannot be entered in the middle"
        shown.say(f"stopped by its time limit after update {engine.done} of {engine.total}{again}")
    return result


def _check_ranks(several: Ranks, batch_size: int, compile: bool | None) -> None:
    if several.parallel == "data" and batch_size % several.count:
        raise BadInput(
            f"batch_size={batch_size} cannot be shared equally by {several.count} ranks; use a multiple of "
            f"{several.count}"
        )
    if compile and several.count > 1:
        raise BadInput("compile=True is for one process: what one rank cannot compile it would do twice")


def _held(folder: Path | None, anyway: bool, several: Ranks | None) -> AbstractContextManager[None]:
    """The folder of a run, by this process or by the first of several."""
    if folder is None:
        return nullcontext()
    return locked(folder, anyway) if several is None else several.held_by_first(lambda: locked(folder, anyway))


def _scheduler(factory: SchedulerFactory, inner: torch.optim.Optimizer) -> Scheduler:
    example = "lambda o: torch.optim.lr_scheduler.StepLR(o, 10)"
    if not callable(factory):
        raise BadType(f"scheduler is a function that is given the optimizer, such as {example}, not {factory!r}")
    scheduler = factory(inner)
    if not isinstance(scheduler, Scheduler):
        raise BadType(f"the scheduler function gives a torch scheduler, as {example}, not {type(scheduler).__name__}")
    return scheduler


def _goes_by_updates(scheduler: Scheduler, epochs: int, updates: int) -> bool:
    """Whether torch means it to be stepped after every update; by epochs it would hardly leave its first rate."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
        return isinstance(scheduler, torch.optim.lr_scheduler.CyclicLR)
    if epochs < scheduler.total_steps < updates:
        raise BadInput(
            f"OneCycleLR ends after {scheduler.total_steps} steps, the run has {updates} updates in {epochs} epochs; "
            f"use total_steps={updates}"
        )
    return scheduler.total_steps > epochs


def _settings(module: nn.Module, gated: Gated, optimizer: torch.optim.Optimizer, search: Search) -> dict[str, Any]:
    """What the run is of, in a form that two calls can be compared by."""
    numbers = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        | {"tensors": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return {
        "model": fingerprint.network(module),
        "space": gated.space.to_json(),
        **({"blocks": blocks} if (blocks := getattr(gated, "blocks", None)) else {}),
        "full_cost": float(search.full_cost),
        "samples": search.samples,
        "optimizer": json.loads(json.dumps({type(optimizer).__name__: numbers}, default=repr), parse_constant=str),
    }
