"""R runs as one batch: their state on one device, advanced any number of updates, measured, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from espalier.data import Dataset
from espalier.gates.masking import Channels
from espalier.search.recorded import WARM, Recorded, aside
from espalier.space import BadInput, whole_number
from espalier.train import pytree
from espalier.train.batched.chain import Chain, Named
from espalier.train.batched.inputs import Crops, Given, Pair, Reading, ResidentFeed, Searched, Source, Whole
from espalier.train.batched.step import (
    Call,
    Differential,
    Gradient,
    Loss,
    Stacked,
    Step,
    compiled,
    cross_entropy,
)
from espalier.train.descent import Optimizer, Schedule
from espalier.train.pytree import Nested
from espalier.train.settled import OneShape

Precision = Literal["float32", "tf32", "bf16"]
MOVING = ("params", "slots", "sums", "skipped", "broken")  # what of a state a checkpoint holds
AT_ONCE = 50  # updates whose examples are chosen together, and updates in one CUDA graph


@dataclass(frozen=True)
class Compute:
    """How a batch is computed. It changes results by rounding alone.

    precision: of matrix products; "bf16" keeps float32 masters of the weights. compile, capture: None means on a GPU
    and not on a CPU; capture records ``updates_at_once`` updates as one CUDA graph. autotune: look longer for faster
    kernels. options: of torch's inductor, such as ``{"combo_kernels": True}``.
    deterministic: refuse operations whose result depends on timing (on a GPU this also needs the environment variable
    CUBLAS_WORKSPACE_CONFIG=:4096:8).
    """

    precision: Precision = "float32"
    compile: bool | None = None
    capture: bool | None = None
    autotune: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = False
    updates_at_once: int = AT_ONCE

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "tf32", "bf16"):
            raise BadInput(f"precision is 'float32', 'tf32' or 'bf16', not {self.precision!r}")
        whole_number(self.updates_at_once, "updates_at_once", 1)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """torch's switches, set for the time of the run and put back afterwards."""
        matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        convolution = torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest" if self.precision == "float32" else "high")
        torch.backends.cudnn.allow_tf32 = self.precision != "float32"
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = convolution
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small networks are not worth sharing: on two busy cores two threads that wait for each other took five times the
    processor time of one. And the numbers then do not depend on how many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Batch:
    """R runs with stacked parameters ``(R, ...)``, one source of masks and one feed.

    call: ``gated.call``; params, fixed: name to ``(R, ...)``, taken over and changed in place; seeds: of the data
    order, one for each run; samples: masks compared in one update; batch_size: examples that each of them reads.
    begin: the updates before those of a search, under the whole network.
    chain: what the network is, where it is a chain of linear layers; updates on a GPU are then faster.
    gradient: how the weights' gradient is computed, None for that of ``call``, mapped over runs and masks.
    channels: that the gates multiply, on the device of the runs; None: one for each gate. even: of the search.
    """

    def __init__(
        self,
        call: Call,
        params: Named,
        fixed: Named,
        *,
        data: Dataset | Pair,
        seeds: Sequence[int],
        source: Source,
        loss: Loss,
        optimizer: Optimizer,
        schedule: Schedule,
        total: int,
        batch_size: int,
        samples: int,
        begin: int = 0,
        rates: Tensor | None = None,
        pad: int = 0,
        compute: Compute | None = None,
        chain: Chain | None = None,
        gradient: Gradient | None = None,
        channels: Channels | None = None,
        even: float = 0.0,
    ) -> None:
        self.compute = compute or Compute()
        first = next(iter(params.values()))
        self.device = first.device
        self.runs, self.batch_size, self.samples, self.total = len(seeds), batch_size, samples, total
        dtype = torch.bfloat16 if self.compute.precision == "bf16" else None
        self.differential = Differential(call, loss, dtype, channels, even)
        self.feed = ResidentFeed(data, list(seeds), device=self.device, dtype=first.dtype, pad=pad)
        if rates is None:
            rates = torch.full((self.runs,), optimizer.lr, dtype=first.dtype, device=self.device)
        self.state = Stacked.start(params, fixed, optimizer, rates)
        tf32 = self.compute.precision == "tf32"
        alike = loss in (cross_entropy, nn.functional.cross_entropy) and dtype is None and not fixed
        known = chain if alike and gradient is None else None
        if known is not None and not self._classes(params[known.layers[-1][0]].shape[1]):
            known = None
        self.gradient = gradient or self.differential
        self.step = Step(self.state, self.gradient, optimizer, schedule, total, self.feed, known, tf32)
        self.done = 0  # the same as state.done, known without asking the device
        self.smaller: OneShape | None = None  # the smaller networks that are trained, where they are
        self._uncut = self.state
        self._later: tuple[int, Source] | None = None
        if begin and isinstance(source, Searched):
            self._later = begin, source
            source = Whole(source.search)
        self._start(source)

    def _classes(self, outputs: int) -> bool:
        """Whether every target is one of so many classes: none is left out, and none is a probability."""
        y = self.feed.stored.targets
        return (
            isinstance(y, Tensor)
            and y.ndim == 1
            and not y.is_floating_point()
            and bool(((y >= 0) & (y < outputs)).all())
        )

    @property
    def begun(self) -> bool:
        """Whether an update of the search was made; where there is none, there is nothing to wait for."""
        return self._later is None

    def _begin(self) -> None:
        """The search, where it is due."""
        if self._later is not None and self.done >= self._later[0]:
            source, self._later = self._later[1], None
            self._start(source)

    def _start(self, source: Source) -> None:
        if self.gradient is not self.differential and (source.masks_each or self.state.fixed):
            raise BadInput("runs computed together have masks that all examples share, and no tensors but parameters")
        self.source = source
        on_gpu = self.device.type == "cuda"
        compile = on_gpu if self.compute.compile is None else self.compute.compile
        capture = on_gpu if self.compute.capture is None else self.compute.capture
        if capture and not on_gpu:
            raise BadInput("capture records CUDA graphs, and these runs are on a CPU; use capture=None")
        self._update: Callable[..., Any] = self.step.exactly if not on_gpu else self.step
        if compile:
            self._try()
            tuned = {"max_autotune": True, "coordinate_descent_tuning": True} if self.compute.autotune else {}
            self._update = compiled(self.step, tuned | dict(self.compute.options))
        self._replayer = Replayer(self._update, source, self.compute.updates_at_once) if capture else None

    @torch.no_grad()
    def _try(self) -> None:
        """The gradient of one run, eagerly: what is wrong says so in its own words, and what is made once is made here,
        outside of what is compiled."""
        params, fixed = ({name: t[:1] for name, t in named.items()} for named in (self.state.params, self.state.fixed))
        mask, stored = torch.ones(1, 1, self.source.d, device=self.device), self.feed.stored
        x, y = pytree.each(lambda part: part[:4].unsqueeze(0), (stored.inputs, stored.targets))
        self.gradient(params, fixed, mask, stored.read(x), y, each=False)

    @property
    def examples(self) -> int:
        """Distinct examples that each run reads in one update."""
        if self.source.compares:
            return self.batch_size
        wide = min(self.batch_size * self.samples, self.feed.stored.n)
        apart = self.source.reads_slopes and wide >= 2 * self.samples
        return wide - wide % self.samples if apart else wide  # parts of one size can be computed together

    def settle(self, mask: Tensor) -> None:
        """From now on each run is under its mask ``(R, d)``, and an update reads samples times as many examples."""
        self._start(Given(mask.to(self.device), torch.zeros(self.runs, device=self.device)))

    def cut(self, smaller: OneShape) -> None:
        """Go on with the smaller networks of these runs, whose masks are given: tensors and slots are cut along."""
        state, self.smaller = self.state, smaller
        self._uncut = replace(
            state, params=dict(state.params), fixed=dict(state.fixed), slots=[list(slot) for slot in state.slots]
        )
        for named in (state.params, state.fixed):
            named.update({name: smaller.cut(tensor, name) for name, tensor in named.items()})
        for slot in state.slots:
            slot[:] = [smaller.cut(tensor, name) for tensor, name in zip(slot, state.params, strict=True)]
        self.differential.call, self.step.chain = smaller.call, None
        self._start(self.source)

    @property
    def whole(self) -> Stacked:
        """The state in the shapes of the whole network. What was cut away is as it was then."""
        if self.smaller is not None:
            for whole, now in zip(self._uncut.by_name(), self.state.by_name(), strict=True):
                for name, tensor in now.items():
                    self.smaller.write(whole[name], tensor, name)
        return self._uncut

    def put_back(self, kept: Named) -> None:
        """Go on with these tensors, by name and in the shapes of the whole network."""
        for whole, now in zip(self._uncut.by_name()[:2], self.state.by_name()):
            for name, tensor in whole.items():
                tensor.copy_(kept[name])
                if self.smaller is not None:
                    now[name].copy_(self.smaller.cut(tensor, name))

    def advance(self, updates: int) -> None:
        """So many updates of every run. On a GPU they are under way, not done, when this returns."""
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.no_grad(), self.compute.applied(), here:
            while updates:
                self._begin()
                wanted = updates if self._later is None else min(updates, self._later[0] - self.done)
                if self._replayer is not None:
                    count = self._replayer.next(wanted)
                    self._replayer.run(self.feed.take(count, self.examples))
                else:
                    count = min(wanted, self.compute.updates_at_once)
                    reading = self.feed.take(count, self.examples)
                    for i in range(count):
                        self._update(self.source, reading.at(i), self.source.noise(self.examples))
                updates -= count
                self.done += count

    def learning_rates(self) -> Tensor:
        """Of the next update ``(R)``."""
        return self.state.rates * self.step.schedule.factor(self.state.done, self.total)

    def read_sums(self) -> tuple[Tensor, Tensor]:
        """The mean training loss and the share of wrong classes, ``(R)``, since this was last asked for."""
        loss, finite, wrong, predicted = self.state.sums.clone()
        self.state.sums.zero_()
        return loss / finite, wrong / predicted

    @torch.no_grad()
    def evaluate(
        self,
        masks: Tensor,
        inputs: Nested,
        targets: Nested,
        chunk: int = 1000,
        read: Callable[[Nested], Nested] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean loss and share of wrong classes of each run under its mask ``(R, d)``, float64 ``(R)``.

        inputs, targets: as stored; read: how the network reads them, None for as the training inputs. Batch
        statistics, where the model has any, are those of a chunk.
        """
        sums = torch.zeros(2, self.runs, dtype=torch.float64, device=self.device)
        count = pytree.count(inputs, "the inputs")

        def measured(params: Named, fixed: Named, mask: Tensor, x: Nested, y: Nested) -> tuple[Tensor, Tensor]:
            return self.differential.measured(self.differential.outputs(params, fixed, mask, x), y)

        over_runs = vmap(measured, in_dims=(0, 0, 0, None, None), randomness="different")
        with self.compute.applied():
            for start in range(0, count, chunk):
                here = slice(start, start + chunk)
                x, y = pytree.each(lambda part, here=here: part[here].to(self.device), (inputs, targets))  # type: ignore[misc]
                x = (read or self.feed.stored.read)(x)
                loss, wrong = over_runs(self.state.params, self.state.fixed, masks.to(self.device), x, y)
                sums += torch.stack([loss.to(torch.float64) * min(chunk, count - start), wrong.to(torch.float64)])
        return sums[0] / count, sums[1] / sum(part.numel() for part in pytree.tensors(targets))

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as tensors and plain numbers."""
        saved: dict[str, Any] = {"done": self.done, "stream": self.feed.stream.state_dict()}
        whole = self.whole
        saved |= {name: getattr(whole, name) for name in MOVING}
        if isinstance(self.source, Given):
            saved["given"] = {"mask": self.source.mask, "rate": self.source.rate}
        if self.source.generator is not None:
            saved["generator"] = self.source.generator.get_state()
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a state of the same batch; the tensors are written where the present ones are."""
        self.done = int(saved["done"])
        self._begin()
        if "given" in saved and not isinstance(self.source, Given):
            self.settle(saved["given"]["mask"])
        self.state.done.fill_(self.done)
        for name in MOVING:
            tree_map(Tensor.copy_, getattr(self.state, name), saved[name])
        self.step.set_pace()
        self.feed.stream.load_state_dict(dict(saved["stream"]))
        if "generator" in saved and self.source.generator is not None:
            self.source.generator.set_state(saved["generator"].cpu())


Update = Callable[..., object]  # (source, reading, noise)


class Replayer:
    """Runs any number of updates of one source: the first few as they are, then recorded, ``length`` at a time, and
    replayed with other examples and fresh noise.

    The first ones let kernels be compiled, chosen and their workspaces be allocated, which a recording must not do.
    """

    def __init__(self, update: Update, source: Source, length: int) -> None:
        self.update, self.source, self.length = update, source, length
        self.left_to_warm = WARM
        self.recorded: dict[int, Recorded] = {}

    def next(self, wanted: int) -> int:
        """How many of the wanted updates the next call of ``run`` should read."""
        return self.length if not self.left_to_warm and wanted >= self.length else 1

    def run(self, reading: Reading) -> None:
        updates, examples = len(reading.index), reading.index.shape[-1]

        def several(index: Tensor, crops: Crops | None) -> None:
            for i in range(updates):
                self.update(self.source, Reading(index, crops).at(i), self.source.noise(examples))

        if self.left_to_warm:
            self.left_to_warm -= 1
            aside(several, reading.index, reading.crops)
            return
        if updates not in self.recorded:
            pool = next((one.graph.pool() for one in self.recorded.values() if one.graph is not None), None)
            self.recorded[updates] = Recorded(0, self.source.generator, pool)
        recorded = self.recorded[updates]
        recorded(several, reading.index, reading.crops)
        if recorded.trouble:
            raise RuntimeError(f"updates cannot be recorded as a CUDA graph: {recorded.trouble}")
