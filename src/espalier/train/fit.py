"""``espalier.fit``: train a network and shape it in the same loop, from the arguments to the compact model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.attach import attach
from espalier.search import Search
from espalier.space import BadInput, BadType, Diverged
from espalier.space import whole_number as whole
from espalier.train import chance, checks, feed, identity, loop, nested, presets, progress, score, statistics
from espalier.train.checkpoint import Checkpoint
from espalier.train.loop import Scheduler
from espalier.train.optimizer import StructureOptimizer, check_parameters
from espalier.train.presets import OptimizerFactory, Recipe, SchedulerFactory
from espalier.train.record import Record
from espalier.train.result import Result
from espalier.train.score import Loss
from espalier.train.step import Gated
from espalier.train.stop import Stop

# The weights of models as runs of this process left them, hashed.
_LEFT: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def fit(
    model: nn.Module | Gated,
    data: Any,
    *,
    loss: Loss,
    epochs: int,
    cost: str | Cost | Tensor | Sequence[float] = "weights",
    penalty: float | None = None,
    target: float | None = None,
    batch_size: int = 64,
    samples: int = 2,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    settle: float | None = None,
    recipe: str | Recipe | None = None,
    preset: str | Recipe | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    validation: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    quiet: bool = False,
) -> Result:
    """Train the module in place, shape it on the way, and return the compact model that comes out.

    model: a module, to which gates are attached, or what :func:`espalier.attach` gave. New or already trained. Parts of
        it in eval mode (frozen BatchNorm) stay so and keep their statistics, unless the whole model is in eval mode.
    data: ``(inputs, targets)`` with examples first, a :class:`espalier.data.Dataset` (its training part), or an
        iterable of such pairs that can be gone through again, as a DataLoader can. Inputs may be a tensor, a tuple
        (positional arguments) or a dict (keyword arguments). They reach the model as they are, also uint8; what is
        stored in a Dataset, and its ``test`` as validation, as the Dataset says.
    loss: ``loss(outputs, targets)`` gives a scalar, the mean over the mini-batch.
    cost: "weights", "macs", "units", "parameters", or a cost of one's own over the gates.
    penalty: how strongly cost counts; target: the share of the full cost to end at. One of them, or neither.
    samples: masks per update. Where losses are ranked they share one mini-batch of batch_size examples; where slopes
        are read each has its own. Under one mask, as once settled, an update reads samples times batch_size examples.
    optimizer: called with the parameters, gives a torch optimiser; default SGD with Nesterov momentum.
    scheduler: called with that optimiser, gives a torch scheduler, which is stepped after every epoch. Default: the
        recipe's steps, where the optimizer is the default too; else none.
    settle: the share of the run, at its end, in which the structure is fixed; the ramp to a target ends before it.
        What comes before, by the recipe, is shortened where it has to be.
    recipe: a :class:`espalier.train.Recipe`, or the name of one: "default" (slopes of the gates as the signal),
        "ranked" (the order of losses; the default where there is no target), "paper", "finetune". preset: its old name.
    seed: of the masks, of the order of the examples, and of everything random inside the call.
    validation: data as above, of a Dataset its test part; evaluated after every epoch under the mask that would ship.
    checkpoint: the folder of the run. The same call goes on where it was stopped, killed, or out of time.
    time_limit: seconds after which this call stops, with a checkpoint.
    """
    stop = Stop(time_limit)
    checks.loss(loss)
    folder = None if checkpoint is None else checks.folder(checkpoint)
    seed = whole(seed, "seed", 0)
    module, where = _place(model, device)
    feeding = feed.read(data, whole(batch_size, "batch_size", 1), seed, nested.dtype(module))
    given = presets.one_of(recipe, preset)
    if given is None and target is None:
        given = "ranked"  # a penalty's numbers are the paper's: they weigh cost against ranked losses
    recipe = presets.settled(presets.read(given), settle)
    horizon = whole(epochs, "epochs", 1) * feeding.updates
    phases = recipe.phases(horizon, target)
    held_out = None
    if validation is not None:
        beside = data if isinstance(data, Dataset) else None
        held_out = feed.read_held_out(validation, batch_size, nested.dtype(module), beside)
    inner = _optimizer(optimizer or recipe.optimizer, module)
    with _attached(model, module, feeding, where) as gated, chance.seeded(seed, where):
        search = Search(
            gated.space,
            cost=gated.cost(cost) if isinstance(cost, str) else cost,
            penalty=penalty,
            samples=samples,
            seed=seed,
            device=where,
            **recipe.search_arguments(gated.space, phases, target),
        )
        settings = {
            **_settings(module, gated, feeding, inner, search),
            "loss": identity.function(loss),
            "epochs": epochs,
            "batch_size": batch_size,
            "cost": cost if isinstance(cost, str) else "given",
            "penalty": penalty,
            "target": target,
            "settle_at": phases.settle,
            "recipe": asdict(recipe),
            "seed": seed,
            "device": where.type,
        }
        if scheduler is not None:
            steps: Scheduler | None = _scheduler(scheduler, inner)
        else:
            steps = recipe.scheduler(inner, horizon) if optimizer is None else None
        settings["scheduler"] = None if steps is None else type(steps).__name__
        run = loop.Run(
            StructureOptimizer(inner, search, gated),
            feeding,
            loss,
            phases=phases,
            scheduler=steps,
            per_update=scheduler is None,
            validation=held_out,
            device=where,
        )
        result = _carry_out(run, settings, folder, stop, progress.choose(quiet))
    return result if model is not module else replace(result, gated=None)


def _carry_out(
    run: loop.Run, settings: dict[str, Any], folder: str | os.PathLike[str] | None, stop: Stop, shown: progress.Progress
) -> Result:
    """From where the folder's checkpoint stands to the end, or as far as time allows."""
    store = None if folder is None else Checkpoint(folder, settings)
    record = None if folder is None else Record(folder)
    if record is not None:
        record.check()
    again = "" if folder is None else f"; the same call goes on from {folder}"
    state = None if store is None else store.load()
    if store is not None:
        run.began_with = identity.weights(run.gated.model.parameters())
    if state is not None:
        if not _same_weights(run, state):
            raise BadInput(
                f"the weights of this model are not those that the run in {folder} began with: {state['began_with']} "
                f"there, {run.began_with} here (hashes). Give the same network to go on with it (torch.manual_seed "
                "before it is built makes it the same), or another folder to start anew"
            )
        run.load_state_dict(state)
        if run.update < run.horizon:
            shown.say(f"going on after update {run.update} of {run.horizon}")
    if record is not None and run.update == run.horizon and record.complete():
        record = None
    if record is not None:
        record.start(settings, run.device, run.history)
    with statistics.training(run.gated.model):
        shown.start(run.update, run.horizon)
        try:
            with stop.on_interrupt() if store is not None else nullcontext():
                finished = loop.train(run, store, record, stop, shown)
        except Diverged as error:
            raise error if folder is None else Diverged(f"{error}. What was saved in {folder} is intact") from None
        finally:
            shown.stop()
            if store is not None:
                _LEFT[run.gated.model] = identity.weights(run.gated.model.parameters())
        if stop.interrupted:
            shown.say(f"interrupted after update {run.update} of {run.horizon}{again}")
            raise KeyboardInterrupt
        result = finish(run, finished)
    if record is not None:
        record.finish(result.summary(), run.theta)
    shown.say(str(result))
    if not finished:
        if folder is not None and not run.feed.exact and run.update % run.feed.updates:
            again += ", at the start of the epoch it was in: somebody else's loader cannot be entered in the middle"
        shown.say(f"stopped by its time limit after update {run.update} of {run.horizon}{again}")
    return result


