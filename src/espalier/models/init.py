"""He initialisation, as the paper's experiments use it."""

from __future__ import annotations

from torch import nn


def he_normal(model: nn.Module) -> None:
    """Initialise every linear and convolution layer of a model in place: normal by fan-in, biases zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
