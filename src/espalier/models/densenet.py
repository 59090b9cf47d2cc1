"""The network of the paper's experiment B: a DenseNet with a gate on each connection inside a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.gates.gate import Gate
from espalier.models.init import he_normal
from espalier.space import BadInput


class Reader(nn.Module):
    """A layer that reads several sources: BatchNorm, ReLU, a gate on each source, convolution.

    The gate sits after BatchNorm and ReLU, so that a closed connection adds exactly nothing.
    """

    def __init__(self, sizes: Sequence[int], channels: int, kernel: int) -> None:
        super().__init__()
        width = sum(sizes)
        self.norm = nn.BatchNorm2d(width)
        self.gate = Gate(sizes, dim=1)
        self.conv = nn.Conv2d(width, channels, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, sum of sizes, H, W)``. Returns ``(N, channels, H, W)``."""
        out: Tensor = self.conv(self.gate(F.relu(self.norm(x))))
        return out


class DenseNet(nn.Module):
    """DenseNet without bottleneck, compression or dropout: three blocks, two transitions.

    Layer l of a block reads the block's input and each earlier layer; the transition, or after the last block the
    classifier, reads the block's input and all layers. Depth 40 and growth 12 give d = 273 gates.

    >>> sum(p.numel() for p in DenseNet().parameters())
    1019722
    """

    def __init__(self, depth: int = 40, growth: int = 12, classes: int = 10, stem: int = 16, channels: int = 3) -> None:
        super().__init__()
        if depth < 7 or (depth - 4) % 3:
            raise BadInput(f"a DenseNet of three equal blocks has a depth of 4 + 3 n layers, not {depth}")
        count = (depth - 4) // 3
        self.stem = nn.Conv2d(channels, stem, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        width = stem
        for block in range(3):
            sizes = [width, *[growth] * count]
            self.blocks.append(nn.ModuleList(Reader(sizes[: i + 1], growth, 3) for i in range(count)))
            width = sum(sizes)
            if block < 2:
                self.transitions.append(Reader(sizes, width, 1))
        self.pool = nn.AvgPool2d(2)
        self.norm = nn.BatchNorm2d(width)
        self.gate = Gate(sizes, dim=1)
        self.head = nn.Linear(width, classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, channels, H, W)``. Returns logits ``(N, classes)``."""
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                x = torch.cat([x, layer(x)], dim=1)
            if i < len(self.transitions):
                x = self.pool(self.transitions[i](x))
        logits: Tensor = self.head(self.gate(F.relu(self.norm(x))).mean((2, 3)))
        return logits
