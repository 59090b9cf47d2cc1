"""A section of one of the paper's studies: its network, its title and note, its batches, and tables about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from espalier.picture.labels import power
from espalier.report.run_reader import Run
from espalier.report.study_reader import Section, Study, check_alike, check_same, grouped
from espalier.report.tables import Table

SHARED = ("batch_size", "learning_rate", "momentum", "pad", "weight_decay")  # by all methods of one table
FREE = {"precision", "points", "device"}


def sections_of(study: Study) -> list[Section]:
    """By data, the longest training first; what differs in more than its tables show is refused."""
    sections = [section for section in study.sections if section.folder]
    for section in sections:
        check_same(section.members, SHARED)
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
    return "-".join([section.folder, "_".join(map(str, hidden))] if given else [section.folder])


def title(section: Section) -> str:
    net = network(section)
    shape = "-".join(map(str, net[:2] if isinstance(net[0], str) else net))
    return f"{dataset(section)}, {epochs(section)} epochs of the search, {shape}, errors on the {section.error_of}"


def note(section: Section) -> str:
    """What every table and figure says of itself."""
    count = len(section.members)
    counts = ", ".join(f"{len(section.of(variant))} {variant}" for variant in section.variants)
    return f"{count} run{'s' * (count != 1)} ({counts}), {epochs(section)} epochs, {section.machines}"


def single(section: Section) -> bool:
    """Whether there is one trial of every setting: no number is then a median."""
    return all(len(point.runs) == 1 for point in section.points)


def trials(section: Section) -> str:
    """The fewest and the most runs of a setting."""
    counts = {len(point.runs) for point in section.points}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"


def settings_of(section: Section, variants: Iterable[str]) -> Iterator[tuple[str, float, list[Run]]]:
    """Variant, setting and runs, from the smallest structures to the largest."""
    for variant in variants:
        for setting in section.settings(variant):
            yield variant, setting, section.of(variant, setting)


def searches(section: Section) -> dict[float, list[Run]]:
    """The runs of the paper's form of the search, by penalty, the strongest first."""
    return {penalty: runs for _, penalty, runs in settings_of(section, ["search"])}


def table(
    section: Section, name: str, caption: str, columns: Iterable[tuple[str, str]], rows: Any, *more: str
) -> Table:
    """more: sentences that its note has beside those of every table."""
    words = ". ".join([note(section), *more])
    return Table(name, f"{caption}: {title(section)}", tuple(columns), tuple(rows), words)


def setting_label(variant: str, setting: float) -> str:
    words = {
        "fixed": f"{setting:.1%} of the units", "random": f"{setting:.1%} of the weights", "full": "all connections",
        "dropout": f"rate {setting:g}",
    }  # fmt: skip
    return words.get(variant, f"eps' = {power(setting)}")


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
