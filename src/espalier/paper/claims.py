"""The paper's claims, each called confirmed, refuted or undecided by a stated test on run files.

One trial of each setting shows no spread between trainings: what compares errors of connection selection is then
undecided, and the differences are told with the sampling error of the test images alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from espalier.paper.paper_tables import (
    MACS,
    batches,
    counts,
    sampling_error,
    searches,
    stochastic_errors,
    update_time,
    widths,
)
from espalier.picture import power
from espalier.report.run_reader import Run
from espalier.report.significance import (
    at_least,
    difference_interval,
    falling,
    holm,
    kendall,
    median,
    smaller,
    smaller_together,
)
from espalier.report.study_reader import Section, middle, numbers

LEVEL = 0.05
FROM_SHARE = 0.20  # "from 25% usage up": the paper's smallest such setting is 26%, and medians vary
ABOUT = 1.25  # "about the same time": within a quarter
CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"
RANDOM = ("random", "full")
LOW, HIGH = (0.10, 0.50), (0.60, 0.99)  # "15 to 40%" and "above 60%": the paper's settings there are 16 to 42, 68 to 80
FORTY = (0.35, 0.50)  # "at 40%": the paper's setting is 42.3%
ALIKE = 0.005  # "level": within half a point of error
RISE = 0.01  # "less than 1%"
WEAK, STRONG = (0.0, 2**-6, 2**-5), (2**-4, 2**-3, 2**-2)
APART = 0.15  # of the MACs: what two batches compute may differ by so much, and still be alike
FEW = 3  # trials on either side below which no interval is asked for
TOO_FEW = "too few trials to decide (+-: the standard error by the number of test images alone)"
Runs = list[Run]
Errors = tuple[list[float], list[float]]  # ours and theirs
Pair = tuple[Runs, Runs]  # a batch of the search and one of its rivals


@dataclass(frozen=True)
class Verdict:
    """test: what was tested and how; evidence: the numbers; n: runs that were looked at."""

    claim: str
    words: str
    verdict: str
    test: str
    evidence: str
    n: int


def on_units(section: Section) -> list[Verdict]:
    """C1 to C5, C9 and C10; what lacks runs is undecided and says so."""
    return [claim(section) for claim in (size, fixed, grown, layers, dropout, unit_time, once)]


def on_connections(section: Section) -> list[Verdict]:
    """C6 to C9, likewise."""
    return [claim(section) for claim in (random, forty, blocks, connection_time)]


def lacking(claim: str, words: str, test: str, what: str, n: int) -> Verdict:
    """Undecided for want of runs."""
    return Verdict(claim, words, UNDECIDED, test, f"not enough runs: this needs {what}", n)


def decided(confirmed: bool, refuted: bool) -> str:
    return CONFIRMED if confirmed else REFUTED if refuted else UNDECIDED


def points(difference: float) -> str:
    """A difference of two shares in percentage points."""
    return f"{100 * difference:+.2f}"


def gap(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The interval of the difference of medians, in points."""
    low, high = difference_interval(ours, theirs)
    return f"[{points(low)}, {points(high)}]"


def both_ways(pairs: Iterable[Errors]) -> tuple[list[float], list[float]]:
    """Holm's p-values that ours are below theirs, and that theirs are below ours, of each pair."""
    every = list(pairs)
    return holm([smaller(x, y) for x, y in every]), holm([smaller(y, x) for x, y in every])


def interpolated(section: Section, share: float, name: str, methods: Sequence[str] = ("fixed",)) -> list[float]:
    """The error of a network of this share that was not searched for, for each trial: linear between its shares.

    name: of the share. methods: whose runs are the points of the line; of several, trials are those of the first, and
    a trial without points on both sides (or near) has no error there.
    """
    errors = list[float]()
    for seed in sorted({run.seed or 0 for run in section.of(methods[0])}):
        runs = [run for method in methods for run in section.of(method) if run.seed == seed]
        line = sorted((run.number(name), run.number("error")) for run in runs)
        if len(methods) == 1 or (len(line) > 1 and line[0][0] - 0.03 <= share <= line[-1][0]):
            errors.append(float(np.interp(share, [s for s, _ in line], [e for _, e in line])))
    return errors


