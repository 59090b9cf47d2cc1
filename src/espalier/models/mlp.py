"""The network of the paper's experiment A: a multilayer perceptron with a gate on each hidden unit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from espalier.gates.gate import Gate
from espalier.models.init import he_normal


class MLP(nn.Module):
    """Linear layers with ReLU; a gate on each hidden unit's output, ``m_i F(X_i)``.

    ``dropout``: after each hidden layer, for the paper's baseline. ``least``: units that a hidden layer keeps at least;
    None: one. The default has d = 2352 gates.

    >>> sum(p.numel() for p in MLP().parameters())
    1854170
    """

    def __init__(
        self,
        inputs: int = 784,
        hidden: Sequence[int] = (784, 784, 784),
        outputs: int = 10,
        dropout: float = 0.0,
        least: int | None = None,
    ) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.gates = nn.ModuleList(Gate(width, -1, least) for width in hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], outputs)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(*, inputs)``, or images of that many pixels ``(N, 1, H, W)``. Returns logits ``(*, outputs)``."""
        if x.ndim == 4:
            x = x.flatten(1)
        for layer, gate in zip(self.layers, self.gates):
            x = self.dropout(gate(torch.relu(layer(x))))
        logits: Tensor = self.head(x)
        return logits
