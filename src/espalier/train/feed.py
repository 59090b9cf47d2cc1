"""Where an update's examples come from: tensors read in an order of our own, or somebody else's iterable of batches.

Where masks are compared an update reads ``batch`` examples, which all of them share; else, under one mask, it reads
``samples * batch`` different ones: the same work, none of it done twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from espalier.data import Dataset, Stream, standardise
from espalier.space import BadInput, BadType
from espalier.train import pytree
from espalier.train.pytree import Nested

Batch = tuple[Nested, Nested]  # inputs, targets


class Feed(Protocol):
    """What the loop reads. ``updates``: in one epoch. ``exact``: whether a run may be resumed inside an epoch."""

    updates: int
    exact: bool

    def epoch(self, start: int, stop: int, compared: range, samples: int) -> Iterator[Batch]:
        """One batch for each update from start to stop, counted from the start of the run, all of one epoch.

        compared: the updates whose batch ``samples`` masks share."""
        ...

    def once(self, limit: int | None = None) -> Iterator[Batch]:
        """Every example once, for evaluation; at most about ``limit`` of them."""
        ...

    def example(self) -> Nested:
        """A few inputs, to attach gates with."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a checkpoint compares to know that the data are the same."""
        ...


@dataclass(eq=False)
class Tensors:
    """Examples in memory, each run in the order of its seed: resumed anywhere, since the order is a function of it.

    A last batch that is not full begins the next epoch instead. Tensors are given to the model as they are; those of a
    :class:`espalier.data.Dataset` as it says, by ``affine``, its gain and shift.
    """

    inputs: Nested
    targets: Nested
    batch: int
    seed: int
    affine: tuple[Tensor, Tensor] | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        self.n = pytree.count(self.inputs, "the inputs")
        if not self.n:
            raise BadInput("the data are empty: there is nothing to learn from")
        if self.n != pytree.count(self.targets, "the targets"):
            raise BadInput(f"{self.n} inputs, but {pytree.count(self.targets, 'the targets')} targets")
        if self.batch > self.n:
            raise BadInput(f"batch_size={self.batch} is larger than the data, {self.n} examples; use at most {self.n}")
        self.updates = self.n // self.batch
        self.stream = Stream(self.seed, self.n)

    def epoch(self, start: int, stop: int, compared: range, samples: int) -> Iterator[Batch]:
        wide = min(samples * self.batch, self.n)
        for update in range(start, stop):
            size = self.batch if update in compared else wide
            narrow = min(max(update - compared.start, 0), len(compared))
            self.stream.position = narrow * self.batch + (update - narrow) * wide
            yield self._take(self.stream.take(1, size)[0])

    def once(self, limit: int | None = None) -> Iterator[Batch]:
        end = self.n if limit is None else min(limit, self.n)
        size = max(self.batch, min(self.n, 512))
        for start in range(0, end, size):
            yield self._take(torch.arange(start, min(start + size, end)))

    def example(self) -> Nested:
        return self._take(torch.arange(min(4, self.n)))[0]

    def describe(self) -> dict[str, Any]:
        rows = torch.linspace(0, self.n - 1, min(self.n, 64)).long()
        digest, shapes = hashlib.sha256(), []
        for tensor in pytree.tensors((self.inputs, self.targets)):
            some = tensor[rows.to(tensor.device)].detach().cpu().contiguous()
            digest.update(some.reshape(-1).view(torch.uint8).numpy().tobytes())
            shapes.append([str(tensor.dtype), *tensor.shape])
        return {"examples": self.n, "tensors": shapes, "some_of_them": digest.hexdigest()[:16]}

    def _take(self, index: Tensor) -> Batch:
        inputs, targets = pytree.each(lambda t: t[index.to(t.device)], (self.inputs, self.targets))
        if self.affine is not None:
            inputs = standardise(inputs, *(part.to(inputs.device) for part in self.affine))
        return inputs, targets


