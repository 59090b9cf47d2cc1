"""The tables of both studies: Tables 1 and 2 beside the paper's, the trade-off, variants, random draws, MACs, time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from espalier.paper import printed_values
from espalier.paper.sections import (
    batches,
    dataset,
    network,
    searches,
    setting_label,
    settings_of,
    single,
    table,
    update_time,
    updating,
    widths,
)
from espalier.picture.labels import power
from espalier.report.run_reader import Run
from espalier.report.statistics import difference_interval, median, quartiles, smaller
from espalier.report.study_reader import Section, middle, numbers
from espalier.report.tables import COUNT, ERROR, SHARE, Table

BLOCKS = 3
MACS = "search+cost_macs"
SHIPPED = "Shipped: without dead parts"
Rows = list[tuple[Any, ...]]


def unit_tables(section: Section) -> list[Table]:
    """Those there are runs for."""
    first = [units(section)] if section.of("search") else []
    return [*first, unit_trade_off(section), *_variants(section), times(section)]


def connection_tables(section: Section) -> list[Table]:
    first = [connections(section)] if section.of("search") else []
    drawn = [draws(section)] if section.of("random") else []
    at_equal_macs = [macs(section)] if section.of(MACS) else []
    return [*first, connection_trade_off(section), *drawn, *_variants(section), *at_equal_macs, times(section)]


def _variants(section: Section) -> list[Table]:
    return [variants(section)] if any(variant.startswith("search+") for variant in section.variants) else []


def compared(section: Section) -> bool:
    """Whether the paper has numbers for these runs: its networks and data, on the test set."""
    known = {printed_values.NETWORK: "mnist", printed_values.DENSENET: "cifar10"}
    return known.get(network(section)) == dataset(section) and section.error_of == "test set"


def counts(runs: Sequence[Run], name: str) -> list[float]:
    """The medians of "units" by layer, or of "connections" by block."""
    return [median(list(column)) for column in zip(*(run.result[name] for run in runs), strict=True)]


def units(section: Section) -> Table:
    """Table 1: median kept units of each layer under each penalty; the paper's beside, where it has the setting."""
    beside = compared(section)
    columns = [("penalty eps'", ""), ("runs", COUNT), ("unit share", SHARE)]
    columns += [("unit share, paper", SHARE)] if beside else []
    columns += [("weight share", SHARE), *_part_columns("layer", len(widths(section)) - 2, beside)]
    columns += [("further than 15% and 12 units", "")] if beside else []
    rows = Rows()
    for penalty, runs in searches(section).items():
        printed = printed_values.TABLE_1.get(penalty)
        row: list[Any] = [power(penalty), len(runs), middle(runs, "unit_share")]
        row += [printed.share if printed else None] if beside else []
        row += [middle(runs, "weight_share"), *_part_cells(counts(runs, "units"), printed, beside)]
        row += [", ".join(far_cells(runs, penalty))] if beside else []
        rows.append(tuple(row))
    return table(section, "table-1", "Table 1. Units kept by the search (medians over trials)", columns, rows)


def _part_columns(part: str, count: int, beside: bool) -> list[tuple[str, str]]:
    names = [f"{part} {i}" for i in range(1, count + 1)]
    kinds = (("", COUNT), (", paper", COUNT), (", difference", "+g")) if beside else (("", COUNT),)
    return [(name + kind, form) for name in names for kind, form in kinds]


def _part_cells(kept: Sequence[float], printed: printed_values.Printed | None, beside: bool) -> list[Any]:
    if not beside:
        return list(kept)
    theirs = printed.counts if printed else [None] * len(kept)
    return [c for k, p in zip(kept, theirs) for c in (k, p, None if p is None else k - p)]


def far_cells(runs: Sequence[Run], penalty: float) -> list[str]:
    """The layers whose median is further from the paper's than it may be without a reason: 15% and 12 units."""
    printed = printed_values.TABLE_1.get(penalty)
    pairs = zip(counts(runs, "units"), printed.counts, strict=True) if printed else ()
    return [f"layer {i}" for i, (k, p) in enumerate(pairs, 1) if abs(k - p) > max(0.15 * p, 12)]


