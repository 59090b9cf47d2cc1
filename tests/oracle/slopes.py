"""The update of theta from slopes, one update at a time: worths of gates in units of their running mean size.

Of a choice only differences of worths count: it has as many of them as degrees of freedom, and two options are one bit.
"""

import math

import numpy as np

from oracle.method import Method, restrict
from oracle.structures import entries, freedom


def worth_of(signal, slopes, spreads):
    """What each gate is worth, judged by one mask; without spreads the size of the slopes stands in."""
    worth = []
    for i, slope in enumerate(slopes):
        size = abs(slope) if spreads is None else spreads[i]
        worth.append(-slope if signal == "first-order" else size - slope / 2)
    return worth


def natural(variables, theta, gradient):
    """F^-1 times a gradient: theta (1 - theta) for a bit, theta_k (g_k - mean of g) for an option."""
    direction = np.zeros(len(theta))
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            i = owned[0]
            direction[i] = theta[i] * (1 - theta[i]) * gradient[i]
            continue
        centre = math.fsum(theta[i] * gradient[i] for i in owned)
        for i in owned:
            direction[i] = theta[i] * (gradient[i] - centre)
    return direction


class SlopeMethod:
    """theta += lr (natural gradient of the worths / their running mean size - price of the cost)."""

    def __init__(self, variables, signal, **others):
        self.variables, self.signal = variables, signal
        self.plain = Method(variables, **others)  # its theta and its price are ours
        self.size, self.updates = 0.0, 0

    @property
    def theta(self):
        return self.plain.theta

    @property
    def diverged(self):
        return self.plain.diverged

    def update(self, masks, losses, slopes, spreads=None):
        rows = []
        for i in range(len(masks)):
            numbers = [losses[i], *slopes[i], *([] if spreads is None else spreads[i])]
            if all(math.isfinite(number) for number in numbers):
                rows.append(worth_of(self.signal, slopes[i], None if spreads is None else spreads[i]))
        if not rows:
            self.plain.diverged = True
            return
        worth = [math.fsum(column) / len(rows) for column in zip(*rows)]
        most = 100 * self.size if self.size > 0 else math.inf
        for owned in entries(self.variables):
            own = [worth[i] for i in owned]
            shared = math.fsum(self.theta[i] * worth[i] for i in owned) if len(owned) > 1 else 0.0
            apart = max(own) - min(own) if len(owned) > 1 else abs(own[0])
            for i in owned:
                worth[i] = (worth[i] - shared) * (most / apart if apart > most else 1.0)
        share = max(1 / (self.updates + 1), 0.01)
        self.size += share * (math.fsum(abs(w) for w in worth) / freedom(self.variables) - self.size)
        unit = self.size if self.size > 0 else 1.0
        step = natural(self.variables, self.theta, [w / unit for w in worth]) - self.plain.price()
        moved = self.theta + self.plain.learning_rate * step
        self.plain.theta = restrict(self.variables, moved, self.plain.margin)
        self.updates += 1
