"""The tables of the paper's two studies beside what the paper printed, and what they say of a section of runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from espalier.picture import power
from espalier.report.run_reader import Run
from espalier.report.significance import difference_interval, median, quartiles, smaller
from espalier.report.study_reader import Point, Section, Study, check_alike, check_same, grouped, middle, numbers
from espalier.report.tables import COUNT, ERROR, SHARE, Column, Table

# ---- what the paper printed ------------------------------------------------------------------------------------------

NETWORK, EPOCHS = (784, 784, 784, 784, 10), 500
DENSENET, DENSENET_EPOCHS = ("DenseNet", 40, 12), 300


@dataclass(frozen=True)
class Printed:
    """A row, of medians. Of Table 1: the "weight usage rate", which is the share of kept units, and the units of the
    three layers; of Table 2: the share of the weights of all connections, and the connections of the three blocks, of
    91 each."""

    share: float
    counts: tuple[int, int, int]


TABLE_1 = {
    2**-6: Printed(0.066, (92, 31, 24)),
    2**-7: Printed(0.261, (340, 141, 126)),
    2**-8: Printed(0.578, (599, 380, 379)),
    2**-9: Printed(0.777, (704, 544, 567)),
    0.0: Printed(0.937, (770, 717, 724)),
    -(2**-3): Printed(1.0, (784, 784, 784)),
}
TABLE_2 = {
    2**-2: Printed(0.158, (36, 6, 20)),
    2**-3: Printed(0.241, (45, 8, 49)),
    2**-4: Printed(0.423, (57, 39, 67)),
    2**-5: Printed(0.675, (59, 61, 76)),
    2**-6: Printed(0.803, (65, 64, 80)),
    -1.0: Printed(1.0, (91, 91, 91)),
}


# ---- sections --------------------------------------------------------------------------------------------------------

SHARED = ("batch_size", "learning_rate", "momentum", "pad", "weight_decay")  # by all methods of one table
FREE = {"precision", "points", "device"}


def sections_of(study: Study) -> list[Section]:
    """By data, the longest training first; what differs in more than its tables show is refused."""
    sections = [section for section in study.sections if section.folder]
    for section in sections:
        check_same([run for run in section.members if run.method != "recipe"], SHARED)
        check_alike(section.members, FREE)
    return sorted(sections, key=lambda s: (dataset(s), s.error_of, -epochs(s), network(s)))


def dataset(section: Section) -> str:
    return str(section.members[0].settings["dataset"])


def epochs(section: Section) -> int:
    return int(section.members[0].settings["epochs"])


def widths(section: Section) -> tuple[int, ...]:
    """Of a fully-connected network."""
    return tuple(section.members[0].settings["widths"])


def network(section: Section) -> tuple[Any, ...]:
    """What tells its network from another: its widths, or its name, depth and growth."""
    settings = section.members[0].settings
    return widths(section) if "widths" in settings else tuple(settings[k] for k in ("network", "depth", "growth"))


def stem(section: Section) -> str:
    """Of its files: the folder of its runs, and the hidden layers where they are not three as wide as the input."""
    inputs, *hidden, _ = network(section)
    given = isinstance(inputs, int) and hidden != [inputs] * 3
    name = "-".join([section.folder, "_".join(map(str, hidden))] if given else [section.folder])
    return re.sub(r"[^\w.+-]+", "_", name)  # widths are what a file says: they name no other folder


def title(section: Section) -> str:
    net = network(section)
    shape = "-".join(map(str, net[:2] if isinstance(net[0], str) else net))
    return f"{dataset(section)}, {epochs(section)} epochs of the search, {shape}, errors on the {section.error_of}"


def note(section: Section) -> str:
    """What every table and figure says of itself."""
    count = len(section.members)
    counts = ", ".join(f"{len(section.of(variant))} {variant}" for variant in section.variants)
    return f"{count} run{'s' * (count != 1)} ({counts}), {epochs(section)} epochs, {section.machines}"


def trials(section: Section) -> str:
    """The fewest and the most runs of a setting."""
    counts = {len(point.runs) for point in section.points}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"


def searches(section: Section) -> dict[float, list[Run]]:
    """The runs of the paper's form of the search, by penalty, the strongest first."""
    return {point.value: list(point.runs) for point in section.of_each(["search"])}


