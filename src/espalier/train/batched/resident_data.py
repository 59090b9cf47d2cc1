"""Resident data and who reads which examples: each run its own order, gathered and read on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.data import Dataset, Stream, crop_flip, gather, standardise
from espalier.space import BadInput, BadType

Pair = tuple[Tensor, Tensor]


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
        self.inputs, self.targets = inputs.to(device), targets.to(device)
        self.gain, self.shift = gain.to(device), shift.to(device)
        if pad and inputs.ndim != 4:
            raise BadInput(f"cropping needs images (n, C, H, W), not inputs of shape {tuple(inputs.shape)}; use pad=0")
        self.pad = pad
        self.stream = Stream(seeds, len(inputs), device)

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, updates: int, batch: int) -> Reading:
        """What the next updates read, with a leading dimension for them; moves on."""
        position = self.stream.position
        index = _plain(self.stream.take(updates, batch))
        return Reading(index, self.stream.crops(position, updates, batch, self.pad) if self.pad else None)

    def batch(self, reading: Reading) -> Pair:
        """The inputs ``(R, B, *shape)`` as a network reads them, and the targets ``(R, B, ...)``."""
        x = self.floats(gather(self.inputs, reading.index))
        if reading.crops is not None:
            x = crop_flip(x, *reading.crops, pad=self.pad)
        return x, gather(self.targets, reading.index)

    def floats(self, inputs: Tensor) -> Tensor:
        return standardise(inputs, self.gain, self.shift)


def read_data(data: Dataset | Pair, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets as stored, and the gain and shift by which the network reads the inputs.

    A Dataset knows them. Plain tensors are read as they are: floating ones in ``dtype``, integers in their own.
    """
    if isinstance(data, Dataset):
        return *data.train, *data.affine(dtype)
    inputs, targets = check_pair(data, "data")
    read_as = dtype if inputs.is_floating_point() else inputs.dtype
    return inputs, targets, torch.ones((), dtype=read_as), torch.zeros((), dtype=read_as)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples to evaluate on, on the device as they are stored: inputs ``(n, *shape)``, targets ``(n, ...)``."""

    inputs: Tensor
    targets: Tensor
    gain: Tensor
    shift: Tensor

    def read(self, inputs: Tensor) -> Tensor:
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
    inputs, targets, gain, shift = (part.to(device) for part in parts)
    return HeldOut(inputs, targets, gain, shift)


def check_pair(data: object, name: str) -> Pair:
    if not (isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        raise BadType(
            f"{name} of a sweep are tensors (inputs, targets) or an espalier.data.Dataset, not {type(data).__name__}: "
            "they stay on the device for all runs. For an iterable of batches use espalier.fit"
        )
    inputs, targets = data
    if len(inputs) != len(targets):
        raise BadInput(f"{name}: {len(inputs)} inputs, but {len(targets)} targets")
    if not inputs.numel():
        raise BadInput(f"{name} are empty: inputs of shape {tuple(inputs.shape)}")
    return inputs, targets


def _plain(tensor: Tensor) -> Tensor:
    """A copy with the strides of a new tensor: one run's may be anything, and other strides are compiled anew."""
    return tensor.clone(memory_format=torch.contiguous_format)
