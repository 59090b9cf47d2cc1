"""A generator of random networks: graphs of convolutions, of linear layers, and of attention over tokens.

With residuals, products, concatenations, chunks, shuffles, depthwise and grouped convolutions, squeeze-excite, strided
slices, heads, rotations, and layers that nothing reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolutional import SqueezeExcite, shuffle
from .entry import Entry, Inputs

ACTIVATIONS = (F.relu, F.gelu, torch.sigmoid, torch.tanh, F.silu, F.leaky_relu, F.softplus)
WIDTHS = (4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Step:
    """One value of the graph: a function of earlier values, given by their places."""

    label: str
    function: Callable[..., Tensor] | int  # or the place of its layer
    reads: tuple[int, ...]


class Graph(nn.Module):
    """Runs its steps in order; value 0 is the input. Printing it shows the graph."""

    def __init__(self, steps: list[Step], layers: nn.ModuleList, ends: tuple[int, ...], head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = layers, head
        self.steps, self.ends = steps, ends

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            function = self.layers[step.function] if isinstance(step.function, int) else step.function
            values.append(function(*(values[i] for i in step.reads)))
        return self.head(torch.cat([values[i].flatten(1) for i in self.ends], 1))

    def extra_repr(self) -> str:
        lines = [f"{i + 1} = {step.label}{step.reads}" for i, step in enumerate(self.steps)]
        return "\n".join([*lines, f"head{self.ends}"])


class SelfAttention(nn.Module):
    """Heads by reshape, keys and values perhaps shared by several of them; the layout of the projections varies."""

    def __init__(self, width: int, heads: int, shared: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, heads // shared, 4
        sizes = [heads * self.size, self.groups * self.size, self.groups * self.size]
        self.fused = nn.Linear(width, sum(sizes)) if fused and shared == 1 else None
        self.split = nn.ModuleList(nn.Linear(width, size) for size in sizes) if self.fused is None else None
        self.out = nn.Linear(sizes[0], width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).chunk(3, -1) if self.fused is not None else (layer(x) for layer in self.split)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.groups)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Pairs the first half of the features with the second, as rotary embeddings do."""
    first, second = x.chunk(2, -1)
    return 0.8 * x + 0.6 * torch.cat([-second, first], -1)