def compared(section: Section) -> bool:
    """Whether the paper has numbers for these runs: its networks and data, on the test set."""
    known = {NETWORK: "mnist", DENSENET: "cifar10"}
    return known.get(network(section)) == dataset(section) and section.error_of == "test set"


def counts(runs: Sequence[Run], name: str) -> list[float]:
    """The medians of "units" by layer, or of "connections" by block."""
    return [median(list(column)) for column in zip(*(run.result[name] for run in runs), strict=True)]


def stochastic_errors(runs: Sequence[Run]) -> list[float]:
    """Of networks drawn from theta at the end, where they were measured."""
    drawn = [run.result.get("stochastic") for run in runs]
    return [one["test_error"] for one in drawn if one is not None and one["test_error"] is not None]


def sampling_error(run: Run, *errors: float) -> float:
    """The standard error of a difference of errors, by the number of test images alone."""
    return math.sqrt(sum(e * (1 - e) / run.record["examples"]["test"] for e in errors))


def batches(section: Section) -> list[list[Run]]:
    """Runs that were trained as one batch."""
    groups = grouped(
        section.members, lambda r: (r.variant if r.method == "search" else "given", str(r.record["seconds"]))
    )
    return sorted(groups.values(), key=lambda runs: section.variants.index(runs[0].variant))


def updating(run: Run) -> float:
    """Seconds of its batch without compilation, measurements and checkpoints."""
    parts = run.record["seconds"]["parts"]
    return float(parts["updates"] or parts["first_updates"])


def update_time(run: Run) -> float:
    """Seconds for one update of one run."""
    return updating(run) / int(run.result["updates"]) / int(run.record["runs_in_batch"])


# ---- columns: what a point, the runs of one setting, shows -----------------------------------------------------------

BLOCKS = 3
MACS = "search+cost_macs"
FAR = {"units": 12, "connections": 8}  # a median may be so far from the paper's, or 15%
FAR_SHARE = 0.05  # of the weights
SHIPPED = "Shipped: without dead parts"


def median_of(heading: str, name: str, form: str = SHARE) -> Column:
    """The median of a number of the runs."""
    return heading, form, lambda point: point.median(name)


def setting_label(point: Point) -> str:
    if point.setting is not None and point.setting.kind == "target":
        return f"target {point.value:.1%}"
    words = {
        "fixed": f"{point.value:.1%} of the units", "random": f"{point.value:.1%} of the weights",
        "full": "all connections", "dropout": f"rate {point.value:g}",
    }  # fmt: skip
    return words.get(point.variant, f"eps' = {power(point.value)}")


PENALTY: Column = ("penalty eps'", "", lambda point: power(point.value))
VARIANT: Column = ("variant", "", lambda point: point.variant)
SETTING: Column = ("setting", "", setting_label)
RUNS: Column = ("runs", COUNT, lambda point: len(point.runs))
UNITS, WEIGHTS = median_of("unit share", "unit_share"), median_of("weight share", "weight_share")
SHIPPED_WEIGHTS = median_of("shipped weight share", "canonical.weight_share")
SHIPPED_MACS = median_of("shipped MAC share", "canonical.mac_share")
DEPTH = median_of("depth", "canonical.depth", COUNT)
QUARTILES: list[Column] = [
    ("error, median", ERROR, lambda point: point.median("error")),
    ("error, 25%", ERROR, lambda point: quartiles(numbers(point.runs, "error"))[0]),
    ("error, 75%", ERROR, lambda point: quartiles(numbers(point.runs, "error"))[2]),
]


def beside(printed: Mapping[float, Printed], heading: str, form: str, value: Any) -> Column:
    """A column about the paper's row; empty where the paper has none. value: of the point and that row."""
    return heading, form, lambda p: value(p, printed[p.value]) if p.value in printed else None


def part(label: str, i: int, name: str, printed: Mapping[float, Printed] | None) -> list[Column]:
    """What one layer or block keeps, and the paper's. i: its place in the counts of a result, which have this name."""

    def kept(point: Point) -> float:
        return counts(point.runs, name)[i]

    if printed is None:
        return [(label, COUNT, kept)]
    paper = beside(printed, f"{label}, paper", COUNT, lambda _, row: row.counts[i])
    difference = beside(printed, f"{label}, difference", "+g", lambda point, row: kept(point) - row.counts[i])
    return [(label, COUNT, kept), paper, difference]