def size(section: Section) -> Verdict:
    words = "The penalty controls the size, monotonically."
    test = "medians of the unit share never rise with the penalty, and Jonckheere-Terpstra (permutation) p < 0.05"
    shares = {penalty: numbers(runs, "unit_share") for penalty, runs in sorted(searches(section).items())}
    groups = list(shares.values())
    n = sum(map(len, groups))
    if len(groups) < 3 or min(map(len, groups)) < 2:
        return lacking("C1", words, test, "three penalties with two runs each", n)
    middles = {penalty: median(group) for penalty, group in shares.items()}
    rising = [b > a for a, b in pairwise(middles.values())]
    p = falling(groups)
    tau = kendall([q for q, group in shares.items() for _ in group], [share for group in groups for share in group])
    against = min(smaller(a, b) for a, b in pairwise(groups))  # a weaker penalty with a smaller network
    verdict = decided(not any(rising) and p < LEVEL, any(rising) and against < LEVEL / len(rising))
    parts = ", ".join(f"{power(q)}: {share:.1%}" for q, share in middles.items())
    return Verdict("C1", words, verdict, test, f"median shares {parts}; p = {p:.2g}, Kendall's tau = {tau:.2f}", n)


def fixed(section: Section) -> Verdict:
    words = "Unit selection beats the fixed structure from 25% of the units up, and even the full network."
    test = (
        f"at every penalty with a median unit share of at least {FROM_SHARE:.0%}: exact one-sided Mann-Whitney tests "
        "that errors are below those of fixed networks of equal unit share (each trial's errors interpolated between "
        "sizes) and below those of the full network; p < 0.05 after Holm's correction"
    )
    full = numbers(section.of("fixed", 1.0), "error")
    at = {p: runs for p, runs in searches(section).items() if middle(runs, "unit_share") >= FROM_SHARE}
    n = sum(map(len, at.values())) + len(section.of("fixed"))
    if not at or not full or len(section.of_each(["fixed"])) < 2:
        return lacking("C2", words, test, "such penalties, and fixed networks of two sizes or more", n)
    pairs, parts = list[Errors](), list[str]()
    for p, runs in at.items():
        ours, share, rivals = numbers(runs, "error"), middle(runs, "unit_share"), {"full": full}
        if share < 1.0:  # else the fixed network of equal share is the full one
            rivals["fixed"] = interpolated(section, share, "unit_share")
        for name, theirs in rivals.items():
            pairs.append((ours, theirs))
            parts.append(f"{power(p)} against {name} {points(median(ours) - median(theirs))} {gap(ours, theirs)}")
    won, lost = ([p < LEVEL for p in ps] for ps in both_ways(pairs))
    evidence = (
        f"better in {sum(won)} of {len(won)} comparisons, worse in {sum(lost)}; points of error with 95% bootstrap "
    )
    evidence += f"intervals: {'; '.join(parts)}. " + _by_weights(section, at)
    return Verdict("C2", words, decided(all(won), any(lost)), test, evidence, n)


def _by_weights(section: Section, at: dict[float, Runs]) -> str:
    """The same against fixed networks of equal weight share: uniform layers hold fewer weights at equal units."""
    pairs = [
        (numbers(runs, "error"), interpolated(section, middle(runs, "weight_share"), "weight_share"))
        for runs in at.values()
    ]
    wins = sum(smaller(ours, theirs) < LEVEL for ours, theirs in pairs)
    losses = sum(smaller(theirs, ours) < LEVEL for ours, theirs in pairs)
    return f"At equal weight share instead: better at {wins} of {len(at)} penalties, worse at {losses} (p < 0.05 each)"


