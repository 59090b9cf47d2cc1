"""Adaptive step size: ASNG (Akimoto et al., ICML 2019) around the same direction, with the penalty scaled alike."""

import math

import numpy as np

from oracle.method import Method, all_lost, ranked_direction, restrict
from oracle.structures import entries, freedom


def root_fisher(variables, theta, direction):
    """F^(1/2) times a direction, in the N free coordinates; its Euclidean length is the Fisher norm."""
    values = []
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            i = owned[0]
            values.append(direction[i] / math.sqrt(theta[i] * (1 - theta[i])))
        else:
            last = theta[owned[-1]]
            common = math.fsum(direction[i] for i in owned[:-1]) / (last + math.sqrt(last))
            for i in owned[:-1]:
                rooted = direction[i] / math.sqrt(theta[i]) + math.sqrt(theta[i]) * common
                values.append(rooted)
    return np.array(values)


class Adaptive:
    """theta += delta_t / ||G||_F (G - eps natgrad cost); delta_t = delta / Delta, Delta follows the signal."""

    def __init__(self, variables, *, terms, delta=1.0, alpha=1.5, **others):
        self.variables = variables
        self.plain = Method(variables, terms=terms, **others)  # its theta and its price are ours
        self.delta, self.alpha = delta, alpha
        self.path = np.zeros(freedom(variables))  # s
        self.gamma = 0.0
        self.Delta = 1.0

    @property
    def theta(self):
        return self.plain.theta

    @property
    def diverged(self):
        return self.plain.diverged

    def update(self, masks, losses):
        if all_lost(losses):
            self.plain.diverged = True
            return
        direction = ranked_direction(self.theta, masks, losses)
        rooted = root_fisher(self.variables, self.theta, direction)
        norm = math.sqrt(math.fsum(x * x for x in rooted))
        if norm < 1e-12:  # every loss ties, or every mask is the same: 0 but for rounding; no signal, no step
            return
        delta_t = self.delta / self.Delta
        beta = min(delta_t / math.sqrt(freedom(self.variables)), 1)  # past 1 the path would flip, past 2 be no number
        moved = self.theta + delta_t / norm * (direction - self.plain.price())
        self.path = (1 - beta) * self.path + math.sqrt(beta * (2 - beta)) * rooted / norm
        self.gamma = (1 - beta) ** 2 * self.gamma + beta * (2 - beta)
        self.Delta *= math.exp(beta * (self.gamma - math.fsum(x * x for x in self.path) / self.alpha))
        self.plain.theta = restrict(self.variables, moved, self.plain.margin)