def _same_weights(run: loop.Run, state: dict[str, Any]) -> bool:
    """Whether the model given is as the run began with it, stands where its checkpoint does, or is as this process left
    it: stopped inside an epoch of somebody else's loader it is ahead of its checkpoint."""
    stored = [state["model"][name] for name, _ in run.gated.model.named_parameters()]
    return run.began_with in (state["began_with"], identity.weights(stored), _LEFT.get(run.gated.model))


def finish(run: loop.Run, finished: bool) -> Result:
    """Select, recalibrate, cut, evaluate. The state of the run, which a checkpoint holds, is not changed by it,
    but for the running statistics of BatchNorm, which are those of the mask that ships from here on."""
    gated, search = run.gated, run.search
    selected = search.select()
    mask = gated.canonical(selected)
    statistics.recalibrate(gated, mask, run.feed)
    model = gated.compact(mask).eval()
    found = None if run.validation is None else score.evaluate(model, run.validation, loss=run.loss)
    return Result(
        model=model,
        mask=mask,
        theta=search.theta.clone(),
        history=list(run.history),
        finished=finished,
        target=None if search.target is None else float(search.target),
        share_before=float(search.cost(search.mode()) / search.full_cost),
        share_after=float(search.cost(selected) / search.full_cost),
        shares=run.shares(mask),
        validation=found,
        updates=run.update,
        seconds=run.seconds,
        gated=gated,
        search=search,
    )


