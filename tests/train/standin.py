"""A hand-written gated MLP with the interface of an attached model, small enough to be checked by eye."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

import espalier


class GatedMLP:
    """widths: input, hidden .., output; a gate on each hidden unit's output."""

    def __init__(self, widths: list[int], dtype: torch.dtype = torch.float32) -> None:
        self.widths = widths
        layers = [nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)]
        self.model = nn.ModuleList(layers)
        self.space = espalier.Space([espalier.Bits(f"fc{i}", w, least=1) for i, w in enumerate(widths[1:-1])])
        self.d = self.space.d

    def call(self, tensors: dict[str, Tensor], mask: Tensor, x: Tensor) -> Tensor:
        start = 0
        for i, width in enumerate(self.widths[1:]):
            x = nn.functional.linear(x, tensors[f"{i}.weight"], tensors[f"{i}.bias"])
            if i < len(self.widths) - 2:
                x = torch.relu(x) * mask[start : start + width]
                start += width
        return x