def grown(section: Section) -> Verdict:
    words = "With a negative penalty every unit is kept, and the error still falls below plain training."
    test = "every run with a negative penalty keeps every unit; exact one-sided Mann-Whitney p < 0.05 (Holm) of its"
    test += " errors against the full network's, at each such penalty"
    full = numbers(section.of("fixed", 1.0), "error")
    errors = {p: numbers(runs, "error") for p, runs in searches(section).items() if p < 0}
    shares = [share for p in errors for share in numbers(section.of("search", p), "unit_share")]
    n = len(shares) + len(full)
    if not full or not errors:
        return lacking("C3", words, test, "negative penalties and the full network", n)
    better, worse = both_ways((e, full) for e in errors.values())
    good = min(shares) == 1.0 and max(better) < LEVEL
    verdict = decided(good, min(worse) < LEVEL or median(shares) < 1.0)
    parts = [f"{power(p)}: median error {median(e):.2%}, p = {q:.2g}" for (p, e), q in zip(errors.items(), better)]
    evidence = f"smallest unit share {min(shares):.2%}; {'; '.join(parts)}; full network {median(full):.2%}"
    return Verdict("C3", words, verdict, test, evidence, n)


def layers(section: Section) -> Verdict:
    words = "Units go first from the second and third layer."
    test = "in runs that keep between 2% and 98% of the units the first layer keeps a larger share than each later one;"
    test += " sign test over runs p < 0.05, and so in the medians at every penalty"
    at = {p: runs for p, runs in searches(section).items() if 0.02 < middle(runs, "unit_share") < 0.98}
    runs = [r for some in at.values() for r in some if 0.02 < r.number("unit_share") < 0.98]
    if len(runs) < 5 or len(runs[0].result["units"]) < 2:
        return lacking("C4", words, test, "five such runs", len(runs))

    def kept(some: Runs) -> list[float]:
        return [median([r.result["units"][i] / w for r in some]) for i, w in enumerate(widths(section)[1:-1])]

    wins = sum(kept([r])[0] > max(kept([r])[1:]) for r in runs)
    losses = sum(kept([r])[0] < max(kept([r])[1:]) for r in runs)
    shares = {p: kept(some) for p, some in at.items()}
    everywhere = all(s[0] > max(s[1:]) for s in shares.values())
    p = at_least(wins, wins + losses)
    verdict = decided(everywhere and p < LEVEL, at_least(losses, wins + losses) < LEVEL)
    parts = "; ".join(f"{power(q)}: {' / '.join(f'{s:.0%}' for s in some)}" for q, some in shares.items())
    evidence = f"in {wins} of {len(runs)} runs, p = {p:.2g}; median shares {parts}"
    return Verdict("C4", words, verdict, test, evidence, len(runs))


def dropout(section: Section) -> Verdict:
    words = "Dropout helps too, but cannot control the size."
    test = (
        "exact one-sided Mann-Whitney p < 0.05 that dropout's errors are below the full network's; all units are kept"
    )
    ours, full = section.of("dropout"), numbers(section.of("fixed", 1.0), "error")
    n = len(ours) + len(full)
    if not ours or not full:
        return lacking("C5", words, test, "dropout and the full network", n)
    errors, all_kept = numbers(ours, "error"), set(numbers(ours, "unit_share")) == {1.0}
    p = smaller(errors, full)
    verdict = decided(p < LEVEL and all_kept, smaller(full, errors) < LEVEL or not all_kept)
    evidence = f"median error {median(errors):.2%} against {median(full):.2%}, difference in points {gap(errors, full)}"
    return Verdict("C5", words, verdict, test, f"{evidence}, p = {p:.2g}; unit share 100% by construction", n)


def unit_time(section: Section) -> Verdict:
    words = "The search costs about as much time as training the fixed network."
    test = "time of one update of one run, search over fixed, in batches of as many runs of the same revision on the"
    test += f" same hardware, is at most {ABOUT}"
    pairs = timed_pairs(section, ("search",), ("fixed",))
    pairs = [(ours, theirs) for ours, theirs in pairs if at_once(ours) == at_once(theirs)]
    if not pairs:
        return lacking("C9", words, test, "such batches", 0)

    def mean_share(runs: Runs) -> float:
        return sum(numbers(runs, "weight_share")) / len(runs)

    ours, theirs = min(pairs, key=lambda pair: abs(mean_share(pair[0]) - mean_share(pair[1])))
    verdict = CONFIRMED if time_ratio(ours, theirs) <= ABOUT else REFUTED
    return Verdict("C9", words, verdict, test, times_in_words(ours, theirs), len(ours) + len(theirs))


