"""The engine of one run: any module, any torch optimiser, any loader, one update after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from espalier.compact.apply import tensor_state
from espalier.files import clean
from espalier.gates.blocks import usual_width
from espalier.gates.recalibrate import calibrated
from espalier.space import BadInput, Diverged
from espalier.train import checks, fingerprint, pytree, scoring
from espalier.train.compiling import Compiling, Recording, as_it_is
from espalier.train.feed import Batch, Feed
from espalier.train.gradients import OnePass, scalar
from espalier.train.loop import Engine, Loop, Stop
from espalier.train.optimizer import StructureOptimizer
from espalier.train.result import Result, Row
from espalier.train.scoring import Loss, Score

Scheduler = torch.optim.lr_scheduler.LRScheduler
LONG = 5000  # updates of a run on a GPU that are worth being recorded
CALIBRATED = 1024  # examples that BatchNorm's statistics are estimated on for a measurement in the middle of a run


@dataclass(eq=False, repr=False)
class EagerEngine(Engine):
    """structure: with its phases. scheduler: stepped after every epoch. precision, channels_last, compile: as in fit.

    began_with: a hash of the initial weights, "" where nobody asks for one. known: whether a model with weights of such
    a hash may go on with the run, too.
    """

    structure: StructureOptimizer
    feed: Feed
    loss: Loss
    scheduler: Scheduler | None
    validation: Feed | None
    metrics: Mapping[str, Any]
    device: torch.device
    precision: str | None
    channels_last: bool
    compile: bool | None
    began_with: str
    known: Callable[[str], bool]
    runs, stride = range(1), 1

    def __post_init__(self) -> None:
        structure, on_gpu = self.structure, self.device.type == "cuda"
        self.search, self.gated, self.ranks = structure.search, structure.gated, structure.ranks
        assert structure.phases is not None
        self.phases = phases = structure.phases
        self.total, self.settle_at = phases.end, phases.settle
        self.points = range(self.feed.updates, phases.end + 1, self.feed.updates)
        self.compiling, self.recording = None, None
        long = on_gpu and self.ranks is None and phases.end >= LONG
        if self.compile or (self.compile is None and long):  # by itself only what runs the same kernels
            self.compiling = Compiling() if self.compile else Compiling(asked=False, backend=as_it_is)
            self.recording = Recording(asked=bool(self.compile)) if on_gpu else None
        if self.compile and on_gpu:  # on a CPU theta's update of one run is not torch's
            self.search.compile()
            self.structure.multiple = usual_width(self.gated.model)
        # Of an epoch: losses, their number, wrong classes, predictions. On the device: to read one would be to wait.
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self._batches: Iterator[Batch] | None = None  # of the rest of the epoch

    @property
    def done(self) -> int:
        return self.structure.update

    @property
    def settled(self) -> bool:
        return self.search.settled

    @property
    def phase(self) -> str:
        return self.structure.phase

    @property
    def resumable(self) -> bool:
        """Somebody else's iterable cannot be entered in the middle: what was done of an epoch is done again."""
        return self.feed.exact or self.done % self.feed.updates == 0

    @property
    def thetas(self) -> Tensor:
        return self.search.theta.unsqueeze(0)

    def advance(self, updates: int, stop: Stop) -> None:
        self._enter()
        for _ in range(updates):
            if self._batches is None:
                self._batches = self._read()
                if self.recording is not None:
                    self.recording.looking = True
            self.step(next(self._batches))
            if self.done % self.feed.updates == 0:
                self._batches = None
            if stop.interrupted and self.ranks is None:  # several processes end after the same update
                return

    def _read(self) -> Iterator[Batch]:
        """What the updates from here to the end of the epoch read, on the device."""
        end = min((self.done // self.feed.updates + 1) * self.feed.updates, self.total)
        # Losses are compared on the same examples; slopes are not compared, so that each mask reads its own.
        compared = range(0) if self.search.reads_slopes else self.phases.compared
        for update, batch in enumerate(self.feed.epoch(self.done, end, compared, self.search.samples), self.done):
            inputs, targets = pytree.each(self._placed, self._shared(update, batch))
            yield inputs, targets

    def _shared(self, update: int, batch: Batch) -> Batch:
        """What this rank reads of it. In the structure-parallel way the optimiser decides that."""
        if self.ranks is None or self.feed.shared:
            return batch
        if not self.feed.exact and update % self.feed.updates == 0:
            hashed = {"the first batch of an epoch": fingerprint.tensors(pytree.tensors(batch))}
            self.ranks.agree(hashed)
        if self.ranks.parallel == "structure":
            return batch
        apart = self.search.reads_slopes and update in self.phases.compared
        return self.ranks.share(batch, self.search.samples if apart else 1)  # type: ignore[no-any-return]

    def _placed(self, tensor: Tensor) -> Tensor:
        images = self.channels_last and tensor.ndim == 4
        layout = torch.channels_last if images else torch.preserve_format
        return tensor.to(self.device, non_blocking=True, memory_format=layout)

    def settle(self) -> None:
        self.structure.settle()
        self._enter()

    def _enter(self) -> None:
        """Once settled, the user's model is the compact network: for a loss and callbacks that look into it."""
        settled = self.structure.settled
        if settled is not None and type(settled.small) is type(self.gated.model):
            settled.enter()

    def step(self, batch: Batch) -> None:
        """One update of weights and structure."""
        if self.compiling is None:
            self._step(batch)
        else:
            self.compiling.tried(lambda: self._step(batch))

    def _step(self, batch: Batch) -> None:
        masks = self.search.samples if self.done in self.phases.compared else 1
        apart = self.search.reads_slopes  # masks have examples of their own; else the first one speaks for all
        counted: list[bool] = []
        network, compiling, settled = self.structure.network, self.compiling, self.structure.settled
        if compiling is None and settled is not None and settled.inside:
            network = self.gated.model  # what its forward pass keeps is kept where the user looks for it
        whole = compiling.form(network, self.loss) if compiling is not None and compiling.on else None

        def forward(inputs: Any) -> Any:
            with self._autocast():
                return pytree.call(network, inputs)

        def loss_of(outputs: Any, targets: Any) -> Tensor:
            with self._autocast():
                return checked(self.loss(outputs, targets))

        def closure(inputs: Any, targets: Any) -> Tensor:
            if whole is None:
                outputs = forward(inputs)
                loss = loss_of(outputs, targets)
            else:
                with self._autocast():
                    outputs, loss = whole(inputs, targets)
                checked(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            if apart or not counted:
                self._count(outputs, targets)
                counted.append(True)
            return loss

        together = self._together(forward, loss_of)
        loss = self.structure.step(closure, *batch, together=together)
        if isinstance(together, OnePass) and together.seen is not None:
            for outputs, targets in together.seen if apart else together.seen[:1]:
                self._count(outputs, targets)
        self.sums[0] += loss * masks
        self.sums[1] += masks

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _together(self, forward: Callable[[Any], Any], loss: Loss) -> OnePass | Recording | None:
        """How an update's gradient is computed: in one pass where it is not compiled, recorded where that is done."""
        if self.compiling is None or not self.compiling.on:  # what splits a batch by its masks is not compiled
            return OnePass(forward, loss)
        return self.recording if self.compiling.whole else None

    @torch.no_grad()
    def _count(self, outputs: Any, targets: Any) -> None:
        counts = scoring.wrong(outputs, targets)
        if counts is not None:
            self.sums[2] += counts[0]
            self.sums[3] += counts[1]

    def _pool(self) -> None:
        """Give the first rank what all of them have counted."""
        if self.ranks is not None:
            counted = self.ranks.total(self.sums[2:])
            self.sums[2:] = counted if self.ranks.first else 0.0

    def check(self) -> None:
        """Refuse to save weights from which no run could go on."""
        self._pool()
        self.structure.check()
        with self.structure.whole():
            finite = all(bool(parameter.detach().isfinite().all()) for parameter in self.gated.model.parameters())
        if not finite:
            raise Diverged(
                f"update {self.done} of {self.total}: the weights are no longer finite; this state was not saved, "
                "and an earlier checkpoint is intact. Lower the learning rate of the weights"
            )

    def measure(self, last: bool) -> list[Row]:
        self._pool()
        loss, losses, missed, predictions = self.sums.tolist()
        with self.structure.whole():
            row = self.structure.row(self.done // self.feed.updates)
            row |= {"loss": loss / losses, "error": missed / predictions if predictions else None}
            if self.validation is not None:
                row |= self._validated(self.validation)
        if self.ranks is not None:  # what the first one has measured holds for all
            row = self.ranks.from_first(lambda: row)
        if self.scheduler is not None:
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(row["loss" if self.validation is None else "validation_loss"])
            else:
                self.scheduler.step()
        self.sums.zero_()
        return [clean(row)]

    def _validated(self, validation: Feed) -> Row:
        """Of what would ship now."""
        mask = self.search.select()
        with calibrated(self.gated, mask, self.feed.once(CALIBRATED)):
            score = scoring.deterministic(self.gated, mask, validation, loss=self.loss, metrics=self.metrics)
        named = {f"validation_{name}": value for name, value in score.metrics.items()}
        return {"validation_loss": score.loss, "validation_error": score.error, **named}

    def keep(self, best: dict[str, Tensor] | None, better: Sequence[bool]) -> dict[str, Tensor]:
        if best is not None and not better[0]:
            return best
        return {name: tensor.detach().clone() for name, tensor in tensor_state(self.structure.network).items()}

    def put_back(self, best: dict[str, Tensor]) -> None:
        self.structure.network.load_state_dict({**self.structure.network.state_dict(), **best})

    def results(self, loop: Loop) -> list[Result]:
        about: dict[str, Any] = {"history": list(loop.histories[0]), "finished": loop.finished, "stopped": loop.stopped}
        about |= {"seconds": loop.elapsed, "metrics": self.metrics}
        with self.structure.whole():
            result = self.structure.finish(self.feed, loss=self.loss, validation=self.validation, **about)
        if self.ranks is not None:
            self.ranks.same([tensor.detach() for tensor in tensor_state(result.model).values()])
            # Scored with statistics of BatchNorm of what a rank has read, which may be a share of its own.
            score = self.ranks.from_first(lambda: {} if result.validation is None else asdict(result.validation))
            result = replace(result, validation=Score(**score) if score else None)
        return [result]

    def close(self) -> None:
        if self.structure.settled is not None:
            self.structure.settled.leave()

    def state_dict(self) -> dict[str, Any]:
        with self.structure.whole():
            model = {name: tensor.detach() for name, tensor in tensor_state(self.gated.model).items()}
            structure = self.structure.state_dict()
        return {
            "began_with": self.began_with,
            "model": model,
            "structure": structure,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sums": self.sums.tolist(),
            "generators": [generator.get_state() for generator in self.feed.generators],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stored = [state["model"][name] for name, _ in self.gated.model.named_parameters()]
        here = (state["began_with"], fingerprint.weights(stored))
        if self.began_with not in here and not self.known(self.began_with):
            raise BadInput(
                f"the weights of this model are not those that the run began with: {state['began_with']} there, "
                f"{self.began_with} here (hashes). Give the same network to go on with it (torch.manual_seed before it "
                "is built makes it the same), or another folder to start anew"
            )
        self.gated.model.load_state_dict({**self.gated.model.state_dict(), **state["model"]})
        self.structure.load_state_dict(state["structure"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for generator, drawn in zip(self.feed.generators, state.get("generators", ())):
            generator.set_state(drawn)
        self.began_with = state["began_with"]
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        if self.ranks is not None and not self.ranks.first:
            self.sums[2:] = 0.0


def checked(loss: Tensor) -> Tensor:
    """What a loss gave, if it is a number that can be gone backwards through."""
    checks.gradient_of(loss)
    scalar(loss)
    return loss
