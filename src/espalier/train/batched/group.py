"""One batch of runs from the first update to the compact models: epochs, settling, checkpoints, a limit of time."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data import Dataset, standardise
from espalier.search import Search
from espalier.space import BadInput, Diverged
from espalier.train.batched import stack
from espalier.train.batched.batch import Batch, Compute, searched
from espalier.train.batched.feed import Pair, read_data
from espalier.train.batched.masks import Given, Source
from espalier.train.batched.measure import Measure
from espalier.train.batched.plan import Plan
from espalier.train.batched.runs import Run
from espalier.train.checkpoint import Checkpoint

SLICE = 2000  # updates between looks at the clock
SAVE_EVERY = 60.0  # seconds between checkpoints; one is written at the end of an epoch


@dataclass(frozen=True, eq=False)
class Result:
    """One run. model: compact, with its weights; mask: canonical ``(d)``; theta ``(d)``, None where masks were given.

    history: one row of metrics for each epoch. finished: False where the limit of time came first; the model is then
    what the run had come to. diverged: the first update without a finite loss, or None.
    """

    run: Run
    model: nn.Module
    mask: Tensor
    theta: Tensor | None
    history: list[dict[str, Any]]
    finished: bool
    diverged: int | None


class Clock:
    """The time since a sweep began, and whether it is up."""

    def __init__(self, limit: float | None) -> None:
        if limit is not None and not limit > 0:
            raise BadInput(f"time_limit is a positive number of seconds, not {limit!r}")
        self.start, self.limit = time.monotonic(), math.inf if limit is None else limit

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def up(self) -> bool:
        return self.seconds >= self.limit


class Group:
    """Runs of equal shape, trained together."""

    def __init__(
        self,
        factory: stack.Factory,
        data: Dataset | Pair,
        validation: Pair | None,
        runs: Sequence[Run],
        plan: Plan,
        device: torch.device,
        compute: Compute,
        folder: Path | None,
    ) -> None:
        inputs, targets, gain, shift = read_data(data, torch.float32)
        if plan.batch_size > len(inputs):
            most = f"{len(inputs)} examples; use at most {len(inputs)}"
            raise BadInput(f"batch_size={plan.batch_size} is larger than the data, {most}")
        self.factory, self.runs, self.plan, self.device = factory, list(runs), plan, device
        self.example = standardise(inputs[:4].cpu(), gain, shift)
        self.gated, params, fixed = stack.stacked(factory, [r.seed for r in runs], self.example, device)
        self.inputs, _, self.gain, self.shift = read_data(data, next(iter(params.values())).dtype)
        self.per_epoch = len(inputs) // plan.batch_size
        self.total = plan.epochs * self.per_epoch
        self.settle_at = self.total - round(plan.settle * self.total)
        self.search = self._search() if self.runs[0].searches else None
        self.batch = Batch(
            self.gated.call, params, fixed, data=data, seeds=[r.seed for r in runs], source=self._source(),
            loss=plan.loss, optimizer=plan.optimizer, schedule=plan.schedule, total=self.total,
            batch_size=plan.batch_size, samples=plan.samples, pad=plan.pad, compute=compute,
        )  # fmt: skip
        if validation is not None:
            validation = validation[0].to(device), validation[1].to(device)
        self.measure = Measure(self.gated, self.batch, self.search, validation)
        self.histories: list[list[dict[str, Any]]] = [[] for _ in runs]
        self.checkpoint: Checkpoint | None = None
        if folder is not None:
            shapes = [[str(t.dtype), *t.shape] for t in (inputs, targets)]
            settings = plan.describe() | {"runs": [r.describe() for r in runs], "data": shapes}
            settings["precision"] = compute.precision
            self.checkpoint = Checkpoint(folder, settings)

    def _search(self) -> Search:
        plan, cost = self.plan, self.plan.cost
        price: dict[str, Any] = {"penalty": [run.penalty or 0.0 for run in self.runs]}
        if self.runs[0].target is not None:
            price = {"target": [run.target for run in self.runs], "horizon": self.settle_at}
        # The masks of a batch come from one generator: its seed is made of all that makes the batch.
        seed = zlib.crc32(json.dumps([run.describe() for run in self.runs]).encode())
        return Search(
            self.gated.space, cost=self.gated.cost(cost) if isinstance(cost, str) else cost, samples=plan.samples,
            seed=seed, batch=(len(self.runs),), device=self.device, **price, **plan.search,
        )  # fmt: skip

    def _source(self) -> Source:
        if self.search is not None:
            return searched(self.search, [run.permuted for run in self.runs])
        d = self.gated.space.d
        for run in self.runs:
            if run.mask is not None:
                self.gated.space.check_mask(run.mask)
        masks = torch.stack([torch.ones(d) if run.mask is None else run.mask.float().reshape(d) for run in self.runs])
        rates = torch.tensor([run.dropout or 0.0 for run in self.runs])
        if bool((rates > 0).any()) and stack.has_norms(self.gated.model):
            raise BadInput(
                "dropout draws a mask for each example, which batch statistics cannot follow; this model has BatchNorm"
            )
        seed = zlib.crc32(json.dumps([run.describe() for run in self.runs]).encode())
        return Given(masks.to(self.device), rates.to(self.device), seed)

    def masks(self) -> Tensor:
        """What would ship now, canonical: ``(R, d)``."""
        if self.search is not None:
            return self.gated.canonical(self.search.select())
        assert isinstance(self.batch.source, Given)
        return self.gated.canonical(self.batch.source.mask)

    def train(self, clock: Clock) -> list[Result]:
        """Go on to the end, or until time is up."""
        self._resume()
        saved = clock.seconds
        while self.batch.done < self.total and not clock.up:
            if self.search is not None and self.batch.done == self.settle_at and not self.search.settled:
                self.search.settle()
                self.batch.settle(self.masks())
            self.gated.model.train()
            self.batch.advance(self._until_next())
            if self.device.type == "cuda" and math.isfinite(clock.limit):
                torch.cuda.synchronize(self.device)
            if self.batch.done % self.per_epoch == 0:
                self._end_of_epoch(clock)
                if clock.seconds - saved > SAVE_EVERY:
                    self._save()
                    saved = clock.seconds
        self._save()
        return self._results()

    def _until_next(self) -> int:
        """Updates until something is due: the end of the epoch, settling, a look at the clock."""
        done = self.batch.done
        due = [done + SLICE, (done // self.per_epoch + 1) * self.per_epoch]
        if self.search is not None and done < self.settle_at:
            due.append(self.settle_at)
        return int(min(due) - done)

    def _end_of_epoch(self, clock: Clock) -> None:
        self.gated.model.eval()
        rows = self.measure.rows(self.batch.done // self.per_epoch, self.masks(), clock.seconds)
        for history, row in zip(self.histories, rows, strict=True):
            history.append(row)
        broken = self.batch.state.broken
        if bool((broken >= 0).all()):
            raise Diverged(
                f"every run met an update whose losses were all infinite or not a number, the first at update "
                f"{int(broken.min())}. Lower the learning rate of the weights, or look at the data"
            )

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        state: dict[str, Any] = {"batch": self.batch.state_dict(), "histories": self.histories}
        if self.search is not None:
            state["search"] = self.search.state_dict()
        self.checkpoint.save(state, self.batch.done)

    def _resume(self) -> None:
        state = self.checkpoint.load() if self.checkpoint is not None else None
        if state is None:
            return
        if self.search is not None:
            self.search.load_state_dict(state["search"])
        self.batch.load_state_dict(state["batch"])
        self.histories = state["histories"]

    def _inputs(self) -> Iterator[Tensor]:
        for start in range(0, len(self.inputs), 512):
            yield standardise(self.inputs[start : start + 512].cpu(), self.gain, self.shift)

    def _results(self) -> list[Result]:
        masks, params, fixed = self.masks().cpu(), self.batch.state.params, self.batch.state.fixed
        calibrate = stack.has_norms(self.gated.model)
        # The template has lost its running statistics; what ships has them.
        gated = stack.build(self.factory, self.runs[0].seed, self.example) if calibrate else self.gated
        results = list[Result]()
        for i, run in enumerate(self.runs):
            stack.load(gated, params | fixed, i)
            model = gated.compact(masks[i])
            if calibrate:
                from espalier.compact import recalibrate

                recalibrate(model, self._inputs())
            theta = None if self.search is None else self.search.theta[i].cpu().clone()
            broken = int(self.batch.state.broken[i])
            diverged = broken if broken >= 0 else None
            finished = self.batch.done >= self.total
            results.append(Result(run, model, masks[i], theta, self.histories[i], finished, diverged))
        return results
