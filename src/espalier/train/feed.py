"""Where an update's examples come from: tensors read in an order of our own, or somebody else's iterable of batches.

Where masks are compared an update reads ``batch`` examples, which all of them share; else, under one mask, it reads
``samples * batch`` different ones: the same work, none of it done twice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from espalier.data import Dataset, Stream, held_out, standardise
from espalier.gates.verify import isolated_random
from espalier.space import BadInput, BadType, first_line
from espalier.train import checks, fingerprint, pytree
from espalier.train.fingerprint import Hashes
from espalier.train.pytree import Nested

Batch = tuple[Nested, Nested]  # inputs, targets
Adapter = Callable[[Any], Batch]
CHUNK = 512  # examples at once where each is read once
PROBED = 64  # examples that are kept beside what ships
PATIENCE = 10.0  # seconds of counting batches until somebody is told
LABELS = "labels"  # what a batch that is a dict calls its targets


class Feed:
    """What the loop reads. ``updates``: in one epoch. ``exact``: whether a run may be resumed inside an epoch.
    ``shared``: whether every rank is given a share of its own. ``prepared``: what is done to stored inputs before the
    network reads them, in words, where that is known. ``generators``: what it draws from beside torch's global one."""

    updates: int
    exact = shared = False
    prepared = ""
    generators: Sequence[torch.Generator] = ()

    def epoch(self, start: int, stop: int, compared: range, samples: int) -> Iterator[Batch]:
        """One batch for each update from start to stop, counted from the start of the run, all of one epoch.

        compared: the updates whose batch ``samples`` masks share."""
        raise NotImplementedError

    def once(self, limit: int | None = None) -> Generator[Batch, None, None]:
        """Every example once, for evaluation; at most about ``limit`` of them."""
        raise NotImplementedError

    def describe(self, hashes: Hashes) -> dict[str, Any]:
        """What a checkpoint compares to know that the data are the same: a hash of all of them, where they are at hand;
        else what is unchecked."""
        raise NotImplementedError

    def first(self, count: int = 1) -> Batch:
        """Some examples, to see what they are; about so many, or a batch of them."""
        with closing(self.once(count)) as batches:
            return next(batches)

    def example(self, most: int = 4) -> Nested:
        """A few inputs, as the network reads them."""
        return pytree.few(self.first(most)[0], most)

    def probe(self, model: nn.Module | None = None) -> Nested:
        """Some inputs to keep, on the CPU; None where they are of a form that only a loop of one's own reads. model:
        which may take no fewer than a whole batch, as of one graph."""
        with suppress(BadType):
            inputs = self.first(PROBED)[0]
            some = pytree.few(inputs, PROBED)
            if model is not None:
                with suppress(BadInput):  # it takes neither
                    where = next((p.device for p in model.parameters()), torch.device("cpu"))
                    some = checks.few(model, pytree.each(lambda t: t.to(where), inputs), PROBED)
            return pytree.each(lambda t: t.detach().to("cpu", copy=True), some)
        return None


@dataclass(eq=False)
class Tensors(Feed):
    """Examples in memory, each run in the order of its seed: resumed anywhere, since the order is a function of it.

    A last batch that is not full begins the next epoch instead. Tensors are given to the model as they are; those of a
    :class:`espalier.data.Dataset` as it says, by ``affine``, its gain and shift. dtype: what floating inputs are turned
    into; None: nothing else.
    """

    inputs: Nested
    targets: Nested
    batch: int
    seed: int
    affine: tuple[Tensor, Tensor] | None = None
    dtype: torch.dtype | None = None
    prepared: str = ""
    exact = True

    def __post_init__(self) -> None:
        for leaf in tree_leaves((self.inputs, self.targets)):
            if not isinstance(leaf, Tensor):  # which examples it is of cannot be told
                raise pytree.not_read(leaf)
        self.n = pytree.count(self.inputs, "the inputs")
        if not self.n or not all(tensor.numel() for tensor in pytree.tensors(self.inputs)):
            raise BadInput("the data are empty: there is nothing to learn from")
        if self.n != pytree.count(self.targets, "the targets"):
            raise BadInput(f"{self.n} inputs, but {pytree.count(self.targets, 'the targets')} targets")
        if self.batch > self.n:
            raise BadInput(f"batch_size={self.batch} is larger than the data, {self.n} examples; use at most {self.n}")
        self.updates = self.n // self.batch

    @cached_property
    def stream(self) -> Stream:
        """The order in which they are read; what is only evaluated on needs none."""
        return Stream(self.seed, self.n)

    def epoch(self, start: int, stop: int, compared: range, samples: int) -> Iterator[Batch]:
        wide = min(samples * self.batch, self.n)
        for update in range(start, stop):
            size = self.batch if update in compared else wide
            narrow = min(max(update - compared.start, 0), len(compared))
            self.stream.position = narrow * self.batch + (update - narrow) * wide
            yield self._take(self.stream.take(1, size)[0])

    def once(self, limit: int | None = None) -> Generator[Batch, None, None]:
        end = self.n if limit is None else min(limit, self.n)
        size = max(self.batch, min(self.n, CHUNK))
        for start in range(0, end, size):
            yield self._take(torch.arange(start, min(start + size, end)))

    def describe(self, hashes: Hashes) -> dict[str, Any]:
        both = list(pytree.tensors((self.inputs, self.targets)))
        shapes = [[str(tensor.dtype), *tensor.shape] for tensor in both]
        scale = {} if self.affine is None else {"scale": fingerprint.tensors(self.affine)}
        return {"examples": self.n, "tensors": shapes, "sha256": hashes.tensors(both)} | scale

    def _take(self, index: Tensor) -> Batch:
        inputs, targets = pytree.each(lambda t: t[index.to(t.device)], (self.inputs, self.targets))
        return self.read(inputs), targets

    def read(self, inputs: Nested) -> Nested:
        """Some of the inputs, as they are stored, as a network reads them."""
        if self.affine is not None:
            gain, shift = self.affine
            return standardise(inputs, gain.to(inputs.device), shift.to(inputs.device))
        if self.dtype is None:
            return inputs
        return pytree.each(lambda t: t.to(self.dtype) if t.is_floating_point() else t, inputs)

    def to(self, device: torch.device) -> Tensors:
        """The same examples on a device."""
        inputs, targets, affine = pytree.each(lambda t: t.to(device), (self.inputs, self.targets, self.affine or ()))
        return replace(self, inputs=inputs, targets=targets, affine=affine or None)


