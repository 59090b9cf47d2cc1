"""The networks of the paper's experiments, with a gate on each hidden unit, and on each connection inside a block; and
a small CNN, VGG-16 and ResNet for small images, of any widths, whose gates are found."""

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


# ---- convolutional networks whose gates are found --------------------------------------------------------------------


STAGES = (2, 2, 3, 3, 3)  # of VGG: convolutions before each max-pool
WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)  # of VGG-16
STREAMS = (16, 32, 64)  # of ResNet: the channels of each stage


class CNN(nn.Module):
    """3x3 convolutions, each with BatchNorm and ReLU; before each but the first the image is halved, while it has at
    least four pixels a side; then the mean over the image and one linear layer. Its channels' gates are found, none are
    placed by hand.

    >>> sum(p.numel() for p in CNN(channels=1, widths=(16, 32)).parameters())
    5178
    """

    def __init__(self, channels: int = 3, widths: Sequence[int] = (32, 64, 128), outputs: int = 10) -> None:
        super().__init__()
        if not widths:
            raise BadInput("a CNN has at least one width, the channels of its first block; got none")
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise([channels, *widths])
        )
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(widths[-1], outputs)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, channels, H, W)``. Returns logits ``(N, outputs)``."""
        for i, block in enumerate(self.blocks):
            if i and min(x.shape[2:]) >= 4:
                x = self.pool(x)
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class VGG(CNN):
    """Thirteen 3x3 convolutions, each with BatchNorm and ReLU; each of five stages ends in a max-pool, as long as there
    are two pixels a side; then the mean over what is left of the image and one linear layer.

    widths: the channels of each convolution. The default is VGG-16, where d = 4224 gates are found.

    >>> sum(p.numel() for p in VGG().parameters())
    14724042
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, outputs: int = 10, channels: int = 3) -> None:
        if len(widths) != sum(STAGES):
            raise BadInput(f"this VGG has {sum(STAGES)} convolutions, so as many widths, not {len(widths)}")
        super().__init__(channels, widths, outputs)

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels of each convolution as it is now: those to build a compact network from scratch with."""
        return tuple(block[0].out_channels for block in self.blocks)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, channels, H, W)``. Returns logits ``(N, outputs)``."""
        blocks = iter(self.blocks)
        for count in STAGES:
            for block in itertools.islice(blocks, count):
                x = block(x)
            if min(x.shape[2:]) >= 2:
                x = self.pool(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


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
        """The channels of each stage as it is now: those to build a compact network from scratch with."""
        count = len(self.blocks) // 3
        return tuple(self.blocks[count * stage].conv2.out_channels for stage in range(3))  # type: ignore[union-attr, misc]

    @property
    def inner(self) -> tuple[int, ...]:
        """The channels inside each block as it is now."""
        return tuple(block.conv1.out_channels for block in self.blocks)  # type: ignore[union-attr, misc]

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(N, channels, H, W)``. Returns logits ``(N, outputs)``."""
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
