"""The oracle's spaces and costs in the library's words, and random ones of both kinds."""

import numpy as np

import espalier
from oracle.structures import entries


def space_of(variables):
    """Neighbouring bits become one group; every choice is its own."""
    groups, run = [], 0
    for size in [*variables, 0]:
        if size == 1:
            run += 1
            continue
        if run:
            groups.append(espalier.Bits(f"bits{len(groups)}", run))
            run = 0
        if size:
            groups.append(espalier.Choice(f"choice{len(groups)}", size))
    return espalier.Space(groups)


def cost_over(variables, terms):
    """The oracle's terms as an ``espalier.Cost`` bound to the space."""
    total = None
    for scale, forms in terms:
        factors = [espalier.Form.of(list(weights), constant) for weights, constant in forms]
        term = espalier.Cost.product(factors, d=sum(variables), scale=scale)
        total = term if total is None else total + term
    return total.over(space_of(variables))


def random_theta(variables, rng):
    """Well inside the bounds: a bit in [0.05, 0.95], a choice from a Dirichlet distribution."""
    theta = np.zeros(sum(variables))
    for size, owned in zip(variables, entries(variables)):
        theta[owned] = rng.uniform(0.05, 0.95) if size == 1 else rng.dirichlet(np.full(size, 2.0)) * 0.9 + 0.1 / size
    return theta


def random_terms(d, rng, degrees=(1, 2, 3)):
    """A few products of the given degrees; forms overlap, many weights are 0, some constants are not."""
    terms = []
    for degree in degrees:
        forms = []
        for _ in range(degree):
            weights = rng.integers(0, 4, d) * rng.uniform(0.5, 2.0, d)
            weights[rng.integers(d)] += 1.0  # no form is empty
            forms.append((weights.tolist(), float(rng.choice([0.0, 1.5]))))
        terms.append((float(rng.uniform(0.5, 2.0)), forms))
    return terms
