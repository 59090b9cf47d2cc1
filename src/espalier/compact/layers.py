"""The few plain layers a compact model may hold beside torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Select(nn.Module):
    """Some indices of one dimension, in order."""

    index: Tensor

    def __init__(self, index: Sequence[int], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("index", torch.tensor(list(index), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(self.dim, self.index)

    def extra_repr(self) -> str:
        return f"{len(self.index)} indices, dim={self.dim}"


class Fill(Select):
    """The input's slices put at their places in a wider dimension, zeros elsewhere.

    index: for each place of the wider dimension where it comes from; the input's length stands for zero.
    """

    def forward(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = 1
        return super().forward(torch.cat([x, x.new_zeros(shape)], self.dim))


class Zeros(nn.Module):
    """Zeros of a given width, or with no channels at all, in place of a layer whose output nothing reads.

    ``dim`` -1: the last dimension gets the width (a linear layer). ``dim`` 1: channels; ``reach`` then gives the
    output's extent, see :func:`reached`.
    """

    def __init__(self, width: int, dim: int = -1, reach: Sequence[Sequence[int]] = (), lookup: bool = False) -> None:
        super().__init__()
        self.width, self.dim, self.lookup = width, dim, lookup
        self.reach = tuple(tuple(r) for r in reach)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.lookup:  # an embedding: one dimension more, of floating-point numbers
            return torch.zeros(*x.shape, self.width, device=x.device)
        return x.new_zeros(reached(x, self.width, self.dim, self.reach))

    def extra_repr(self) -> str:
        return f"width={self.width}, dim={self.dim}"


class Bias(nn.Module):
    """What a linear layer or a convolution that reads nothing gives: its bias at every place."""

    def __init__(
        self, bias: nn.Parameter | None, width: int, dim: int = -1, reach: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__()
        self.width, self.dim = width, dim
        self.reach = tuple(tuple(r) for r in reach)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        shape = reached(x, self.width, self.dim, self.reach)
        if self.bias is None:
            return x.new_zeros(shape)
        return self.bias.reshape(-1, *(1,) * len(self.reach)).expand(shape)

    def extra_repr(self) -> str:
        return f"width={self.width}, dim={self.dim}"


def reached(x: Tensor, width: int, dim: int, reach: Sequence[Sequence[int]]) -> list[int]:
    """The shape that a layer of this width gives for an input. ``reach``, per spatial dimension: kernel, stride,
    padding, dilation, and for a transposed convolution its output padding."""
    shape = list(x.shape)
    shape[dim] = width
    for axis, (kernel, stride, padding, dilation, *more) in enumerate(reach):
        place = len(shape) - len(reach) + axis
        if more:
            shape[place] = (shape[place] - 1) * stride - 2 * padding + dilation * (kernel - 1) + more[0] + 1
        else:
            shape[place] = (shape[place] + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return shape
