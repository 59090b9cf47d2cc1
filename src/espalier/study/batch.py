"""One batch of runs of a study: trained together, measured now and then, saved, continued, and told as results."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from espalier.data import Dataset
from espalier.search import Search
from espalier.space import BadInput
from espalier.study.record import mask_to_hex
from espalier.study.spec import PAIR, RunSpec
from espalier.study.subject import Evaluation, Plan, Row, Subject
from espalier.train.batched.batch import Batch, Compute, Precision, searched
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.masks import Given, Source
from espalier.train.batched.optimizers import SGD
from espalier.train.batched.schedule import Steps
from espalier.train.checkpoint import Checkpoint
from espalier.train.progress import Progress
from espalier.train.stop import Stop

SLICE = 2000  # most updates between looks at the clock: the only times the host waits for the device
LOOK = 5.0  # seconds between looks, about
SAVE_EVERY = 300.0  # seconds at most between checkpoints; the state of 35 networks is half a gigabyte
SAVING = 0.01  # share of the time that may go into them, where they are small
SAVE_AFTER = 30.0
BINS = 20


class StudyBatch:
    """Runs of one shape: all of the search, or all with given masks (fixed networks, dropout, random selection).

    settings, network: see :mod:`espalier.study.subject`. folder: of the checkpoints, None for none. The same settings
    and folder go on where the last call stopped. After the end, ``results`` tells each run's story, and ``shipped``
    holds what was evaluated, where the network knows it.
    """

    def __init__(
        self,
        settings: Plan,
        network: Subject,
        data: Dataset,
        runs: Sequence[RunSpec],
        device: torch.device,
        folder: Path | None,
        compute: Compute | None = None,
    ) -> None:
        self.settings, self.network, self.runs, self.device = settings, network, list(runs), device
        self.searches = runs[0].method == "search"
        self.total = settings.updates(len(data.train_labels))
        if not self.total:
            raise BadInput(f"batch_size={settings.batch_size} leaves no update in {settings.epochs} epochs")
        self.settle_at = self.total - round(settings.settle * self.total) if self.searches else self.total
        samples = settings.samples if self.searches else PAIR
        seeds = [run.seed for run in runs]
        masks, self.told = zip(*(network.given(run) for run in runs))
        self.given = torch.stack(masks).to(device)
        # A network of its own is trained as it ships: without the gates that its dead parts would be read through.
        given = network.canonical(self.given)
        described = [run.describe() for run in runs]
        # The masks of a batch come from one generator: its seed is made of all that makes the batch.
        self.seed = zlib.crc32(json.dumps(described).encode())
        self.search = self._search(samples) if self.searches else None
        self.batch = Batch(
            network.call,
            network.start(seeds, given, device),
            {},
            data=data,
            seeds=seeds,
            source=self._source(given),
            loss=cross_entropy,
            optimizer=SGD(settings.learning_rate, settings.momentum, settings.weight_decay, settings.momentum > 0),
            schedule=Steps(),
            total=self.total,
            batch_size=PAIR * settings.batch_size // samples,
            samples=samples,
            pad=settings.pad,
            gradient=network.gradient(cross_entropy),
            compute=compute or Compute(precision=cast(Precision, settings.precision)),
            chain=network.chain,
        )
        self.test = data.test_inputs.to(device), data.test_labels.to(device)
        self.points = points(self.total, settings.points, self.batch.compute.updates_at_once)
        self.curves: list[list[Row]] = [[] for _ in runs]
        self.seconds = {"setup": 0.0, "first_updates": 0.0, "updates": 0.0, "measuring": 0.0, "saving": 0.0}
        self.stretches = 0  # calls it took
        self.rate: float | None = None  # updates in a second
        self.reading = 0.0  # seconds to evaluate on one image, of all runs
        self.shipped: list[dict[str, Tensor]] | None = None
        state = sum(p.nbytes for p in self.batch.state.params.values()) * 2
        self.saving = state / 1e8  # seconds that a checkpoint may take, until one has been written
        methods = dict.fromkeys(run.method for run in runs)
        together: dict[str, Any] = {method: settings.describe(method) for method in methods}
        together |= {"runs": described, "data": data.fingerprint()} | network.describe() | network.layout()
        self.checkpoint = None if folder is None else Checkpoint(folder, together | {"device": device.type})

    def _search(self, samples: int) -> Search:
        settings = self.settings
        return Search(
            self.network.space,
            cost=self.network.cost(settings.cost),
            penalty=[run.penalty or 0.0 for run in self.runs],
            samples=samples,
            learning_rate=settings.theta_rate,
            initial=settings.initial,
            adaptive=settings.adaptive,
            seed=self.seed,
            batch=(len(self.runs),),
            device=self.device,
        )

    def _source(self, given: Tensor) -> Source:
        if self.search is not None:
            return searched(self.search, [self.settings.permuted] * len(self.runs))
        rates = torch.tensor([run.rate or 0.0 for run in self.runs])
        return Given(given.to(self.device), rates.to(self.device), self.seed)

    @property
    def finished(self) -> bool:
        return self.batch.done >= self.total and not self._due_to_measure

    @property
    def _due_to_measure(self) -> bool:
        measured = self.curves[0][-1]["update"] if self.curves[0] else 0
        return self.batch.done in self.points and measured < self.batch.done

    def masks(self) -> Tensor:
        """What each run would ship now ``(R, d)``: M* of a search, the given mask of the others."""
        if self.search is not None:
            return self.search.select()
        return self.given

    def train(self, stop: Stop, progress: Progress) -> bool:
        """Go on to the end, or until told to stop. Returns whether it is the end."""
        with self._timed("setup"):
            self._resume()
            self.stretches += 1
        progress.start(self.batch.done, self.total)
        saved = time.monotonic()
        while not self.finished and not stop.now(spare=self.saving + self._ahead()):
            if self._due_to_measure:
                with self._timed("measuring"):
                    self._measure()
                progress.epoch(self._line())
            else:
                self._go_on(progress)
            # What a kill may cost: a few minutes, and never a run that only had to be evaluated.
            since, last = time.monotonic() - saved, self.batch.done >= self.total and not self.finished
            due = min(max(self.saving / SAVING, SAVE_AFTER), SAVE_EVERY)
            if since > (SAVE_AFTER if last else due):
                self.save()
                saved = time.monotonic()
        progress.stop()
        if not self.finished:
            self.save()
        return self.finished

    def _ahead(self) -> float:
        """Seconds that what comes next will take, about."""
        if self._due_to_measure:
            return self.reading * self.network.reads(self.test, self.batch.done >= self.total)
        return 0.0 if self.rate is None else self._slice() / self.rate

    def _slice(self) -> int:
        """Updates until the next look at the clock; a new process compiles and records in its first ones.

        It ends where a whole CUDA graph can, so that no updates are left to be done one by one.
        """
        whole, done = self.batch.compute.updates_at_once, self.batch.done
        if self.rate is None:
            most = 2 * whole if self.device.type == "cuda" else whole
        else:
            most = max(int(min(LOOK * self.rate, SLICE)), 1)
        aligned = (done + most) // whole * whole
        return aligned - done if aligned > done else most

    def _go_on(self, progress: Progress) -> None:
        """On to where something is due: a measurement, settling, a look at the clock."""
        began, done, first = time.monotonic(), self.batch.done, self.rate is None
        with self._timed("first_updates" if first else "updates"):
            if self.search is not None and done == self.settle_at and not self.search.settled:
                self.search.settle()
                self.batch.settle(self.network.canonical(self.search.select()))
                first = True  # another step is compiled and recorded
            due = [point for point in (*self.points, self.settle_at, done + self._slice()) if point > done]
            self.batch.advance(min(due) - done)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the clock is to know what is done, not what is asked for
        rate = (self.batch.done - done) / (time.monotonic() - began)
        self.rate = rate if self.rate is None or not first else self.rate
        progress.update(self.batch.done)
        progress.epoch(self._line())

    def _measure(self) -> None:
        began, last = time.monotonic(), self.batch.done >= self.total
        masks = self.masks()
        train_loss, train_error = self.batch.read_sums()
        found: Evaluation = self.network.evaluate(self.batch, self.network.canonical(masks), self.test, last)
        self.shipped = found.shipped
        columns = {"train_loss": train_loss, "train_error": train_error}
        columns |= {"test_loss": found.loss, "test_error": found.error}
        table = torch.stack([column.to(torch.float64) for column in columns.values()], -1).tolist()
        counts = self.network.tell(masks)
        histograms = None if self.search is None else self._histograms(self.search.theta).tolist()
        for i, curve in enumerate(self.curves):
            row: Row = {"update": self.batch.done} | counts[i] | dict(zip(columns, table[i], strict=True))
            if histograms is not None:
                row["theta_histogram"] = histograms[i]
            curve.append(row)
        self.reading = (time.monotonic() - began) / self.network.reads(self.test, last)

    def _histograms(self, theta: Tensor) -> Tensor:
        """Counts ``(R, groups, BINS)`` of theta in equal parts of [0, 1]."""
        bins = (theta * BINS).long().clamp(max=BINS - 1)
        counts = [torch.nn.functional.one_hot(bins[:, where], BINS).sum(1) for where in self.network.groups]
        return torch.stack(counts, 1)

    def _line(self) -> str:
        text = f"{len(self.runs)} runs, {self.batch.done:,} of {self.total:,} updates"
        if self.rate is not None:
            text += f", {self.rate:,.0f}/s" if self.rate >= 20 else f", {self.rate:.2g}/s"
        if self.curves[0]:
            share = self.network.share
            last = {name: torch.tensor([c[-1][name] for c in self.curves]) for name in (share, "test_error")}
            text += f"; median share {last[share].median():.1%}, error {last['test_error'].median():.2%}"
        return text

    def results(self) -> list[Row]:
        """What came out of each run, of its last update."""
        masks = self.masks()
        drawn = None
        if self.search is not None and not self.search.settled:
            with self._timed("measuring"):
                drawn = self.network.stochastic(self.batch, self.search.theta, self.test, self.seed)
        found = self.network.found(self.network.canonical(masks))
        broken, skipped = self.batch.state.broken.tolist(), self.batch.state.skipped.tolist()
        took = {name: round(value, 3) for name, value in self.seconds.items()}
        total = round(sum(self.seconds.values()), 3)
        results = list[Row]()
        for i, run in enumerate(self.runs):
            last = {k: v for k, v in self.curves[i][-1].items() if k not in ("update", "train_loss", "train_error")}
            result: Row = {"updates": self.batch.done, **last, "canonical": found[i]} | self.told[i]
            if drawn is not None:
                draws, loss, error = drawn
                result["stochastic"] = {"draws": draws, "test_loss": float(loss[i]), "test_error": float(error[i])}
            result["mask"] = mask_to_hex(masks[i])
            result["diverged_at"] = broken[i] if broken[i] >= 0 else None
            result["skipped_updates"] = skipped[i]
            seconds = {"batch": total, "per_run": round(total / len(self.runs), 3), "parts": took}
            story: Row = {"run": run.describe(), "result": result, "curve": self.curves[i], "seconds": seconds}
            results.append(story | {"runs_in_batch": len(self.runs), "calls": self.stretches})
        return results

    def save(self) -> None:
        """Write a checkpoint of where the runs are."""
        if self.checkpoint is None:
            return
        began = time.monotonic()
        state: Row = {"batch": self.batch.state_dict(), "curves": self.curves, "stretches": self.stretches}
        state["seconds"] = self.seconds
        if self.search is not None:
            state["search"] = self.search.state_dict()
        self.checkpoint.save(state, self.batch.done)
        self.saving = time.monotonic() - began
        self.seconds["saving"] += self.saving

    def _resume(self) -> None:
        state = self.checkpoint.load() if self.checkpoint is not None else None
        if state is None:
            return
        if self.search is not None:
            self.search.load_state_dict(state["search"])
        self.batch.load_state_dict(state["batch"])
        self.curves, self.stretches = state["curves"], state["stretches"]
        self.seconds = dict(state["seconds"])

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - began


def points(total: int, count: int, whole: int = 50) -> tuple[int, ...]:
    """Updates after which the runs are measured: evenly spaced, the last one the end.

    whole: updates in one CUDA graph; points are multiples of it where there is room.

    >>> points(937_500, 20)[:2], points(937_500, 20)[-1], points(7, 3)
    ((46850, 93750), 937500, (2, 5, 7))
    """
    exact = [round(total * k / count) for k in range(1, count + 1)]
    if total >= count * whole:
        exact = [point // whole * whole for point in exact[:-1]] + [total]
    return tuple(sorted({point for point in exact if point > 0}))
