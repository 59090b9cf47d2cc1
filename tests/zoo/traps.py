"""What cannot be cut exactly, each in a small network of its own: to be frozen or refused by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configured import configured, pixels
from .convolutional import images, rows
from .entry import Entry


class ChannelSoftmax(nn.Module):
    """Every channel's value depends on all the others: removing one is not setting it to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.read = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.mix(x).softmax(1)).mean((2, 3))


class NormedStream(nn.Module):
    """A residual stream under LayerNorm; only the hidden units of the branch can go."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(20, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(self.last(x))


class HandNormed(nn.Module):
    """A root-mean-square norm written out: no module's type gives it away."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(20, 16), nn.Linear(16, 5)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale)


class Maxout(nn.Module):
    """A literal reshape: the pieces of 4 are counted in Python, and a removed unit would shift them all. No zeros can
    stand in, since no module writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.hidden, self.head = nn.Linear(20, 32), nn.Linear(8, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.wide.weight, self.wide.bias).view(-1, 8, 4).amax(-1)
        return self.head(F.relu(self.hidden(x)))


class ThroughPython(nn.Module):
    """A value leaves the graph as a Python number and comes back as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 16), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        scale = 1.0 / (1.0 + h.detach().abs().max().item())
        return self.head(torch.relu(self.second(h * scale)))


class ThroughNumpy(nn.Module):
    """A value leaves the graph as an array, is worked on there, and comes back as a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 16), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = torch.from_numpy(h.detach().numpy()[:, ::-1].copy())
        return self.head(torch.relu(self.second(h)))


class UntakenBranch(nn.Module):
    """`rare` reads the hidden units as well, but only for large inputs: the example never goes there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 16), nn.Linear(16, 24), nn.Linear(24, 5)
        self.rare = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        layer = self.rare if x.shape[0] > 100 else self.second
        return self.head(torch.relu(layer(h)))


class Scaled(nn.Module):
    """A layer with a scale of its own per unit, which it applies to large batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(16, 20)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight)
        return h * self.scale if x.shape[0] > 100 else h


class HalfRead(nn.Module):
    """Cutting the units of `odd` would leave behind its scale, which the example never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.second, self.head = Scaled(), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.odd(x)))))


class Unreached(nn.Module):
    """A whole auxiliary head that the forward pass of the example does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(20, 32), nn.Linear(32, 5)
        self.spare = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class ChannelMean(nn.Module):
    """A mean over the channels divides by their number, which the cut would change."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.read = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.mix(x))
        return self.read(h - h.mean(1, keepdim=True)).mean((2, 3))


class Sorted(nn.Module):
    """Sorting over the hidden units: which unit is which depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).sort(-1).values)


CONVNEXT2 = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "num_labels": 5}


def trap(name: str, make, example) -> Entry:
    return Entry(name, "cnn", make, example)


# Architecture, and the parts that must not be gated (names as the user knows them).
TRAPS: list[tuple[Entry, tuple[str, ...]]] = [
    (trap("softmax over channels", ChannelSoftmax, images(3, 6)), ("mix",)),
    (trap("residual channels under LayerNorm", NormedStream, rows(4)), ("stem",)),
    (trap("RMS norm by hand", HandNormed, rows(4)), ("stem",)),
    (trap("Maxout by a literal reshape", Maxout, rows(4)), ("wide",)),
    (trap("value taken out to Python", ThroughPython, rows(4)), ("first",)),
    (trap("value taken out to NumPy", ThroughNumpy, rows(4)), ("first",)),
    (trap("branch the example does not take", UntakenBranch, rows(4)), ("rare",)),
    (trap("layer the example reads in part", HalfRead, rows(4)), ("odd",)),
    (trap("layer the example never reaches", Unreached, rows(4)), ("spare",)),
    (trap("mean over channels", ChannelMean, images(3, 6)), ("mix",)),
    (trap("sort over units", Sorted, rows(4)), ("first",)),
    (
        trap(
            "ConvNeXtV2, global response norm",
            configured("ConvNextV2ForImageClassification", "ConvNextV2Config", **CONVNEXT2),
            pixels(2, 32),
        ),
        ("pwconv1", "dwconv"),
    ),
]
