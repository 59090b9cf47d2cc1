"""The connections of a DenseNet as a graph: blocks, paths, depth, dead layers, and random selections of connections."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from espalier.space import BadInput

NEAR = 0.005  # a random selection is within half a point of its share
MOST_DRAWS = 20_000


@dataclass(frozen=True)
class DenseNetGraph:
    """Three blocks of so many layers. A mask holds the connections of block 1, 2 and 3 layer by layer, then those of
    the two transitions and the classifier, which close the blocks; each reads its block's input first, then its layers.

    >>> DenseNetGraph(12).d, DenseNetGraph(12).depth
    (273, 40)
    """

    layers: int

    @property
    def per_block(self) -> int:
        """Connections read inside a block, without those that close it."""
        return self.layers * (self.layers + 1) // 2

    @property
    def d(self) -> int:
        return 3 * (self.per_block + self.layers + 1)

    @property
    def depth(self) -> int:
        """Layers on the longest path of the whole network: stem, blocks, two transitions, classifier."""
        return 4 + 3 * self.layers

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Where the connections of each block are in a mask, those that close it included."""
        places = list[Tensor]()
        for block in range(3):
            inside = torch.arange(self.per_block) + block * self.per_block
            closing = torch.arange(self.layers + 1) + 3 * self.per_block + block * (self.layers + 1)
            places.append(torch.cat([inside, closing]))
        return places

    def readers(self, block: int) -> list[slice]:
        """Where the connections are that each layer of a block reads, and last what closes it."""
        start, found = block * self.per_block, list[slice]()
        for layer in range(self.layers):
            found.append(slice(start, start + layer + 1))
            start += layer + 1
        close = 3 * self.per_block + block * (self.layers + 1)
        return [*found, slice(close, close + self.layers + 1)]

    def chains(self, mask: Tensor) -> list[int | None]:
        """Layers on the longest path through each block under a mask ``(d)``; None: no path leads through it."""
        bits = [bool(bit) for bit in mask.tolist()]
        found = list[int | None]()
        for block in range(3):
            sources: list[int | None] = [0]  # the longest path to each source, the block's input first
            for where in self.readers(block):
                paths = [p for p, bit in zip(sources, bits[where]) if bit and p is not None]
                sources.append(1 + max(paths) if paths else None)
            closing = sources[-1]
            found.append(None if closing is None else closing - 1)
        return found

    def connected(self, mask: Tensor) -> bool:
        """Whether a path leads from the image to the classifier."""
        return None not in self.chains(mask)

    def depth_under(self, mask: Tensor) -> int:
        """Layers on the longest path from the image to the classes; 0 where there is none."""
        chains = self.chains(mask)
        return 0 if None in chains else 4 + sum(chain or 0 for chain in chains)

    def dead_layers(self, mask: Tensor) -> list[int]:
        """Layers that read nothing under a canonical mask ``(d)``, by their depth in the whole network (stem: 1)."""
        dead = list[int]()
        for block in range(3):
            first = 2 + block * (self.layers + 1)
            dead += [first + i for i, where in enumerate(self.readers(block)) if not mask[where].any()]
        return dead

    def draw(self, share: float, weights: Tensor, seed: int) -> tuple[Tensor, dict[str, float]]:
        """Random selection: each connection with probability ``share``, until the weights kept are near that share of
        all and a path leads from image to classes. weights: ``(d)``. Returns the mask ``(d)`` and what was drawn.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(f"{share!r} {seed}".encode()))
        total, pathless, away = weights.sum(), 0, 0
        for draws in range(1, MOST_DRAWS + 1):
            mask = (torch.rand(self.d, generator=generator) < share).to(torch.float32)
            near = bool(((mask.to(weights) * weights).sum() / total - share).abs() <= NEAR)
            path = self.connected(mask)
            pathless, away = pathless + (not path), away + (not near)
            if near and path:
                told = {"draws": draws, "without_path": pathless, "away_from_share": away}
                return mask, told | {"without_path_share": pathless / draws}
        raise BadInput(
            f"none of {MOST_DRAWS:,} random selections of {self.d} connections has {share:.1%} of the weights, within "
            f"{NEAR:.1%}, and a path from image to classes; use another share or a larger network"
        )
