"""The loop of one run: updates, epochs, checkpoints; stopped after any update, and resumed there exactly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from espalier.space import Diverged, EspalierError
from espalier.train import chance, checks, nested, score
from espalier.train.checkpoint import Checkpoint
from espalier.train.feed import Batch, Feed
from espalier.train.metrics import Row, Shares, Thinned, clean, structure_row
from espalier.train.optimizer import StructureOptimizer
from espalier.train.presets import Phases
from espalier.train.progress import Progress
from espalier.train.record import Record
from espalier.train.score import Loss
from espalier.train.statistics import calibrated
from espalier.train.step import scalar
from espalier.train.stop import Stop

Scheduler = torch.optim.lr_scheduler.LRScheduler
SAVING = 0.05  # of the time may go into checkpoints
LOOK = 100  # updates between two looks whether a run on a GPU has diverged
SNAPSHOTS = 1 << 24  # numbers kept of theta over time, 64 MB; every checkpoint holds them


class OutOfMemory(EspalierError, MemoryError):
    """The device has not enough memory for one update."""


class Run:
    """One run: everything that changes while it trains, and one update at a time.

    phases: its updates. ``horizon``: their number.
    scheduler: stepped after every update if ``per_update``, else after every epoch.
    """

    def __init__(
        self,
        structure: StructureOptimizer,
        feed: Feed,
        loss: Loss,
        *,
        phases: Phases,
        scheduler: Scheduler | None,
        per_update: bool,
        validation: Feed | None,
        device: torch.device,
    ) -> None:
        self.structure, self.feed, self.loss = structure, feed, loss
        self.search, self.gated = structure.search, structure.gated
        self.phases, self.horizon = phases, phases.end
        self.scheduler, self.per_update = scheduler, per_update
        self.validation, self.device = validation, device
        self.shares = Shares(self.gated, self.search.cost, self.search.full_cost, device)
        self.update = 0
        self.began_with = ""  # a hash of the initial weights, where there are checkpoints
        self.history: list[Row] = []
        self.theta = Thinned(max(2, min(128, SNAPSHOTS // self.search.space.d)))
        self.theta.offer(0, self.search.theta)
        self.spent, self.began = 0.0, time.monotonic()
        self._clear()

    def _clear(self) -> None:
        """Start the sums of an epoch: loss, updates, wrong classes, predictions."""
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)  # there: reading one would wait for a GPU

    @property
    def seconds(self) -> float:
        """Spent on this run, in all calls together."""
        return self.spent + time.monotonic() - self.began

    def batches(self) -> Iterator[Batch]:
        """What the updates from here to the end of the epoch read, on the device."""
        end = min((self.update // self.feed.updates + 1) * self.feed.updates, self.horizon)
        # Losses are compared on the same examples; slopes are not compared, so that each mask reads its own.
        compared = range(0) if self.search.reads_slopes else self.phases.compared
        for batch in self.feed.epoch(self.update, end, compared, self.search.samples):
            inputs, targets = nested.each(lambda t: t.to(self.device, non_blocking=True), batch)
            yield inputs, targets

    def step(self, batch: Batch) -> None:
        """One update of weights and structure."""
        if self.update >= self.phases.settle and not self.search.settled:
            self.search.settle()
            if hasattr(self.gated, "plan"):  # a handle of one's own may know no plan, and goes on masked
                self.structure.compact()
        whole = self.search.whole() if self.update < self.phases.begin else None
        own = self.search.reads_slopes and whole is None and not self.search.settled
        parts = nested.split(batch, self.search.samples) if own else [batch]
        calls = itertools.cycle(parts)
        network = self.gated.model if self.structure.settled is None else self.structure.settled.small
        seen: list[Any] = []  # the outputs under the first mask

        def closure() -> Tensor:
            inputs, targets = next(calls)
            outputs = nested.call(network, inputs)
            loss = self.loss(outputs, targets)
            scalar(loss)
            checks.gradient_of(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            if not seen:
                seen.append(outputs)
            return loss

        try:
            loss = self.structure.step(closure, under=whole)
        except Diverged as error:
            raise Diverged(f"update {self.update + 1} of {self.horizon}: {error}") from None
        counts = score.wrong(seen[0], parts[0][1])  # one mask speaks for all: each is drawn from theta
        missed, predictions = (0, 0) if counts is None else counts
        for place, value in enumerate((loss, 1, missed, predictions)):
            self.sums[place] += value
        self.update += 1
        if self.update % LOOK == 0 or self.update == self.horizon:
            self._check()
        if self.scheduler is not None and self.per_update:
            self.scheduler.step()

    @contextmanager
    def written_back(self) -> Iterator[None]:
        """However it ends, the model holds what was trained."""
        try:
            yield
        finally:
            self.structure.write_back()

    def _check(self) -> None:
        try:
            self.structure.check()
        except Diverged as error:
            raise Diverged(f"update {self.update} of {self.horizon}, or shortly before: {error}") from None

    def check_weights(self) -> None:
        """Refuse to save weights from which no run could go on."""
        self._check()
        self.structure.write_back()
        weights = [parameter.detach() for parameter in self.gated.model.parameters()]
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise Diverged(
                f"update {self.update} of {self.horizon}: the weights are no longer finite; this state was not saved, "
                "and an earlier checkpoint is intact. Lower the learning rate of the weights"
            )

    def end_epoch(self) -> Row:
        """The row of the epoch that just ended."""
        self.structure.write_back()
        loss, updates, missed, predictions = self.sums.tolist()
        row: Row = {
            "epoch": self.update // self.feed.updates,
            "update": self.update,
            "loss": loss / updates,
            "error": missed / predictions if predictions else None,
        }
        row |= {"begun": self.update > self.phases.begin} | structure_row(self.search, self.gated, self.shares)
        found = None
        if self.validation is not None:
            mask = self.search.select()
            with calibrated(self.gated, mask, self.feed, 1024):
                found = score.deterministic(self.gated, mask, self.validation, loss=self.loss)
            row |= {"validation_loss": found.loss, "validation_error": found.error}
        row["learning_rate"] = float(self.structure.param_groups[0]["lr"])
        row["seconds"] = round(self.seconds, 3)
        row = clean(row)
        if self.scheduler is not None and not self.per_update:
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(found.loss if found is not None else loss / updates)
            else:
                self.scheduler.step()
        self.history.append(row)
        self.theta.offer(self.update, self.search.theta)
        self._clear()
        return row

    def state_dict(self) -> dict[str, Any]:
        self.structure.write_back()
        return {
            "update": self.update,
            "began_with": self.began_with,
            "model": self.gated.model.state_dict(),
            "structure": self.structure.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": chance.states(self.device),
            "sums": self.sums.tolist(),
            "history": self.history,
            "theta": self.theta.state_dict(),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gated.model.load_state_dict(state["model"])
        self.structure.load_state_dict(state["structure"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.update, self.history = state["update"], list(state["history"])
        self.began_with = state["began_with"]
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.theta.load_state_dict(state["theta"])
        self.spent, self.began = state["seconds"], time.monotonic()
        chance.restore(state["random"], self.device)


def train(run: Run, checkpoint: Checkpoint | None, record: Record | None, stop: Stop, progress: Progress) -> bool:
    """Go on to the end of the run, or until told to stop. Returns whether the end was reached.

    A run over somebody else's iterable is saved at the ends of epochs only: what was done of an epoch when it was
    stopped is done again.
    """
    saved, cost = run.update if checkpoint is not None else -1, 0.0
    since = time.monotonic()

    def save() -> None:
        nonlocal saved, cost, since
        if checkpoint is not None and saved != run.update:
            before = time.monotonic()
            run.check_weights()
            checkpoint.save(run.state_dict(), run.update)
            saved, since = run.update, time.monotonic()
            cost = since - before

    with out_of_memory(), run.written_back():
        while run.update < run.horizon:
            for batch in run.batches():
                run.step(batch)
                progress.update(run.update)
                ended = run.update % run.feed.updates == 0
                if ended:
                    row = run.end_epoch()
                    if record is not None:
                        record.epoch(row)
                    progress.epoch(describe(row))
                stopping = stop.now(spare=cost)
                due = stopping or run.update == run.horizon or time.monotonic() - since >= cost / SAVING
                if due and (run.feed.exact or ended):
                    save()
                if stopping and run.update < run.horizon:
                    return False
    return True


def describe(row: Row) -> str:
    """A row for a person."""
    parts = [f"epoch {row['epoch']}", f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss none"]
    # While the structure is searched for, the one mask that would ship now may be far worse than those that are drawn;
    # before the search begins it is any mask of its size.
    validation = "validation" if row["settled"] else "validation if cut now"
    shown = [("error", "error"), (validation, "validation_error"), ("share", "cost_share")]
    for name, key in shown if row["begun"] else shown[:1]:
        if row.get(key) is not None:
            parts.append(f"{name} {row[key]:.2%}")
    phase = "settled" if row["settled"] else "" if row["begun"] else "the whole network, before the search"
    return "  ".join([*parts, phase] if phase else parts)


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Say what to do when memory runs out."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text
        if not full or isinstance(error, EspalierError):
            raise
        raise OutOfMemory(
            f"out of memory: {text.splitlines()[0] if text else type(error).__name__}. Use a smaller batch_size, or "
            "espalier.StructureOptimizer with a closure that accumulates over parts of the mini-batch"
        ) from error
