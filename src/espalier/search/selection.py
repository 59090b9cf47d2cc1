"""The most and the least expensive structure, between which every target lies; and the mask that ships: the most
probable one, or the best by theta that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search.distribution import Distribution
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


# ---- what ships ------------------------------------------------------------------------------------------------------


def repaired(distribution: Distribution, theta: Tensor) -> Tensor:
    """The mode ``(*B, d)`` float32, with the likeliest gates opened in groups emptier than ``least``."""
    return torch.maximum(distribution.mode(theta), least_open(distribution.space, theta))


def least_open(space: Space, theta: Tensor) -> Tensor:
    """``(*B, d)`` float32: the ``least`` likeliest gates of each group, and nothing else."""
    mask = torch.zeros(theta.shape, dtype=torch.float32, device=theta.device)
    for group, where in space.bits:
        if group.least:
            likeliest = theta[..., where].argsort(dim=-1, descending=True, stable=True)[..., : group.least]
            mask[..., where] = mask[..., where].scatter(-1, likeliest, 1.0)
    return mask


Limits = Sequence[tuple[Cost, Tensor]]  # costs, and what each may be at most, ``(*B)``


def within(distribution: Distribution, bounds: Limits, theta: Tensor, full: Tensor, smallest: Tensor) -> Tensor:
    """The best mask by theta whose cost is at most its budget, ``(*B, d)`` float32; of several costs, each of them.

    Options first: a choice leaves its likeliest option for a cheaper one only as far as the budget demands, the least
    unlikely changes first, weighed against closing gates by the same ratio of probabilities. Then gates, in order of
    theta, until no further one fits. theta: ``(*B, d)``, bounds: costs, the first of which ranks options and gates,
    full and smallest: ``(d)``, the most and the least expensive structures; the budgets allow at least the latter.
    """
    flat = theta.reshape(-1, theta.shape[-1])
    bounds = [(cost, most.reshape(-1)) for cost, most in bounds]
    price = bounds[0][0].gradient(full)
    options = _affordable_options(distribution, bounds, flat, price)
    base = torch.maximum(options, least_open(distribution.space, flat)).to(torch.float64)
    base = torch.where(_fits(bounds, base).unsqueeze(-1), base, smallest)
    return _top_up(distribution.space, bounds, flat, price, base).to(torch.float32).reshape(theta.shape)


def _fits(bounds: Limits, masks: Tensor) -> Tensor:
    """masks: ``(R, d)``. Whether no cost of them is above its budget, ``(R)``."""
    return torch.stack([cost(masks) <= most for cost, most in bounds]).all(0)


def _affordable_options(distribution: Distribution, bounds: Limits, theta: Tensor, price: Tensor) -> Tensor:
    """``(R, d)`` float32: one option in every choice, no gates."""
    space = distribution.space
    taken = torch.zeros(theta.shape, dtype=torch.float32, device=theta.device)
    if space.is_bits:
        return taken
    # log of the ratio by which an option is less likely than the likeliest of its choice
    loss = torch.zeros_like(theta)
    for _, where in space.choices:
        loss[:, where] = (theta[:, where].amax(-1, keepdim=True) / theta[:, where]).log()
    odds = (theta / (1 - theta)).log()
    least = least_open(space, theta)

    def structure(threshold: Tensor) -> Tensor:  # threshold: (R, 1); what a change may cost in likelihood
        mask = torch.maximum((odds >= threshold).to(torch.float32), least)
        for _, where in space.choices:
            allowed = loss[:, where] <= threshold
            # the cheapest of those allowed, the likeliest among equally cheap ones
            rank = torch.where(allowed, price[where], torch.inf)
            best = rank == rank.amin(-1, keepdim=True)
            option = torch.where(best, theta[:, where], -1.0).argmax(-1, keepdim=True)
            mask[:, where] = torch.zeros_like(mask[:, where]).scatter(-1, option, 1.0)
        return mask

    listed = torch.cat([loss[:, where] for _, where in space.choices], -1).sort(-1).values
    low = torch.zeros(len(theta), 1, dtype=torch.int64, device=theta.device)
    high = torch.full_like(low, listed.shape[-1] - 1)
    while bool((low < high).any()):
        middle = (low + high) // 2
        fits = _fits(bounds, structure(listed.gather(-1, middle))).unsqueeze(-1)
        low, high = torch.where(fits, low, middle + 1), torch.where(fits, middle, high)
    chosen = structure(listed.gather(-1, low.clamp(max=listed.shape[-1] - 1)))
    for _, where in space.choices:
        taken[:, where] = chosen[:, where]
    return taken


def _top_up(space: Space, bounds: Limits, theta: Tensor, price: Tensor, mask: Tensor) -> Tensor:
    """Open gates by descending theta (among equals the cheaper, then the earlier one) until none fits any more.

    To open a gate never makes a structure cheaper, so one that does not fit now never will: each round opens the
    longest run of the candidates that fits, by bisection, and drops the one after it.
    """
    by_price = price.argsort(stable=True)
    order = by_price[theta[:, by_price].argsort(dim=-1, descending=True, stable=True)]  # (R, d)
    open_to = torch.zeros(space.d, dtype=torch.bool, device=theta.device)
    for _, where in space.bits:
        open_to[where] = True
    candidates = (mask == 0) & open_to
    while True:
        candidates &= mask == 0
        for cost, most in bounds:
            candidates &= cost.gradient(mask) <= (most - cost(mask)).unsqueeze(-1)
        if not bool(candidates.any()):
            return mask
        place = torch.empty_like(order).scatter_(-1, order, candidates.gather(-1, order).cumsum(-1))  # 1, 2, ..
        place.masked_fill_(~candidates, space.d + 1)
        low = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
        high = candidates.sum(-1)
        while bool((low < high).any()):
            middle = (low + high + 1) // 2
            fits = _fits(bounds, _opened(mask, place, middle))
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
        mask = _opened(mask, place, low)
        candidates &= place != (low + 1).unsqueeze(-1)


def _opened(mask: Tensor, place: Tensor, count: Tensor) -> Tensor:
    """mask ``(R, d)`` with the gates at places 1 to count ``(R)`` open."""
    return torch.where(place <= count.unsqueeze(-1), 1.0, mask)
