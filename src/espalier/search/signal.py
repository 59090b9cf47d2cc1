"""What theta learns from, the order of losses or what slopes say of the worth of each gate, and how far it steps.

The natural gradient of the expected loss f for bit i is theta_i (1 - theta_i) times ``E[f(m_i = 0) - f(m_i = 1)]``, the
worth of the gate. Losses of a few masks tell one number for all gates together; the backward pass that trains the
weights leaves a slope g_i = df/dm_i at every gate, open or closed. How well each estimate points: docs/signal.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.search.distribution import Distribution
from espalier.space import BadInput, BadType

# slopes g, sizes of the slopes of single examples s, both (*B, samples, d); returns worths of that shape
Worth = Callable[[Tensor, Tensor], Tensor]


def first_order(g: Tensor, s: Tensor) -> Tensor:
    """Exact where the loss is linear in each gate; a network's loss is not, and a trained one has slopes near zero."""
    return -g


def sized(g: Tensor, s: Tensor) -> Tensor:
    """A gate whose slopes are large, of either sign, is needed: to close it moves the loss of each example by about its
    slope, and of what moves away from where training has led, most is for the worse. The direction adds a little.

    A closed gate is judged as an open one is. What its slopes say of opening it is less exact, but without it a layer
    that was cut too far would stay so: the worth of its closed gates rises as the layer becomes a bottleneck."""
    return s - g / 2


LARGEST = 100.0  # no worth counts for more than so many times the mean size, no two options differ by more
SLOPES: dict[str, Worth] = {"first-order": first_order, "slopes": sized}
SIGNALS = ("ranked", *SLOPES)


@dataclass
class Signal:
    """The worths of the gates in units of their running mean size, so that a loss times ten gives the same theta."""

    worth: Worth
    size: Tensor  # (*B) float64: the running mean, changed in place

    @classmethod
    def start(cls, name: object, batch: tuple[int, ...], device: torch.device) -> Signal | None:
        """None for the signal that ranks losses, which has no slopes to weigh."""
        if not isinstance(name, str):
            raise BadType(f"signal is one of {', '.join(SIGNALS)}, not {name!r}")
        if name not in SIGNALS:
            raise BadInput(f"there is no signal {name!r}, only {', '.join(SIGNALS)}")
        if name not in SLOPES:
            return None
        return cls(SLOPES[name], torch.zeros(batch, dtype=torch.float64, device=device))

    def values(
        self,
        distribution: Distribution,
        theta: Tensor,
        losses: Tensor,
        slopes: Tensor,
        spreads: Tensor | None,
        updates: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The worth of each gate ``(*B, d)`` float64, and whether any mask had a finite loss and slopes ``(*B)``.

        slopes, spreads: ``(*B, samples, d)``; losses: ``(*B, samples)``; updates: ``(*B)``, those before this.
        A mask whose loss or slopes are not finite is left out. Of the options of a choice only differences count.
        """
        slopes, spreads = slopes.detach(), None if spreads is None else spreads.detach()
        finite = losses.isfinite() & slopes.isfinite().all(-1)
        if spreads is not None:
            finite &= spreads.isfinite().all(-1)
        slopes = torch.where(finite.unsqueeze(-1), slopes, 0.0).to(torch.float64)
        sizes = slopes.abs() if spreads is None else torch.where(finite.unsqueeze(-1), spreads, 0.0).to(torch.float64)
        worth = self.worth(slopes, sizes) * finite.unsqueeze(-1)
        worth = worth.sum(-2) / finite.sum(-1).clamp(min=1).unsqueeze(-1)
        alive = finite.any(-1)
        # Behind a normalisation that reads nothing but closed gates a slope may be hundreds of times too steep.
        most = torch.where(self.size > 0, LARGEST * self.size, torch.inf).unsqueeze(-1)
        worth = distribution.limited(distribution.centred(theta, worth), most)
        # Over about a hundred updates: a single one holds the noise of its examples.
        weight = torch.where(alive, (1 / (updates.to(torch.float64) + 1)).clamp(min=0.01), 0.0)
        space = distribution.space
        size = worth.abs().mean(-1) if space.is_bits else worth.abs().sum(-1) / space.freedom
        self.size.lerp_(size, weight)
        return worth / torch.where(self.size > 0, self.size, 1.0).unsqueeze(-1), alive


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


def of_losses(masks: Tensor, losses: Tensor) -> tuple[Callable[[slice], Tensor], Tensor]:
    """The paper's: utilities by rank. Returns ``mean_i u_i (M_i - theta)`` as a function of which entries
    ``(*B, part)``, and whether any loss was finite ``(*B)``. As the u_i add up to 0, theta drops out."""
    u, alive = ranked(losses)
    return lambda part: (u.unsqueeze(-1) * masks[..., part]).sum(-2) / masks.shape[-2], alive


# ---- how far theta steps ---------------------------------------------------------------------------------------------


ALPHA = 1.5  # the signal-to-noise ratio that is held


@dataclass
class Adaptation:
    """The step size of theta adapted to its signal-to-noise ratio: ASNG (Akimoto et al., ICML 2019), for each run.

    The step is normalised in the Fisher metric to length ``delta / Delta``. ``s`` accumulates normalised steps; were
    they pure noise its squared length would be ``gamma``, so Delta grows (steps shrink) until the signal shows.
    path: ``(*B, d)``; gamma, shrink: ``(*B)``; all float64, changed in place.
    """

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