class Builder:
    """Draws steps; `widths[i]` is the number of channels of value i, which lie along `axis`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.spatial, self.tokens = seed % 4 in (1, 2), seed % 4 == 3
        self.axis = -1 if self.tokens else 1
        self.size = 4
        self.layers = nn.ModuleList()
        self.steps: list[Step] = []
        self.widths = [self.random.choice((2, 3, 5))]

    def add(self, label: str, function: Callable[..., Tensor] | nn.Module, reads: tuple[int, ...], width: int) -> int:
        if isinstance(function, nn.Module):  # kept by its place, so that copies of the graph use their own layers
            self.layers.append(function)
            function = len(self.layers) - 1
        self.steps.append(Step(label, function, reads))
        self.widths.append(width)
        return len(self.steps)

    def pick(self) -> int:
        """A value to read: recent ones more often, the raw input seldom."""
        last = len(self.widths) - 1
        return last if self.random.random() < 0.6 else self.random.randint(min(1, last), last)

    def project(self, source: int, width: int, groups: int = 1) -> int:
        before, bias = self.widths[source], self.random.random() < 0.5
        if not self.spatial:
            return self.add("linear", nn.Linear(before, width, bias=bias), (source,), width)
        kernel = self.random.choice((1, 3))
        layer = nn.Conv2d(before, width, kernel, padding=kernel // 2, groups=groups, bias=bias)
        return self.add(f"conv{kernel}/{groups}", layer, (source,), width)

    def matched(self) -> tuple[int, int]:
        """Two values of one width, the second projected when there is none."""
        left = self.pick()
        same = [i for i in range(1, len(self.widths)) if self.widths[i] == self.widths[left] and i != left]
        right = self.random.choice(same) if same and self.random.random() < 0.7 else None
        return left, right if right is not None else self.project(self.pick(), self.widths[left])

    # Every kind of step; each returns nothing and may give up when its values do not fit.
    def layer(self) -> None:
        self.project(self.pick(), self.random.choice(WIDTHS))

    def grouped(self) -> None:
        source = self.pick()
        groups = self.random.choice((2, 3, 4))
        if self.spatial and self.widths[source] % groups == 0:
            self.project(source, groups * self.random.choice((1, 2, 3)), groups)

    def depthwise(self) -> None:
        source = self.pick()
        width, times = self.widths[source], self.random.choice((1, 1, 2))
        if self.spatial:
            layer = nn.Conv2d(width, width * times, 3, padding=1, groups=width, bias=self.random.random() < 0.5)
            self.add(f"depthwise x{times}", layer, (source,), width * times)

    def norm(self) -> None:
        source = self.pick()
        width = self.widths[source]
        kind: Callable[[int], nn.Module] = nn.BatchNorm2d if self.spatial else nn.BatchNorm1d
        if self.tokens or (not self.spatial and self.random.random() < 0.3):
            kind = nn.LayerNorm
        self.add(kind.__name__, kind(width), (source,), width)

    def activation(self) -> None:
        source = self.pick()
        function = self.random.choice(ACTIVATIONS)
        self.add(function.__name__, function, (source,), self.widths[source])

    def residual(self) -> None:
        left, right = self.matched()
        self.add("add", torch.add, (left, right), self.widths[left])

    def product(self) -> None:
        left, right = self.matched()
        self.add("mul", lambda a, b: a * torch.sigmoid(b), (left, right), self.widths[left])

    def concatenation(self) -> None:
        reads = tuple(self.pick() for _ in range(self.random.choice((2, 2, 3))))
        self.add("cat", lambda *xs: torch.cat(xs, self.axis), reads, sum(self.widths[i] for i in reads))

    def chunk(self) -> None:
        source = self.pick()
        width = self.widths[source]
        if width % 2:
            return
        kind = self.random.choice(("glu", "sum", "swap", "both"))
        if kind == "glu":
            self.add("glu", lambda x: F.glu(x, self.axis), (source,), width // 2)
        elif kind == "sum":
            self.add("chunk sum", lambda x: sum(x.chunk(2, self.axis)), (source,), width // 2)
        elif kind == "swap":
            self.add("swap halves", lambda x: torch.cat(x.chunk(2, self.axis)[::-1], self.axis), (source,), width)
        else:
            self.add("first half", lambda x: x.chunk(2, self.axis)[0], (source,), width // 2)
            self.add("second half", lambda x: x.chunk(2, self.axis)[1], (source,), width // 2)

    def shuffle(self) -> None:
        source = self.pick()
        groups = self.random.choice((2, 3, 4))
        if self.spatial and self.widths[source] % groups == 0:
            self.add(f"shuffle {groups}", lambda x: shuffle(x, groups), (source,), self.widths[source])

    def part(self) -> None:
        source = self.pick()
        width = self.widths[source]
        if width >= 4:
            places = list(range(width - 1)) if self.random.random() < 0.5 else list(range(0, width, 2))
            start, stop, step = places[0], places[-1] + 1, places[1] - places[0]
            where = (..., slice(start, stop, step)) if self.tokens else (slice(None), slice(start, stop, step))
            self.add(f"slice {step}", lambda x: x[where], (source,), len(places))

    def squeeze(self) -> None:
        source = self.pick()
        if self.spatial:
            self.add("squeeze-excite", SqueezeExcite(self.widths[source], 4), (source,), self.widths[source])

    def pool(self) -> None:
        source = self.pick()
        if self.spatial:
            kind = self.random.choice((nn.AvgPool2d, nn.MaxPool2d))
            self.add(kind.__name__, kind(3, 1, 1), (source,), self.widths[source])

    def attention(self) -> None:
        source = self.pick()
        width, heads = self.widths[source], self.random.choice((2, 4))
        if self.tokens:
            layer = SelfAttention(width, heads, self.random.choice((1, 1, 2)), self.random.random() < 0.5)
            self.add("attention", layer, (source,), width)

    def rotation(self) -> None:
        source = self.pick()
        if self.tokens and self.widths[source] % 2 == 0:
            self.add("rotate", rotate, (source,), self.widths[source])

    def build(self) -> Graph:
        kinds = [self.layer] * 5 + [self.norm] * 3 + [self.activation] * 3 + [self.residual] * 3
        kinds += [
            self.product,
            self.concatenation,
            self.concatenation,
            self.chunk,
            self.chunk,
            self.shuffle,
            self.shuffle,
        ]
        kinds += [self.grouped, self.grouped, self.grouped, self.depthwise, self.part, self.squeeze, self.pool]
        kinds += [self.attention] * 4 + [self.rotation]
        self.layer()
        wanted = self.random.randint(5, 14)
        while len(self.steps) < wanted:
            self.random.choice(kinds)()
        count = self.random.choice((1, 1, 2))
        ends = tuple(range(len(self.widths) - count, len(self.widths)))
        length = self.size**2 if self.spatial else self.size if self.tokens else 1
        if length > 1 and self.random.random() < 0.6:  # else every position is read by itself
            positions = (2, 3) if self.spatial else (1,)
            ends = tuple(self.add("mean", lambda x: x.mean(positions), (i,), self.widths[i]) for i in ends)
            length = 1
        width = sum(self.widths[i] for i in ends) * length
        head: nn.Module = nn.Linear(width, 5)
        if self.random.random() < 0.5:
            head = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 5))
        return Graph(self.steps, self.layers, ends, head)


def random_graph(seed: int) -> Entry:
    """The graph of a seed: of every four one linear, one of attention over tokens, the others convolutional."""

    def inputs(batch: int) -> Callable[[], Inputs]:
        builder = Builder(seed)
        shape: tuple[int, ...] = (batch, builder.widths[0])
        if builder.spatial:
            shape += (builder.size, builder.size)
        elif builder.tokens:
            shape = (batch, builder.size, builder.widths[0])
        return lambda: torch.randn(shape, dtype=torch.float64)

    return Entry(f"random graph {seed}", "cnn", lambda: Builder(seed).build(), inputs(5), (inputs(3),))
