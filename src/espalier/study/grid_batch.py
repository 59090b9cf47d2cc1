"""One batch of runs of a grid study: all of one method on one fold, trained together, saved, continued, told."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from espalier.cost import Cost, Form
from espalier.data import Dataset
from espalier.search import Search
from espalier.space import BadInput, Bits, Space
from espalier.study.course import Course, points, settings_in_lines
from espalier.study.network import Network
from espalier.study.settings import PAIR, GridRun, GridSettings
from espalier.train.batched import schedule as schedules
from espalier.train.batched.batch import Batch, Compute, Precision, searched
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.masks import Given
from espalier.train.batched.optimizers import SGD
from espalier.train.checkpoint import Checkpoint
from espalier.train.progress import Progress
from espalier.train.stop import Stop

CHUNK = 1000  # test images at once
ALIGNED = 16  # units: rows of other lengths are multiplied by slower kernels on a GPU

Row = dict[str, Any]


class GridBatch:
    """Runs of one method. widths: of the full network; folder: of the checkpoints, None for none.

    Networks that are trained as they are (scratch, found) are computed in a small shape that holds every one of
    them, each under the mask of its own widths and with the initial weights of its own fan-in.
    """

    def __init__(
        self,
        settings: GridSettings,
        widths: Sequence[int],
        data: Dataset,
        runs: Sequence[GridRun],
        device: torch.device,
        folder: Path | None,
        compute: Compute | None = None,
    ) -> None:
        self.settings, self.runs, self.device = settings, list(runs), device
        self.method = runs[0].method
        self.recipe = settings.recipe_of(self.method)
        self.total = settings.updates(len(data.train_labels))
        if not self.total:
            raise BadInput(f"batch_size={settings.batch_size} leaves no update of {len(data.train_labels)} examples")
        self.full = Network(tuple(widths))
        self.network = self._shape()
        self.phases = self.recipe.phases(self.total, runs[0].target if runs[0].searches else None)
        self.settle_at = self.phases.settle if runs[0].searches else self.total
        described = [run.describe() for run in runs]
        # The masks of a batch come from one generator: its seed is made of all that makes the batch.
        self.seed = zlib.crc32(json.dumps([described, settings.describe(self.method)]).encode())
        self.samples = settings.samples if runs[0].searches else PAIR
        self.search = self._search() if runs[0].searches else None
        self.reached: tuple[Tensor, Tensor] | None = None  # shares of the cost before and after the selection, (R)
        given = self._given()
        seeds = [run.seed for run in runs]
        source = Given(given.to(device), torch.zeros(len(runs), device=device), self.seed)
        own = self.recipe
        self.batch = Batch(
            self.network.call,
            self.network.start(seeds, given, device),
            {},
            data=data,
            seeds=seeds,
            source=source if self.search is None else searched(self.search, [self.method == "permuted"] * len(runs)),
            loss=cross_entropy,
            optimizer=SGD(own.learning_rate, own.momentum, own.weight_decay, own.momentum > 0),
            schedule=schedules.of_drops(own.drops),
            total=self.total,
            batch_size=PAIR * settings.batch_size // self.samples,
            samples=self.samples,
            begin=self.phases.begin,
            compute=compute or Compute(precision=cast(Precision, settings.precision)),
            chain=self.network.chain,
        )
        self.test = data.test_inputs.to(device), data.test_labels.to(device)
        self.curves: list[list[Row]] = [[] for _ in runs]
        together = settings.describe(self.method) | {"runs": described, "widths": list(widths)}
        together |= {"data": data.fingerprint(), "device": device.type}
        checkpoint = None if folder is None else Checkpoint(folder, together)
        due = points(self.total, settings.points, self.batch.compute.updates_at_once)
        self.course = Course(self, self.batch, self.search, points=due, settle_at=self.settle_at, checkpoint=checkpoint)

    def _shape(self) -> Network:
        each = [run.units for run in self.runs if run.units is not None]
        return Network(holding(self.full.widths, each, ALIGNED if self.device.type == "cuda" else 1))

    def _given(self) -> Tensor:
        """The masks ``(R, d)`` the runs start with: what their initialisation is for."""
        masks = torch.ones(len(self.runs), self.network.space.d)
        for mask, run in zip(masks, self.runs):
            for where, units in zip(self.network.layers, run.units or ()):
                mask[where.start + units : where.stop] = 0.0
        return masks

    def _search(self) -> Search:
        network, settings, own = self.network, self.settings, self.recipe
        # A layer keeps at least one unit: what ships is to compute something of its input.
        space = Space([Bits(f"layer {i}", width, least=1) for i, width in enumerate(network.hidden, 1)])
        targets = None if self.runs[0].target is None else [run.target for run in self.runs]
        price: Row = {} if targets else {"penalty": [run.penalty for run in self.runs]}
        return Search(
            space,
            cost=cost(network, settings.cost),
            samples=self.samples,
            seed=self.seed,
            batch=(len(self.runs),),
            device=self.device,
            **price,
            **own.search_arguments(space, self.phases, targets),
        )

    def masks(self) -> Tensor:
        """What each run would ship now ``(R, d)``."""
        if self.search is not None:
            return self.network.canonical(self.search.select())
        assert isinstance(self.batch.source, Given)
        return self.batch.source.mask

    def train(self, stop: Stop, progress: Progress) -> bool:
        """Go on to the end, or until told to stop. Returns whether it is the end."""
        return self.course.run(stop, progress)

    def settle(self) -> None:
        assert self.search is not None
        self._look()
        self.search.settle()
        self.batch.settle(self.masks())

    def reads(self, last: bool) -> int:
        return len(self.test[1])

    def _look(self) -> None:
        """What the search has come to, before and after the selection."""
        assert self.search is not None
        before = self.search.cost(self.search.mode()) / self.search.full_cost
        self.reached = before, self.search.usage()

    def measure(self, last: bool) -> None:
        train_loss, _ = self.batch.read_sums()
        loss, error = self.batch.evaluate(self.masks(), *self.test, chunk=CHUNK)
        columns = {"train_loss": train_loss, "test_loss": loss, "test_error": error}
        if self.search is not None:
            columns["expected_share"] = self.search.expected_cost() / self.search.full_cost
        table = torch.stack([column.to(torch.float64) for column in columns.values()], -1).tolist()
        for curve, row in zip(self.curves, table):
            rounded = {name: float(f"{value:.4g}") for name, value in zip(columns, row, strict=True)}
            curve.append({"update": self.batch.done} | rounded)

    def line(self, pace: str) -> str:
        text = f"{len(self.runs)} runs, {pace}"
        if not self.curves[0]:
            return text
        errors = torch.tensor([curve[-1]["test_error"] for curve in self.curves])
        return f"{text}; median error {errors.median():.2%}"

    def results(self) -> list[Row]:
        """What came out of each run, of its last update."""
        masks = self.masks()
        if self.search is not None and self.reached is None:
            self._look()
        loss, error = self.batch.evaluate(masks, *self.test, chunk=CHUNK)
        units = self.network.units(masks).long().tolist()
        kept = self._on_full(units)
        shares = {
            kind: cost(self.full, kind)(kept) / cost(self.full, kind)(torch.ones_like(kept[0])) for kind in SHARES
        }
        broken, skipped = self.batch.state.broken.tolist(), self.batch.state.skipped.tolist()
        stories = list[Row]()
        for i, run in enumerate(self.runs):
            result: Row = {"updates": self.batch.done, "test_error": float(error[i]), "test_loss": float(loss[i])}
            result |= {f"{SHARES[kind]}_share": float(share[i]) for kind, share in shares.items()}
            result["units"] = units[i]
            if self.reached is not None:
                result |= {"reached_before": float(self.reached[0][i]), "reached_after": float(self.reached[1][i])}
                if run.target is not None:
                    result["gap"] = result["reached_before"] - run.target
            result |= {"diverged_at": broken[i] if broken[i] >= 0 else None, "skipped_updates": skipped[i]}
            stories.append({"run": run.describe(), "result": result, "curve": self.curves[i]})
        return stories

    def _on_full(self, units: list[list[int]]) -> Tensor:
        """Masks ``(R, d)`` of the full network with so many open units in each layer."""
        masks = torch.zeros(len(units), self.full.space.d)
        for mask, kept in zip(masks, units):
            for where, count in zip(self.full.layers, kept):
                mask[where.start : where.start + count] = 1.0
        return masks

    def states(self) -> list[str]:
        names = [f"{r.method} {f'penalty {r.penalty}' if r.target is None else f'{r.target:.0%}'}" for r in self.runs]
        return settings_in_lines(names, [curve[-1] for curve in self.curves], "expected_share")

    def state_dict(self) -> Row:
        return {"curves": self.curves, "reached": None if self.reached is None else list(self.reached)}

    def load_state_dict(self, state: Row) -> None:
        self.curves = state["curves"]
        self.reached = None if state["reached"] is None else (state["reached"][0], state["reached"][1])


def holding(widths: Sequence[int], each: Sequence[Sequence[int]], unit: int) -> tuple[int, ...]:
    """The widths of a network that holds each of these hidden layers, a multiple of ``unit`` or those of the full one.

    >>> holding((64, 40, 40, 10), [(3, 17), (9, 39)], 16)
    (64, 16, 40, 10)
    """
    inputs, *hidden, classes = widths
    if each:
        hidden = [min(-(-max(column) // unit) * unit, most) for column, most in zip(zip(*each), hidden)]
    return (inputs, *hidden, classes)


SHARES = {"weights": "weight", "units": "unit"}


def cost(network: Network, kind: str) -> Cost:
    """kind: "weights", "macs" (of a fully-connected network the same), "parameters" or "units"."""
    if kind in ("weights", "macs"):
        return network.weight_cost
    if kind == "units":
        return network.unit_cost
    d = network.space.d
    return network.weight_cost + Cost.product([Form.run(0, d) + float(network.widths[-1])], d=d)
