"""What the networks share: He initialisation, as the paper's experiments use it, and a row of convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn


def convolutions(channels: int, widths: Sequence[int]) -> nn.ModuleList:
    """A block for each width: a 3x3 convolution, BatchNorm and ReLU."""
    return nn.ModuleList(
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise([channels, *widths])
    )


def he_normal(model: nn.Module) -> None:
    """Initialise every linear and convolution layer of a model in place: normal by fan-in, biases zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
