"""The paper's claims on unit selection, each called confirmed, refuted or undecided by a stated test on run files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from espalier.paper.paper_tables import stochastic_errors
from espalier.paper.sections import batches, searches, update_time, widths
from espalier.picture.labels import power
from espalier.report.run_reader import Run
from espalier.report.statistics import at_least, difference_interval, falling, holm, kendall, median, smaller
from espalier.report.study_reader import Section, middle, numbers

LEVEL = 0.05
FROM_SHARE = 0.20  # "from 25% usage up": the paper's smallest such setting is 26%, and medians vary
ABOUT = 1.25  # "about the same time": within a quarter
CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"
Runs = list[Run]


@dataclass(frozen=True)
class Verdict:
    """test: what was tested and how; evidence: the numbers; n: runs that were looked at."""

    claim: str
    words: str
    verdict: str
    test: str
    evidence: str
    n: int


def verdicts(section: Section) -> list[Verdict]:
    """C1 to C5, C9 and C10; what lacks runs is undecided and says so."""
    return [claim(section) for claim in (size, fixed, grown, layers, dropout, time, once)]


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
    if not at or not full or len(section.settings("fixed")) < 2:
        return lacking("C2", words, test, "such penalties, and fixed networks of two sizes or more", n)
    better, worse, parts = list[float](), list[float](), list[str]()
    for p, runs in at.items():
        ours, share, rivals = numbers(runs, "error"), middle(runs, "unit_share"), {"full": full}
        if share < 1.0:  # else the fixed network of equal share is the full one
            rivals["fixed"] = interpolated(section, share)
        for name, theirs in rivals.items():
            better.append(smaller(ours, theirs))
            worse.append(smaller(theirs, ours))
            parts.append(f"{power(p)} against {name} {points(median(ours) - median(theirs))} {gap(ours, theirs)}")
    won, lost = ([p < LEVEL for p in holm(ps)] for ps in (better, worse))
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


def interpolated(section: Section, share: float, name: str = "unit_share") -> list[float]:
    """The error of a fixed network of this share, for each trial: linear between the sizes it was run at."""
    errors = list[float]()
    for seed in sorted({r.seed or 0 for r in section.of("fixed")}):
        line = sorted((r.number(name), r.number("error")) for r in section.of("fixed") if r.seed == seed)
        errors.append(float(np.interp(share, [s for s, _ in line], [e for _, e in line])))
    return errors


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
    better = holm([smaller(e, full) for e in errors.values()])
    worse = holm([smaller(full, e) for e in errors.values()])
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
    errors, whole = numbers(ours, "error"), set(numbers(ours, "unit_share")) == {1.0}
    p = smaller(errors, full)
    verdict = decided(p < LEVEL and whole, smaller(full, errors) < LEVEL or not whole)
    evidence = f"median error {median(errors):.2%} against {median(full):.2%}, difference in points {gap(errors, full)}"
    return Verdict("C5", words, verdict, test, f"{evidence}, p = {p:.2g}; unit share 100% by construction", n)


def time(section: Section) -> Verdict:
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


def timed_pairs(section: Section, variants: tuple[str, ...], rivals: tuple[str, ...]) -> list[tuple[Runs, Runs]]:
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
    whole = [r for r in runs if r.updates == budget == r.curve[-1]["update"] and not r.settings["settle"]]
    evidence = f"{len(whole)} of {len(runs)} runs, {budget:,} updates each"
    if stochastic_errors(runs):
        rises = [r.number("error") - drawn for r in runs for drawn in stochastic_errors([r])]
        evidence += f"; error of the one structure over that of 20 drawn ones: median {points(median(rises))} points"
    return Verdict("C10", words, decided(len(whole) == len(runs), True), test, evidence, len(runs))
