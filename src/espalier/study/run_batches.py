"""Batches of a study's runs: what a sweep is asked for, how far it is in words, and what is recorded of each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from espalier.data import Dataset
from espalier.files import clean
from espalier.space import BadInput
from espalier.study.networks import Row, Selection, Units
from espalier.study.run_files import mask_to_hex
from espalier.study.settings import PAIR, GridSettings, PaperSettings, RunSpec, StudySettings
from espalier.train.batched.batch import Compute, Precision
from espalier.train.batched.batch_engine import BatchEngine
from espalier.train.batched.runs import Plan, Run
from espalier.train.batched.step import cross_entropy
from espalier.train.callbacks import Callback
from espalier.train.checkpoint import Checkpoint
from espalier.train.loop import Loop, Stop, seeded
from espalier.train.progress import Progress

BINS = 20  # of a histogram of theta
DRAWS = 20  # structures of the stochastic prediction
CHUNK = 1000  # test images at once
ALIGNED = 16  # units: rows of other lengths are multiplied by slower kernels on a GPU
# What run files call the numbers of a row.
CURVE = {"loss": "train_loss", "error": "train_error", "validation_loss": "test_loss", "validation_error": "test_error"}


class Lines(Callback):
    """Tells a person how a batch goes. names: of each run; share: of a row, that is shown."""

    def __init__(self, progress: Progress, names: Sequence[str], share: str) -> None:
        self.progress, self.names, self.share = progress, names, share

    def on_begin(self, loop: Loop) -> None:
        self.progress.start(loop.update, loop.updates)

    def on_update(self, loop: Loop) -> None:
        self.progress.update(loop.update, self._line(loop))

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        self.progress.epoch(self._line(loop))
        self.progress.states(settings_in_lines(self.names, rows, self.share))

    def on_leave(self, loop: Loop) -> None:
        self.progress.stop()

    def _line(self, loop: Loop) -> str:
        text = f"{len(self.names)} runs, {loop.pace}"
        rows = [history[-1] for history in loop.histories if history]
        if rows:
            shares = [row[self.share] for row in rows if row.get(self.share) is not None]
            text += "; median" + (f" share {median(shares):.1%}," if shares else "")
            text += f" error {median(row['validation_error'] for row in rows):.2%}"
        return text


def settings_in_lines(names: Sequence[str], rows: Sequence[Row], share: str) -> list[str]:
    """One line for each name: the share and the error of every run that has it, in their order.

    >>> settings_in_lines(["a", "a"], [{"s": 0.1, "validation_error": 0.02}, {"s": 0.2, "validation_error": 0.03}], "s")
    ['a: share 10.0% 20.0%, error 2.00% 3.00%']
    """
    lines = list[str]()
    for name in dict.fromkeys(names):
        here = [row for its, row in zip(names, rows, strict=True) if its == name]
        shares = " ".join(f"{row[share]:.1%}" for row in here if share in row)
        errors = " ".join(f"{row['validation_error']:.2%}" for row in here)
        lines.append(f"{name}: {f'share {shares}, ' if shares else ''}error {errors}")
    return lines


def train(loop: Loop, label: str, which: str, progress: Progress) -> bool:
    """A batch to its end, or until it is time to stop, with words for a person. which: its number among others."""
    engine, runs = loop.engine, len(loop.engine.runs)
    progress.say(f"{label}: {runs} runs of {engine.total:,} updates as one batch{which} on {engine.device}")
    with seeded(0, engine.device):
        finished = loop.train()
    if finished:
        took = loop.elapsed
        progress.say(f"{label}: {runs} runs done in {took:,.1f} s, {took / runs:,.2f} s each")
    else:
        progress.say(f"{label}: stopped after {engine.done:,} updates; the same command goes on from there")
    return finished


def budget(settings: StudySettings, data: Dataset, specs: Sequence[RunSpec], samples: int) -> Row:
    """What the plan of every study's batch has. samples: masks in an update of a search, of as many examples as two."""
    updates = settings.updates(len(data.train_labels))
    if not updates:
        size = f"{len(data.train_labels)} examples in {settings.epochs} epochs"
        raise BadInput(f"batch_size={settings.batch_size} leaves no update of {size}")
    samples = samples if specs[0].searches else PAIR
    parts = {"epochs": settings.epochs, "updates": updates, "points": settings.points, "loss": cross_entropy}
    return parts | {"batch_size": PAIR * settings.batch_size // samples, "samples": samples}


class PaperBatch(Callback):
    """Runs of one of the paper's experiments, of one shape: all of the search, or all with given masks (fixed networks,
    dropout, random selection)."""

    def __init__(
        self,
        settings: PaperSettings,
        network: Selection,
        data: Dataset,
        specs: Sequence[RunSpec],
        device: torch.device,
        compute: Compute | None = None,
    ) -> None:
        self.settings, self.network, self.data, self.specs = settings, network, data, list(specs)
        self.masks, self.drawn = zip(*(network.given(spec) for spec in specs))
        if specs[0].searches:
            runs = [
                Run(s.seed, None if s.target else s.penalty or 0.0, target=s.target, permuted=settings.permuted)
                for s in specs
            ]
        else:
            canonical = network.gated.canonical(torch.stack(self.masks))
            runs = [Run(s.seed, mask=mask, dropout=s.rate) for s, mask in zip(specs, canonical, strict=True)]
        recipe, rate = settings.recipe_of(specs[0].method), None if specs[0].target else settings.theta_rate
        plan = Plan(
            **budget(settings, data, specs, recipe.samples),
            cost=network.cost(settings.cost),
            recipe=recipe,
            search=None if rate is None else {"learning_rate": rate},
            pad=settings.pad,
            seeded_by=[spec.describe() for spec in specs],
            **network.options,
        )
        compute = compute or Compute(precision=cast(Precision, settings.precision))
        self.engine = BatchEngine(network.build, data, None, runs, plan, device, compute)

    def loop(self, folder: Path | None, stop: Stop, progress: Progress, **kept: Any) -> Loop:
        """folder: of the checkpoints, None for none. The same settings and folder go on where the last call stopped.
        kept: see Checkpoint."""
        methods = dict.fromkeys(spec.method for spec in self.specs)
        together: Row = {method: self.settings.describe(method) for method in methods}
        together |= {"runs": [spec.describe() for spec in self.specs], "data": self.data.fingerprint()}
        together |= self.network.describe() | self.network.layout() | {"device": self.engine.device.type}
        names = [spec.label for spec in self.specs]
        store = None if folder is None else Checkpoint(folder, together, **kept)
        return Loop(self.engine, stop, [self, Lines(progress, names, self.network.share)], store)

    def selected(self) -> Tensor:
        """M* of each run ``(R, d)``, or its given mask; not canonical."""
        search = self.engine.search
        return torch.stack(self.masks).to(self.engine.device) if search is None else search.select()

    def on_epoch(self, loop: Loop, rows: list[Row]) -> None:
        search, counts = self.engine.search, self.network.counts(self.selected())
        for row, count in zip(rows, counts, strict=True):
            row |= count
        if search is not None:
            for row, histogram in zip(rows, self._histograms(search.theta).tolist(), strict=True):
                row["theta_histogram"] = histogram

    def _histograms(self, theta: Tensor) -> Tensor:
        """Counts ``(R, groups, BINS)`` of theta in equal parts of [0, 1]."""
        bins = (theta * BINS).long().clamp(max=BINS - 1)
        counts = [torch.nn.functional.one_hot(bins[:, where], BINS).sum(1) for where in self.network.groups]
        return torch.stack(counts, 1)

    def ships(self) -> list[dict[str, Tensor]]:
        """All tensors of each run's module as it was evaluated last, where it has statistics of its own."""
        engine = self.engine
        if engine.shipped is None and engine.validation is not None:  # it was evaluated by a process that is gone
            engine.evaluate(engine.masks(), engine.validation, True)
        return engine.shipped or []

    def results(self, loop: Loop) -> list[Row]:
        """What came out of each run, of its last update."""
        engine, masks = self.engine, self.selected()
        drawn = None
        if engine.search is not None and not engine.search.settled and isinstance(self.network, Units):
            with loop.timed("measuring"):
                drawn = stochastic(engine, engine.search.theta)
        about = self.network.about(engine.masks())
        keys = ("update", *self.network.counts(masks[:1])[0], *CURVE, "theta_histogram")
        parts, total = {name: round(value, 3) for name, value in loop.seconds.items()}, round(loop.elapsed, 3)
        records = list[Row]()
        for i, result in enumerate(loop.results()):
            curve = [{CURVE.get(key, key): row[key] for key in keys if key in row} for row in result.history]
            last = {k: v for k, v in curve[-1].items() if k not in ("update", "train_loss", "train_error")}
            outcome: Row = {"updates": result.updates, **last, "canonical": about[i]} | self.drawn[i]
            if drawn is not None:
                loss, error = (float(column[i]) for column in drawn)
                outcome["stochastic"] = {"draws": DRAWS, "test_loss": loss, "test_error": error}
            outcome["mask"] = mask_to_hex(masks[i])
            outcome |= {"diverged_at": result.diverged, "skipped_updates": result.skipped}
            seconds = {"batch": total, "per_run": round(total / len(self.specs), 3), "parts": parts}
            record: Row = {"run": self.specs[i].describe(), "result": outcome, "curve": curve, "seconds": seconds}
            records.append(record | {"runs_in_batch": len(self.specs), "calls": loop.calls})
        return records


@torch.no_grad()
def stochastic(engine: BatchEngine, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and error ``(R)`` of the mean prediction of structures drawn from theta ``(R, d)``, on the test images."""
    assert engine.validation is not None
    inputs, labels = engine.validation.inputs, engine.validation.targets
    generator = torch.Generator(theta.device).manual_seed(engine.seed)
    masks = torch.rand((DRAWS, *theta.shape), dtype=theta.dtype, device=theta.device, generator=generator) < theta
    sums = torch.zeros(2, len(theta), dtype=torch.float64, device=theta.device)
    over_runs = vmap(engine.gated.call, in_dims=(0, 0, None))
    with engine.batch.compute.applied():
        for start in range(0, len(labels), CHUNK):
            x, y = engine.validation.read(inputs[start : start + CHUNK]), labels[start : start + CHUNK]
            mean = torch.zeros((), device=theta.device)
            for drawn in masks:
                mean = mean + over_runs(engine.batch.state.params, drawn.to(x.dtype), x).softmax(-1) / DRAWS
            right = mean.gather(-1, y.view(1, -1, 1).expand(len(theta), -1, 1)).squeeze(-1)
            sums[0] += -right.clamp(min=1e-30).log().to(torch.float64).sum(-1)
            sums[1] += (mean.argmax(-1) != y).sum(-1)
    loss, error = sums / len(labels)
    return loss, error


class GridBatch:
    """Runs of one method of a grid. full: the network, uncut.

    Networks that are trained as they are (scratch, found) are computed in a small shape that holds every one of
    them, each under the mask of its own widths and with the initial weights of its own fan-in.
    """

    def __init__(
        self,
        settings: GridSettings,
        full: Units,
        data: Dataset,
        specs: Sequence[RunSpec],
        device: torch.device,
        compute: Compute | None = None,
    ) -> None:
        self.settings, self.data, self.specs, self.method = settings, data, list(specs), specs[0].method
        self.full = full
        each = [spec.units for spec in specs if spec.units is not None]
        self.network = Units(holding(full.widths, each, ALIGNED if device.type == "cuda" else 1), full.least)
        plan = Plan(
            **budget(settings, data, specs, settings.samples),
            cost=settings.cost,
            recipe=settings.recipe_of(self.method),
            seeded_by=[[spec.describe() for spec in specs], settings.describe(self.method)],
            **self.network.options,
        )
        runs = [self._run(spec) for spec in specs]
        compute = compute or Compute(precision=cast(Precision, settings.precision))
        self.engine = BatchEngine(self.network.build, data, None, runs, plan, device, compute)

    def _run(self, spec: RunSpec) -> Run:
        if spec.units is not None:
            return Run(spec.seed, mask=self.network.first(spec.units))
        price = {"penalty": spec.penalty} if spec.target is None else {"target": spec.target}
        return Run(spec.seed, permuted=self.method == "permuted", **price)

    def loop(self, folder: Path | None, stop: Stop, progress: Progress, **kept: Any) -> Loop:
        """folder: of the checkpoints, None for none. kept: see Checkpoint."""
        together = self.settings.describe(self.method) | self.full.describe()
        together |= {"runs": [spec.describe() for spec in self.specs], "data": self.data.fingerprint()}
        together["device"] = self.engine.device.type
        names = [spec.label for spec in self.specs]
        store = None if folder is None else Checkpoint(folder, together, **kept)
        return Loop(self.engine, stop, [Lines(progress, names, "expected_share")], store)

    def results(self, loop: Loop) -> list[Row]:
        """What came out of each run, of its last update."""
        units = [row["units"] for row in self.network.counts(self.engine.masks())]
        shares = self.full.counts(torch.stack([self.full.first(kept) for kept in units]))
        keys = ("update", "loss", "validation_loss", "validation_error", "expected_share")
        records = list[Row]()
        for spec, share, result in zip(self.specs, shares, loop.results(), strict=True):
            last = result.history[-1]
            outcome: Row = {"updates": result.updates, "test_error": last["validation_error"]}
            outcome |= {"test_loss": last["validation_loss"], **share}
            if result.share_before is not None:
                outcome |= {"reached_before": result.share_before, "reached_after": result.share_after}
                if spec.target is not None:
                    outcome["gap"] = result.share_before - spec.target
            outcome |= {"diverged_at": result.diverged, "skipped_updates": result.skipped}
            curve = [{CURVE.get(key, key): row[key] for key in keys if key in row} for row in result.history]
            records.append({"run": spec.describe(), "result": outcome, "curve": clean(curve, digits=4)})
        return records


def holding(widths: Sequence[int], each: Sequence[Sequence[int]], unit: int) -> tuple[int, ...]:
    """The widths of a network that holds each of these hidden layers, a multiple of ``unit`` or those of the full one.

    >>> holding((64, 40, 40, 10), [(3, 17), (9, 39)], 16)
    (64, 16, 40, 10)
    """
    inputs, *hidden, classes = widths
    if each:
        hidden = [min(-(-max(column) // unit) * unit, most) for column, most in zip(zip(*each), hidden)]
    return (inputs, *hidden, classes)
