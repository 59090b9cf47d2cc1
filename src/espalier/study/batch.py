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
from torch.func import vmap

from espalier.data import Dataset
from espalier.search import Search
from espalier.space import BadInput
from espalier.study.network import Network
from espalier.study.spec import PAIR, RunSpec, Settings
from espalier.train.batched.batch import Batch, Compute, Precision, searched
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.masks import Given, Source
from espalier.train.batched.optimizers import SGD
from espalier.train.batched.schedule import Steps
from espalier.train.checkpoint import Checkpoint
from espalier.train.progress import Progress
from espalier.train.stop import Stop

SLICE = 2000  # updates between looks at the clock: the only times the host waits for the device
FIRST = 100  # updates in which a new process compiles and records
SAVE_EVERY = 300.0  # seconds; the state of 35 networks is half a gigabyte
BINS = 20
DRAWS = 20  # structures of the stochastic prediction
CHUNK = 1000  # test images at once

Row = dict[str, Any]


class StudyBatch:
    """Runs of one shape: all of the search, or all with given masks (fixed networks and dropout).

    folder: of the checkpoints, None for none. The same settings and folder go on where the last call stopped.
    """

    def __init__(
        self,
        settings: Settings,
        network: Network,
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
        given = self._given()
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
            compute=compute or Compute(precision=cast(Precision, settings.precision)),
            chain=network.chain,
        )
        self.test = data.test_inputs.to(device), data.test_labels.to(device)
        self.points = points(self.total, settings.points, self.batch.compute.updates_at_once)
        self.curves: list[list[Row]] = [[] for _ in runs]
        self.seconds = {"setup": 0.0, "first_updates": 0.0, "updates": 0.0, "measuring": 0.0, "saving": 0.0}
        self.stretches = 0  # calls it took
        state = sum(p.nbytes for p in self.batch.state.params.values()) * 2
        self.saving = state / 1e8  # seconds that a checkpoint may take, until one has been written
        methods = dict.fromkeys(run.method for run in runs)
        together: dict[str, Any] = {method: settings.describe(method) for method in methods}
        together |= {"runs": described, "widths": list(network.widths), "data": data.fingerprint()}
        self.checkpoint = None if folder is None else Checkpoint(folder, together | {"device": device.type})

    def _given(self) -> Tensor:
        """The masks ``(R, d)`` the runs start with: what their initialisation is for."""
        sizes = [1.0 if run.size is None else run.size for run in self.runs]
        return torch.stack([self.network.uniform(size) for size in sizes])

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
        return self.batch.done >= self.total

    def masks(self) -> Tensor:
        """What each run would ship now ``(R, d)``: M* of a search, the given mask of the others."""
        if self.search is not None:
            return self.search.select()
        assert isinstance(self.batch.source, Given)
        return self.batch.source.mask

    def train(self, stop: Stop, progress: Progress) -> bool:
        """Go on to the end, or until told to stop. Returns whether it is the end."""
        with self._timed("setup"):
            self._resume()
            self.stretches += 1
        progress.start(self.batch.done, self.total)
        saved = time.monotonic()
        part = "first_updates"
        while not self.finished and not stop.now(spare=self.saving):
            began, done = time.monotonic(), self.batch.done
            with self._timed(part):
                self._advance(FIRST if part == "first_updates" else SLICE)
            part = "updates"
            progress.update(self.batch.done)
            rate = (self.batch.done - done) / (time.monotonic() - began)
            if self.batch.done in self.points:
                with self._timed("measuring"):
                    self._measure()
            progress.epoch(self._line(rate))
            if time.monotonic() - saved > SAVE_EVERY and not self.finished:
                self.save()
                saved = time.monotonic()
        progress.stop()
        if not self.finished:
            self.save()
        return self.finished

    def _advance(self, most: int) -> None:
        """On to where something is due: a measurement, settling, a look at the clock."""
        done = self.batch.done
        if self.search is not None and done == self.settle_at and not self.search.settled:
            self.search.settle()
            self.batch.settle(self.network.canonical(self.search.select()))
        due = [point for point in (*self.points, self.settle_at, done + most) if point > done]
        self.batch.advance(min(due) - done)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the clock is to know what is done, not what is asked for

    def _measure(self) -> None:
        masks = self.masks()
        canonical = self.network.canonical(masks)
        train_loss, train_error = self.batch.read_sums()
        test_loss, test_error = self.batch.evaluate(canonical, *self.test, chunk=CHUNK)
        columns = {"train_loss": train_loss, "train_error": train_error, "test_loss": test_loss}
        columns |= {"test_error": test_error} | self._shares(masks)
        table = torch.stack([column.to(torch.float64) for column in columns.values()], -1).tolist()
        units = self.network.units(masks).long().tolist()
        histograms = None if self.search is None else self._histograms(self.search.theta).tolist()
        for i, curve in enumerate(self.curves):
            row: Row = {"update": self.batch.done, "units": units[i]} | dict(zip(columns, table[i], strict=True))
            if histograms is not None:
                row["theta_histogram"] = histograms[i]
            curve.append(row)

    def _shares(self, masks: Tensor) -> dict[str, Tensor]:
        costs = {"unit_share": self.network.unit_cost, "weight_share": self.network.weight_cost}
        ones = torch.ones_like(masks[0])
        return {name: cost(masks) / cost(ones) for name, cost in costs.items()}

    def _histograms(self, theta: Tensor) -> Tensor:
        """Counts ``(R, layers, BINS)`` of theta in equal parts of [0, 1]."""
        bins = (theta * BINS).long().clamp(max=BINS - 1)
        counts = [torch.nn.functional.one_hot(bins[:, where], BINS).sum(1) for where in self.network.layers]
        return torch.stack(counts, 1)

    def _line(self, rate: float) -> str:
        text = f"{len(self.runs)} runs, {self.batch.done:,} of {self.total:,} updates, {rate:,.0f}/s"
        if self.curves[0]:
            last = {name: torch.tensor([c[-1][name] for c in self.curves]) for name in ("unit_share", "test_error")}
            text += f"; median share {last['unit_share'].median():.1%}, error {last['test_error'].median():.2%}"
        return text

    @torch.no_grad()
    def stochastic(self) -> tuple[Tensor, Tensor]:
        """Loss and error ``(R)`` of the mean prediction of structures drawn from theta; no state is changed."""
        assert self.search is not None
        theta, params = self.search.theta, self.batch.state.params
        generator = torch.Generator(self.device).manual_seed(self.seed)
        size = (DRAWS, *theta.shape)
        masks = torch.rand(size, dtype=theta.dtype, device=self.device, generator=generator) < theta
        sums = torch.zeros(2, len(self.runs), dtype=torch.float64, device=self.device)
        over_runs = vmap(self.network.call, in_dims=(0, 0, None))
        with self.batch.compute.applied():
            for start in range(0, len(self.test[1]), CHUNK):
                x = self.batch.feed.floats(self.test[0][start : start + CHUNK])
                y = self.test[1][start : start + CHUNK]
                mean = torch.zeros((), device=self.device)
                for drawn in masks:
                    mean = mean + over_runs(params, drawn.to(x.dtype), x).softmax(-1) / DRAWS
                right = mean.gather(-1, y.view(1, -1, 1).expand(len(self.runs), -1, 1)).squeeze(-1)
                sums[0] += -right.clamp(min=1e-30).log().to(torch.float64).sum(-1)
                sums[1] += (mean.argmax(-1) != y).sum(-1)
        return sums[0] / len(self.test[1]), sums[1] / len(self.test[1])

    def results(self) -> list[Row]:
        """What came out of each run, of its last update."""
        masks = self.masks()
        canonical = self.network.canonical(masks)
        with self._timed("measuring"):
            drawn = None if self.search is None or self.search.settled else self.stochastic()
        units = self.network.units(canonical).long().tolist()
        shares = torch.stack(list(self._shares(canonical).values()), -1).tolist()
        broken, skipped = self.batch.state.broken.tolist(), self.batch.state.skipped.tolist()
        took = {name: round(value, 3) for name, value in self.seconds.items()}
        total = round(sum(self.seconds.values()), 3)
        results = list[Row]()
        for i, run in enumerate(self.runs):
            last = {k: v for k, v in self.curves[i][-1].items() if k not in ("update", "train_loss", "train_error")}
            result: Row = {"updates": self.batch.done, **last}
            result["canonical"] = {"units": units[i], "unit_share": shares[i][0], "weight_share": shares[i][1]}
            if drawn is not None:
                result["stochastic"] = {
                    "draws": DRAWS,
                    "test_loss": float(drawn[0][i]),
                    "test_error": float(drawn[1][i]),
                }
            result["mask"] = _hex(masks[i])
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


def _hex(mask: Tensor) -> str:
    """A mask ``(d)`` as hexadecimal digits, its first gate the highest bit."""
    bits = "".join("1" if bit else "0" for bit in mask.flatten().tolist())
    bits += "0" * (-len(bits) % 4)
    return "".join(f"{int(bits[i : i + 4], 2):x}" for i in range(0, len(bits), 4))
