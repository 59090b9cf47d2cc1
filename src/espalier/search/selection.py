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

Limits = Sequence[tuple[Cost, Tensor]]  # costs, and what each may be at most, ``(*B)``

ENUMERATED = 4096  # combinations of options up to which the extremes are found by trying them all
LARGEST = 1 << 22  # entries of masks that are looked at together
NEVER = 1e-300  # the least probability that is told from others
ROUNDS = 16  # in which several costs are weighed against each other


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


def combinations(space: Space, mask: Tensor) -> Tensor | None:
    """mask ``(d)`` with every combination of options, ``(combinations, d)``; None where these are too many."""
    choices = space.choices
    count = math.prod(group.size for group, _ in choices)
    if count > ENUMERATED or count * space.d > 1 << 24:  # at most 128 MB of them
        return None
    masks = mask.repeat(count, 1)
    if choices:
        listed = torch.cartesian_prod(*[torch.arange(w.start, w.stop) for _, w in choices]).reshape(-1, len(choices))
        for _, where in choices:
            masks[:, where] = 0.0
        masks.scatter_(-1, listed.to(mask.device), 1.0)
    return masks


def _set_choices(space: Space, cost: Cost, mask: Tensor, sign: float) -> Tensor:
    """mask with the options set that make ``sign * cost`` largest."""
    choices, masks = space.choices, combinations(space, mask)
    if masks is not None:
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


# ---- exchanges -------------------------------------------------------------------------------------------------------


