"""The tables of the connection-selection study: Table 2 beside the paper's, the trade-off, random draws, MACs, time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from espalier.picture.labels import power
from espalier.report import paper_values
from espalier.report.runs import Run, Section
from espalier.report.statistics import median, quartiles
from espalier.report.table import Table
from espalier.report.unit_tables import COUNT, ERROR, SHARE, times, variants

BLOCKS = 3
MACS = "search+cost_macs"


def tables(section: Section) -> list[Table]:
    """Those there are runs for."""
    made = [connections(section)] if section.of("search") else []
    made.append(trade_off(section))
    if section.of("random"):
        made.append(draws(section))
    if any(variant.startswith("search+") for variant in section.variants):
        made.append(variants(section))
    if section.of(MACS):
        made.append(macs(section))
    return [*made, times(section)]


def compared(section: Section) -> bool:
    """Whether the paper has numbers for these runs: its network, on CIFAR-10, on the test set."""
    usual = section.network == paper_values.DENSENET and section.dataset == "cifar10"
    return usual and section.evaluated_on == "test set"


def connections(section: Section) -> Table:
    """Table 2: median kept connections of each block under each penalty; the paper's beside, where it has them."""
    beside = compared(section)
    columns = [("penalty eps'", ""), ("runs", COUNT), ("weight share", SHARE)]
    columns += [("weight share, paper", SHARE), ("weight share, difference", "+.1%")] if beside else []
    for i in range(1, BLOCKS + 1):
        columns.append((f"block {i}", COUNT))
        columns += [(f"block {i}, paper", COUNT), (f"block {i}, difference", "+g")] if beside else []
    columns += [("shipped weight share", SHARE), ("shipped connections", ""), ("depth", COUNT), ("dead layers", COUNT)]
    rows = list[tuple[Any, ...]]()
    for penalty in section.settings("search"):
        runs = section.of("search", penalty)
        printed = paper_values.TABLE_2.get(penalty) if beside else None
        share = median([r.weight_share for r in runs])
        row: list[Any] = [power(penalty), len(runs), share]
        if beside:
            row += [printed.share, share - printed.share] if printed else [None, None]
        for i, kept in enumerate(block_medians(runs)):
            row.append(kept)
            if beside:
                row += [printed.connections[i], kept - printed.connections[i]] if printed else [None, None]
        row += [median([r.shipped_weight_share for r in runs]), _shipped(runs)]
        row += [median([r.canonical["depth"] for r in runs]), median([len(r.canonical["dead_layers"]) for r in runs])]
        rows.append(tuple(row))
    caption = f"Table 2. Connections kept by the search ({over(section)}): {section.title}"
    note = f"{section.note}. Shipped: without dead parts (the canonical mask)"
    return Table("table-2", caption, tuple(columns), tuple(rows), note)


def over(section: Section) -> str:
    return "one trial of each" if section.single else "medians over trials"


def block_medians(runs: list[Run]) -> list[float]:
    return [median([r.connections[i] for r in runs]) for i in range(BLOCKS)]


def _shipped(runs: list[Run]) -> str:
    return " / ".join(f"{median([r.canonical['connections'][i] for r in runs]):g}" for i in range(BLOCKS))


def setting_label(variant: str, setting: float) -> str:
    if variant == "random":
        return f"{setting:.1%} of the weights"
    return "all connections" if variant == "full" else f"eps' = {power(setting)}"


def trade_off(section: Section) -> Table:
    columns = (
        ("variant", ""), ("setting", ""), ("runs", COUNT), ("weight share", SHARE), ("shipped weight share", SHARE),
        ("shipped MAC share", SHARE), ("depth", COUNT),
    )  # fmt: skip
    spread = (("error", ERROR),) if section.single else tuple((f"error, {q}", ERROR) for q in ("median", "25%", "75%"))
    rows = list[tuple[Any, ...]]()
    for variant in section.variants:
        for setting in section.settings(variant):
            runs = section.of(variant, setting)
            low, middle, high = quartiles([r.error for r in runs])
            names = ("weight_share", "shipped_weight_share", "shipped_mac_share")
            shares = [median([getattr(r, name) for r in runs]) for name in names]
            depth = median([r.canonical["depth"] for r in runs])
            errors = [middle] if section.single else [middle, low, high]
            rows.append((variant, setting_label(variant, setting), len(runs), *shares, depth, *errors))
    told = "one trial of each" if section.single else "shares are medians"
    caption = f"Size against error (Fig. 2b in numbers; {told}): {section.title}"
    note = f"{section.note}. Shipped: without dead parts"
    return Table("trade-off", caption, (*columns, *spread), tuple(rows), note)


def draws(section: Section) -> Table:
    """What was drawn until each share of the weights was hit."""
    columns = (
        ("share asked for", SHARE), ("runs", COUNT), ("draws", COUNT), ("of these without a path", SHARE),
        ("weight share", SHARE), ("shipped weight share", SHARE),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for share in section.settings("random"):
        runs = section.of("random", share)
        told = [r.story["result"]["drawn"] for r in runs]
        drawn = sum(t["draws"] for t in told)
        pathless = sum(t["without_path"] for t in told) / drawn
        shares = median([r.weight_share for r in runs]), median([r.shipped_weight_share for r in runs])
        rows.append((share, len(runs), drawn, pathless, *shares))
    caption = f"Random selections: what was drawn, and what it ships: {section.title}"
    return Table("random", caption, columns, tuple(rows), section.note)


def macs(section: Section) -> Table:
    """MACs as the cost against weights as the cost, at equal MACs of what ships."""
    columns = (
        ("penalty eps'", ""), ("runs", COUNT), ("shipped MAC share", SHARE), ("shipped weight share", SHARE),
        ("error", ERROR), ("error with weights as the cost", ERROR), ("at a shipped MAC share of", SHARE),
        ("difference", "+.2%"), ("standard error by the test images", ERROR),
    )  # fmt: skip
    line = sorted(
        (median([r.shipped_mac_share for r in runs]), median([r.error for r in runs]))
        for p in section.settings("search")
        if (runs := section.of("search", p)) and median([r.canonical["depth"] for r in runs])  # 0: no path is left
    )
    rows = list[tuple[Any, ...]]()
    for penalty in section.settings(MACS):
        runs = section.of(MACS, penalty)
        share, error = median([r.shipped_mac_share for r in runs]), median([r.error for r in runs])
        row: list[Any] = [power(penalty), len(runs), share, median([r.shipped_weight_share for r in runs]), error]
        if line and share <= line[-1][0]:
            at = max(share, line[0][0])  # below that the other search shipped nothing: its smallest network is larger
            other = float(np.interp(at, [s for s, _ in line], [e for _, e in line]))
            images = runs[0].story["examples"]["test"]
            row += [other, at, error - other, math.sqrt(sum(e * (1 - e) / images for e in (error, other)))]
        else:
            row += [None] * 4
        rows.append(tuple(row))
    told = f"{over(section)}; errors with weights as the cost interpolated between its penalties"
    caption = f"Error at equal MACs: MACs as the cost against weights as the cost ({told}): {section.title}"
    smallest = "Where the other search shipped no network as small, its smallest stands"
    note = f"{section.note}. Shipped: without dead parts. {smallest}"
    return Table("macs", caption, columns, tuple(rows), note)