def connections(section: Section) -> Table:
    """Table 2: median kept connections of each block under each penalty; the paper's beside, where it has them."""
    beside = compared(section)
    columns = [("penalty eps'", ""), ("runs", COUNT), ("weight share", SHARE)]
    columns += [("weight share, paper", SHARE), ("weight share, difference", "+.1%")] if beside else []
    columns += _part_columns("block", BLOCKS, beside)
    columns += [("shipped weight share", SHARE), ("shipped connections", ""), ("depth", COUNT), ("dead layers", COUNT)]
    rows = Rows()
    for penalty, runs in searches(section).items():
        printed = printed_values.TABLE_2.get(penalty)
        share = middle(runs, "weight_share")
        row: list[Any] = [power(penalty), len(runs), share]
        if beside:
            row += [printed.share, share - printed.share] if printed else [None, None]
        row += _part_cells(counts(runs, "connections"), printed, beside)
        blocks = [median([r.result["canonical"]["connections"][i] for r in runs]) for i in range(BLOCKS)]
        dead = median([len(r.result["canonical"]["dead_layers"]) for r in runs])
        row += [middle(runs, "canonical.weight_share"), " / ".join(f"{block:g}" for block in blocks)]
        rows.append((*row, middle(runs, "canonical.depth"), dead))
    caption = f"Table 2. Connections kept by the search ({over(section)})"
    return table(section, "table-2", caption, columns, rows, f"{SHIPPED} (the canonical mask)")


def over(section: Section, several: str = "medians over trials") -> str:
    return "one trial of each" if single(section) else several


def unit_trade_off(section: Section) -> Table:
    columns = (
        ("variant", ""), ("setting", ""), ("runs", COUNT), ("unit share", SHARE), ("weight share", SHARE),
        ("error, median", ERROR), ("error, 25%", ERROR), ("error, 75%", ERROR), ("error, stochastic", ERROR),
    )  # fmt: skip
    rows = Rows()
    for variant, setting, runs in settings_of(section, section.variants):
        low, mid, high = quartiles(numbers(runs, "error"))
        drawn = stochastic_errors(runs)
        shares = middle(runs, "unit_share"), middle(runs, "weight_share")
        errors = mid, low, high, median(drawn) if drawn else None
        rows.append((variant, setting_label(variant, setting), len(runs), *shares, *errors))
    return table(section, "trade-off", "Size against error (Fig. 2a in numbers; shares are medians)", columns, rows)


def stochastic_errors(runs: Sequence[Run]) -> list[float]:
    """Of networks drawn from theta at the end, where they were measured."""
    drawn = [run.result.get("stochastic") for run in runs]
    return [one["test_error"] for one in drawn if one is not None and one["test_error"] is not None]


def connection_trade_off(section: Section) -> Table:
    columns = (
        ("variant", ""), ("setting", ""), ("runs", COUNT), ("weight share", SHARE), ("shipped weight share", SHARE),
        ("shipped MAC share", SHARE), ("depth", COUNT),
    )  # fmt: skip
    quarters = ["error"] if single(section) else ["error, median", "error, 25%", "error, 75%"]
    rows = Rows()
    for variant, setting, runs in settings_of(section, section.variants):
        low, mid, high = quartiles(numbers(runs, "error"))
        names = ("weight_share", "canonical.weight_share", "canonical.mac_share", "canonical.depth")
        cells = [*(middle(runs, name) for name in names), mid, *([] if single(section) else [low, high])]
        rows.append((variant, setting_label(variant, setting), len(runs), *cells))
    caption = f"Size against error (Fig. 2b in numbers; {over(section, 'shares are medians')})"
    return table(section, "trade-off", caption, (*columns, *((name, ERROR) for name in quarters)), rows, SHIPPED)


