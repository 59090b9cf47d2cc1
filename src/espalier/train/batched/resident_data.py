"""Resident data and who reads which examples: each run its own order, gathered and read on the device."""

from __future__ import annotations

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


@dataclass(frozen=True, eq=False)
class Reading:
    """Which examples one update reads: indices ``(R, B)`` int64 and, with augmentation, where they are cropped."""

    index: Tensor
    crops: tuple[Tensor, Tensor, Tensor] | None

    def at(self, update: int) -> Reading:
        """One update of a reading of several, whose tensors have a leading dimension for updates."""
        crops = None if self.crops is None else (self.crops[0][update], self.crops[1][update], self.crops[2][update])
        return Reading(self.index[update], crops)

    def copy_(self, other: Reading) -> None:
        """Overwrite in place: what a captured graph reads has to stay where it is."""
        self.index.copy_(other.index)
        if self.crops is not None and other.crops is not None:
            for mine, theirs in zip(self.crops, other.crops):
                mine.copy_(theirs)

    def clone(self) -> Reading:
        crops = None if self.crops is None else tuple(_plain(c) for c in self.crops)
        return Reading(_plain(self.index), crops)  # type: ignore[arg-type]


class Feed:
    """Examples on the device, as stored (uint8 stays uint8), and the stream of each run through them.

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
        inputs, targets, gain, shift = read_data(data, dtype)
        self.inputs, self.targets = pytree.each(lambda part: part.to(device), (inputs, targets))
        self.gain, self.shift = gain.to(device), shift.to(device)
        if pad and (not isinstance(inputs, Tensor) or inputs.ndim != 4):
            shapes = [tuple(part.shape) for part in pytree.tensors(inputs)]
            raise BadInput(f"cropping needs images (n, C, H, W), not inputs of shape {shapes[0]}; use pad=0")
        self.pad, self.count = pad, pytree.count(inputs, "the inputs")
        self.stream = Stream(seeds, self.count, device)

    def __len__(self) -> int:
        return self.count

    def take(self, updates: int, batch: int) -> Reading:
        """What the next updates read, with a leading dimension for them; moves on."""
        position = self.stream.position
        index = _plain(self.stream.take(updates, batch))
        return Reading(index, self.stream.crops(position, updates, batch, self.pad) if self.pad else None)

    def batch(self, reading: Reading) -> Pair:
        """The inputs ``(R, B, *shape)`` as a network reads them, and the targets ``(R, B, ...)``."""
        x = self.floats(pytree.each(lambda part: gather(part, reading.index), self.inputs))
        if reading.crops is not None:
            x = crop_flip(x, *reading.crops, pad=self.pad)
        return x, pytree.each(lambda part: gather(part, reading.index), self.targets)

    def floats(self, inputs: Nested) -> Nested:
        return standardise(inputs, self.gain, self.shift)


def standardise(inputs: Nested, gain: Tensor, shift: Tensor) -> Nested:
    """What a network reads of stored inputs; of several inputs, floats in the dtype of ``gain``, others as they are."""
    if isinstance(inputs, Tensor):
        return scaled(inputs, gain, shift)
    return pytree.each(lambda part: part.to(gain.dtype) if part.is_floating_point() else part, inputs)


def read_data(data: Dataset | Pair, dtype: torch.dtype) -> tuple[Nested, Nested, Tensor, Tensor]:
    """Inputs and targets as stored, and the gain and shift by which the network reads the inputs.

    A Dataset knows them. Plain tensors are read as they are: floating ones in ``dtype``, integers in their own.
    """
    if isinstance(data, Dataset):
        return *data.train, *data.affine(dtype)
    inputs, targets = check_pair(data, "data")
    whole = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    read_as = inputs.dtype if whole else dtype
    return inputs, targets, torch.ones((), dtype=read_as), torch.zeros((), dtype=read_as)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples to evaluate on, on the device as they are stored: inputs ``(n, *shape)``, targets ``(n, ...)``."""

    inputs: Nested
    targets: Nested
    gain: Tensor
    shift: Tensor

    def __len__(self) -> int:
        return pytree.count(self.inputs, "the inputs")

    def read(self, inputs: Nested) -> Nested:
        """Some of the inputs as a network reads them."""
        return standardise(inputs, self.gain, self.shift)


def held_out(
    given: Dataset | Pair | None, data: Dataset | Pair, dtype: torch.dtype, device: torch.device
) -> HeldOut | None:
    """What a sweep over these data is validated on: by default the test part of a Dataset.

    A part of a Dataset is read as that Dataset says, any other pair as it is.
    """
    if given is None and isinstance(data, Dataset):
        given = data
    if given is None:
        return None
    if isinstance(given, Dataset):
        parts = (*given.test, *given.affine(dtype))
    else:
        parts = read_data(check_pair(given, "validation"), dtype)
        if isinstance(data, Dataset) and any(given[0] is own for own in (data.train_inputs, data.test_inputs)):
            parts = (*parts[:2], *data.affine(dtype))
    return HeldOut(*pytree.each(lambda part: part.to(device), parts))


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