def timed_pairs(section: Section, variants: tuple[str, ...], rivals: tuple[str, ...]) -> list[Pair]:
    """Batches of the search, in these variants, each beside those of the rivals of its revision on its hardware."""

    def origin(runs: Runs) -> tuple[str, str]:
        return runs[0].machine, runs[0].commit

    return [
        (ours, theirs)
        for ours in batches(section)
        for theirs in batches(section)
        if ours[0].variant in variants and any(r.method in rivals for r in theirs) and origin(ours) == origin(theirs)
    ]


def at_once(runs: Runs) -> int:
    return int(runs[0].record["runs_in_batch"])


def time_ratio(ours: Runs, theirs: Runs) -> float:
    return update_time(ours[0]) / update_time(theirs[0])


def times_in_words(ours: Runs, theirs: Runs) -> str:
    rivals = " and ".join(dict.fromkeys(r.method for r in theirs))
    many = "as many" if at_once(ours) == at_once(theirs) else f"{at_once(theirs)}"
    text = f"{1e6 * update_time(ours[0]):.1f} against {1e6 * update_time(theirs[0]):.1f} us"
    text += f", ratio {time_ratio(ours, theirs):.2f} (batches of {at_once(ours)} {ours[0].variant} runs and {many} of"
    return f"{text} {rivals}; {ours[0].machine})"


def once(section: Section) -> Verdict:
    words = "One training, no retraining."
    test = "every search run's error is that of its last update under its own structure, after as many updates as the"
    test += " others made, with no structure fixed before the end"
    runs = section.of("search")
    if not runs:
        return lacking("C10", words, test, "search runs", 0)
    budget = max(r.updates or 0 for r in section.members)
    once_trained = [r for r in runs if r.updates == budget == r.curve[-1]["update"] and not r.settings["settle"]]
    evidence = f"{len(once_trained)} of {len(runs)} runs, {budget:,} updates each"
    if stochastic_errors(runs):
        rises = [r.number("error") - drawn for r in runs for drawn in stochastic_errors([r])]
        evidence += f"; error of the one structure over that of 20 drawn ones: median {points(median(rises))} points"
    return Verdict("C10", words, decided(len(once_trained) == len(runs), True), test, evidence, len(runs))


# ---- connection selection --------------------------------------------------------------------------------------------


def random(section: Section) -> Verdict:
    words = "Connection selection beats random selection at 15 to 40% of the weights, and is level above 60%."
    test = (
        f"penalties with a median weight share of {LOW[0]:.0%} to {LOW[1]:.0%}: the median error is below that of "
        "random selection of equal weight share (each trial's errors interpolated between shares) at each of them, and "
        "an exact one-sided rank test over all of them, each ranked by itself and taken as independent, has p < 0.05; "
        f"above {HIGH[0]:.0%}: the 95% bootstrap interval of the difference of medians within {100 * ALIKE:g} points; "
        f"penalties with {FEW} trials or more of each, else undecided; refuted where this test, or one penalty's "
        "after Holm's correction, says the opposite, or an interval lies outside"
    )
    shares = {p: middle(runs, "weight_share") for p, runs in searches(section).items()}
    low, high = ([p for p, share in shares.items() if a <= share <= b] for a, b in (LOW, HIGH))
    ours = {p: section.of("search", p) for p in [*low, *high]}
    theirs = {p: interpolated(section, shares[p], "weight_share", RANDOM) for p in ours}
    n = sum(map(len, ours.values())) + len(section.of("random"))
    if not low or not high or not all(theirs.values()):
        return lacking("C6", words, test, "such penalties, and random selections of two shares or more beside them", n)
    parts = [f"{power(p)} ({shares[p]:.0%}) {_gap(ours[p], theirs[p])}" for p in ours]
    evidence = "error of the search minus random selection's, points: " + "; ".join(parts)
    evidence += _shipped(section, ours)
    low, high = ([p for p in some if min(len(ours[p]), len(theirs[p])) >= FEW] for some in (low, high))
    if not low or not high:
        return Verdict("C6", words, UNDECIDED, test, f"{TOO_FEW}. {evidence}", n)
    errors = {p: numbers(runs, "error") for p, runs in ours.items()}
    below = [median(errors[p]) < median(theirs[p]) for p in low]
    better = smaller_together([(errors[p], theirs[p]) for p in low])
    worse = [
        smaller_together([(theirs[p], errors[p]) for p in low]),
        *both_ways((errors[p], theirs[p]) for p in low)[1],
    ]
    gaps = [difference_interval(errors[p], theirs[p]) for p in high]
    alike = all(a >= -ALIKE and b <= ALIKE for a, b in gaps)
    apart = any(a > ALIKE or b < -ALIKE for a, b in gaps)
    verdict = decided(all(below) and better < LEVEL and alike, min(worse) < LEVEL or apart)
    evidence += f". Below 50%: better at {sum(below)} of {len(low)} penalties with {FEW} trials, p = {better:.2g}; "
    level = "level" if alike else "not level" if apart else "not shown to be level"
    evidence += f"above 60%: {level} at {' and '.join(map(power, high))}"
    return Verdict("C6", words, verdict, test, evidence, n)


