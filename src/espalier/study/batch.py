"""One batch of runs of a study: trained together, measured now and then, saved, continued, and told as results."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from espalier.data import Dataset
from espalier.search import Search
from espalier.space import BadInput
from espalier.study.course import Course, points, settings_in_lines
from espalier.study.record import mask_to_hex
from espalier.study.settings import PAIR, RunSpec
from espalier.study.subject import Evaluation, Plan, Row, Subject
from espalier.train.batched.batch import Batch, Compute, Precision, searched
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.masks import Given, Source
from espalier.train.batched.optimizers import SGD
from espalier.train.batched.schedule import Steps
from espalier.train.checkpoint import Checkpoint
from espalier.train.progress import Progress
from espalier.train.stop import Stop

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
        self.curves: list[list[Row]] = [[] for _ in runs]
        self.shipped: list[dict[str, Tensor]] | None = None
        methods = dict.fromkeys(run.method for run in runs)
        together: dict[str, Any] = {method: settings.describe(method) for method in methods}
        together |= {"runs": described, "data": data.fingerprint()} | network.describe() | network.layout()
        checkpoint = None if folder is None else Checkpoint(folder, together | {"device": device.type})
        due = points(self.total, settings.points, self.batch.compute.updates_at_once)
        self.course = Course(self, self.batch, self.search, points=due, settle_at=self.settle_at, checkpoint=checkpoint)

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

    def masks(self) -> Tensor:
        """What each run would ship now ``(R, d)``: M* of a search, the given mask of the others."""
        if self.search is not None:
            return self.search.select()
        return self.given

    def train(self, stop: Stop, progress: Progress) -> bool:
        """Go on to the end, or until told to stop. Returns whether it is the end."""
        return self.course.run(stop, progress)

    def settle(self) -> None:
        assert self.search is not None
        self.search.settle()
        self.batch.settle(self.network.canonical(self.search.select()))

    def reads(self, last: bool) -> int:
        return self.network.reads(self.test, last)

    def measure(self, last: bool) -> None:
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

    def _histograms(self, theta: Tensor) -> Tensor:
        """Counts ``(R, groups, BINS)`` of theta in equal parts of [0, 1]."""
        bins = (theta * BINS).long().clamp(max=BINS - 1)
        counts = [torch.nn.functional.one_hot(bins[:, where], BINS).sum(1) for where in self.network.groups]
        return torch.stack(counts, 1)

    def line(self, pace: str) -> str:
        text = f"{len(self.runs)} runs, {pace}"
        if self.curves[0]:
            share = self.network.share
            last = {name: torch.tensor([c[-1][name] for c in self.curves]) for name in (share, "test_error")}
            text += f"; median share {last[share].median():.1%}, error {last['test_error'].median():.2%}"
        return text

    def ships(self) -> list[dict[str, Tensor]] | None:
        """All tensors of each run's module as it was evaluated last, where the network knows them."""
        if self.shipped is None:  # it was evaluated by a process that is gone
            masks = self.network.canonical(self.masks())
            self.shipped = self.network.evaluate(self.batch, masks, self.test, True).shipped
        return self.shipped

    def results(self) -> list[Row]:
        """What came out of each run, of its last update."""
        masks = self.masks()
        drawn = None
        if self.search is not None and not self.search.settled:
            with self.course.timed("measuring"):
                drawn = self.network.stochastic(self.batch, self.search.theta, self.test, self.seed)
        found = self.network.found(self.network.canonical(masks))
        broken, skipped = self.batch.state.broken.tolist(), self.batch.state.skipped.tolist()
        took = {name: round(value, 3) for name, value in self.course.seconds.items()}
        total = round(sum(self.course.seconds.values()), 3)
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
            results.append(story | {"runs_in_batch": len(self.runs), "calls": self.course.stretches})
        return results

    def states(self) -> list[str]:
        names = [f"{run.method} {run.setting.replace('_', ' ')}" for run in self.runs]
        return settings_in_lines(names, [curve[-1] for curve in self.curves], self.network.share)

    def state_dict(self) -> Row:
        return {"curves": self.curves}

    def load_state_dict(self, state: Row) -> None:
        self.curves = state["curves"]
