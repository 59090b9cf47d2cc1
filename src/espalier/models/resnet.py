"""ResNet for images of 32 x 32, of depth 6 n + 2: three stages of n basic blocks, any widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from espalier.models.init import he_normal
from espalier.space import BadInput

STREAMS = (16, 32, 64)


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to their input; a stride goes with a 1x1 convolution and BatchNorm
    around them."""

    def __init__(self, entering: int, inner: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, inner, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, leaving, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(leaving)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.Conv2d(entering, leaving, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, entering, H, W)``. Returns ``(N, leaving, H / stride, W / stride)``."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A convolution, three stages of basic blocks, of which the second and third halve the image, its mean, one linear
    layer. Depth 20 has d = 448 gates, depth 56 has 1120.

    streams: the channels of the residual stream in each stage; the first convolution has those of the first stage.
    inner: the channels inside each block, in order; those of its stage's stream unless given.

    >>> sum(p.numel() for p in ResNet(20).parameters()), sum(p.numel() for p in ResNet(56).parameters())
    (272474, 855770)
    """

    def __init__(
        self,
        depth: int = 20,
        streams: Sequence[int] = STREAMS,
        inner: Sequence[int] | None = None,
        outputs: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise BadInput(f"a ResNet of three stages of basic blocks has a depth of 6 n + 2 layers, not {depth}")
        count = (depth - 2) // 6
        if len(streams) != 3:
            raise BadInput(f"three stages have three streams, not {len(streams)}")
        inside = [width for width in streams for _ in range(count)] if inner is None else list(inner)
        if len(inside) != 3 * count:
            raise BadInput(f"at depth {depth} there are {3 * count} blocks, so as many inner widths, not {len(inside)}")
        self.stem = nn.Conv2d(channels, streams[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(streams[0])
        self.blocks = nn.ModuleList()
        entering = streams[0]
        for i, width in enumerate(inside):
            stage = i // count
            halving = stage > 0 and i % count == 0
            self.blocks.append(Block(entering, width, streams[stage], 2 if halving else 1))
            entering = streams[stage]
        self.head = nn.Linear(entering, outputs)
        he_normal(self)

    @property
    def streams(self) -> tuple[int, ...]:
        """As the network is now: of a compact one, those with which it can be built from scratch."""
        count = len(self.blocks) // 3
        return tuple(self.blocks[count * stage].conv2.out_channels for stage in range(3))  # type: ignore[union-attr, misc]

    @property
    def inner(self) -> tuple[int, ...]:
        """As the network is now, one for each block."""
        return tuple(block.conv1.out_channels for block in self.blocks)  # type: ignore[union-attr, misc]

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, channels, H, W)``. Returns logits ``(N, outputs)``."""
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