def far_cells(runs: Sequence[Run], penalty: float, name: str) -> list[str]:
    """What is further from the paper's row than it may be without a reason. name: "units" or "connections"."""
    table, part = (TABLE_1, "layer") if name == "units" else (TABLE_2, "block")
    if (printed := table.get(penalty)) is None:
        return []
    pairs = enumerate(zip(counts(runs, name), printed.counts, strict=True), 1)
    cells = [f"{part} {i}" for i, (ours, theirs) in pairs if abs(ours - theirs) > max(0.15 * theirs, FAR[name])]
    far = name == "connections" and abs(middle(runs, "weight_share") - printed.share) > FAR_SHARE
    return [*cells, "weight share"] if far else cells


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(
    section: Section, name: str, caption: str, columns: Iterable[Column], items: Iterable[Any], *more: str
) -> Table:
    """more: sentences that its note has beside those of every table."""
    return Table.of(name, f"{caption}: {title(section)}", columns, items, ". ".join([note(section), *more]))


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


def over(section: Section, several: str = "medians over trials") -> str:
    return several if section.middle else "one trial of each"


def units(section: Section) -> Table:
    """Table 1: median kept units of each layer under each penalty; the paper's beside, where it has the setting."""
    printed = TABLE_1 if compared(section) else None
    columns = [PENALTY, RUNS, UNITS, WEIGHTS]
    for i in range(len(widths(section)) - 2):
        columns += part(f"layer {i + 1}", i, "units", printed)
    if printed is not None:
        columns.insert(3, beside(printed, "unit share, paper", SHARE, lambda _, row: row.share))
        columns.append(("further than 15% and 12 units", "", lambda p: ", ".join(far_cells(p.runs, p.value, "units"))))
    caption = "Table 1. Units kept by the search (medians over trials)"
    return table(section, "table-1", caption, columns, section.of_each(["search"]))


def connections(section: Section) -> Table:
    """Table 2: median kept connections of each block under each penalty; the paper's beside, where it has them."""
    printed = TABLE_2 if compared(section) else None
    columns = [PENALTY, RUNS, WEIGHTS]
    if printed is not None:
        columns.append(beside(printed, "weight share, paper", SHARE, lambda _, row: row.share))
        difference = "weight share, difference"
        columns.append(beside(printed, difference, "+.1%", lambda p, row: p.median("weight_share") - row.share))

    def shipped(point: Point, name: str) -> list[Any]:
        return [run.result["canonical"][name] for run in point.runs]

    def blocks(point: Point) -> str:
        return " / ".join(f"{median(list(block)):g}" for block in zip(*shipped(point, "connections"), strict=True))

    for i in range(BLOCKS):
        columns += part(f"block {i + 1}", i, "connections", printed)
    columns += [SHIPPED_WEIGHTS, ("shipped connections", "", blocks), DEPTH]
    columns.append(("dead layers", COUNT, lambda p: median([len(dead) for dead in shipped(p, "dead_layers")])))
    caption = f"Table 2. Connections kept by the search ({over(section)})"
    points = section.of_each(["search"])
    return table(section, "table-2", caption, columns, points, f"{SHIPPED} (the canonical mask)")


def unit_trade_off(section: Section) -> Table:
    def stochastic(point: Point) -> float | None:
        drawn = stochastic_errors(point.runs)
        return median(drawn) if drawn else None

    columns = [VARIANT, SETTING, RUNS, UNITS, WEIGHTS, *QUARTILES, ("error, stochastic", ERROR, stochastic)]
    caption = "Size against error (Fig. 2a in numbers; shares are medians)"
    return table(section, "trade-off", caption, columns, section.of_each(section.variants))


def connection_trade_off(section: Section) -> Table:
    errors = QUARTILES if section.middle else [median_of("error", "error", ERROR)]
    columns = [VARIANT, SETTING, RUNS, WEIGHTS, SHIPPED_WEIGHTS, SHIPPED_MACS, DEPTH, *errors]
    caption = f"Size against error (Fig. 2b in numbers; {over(section, 'shares are medians')})"
    return table(section, "trade-off", caption, columns, section.of_each(section.variants), SHIPPED)