def variants(section: Section) -> Table:
    """Each variant of the search against the paper's form at the same penalty."""
    columns = (
        ("variant", ""), ("penalty eps'", ""), ("runs", COUNT), ("weight share", SHARE), ("weight share, plain", SHARE),
        ("error", ERROR), ("error, plain", ERROR), ("difference", "+.2%"), ("95% from", "+.2%"), ("95% to", "+.2%"),
        ("p, two-sided", ".3f"),
    )  # fmt: skip
    rows = Rows()
    for variant, penalty, runs in settings_of(section, [v for v in section.variants if v.startswith("search+")]):
        plain = section.of("search", penalty)
        errors, theirs = numbers(runs, "error"), numbers(plain, "error")
        row: list[Any] = [variant, power(penalty), len(runs), middle(runs, "weight_share")]
        row += [middle(plain, "weight_share") if plain else None, median(errors)]
        row += [median(theirs), median(errors) - median(theirs)] if plain else [None] * 2
        if min(len(errors), len(theirs)) > 1:  # one run alone has no spread
            p = min(1.0, 2 * min(smaller(errors, theirs), smaller(theirs, errors)))
            rows.append((*row, *difference_interval(errors, theirs), p))
        else:
            rows.append((*row, *[None] * 3))
    caption = f"Variants of the search against the paper's form at the same penalty ({over(section, 'medians')})"
    words = "Interval: bootstrap of the difference of medians. p: exact Mann-Whitney test"
    return table(section, "variants", caption, columns, rows, words)


def times(section: Section) -> Table:
    """One row for each batch of runs."""
    columns = (
        ("methods", ""), ("runs in the batch", COUNT), ("updates of each", ",d"), ("seconds", ",.1f"),
        ("of these updating", ",.1f"), ("seconds per run", ",.2f"), ("us per update of a run", ",.2f"),
        ("hardware", ""),
    )  # fmt: skip
    rows = Rows()
    for runs in batches(section):
        first, seconds = runs[0], runs[0].record["seconds"]
        methods = ", ".join(dict.fromkeys(r.variant for r in runs))
        row = (methods, first.record["runs_in_batch"], first.result["updates"], seconds["batch"], updating(first))
        rows.append((*row, seconds["per_run"], 1e6 * update_time(first), first.machine))
    return table(section, "time", "Time of the batches", columns, rows)


def draws(section: Section) -> Table:
    """What was drawn until each share of the weights was hit."""
    columns = (
        ("share asked for", SHARE), ("runs", COUNT), ("draws", COUNT), ("of these without a path", SHARE),
        ("weight share", SHARE), ("shipped weight share", SHARE),
    )  # fmt: skip
    rows = Rows()
    for _, share, runs in settings_of(section, ["random"]):
        drawn, pathless = (sum(r.result["drawn"][name] for r in runs) for name in ("draws", "without_path"))
        shares = middle(runs, "weight_share"), middle(runs, "canonical.weight_share")
        rows.append((share, len(runs), drawn, pathless / drawn, *shares))
    return table(section, "random", "Random selections: what was drawn, and what it ships", columns, rows)


def macs(section: Section) -> Table:
    """MACs as the cost against weights as the cost, at equal MACs of what ships."""
    columns = (
        ("penalty eps'", ""), ("runs", COUNT), ("shipped MAC share", SHARE), ("shipped weight share", SHARE),
        ("error", ERROR), ("error with weights as the cost", ERROR), ("at a shipped MAC share of", SHARE),
        ("difference", "+.2%"), ("standard error by the test images", ERROR),
    )  # fmt: skip
    line = sorted(
        (middle(runs, "canonical.mac_share"), middle(runs, "error"))
        for runs in searches(section).values()
        if middle(runs, "canonical.depth")  # 0: no path is left
    )
    rows = Rows()
    for _, penalty, runs in settings_of(section, [MACS]):
        share, error = middle(runs, "canonical.mac_share"), middle(runs, "error")
        row = (power(penalty), len(runs), share, middle(runs, "canonical.weight_share"), error)
        if line and share <= line[-1][0]:
            at = max(share, line[0][0])  # below that the other search shipped nothing: its smallest network is larger
            other = float(np.interp(at, [s for s, _ in line], [e for _, e in line]))
            rows.append((*row, other, at, error - other, sampling_error(runs[0], error, other)))
        else:
            rows.append((*row, *[None] * 4))
    how = f"{over(section)}; errors with weights as the cost interpolated between its penalties"
    caption = f"Error at equal MACs: MACs as the cost against weights as the cost ({how})"
    smallest = "Where the other search shipped no network as small, its smallest stands"
    return table(section, "macs", caption, columns, rows, SHIPPED, smallest)


def sampling_error(run: Run, *errors: float) -> float:
    """The standard error of a difference of errors, by the number of test images alone."""
    return math.sqrt(sum(e * (1 - e) / run.record["examples"]["test"] for e in errors))
