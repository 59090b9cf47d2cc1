"""The few statistics a report needs, on small samples: quartiles, exact rank tests, trend, sign, bootstraps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np

Numbers = Sequence[float]
Quartiles = tuple[float, float, float]
ENUMERATED = 200_000  # at most so many splits are all looked at; beyond, as many are drawn
DRAWS, PAIRED_DRAWS = 20_000, 10_000  # permutations and bootstraps; bootstraps of pairs
SEED = 0


def quartiles(values: Numbers) -> Quartiles:
    """The 25% quantile, the median and the 75% quantile, interpolated linearly.

    >>> quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    low, middle, high = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def median(values: Numbers) -> float:
    return quartiles(values)[1]


def smaller(x: Numbers, y: Numbers) -> float:
    """The one-sided p of the Mann-Whitney test that x tends to be smaller than y; exact, ties at their mean rank.

    >>> smaller([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == 1 / 252
    True
    """
    n = len(x)
    if math.comb(n + len(y), n) <= ENUMERATED:
        return smaller_together([(x, y)])
    ranks, rng = _ranks(x, y), np.random.default_rng(SEED)
    sums = np.array([rng.permutation(ranks)[:n].sum() for _ in range(DRAWS)])
    return float((1 + (sums <= ranks[:n].sum() + 1e-9).sum()) / (1 + DRAWS))


def _ranks(x: Numbers, y: Numbers) -> np.ndarray:
    """Of all values together, x's first; ties have their mean."""
    values = np.concatenate([np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)])
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[where]
    return ranks


def smaller_together(pairs: Sequence[tuple[Numbers, Numbers]]) -> float:
    """The same over several pairs of samples, each ranked by itself: exact, of the sum of their rank sums.

    Where no single pair has enough values to say so, all of them together may.

    >>> smaller_together([([1, 2, 3], [4, 5, 6])]), smaller_together([([1, 2, 3], [4, 5, 6])] * 2)
    (0.05, 0.0025)
    """
    ways, seen = Counter({0: 1}), 0
    for x, y in pairs:
        doubled = [round(2 * rank) for rank in _ranks(x, y)]
        own = Counter(sum(chosen) for chosen in combinations(doubled, len(x)))
        further = Counter[int]()
        for before, count in ways.items():
            for here, more in own.items():
                further[before + here] += count * more
        ways, seen = further, seen + sum(doubled[: len(x)])
    return sum(count for total, count in ways.items() if total <= seen) / sum(ways.values())


def falling(groups: Sequence[Numbers]) -> float:
    """The one-sided p of the Jonckheere-Terpstra test that values fall from each group to the next.

    By random permutation with a fixed seed, at least 1 / 20001; ties count half.
    """
    values = np.concatenate([np.asarray(g, dtype=np.float64) for g in groups])
    label = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    above = np.sign(values[:, None] - values[None, :])  # +1 where the first is larger

    def statistic(label: np.ndarray) -> float:
        return float(above[label[:, None] < label[None, :]].sum())

    seen = statistic(label)
    rng = np.random.default_rng(SEED)
    drawn = np.array([statistic(rng.permutation(label)) for _ in range(DRAWS)])
    return float((1 + (drawn >= seen - 1e-9).sum()) / (1 + DRAWS))


def kendall(x: Numbers, y: Numbers) -> float:
    """Kendall's tau-b between two sequences; NaN where one of them never changes."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    s, t = np.sign(a[:, None] - a), np.sign(b[:, None] - b)
    spread = math.sqrt(float((s * s).sum() * (t * t).sum()))
    return float((s * t).sum()) / spread if spread else math.nan


def at_least(hits: int, n: int, chance: float = 0.5) -> float:
    """The probability of at least so many hits in n tries: the one-sided p of a sign test, or of another chance.

    >>> at_least(5, 5), round(at_least(3, 3, 1 / 3), 4)
    (0.03125, 0.037)
    """
    return float(sum(math.comb(n, k) * chance**k * (1 - chance) ** (n - k) for k in range(hits, n + 1)))


def holm(ps: Numbers) -> list[float]:
    """The p-values of several tests, adjusted for their number (Holm), in their order.

    >>> holm([0.01, 0.04])
    [0.02, 0.04]
    """
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min((len(ps) - rank) * ps[i], 1.0))
        adjusted[i] = worst
    return adjusted


def difference_interval(x: Numbers, y: Numbers, level: float = 0.95) -> tuple[float, float]:
    """A bootstrap interval (percentiles, fixed seed) of the difference of medians, x minus y."""
    rng = np.random.default_rng(SEED)
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    medians = [np.median(v[rng.integers(len(v), size=(DRAWS, len(v)))], axis=1) for v in (a, b)]
    low, high = np.quantile(medians[0] - medians[1], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_interval(differences: Numbers, folds: Sequence[int | None], level: float = 0.95) -> tuple[float, float]:
    """A bootstrap interval (percentiles, fixed seed) of the mean of paired differences.

    Pairs of one fold share their images: folds are drawn first, then pairs within each of them, so that what is due to
    the split is not taken for evidence. Folds of equal size; None: no folds, and pairs are drawn alone.

    >>> paired_interval([0.1] * 4, [0, 0, 1, 1]) == (0.1, 0.1)
    True
    """
    rng = np.random.default_rng(SEED)
    groups = [
        np.asarray([d for d, f in zip(differences, folds, strict=True) if f == fold], dtype=np.float64)
        for fold in sorted(set(folds), key=str)
    ]
    inside = np.stack([g[rng.integers(len(g), size=(PAIRED_DRAWS, len(groups), len(g)))].mean(-1) for g in groups], -1)
    # inside: (draws, places, folds), the mean of a drawing of its own for every place a fold may be drawn to
    drawn = rng.integers(len(groups), size=(PAIRED_DRAWS, len(groups), 1))
    means = np.take_along_axis(inside, drawn, -1).squeeze(-1).mean(-1)
    # Summing in another order moves a last digit: that is no evidence.
    low, high = np.round(np.quantile(means, [(1 - level) / 2, (1 + level) / 2]), 12)
    return float(low), float(high)
