"""The step size of theta adapted to its signal-to-noise ratio: ASNG (Akimoto et al., ICML 2019), for each run.

The step is normalised in the Fisher metric to length ``delta / Delta``. ``s`` accumulates normalised steps; were they
pure noise its squared length would be ``gamma``, so Delta grows (steps shrink) until the signal shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALPHA = 1.5  # the signal-to-noise ratio that is held


@dataclass
class Adaptation:
    """path: ``(*B, d)``; gamma, shrink: ``(*B)``; all float64, changed in place."""

    path: Tensor  # s
    gamma: Tensor
    shrink: Tensor  # Delta

    @classmethod
    def start(cls, theta: Tensor) -> Adaptation:
        gamma = torch.zeros(theta.shape[:-1], dtype=torch.float64, device=theta.device)
        return cls(torch.zeros_like(theta), gamma, torch.ones_like(gamma))

    def length(self, delta: Tensor) -> Tensor:
        """The Fisher length of the next step ``(*B)``."""
        return delta / self.shrink

    def learn(self, white: Tensor, norm: Tensor, length: Tensor, freedom: int) -> None:
        """white: ``(*B, d)`` whitened utility part, norm: its length ``(*B)``, 0 where the update is skipped."""
        moves = norm > 0
        beta = torch.where(moves, (length / freedom**0.5).clamp(max=1.0), 0.0)  # 0 leaves everything as it is
        unit = white / torch.where(moves, norm, 1.0).unsqueeze(-1)
        self.path.mul_((1 - beta).unsqueeze(-1)).add_((beta * (2 - beta)).sqrt().unsqueeze(-1) * unit)
        self.gamma.mul_((1 - beta) ** 2).add_(beta * (2 - beta))
        self.shrink.mul_((beta * (self.gamma - self.path.square().sum(-1) / ALPHA)).exp())
