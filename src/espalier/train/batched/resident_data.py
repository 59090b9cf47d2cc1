"""Resident data and who reads which examples: each run its own order, gathered and read on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.data import Dataset, Stream, crop_flip, gather
from espalier.data import standardise as scaled
from espalier.space import BadInput
from espalier.train import feed as feeds
from espalier.train import pytree
from espalier.train.pytree import Nested

Pair = tuple[Nested, Nested]
Crops = tuple[Tensor, Tensor, Tensor]
CHUNK = 500  # examples at once where one network after the other reads them


@dataclass(frozen=True, eq=False)
class Reading:
    """Which examples one update reads: indices ``(R, B)`` int64 and, with augmentation, where they are cropped."""

    index: Tensor
    crops: Crops | None

    def at(self, update: int) -> Reading:
        """One update of a reading of several, whose tensors have a leading dimension for updates."""
        crops = None if self.crops is None else (self.crops[0][update], self.crops[1][update], self.crops[2][update])
        return Reading(self.index[update], crops)


@dataclass(frozen=True, eq=False)
class Stored:
    """Examples as they are stored (uint8 stays uint8): inputs ``(n, *shape)``, targets ``(n, ...)``; and the gain and
    shift by which a network reads the inputs."""

    inputs: Nested
    targets: Nested
    gain: Tensor
    shift: Tensor

    def __len__(self) -> int:
        return pytree.count(self.inputs, "the inputs")

    def to(self, device: torch.device) -> Stored:
        return Stored(*pytree.each(lambda part: part.to(device), (self.inputs, self.targets, self.gain, self.shift)))

    def read(self, inputs: Nested) -> Nested:
        """Some of the inputs as a network reads them; of several inputs, floats in the dtype of ``gain``, others as
        they are."""
        if isinstance(inputs, Tensor):
            return scaled(inputs, self.gain.to(inputs.device), self.shift.to(inputs.device))
        return pytree.each(lambda part: part.to(self.gain.dtype) if part.is_floating_point() else part, inputs)

    def once(self, limit: int | None = None, device: torch.device | None = None) -> Iterator[Pair]:
        """The examples as a network reads them, some at a time; at most ``limit`` of them."""
        end = len(self) if limit is None else min(limit, len(self))
        for start in range(0, end, CHUNK):
            here = slice(start, min(start + CHUNK, end))
            x, y = pytree.each(lambda part, here=here: part[here].to(device), (self.inputs, self.targets))  # type: ignore[misc]
            yield self.read(x), y


class Feed:
    """Examples on the device, and the stream of each run through them.

    pad: images are padded by so much, cropped back and mirrored at random; 0 leaves them as they are.
    """

    def __init__(
        self,
        data: Dataset | Pair,
        seeds: list[int],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        pad: int = 0,
    ) -> None:
        self.stored = read_data(data, dtype).to(device)
        inputs = self.stored.inputs
        if pad and (not isinstance(inputs, Tensor) or inputs.ndim != 4):
            shapes = [tuple(part.shape) for part in pytree.tensors(inputs)]
            raise BadInput(f"cropping needs images (n, C, H, W), not inputs of shape {shapes[0]}; use pad=0")
        self.pad, self.count = pad, len(self.stored)
        self.stream = Stream(seeds, self.count, device)

    def __len__(self) -> int:
        return self.count

    def take(self, updates: int, batch: int) -> Reading:
        """What the next updates read, with a leading dimension for them; moves on."""
        position = self.stream.position
        index = _plain(self.stream.take(updates, batch))
        if not self.pad:
            return Reading(index, None)
        rows, columns, flips = self.stream.crops(position, updates, batch, self.pad)
        return Reading(index, (_plain(rows), _plain(columns), _plain(flips)))

    def batch(self, reading: Reading) -> Pair:
        """The inputs ``(R, B, *shape)`` as a network reads them, and the targets ``(R, B, ...)``."""
        x = self.stored.read(pytree.each(lambda part: gather(part, reading.index), self.stored.inputs))
        if reading.crops is not None:
            x = crop_flip(x, *reading.crops, pad=self.pad)
        return x, pytree.each(lambda part: gather(part, reading.index), self.stored.targets)


def read_data(data: Dataset | Pair, dtype: torch.dtype) -> Stored:
    """The training data. A Dataset knows how its inputs are read. Plain tensors are read as they are: floating ones in
    ``dtype``, integers in their own."""
    if isinstance(data, Dataset):
        return Stored(*data.train, *data.affine(dtype))
    inputs, targets = check_pair(data, "data")
    whole = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    read_as = inputs.dtype if whole else dtype
    return Stored(inputs, targets, torch.ones((), dtype=read_as), torch.zeros((), dtype=read_as))


def held_out(given: Dataset | Pair | None, data: Dataset | Pair, dtype: torch.dtype) -> Stored | None:
    """What a sweep over these data is validated on: by default the test part of a Dataset.

    A part of a Dataset is read as that Dataset says, any other pair as it is.
    """
    if given is None and isinstance(data, Dataset):
        given = data
    if given is None:
        return None
    if isinstance(given, Dataset):
        return Stored(*given.test, *given.affine(dtype))
    if isinstance(data, Dataset) and any(given[0] is own for own in (data.train_inputs, data.test_inputs)):
        return Stored(*check_pair(given, "validation"), *data.affine(dtype))
    return read_data(check_pair(given, "validation"), dtype)


def resident(data: Any, name: str, adapt: feeds.Adapter | None) -> Dataset | Pair:
    """What ``fit`` takes, as a Dataset or as (inputs, targets) in memory; loaders and torch Datasets are read once.

    adapt: makes inputs and targets of what an iterable gives.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        data = tuple(data)
    if isinstance(data, torch.utils.data.Dataset):
        data = torch.utils.data.DataLoader(data, 256)
    found = feeds.read(data, 1, 0, adapt=adapt)
    if isinstance(found, feeds.Tensors):
        return check_pair((found.inputs, found.targets), name)
    inputs, targets = zip(*found.once(), strict=True)
    return check_pair((pytree.join(inputs), pytree.join(targets)), name)


def check_pair(data: Any, name: str) -> Pair:
    inputs, targets = data
    counts = [pytree.count(part, f"{name}: {what}") for part, what in ((inputs, "inputs"), (targets, "targets"))]
    if counts[0] != counts[1]:
        raise BadInput(f"{name}: {counts[0]} inputs, but {counts[1]} targets")
    if not all(part.numel() for part in pytree.tensors(inputs)):
        shapes = [tuple(part.shape) for part in pytree.tensors(inputs)]
        raise BadInput(f"{name} are empty: inputs of shape {shapes[0]}")
    return inputs, targets


def _plain(tensor: Tensor) -> Tensor:
    """A copy with the strides of a new tensor: one run's may be anything, and other strides are compiled anew."""
    return tensor.clone(memory_format=torch.contiguous_format)
