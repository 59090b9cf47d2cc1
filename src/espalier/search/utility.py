"""The ranking-based utility of the sampled masks: only the order of their losses counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ranked(losses: Tensor) -> tuple[Tensor, Tensor]:
    """losses: ``(*B, samples)``. Returns utilities ``(*B, samples)`` float64 and whether any loss is finite ``(*B)``.

    +1 for the best ``ceil(samples / 4)``, -1 for as many of the worst, 0 between. Equal losses share the mean of the
    utilities they span, and losses that are not finite tie as worst; so the utilities always add up to 0.

    >>> ranked(torch.tensor([0.3, 0.1, 0.2]))[0].tolist()
    [-1.0, 1.0, 0.0]
    >>> ranked(torch.tensor([0.1, 0.1, float("nan"), float("inf")]))[0].tolist()
    [0.5, 0.5, -0.5, -0.5]
    """
    samples = losses.shape[-1]
    counted = math.ceil(samples / 4)

    def total(ranks: Tensor) -> Tensor:  # of the utilities of the best so many
        return ranks.clamp(max=counted) - (ranks - (samples - counted)).clamp(min=0)

    finite = losses.isfinite()
    key = torch.where(finite, losses, torch.inf)
    better = (key.unsqueeze(-2) < key.unsqueeze(-1)).sum(-1)  # (*B, samples): how many beat this one,
    equal = (key.unsqueeze(-2) == key.unsqueeze(-1)).sum(-1)  # and how many share its rank, itself included
    return (total(better + equal) - total(better)).to(torch.float64) / equal, finite.any(-1)