def forty(section: Section) -> Verdict:
    words = "At 40% of the weights the error rises by less than 1%."
    test = (
        f"the penalty whose median weight share is nearest to 40% (and in {FORTY[0]:.0%} to {FORTY[1]:.0%}) against "
        "the whole network: the 95% bootstrap interval of the difference of median errors is below 1 point (confirmed) "
        f"or above it (refuted); {FEW} trials or more of each, else undecided"
    )
    full = numbers(section.of("full"), "error")
    shares = {p: middle(runs, "weight_share") for p, runs in searches(section).items()}
    near = [p for p, share in shares.items() if FORTY[0] <= share <= FORTY[1]]
    if not near or not full:
        return lacking("C7", words, test, "a penalty that ends there, and the whole network", len(full))
    at = min(near, key=lambda p: abs(shares[p] - 0.4))
    runs = section.of("search", at)
    n = len(runs) + len(full)
    evidence = f"{power(at)} at {shares[at]:.1%} of the weights: {_gap(runs, full)} points against the whole "
    evidence += f"network's {median(full):.2%}"
    if min(len(runs), len(full)) < FEW:
        return Verdict("C7", words, UNDECIDED, test, f"{TOO_FEW}. {evidence}", n)
    low, high = difference_interval(numbers(runs, "error"), full)
    return Verdict("C7", words, decided(high < RISE, low > RISE), test, evidence, n)


def blocks(section: Section) -> Verdict:
    words = (
        "For penalties 0 to 2^-5 connections go first from blocks 1 and 2; at stronger ones the second block loses most"
    )
    words += " and becomes wide."
    test = (
        "at 0, 2^-6 and 2^-5 block 3 keeps the most connections, at 2^-4, 2^-3 and 2^-2 block 2 the fewest: in the "
        "medians of each, and over runs more often than by chance (binomial with 1/3, runs taken as independent) "
        "p < 0.05 for both; and at the stronger ones the longest path through block 2 is, in the median, the shortest "
        "of the three; refuted where one of the two happens less often than by chance, p < 0.05"
    )
    weak, strong = ([p for p in group if section.of("search", p)] for group in (WEAK, STRONG))
    runs = [[r for p in group for r in section.of("search", p)] for group in (weak, strong)]
    n = len(runs[0]) + len(runs[1])
    if not weak or not strong:
        return lacking("C8", words, test, "penalties of both kinds", n)
    last = [_strictly(r.result["connections"], 2, most=True) for r in runs[0]]
    second = [_strictly(r.result["connections"], 1, most=False) for r in runs[1]]
    medians = [counts(section.of("search", p), "connections") for p in [*weak, *strong]]
    everywhere = all(_strictly(m, 2, most=True) for m in medians[: len(weak)])
    everywhere &= all(_strictly(m, 1, most=False) for m in medians[len(weak) :])
    chances = [at_least(sum(hits), len(hits), 1 / 3) for hits in (last, second)]
    against = [1.0 - at_least(sum(hits) + 1, len(hits), 1 / 3) for hits in (last, second)]
    paths = [median([(r.result["canonical"]["block_depths"][i] or 0) for r in runs[1]]) for i in range(3)]
    wide = _strictly(paths, 1, most=False)
    verdict = decided(everywhere and wide and max(chances) < LEVEL, min(against) < LEVEL)
    kept = [f"{power(p)}: {' / '.join(f'{k:g}' for k in m)}" for p, m in zip([*weak, *strong], medians)]
    evidence = f"block 3 keeps most in {sum(last)} of {len(last)} runs (p = {chances[0]:.2g}), block 2 fewest in "
    evidence += f"{sum(second)} of {len(second)} (p = {chances[1]:.2g}); longest paths at the stronger penalties "
    evidence += f"{' / '.join(f'{p:g}' for p in paths)}; connections {'; '.join(kept)}"
    return Verdict("C8", words, verdict, test, evidence, n)


