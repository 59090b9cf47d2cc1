"""VGG-16 with BatchNorm for images of 32 x 32: convolutions in five stages, one linear layer, any widths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from espalier.models.init import convolutions, he_normal
from espalier.space import BadInput

STAGES = (2, 2, 3, 3, 3)  # convolutions before each max-pool
WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


class VGG(nn.Module):
    """Thirteen 3x3 convolutions, each with BatchNorm and ReLU; each of five stages ends in a max-pool, as long as there
    are two pixels a side; then the mean over what is left of the image and one linear layer.

    widths: the channels of each convolution. The default is VGG-16, where d = 4224 gates are found.

    >>> sum(p.numel() for p in VGG().parameters())
    14724042
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, outputs: int = 10, channels: int = 3) -> None:
        super().__init__()
        if len(widths) != sum(STAGES):
            raise BadInput(f"this VGG has {sum(STAGES)} convolutions, so as many widths, not {len(widths)}")
        self.blocks = convolutions(channels, widths)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(widths[-1], outputs)
        he_normal(self)

    @property
    def widths(self) -> tuple[int, ...]:
        """As the network is now: of a compact one, those with which it can be built from scratch."""
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
