"""The cost of a structure by plain loops, and what follows from it by enumeration."""

import numpy as np

from oracle.structures import all_masks, entries, expectation, natural_gradient_of_mean


def cost_of(terms, mask):
    """sum over terms of scale times the product of (constant + sum_i w_i m_i)."""
    total = 0.0
    for scale, forms in terms:
        product = scale
        for weights, constant in forms:
            value = constant
            for w, m in zip(weights, mask):
                value += w * m
            product *= value
        total += product
    return total


def linear(c):
    """The paper's R(M) = sum_i c_i m_i."""
    return [(1.0, [(list(c), 0.0)])]


def expected_cost(variables, terms, theta):
    return expectation(variables, theta, lambda mask: cost_of(terms, mask))


def natural_gradient(variables, terms, theta):
    """The natural gradient of the expected cost, enumerated."""
    return natural_gradient_of_mean(variables, theta, lambda mask: cost_of(terms, mask))


def gradient(variables, terms, theta):
    """dE[cost]/dtheta_i of the reduced polynomial: the mean of what entry i adds to the rest, others drawn.

    For a bit: cost with it open minus cost with it closed. For an option: cost with that option taken minus cost with
    no option of its choice taken (every reduced term holds at most one option of a choice).
    """
    slopes = np.zeros(sum(variables))
    for owned in entries(variables):
        for i in owned:

            def added(mask, i=i, owned=owned):
                without = mask.copy()
                without[owned] = 0.0
                taken = without.copy()
                taken[i] = 1.0
                return cost_of(terms, taken) - cost_of(terms, without)

            slopes[i] = expectation(variables, theta, added)
    return slopes


def most_expensive(variables, terms):
    """The masks of highest cost (several when they tie), by trying all."""
    best, found = -1.0, []
    for mask in all_masks(variables):
        cost = cost_of(terms, mask)
        if cost > best + 1e-9 * abs(best):
            best, found = cost, [mask]
        elif abs(cost - best) <= 1e-9 * abs(best):
            found.append(mask)
    return found


def full_cost(variables, terms):
    return cost_of(terms, most_expensive(variables, terms)[0])


def steepest(variables, terms, mask):
    """s of law 4: the most that one variable alone can change the cost of this structure."""
    largest = 0.0
    for size, owned in zip(variables, entries(variables)):
        costs = []
        if size == 1:
            for value in (0.0, 1.0):
                other = mask.copy()
                other[owned[0]] = value
                costs.append(cost_of(terms, other))
        else:
            for i in owned:
                other = mask.copy()
                other[owned] = 0.0
                other[i] = 1.0
                costs.append(cost_of(terms, other))
        largest = max(largest, max(costs) - min(costs))
    return largest


def epsilon(variables, terms, penalty):
    """eps = eps' / s; for a linear cost of bits the paper's eps' / max(c)."""
    scales = [steepest(variables, terms, mask) for mask in most_expensive(variables, terms)]
    assert max(scales) - min(scales) <= 1e-9 * max(scales), "the most expensive structures disagree on s"
    return penalty / scales[0]
