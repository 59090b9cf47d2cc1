"""Where the masks of a batch of runs come from: a search, or masks that are given, whole or with gates dropped.

While a search compares the losses of masks, all of them read one mini-batch. Slopes are not compared, so that each
mask reads its own part of ``samples`` times as many distinct examples. Masks that are given, and the whole network
before the search begins, read as many under the one mask: the same compute with none of it duplicate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.search import Search


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

    def learn(self, masks: Tensor, losses: Tensor, noise: tuple[Tensor, ...], slopes: Tensor | None = None) -> None:
        """losses: ``(R, samples)``; slopes: ``(R, samples, d)``, of each mask's own loss. Nothing is learned here."""


class Searched(Source):
    """Masks drawn from theta, which learns from their losses, or from the slopes of these by the gates.

    permuted: ``(R)`` bool; in these runs the losses are shuffled among the masks, or the slopes among all gates, before
    they are told: the control that shows what the search owes to them and what to everything else.
    """

    def __init__(self, search: Search, permuted: Tensor) -> None:
        self.search, self.permuted = search, permuted
        self.reads_slopes, self.compares = search.reads_slopes, not search.reads_slopes
        self.any_permuted = bool(permuted.any())
        self.d, self.generator = search.space.d, search.generator

    def noise(self, examples: int) -> tuple[Tensor, ...]:
        noise = self.search.noise()
        if not self.any_permuted:
            return (noise,)
        shape = self.search.theta.shape if self.reads_slopes else noise.shape[:-1]
        return noise, torch.rand(shape, device=noise.device, generator=self.generator)

    def masks(self, noise: tuple[Tensor, ...]) -> Tensor:
        return self.search.draw(noise[0])

    def learn(self, masks: Tensor, losses: Tensor, noise: tuple[Tensor, ...], slopes: Tensor | None = None) -> None:
        if self.any_permuted and slopes is not None:
            order = noise[1].argsort(-1).unsqueeze(-2).expand_as(slopes)  # one for all masks of an update
            slopes = torch.where(self.permuted.view(-1, 1, 1), slopes.gather(-1, order), slopes)
        elif self.any_permuted:
            shuffled = losses.gather(-1, noise[1].argsort(-1))
            losses = torch.where(self.permuted.unsqueeze(-1), shuffled, losses)
        self.search.learn(masks, losses, slopes)


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
