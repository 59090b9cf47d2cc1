"""The tables of the unit-selection study: Table 1 beside the paper's, the trade-off of every variant, and the time."""

from __future__ import annotations

from typing import Any

from espalier.picture.labels import power
from espalier.report import paper_values
from espalier.report.runs import Run, Section
from espalier.report.statistics import difference_interval, median, quartiles, smaller
from espalier.report.table import Table

SHARE, ERROR, COUNT = ".1%", ".2%", "g"


def tables(section: Section) -> list[Table]:
    """Those there are runs for."""
    made = [units(section)] if section.of("search") else []
    made.append(trade_off(section))
    if any(variant.startswith("search+") for variant in section.variants):
        made.append(variants(section))
    return [*made, times(section)]


def compared(section: Section) -> bool:
    """Whether the paper has numbers for these runs: its network, on MNIST, on the test set."""
    return section.dataset == "mnist" and section.widths == paper_values.NETWORK and section.evaluated_on == "test set"


def units(section: Section) -> Table:
    """Table 1: median kept units of each layer under each penalty; the paper's beside, where it has the setting."""
    layers = len(section.widths) - 2
    beside = compared(section)
    columns = [("penalty eps'", ""), ("runs", COUNT), ("unit share", SHARE)]
    columns += [("unit share, paper", SHARE)] if beside else []
    columns.append(("weight share", SHARE))
    for i in range(1, layers + 1):
        columns.append((f"layer {i}", COUNT))
        columns += [(f"layer {i}, paper", COUNT), (f"layer {i}, difference", "+g")] if beside else []
    columns += [("further than 15% and 12 units", "")] if beside else []
    rows = list[tuple[Any, ...]]()
    for penalty in section.settings("search"):
        runs = section.of("search", penalty)
        printed = paper_values.TABLE_1.get(penalty) if beside else None
        row: list[Any] = [power(penalty), len(runs), median([r.unit_share for r in runs])]
        row += [printed.share if printed else None] if beside else []
        row.append(median([r.weight_share for r in runs]))
        for i, kept in enumerate(layer_medians(runs)):
            row.append(kept)
            if beside:
                row += [printed.units[i], kept - printed.units[i]] if printed else [None, None]
        row += [", ".join(far_cells(runs, penalty))] if beside else []
        rows.append(tuple(row))
    caption = f"Table 1. Units kept by the search (medians over trials): {section.title}"
    return Table("table-1", caption, tuple(columns), tuple(rows), section.note)


def layer_medians(runs: list[Run]) -> list[float]:
    return [median([r.units[i] for r in runs]) for i in range(len(runs[0].units))]


def far_cells(runs: list[Run], penalty: float) -> list[str]:
    """The layers whose median is further from the paper's than it may be without a reason."""
    printed = paper_values.TABLE_1.get(penalty)
    if printed is None:
        return []
    pairs = zip(layer_medians(runs), printed.units, strict=True)
    return [f"layer {i}" for i, (ours, theirs) in enumerate(pairs, 1) if paper_values.far(ours, theirs)]


def setting_label(variant: str, setting: float) -> str:
    if variant == "fixed":
        return f"{setting:.1%} of the units"
    return f"rate {setting:g}" if variant == "dropout" else f"eps' = {power(setting)}"


def trade_off(section: Section) -> Table:
    columns = (
        ("variant", ""), ("setting", ""), ("runs", COUNT), ("unit share", SHARE), ("weight share", SHARE),
        ("error, median", ERROR), ("error, 25%", ERROR), ("error, 75%", ERROR), ("error, stochastic", ERROR),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for variant in section.variants:
        for setting in section.settings(variant):
            runs = section.of(variant, setting)
            low, middle, high = quartiles([r.error for r in runs])
            drawn = [r.stochastic_error for r in runs if r.stochastic_error is not None]
            shares = median([r.unit_share for r in runs]), median([r.weight_share for r in runs])
            label = setting_label(variant, setting)
            rows.append((variant, label, len(runs), *shares, middle, low, high, median(drawn) if drawn else None))
    caption = f"Size against error (Fig. 2a in numbers; shares are medians): {section.title}"
    return Table("trade-off", caption, columns, tuple(rows), section.note)


def variants(section: Section) -> Table:
    """Each variant of the search against the paper's form at the same penalty."""
    columns = (
        ("variant", ""), ("penalty eps'", ""), ("runs", COUNT), ("weight share", SHARE), ("weight share, plain", SHARE),
        ("error", ERROR), ("error, plain", ERROR), ("difference", "+.2%"), ("95% from", "+.2%"), ("95% to", "+.2%"),
        ("p, two-sided", ".3f"),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for variant in section.variants:
        if not variant.startswith("search+"):
            continue
        for penalty in section.settings(variant):
            runs, plain = section.of(variant, penalty), section.of("search", penalty)
            errors, theirs = [r.error for r in runs], [r.error for r in plain]
            row: list[Any] = [variant, power(penalty), len(runs), median([r.weight_share for r in runs])]
            row += [median([r.weight_share for r in plain]) if plain else None, median(errors)]
            if plain:
                row += [median(theirs), median(errors) - median(theirs)]
                several = min(len(errors), len(theirs)) > 1  # one run alone has no spread
                p = min(1.0, 2 * min(smaller(errors, theirs), smaller(theirs, errors)))
                row += [*difference_interval(errors, theirs), p] if several else [None] * 3
            else:
                row += [None] * 5
            rows.append(tuple(row))
    told = "one trial of each" if section.single else "medians"
    caption = f"Variants of the search against the paper's form at the same penalty ({told}): {section.title}"
    note = f"{section.note}. Interval: bootstrap of the difference of medians. p: exact Mann-Whitney test"
    return Table("variants", caption, columns, tuple(rows), note)


def times(section: Section) -> Table:
    """One row for each batch of runs."""
    columns = (
        ("methods", ""), ("runs in the batch", COUNT), ("updates of each", ",d"), ("seconds", ",.1f"),
        ("of these updating", ",.1f"), ("seconds per run", ",.2f"), ("us per update of a run", ",.2f"),
        ("hardware", ""),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for runs in batches(section):
        first = runs[0].story
        seconds = first["seconds"]
        names = ", ".join(dict.fromkeys(r.variant for r in runs))
        row = (names, first["runs_in_batch"], first["result"]["updates"], seconds["batch"], updating(first))
        rows.append((*row, seconds["per_run"], 1e6 * update_time(first), runs[0].hardware))
    return Table("time", f"Time of the batches: {section.title}", columns, tuple(rows), section.note)


def batches(section: Section) -> list[list[Run]]:
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in section.runs:
        groups.setdefault(run.batch, []).append(run)
    return sorted(groups.values(), key=lambda runs: section.variants.index(runs[0].variant))


def updating(story: dict[str, Any]) -> float:
    """Seconds of a batch without its compilation, measurements and checkpoints."""
    parts = story["seconds"]["parts"]
    return float(parts["updates"] or parts["first_updates"])


def update_time(story: dict[str, Any]) -> float:
    """Seconds for one update of one run."""
    return updating(story) / int(story["result"]["updates"]) / int(story["runs_in_batch"])
