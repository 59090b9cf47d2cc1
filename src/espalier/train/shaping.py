"""``espalier.shape``: a recipe carried into a loop of one's own, and what comes out of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.attach import attach
from espalier.gates.blocks import RoundTo
from espalier.gates.recalibrate import recalibrate_under
from espalier.search import Search
from espalier.space import BadInput, BadType
from espalier.space import whole_number as whole
from espalier.train import checks, descent, feed, pytree, ranks, recipes, scoring, targets
from espalier.train.descent import SGD, Adam, Constant, Optimizer, Schedule
from espalier.train.gradients import Gated
from espalier.train.optimizer import StructureOptimizer, check_parameters
from espalier.train.ranks import Ranks
from espalier.train.recipes import OptimizerFactory, Recipe
from espalier.train.result import Result, Shares, rows
from espalier.train.scoring import Loss, Metrics
from espalier.train.targets import Target


def shape(
    model: nn.Module | Gated,
    example: Any = None,
    optimizer: torch.optim.Optimizer | Optimizer | OptimizerFactory | None = None,
    *,
    updates: int,
    target: Target | None = None,
    penalty: float | None = None,
    cost: str | Cost | Tensor | Sequence[float] = "weights",
    samples: int | None = None,
    round_to: RoundTo | None = None,
    kinds: Collection[str] | None = None,
    ignore: Collection[str] = (),
    schedule: str | Schedule | None = None,
    recipe: str | Recipe | None = None,
    settle: float | None = None,
    seed: int = 0,
    parallel: str | Ranks | None = None,
) -> StructureOptimizer:
    """Everything ``fit`` does with the structure, for a loop of your own.

    model: a module, to which gates are attached, or what :func:`espalier.attach` gave.
    example: inputs to attach with; a tensor, a tuple (positional arguments) or a dict (keyword arguments).
    optimizer: of the model's parameters: a torch optimiser, or a function or settings as in ``fit``; default: as in
        ``fit`` where targets are classes, with the recipe's schedule. For other targets give ``AdamW(0.01)``.
    updates: how many there will be; begin, ramp and settle are shares of them.
    parallel: with several processes, "data" or "structure"; see :class:`StructureOptimizer`. All of them start with the
        weights of the first.
    Everything else is as in :func:`espalier.fit`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, y = torch.randn(16, 4), torch.arange(16) % 2
    >>> shaping = shape(model, x[:4], target=0.5, updates=10)
    >>> for _ in range(10):
    ...     def closure(inputs, targets):
    ...         loss = nn.functional.cross_entropy(shaping.network(inputs), targets)
    ...         loss.backward()
    ...         return loss
    ...     loss = shaping.step(closure, x, y)
    >>> shaping.finish((x, y)).share_after <= 0.5
    True
    """
    module = checks.module_of(model)
    several = ranks.read(parallel)
    if several is not None:
        several.begin(module)
    own = recipes.chosen(recipe, None, settle, penalised=target is None)
    phases = own.phases(whole(updates, "updates", 1), target)
    if optimizer is None:
        optimizer = recipes.usual_optimizer(own, module)
    rates = descent.read_schedule(schedule, own.schedule, optimizer)
    inner = built(own.optimizer if optimizer is None else optimizer, module)
    scheduler = None if rates == Constant() else descent.of_torch(rates, inner, phases.end)
    masks = own.samples if samples is None else samples
    how = checks.attaching(round_to, kinds, ignore, attached=model is not module)
    with _attached(model, module, example, how) as gated:
        asked = targets.read(gated, cost, target)
        if several is not None:
            several.check(masks, [asked.name, *asked.limits])
        with checks.unreachable(gated, asked.name):
            search = Search(
                gated.space,
                cost=asked.cost,
                limits=asked.limits,
                penalty=penalty,
                samples=masks,
                seed=whole(seed, "seed", 0),
                device=next(module.parameters()).device,
                **own.search_arguments(gated.space, phases, asked.share),
            )
        if several is not None:
            several.agree(
                {
                    "space": gated.space.to_json(),
                    "phases": asdict(phases),
                    "target": repr(asked.share),
                    "full_cost": float(search.full_cost),
                    "penalty": penalty,
                    "seed": seed,
                    "samples": masks,
                    "recipe": asdict(own),
                    "optimizer": type(inner).__name__,
                }
            )
        return StructureOptimizer(inner, search, gated, phases=phases, asked=asked, scheduler=scheduler, ranks=several)


@contextmanager
def _attached(model: object, module: nn.Module, example: Any, how: Mapping[str, Any]) -> Iterator[Any]:
    """The gates that were given; else gates of our own, taken off again where what follows is refused."""
    if example is not None:
        device = next(module.parameters()).device
        # Gates are tried out on the example; numbers that are not finite are for the first update to name.
        example = pytree.each(lambda t: t.nan_to_num(0.0, 0.0, 0.0).to(device), example)
        checks.readable(module, example)
    if model is not module:
        yield model
        return
    if example is None:
        raise BadInput("shape needs some example inputs to attach gates with: shape(model, inputs[:4], ...)")
    gated = attach(module, example, **how)
    try:
        yield gated
    except BaseException:
        gated.detach()
        raise


def built(given: torch.optim.Optimizer | Optimizer | OptimizerFactory, module: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a module's parameters that was given: as it is, by settings, or by a function."""
    inner: Any = given
    if not isinstance(given, torch.optim.Optimizer):
        factory = given.torch if isinstance(given, (SGD, Adam)) else given
        if not callable(factory):
            raise BadType(
                f"optimizer is a function that is given the parameters, such as lambda p: torch.optim.AdamW(p, "
                f"lr=1e-3), not {type(factory).__name__}"
            )
        inner = factory([parameter for parameter in module.parameters() if parameter.requires_grad])
        if not isinstance(inner, torch.optim.Optimizer):
            raise BadType(f"the optimizer function gives a torch.optim.Optimizer, not {type(inner).__name__}")
    check_parameters(inner, module)
    return inner  # type: ignore[no-any-return]