class Batches(Feed):
    """An iterable of batches that can be gone through again, such as a DataLoader; resumed at an epoch's start.

    Its random draws are its own: they come from the global generators of torch, NumPy and Python, which a run seeds and
    a checkpoint stores, or from one that a loader or its sampler was given, which a checkpoint stores, too.
    """

    def __init__(self, source: Any, adapt: Adapter | None = None) -> None:
        """adapt: makes inputs and targets of what the source gives; None: see :func:`pair`."""
        self.source: Iterable[Any] = source
        self.adapt = pair if adapt is None else adapt
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
            with isolated_random():
                self.updates = _counted(source)
        if not self.updates:
            raise BadInput("the data are empty: the iterable gives no batch")
        sampler, batches = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
        drawing = (source, sampler, batches, getattr(batches, "sampler", None))
        found = dict.fromkeys(getattr(holder, "generator", None) for holder in drawing)
        self.generators = [one for one in found if isinstance(one, torch.Generator)]
        if isinstance(sampler, torch.utils.data.DistributedSampler):
            self.shared, self.sampler = True, sampler

    def epoch(self, start: int, stop: int, compared: range, samples: int) -> Iterator[Batch]:
        if self.shared:
            self.sampler.set_epoch(start // self.updates)
        passes, new = self._pass(), True
        for update in range(start, stop):
            wanted = 1 if update in compared else samples
            batches = list(islice(passes, wanted))
            # The rest of a pass is not filled up from the next one, which may hold the same examples.
            while len(batches) < wanted and not (new and batches):
                passes, new = self._pass(), True
                batches = list(islice(passes, wanted))
            new = False
            forms = [pytree.form(batch) for batch in batches]
            apart = len(batches) > 1 and any(len(pytree.sizes(batch)) > 1 for batch in batches)  # as graphs are
            if apart or any(one != forms[0] for one in forms):  # as of sequences padded batch by batch: one by one
                batches, passes = batches[:1], chain(batches[1:], passes)
            inputs, targets = zip(*batches, strict=True)
            yield pytree.join(inputs), pytree.join(targets)

    def once(self, limit: int | None = None) -> Generator[Batch, None, None]:
        seen, states = 0, [generator.get_state() for generator in self.generators]
        try:
            with isolated_random():  # looking at the data leaves the run's random numbers as they were
                for batch in islice(self._pass(), self.updates):  # a stream with a length need not have an end
                    yield batch
                    seen += examples(batch)
                    if limit is not None and seen >= limit:
                        return
        finally:
            for generator, state in zip(self.generators, states):
                generator.set_state(state)

    def describe(self, hashes: Hashes) -> dict[str, Any]:
        about: dict[str, Any] = {"batches": self.updates}
        dataset = getattr(self.source, "dataset", None)
        if isinstance(self.source, (list, tuple)):
            return about | {"sha256": fingerprint.tensors(pytree.tensors([self.adapt(item) for item in self.source]))}
        if type(dataset) is torch.utils.data.TensorDataset:
            return about | {"sha256": hashes.tensors(dataset.tensors)}
        return about | {"unchecked": f"the contents of a {type(self.source).__name__}"}

    def _pass(self) -> Iterator[Batch]:
        number = 0
        for item in self.source:
            number += 1
            yield self.adapt(item)
        if not number:
            raise BadInput("the data are empty: the iterable gives no batch (any more)")


def _counted(source: Iterable[Any]) -> int:
    """How many batches there are, where only reading them tells."""
    count, began, said = 0, time.monotonic(), False
    for _ in source:
        count += 1
        if not said and time.monotonic() - began > PATIENCE:
            said = True
            way = "give an object with __len__, how many make an epoch, and __iter__"
            warnings.warn(
                f"{count} batches counted of data without a length, which may have no end: {way}", stacklevel=2
            )
    return count


def examples(batch: Batch) -> int:
    """How many a batch holds: inputs, or where their tensors differ in that, as nodes and edges of a graph, targets."""
    inputs, targets = batch
    return pytree.count(*((inputs, "the inputs") if len(pytree.sizes(inputs)) == 1 else (targets, "the targets")))


def pair(item: Any) -> Batch:
    """What one item of a loader means: its inputs and its targets.

    ``(inputs, targets)``; ``(a, b, .., targets)``, of which all but the last are positional arguments; a dict with
    "labels", of which the rest are keyword arguments. Arrays become tensors.
    """
    if isinstance(item, Mapping):
        if LABELS not in item:
            raise BadType(
                f"a batch that is a dict holds its targets as {LABELS!r}, this one {sorted(map(str, item))}; give "
                "batch=, a function of what the loader gives that returns (inputs, targets)"
            )
        inputs = {key: as_tensors(value) for key, value in item.items()}
        return inputs, inputs.pop(LABELS)
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise BadType(
            f"data gives pairs (inputs, targets), or dicts with {LABELS!r}, not {type(item).__name__}; one pair of "
            "tensors is a tuple (inputs, targets); batch= is a function that makes a pair of what a loader gives"
        )
    *arguments, targets = (as_tensors(part) for part in item)
    return arguments[0] if len(arguments) == 1 else tuple(arguments), targets


def adapter(given: Adapter | None, own_loss: bool) -> Adapter | None:
    """How a call reads batches. own_loss: whether the model computes its loss, of the labels among its inputs."""
    if given is None:
        return _with_labels if own_loss else None
    if not callable(given):
        raise BadType(f"batch is a function that makes (inputs, targets) of what the loader gives, not {given!r}")

    def checked(item: Any) -> Batch:
        parts = given(item)
        if not isinstance(parts, tuple) or len(parts) != 2:
            raise BadType(f"batch gives a tuple (inputs, targets), not {type(parts).__name__}")
        return parts

    return checked


def _with_labels(item: Any) -> Batch:
    if not isinstance(item, Mapping):
        raise BadType(f"loss=None is for batches that are dicts with {LABELS!r}, not {type(item).__name__}; give loss=")
    inputs, targets = pair(item)
    return inputs | {LABELS: targets}, targets


def as_tensors(value: Any) -> Nested:
    """NumPy arrays and tables of pandas as tensors, in tuples, lists and dicts too; float64 of an array as float32."""
    if isinstance(value, (tuple, list)):
        return pytree.like(value, [as_tensors(item) for item in value])
    if isinstance(value, Mapping):
        return {key: as_tensors(item) for key, item in value.items()}
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise BadType(f"arrays hold numbers, not {value.dtype}; encode what is not a number first")
        held = np.ascontiguousarray(value, np.float32 if value.dtype == np.float64 else None)
        return torch.from_numpy(held if held.flags.writeable else held.copy())  # those of pandas may be read-only
    return value


def read(
    data: object,
    batch: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    adapt: Adapter | None = None,
    every: bool = False,
) -> Feed:
    """data: a Dataset (its training part), (inputs, targets) of tensors, arrays or tables, a dict of them with
    "labels", a torch Dataset, or an iterable of batches.

    dtype: what a Dataset's inputs are turned into. adapt: makes inputs and targets of what an iterable gives. every:
    of a torch Dataset also the rest that makes no full batch, which BatchNorm may not take.
    """
    if isinstance(data, Dataset):
        return Tensors(*data.train, batch, seed, data.affine(dtype), prepared=data.prepared)
    if (at_hand := _in_memory(data, adapt)) is not None:
        if adapt is not None and not isinstance(data, Mapping):
            way = "give the loader, or (inputs, targets) without batch="
            raise BadInput(f"batch= is for what a loader gives, and these data are inputs and targets: {way}")
        return Tensors(*at_hand, batch, seed)
    if isinstance(data, torch.utils.data.IterableDataset):
        return Batches(torch.utils.data.DataLoader(data, batch), adapt)
    if isinstance(data, torch.utils.data.Dataset):
        rest = every or len(data) <= batch  # type: ignore[arg-type]
        return Batches(torch.utils.data.DataLoader(data, batch, shuffle=True, drop_last=not rest), adapt)
    return Batches(data, adapt)


def _in_memory(data: Any, adapt: Adapter | None) -> Batch | None:
    """Inputs and targets, of a pair or of a dict that holds both; None of what comes in batches."""
    if isinstance(data, Mapping) and LABELS in data:
        return (adapt or pair)(data)
    if not _is_pair(data):
        return None
    inputs, targets = as_tensors(data)
    if adapt is None:
        return inputs, targets
    try:
        return adapt((inputs, targets))
    except (AttributeError, IndexError, KeyError, ValueError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise BadInput(
            f"batch= is given all data, also (inputs, targets) to validate on, and fails on these: {why}; give a loader"
        ) from error


def _is_pair(data: object) -> bool:
    """Whether it is inputs and targets, and not two batches. Where both are several arrays, batches are alike, one as
    the other; inputs and targets have as many examples, and differ in something."""
    if not isinstance(data, tuple) or len(data) != 2:
        return False
    inputs, targets = (isinstance(part, (Tensor, np.ndarray, Mapping)) or hasattr(part, "to_numpy") for part in data)
    if targets or not _are_arrays(data[1]):
        return targets
    if inputs or not _are_arrays(data[0]):
        return inputs
    forms = [[(one.dtype, one.shape[1:]) for one in part] for part in data]
    return forms[0] != forms[1] and len({one.shape[:1] for part in data for one in part}) == 1


def _are_arrays(part: Any) -> bool:
    return isinstance(part, (tuple, list)) and all(isinstance(one, (Tensor, np.ndarray)) for one in part)


def split_off(data: Any, validation: Any, seed: int, adapt: Adapter | None = None) -> tuple[Any, Any]:
    """The data and the validation; where that is a share such as 0.1, so much of the data, and the data without it."""
    if not isinstance(validation, float):
        return data, validation
    if not 0 < validation < 1:
        raise BadInput(f"validation is data, or a share of the data in (0, 1) to hold out, not {validation!r}")
    if isinstance(data, torch.utils.data.Dataset) and hasattr(data, "__len__"):
        rest = len(data) - _share_of(len(data), validation)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        return torch.utils.data.Subset(data, order[:rest]), torch.utils.data.Subset(data, order[rest:])
    if isinstance(data, Dataset):
        smaller = data.take(*_halves(data.train_labels, validation, seed))
        return smaller, smaller
    at_hand = _in_memory(data, adapt)
    if at_hand is None:
        raise BadInput(f"a share of {validation:g} cannot be held out of data that come in batches; give validation=")
    index = _halves(at_hand[1], validation, seed)
    whole = as_tensors(data)  # what batch= makes of it is made of each part
    kept, held = (pytree.each(lambda t, own=own: t[own], whole) for own in index)  # type: ignore[misc]
    return kept, held


def _share_of(count: int, share: float) -> int:
    return min(max(round(share * count), 1), count - 1)


def _halves(targets: Nested, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of what is kept and of what is held out, in order; each class by its share."""
    count = pytree.count(targets, "the targets")
    if count < 2:
        raise BadInput("one example cannot be shared by training and validation; give validation=")
    wanted = _share_of(count, share)
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        kept, held = held_out(targets.cpu().numpy(), wanted, seed)
        return torch.from_numpy(kept), torch.from_numpy(held)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[wanted:].sort().values, order[:wanted].sort().values


def read_held_out(
    data: object,
    batch: int,
    dtype: torch.dtype = torch.float32,
    beside: Dataset | None = None,
    adapt: Adapter | None = None,
) -> Feed:
    """Data to evaluate on, each example once: as :func:`read`, but the test part of a Dataset. A batch that is larger
    than the data is no mistake here.

    beside: the Dataset that is trained on; its own parts, given as pairs, are read as it says.
    """
    at_hand: Batch | None = data.test if isinstance(data, Dataset) else _in_memory(data, adapt)
    if at_hand is None:
        return read(data, batch, 0, dtype, adapt, every=True)
    known, size = data if isinstance(data, Dataset) else beside, pytree.count(at_hand[1], "the targets")
    return Tensors(*at_hand, max(min(batch, size), 1), 0, affine_of(at_hand[0], known, dtype))


def affine_of(inputs: Nested, data: object, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The gain and shift of a Dataset, where the inputs are those of one of its parts: they are read as it says."""
    if isinstance(data, Dataset) and any(inputs is own for own in (data.train_inputs, data.test_inputs)):
        return data.affine(dtype)
    return None
