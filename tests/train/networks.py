"""Small networks and data that the training tests share."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from espalier.data.load import digits

Pair = tuple[Tensor, Tensor]


def digit_vectors(count: int | None = None) -> tuple[Pair, Pair]:
    """The digits as vectors of 64 floats: training (the first ``count``) and test."""
    data = digits().flatten().as_floats()
    (x, y), test = data.train, data.test
    return (x[:count], y[:count]), test


def digit_images(count: int | None = None) -> tuple[Pair, Pair]:
    """The digits as images ``(n, 1, 8, 8)``."""
    data = digits().as_floats()
    (x, y), (u, v) = data.train, data.test
    return (x[:count].reshape(-1, 1, 8, 8), y[:count]), (u.reshape(-1, 1, 8, 8), v)


def loader(data: Pair, batch: int, shuffle: bool = True) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*data), batch, shuffle=shuffle, drop_last=True)


def mlp(width: int = 16, hidden: int = 2, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise([64, *[width] * hidden]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def mixed_network(seed: int = 0) -> nn.Sequential:
    """BatchNorm, whose statistics are state, and dropout, which draws from torch's global generator."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(24, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def spoilt(bad: float = 1e200, seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network in float64 and 64 examples for it, of which two spoil the loss of every mask that opens the first unit:
    it reads nothing but the first input, and what reads it overflows. bad: that input of theirs; nan spoils any mask.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[0].weight[:, 0] = torch.tensor([1.0, 0, 0, 0, 0])
        model[0].weight[0, 1:] = 0.0
        model[0].bias[0] = 0.0
        model[2].weight[0, 0] = 1e200
    x = torch.randn(64, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = 0.0
    x[[20, 41], 0] = bad
    return model, x, torch.arange(64) % 3


class Block(nn.Module):
    """A residual block: the channels between its convolutions can be gated, those of the stream only together."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_one = nn.BatchNorm2d(outputs)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm_one(self.one(x)))
        return torch.relu(self.norm_two(self.two(y)) + self.skip(x))


def resnet(width: int = 8, seed: int = 0) -> nn.Sequential:
    """A small ResNet for images of 8 x 8."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Shared(list[Tensor]):
    """A list that copies of a module share with it, as the compact network is a copy."""

    def __deepcopy__(self, memo: dict[int, object]) -> Shared:
        return self


class Watched(nn.Module):
    """Keeps the inputs of every training call."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = mlp(seed=seed)
        self.seen = Shared()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and len(x) > 4:
            self.seen.append(x.detach().clone())
        return self.inner(x)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its place in it, but for the lock, which says who was there last."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
