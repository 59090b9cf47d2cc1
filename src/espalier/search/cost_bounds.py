"""The most and the least expensive structure of a space, between which every target lies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.space import Space

ENUMERATED = 4096  # combinations of options up to which the extremes are found by trying them all


def most_expensive(space: Space, cost: Cost, device: torch.device) -> Tensor:
    """The mask ``(d)`` float64 with every gate open and, in every choice, the most expensive option.

    Where choices multiply each other no option can be ranked alone. All combinations are tried while they are few;
    beyond, starting from equal shares, each choice in turn is set to its best option until none changes (exact for
    costs linear in the choices, and never below the mean over all combinations).
    """
    mask = torch.ones(space.d, dtype=torch.float64, device=device)
    return mask if space.is_bits else _set_choices(space, cost, mask, sign=1.0)


def cheapest(space: Space, cost: Cost, device: torch.device) -> Tensor:
    """The mask ``(d)`` float64 with only ``least`` gates of each group and the cheapest options.

    Gates are taken one by one, each the one that adds least to what is there: exact where the gates of a group weigh
    the same in every form, as those of a layer do, and for linear costs.
    """
    mask = torch.zeros(space.d, dtype=torch.float64, device=device)
    for choice, where in space.choices:
        mask[where] = 1 / choice.size
    for group, where in space.bits:
        for _ in range(group.least):
            added = torch.where(mask[where] == 0, cost.gradient(mask)[where], torch.inf)
            mask[where.start + added.argmin()] = 1.0
    return mask if space.is_bits else _set_choices(space, cost, mask, sign=-1.0)


def spread(space: Space, slopes: Tensor) -> Tensor:
    """Largest over the variables of what one can change: a bit's slope, a choice's largest minus its smallest.

    slopes: ``(d)``. The paper's ``max(c)`` where the cost is linear in bits.
    """
    changes = [slopes[where].max() for _, where in space.bits]
    changes += [slopes[where].max() - slopes[where].min() for _, where in space.choices]
    return torch.stack(changes).max()


def _set_choices(space: Space, cost: Cost, mask: Tensor, sign: float) -> Tensor:
    """mask with the options set that make ``sign * cost`` largest."""
    choices = space.choices
    combinations = math.prod(group.size for group, _ in choices)
    if combinations <= ENUMERATED and combinations * space.d <= 1 << 24:  # at most 128 MB of them
        listed = torch.cartesian_prod(*[torch.arange(w.start, w.stop) for _, w in choices]).reshape(-1, len(choices))
        masks = mask.repeat(len(listed), 1)
        for _, where in choices:
            masks[:, where] = 0.0
        masks.scatter_(-1, listed.to(mask.device), 1.0)
        return masks[(sign * cost(masks)).argmax()]
    for group, where in choices:
        mask[where] = 1 / group.size
    while True:
        before = mask.clone()
        for _, where in choices:
            best = (sign * cost.gradient(mask)[where]).argmax()
            mask[where] = 0.0
            mask[where.start + best] = 1.0
        if torch.equal(mask, before):
            return mask
