"""Resident data and who reads which examples: each run its own order, gathered and turned into floats on the device."""

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
        crops = None if self.crops is None else tuple(c.clone() for c in self.crops)
        return Reading(self.index.clone(), crops)  # type: ignore[arg-type]


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
        index = self.stream.take(updates, batch)
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
    """Inputs and targets as stored, and the gain and shift that turn inputs into floats; uint8 is divided by 255."""
    if isinstance(data, Dataset):
        return *data.train, *data.affine(dtype)
    inputs, targets = check_pair(data, "data")
    gain = torch.tensor(1 / 255 if inputs.dtype == torch.uint8 else 1.0, dtype=dtype)
    return inputs, targets, gain, torch.zeros((), dtype=dtype)


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
