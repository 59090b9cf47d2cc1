"""The networks of ``evidence.py`` by name: built of any widths, counted, and made narrower alike in all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from espalier.models import VGG, ResNet
from espalier.models.architectures import STREAMS, WIDTHS, he_normal

KINDS = ("weights", "macs", "parameters")
DEPTHS = {"resnet8": 8, "resnet20": 20, "resnet56": 56}
NAMES = ("vgg16", *DEPTHS, "densenet40")
BLOCK = 12  # layers of a block of DenseNet-40, and channels that each of them adds


class DenseNet(nn.Module):
    """DenseNet-40 of plain layers, without bottleneck, compression or dropout, of any widths: those of the first
    convolution, of the layers of a block, of its transition, and so on; the last block has no transition."""

    def __init__(self, widths: Sequence[int], classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norms, self.convs, reads = nn.ModuleList(), nn.ModuleList(), widths[0]
        for place, width in enumerate(widths[1:], 1):
            transition = self.is_transition(place)
            self.norms.append(nn.BatchNorm2d(reads))
            size = 1 if transition else 3
            self.convs.append(nn.Conv2d(reads, width, size, padding=size // 2, bias=False))
            reads = width if transition else reads + width
        self.norm, self.head = nn.BatchNorm2d(reads), nn.Linear(reads, classes)
        he_normal(self)

    @staticmethod
    def is_transition(place: int) -> bool:
        return place % (BLOCK + 1) == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for place, (norm, conv) in enumerate(zip(self.norms, self.convs), 1):
            y = conv(F.relu(norm(x)))
            x = F.avg_pool2d(y, 2) if self.is_transition(place) else torch.cat([x, y], 1)
        out: torch.Tensor = self.head(F.relu(self.norm(x)).mean((2, 3)))
        return out


def whole_widths(name: str, narrow: int = 1) -> list[int]:
    """Of the whole network, each divided by ``narrow``: VGG's layers; a ResNet's three streams, then its blocks; for
    DenseNet's see there."""
    if name == "vgg16":
        widths: list[int] = list(WIDTHS)
    elif name == "densenet40":
        first, grown = 16, BLOCK * BLOCK
        block = [BLOCK] * BLOCK
        widths = [first, *block, first + grown, *block, first + 2 * grown, *block]
    else:
        widths = [*STREAMS, *(width for width in STREAMS for _ in range((DEPTHS[name] - 2) // 6))]
    return [max(1, width // narrow) for width in widths]


def build(name: str, widths: Sequence[int], channels: int = 3) -> nn.Module:
    if name in DEPTHS:
        return ResNet(DEPTHS[name], widths[:3], widths[3:], channels=channels)
    return (VGG if name == "vgg16" else DenseNet)(widths, channels=channels)


def layers_of(model: Any) -> list[nn.Conv2d]:
    """For each width the layer that has so many outputs; of a stream, one of those that share it."""
    if isinstance(model, VGG):
        return [block[0] for block in model.blocks]
    if isinstance(model, DenseNet):
        return [model.stem, *model.convs]
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
Number = int | tuple[int, ...]  # a number, FIRST + i for the i-th width, or several of these that are added


@functools.cache
def anatomy(name: str, shape: tuple[int, ...]) -> tuple[list[tuple[Number, int, int, int]], list[Number]]:
    """The layers of a network, and its vectors of parameters, with ``FIRST + i`` for the i-th of its widths."""
    whole = whole_widths(name)
    if name == "densenet40":  # its layers read several
        return anatomy_of_densenet(len(whole), shape)
    with torch.device("meta"):
        model = build(name, range(FIRST, FIRST + len(whole)), shape[0])
        return list(seen_layers(model, shape)), [p.numel() for p in model.parameters() if p.ndim == 1]


def anatomy_of_densenet(widths: int, shape: Sequence[int]) -> tuple[list[tuple[Number, int, int, int]], list[Number]]:
    places, classes = shape[1] * shape[2], 10
    reads: tuple[int, ...] = (FIRST,)
    layers: list[tuple[Number, int, int, int]] = [(shape[0], FIRST, 9, places)]
    vectors: list[Number] = []
    for place in range(1, widths):
        transition = DenseNet.is_transition(place)
        layers.append((reads, FIRST + place, 1 if transition else 9, places))
        vectors += [reads, reads]
        reads = (FIRST + place,) if transition else (*reads, FIRST + place)
        places //= 4 if transition else 1
    return [*layers, (reads, classes, 1, 1)], [*vectors, reads, reads, classes]


def count_widths(name: str, widths: Sequence[int], shape: Sequence[int]) -> dict[str, int]:
    """:func:`count` of a network that need not exist."""
    layers, vectors = anatomy(name, tuple(shape))

    def value(number: Number) -> int:
        if isinstance(number, tuple):
            return sum(map(value, number))
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