def _place(model: object, device: str | torch.device | None) -> tuple[nn.Module, torch.device]:
    """The module that is trained, on its device."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise BadType(f"model is a torch module or what espalier.attach gave, not {type(model).__name__}")
    first = next(module.parameters(), None)
    if first is None:
        raise BadInput("the model has no parameters, so there is nothing to train")
    checks.trainable(module)
    if device is not None:
        module.to(checks.device(device))
        first = next(module.parameters())
    return module, first.device


@contextmanager
def _attached(model: object, module: nn.Module, feeding: feed.Feed, device: torch.device) -> Iterator[Gated]:
    """The gates that were given; else gates of our own, taken off again afterwards."""
    # Gates are tried out on the example; numbers that are not finite are for the first update to name.
    example = nested.each(lambda t: _finite(t).to(device), feeding.example())
    checks.readable(module, example)
    if model is not module:
        yield model  # type: ignore[misc]
        return
    gated = attach(module, example)
    try:
        yield gated
    finally:
        gated.detach()


def _finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor


def _optimizer(factory: OptimizerFactory, module: nn.Module) -> torch.optim.Optimizer:
    if isinstance(factory, torch.optim.Optimizer) or not callable(factory):
        raise BadType(
            f"optimizer is a function that is given the parameters, such as lambda p: torch.optim.AdamW(p, lr=1e-3), "
            f"not {type(factory).__name__}"
        )
    inner = factory([parameter for parameter in module.parameters() if parameter.requires_grad])
    if not isinstance(inner, torch.optim.Optimizer):
        raise BadType(f"the optimizer function gives a torch.optim.Optimizer, not {type(inner).__name__}")
    check_parameters(inner, module)
    return inner


def _scheduler(factory: SchedulerFactory, inner: torch.optim.Optimizer) -> Scheduler:
    example = "lambda o: torch.optim.lr_scheduler.StepLR(o, 10)"
    if not callable(factory):
        raise BadType(f"scheduler is a function that is given the optimizer, such as {example}, not {factory!r}")
    found = factory(inner)
    if not isinstance(found, Scheduler):
        raise BadType(f"the scheduler function gives a torch scheduler, as {example}, not {type(found).__name__}")
    return found


def _settings(
    module: nn.Module, gated: Gated, feeding: feed.Feed, optimizer: torch.optim.Optimizer, search: Search
) -> dict[str, Any]:
    """What the run is of, in a form that two calls can be compared by."""
    numbers = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "model": identity.network(module),
        "space": gated.space.to_json(),
        "data": feeding.describe(),
        "full_cost": float(search.full_cost),
        "samples": search.samples,
        "optimizer": json.loads(json.dumps({type(optimizer).__name__: numbers}, default=repr)),
    }