def result_of(
    structure: StructureOptimizer,
    data: Any,
    *,
    loss: Loss | None = None,
    validation: Any = None,
    metrics: Metrics = None,
    **about: Any,
) -> Result:
    """Select, recalibrate, cut, evaluate. The state of the run is not changed by it, but for the running statistics of
    BatchNorm, which are those of the mask that ships from here on.

    data, validation: a feed, or anything that ``fit`` takes. about: further fields of the result.
    """
    search, gated = structure.search, structure.gated
    structure.check()
    structure.write_back()
    dtype = pytree.dtype(gated.model)
    reading = data if isinstance(data, feed.Feed) else feed.read(data, 1, 0, dtype)
    selected = search.select()
    mask = gated.canonical(selected)
    recalibrate_under(gated, mask, reading.once())
    model = gated.compact(mask).eval()
    score = None
    if validation is not None:
        if not isinstance(validation, feed.Feed):
            validation = feed.read_held_out(validation, 512, dtype, data if isinstance(data, Dataset) else None)
        score = scoring.evaluate(model, validation, loss=loss or nn.functional.cross_entropy, metrics=metrics)
    shares = Shares(gated, search, mask.device)
    measured = targets.measured_again(search, gated, model, mask, structure.errors)
    if measured:
        latencies = [row | {"corrections": structure.corrections} for row in measured]
        about |= {"latency": targets.tightest(latencies), "latencies": tuple(latencies)}
    own: dict[str, Any] = {"history": [], "finished": True, "seconds": 0.0} | about
    return Result(
        model=model,
        mask=mask,
        theta=search.theta.clone(),
        target=None if search.target is None else float(search.target),
        share_before=float(search.cost(search.mode()) / search.full_cost),
        share_after=float(search.cost(selected) / search.full_cost),
        shares=rows(shares(mask))[0],
        validation=score,
        penalty=float(search.penalty),
        updates=structure.update,
        space=gated.space,
        explanation=gated.explain(mask) if hasattr(gated, "explain") else "",
        order=getattr(gated, "flow", ()),
        inputs=reading.prepared,
        search=search,
        gated=gated,
        **own,
    )
