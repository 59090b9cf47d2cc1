"""The report's statistics against SciPy, by hand, and by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from espalier.report import significance as st


def test_quartiles_are_interpolated():
    assert st.quartiles([1.0, 2.0, 4.0]) == (1.5, 2.0, 3.0)
    assert st.median([3.0, 1.0]) == 2.0


@pytest.mark.parametrize("seed", range(5))
def test_the_rank_test_agrees_with_scipy(seed):
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=5).tolist(), rng.normal(loc=0.7, size=6).tolist()
    assert st.smaller(x, y) == pytest.approx(scipy.mannwhitneyu(x, y, alternative="less", method="exact").pvalue)
    assert st.kendall(x, y[:5]) == pytest.approx(scipy.kendalltau(x, y[:5]).statistic)


def test_the_rank_test_with_ties():
    assert st.smaller([1, 1], [1, 1]) == 1.0
    # Ranks 1.5, 1.5, 3.5, 3.5: of the six splits one has a sum of 3.
    assert st.smaller([1, 1], [2, 2]) == pytest.approx(1 / 6)
    assert st.smaller([2, 2], [1, 1]) == 1.0


def test_the_rank_test_draws_where_splits_are_too_many():
    low, high = list(range(20)), list(range(10, 30))
    assert st.smaller(low, high) < 0.001
    assert st.smaller(high, low) > 0.99


def test_pairs_are_ranked_by_themselves_and_enumerated_together():
    """Every way to call as many values of each pair ours, in every combination."""
    scipy = pytest.importorskip("scipy.stats")
    pairs = [([0.1, 0.3, 0.3], [0.3, 0.5, 0.2]), ([7.0, 9.0], [8.0, 9.5])]
    ranks = [(scipy.rankdata([*x, *y]), len(x)) for x, y in pairs]
    each = [[sum(all_[list(own)]) for own in itertools.combinations(range(len(all_)), n)] for all_, n in ranks]
    seen = sum(sum(all_[:n]) for all_, n in ranks)
    expected = np.mean([a + b <= seen for a in each[0] for b in each[1]])
    assert st.smaller_together(pairs) == pytest.approx(expected)
    assert st.smaller_together(pairs[:1]) == pytest.approx(st.smaller(*pairs[0]))


def test_the_trend_test_against_every_permutation():
    groups = [[5.0, 4.0], [3.0, 4.5], [1.0, 2.0]]

    def statistic(split):
        pairs = itertools.combinations(range(3), 2)
        return sum(np.sign(a - b) for i, j in pairs for a in split[i] for b in split[j])

    values = [v for g in groups for v in g]
    every = [statistic([p[:2], p[2:4], p[4:]]) for p in itertools.permutations(values)]
    exact = np.mean([s >= statistic(groups) for s in every])
    assert st.falling(groups) == pytest.approx(exact, abs=0.005)
    assert st.falling(groups[::-1]) > 0.9


def test_the_sign_test_and_holm_s_correction():
    assert st.at_least(9, 10) == pytest.approx(11 / 1024)
    assert st.at_least(0, 0) == 1.0
    assert st.at_least(0, 4, 1 / 3) == pytest.approx(1.0)
    assert st.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert st.holm([]) == []


def test_the_bootstrap_interval_covers_and_excludes():
    low, high = st.difference_interval([1.0, 1.1, 0.9, 1.05, 0.95], [2.0, 2.1, 1.9, 2.05, 1.95])
    assert -1.2 <= low <= -1.0 <= high <= -0.8
    same = st.difference_interval([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert same[0] <= 0 <= same[1]


def test_kendall_of_a_constant_is_not_a_number():
    assert math.isnan(st.kendall([1, 1], [1, 2]))
