"""A folder of runs, read once: sections of comparable runs, in them series by variant, in these points by setting."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from espalier import records, schema
from espalier.report.run_reader import AXES, LABELS, Run, Setting, from_file, from_folder, number
from espalier.report.significance import Quartiles, median, quartiles
from espalier.space import BadInput, BadType, Corrupt

NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
# What runs of one variant may differ in: the machine, and what a section, a setting or a seed tells.
FREE = {
    "precision", "points", "device", "model", "settle_at", "seed", "target", "penalty", "mask", "found", "all_open",
    "permuted", "dropout", "size", "rate", "full_cost",
}  # fmt: skip
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Point:
    """Runs of one variant under one setting; ``done`` are those whose numbers count."""

    variant: str
    setting: Setting | None
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return self.setting.label if self.setting else "as it is"

    @cached_property
    def done(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.finished)

    @property
    def value(self) -> float:
        """Of its setting; 0 where there is none."""
        return self.setting.value if self.setting else 0.0

    def median(self, name: str) -> float:
        """Over its runs, of a number that :meth:`Run.number` knows."""
        return middle(self.runs, name)

    def errors(self, measure: str) -> list[float]:
        return [score for run in self.done if (score := run.score(measure)) is not None]

    def shares(self, axis: str) -> list[float]:
        return [share for run in self.done if (share := run.share(axis)) is not None]

    @cached_property
    def example(self) -> Run:
        """The run in the middle: the one to look at."""
        known = sorted((run for run in self.done if run.error is not None), key=lambda run: run.error or 0.0)
        return known[(len(known) - 1) // 2] if known else self.runs[0]


@dataclass(frozen=True)
class Series:
    """One variant: its points from the smallest network to the largest."""

    variant: str
    label: str
    points: tuple[Point, ...]

    @property
    def runs(self) -> list[Run]:
        return [run for point in self.points for run in point.runs]

    def curve(self, axis: str, measure: str) -> list[tuple[Point, Quartiles, Quartiles]]:
        """Points of which both are known, with the quartiles of their size and of their error."""
        known = [(point, point.shares(axis), point.errors(measure)) for point in self.points]
        return [(point, quartiles(shares), quartiles(errors)) for point, shares, errors in known if shares and errors]


@dataclass(frozen=True)
class Section:
    """Runs of one full network on the same data for the same number of epochs.

    name: of its files. folder: of its run files, below ``runs/``; "" of run directories. members: in the order they
    were read; ``runs`` are the same, series by series.
    """

    name: str
    title: str
    folder: str
    members: tuple[Run, ...]

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """The search first, its variants, then what it is compared with; targets and penalties are apart."""
        kinds = grouped(self.members, lambda run: (run.variant, run.setting.kind if run.setting else ""))
        series = list[Series]()
        for (variant, kind), runs in kinds.items():
            several = sum(other == variant and bool(its) for other, its in kinds) > 1
            label = runs[0].called + (f", {kind}" if kind and several else "")
            by_setting = grouped(runs, lambda run: run.setting)
            points = [Point(variant, setting, tuple(some)) for setting, some in by_setting.items()]
            # A stronger penalty makes a smaller network.
            points.sort(key=lambda point: -point.value if kind == "penalty" else point.value)
            series.append(Series(variant, label, tuple(points)))
        order = {name: i for i, name in enumerate(LABELS)}
        return tuple(sorted(series, key=lambda s: (s.variant != "search", not s.variant.startswith("search"),
                                                   order.get(s.variant, 99), s.variant, s.label)))  # fmt: skip

    @cached_property
    def points(self) -> list[Point]:
        return [point for one in self.series for point in one.points]

    @cached_property
    def runs(self) -> list[Run]:
        return [run for one in self.series for run in one.runs]

    @cached_property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(one.variant for one in self.series))

    def of(self, variant: str, setting: float | None = None) -> list[Run]:
        """The runs of one variant (and setting), in the order they were read."""
        asked = [run for run in self.members if run.variant == variant]
        return asked if setting is None else [r for r in asked if r.setting is not None and r.setting.value == setting]

    def of_each(self, variants: Iterable[str]) -> list[Point]:
        """The settings of these variants, from the smallest structures to the largest: strongest penalty first,
        smallest share first."""
        return [point for variant in variants for point in self.points if point.variant == variant and point.setting]

    @cached_property
    def axes(self) -> list[str]:
        """What a size can be counted in here."""
        known = {name for run in self.runs if run.finished for name in run.shares}
        return [name for name in AXES if name in known]

    @cached_property
    def measure(self) -> str | None:
        """What is compared: the share of wrong examples, else the loss, else nothing."""
        return next((name for name in ("error", "loss") if any(point.errors(name) for point in self.points)), None)

    @cached_property
    def marks(self) -> list[Point]:
        """The settings whose size and error are known."""
        measure = self.measure or "error"
        return [p for p in self.points if p.errors(measure) and any(p.shares(axis) for axis in self.axes)]

    @cached_property
    def error_of(self) -> str:
        return " and ".join(dict.fromkeys(run.error_of for run in self.runs))

    @property
    def machines(self) -> str:
        return " and ".join(dict.fromkeys(run.machine for run in self.members))

    @property
    def note(self) -> str:
        counts = "; ".join(f"{len(one.runs)} {one.label}" for one in self.series)
        return f"{len(self.runs)} run{'s' * (len(self.runs) != 1)} ({counts}), {self.machines}"

    @cached_property
    def middle(self) -> str:
        """ "median ", or nothing where no number is one: every setting has a single run."""
        return "median " if any(len(point.done) > 1 for point in self.points) else ""

    @cached_property
    def over(self) -> str:
        """What a median is taken over."""
        return "seeds and folds" if len({run.fold for run in self.runs}) > 1 else "seeds"

    @cached_property
    def trials(self) -> str:
        """The runs that a median is of, at most, in words: "20 seeds on 5 folds"."""
        runs = max((point.runs for point in self.points), key=len)
        seeds, folds = len({run.seed for run in runs}), len({run.fold for run in runs})
        if seeds * folds != len(runs):
            return f"{len(runs)} runs"
        return f"{seeds} seed{'s' * (seeds > 1)}" + (f" on {folds} folds" if folds > 1 else "")

    def front(self, axis: str, variant: str = "") -> list[tuple[float, float, Point]]:
        """The Pareto front of the medians: size, error and point of those that no other point beats in both.

        variant: of this one alone, where there are runs of it."""
        own = [one for one in self.series if one.variant == variant] or self.series
        curves = [curve for one in own for curve in one.curve(axis, self.measure or "error")]
        front = list[tuple[float, float, Point]]()
        for x, y, point in sorted(((x[1], y[1], point) for point, x, y in curves), key=lambda one: one[:2]):
            if not front or y < front[-1][1]:
                front.append((x, y, point))
        return front


@dataclass(frozen=True)
class Study:
    """All that a folder holds. kind: which study wrote its run files, "" where none did. notes: what was skipped or is
    not whole, in words."""

    root: Path
    name: str
    kind: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...]

    @property
    def runs(self) -> list[Run]:
        return [run for section in self.sections for run in section.runs]


def read(folder: str | os.PathLike[str]) -> Study:
    """Run files under ``runs/`` as a study writes them, or packed into ``runs.jsonl``, and run directories anywhere:
    the folder itself or below it."""
    if not isinstance(folder, (str, os.PathLike)):
        raise BadType(f"a folder of runs is named by its path, not by {folder!r}")
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give the folder of a study or of a run")
    notes = list[str]()
    files = dict[Path, "list[Any] | None"]()
    if (root / records.PACKED).is_file():
        files = {root / "runs" / name: parts for name, parts in records.packed(root / records.PACKED).items()}
    files |= {path: None for kind in ("json", "jsonl") for path in (root / "runs").glob(f"*/*/*.{kind}")}
    runs = [run for path in sorted(files) for run in from_file(path, root, files[path])]
    for place in _run_directories(root):
        try:
            runs.append(from_folder(place, root))
        except (OSError, Corrupt) as error:
            name = place.relative_to(root).as_posix() if place != root else place.name
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            notes.append(f"{name} is left out: {why.replace(f'{place}{os.sep}', '')}")
    if not runs:
        if notes:
            raise Corrupt(f"{root} holds no run that can be read: {notes[0]}")
        raise BadInput(
            f"{root} holds no finished run: no run files of a study (runs/*/*/*.json or .jsonl) and no run directory "
            "(settings.json, metrics.jsonl, result.json); run the study first, or give its folder"
        )
    notes += [f"{run.name}: {note}" for run in runs for note in run.notes]
    others = sum(run.record.get("standard_data") is False for run in runs)
    if others:
        notes.append(f"{others} of {len(runs)} runs read files of other content than the published data sets")
    forced = sum(bool(run.record.get("forced")) for run in runs)
    if forced:
        notes.append(f"{forced} of {len(runs)} runs were gone on with by force: data, code or settings had changed")
    _check_one({json.dumps(run.study): run.path for run in runs if run.study}, "study")
    kind = next((run.study for run in runs if run.study), "")
    called = root.resolve().name if kind in ("", "grid") else kind
    name = NAMES.get(called, called.replace("-", " ").replace("_", " "))
    return Study(root, name[:1].upper() + name[1:], kind, _sections(runs), tuple(notes))


def _run_directories(root: Path) -> list[Path]:
    """Folders with a file that only runs write; a ``settings.json`` of something else is left alone."""
    places = list[Path]()
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(place)
        if "metrics.jsonl" in files or ("settings.json" in files and _of_a_run(here / "settings.json")):
            places.append(here)
    return places


def _of_a_run(path: Path) -> bool:
    try:
        content = schema.read(path, schema.anything)
    except (OSError, Corrupt):
        return False
    return isinstance(content, dict) and content.keys() >= {"settings", "versions", "hardware"}


def _sections(runs: Iterable[Run]) -> tuple[Section, ...]:
    sections, names = list[Section](), set[str]()
    for group in sorted(grouped(runs, lambda run: run.place).values(), key=_order):
        check_alike(group)
        title = _title(group[0])
        name = stem = re.sub(r"[^a-z0-9.]+", "_", title.lower()).strip("_.")[:60] or "runs"
        count = 2
        while name in names:
            name, count = f"{stem}-{count}", count + 1
        names.add(name)
        folder = "" if group[0].path.is_dir() else group[0].place[0]
        sections.append(Section(name, title, folder, tuple(group)))
    return tuple(sections)


def _order(group: Sequence[Run]) -> tuple[Any, ...]:
    """What a study wrote first, the longest training first; then run directories, the most runs first."""
    first = group[0]
    alone = first.path.is_dir()
    epochs = number(first.settings.get("epochs")) or 0.0
    return (alone, -len(group) if alone else 0, -epochs, _title(first), first.place)


def _title(run: Run) -> str:
    settings = run.settings
    data, widths = settings.get("data"), settings.get("widths")
    dataset = settings.get("dataset") or run.record.get("dataset")  # of `espalier train`
    words = [NAMES.get(str(dataset), str(dataset or ""))]
    if not words[0] and isinstance(data, dict) and data.get("examples"):
        words[0] = f"{data['examples']} examples"
    elif not words[0] and isinstance(data, list) and data and isinstance(data[0], list) and len(data[0]) > 1:
        words[0] = f"{data[0][1]} examples"
    if settings.get("epochs"):
        words.append(f"{settings['epochs']} epochs")
    # A study keeps other rates of the weights, and held-out images, in folders of their own.
    for mark, name, label in (("-rate_", "learning_rate", "learning rate"), ("-batch_", "batch_size", "batch")):
        if mark in run.place[0] and number(settings.get(name)) is not None:
            words.append(f"{label} {settings[name]:g}")
    if "-held_out" in run.place[0]:
        words.append("held-out images")
    shape = str(settings.get("model") or settings.get("network") or "").partition(" ")[0]
    if isinstance(widths, list):
        shape = "-".join(map(str, widths))
    return ", ".join(word for word in (*words, shape) if word) or "runs"


def check_alike(runs: Sequence[Run], free: set[str] = FREE) -> None:
    """Runs of one variant differ in their setting and seed, and in nothing else (but the machine and its rounding)."""
    for group in grouped(runs, lambda run: run.variant).values():
        check_same(group, sorted({name for run in group for name in run.settings} - free))


def check_same(runs: Sequence[Run], names: Iterable[str]) -> None:
    """Refuse runs that differ in one of these settings."""
    for name in names:
        _check_one({json.dumps(run.settings.get(name), sort_keys=True): run.path for run in runs}, name)


def _check_one(values: dict[str, Path], name: str) -> None:
    """values: as text, each with the path of a run that has it."""
    if len(values) > 1:
        (one, here), (other, there), *_ = values.items()
        raise BadInput(
            f"a mixed study: {name} is {one} in {here} and {other} in {there}; keep such runs in folders of their own"
        )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def numbers(runs: Iterable[Run], name: str) -> list[float]:
    """A number of each run: see :meth:`Run.number`."""
    return [run.number(name) for run in runs]


def middle(runs: Iterable[Run], name: str) -> float:
    """Its median."""
    return median(numbers(runs, name))
