"""The mean ranked update over every tuple of masks the method could draw."""

import itertools

import numpy as np

from oracle.method import ranked_direction
from oracle.structures import all_masks, probability


def mean_direction(variables, theta, loss_of, samples):
    """E over M_1 .. M_lambda of (1/lambda) sum_i u_i (M_i - theta)."""
    masks = all_masks(variables)
    weights = [probability(variables, theta, mask) for mask in masks]
    losses = [loss_of(mask) for mask in masks]
    total = np.zeros(len(theta))
    for drawn in itertools.product(range(len(masks)), repeat=samples):
        p = 1.0
        for k in drawn:
            p *= weights[k]
        total += p * ranked_direction(theta, [masks[k] for k in drawn], [losses[k] for k in drawn])
    return total
