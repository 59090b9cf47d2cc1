"""All structures of a small space: their masks, their probabilities, and sums over them."""

import itertools
import math

import numpy as np


def entries(variables):
    """Which entries of a mask each variable owns: a list of lists of indices."""
    owned, start = [], 0
    for size in variables:
        owned.append(list(range(start, start + size)))
        start += size
    return owned


def dimension(variables):
    return sum(variables)


def freedom(variables):
    """N = sum of (K - 1), a bit counting 1 (PAPER section 5.5)."""
    total = 0
    for size in variables:
        total += 1 if size == 1 else size - 1
    return total


def all_masks(variables):
    """Every mask of the space, one numpy vector ``(d)`` each."""
    settings = []
    for size in variables:
        if size == 1:
            settings.append([(0.0,), (1.0,)])
        else:
            settings.append([tuple(1.0 if j == k else 0.0 for j in range(size)) for k in range(size)])
    masks = []
    for parts in itertools.product(*settings):
        values = []
        for part in parts:
            values.extend(part)
        masks.append(np.array(values, dtype=np.float64))
    return masks


def probability(variables, theta, mask):
    """p(M | theta): independent bits, and independent choices of one option each."""
    p = 1.0
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            i = owned[0]
            p *= theta[i] if mask[i] == 1 else 1 - theta[i]
        else:
            for i in owned:
                if mask[i] == 1:
                    p *= theta[i]
    return p


def expectation(variables, theta, function):
    """E[function(M)] as the sum over every structure."""
    total = 0.0
    for mask in all_masks(variables):
        total = total + probability(variables, theta, mask) * function(mask)
    return total


def sample(variables, theta, uniforms):
    """One mask from one uniform number per variable: a bit opens below theta, a choice by its cumulated options."""
    mask = np.zeros(dimension(variables))
    for size, owned, u in zip(variables, entries(variables), uniforms):
        if size == 1:
            mask[owned[0]] = 1.0 if u < theta[owned[0]] else 0.0
            continue
        reached = 0.0
        taken = owned[-1]
        for i in owned:
            reached += theta[i]
            if u < reached:
                taken = i
                break
        mask[taken] = 1.0
    return mask


def mode(variables, theta):
    """argmax_M p(M | theta); a bit of exactly 0.5 opens (paper, "Prediction for Test Data")."""
    mask = np.zeros(dimension(variables))
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            mask[owned[0]] = 1.0 if theta[owned[0]] >= 0.5 else 0.0
        else:
            best = owned[0]
            for i in owned:
                if theta[i] > theta[best]:
                    best = i
            mask[best] = 1.0
    return mask


def free_coordinates(variables):
    """The entries that parametrise the distribution: a bit's own, and of a choice all options but the last."""
    free = []
    for size, owned in zip(variables, entries(variables)):
        free.extend(owned if size == 1 else owned[:-1])
    return free


def score(variables, theta, mask):
    """d ln p(M | theta) / dtheta in the free coordinates (the last option of a choice is 1 minus the others)."""
    values = []
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            i = owned[0]
            values.append(mask[i] / theta[i] - (1 - mask[i]) / (1 - theta[i]))
        else:
            last = owned[-1]
            for i in owned[:-1]:
                slope = mask[i] / theta[i] - mask[last] / theta[last]
                values.append(slope)
    return np.array(values)


def fisher(variables, theta):
    """The Fisher information E[score score^T], enumerated, in the free coordinates."""
    return expectation(
        variables, theta, lambda mask: np.outer(score(variables, theta, mask), score(variables, theta, mask))
    )


def whole(variables, free_part):
    """A tangent vector in the free coordinates, written in all entries: the options of a choice sum to 0."""
    full = np.zeros(dimension(variables))
    values = iter(free_part)
    for size, owned in zip(variables, entries(variables)):
        if size == 1:
            full[owned[0]] = next(values)
        else:
            for i in owned[:-1]:
                full[i] = next(values)
            full[owned[-1]] = -math.fsum(full[i] for i in owned[:-1])
    return full


def natural_gradient_of_mean(variables, theta, function):
    """The natural gradient of E[function(M)] by its definition: F^-1 times the sum of function p score."""
    vanilla = expectation(variables, theta, lambda mask: function(mask) * score(variables, theta, mask))
    return whole(variables, np.linalg.solve(fisher(variables, theta), vanilla))


def raw_loss_direction(variables, theta, function):
    """sum_M p(M) function(M) (M - theta): the natural gradient as the paper writes it, without ranking (Eq. 7)."""
    return expectation(variables, theta, lambda mask: function(mask) * (mask - theta))