def connection_time(section: Section) -> Verdict:
    """Closed gates save time, and so do more runs at once: where two batches are not alike, one has the easier part."""
    words = "The search costs about as much time as training the fixed network."
    test = (
        "time of one update of one run, search (whatever its cost counts) over random selection or the whole network, "
        "the same revision on the same hardware, is at most "
        f"{ABOUT}: in batches of as many runs, of which the open shares of the MACs (means over the training) are at "
        f"most {100 * APART:g} points apart; or, confirmed only, in batches where the search has the harder part, "
        "fewer runs at once or more MACs open, and refuted only, where it has the easier part"
    )
    every = timed_pairs(section, ("search", MACS), ("random", "full"))
    if not every:
        return lacking("C9", words, test, "batches of both", 0)

    def nearest(pairs: list[Pair]) -> Pair | None:
        return min(pairs, key=lambda pair: abs(_gap_open(pair)), default=None)

    harder = [(x, y) for x, y in every if at_once(x) <= at_once(y) and _gap_open((x, y)) >= -APART]
    easier = [(x, y) for x, y in every if at_once(x) >= at_once(y) and _gap_open((x, y)) <= APART]
    alike = nearest([pair for pair in harder if pair in easier])
    held = nearest([pair for pair in harder if time_ratio(*pair) <= ABOUT])
    failed = nearest([pair for pair in easier if time_ratio(*pair) > ABOUT])
    if alike is None and held is not None and failed is not None:
        held = failed = None  # they contradict each other
    decides = alike or held or failed
    pair = decides or nearest(every)
    assert pair is not None
    verdict = UNDECIDED if decides is None else CONFIRMED if time_ratio(*pair) <= ABOUT else REFUTED
    shares = f"open MACs {_open(pair[0]):.0%} and {_open(pair[1]):.0%}"
    evidence = f"{times_in_words(*pair)}; {shares}" + (", not alike" if verdict == UNDECIDED else "")
    return Verdict("C9", words, verdict, test, evidence, len(pair[0]) + len(pair[1]))


def _gap_open(pair: Pair) -> float:
    return _open(pair[0]) - _open(pair[1])


def _open(runs: Runs) -> float:
    """The share of the MACs that a batch computes: of what ships where the network is given, else over its curves."""
    shares = list[float]()
    for run in runs:
        given = run.method != "search"
        curve = [run.number("canonical.mac_share")] if given else [row["MACs kept"] for row in run.curve]
        shares.append(sum(curve) / len(curve))
    return sum(shares) / len(shares)


def _shipped(section: Section, searched: dict[float, Runs]) -> str:
    """The same at equal weight share of what ships: random selections hold more dead parts."""
    name, parts = "canonical.weight_share", list[str]()
    for p, runs in searched.items():
        if theirs := interpolated(section, middle(runs, name), name, RANDOM):
            parts.append(f"{power(p)} {_gap(runs, theirs)}")
    return f". At equal share of the weights that ship instead: {'; '.join(parts)}" if parts else ""


def _gap(runs: Runs, theirs: list[float]) -> str:
    """The difference of medians in points, with its interval, or with the sampling error of the test images."""
    errors = numbers(runs, "error")
    difference = points(median(errors) - median(theirs))
    if min(len(errors), len(theirs)) >= FEW:
        return f"{difference} {gap(errors, theirs)}"
    return f"{difference} +- {100 * sampling_error(runs[0], median(errors), median(theirs)):.2f}"


def _strictly(values: list[float] | list[int], i: int, *, most: bool) -> bool:
    others = [v for k, v in enumerate(values) if k != i]
    return values[i] > max(others) if most else values[i] < min(others)
