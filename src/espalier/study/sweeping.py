"""Many runs described by settings: a network, data, targets or penalties, seeds; trained as one batch, as a sweep does.

The words are those of one run (:mod:`espalier.study.training`); each run leaves its own run directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import functional as F

from espalier import files
from espalier.data import Dataset, names
from espalier.data.dataset import from_arrays
from espalier.ship import import_spec
from espalier.ship.factories import Network
from espalier.space import BadInput
from espalier.study import sources
from espalier.study.training import Task, loss_of, multiple, own_code
from espalier.train import Result, feed, pytree, sweep
from espalier.train.batched import Compute, Run
from espalier.train.on_ray import Ray
from espalier.train.recipes import Recipe
from espalier.train.setting import number, setting, share
from espalier.train.stop import Stop

METHODS = ("search", "found", "permuted", "penalty")


@dataclass(frozen=True)
class Sweeping(Task):
    """Every target, or every penalty, with every seed."""

    targets: tuple[float, ...] = setting(
        (),
        "Shares of the full cost to end at, as 0.1,0.3 or 10%,30%.",
        read=partial(share, name="a target"),
        after="model_arg",
    )
    penalties: tuple[float, ...] = setting(
        (), "Instead of targets: how strongly cost counts, as 2^-6,0.", read=number, after="targets"
    )
    seeds: int = setting(1, "Runs of each setting.", least=1, after="scale")
    first_seed: int = setting(0, "The first seed.", least=0, after="seeds")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.targets) == bool(self.penalties):
            raise BadInput("give either --targets, as 0.1,0.3, or --penalties, as 2^-6,0")


def run(sweeping: Sweeping, out: Path, **more: Any) -> dict[str, list[Result]]:
    """As :func:`_run`; code of the user's own that fails is told of by ``own_code`` of a single run."""
    with own_code(out):
        return _run(sweeping, out, **more)


def _run(
    sweeping: Sweeping,
    out: Path,
    *,
    methods: Sequence[str] = ("search",),
    penalties: Sequence[float] = (),
    recipes: dict[str, Recipe] | None = None,
    at_once: int | None = None,
    updates_at_once: int = 50,
    time_limit: float | None = None,
    executor: Ray | None = None,
    quiet: bool = False,
    force: bool = False,
) -> dict[str, list[Result]]:
    """Train each method as one sweep into ``out/METHOD/run-000`` and so on; the same call goes on with what is there.

    methods: "search"; "found", the structures of the search from scratch; "permuted", the control, a search that is
    told its signal in random order; "penalty", every one of ``penalties``. recipes: by method, where it is not that of
    the task. force: go on with what is there although it is of other data, code or settings, which the runs record.
    executor: where the batches are trained, if not here.
    Returns the results by method; those that follow one that was stopped by the time limit are not begun.
    """
    source = sweeping.source()
    data = source.train
    if not isinstance(data, Dataset) and source.pair is None:
        raise BadInput(
            f"--data {sweeping.data}: many runs at once read one tensor of inputs and one of targets, which these data "
            "are not; train one run at a time by espalier train"
        )
    validation = source.validation
    network = Network(sweeping.model, import_spec.arguments(sweeping.model_arg), source.shape, source.outputs)
    model = network.build(sweeping.first_seed)
    reading = feed.read(data, sweeping.batch_size, sweeping.first_seed, pytree.dtype(model))
    loss = loss_of(sweeping, source, model, reading)
    descent = sweeping.descent()
    schedule = sweeping.schedule or (None if sweeping.optimizer in ("", "sgd") else "linear")
    precision: dict[str, Any] = {"precision": sweeping.precision} if sweeping.precision else {}
    own: dict[str, Any] = {} if loss is F.cross_entropy else {"loss": loss}
    seeds = range(sweeping.first_seed, sweeping.first_seed + sweeping.seeds)
    results, stop = dict[str, list[Result]](), Stop(time_limit)
    for method in methods:
        if stop.now():
            break
        results[method] = sweep(
            partial(_built, network),
            data,
            runs=_runs(method, sweeping, seeds, penalties or sweeping.penalties, results.get("search", [])),
            epochs=sweeping.epochs,
            batch_size=sweeping.batch_size,
            samples=sweeping.samples,
            round_to=multiple(sweeping.round_to),
            cost=sweeping.cost,
            optimizer=descent,
            schedule=schedule,
            settle=sweeping.settle,
            recipe=(recipes or {}).get(method) or sweeping.numbers(),
            validation=validation,
            compute=Compute(updates_at_once=updates_at_once, **precision),
            at_once=at_once,
            device=sweeping.place() if executor is None else sweeping.device or None,
            checkpoint=files.below(out, out / method),
            resume="anyway" if force else "same",
            time_limit=None if stop.end is None else max(stop.end - time.monotonic(), 1e-3),
            executor=executor,
            quiet=quiet,
            **own,
        )
        if not all(result.finished for result in results[method]):
            break
    return results


def _built(network: Network) -> nn.Module:
    """From the random state as it is, which a sweep sets for each seed."""
    return network.build()


def _runs(
    method: str, sweeping: Sweeping, seeds: Sequence[int], penalties: Sequence[float], searched: Sequence[Result]
) -> list[Run]:
    if method == "found":
        return [Run(result.run.seed, mask=result.mask) for result in searched if result.run is not None]
    if method == "penalty" or not sweeping.targets:
        return [Run(seed, penalty=penalty) for penalty in penalties for seed in seeds]
    control = method == "permuted"
    return [Run(seed, target=target, permuted=control) for target in sweeping.targets for seed in seeds]


def as_dataset(given: str, **about: Any) -> Dataset:
    """Data of one's own as a study of classes reads them: a training and a test part, or a tenth held out."""
    source = sources.read(given, **about)
    if isinstance(source.train, Dataset):
        return source.train
    pair, test = source.pair, source.validation
    if pair is None or pair[1].is_floating_point() or test is None:
        raise BadInput(f"--data {given}: a study reads inputs and integer classes, in one tensor each")
    return from_arrays(pair, test, name=name_of(given))


def name_of(given: str) -> str:
    """What data are called in the names of folders.

    >>> name_of("mnist"), name_of("data/my arrays.npz"), name_of("net.py:parts")
    ('mnist', 'my_arrays', 'net-parts')
    """
    if given in names():
        return given
    where, _, function = given.partition(":")
    stem = Path(where).name.removesuffix(".npz").removesuffix(".py")
    words = f"{stem}-{function}" if function else stem
    return "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in words)
