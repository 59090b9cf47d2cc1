"""The networks of ``evidence.py`` by name: built of any widths, counted, and made narrower alike in all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from espalier.models import VGG, ResNet
from espalier.models.convolutional import STREAMS, WIDTHS

KINDS = ("weights", "macs", "parameters")
DEPTHS = {"resnet20": 20, "resnet56": 56}
NAMES = ("vgg16", *DEPTHS)


def whole_widths(name: str, narrow: int = 1) -> list[int]:
    """Of the whole network, each divided by ``narrow``: VGG's layers; a ResNet's three streams, then its blocks."""
    if name == "vgg16":
        widths: list[int] = list(WIDTHS)
    else:
        widths = [*STREAMS, *(width for width in STREAMS for _ in range((DEPTHS[name] - 2) // 6))]
    return [max(1, width // narrow) for width in widths]


def build(name: str, widths: Sequence[int]) -> nn.Module:
    return VGG(widths) if name == "vgg16" else ResNet(DEPTHS[name], widths[:3], widths[3:])


def layers_of(model: Any) -> list[nn.Conv2d]:
    """For each width the layer that has so many outputs; of a stream, one of those that share it."""
    if isinstance(model, VGG):
        return [block[0] for block in model.blocks]
    count = len(model.blocks) // 3
    return [*(model.blocks[count * stage].conv2 for stage in range(3)), *(block.conv1 for block in model.blocks)]


def widths_of(model: nn.Module) -> list[int]:
    """With which :func:`build` makes a network of the same shapes, also of one that was cut."""
    return [layer.out_channels for layer in layers_of(model)]


def seen_layers(model: nn.Module, shape: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Of each convolution and linear layer that one input of this shape passes: channels read, channels written, taps
    of its kernel, places it is applied at."""
    seen: list[tuple[int, int, int, int]] = []

    def see(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        weight = layer.weight
        places = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else output[..., 0].numel()
        seen.append((weight.shape[1], weight.shape[0], weight[0, 0].numel(), places))

    hooks = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    training, device = model.training, next(model.parameters()).device
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape, device=device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return seen


def count(model: nn.Module, shape: Sequence[int]) -> dict[str, int]:
    """Weights of convolutions and linear layers, their MACs for one input of this shape, and all parameters."""
    layers = seen_layers(model, shape)
    return {
        "weights": sum(reads * writes * taps for reads, writes, taps, _ in layers),
        "macs": sum(reads * writes * taps * places for reads, writes, taps, places in layers),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


FIRST = 100_003  # stands for the first width where a network is looked at for what its layers read and write


@functools.cache
def anatomy(name: str, shape: tuple[int, ...]) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """The layers of a network, and its vectors of parameters, with ``FIRST + i`` for the i-th of its widths."""
    with torch.device("meta"):
        model = build(name, range(FIRST, FIRST + len(whole_widths(name))))
        return seen_layers(model, shape), [p.numel() for p in model.parameters() if p.ndim == 1]


def count_widths(name: str, widths: Sequence[int], shape: Sequence[int]) -> dict[str, int]:
    """:func:`count` of a network that need not exist."""
    layers, vectors = anatomy(name, tuple(shape))

    def value(number: int) -> int:
        return widths[number - FIRST] if number >= FIRST else number

    weights = [value(reads) * value(writes) * taps for reads, writes, taps, _ in layers]
    return {
        "weights": sum(weights),
        "macs": sum(weight * layer[3] for weight, layer in zip(weights, layers)),
        "parameters": sum(weights) + sum(map(value, vectors)),
    }


def uniform(whole: Sequence[int], budget: float, cost: Callable[[Sequence[int]], float]) -> list[int]:
    """All widths scaled by one factor and rounded, the largest at a cost within the budget; then one unit more for
    layer after layer, the thinnest share first, until none fits."""

    def scaled(factor: float) -> list[int]:
        return [max(1, round(factor * width)) for width in whole]

    low, high = 0.0, 1.0
    if cost(scaled(low)) > budget:
        raise ValueError(f"one unit in each layer costs {cost(scaled(low)):g}, more than the budget of {budget:g}")
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(scaled(middle)) <= budget else (low, middle)
    widths = scaled(low)
    growing = list(range(len(whole)))
    while growing:
        growing.sort(key=lambda i: widths[i] / whole[i])
        for i in list(growing):
            larger = [*widths[:i], widths[i] + 1, *widths[i + 1 :]]
            if widths[i] < whole[i] and cost(larger) <= budget:
                widths = larger
            else:  # costs only grow: what does not fit now never will
                growing.remove(i)
    return widths
