"""A small convolutional network for small images: convolution, BatchNorm and ReLU, one block for each width."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from espalier.models.init import convolutions, he_normal
from espalier.space import BadInput


class CNN(nn.Module):
    """3x3 convolutions; before each but the first the image is halved, while it has at least four pixels a side; then
    the mean over the image and one linear layer. Its channels' gates are found, none are placed by hand.

    >>> sum(p.numel() for p in CNN(channels=1, widths=(16, 32)).parameters())
    5178
    """

    def __init__(self, channels: int = 3, widths: Sequence[int] = (32, 64, 128), outputs: int = 10) -> None:
        super().__init__()
        if not widths:
            raise BadInput("a CNN has at least one width, the channels of its first block; got none")
        self.blocks = convolutions(channels, widths)
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
