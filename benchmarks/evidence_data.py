"""Images for ``evidence.py``: a known set or synthetic ones, resident as bytes, cropped and flipped where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.data import Dataset, Stream, from_arrays, held_out, load, standardise

NAMES = ("cifar10", "fashion-mnist", "fashion-mnist-14", "digits")  # -14: of 14 x 14 pixels
SPLIT_SEED = 17  # of the held-out part and of the part that is kept of shrunk data


def synthetic(examples: int, side: int = 16, classes: int = 10) -> Dataset:
    """Coloured patterns, one for each class, under noise: to be learnt in a few updates, not perfectly."""
    rng = np.random.default_rng(0)
    patterns = np.kron(rng.normal(0, 1, (classes, 3, side // 4, side // 4)), np.ones((4, 4)))

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % classes
        pixels = 128 + 30 * patterns[labels] + 40 * rng.normal(0, 1, (count, 3, side, side))
        return pixels.clip(0, 255).astype(np.uint8), labels

    return from_arrays(part(examples), part(max(examples // 2, 100)), name="synthetic", scale=1 / 255).standardised()


def read(data_dir: str, held: int, examples: int | None, name: str = "cifar10") -> Dataset:
    """The set of a folder, or "synthetic". held: so many training images take the place of the test set."""
    if data_dir == "synthetic":
        data = synthetic(examples or 2000)
    else:
        data = load(name.removesuffix("-14"), Path(data_dir), download=False)
    if name.endswith("-14"):
        halves = [
            F.avg_pool2d(part.float(), 2).round().to(torch.uint8) for part in (data.train_inputs, data.test_inputs)
        ]
        data = replace(data, train_inputs=halves[0], test_inputs=halves[1])
    if held:
        data = data.hold_out(held, SPLIT_SEED)
    if examples is not None and examples < len(data.train_labels):
        few = held_out(data.train_labels.numpy(), examples, SPLIT_SEED)[1]
        tested = min(examples, len(data.test_labels))
        shrunk = data.take(few, few)
        data = Dataset(
            data.name, *shrunk.train, data.test_inputs[:tested], data.test_labels[:tested],
            data.classes, data.scale, data.mean, data.std,
        )  # fmt: skip
    return data


class Images:
    """The training part, padded once with its mean colour by an eighth of its side, and the evaluated part, as bytes on
    a device. Digits are not mirrored."""

    def __init__(self, data: Dataset, device: torch.device) -> None:
        self.shape, self.device, self.name = data.shape, device, data.name
        self.n = len(data.train_labels)
        self.labels, self.test_labels = data.train_labels.to(device), data.test_labels.to(device)
        self.gain, self.shift = (part.to(device) for part in data.affine())
        height, width = self.shape[1:]
        self.pad, self.mirrored = height // 8, not data.name.startswith("digits")
        colour = (-self.shift / self.gain).round().clamp(0, 255).to(torch.uint8).expand(self.shape[0], 1, 1)
        padded = colour.expand(self.n, self.shape[0], height + 2 * self.pad, width + 2 * self.pad).clone()
        padded[..., self.pad : self.pad + height, self.pad : self.pad + width] = data.train_inputs.to(device)
        self.stride, self.padded = width + 2 * self.pad, padded.flatten(2)
        self.test = data.test_inputs.to(device)
        self.rows, self.columns = torch.arange(height, device=device), torch.arange(width, device=device)

    def windows(self, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``(B, C, H, W)`` and labels ``(B)`` of the examples ``index (B)``, each cut out at its corner."""
        columns = torch.where(flip[:, None] & self.mirrored, self.columns.flip(0), self.columns) + left[:, None]
        pixel = (self.rows + top[:, None])[:, :, None] * self.stride + columns[:, None, :]
        images = self.padded[index]
        cut = images.gather(2, pixel.flatten(1)[:, None].expand(-1, self.shape[0], -1))
        return self._floats(cut.reshape(-1, *self.shape)), self.labels[index]

    def evaluated(self, size: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
        """The evaluated part, once, as it is."""
        for start in range(0, len(self.test_labels), size):
            yield self._floats(self.test[start : start + size]), self.test_labels[start : start + size]

    def _floats(self, stored: Tensor) -> Tensor:
        images = standardise(stored, self.gain, self.shift)
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images


class Loader:
    """Batches without end in the order of a seed, an epoch at a time; every pass goes on where the last one stood.

    batch: examples in a batch. updates: its length, the updates of an epoch. passes: batches in a pass.
    ``read``: the examples that were given out.
    """

    def __init__(self, images: Images, batch: int, updates: int, passes: int, seed: int) -> None:
        self.images, self.batch, self.updates, self.passes = images, batch, updates, passes
        self.stream = Stream(seed, images.n, images.device)
        self.ahead: Iterator[tuple[Tensor, ...]] = iter(())
        self.read = 0

    def __len__(self) -> int:
        return self.updates

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.passes):
            yield self.next()

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: images ``(batch, C, H, W)``, labels ``(batch)``."""
        drawn = next(self.ahead, None)
        if drawn is None:  # what is to be read and where it is cut, for a whole pass at once
            position = self.stream.position
            index = self.stream.take(self.passes, self.batch)
            self.ahead = zip(index, *self.stream.crops(position, self.passes, self.batch, self.images.pad))
            drawn = next(self.ahead)
        self.read += self.batch
        return self.images.windows(*drawn)