def variants(section: Section) -> Table:
    """Each variant of the search against the paper's form at the same penalty."""
    columns = (
        ("variant", ""), ("penalty eps'", ""), ("runs", COUNT), ("weight share", SHARE), ("weight share, plain", SHARE),
        ("error", ERROR), ("error, plain", ERROR), ("difference", "+.2%"), ("95% from", "+.2%"), ("95% to", "+.2%"),
        ("p, two-sided", ".3f"),
    )  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for point in section.of_each([v for v in section.variants if v.startswith("search+")]):
        plain = section.of("search", point.value)
        errors, theirs = numbers(point.runs, "error"), numbers(plain, "error")
        row: list[Any] = [point.variant, power(point.value), len(errors), point.median("weight_share")]
        row += [middle(plain, "weight_share") if plain else None, median(errors)]
        row += [median(theirs), median(errors) - median(theirs)] if plain else [None] * 2
        if min(len(errors), len(theirs)) > 1:  # one run alone has no spread
            p = min(1.0, 2 * min(smaller(errors, theirs), smaller(theirs, errors)))
            rows.append((*row, *difference_interval(errors, theirs), p))
        else:
            rows.append((*row, *[None] * 3))
    caption = f"Variants of the search against the paper's form at the same penalty ({over(section, 'medians')})"
    words = "Interval: bootstrap of the difference of medians. p: exact Mann-Whitney test"
    return table(section, "variants", caption, _cells(columns), rows, words)


def _cells(columns: Iterable[tuple[str, str]]) -> list[Column]:
    """Columns of rows that are there already."""
    return [(heading, form, itemgetter(i)) for i, (heading, form) in enumerate(columns)]


def times(section: Section) -> Table:
    """One row for each batch of runs."""
    columns: list[Column] = [
        ("methods", "", lambda runs: ", ".join(dict.fromkeys(run.variant for run in runs))),
        ("runs in the batch", COUNT, lambda runs: runs[0].record["runs_in_batch"]),
        ("updates of each", ",d", lambda runs: runs[0].result["updates"]),
        ("seconds", ",.1f", lambda runs: runs[0].record["seconds"]["batch"]),
        ("of these updating", ",.1f", lambda runs: updating(runs[0])),
        ("seconds per run", ",.2f", lambda runs: runs[0].record["seconds"]["per_run"]),
        ("us per update of a run", ",.2f", lambda runs: 1e6 * update_time(runs[0])),
        ("hardware", "", lambda runs: runs[0].machine),
    ]
    return table(section, "time", "Time of the batches", columns, batches(section))


def draws(section: Section) -> Table:
    """What was drawn until each share of the weights was hit."""

    def drawn(point: Point, name: str) -> int:
        return sum(run.result["drawn"][name] for run in point.runs)

    columns: list[Column] = [
        ("share asked for", SHARE, lambda point: point.value),
        RUNS,
        ("draws", COUNT, lambda point: drawn(point, "draws")),
        ("of these without a path", SHARE, lambda point: drawn(point, "without_path") / drawn(point, "draws")),
        WEIGHTS,
        SHIPPED_WEIGHTS,
    ]
    caption = "Random selections: what was drawn, and what it ships"
    return table(section, "random", caption, columns, section.of_each(["random"]))


def macs(section: Section) -> Table:
    """MACs as the cost against weights as the cost, at equal MACs of what ships."""
    columns = (
        ("penalty eps'", ""), ("runs", COUNT), ("shipped MAC share", SHARE), ("shipped weight share", SHARE),
        ("error", ERROR), ("error with weights as the cost", ERROR), ("at a shipped MAC share of", SHARE),
        ("difference", "+.2%"), ("standard error by the test images", ERROR),
    )  # fmt: skip
    others = [p for p in section.of_each(["search"]) if p.median("canonical.depth")]  # 0: no path is left
    line = sorted((p.median("canonical.mac_share"), p.median("error")) for p in others)
    rows = list[tuple[Any, ...]]()
    for point in section.of_each([MACS]):
        share, error = point.median("canonical.mac_share"), point.median("error")
        row = (power(point.value), len(point.runs), share, point.median("canonical.weight_share"), error)
        if line and share <= line[-1][0]:
            at = max(share, line[0][0])  # below that the other search shipped nothing: its smallest network is larger
            other = float(np.interp(at, [s for s, _ in line], [e for _, e in line]))
            rows.append((*row, other, at, error - other, sampling_error(point.runs[0], error, other)))
        else:
            rows.append((*row, *[None] * 4))
    how = f"{over(section)}; errors with weights as the cost interpolated between its penalties"
    caption = f"Error at equal MACs: MACs as the cost against weights as the cost ({how})"
    smallest = "Where the other search shipped no network as small, its smallest stands"
    return table(section, "macs", caption, _cells(columns), rows, SHIPPED, smallest)
