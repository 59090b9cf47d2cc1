"""One batch of runs from the first update to the compact models: epochs, settling, checkpoints, a limit of time."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.data import Dataset, standardise
from espalier.search import Search
from espalier.space import BadInput, Diverged
from espalier.train import chance, identity
from espalier.train.batched import stack
from espalier.train.batched.batch import Batch, Compute, searched
from espalier.train.batched.chain import Chain, chain_of
from espalier.train.batched.feed import Pair, held_out, read_data
from espalier.train.batched.losses import cross_entropy
from espalier.train.batched.masks import Given, Source
from espalier.train.batched.measure import Measure, Row
from espalier.train.batched.plan import Plan
from espalier.train.batched.runs import Run
from espalier.train.checkpoint import Checkpoint
from espalier.train.metrics import Thinned
from espalier.train.progress import Progress
from espalier.train.stop import Stop

LOOK = 2.0  # seconds between looks at the clock, about
SAVING = 0.02  # of the time may go into checkpoints


class Group:
    """Runs of equal shape, trained together. folder: of their checkpoints, None for none.

    ``total``: updates of each run, in ``phases``.
    """

    def __init__(
        self,
        factory: stack.Factory,
        data: Dataset | Pair,
        validation: Dataset | Pair | None,
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
        self.per_epoch = len(inputs) // plan.batch_size
        self.total = plan.epochs * self.per_epoch
        self.phases = plan.recipe.phases(self.total, runs[0].target)
        # Gates are found by watching the model compute: what it computes of is to be finite, whatever the data are.
        self.example = standardise(inputs[:4].cpu(), gain, shift).nan_to_num(0.0, 0.0, 0.0)
        self.gated, params, fixed = stack.stacked(factory, [run.seed for run in runs], self.example, device)
        self._check_classes(params, fixed, targets)
        dtype = next(iter(params.values())).dtype
        self.inputs, _, self.gain, self.shift = read_data(data, dtype)
        self.seed = zlib.crc32(json.dumps([run.describe() for run in runs]).encode())
        self.search = self._search() if runs[0].searches else None
        self.batch = Batch(
            self.gated.call,
            params,
            fixed,
            data=data,
            seeds=[run.seed for run in runs],
            source=self._source(),
            loss=plan.loss,
            optimizer=plan.descent,
            schedule=plan.rates,
            total=self.total,
            batch_size=plan.batch_size,
            samples=plan.samples,
            begin=self.phases.begin,
            rates=torch.tensor([run.learning_rate or plan.descent.lr for run in runs], dtype=dtype, device=device),
            pad=plan.pad,
            compute=compute,
            chain=self._chain(params, fixed),
        )
        self.validation = held_out(validation, data, dtype, device)
        self.measure = Measure(self.gated, self.batch, self.search, self._cost(), self.validation)
        self.histories: list[list[Row]] = [[] for _ in runs]
        self.thetas = Thinned()  # (R, d) each
        self.spent, self.began = 0.0, time.monotonic()
        self.slice = 1  # updates until the next look at the clock; grows to what takes LOOK seconds
        self.settings = plan.describe() | {"space": self.gated.space.to_json(), "data": _describe(inputs, targets)}
        self.settings |= {"settle_at": self.phases.settle, "device": device.type, "precision": compute.precision}
        # The factory is called under the seed of each run, so the same call builds the same weights.
        built = [*params.values(), *fixed.values()]
        self.settings["model"] = f"{identity.network(self.gated.model)} {identity.weights(built)}"
        together = self.settings | {"runs": [run.describe() for run in runs]}
        self.checkpoint = None if folder is None else Checkpoint(folder, together)

    def _check_classes(self, params: dict[str, Tensor], fixed: dict[str, Tensor], targets: Tensor) -> None:
        """The default loss picks a class by comparison: one that is not there would be trained on in silence."""
        if self.plan.loss is not cross_entropy or targets.ndim != 1 or targets.is_floating_point():
            return
        first = {name: t[0] for name, t in (params | fixed).items()}
        dtype = next(iter(params.values())).dtype
        example = self.example.to(self.device)
        example = example.to(dtype) if example.is_floating_point() else example
        with torch.no_grad():
            mask = torch.ones(self.gated.space.d, device=self.device, dtype=dtype)
            classes = self.gated.call(first, mask, example).shape[-1]
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise BadInput(
                f"targets are classes from {low} to {high}, but the network tells {classes} apart, from 0 to "
                f"{classes - 1}; number them so, or give a loss that knows them"
            )

    def _chain(self, params: dict[str, Tensor], fixed: dict[str, Tensor]) -> Chain | None:
        if fixed:
            return None
        first = {name: p[0] for name, p in params.items()}
        example = self.example.to(self.device, next(iter(first.values())).dtype)
        gates = [where for _, where in self.gated.space.bits]
        with torch.no_grad():
            return chain_of(self.gated.model, gates, self.gated.call, first, example)

    def _cost(self) -> Cost:
        cost = self.plan.cost
        if isinstance(cost, str):
            return self.gated.cost(cost)
        return cost if isinstance(cost, Cost) else Cost.linear(cost)

    def _search(self) -> Search:
        targets = None if self.runs[0].target is None else [run.target for run in self.runs]
        price: dict[str, Any] = {} if targets else {"penalty": [run.penalty or 0.0 for run in self.runs]}
        space = self.gated.space
        # The masks of a batch come from one generator: its seed is made of all that makes the batch.
        return Search(
            space,
            cost=self._cost(),
            seed=self.seed,
            batch=(len(self.runs),),
            device=self.device,
            **price,
            **self.plan.search_arguments(space, self.phases, targets),
        )

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
        canonical = self.gated.canonical(masks)
        return Given(canonical.to(self.device), rates.to(self.device), self.seed)

    def masks(self) -> Tensor:
        """What would ship now, canonical: ``(R, d)``."""
        if self.search is not None:
            return self.gated.canonical(self.search.select())
        assert isinstance(self.batch.source, Given)
        return self.batch.source.mask

    @property
    def seconds(self) -> float:
        """Spent on these runs, in all calls together."""
        return self.spent + time.monotonic() - self.began

    @property
    def finished(self) -> bool:
        return self.batch.done >= self.total

    def train(self, stop: Stop, progress: Progress) -> Iterator[list[Row]]:
        """Go on to the end, or until told to stop; gives the rows of each epoch when it ends."""
        since, cost = time.monotonic(), 0.0
        with chance.seeded(self.seed, self.device):
            self._resume()
            progress.start(self.batch.done, self.total)
            if not self.thetas.updates:
                self._keep_theta()
            while not self.finished and not stop.now(spare=cost):
                self._advance()
                progress.update(self.batch.done)
                if self.batch.done % self.per_epoch == 0:
                    yield self._end_of_epoch()
                if time.monotonic() - since > cost / SAVING:
                    since = time.monotonic()
                    self.save()
                    cost = time.monotonic() - since
            self.save()

    def _advance(self) -> None:
        """On to where something is due: the end of the epoch, settling, a look at the clock."""
        done = self.batch.done
        if self.search is not None and done == self.phases.settle and not self.search.settled:
            self.search.settle()
            self.batch.settle(self.masks())
        due = [done + self.slice, (done // self.per_epoch + 1) * self.per_epoch]
        if done < self.phases.settle:
            due.append(self.phases.settle)
        self.gated.model.train()
        begin = time.monotonic()
        self.batch.advance(min(due) - done)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the clock is to know what is done, not what is asked for
        if time.monotonic() - begin < LOOK / 2:
            self.slice *= 2
        elif time.monotonic() - begin > LOOK:
            self.slice = max(self.slice // 2, 1)

    def _end_of_epoch(self) -> list[Row]:
        self.gated.model.eval()
        rows = self.measure.rows(self.batch.done // self.per_epoch, self.masks(), self.seconds)
        for history, row in zip(self.histories, rows, strict=True):
            history.append(row)
        self._keep_theta()
        broken = self.batch.state.broken
        if bool((broken >= 0).all()):
            raise Diverged(
                f"every run met an update whose losses were all infinite or not a number, the first at update "
                f"{int(broken.min())} of {self.total}. Lower the learning rate of the weights, or look at the data"
            )
        return rows

    def _keep_theta(self) -> None:
        if self.search is not None:
            self.thetas.offer(self.batch.done, self.search.theta)

    def save(self) -> None:
        if self.checkpoint is None:
            return
        state: dict[str, Any] = {"batch": self.batch.state_dict(), "histories": self.histories}
        state |= {"seconds": self.seconds, "random": chance.states(self.device), "thetas": self.thetas.state_dict()}
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
        self.histories, self.spent, self.began = state["histories"], state["seconds"], time.monotonic()
        self.thetas.load_state_dict(state["thetas"])
        chance.restore(state["random"], self.device)


def _describe(inputs: Tensor, targets: Tensor) -> list[Any]:
    """What tells one set of data from another, cheaply."""
    rows = torch.linspace(0, len(inputs) - 1, min(len(inputs), 64)).long()
    return [[str(t.dtype), *t.shape, round(float(t[rows.to(t.device)].double().sum()), 6)] for t in (inputs, targets)]