class Batches:
    """An iterable of batches that can be gone through again, such as a DataLoader; resumed at an epoch's start.

    Its random draws are its own: they come from torch's global generator, which a run seeds and a checkpoint stores.
    """

    exact = False

    def __init__(self, source: Any) -> None:
        self.source: Iterable[Any] = source
        if isinstance(source, Iterator):
            raise BadInput(
                "data is an iterator, which can be gone through only once; give a DataLoader, a list of batches, or an "
                "object whose __iter__ starts again"
            )
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise BadType(f"data is (inputs, targets), or an iterable of such pairs, not {type(source).__name__}")
        try:
            self.updates = len(source)
        except TypeError:
            with torch.random.fork_rng(devices=[]):
                self.updates = sum(1 for _ in source)
        if not self.updates:
            raise BadInput("the data are empty: the iterable gives no batch")

    def epoch(self, start: int, stop: int, compared: range, samples: int) -> Iterator[Batch]:
        passes, new = self._pass(), True
        for update in range(start, stop):
            wanted = 1 if update in compared else samples
            batches = list(islice(passes, wanted))
            # The rest of a pass is not filled up from the next one, which may hold the same examples.
            while len(batches) < wanted and not (new and batches):
                passes, new = self._pass(), True
                batches = list(islice(passes, wanted))
            new = False
            inputs, targets = zip(*batches, strict=True)
            yield pytree.join(inputs), pytree.join(targets)

    def once(self, limit: int | None = None) -> Generator[Batch, None, None]:
        with torch.random.fork_rng(devices=[]):  # looking at the data leaves the run's random numbers as they were
            seen = 0
            for batch in self._pass():
                yield batch
                seen += pytree.count(batch[0], "the inputs")
                if limit is not None and seen >= limit:
                    return

    def example(self) -> Nested:
        with closing(self.once(1)) as batches:
            inputs, _ = next(batches)
        return pytree.each(lambda t: t[:4], inputs)

    def describe(self) -> dict[str, Any]:
        return {"batches": self.updates}

    def _pass(self) -> Iterator[Batch]:
        number = 0
        for batch in self.source:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise BadType(
                    f"data gives pairs (inputs, targets), not {type(batch).__name__}; one pair of tensors is a tuple "
                    "(inputs, targets), its targets a tensor"
                )
            number += 1
            yield batch[0], batch[1]
        if not number:
            raise BadInput("the data are empty: the iterable gives no batch (any more)")


def read(data: object, batch: int, seed: int, dtype: torch.dtype = torch.float32) -> Feed:
    """data: a Dataset (its training part), a tuple (inputs, targets) whose targets are a tensor, or an iterable.

    dtype: what a Dataset's inputs are turned into.
    """
    if isinstance(data, Dataset):
        return Tensors(*data.train, batch, seed, data.affine(dtype))
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):
        return Tensors(data[0], data[1], batch, seed)
    if isinstance(data, (TensorDataset, Subset)):
        kind = type(data).__name__
        raise BadType(f"a {kind} gives single examples; give torch.utils.data.DataLoader(data, {batch}, shuffle=True)")
    if isinstance(data, (tuple, list)) and len(data) == 2 and any(isinstance(part, np.ndarray) for part in data):
        raise BadType("data are tensors, not NumPy arrays: give (torch.from_numpy(inputs), torch.from_numpy(targets))")
    return Batches(data)


def read_held_out(data: object, batch: int, dtype: torch.dtype = torch.float32, beside: Dataset | None = None) -> Feed:
    """Data to evaluate on, each example once: as :func:`read`, but the test part of a Dataset. A batch that is larger
    than the data is no mistake here.

    beside: the Dataset that is trained on; its own parts, given as pairs, are read as it says.
    """
    affine = None
    if isinstance(data, Dataset):
        affine, data = data.affine(dtype), data.test
    if not (isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor)):
        return read(data, batch, 0)
    if beside is not None and any(data[0] is own for own in (beside.train_inputs, beside.test_inputs)):
        affine = beside.affine(dtype)
    size = len(data[1]) if data[1].ndim else 0
    return Tensors(data[0], data[1], max(min(batch, size), 1), 0, affine)