def _exchanges(bounds: Limits, mask: Tensor, parts: Sequence[slice]) -> tuple[Tensor, Tensor, Tensor]:
    """Every open entry of these parts of mask ``(d)`` with every closed one of its part, for which it may be exchanged:
    the entries ``(E)``, those that come in ``(E)``, and each cost over its budget after the exchange ``(n, E)``.

    A cost is linear in the entries of a choice, and in any one gate. So its slopes under the mask without an entry
    give it exactly for whatever takes the place of that entry.
    """
    out, into, after = [], [], []
    for where in parts:
        is_open = mask[where] > 0
        opened, closed = (which.nonzero().squeeze(-1) + where.start for which in (is_open, ~is_open))
        for some in opened.split(max(LARGEST // len(mask), 1)):
            without = mask.repeat(len(some), 1).scatter(-1, some.unsqueeze(-1), 0.0)
            costs = [(one(without).unsqueeze(-1) + one.gradient(without)[:, closed]) / most for one, most in bounds]
            after.append(torch.stack(costs).flatten(1))
            out.append(some.repeat_interleave(len(closed)))
            into.append(closed.repeat(len(some)))
    return torch.cat(out), torch.cat(into), torch.cat(after, -1)


def _exchanged(mask: Tensor, out: Tensor, into: Tensor) -> Tensor:
    return mask.scatter(-1, torch.stack([out, into]), mask.new_tensor([0.0, 1.0]))


def _fullest(bounds: Limits, mask: Tensor) -> Tensor:
    """The largest of the costs, each over its budget."""
    return torch.stack([cost(mask) / most for cost, most in bounds]).max()


def _brought_down(bounds: Limits, mask: Tensor, parts: Sequence[slice], score: Tensor | None) -> Tensor:
    """mask ``(d)`` after exchanges that lower what is fullest, until every cost fits its budget or none is left. Each
    time the one is made that loses least of score ``(d)``; without a score, the one that lowers most."""
    while parts and not bool(_fits(bounds, mask)):
        out, into, after = _exchanges(bounds, mask, parts)
        worst = after.amax(0)
        lower = worst < _fullest(bounds, mask) * (1 - 1e-12)
        if not bool(lower.any()):
            break
        loss = torch.where(lower, worst if score is None else score[out] - score[into], torch.inf)
        best = torch.where(loss == loss.min(), worst, torch.inf).argmin()
        mask = _exchanged(mask, out[best], into[best])
    return mask


def _put_back(bounds: Limits, mask: Tensor, parts: Sequence[slice], score: Tensor) -> Tensor:
    """mask ``(d)`` after exchanges that gain score ``(d)`` and fit the budgets, the largest gain first."""
    if not parts or not bool(_fits(bounds, mask)):
        return mask
    while True:
        out, into, after = _exchanges(bounds, mask, parts)
        gain = score[into] - score[out]
        gain = torch.where((gain > 0) & (after.amax(0) <= 1 + 1e-9), gain, 0.0)
        while bool(gain.any()):
            best = gain.argmax()
            changed = _exchanged(mask, out[best], into[best])
            if bool(_fits(bounds, changed)):  # what was above it was rounding
                mask = changed
                break
            gain[best] = 0.0
        else:
            return mask


def fitting(space: Space, bounds: Limits) -> Tensor:
    """A mask ``(d)`` float64 that fits these budgets, of one run; where none is found, one that is not far above them.

    The cheapest structure by all costs together, where the fuller ones weigh more each time; then options and gates are
    exchanged.
    """
    weights, best, least = [1.0] * len(bounds), torch.empty(0), math.inf
    for _ in range(ROUNDS):
        total, *others = [weight / float(most) * cost for weight, (cost, most) in zip(weights, bounds)]
        mask = cheapest(space, sum(others, total), bounds[0][1].device)
        full = [float(cost(mask) / most) for cost, most in bounds]
        if max(full) < least:
            best, least = mask, max(full)
        if bool(_fits(bounds, mask)):
            return mask
        weights = [weight * max(one / max(full), 0.1) for weight, one in zip(weights, full)]
    while not bool(_fits(bounds, best)):
        before = _fullest(bounds, best)
        listed = combinations(space, best)
        if listed is not None:
            best = listed[torch.stack([cost(listed) / most for cost, most in bounds]).amax(0).argmin()]
        best = _brought_down(bounds, best, _changeable(space), None)
        if not bool(_fullest(bounds, best) < before):
            break
    return best


def _changeable(space: Space) -> list[slice]:
    """Where one entry may take the place of another: choices, and groups that may not be emptied."""
    return [where for _, where in space.choices] + [where for group, where in space.bits if group.least]


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


def within(distribution: Distribution, bounds: Limits, theta: Tensor, full: Tensor, smallest: Tensor) -> Tensor:
    """The best mask by theta whose cost is at most its budget, ``(*B, d)`` float32; of several costs, each of them.

    Options first: a choice leaves its likeliest option for a cheaper one only as far as the budget demands, the least
    unlikely changes first, weighed against closing gates by the same ratio of probabilities. Then gates, in order of
    theta, until no further one fits. Where not even the ``least`` likeliest gates fit, some of them and of the options
    are exchanged for cheaper ones. theta: ``(*B, d)``, bounds: costs, the first of which ranks options and gates, full:
    ``(d)``, the most expensive structure, smallest: ``(d)`` or ``(*B, d)``, one that the budgets allow.
    """
    space, flat = distribution.space, theta.reshape(-1, theta.shape[-1])
    bounds = [(cost, most.reshape(-1)) for cost, most in bounds]
    smallest = smallest.expand_as(theta).reshape(flat.shape)
    price = bounds[0][0].gradient(full)
    score = _score(space, flat)
    options = _affordable_options(space, bounds, flat, price, score)
    base = torch.maximum(options, least_open(space, flat))
    above, parts = (~_fits(bounds, base)).nonzero().squeeze(-1).tolist(), _changeable(space)
    lower = _weighed(space, bounds, base, score) if above else base
    for run in above:
        own = _of_run(bounds, run)
        low = _brought_down(own, lower[run], parts, score[run])
        base[run] = _put_back(own, low if bool(_fits(own, low)) else smallest[run], parts, score[run])
    mask = _top_up(space, bounds, flat, price, base)
    if not space.is_bits:  # what was left over may be enough for an option that gates had stood against
        mask = _top_up(space, bounds, flat, price, _options_put_back(space, bounds, mask, score))
    return mask.to(torch.float32).reshape(theta.shape)


def _score(space: Space, theta: Tensor) -> Tensor:
    """``(R, d)``: what an open entry adds to the logarithm of a mask's probability; of options, but for a constant."""
    score = theta.clamp(min=NEVER).log()
    for _, where in space.bits:
        score[:, where] -= (1 - theta[:, where]).clamp(min=NEVER).log()
    return score


def _of_run(bounds: Limits, run: int) -> Limits:
    return [(cost, most[run]) for cost, most in bounds]


def _weighed(space: Space, bounds: Limits, base: Tensor, score: Tensor) -> Tensor:
    """``(R, d)`` float64: one option in every choice and ``least`` gates of each group, those of the largest score less
    a weight times what they cost. The weight is the smallest with which they fit the budgets, by bisection."""
    price = torch.stack([cost.gradient(base) / most.unsqueeze(-1) for cost, most in bounds]).sum(0)
    price = price / price.amax(-1, keepdim=True).clamp(min=NEVER)

    def structure(power: Tensor) -> Tensor:  # power: (R, 1)
        value, mask = score - power.exp2() * price, torch.zeros_like(base)
        for count, where in [(1, w) for _, w in space.choices] + [(g.least, w) for g, w in space.bits if g.least]:
            best = value[:, where].argsort(dim=-1, descending=True, stable=True)[:, :count]
            mask[:, where] = torch.zeros_like(mask[:, where]).scatter(-1, best, 1.0)
        return mask

    high = torch.full_like(base[:, :1], 50.0)
    low = -high
    for _ in range(50):
        middle = (low + high) / 2
        fits = _fits(bounds, structure(middle)).unsqueeze(-1)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return structure(high)


def _options_put_back(space: Space, bounds: Limits, masks: Tensor, score: Tensor) -> Tensor:
    """masks ``(R, d)`` with likelier options, those that gain most first, where they fit beside the open gates."""
    parts, masks = [where for _, where in space.choices], masks.clone()
    moved = [(masks[:, w] * score[:, w]).sum(-1) < score[:, w].amax(-1) for w in parts]
    for run in torch.stack(moved).any(0).nonzero().squeeze(-1).tolist():
        masks[run] = _put_back(_of_run(bounds, run), masks[run], parts, score[run])
    return masks


def _fits(bounds: Limits, masks: Tensor) -> Tensor:
    """masks: ``(R, d)``. Whether no cost of them is above its budget, ``(R)``."""
    return torch.stack([cost(masks) <= most for cost, most in bounds]).all(0)


def _affordable_options(space: Space, bounds: Limits, theta: Tensor, price: Tensor, score: Tensor) -> Tensor:
    """``(R, d)`` float64: one option in every choice, no gates."""
    if space.is_bits:
        return torch.zeros_like(theta)
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
    chosen = structure(listed.gather(-1, low.clamp(max=listed.shape[-1] - 1))).to(torch.float64)
    chosen = _options_put_back(space, bounds, chosen, score)
    for _, where in space.bits:
        chosen[:, where] = 0.0
    return chosen


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
            room = most - cost(mask) + 1e-9 * most  # what fills it to the last digit is tried
            candidates &= cost.gradient(mask) <= room.unsqueeze(-1)
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
