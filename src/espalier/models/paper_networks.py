"""The networks of the paper's experiments, with a gate on each hidden unit, and on each connection inside a block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.gates.gate import Gate
from espalier.space import BadInput


def he_normal(model: nn.Module) -> None:
    """Initialise every linear and convolution layer of a model in place: normal by fan-in, biases zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class MLP(nn.Module):
    """Experiment A: linear layers with ReLU; a gate on each hidden unit's output, ``m_i F(X_i)``.

    ``dropout``: after each hidden layer, for the paper's baseline. ``least``: units that a hidden layer keeps at least;
    None: one. The default has d = 2352 gates.

    >>> sum(p.numel() for p in MLP().parameters())
    1854170
    """

    def __init__(
        self,
        inputs: int = 784,
        hidden: Sequence[int] = (784, 784, 784),
        outputs: int = 10,
        dropout: float = 0.0,
        least: int | None = None,
    ) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.gates = nn.ModuleList(Gate(width, -1, least) for width in hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], outputs)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(*, inputs)``, or images of that many pixels ``(N, 1, H, W)``. Returns logits ``(*, outputs)``."""
        if x.ndim == 4:
            x = x.flatten(1)
        for layer, gate in zip(self.layers, self.gates):
            x = self.dropout(gate(torch.relu(layer(x))))
        logits: Tensor = self.head(x)
        return logits


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
    """Experiment B: DenseNet without bottleneck, compression or dropout: three blocks, two transitions.

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
