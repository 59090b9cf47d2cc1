"""Independent bits and choices with expectations theta: drawing, bounds, natural gradient, Fisher root.

A bit is Bernoulli; a choice of K options is categorical. The update rule is the same for both; what differs is here.
Choices are handled together, as rows of a table padded to the largest number of options.
"""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.space import Bits, Space


class Distribution:
    """The family of distributions over one space, on one device. Every method takes leading batch dimensions."""

    def __init__(self, space: Space, margin: float | None, device: torch.device) -> None:
        """margin: theta of a bit stays in [margin, 1 - margin]; None: 1 / variables, at most a quarter."""
        self.space, self.device = space, device
        share = 1 / space.n if margin is None else margin
        self.margin = min(share, 0.25) if margin is None else margin
        if space.is_bits:
            return
        bit_entries, bit_variables, choice_variables = list[int](), list[int](), list[int]()
        variable = 0
        for group in space.groups:
            where = space.slices[group.name]
            if isinstance(group, Bits):
                bit_entries += range(where.start, where.stop)
                bit_variables += range(variable, variable + group.size)
                variable += group.size
            else:
                choice_variables.append(variable)
                variable += 1
        sizes = [group.size for group, _ in space.choices]
        widest = max(sizes)

        def index(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.bit_entries, self.bit_variables = index(bit_entries), index(bit_variables)
        self.choice_variables = index(choice_variables)
        # (choices, widest): the entry of each option; padding points one past the last entry
        self.options = index([[*range(w.start, w.stop), *[space.d] * (widest - g.size)] for g, w in space.choices])
        self.real = self.options < space.d
        # By index, not by this mask: looking a mask up asks the device how many it holds, and waits.
        self.places = self.real.flatten().nonzero().squeeze(-1)
        self.entries = self.options.flatten()[self.places]
        self.last = index(sizes).unsqueeze(-1) - 1  # (choices, 1): the option that is 1 minus the others
        lower = [min(share / (k - 1), 1 / (2 * k)) for k in sizes]
        self.lower = torch.tensor(lower, dtype=torch.float64, device=device).unsqueeze(-1)
        # (choices, 1): what is left to share above the bounds
        self.free = 1 - self.lower * index(sizes).unsqueeze(-1)

    def draw(self, theta: Tensor, noise: Tensor, out: Tensor | None = None) -> Tensor:
        """theta: ``(*B, d)``, noise: ``(*B, samples, n)`` uniform in [0, 1). Returns masks ``(*B, samples, d)``.

        One uniform per variable: a bit is open where it is below theta, a choice takes the option in whose share of
        [0, 1) it falls, so that a choice of two options draws what a bit draws.
        """
        theta = theta.unsqueeze(-2)
        if out is None:
            out = torch.empty((*noise.shape[:-1], theta.shape[-1]), dtype=torch.float32, device=noise.device)
        if self.space.is_bits:
            return torch.lt(noise, theta, out=out)  # straight to float32: half the time of a cast afterwards
        out.zero_()
        out[..., self.bit_entries] = (noise[..., self.bit_variables] < theta[..., self.bit_entries]).to(torch.float32)
        upto = self._rows(theta).cumsum(-1)  # (*B, 1, choices, widest)
        # Only the options before the last are counted: rounding of the sum cannot run past the last one.
        before_last = torch.arange(upto.shape[-1], device=noise.device) < self.last
        passed = (noise[..., self.choice_variables].unsqueeze(-1) >= upto) & before_last
        return out.scatter_(-1, self.options[:, 0] + passed.sum(-1), 1.0)

    def mode(self, theta: Tensor) -> Tensor:
        """The most probable mask ``(*B, d)`` float32: a bit open where theta >= 0.5, a choice at its best option."""
        mask = (theta >= 0.5).to(torch.float32)
        if not self.space.is_bits:
            taken = self._rows(theta, fill=-1.0).argmax(-1)
            mask[..., self.entries] = 0.0
            mask = mask.scatter(-1, self.options[:, 0] + taken, 1.0)
        return mask

    def bound(self, theta: Tensor) -> Tensor:
        """theta held inside its bounds: ``[margin, 1 - margin]`` for a bit; for a choice a lower bound for each option,
        the rest of the sum of 1 being shared in proportion to the heights above the bound."""
        bounded = theta.clamp(self.margin, 1 - self.margin)
        if self.space.is_bits:
            return bounded
        rows = self._rows(theta)
        above = torch.where(self.real, (rows - self.lower).clamp(min=0), 0.0)
        return self._put(bounded, self.lower + self.free * (above / above.sum(-1, keepdim=True)))

    def natural(self, theta: Tensor, gradient: Tensor) -> Tensor:
        """The natural gradient ``F^-1 gradient`` of a function with this gradient ``(*B, d)`` of theta."""
        natural = theta * (1 - theta) * gradient  # F^-1 = diag(theta (1 - theta)) for bits
        if self.space.is_bits:
            return natural
        rows, slopes = self._rows(theta), self._rows(gradient)
        return self._put(natural, rows * (slopes - (rows * slopes).sum(-1, keepdim=True)))

    def centred(self, theta: Tensor, x: Tensor) -> Tensor:
        """x ``(*B, d)`` without what the options of a choice have in common: their mean by theta."""
        if self.space.is_bits:
            return x
        rows = self._rows(x)
        return self._put(x, rows - (self._rows(theta) * rows).sum(-1, keepdim=True))

    def limited(self, x: Tensor, most: Tensor) -> Tensor:
        """x ``(*B, d)``, where no bit counts for more than most ``(*B, 1)``, and no two options of a choice differ by
        more: the choice is scaled down. So a choice of two options is limited as a bit is."""
        limited = x.clamp(-most, most)
        if self.space.is_bits:
            return limited
        rows, most = self._rows(x), most.unsqueeze(-1)
        low, high = torch.where(self.real, rows, torch.inf), torch.where(self.real, rows, -torch.inf)
        apart = high.amax(-1, keepdim=True) - low.amin(-1, keepdim=True)
        return self._put(limited, rows * torch.where(apart > most, most / apart, 1.0))

    def whitened(self, theta: Tensor, step: Tensor) -> Tensor:
        """``F^(1/2) step`` in as many coordinates as there are degrees of freedom (0 in the others): its squared length
        is the Fisher norm of the step."""
        spread = theta * (1 - theta)  # 0 only with margin 0: a bit at 0 or 1 has no freedom left
        white = torch.where(spread > 0, step / torch.where(spread > 0, spread, 1.0).sqrt(), 0.0)
        if self.space.is_bits:
            return white
        rows, steps = self._rows(theta, fill=1.0), self._rows(step)
        reference = rows.gather(-1, self.last.expand(*rows.shape[:-1], 1))
        free = self.real & (torch.arange(rows.shape[-1], device=rows.device) < self.last)
        steps = torch.where(free, steps, 0.0)
        free = free & (rows > 0) & (reference > 0)
        rows, reference = rows.clamp(min=1e-300), reference.clamp(min=1e-300)
        shared = steps.sum(-1, keepdim=True) / (reference + reference.sqrt())
        return self._put(white, torch.where(free, steps / rows.sqrt() + rows.sqrt() * shared, 0.0))

    def _rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The entries of the choices as ``(*B, choices, widest)``, padded."""
        return torch.nn.functional.pad(x, (0, 1), value=fill)[..., self.options]

    def _put(self, x: Tensor, rows: Tensor) -> Tensor:
        """x with the entries of the choices replaced."""
        x = x.clone()
        x[..., self.entries] = rows.flatten(-2)[..., self.places]
        return x
