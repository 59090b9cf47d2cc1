"""The paper's update of theta, one update at a time, for bits and for choices."""

import math

import numpy as np

from oracle.costs import epsilon, natural_gradient
from oracle.structures import dimension, entries, freedom


def utilities(losses):
    """+1 for the best ceil(lambda/4), -1 for the worst ceil(lambda/4), 0 between; ties share the mean of their places.

    NaN, +inf and -inf tie as worst (PAPER section 5.2).
    """
    count = len(losses)
    comparable = [float(loss) if math.isfinite(loss) else math.inf for loss in losses]
    quarter = math.ceil(count / 4)
    by_place = []
    for place in range(count):
        if place < quarter:
            by_place.append(1.0)
        elif place >= count - quarter:
            by_place.append(-1.0)
        else:
            by_place.append(0.0)
    u = []
    for mine in comparable:
        better = sum(1 for other in comparable if other < mine)
        equal = sum(1 for other in comparable if other == mine)
        spanned = by_place[better : better + equal]
        u.append(sum(spanned) / equal)
    return u


def ranked_direction(theta, masks, losses):
    """(1/lambda) sum_i u_i (M_i - theta)."""
    u = utilities(losses)
    direction = np.zeros(len(theta))
    for k in range(len(theta)):
        for i, mask in enumerate(masks):
            direction[k] += u[i] * (mask[k] - theta[k])
        direction[k] /= len(masks)
    return direction


def all_lost(losses):
    return all(not math.isfinite(loss) for loss in losses)


def default_margin(variables):
    return min(1 / len(variables), 0.25)


def lower_bounds(variables, margin=None):
    """The least probability of each variable's value: of a bit the margin, of an option min(margin / (K-1), 1/(2K))."""
    lows = []
    for size in variables:
        if size == 1:
            lows.append(default_margin(variables) if margin is None else margin)
        else:
            share = 1 / len(variables) if margin is None else margin
            lows.append(min(share / (size - 1), 1 / (2 * size)))
    return lows


def restrict(variables, theta, margin=None):
    """Put theta back into its bounds; a choice keeps its sum of 1."""
    theta = theta.copy()
    for size, owned, low in zip(variables, entries(variables), lower_bounds(variables, margin)):
        if size == 1:
            i = owned[0]
            theta[i] = min(max(theta[i], low), 1 - low)
            continue
        for i in owned:
            theta[i] = max(theta[i], low)
        excess = math.fsum(theta[i] for i in owned) - 1
        height = math.fsum(theta[i] - low for i in owned)
        for i in owned:
            theta[i] -= excess * (theta[i] - low) / height
    return theta


class Method:
    """Theta and how it moves: Eq. (9) of the paper with the bounds of its implementation remark."""

    def __init__(self, variables, *, terms, penalty=0.0, learning_rate=None, initial=None, margin=None):
        self.variables, self.terms, self.margin = variables, terms, margin
        self.learning_rate = 1 / freedom(variables) if learning_rate is None else learning_rate
        self.epsilon = epsilon(variables, terms, penalty)
        if initial is None:
            initial = np.zeros(dimension(variables))
            for size, owned in zip(variables, entries(variables)):
                for i in owned:
                    initial[i] = 0.5 if size == 1 else 1 / size
        self.theta = np.array(initial, dtype=np.float64)
        self.diverged = False

    def price(self):
        """eps times the natural gradient of the expected cost at theta."""
        if self.epsilon == 0:
            return np.zeros(len(self.theta))
        return self.epsilon * natural_gradient(self.variables, self.terms, self.theta)

    def update(self, masks, losses):
        if all_lost(losses):
            self.diverged = True
            return
        step = ranked_direction(self.theta, masks, losses) - self.price()
        self.theta = restrict(self.variables, self.theta + self.learning_rate * step, self.margin)


class PaperMethod:
    """The bits-and-linear-cost case exactly as printed, for spaces too large to enumerate."""

    def __init__(self, c, *, penalty=0.0, learning_rate=None, margin=None):
        self.c = [float(x) for x in c]
        self.d = len(self.c)
        self.epsilon = penalty / max(self.c)
        self.learning_rate = 1 / self.d if learning_rate is None else learning_rate
        self.margin = default_margin([1] * self.d) if margin is None else margin
        self.theta = np.full(self.d, 0.5)
        self.diverged = False

    def update(self, masks, losses):
        if all_lost(losses):
            self.diverged = True
            return
        direction = ranked_direction(self.theta, masks, losses)
        for i in range(self.d):
            t = self.theta[i]
            t = t + self.learning_rate * (direction[i] - self.epsilon * self.c[i] * t * (1 - t))
            self.theta[i] = min(max(t, self.margin), 1 - self.margin)
