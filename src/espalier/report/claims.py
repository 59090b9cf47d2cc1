"""The paper's claims on unit selection, each called confirmed, refuted or undecided by a stated test on run files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from espalier.picture.labels import power
from espalier.report.runs import Run, Section
from espalier.report.statistics import difference_interval, falling, holm, kendall, median, sign_test, smaller
from espalier.report.unit_tables import batches, update_time

LEVEL = 0.05
FROM_SHARE = 0.20  # "from 25% usage up": the paper's smallest such setting is 26%, and medians vary
ABOUT = 1.25  # "about the same time": within a quarter

Runs = list[Run]

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"


@dataclass(frozen=True)
class Verdict:
    """test: what was tested and how; found: the numbers; n: runs that were looked at."""

    claim: str
    words: str
    verdict: str
    test: str
    found: str
    n: int


def verdicts(section: Section) -> list[Verdict]:
    """C1 to C5, C9 and C10; what lacks runs is undecided and says so."""
    return [judge(section) for judge in (size, fixed, grown, layers, dropout, time, once)]


def size(section: Section) -> Verdict:
    words = "The penalty controls the size, monotonically."
    test = "medians of the unit share never rise with the penalty, and Jonckheere-Terpstra (permutation) p < 0.05"
    penalties = sorted({r.setting for r in section.of("search")})
    groups = [[r.unit_share for r in section.of("search", p)] for p in penalties]
    n = sum(map(len, groups))
    if len(groups) < 3 or min(map(len, groups)) < 2:
        return lacking("C1", words, test, "three penalties with two runs each", n)
    middles = [median(g) for g in groups]
    rising = [b > a for a, b in pairwise(middles)]
    p = falling(groups)
    tau = kendall([p for p, g in zip(penalties, groups) for _ in g], [s for g in groups for s in g])
    against = min(smaller(a, b) for a, b in pairwise(groups))  # a weaker penalty with a smaller network
    good = not any(rising) and p < LEVEL
    verdict = CONFIRMED if good else REFUTED if any(rising) and against < LEVEL / len(rising) else UNDECIDED
    pairs = [f"{power(q)}: {m:.1%}" for q, m in zip(penalties, middles)]
    found = f"median shares {', '.join(pairs)}; p = {p:.2g}, Kendall's tau = {tau:.2f}"
    return Verdict("C1", words, verdict, test, found, n)


def fixed(section: Section) -> Verdict:
    words = "Unit selection beats the fixed structure from 25% of the units up, and even the full network."
    test = (
        f"at every penalty with a median unit share of at least {FROM_SHARE:.0%}: exact one-sided Mann-Whitney tests "
        "that errors are below those of fixed networks of equal unit share (each trial's errors interpolated between "
        "sizes) and below those of the full network; p < 0.05 after Holm's correction"
    )
    full, at = section.of("fixed", 1.0), [p for p in section.settings("search") if _share(section, p) >= FROM_SHARE]
    used = [r for p in at for r in section.of("search", p)] + section.of("fixed")
    if not at or not full or len(section.settings("fixed")) < 2:
        return lacking("C2", words, test, "such penalties, and fixed networks of two sizes or more", len(used))
    names, better, worse, parts = list[str](), list[float](), list[float](), list[str]()
    for p in at:
        ours = [r.error for r in section.of("search", p)]
        rivals = {"full": [r.error for r in full]}
        if _share(section, p) < 1.0:  # else the fixed network of equal share is the full one
            rivals["fixed"] = interpolated(section, _share(section, p))
        for name, theirs in rivals.items():
            names.append(f"{power(p)} against {name}")
            better.append(smaller(ours, theirs))
            worse.append(smaller(theirs, ours))
            gap = difference_interval(ours, theirs)
            parts.append(f"{names[-1]} {points(median(ours) - median(theirs))} [{points(gap[0])}, {points(gap[1])}]")
    won, lost = [p < LEVEL for p in holm(better)], [p < LEVEL for p in holm(worse)]
    verdict = CONFIRMED if all(won) else REFUTED if any(lost) else UNDECIDED
    found = f"better in {sum(won)} of {len(won)} comparisons, worse in {sum(lost)}; points of error with 95% bootstrap "
    found += f"intervals: {'; '.join(parts)}. " + _by_weights(section, at)
    return Verdict("C2", words, verdict, test, found, len(used))


def _by_weights(section: Section, at: list[float]) -> str:
    """The same against fixed networks of equal weight share: uniform layers hold fewer weights at equal units."""
    wins, losses = 0, 0
    for p in at:
        runs = section.of("search", p)
        theirs = interpolated(section, median([r.weight_share for r in runs]), weights=True)
        ours = [r.error for r in runs]
        wins, losses = wins + (smaller(ours, theirs) < LEVEL), losses + (smaller(theirs, ours) < LEVEL)
    return f"At equal weight share instead: better at {wins} of {len(at)} penalties, worse at {losses} (p < 0.05 each)"


def grown(section: Section) -> Verdict:
    words = "With a negative penalty every unit is kept, and the error still falls below plain training."
    test = "every run with a negative penalty keeps every unit; exact one-sided Mann-Whitney p < 0.05 (Holm) of its"
    test += " errors against the full network's, at each such penalty"
    full = [r.error for r in section.of("fixed", 1.0)]
    at = [p for p in section.settings("search") if p < 0]
    runs = [r for p in at for r in section.of("search", p)]
    if not full or not at:
        return lacking("C3", words, test, "negative penalties and the full network", len(runs) + len(full))
    errors = {p: [r.error for r in section.of("search", p)] for p in at}
    better = holm([smaller(e, full) for e in errors.values()])
    worse = holm([smaller(full, e) for e in errors.values()])
    kept = min(r.unit_share for r in runs)
    whole = kept == 1.0
    verdict = UNDECIDED
    if whole and max(better) < LEVEL:
        verdict = CONFIRMED
    elif min(worse) < LEVEL or median([r.unit_share for r in runs]) < 1.0:
        verdict = REFUTED
    parts = [f"{power(p)}: median error {median(e):.2%}, p = {q:.2g}" for (p, e), q in zip(errors.items(), better)]
    found = f"smallest unit share {kept:.2%}; {'; '.join(parts)}; full network {median(full):.2%}"
    return Verdict("C3", words, verdict, test, found, len(runs) + len(full))


def layers(section: Section) -> Verdict:
    words = "Units go first from the second and third layer."
    test = "in runs that keep between 2% and 98% of the units the first layer keeps a larger share than each later one;"
    test += " sign test over runs p < 0.05, and so in the medians at every penalty"
    at = [p for p in section.settings("search") if 0.02 < _share(section, p) < 0.98]
    runs = [r for p in at for r in section.of("search", p) if 0.02 < r.unit_share < 0.98]
    if len(runs) < 5 or len(runs[0].units) < 2:
        return lacking("C4", words, test, "five such runs", len(runs))

    def kept(some: list[Run]) -> list[float]:
        return [median([r.units[i] / w for r in some]) for i, w in enumerate(section.widths[1:-1])]

    wins = sum(kept([r])[0] > max(kept([r])[1:]) for r in runs)
    losses = sum(kept([r])[0] < max(kept([r])[1:]) for r in runs)
    shares = {p: kept(section.of("search", p)) for p in at}
    everywhere = all(s[0] > max(s[1:]) for s in shares.values())
    verdict = UNDECIDED
    if everywhere and sign_test(wins, wins + losses) < LEVEL:
        verdict = CONFIRMED
    elif sign_test(losses, wins + losses) < LEVEL:
        verdict = REFUTED
    parts = [f"{power(p)}: {' / '.join(f'{s:.0%}' for s in found)}" for p, found in shares.items()]
    found = f"in {wins} of {len(runs)} runs, p = {sign_test(wins, wins + losses):.2g}; median shares {'; '.join(parts)}"
    return Verdict("C4", words, verdict, test, found, len(runs))


def dropout(section: Section) -> Verdict:
    words = "Dropout helps too, but cannot control the size."
    test = (
        "exact one-sided Mann-Whitney p < 0.05 that dropout's errors are below the full network's; all units are kept"
    )
    ours, full = section.of("dropout"), [r.error for r in section.of("fixed", 1.0)]
    n = len(ours) + len(full)
    if not ours or not full:
        return lacking("C5", words, test, "dropout and the full network", n)
    errors = [r.error for r in ours]
    p, q, whole = smaller(errors, full), smaller(full, errors), all(r.unit_share == 1.0 for r in ours)
    verdict = CONFIRMED if p < LEVEL and whole else REFUTED if q < LEVEL or not whole else UNDECIDED
    low, high = difference_interval(errors, full)
    found = f"median error {median(errors):.2%} against {median(full):.2%}, difference in points "
    found += f"[{points(low)}, {points(high)}]"
    return Verdict("C5", words, verdict, test, f"{found}, p = {p:.2g}; unit share 100% by construction", n)


def time(section: Section) -> Verdict:
    words = "The search costs about as much time as training the fixed network."
    test = "time of one update of one run, search over fixed, in batches of as many runs of the same revision on the"
    test += f" same hardware, is at most {ABOUT}"
    pairs = timed_pairs(section, ("search",), ("fixed",))
    pairs = [(ours, theirs) for ours, theirs in pairs if at_once(ours) == at_once(theirs)]
    if not pairs:
        return lacking("C9", words, test, "such batches", 0)
    ours, theirs = min(pairs, key=lambda pair: abs(_mean_share(pair[0]) - _mean_share(pair[1])))
    verdict = CONFIRMED if time_ratio(ours, theirs) <= ABOUT else REFUTED
    return Verdict("C9", words, verdict, test, times_told(ours, theirs), len(ours) + len(theirs))


def timed_pairs(section: Section, variants: tuple[str, ...], rivals: tuple[str, ...]) -> list[tuple[Runs, Runs]]:
    """Batches of the search, in these variants, each beside those of the rivals of its revision on its hardware."""
    return [
        (ours, theirs)
        for ours in batches(section)
        for theirs in batches(section)
        if ours[0].variant in variants and any(r.method in rivals for r in theirs) and _made(ours) == _made(theirs)
    ]


def _made(runs: Runs) -> tuple[Any, ...]:
    return runs[0].hardware, runs[0].story.get("commit")


def at_once(runs: Runs) -> int:
    return int(runs[0].story["runs_in_batch"])


def time_ratio(ours: Runs, theirs: Runs) -> float:
    return update_time(ours[0].story) / update_time(theirs[0].story)


def times_told(ours: Runs, theirs: Runs) -> str:
    what = " and ".join(dict.fromkeys(r.method for r in theirs))
    many = "as many" if at_once(ours) == at_once(theirs) else f"{at_once(theirs)}"
    told = f"{1e6 * update_time(ours[0].story):.1f} against {1e6 * update_time(theirs[0].story):.1f} us"
    told += f", ratio {time_ratio(ours, theirs):.2f} (batches of {at_once(ours)} {ours[0].variant} runs and {many} of"
    return f"{told} {what}; {ours[0].hardware})"


def _mean_share(runs: Runs) -> float:
    return sum(r.weight_share for r in runs) / len(runs)


def once(section: Section) -> Verdict:
    words = "One training, no retraining."
    test = "every search run's error is that of its last update under its own structure, after as many updates as the"
    test += " others made, with no structure fixed before the end"
    runs = section.of("search")
    if not runs:
        return lacking("C10", words, test, "search runs", 0)
    budget = max(r.story["result"]["updates"] for r in section.runs)
    plain = [
        r
        for r in runs
        if r.story["result"]["updates"] == budget == r.curve[-1]["update"] and not r.story["settings"]["settle"]
    ]
    drawn = [r.error - r.stochastic_error for r in runs if r.stochastic_error is not None]
    found = f"{len(plain)} of {len(runs)} runs, {budget:,} updates each"
    if drawn:
        found += f"; error of the one structure over that of 20 drawn ones: median {points(median(drawn))} points"
    return Verdict("C10", words, CONFIRMED if len(plain) == len(runs) else REFUTED, test, found, len(runs))


def interpolated(section: Section, share: float, weights: bool = False) -> list[float]:
    """The error of a fixed network of this share, for each trial: linear between the sizes it was run at."""
    measure: Callable[[Run], float] = (lambda r: r.weight_share) if weights else (lambda r: r.unit_share)
    errors = list[float]()
    for seed in sorted({r.seed for r in section.of("fixed")}):
        line = sorted((measure(r), r.error) for r in section.of("fixed") if r.seed == seed)
        errors.append(float(np.interp(share, [s for s, _ in line], [e for _, e in line])))
    return errors


def _share(section: Section, penalty: float) -> float:
    return median([r.unit_share for r in section.of("search", penalty)])


def points(difference: float) -> str:
    """A difference of two shares in percentage points."""
    return f"{100 * difference:+.2f}"


def lacking(claim: str, words: str, test: str, what: str, n: int) -> Verdict:
    """Undecided for want of runs."""
    return Verdict(claim, words, UNDECIDED, test, f"not enough runs: this needs {what}", n)
