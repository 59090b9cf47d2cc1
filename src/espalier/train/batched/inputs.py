"""What an update of R runs is given: masks, of a search or given ones, and examples, each run in its own order.

While a search compares the losses of masks, all of them read one mini-batch. Slopes are not compared, so that each
mask reads its own part of ``samples`` times as many distinct examples. Masks that are given, and the whole network
before the search begins, read as many under the one mask: the same compute with none of it duplicate.

Data are resident: they stay on the device as they are stored, and are gathered and read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.data import Dataset, Stream, crop_flip, gather
from espalier.search import Search
from espalier.space import BadInput
from espalier.train import feed as feeds
from espalier.train import pytree
from espalier.train.gradients import Sized
from espalier.train.pytree import Nested

Pair = tuple[Nested, Nested]
Crops = tuple[Tensor, Tensor, Tensor]

# ---- masks -----------------------------------------------------------------------------------------------------------


class Source:
    """What the step needs to know of where masks come from. ``noise`` is drawn outside what is compiled.

    generator: the randomness, so that a captured graph can go on with it; None where there is none.
    compares: whether the losses of an update are compared, on one mini-batch that all of its masks read. reads_slopes:
    whether ``learn`` needs slopes; each mask then reads examples of its own. masks_each: whether every example has its
    own mask.
    """

    generator: torch.Generator | None = None
    d: int
    compares = reads_slopes = masks_each = False

    def noise(self, examples: int) -> tuple[Tensor, ...]:
        return ()

    def masks(self, noise: tuple[Tensor, ...]) -> Tensor:
        """``(R, samples, d)``; or ``(R, examples, d)``, one for each example."""
        raise NotImplementedError

    def learn(self, masks: Tensor, losses: Tensor, noise: tuple[Tensor, ...], slopes: Sized | None = None) -> None:
        """losses: ``(R, samples)``; slopes and their sizes: ``(R, samples, d)``, of each mask's own loss. Nothing is
        learned here."""


class Searched(Source):
    """Masks drawn from theta, which learns from their losses, or from the slopes of these by the gates.

    permuted: of each run, whether the losses are shuffled among the masks, or the slopes among all gates, before they
    are told: the control that shows what the search owes to them and what to everything else.
    """

    def __init__(self, search: Search, permuted: Sequence[bool] = ()) -> None:
        self.search, self.any_permuted = search, any(permuted)
        self.permuted = torch.tensor(permuted, dtype=torch.bool, device=search.device)
        self.reads_slopes, self.compares = search.reads_slopes, not search.reads_slopes
        self.d, self.generator = search.space.d, search.generator

    def noise(self, examples: int) -> tuple[Tensor, ...]:
        noise = self.search.noise()
        if not self.any_permuted:
            return (noise,)
        shape = self.search.theta.shape if self.reads_slopes else noise.shape[:-1]
        return noise, torch.rand(shape, device=noise.device, generator=self.generator)

    def masks(self, noise: tuple[Tensor, ...]) -> Tensor:
        return self.search.draw(noise[0])

    def learn(self, masks: Tensor, losses: Tensor, noise: tuple[Tensor, ...], slopes: Sized | None = None) -> None:
        told: list[Tensor | None] = list(slopes or ())
        if self.any_permuted and slopes is not None:
            order = noise[1].argsort(-1).unsqueeze(-2).expand_as(slopes[0])  # one for all masks of an update
            apart = self.permuted.view(-1, 1, 1)
            told = [one if one is None else torch.where(apart, one.gather(-1, order), one) for one in slopes]
        elif self.any_permuted:
            shuffled = losses.gather(-1, noise[1].argsort(-1))
            losses = torch.where(self.permuted.unsqueeze(-1), shuffled, losses)
        self.search.learn(masks, losses, *told)


class Whole(Source):
    """The whole network, before its search begins: see :meth:`espalier.Search.whole`."""

    def __init__(self, search: Search) -> None:
        self.search, self.d = search, search.space.d
        self.generator = None if search.space.is_bits else search.generator

    def noise(self, examples: int) -> tuple[Tensor, ...]:
        return () if self.search.space.is_bits else (self.search.noise(),)

    def masks(self, noise: tuple[Tensor, ...]) -> Tensor:
        return self.search.whole(*noise).unsqueeze(1)


class Given(Source):
    """The same mask at every update, ``(R, d)``; with a rate ``(R)`` above 0 its gates are dropped for each example.

    A gate that stays is scaled by ``1 / (1 - rate)``, so that the whole mask is what predicts: dropout.
    """

    def __init__(self, mask: Tensor, rate: Tensor, seed: int = 0) -> None:
        self.mask, self.rate, self.d = mask, rate, mask.shape[-1]
        self.masks_each = bool((rate > 0).any())
        self.generator = torch.Generator(mask.device).manual_seed(seed) if self.masks_each else None

    def noise(self, examples: int) -> tuple[Tensor, ...]:
        if not self.masks_each:
            return ()
        shape = (self.mask.shape[0], examples, self.mask.shape[1])
        return (torch.rand(shape, device=self.mask.device, generator=self.generator),)

    def masks(self, noise: tuple[Tensor, ...]) -> Tensor:
        if not self.masks_each:
            return self.mask.unsqueeze(1)
        rate = self.rate.view(-1, 1, 1)
        return torch.where(noise[0] >= rate, self.mask.unsqueeze(1) / (1 - rate), 0.0)


# ---- examples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reading:
    """Which examples one update reads: indices ``(R, B)`` int64 and, with augmentation, where they are cropped."""

    index: Tensor
    crops: Crops | None

    def at(self, update: int) -> Reading:
        """One update of a reading of several, whose tensors have a leading dimension for updates."""
        crops = None if self.crops is None else (self.crops[0][update], self.crops[1][update], self.crops[2][update])
        return Reading(self.index[update], crops)


class ResidentFeed:
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
        self.pad, self.stream = pad, Stream(seeds, self.stored.n, device)

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


def read_data(data: Dataset | Pair, dtype: torch.dtype, batch: int = 1) -> feeds.Tensors:
    """The training data. A Dataset knows how its inputs are read. Plain tensors are read as they are: floating ones in
    ``dtype``, integers in their own."""
    (inputs, targets), prepared = (data.train, data.prepared) if isinstance(data, Dataset) else (data, "")
    return feeds.Tensors(inputs, targets, batch, 0, feeds.affine_of(inputs, data, dtype), dtype, prepared)


def held_out(given: Dataset | Pair | None, data: Dataset | Pair, dtype: torch.dtype) -> feeds.Tensors | None:
    """What a sweep over these data is validated on: by default the test part of a Dataset.

    A part of a Dataset is read as that Dataset says, any other pair as it is.
    """
    given = data if given is None and isinstance(data, Dataset) else given
    if given is None:
        return None
    known, (inputs, targets) = (given, given.test) if isinstance(given, Dataset) else (data, given)
    return feeds.Tensors(inputs, targets, 1, 0, feeds.affine_of(inputs, known, dtype), dtype)


def resident(data: Any, adapt: feeds.Adapter | None) -> Dataset | Pair:
    """What ``fit`` takes, as a Dataset or as (inputs, targets) in memory; loaders and torch Datasets are read once.

    adapt: makes inputs and targets of what an iterable gives.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        data = tuple(data)
    if isinstance(data, torch.utils.data.Dataset):
        data = torch.utils.data.DataLoader(data, 256)
    reading = feeds.read(data, 1, 0, adapt=adapt)
    if not isinstance(reading, feeds.Tensors):
        inputs, targets = map(pytree.join, zip(*reading.once(), strict=True))
        reading = feeds.Tensors(inputs, targets, 1, 0)
    return reading.inputs, reading.targets


def _plain(tensor: Tensor) -> Tensor:
    """A copy with the strides of a new tensor: one run's may be anything, and other strides are compiled anew."""
    return tensor.clone(memory_format=torch.contiguous_format)
