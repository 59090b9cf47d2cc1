"""A folder of runs as a report shows it: sections of comparable runs, in them series by variant, in these points."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from espalier.report.run_directory import from_folder
from espalier.report.run_files import from_file
from espalier.report.statistics import median, quartiles
from espalier.report.story import AXES, Setting, Story, mapping, number
from espalier.space import BadInput, Corrupt

LABELS = {
    "search": "search",
    "scratch": "uniform, from scratch",
    "found": "found structure, from scratch",
    "permuted": "control: losses permuted",
    "fixed": "fixed structure",
    "dropout": "dropout",
    "random": "random structure",
    "full": "full network",
}
NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
# What runs of one variant may differ in: the machine, and what a section, a setting or a seed tells.
FREE = {
    "precision", "points", "device", "model", "settle_at", "seed", "target", "penalty", "mask", "all_open", "permuted",
    "dropout", "size", "rate", "full_cost",
}  # fmt: skip
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Point:
    """Runs of one variant under one setting; ``done`` are those whose numbers count."""

    variant: str
    setting: Setting | None
    runs: tuple[Story, ...]

    @property
    def label(self) -> str:
        return self.setting.label if self.setting else "as it is"

    @cached_property
    def done(self) -> tuple[Story, ...]:
        return tuple(run for run in self.runs if run.finished)

    def errors(self, measure: str) -> list[float]:
        found = [run.error if measure == "error" else run.loss for run in self.done]
        return [value for value in found if value is not None]

    def shares(self, axis: str) -> list[float]:
        return [share for run in self.done if (share := run.share(axis)) is not None]

    @cached_property
    def example(self) -> Story:
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
    def runs(self) -> list[Story]:
        return [run for point in self.points for run in point.runs]


@dataclass(frozen=True)
class Section:
    """Runs of one full network on the same data for the same number of epochs."""

    name: str
    title: str
    series: tuple[Series, ...]

    @cached_property
    def runs(self) -> list[Story]:
        return [run for one in self.series for run in one.runs]

    @cached_property
    def axes(self) -> list[str]:
        """What a size can be counted in here."""
        known = {name for run in self.runs if run.finished for name in run.shares}
        return [name for name in AXES if name in known]

    @cached_property
    def measure(self) -> str | None:
        """What is compared: the share of wrong examples, else the loss, else nothing."""
        for name in ("error", "loss"):
            if any(point.errors(name) for one in self.series for point in one.points):
                return name
        return None

    @cached_property
    def error_of(self) -> str:
        return " and ".join(dict.fromkeys(run.error_of for run in self.runs))

    @property
    def note(self) -> str:
        counts = "; ".join(f"{len(one.runs)} {one.label}" for one in self.series)
        machines = " and ".join(dict.fromkeys(run.machine for run in self.runs))
        return f"{len(self.runs)} run{'s' * (len(self.runs) != 1)} ({counts}), {machines}"

    @cached_property
    def middle(self) -> str:
        """ "median ", or nothing where no number is one: every setting has a single run."""
        return "median " if any(len(point.done) > 1 for point in self.points()) else ""

    @cached_property
    def over(self) -> str:
        """What a median is taken over."""
        return "seeds and folds" if len({run.fold for run in self.runs}) > 1 else "seeds"

    @cached_property
    def trials(self) -> str:
        """The runs that a median is of, at most, in words: "20 seeds on 5 folds"."""
        runs = max((point.runs for point in self.points()), key=len)
        seeds, folds = len({run.seed for run in runs}), len({run.fold for run in runs})
        if seeds * folds != len(runs):
            return f"{len(runs)} runs"
        return f"{seeds} seed{'s' * (seeds > 1)}" + (f" on {folds} folds" if folds > 1 else "")

    def points(self) -> list[Point]:
        return [point for one in self.series for point in one.points]

    def front(self, axis: str) -> list[tuple[float, float, Point]]:
        """The Pareto front of the medians: size, error and point of those that no other point beats in both."""
        measure = self.measure or "error"
        sized = [(p.shares(axis), p.errors(measure), p) for p in self.points()]
        known = [(median(shares), median(errors), p) for shares, errors, p in sized if shares and errors]
        kept = list[tuple[float, float, Point]]()
        for x, y, point in sorted(known, key=lambda one: one[:2]):
            if not kept or y < kept[-1][1]:
                kept.append((x, y, point))
        return kept


@dataclass(frozen=True)
class Study:
    """All that a folder holds. notes: what was skipped or is not whole, in words."""

    root: Path
    name: str
    kind: str | None
    sections: tuple[Section, ...]
    notes: tuple[str, ...]

    @property
    def runs(self) -> list[Story]:
        return [run for section in self.sections for run in section.runs]


def variant_label(variant: str) -> str:
    """
    >>> variant_label("scratch"), variant_label("search+settle_0.25")
    ('uniform, from scratch', 'search, settle 0.25')
    """
    return LABELS.get(variant, variant.replace("+", ", ").replace("_", " "))


def read(folder: str | os.PathLike[str]) -> Study:
    """Run files under ``runs/`` as a study writes them, and run directories anywhere: the folder itself or below it."""
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give the folder of a study or of a run")
    notes = list[str]()
    files = sorted(path for kind in ("json", "jsonl") for path in (root / "runs").glob(f"*/*/*.{kind}"))
    stories = [story for path in files for story in _from_file(path, root)]
    for place in _run_directories(root):
        try:
            stories.append(from_folder(place, root))
        except (OSError, ValueError, KeyError, TypeError):
            what = place.relative_to(root).as_posix() if place != root else place.name
            notes.append(f"{what} is left out: its settings.json is missing or not whole")
    if not stories:
        if notes:
            raise Corrupt(f"{root} holds no run that can be read: {notes[0]}")
        raise BadInput(
            f"{root} holds no finished run: no run files of a study (runs/*/*/*.json or .jsonl) and no run directory "
            "(settings.json, metrics.jsonl, result.json); run the study first, or give its folder"
        )
    notes += [f"{story.name}: {note}" for story in stories for note in story.notes]
    others = sum(story.raw.get("standard_data") is False for story in stories)
    if others:
        notes.append(f"{others} of {len(stories)} runs read files of other content than the published data sets")
    kinds = grouped((s for s in stories if s.study), lambda s: s.study or "")
    if len(kinds) > 1:
        _refuse("study", {json.dumps(kind): group[0].path for kind, group in kinds.items()})
    kind = next(iter(kinds), None)
    called = root.resolve().name if kind in (None, "grid") else kind
    name = NAMES.get(called, called.replace("-", " ").replace("_", " "))
    sections = _sections(stories)
    return Study(root, name[:1].upper() + name[1:], kind, sections, tuple(notes))


def _from_file(path: Path, root: Path) -> list[Story]:
    try:
        return from_file(path, root)
    except (TypeError, AttributeError, LookupError) as error:
        raise Corrupt(f"{path} is not a run file: {error}. Take it out of the folder") from None


def _run_directories(root: Path) -> list[Path]:
    """Folders with a file that only runs write; a ``settings.json`` of something else is left alone."""
    found = list[Path]()
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(place)
        if "metrics.jsonl" in files or ("settings.json" in files and _ours(here / "settings.json")):
            found.append(here)
    return found


def _ours(path: Path) -> bool:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.keys() >= {"settings", "versions", "hardware"}


def _sections(stories: Iterable[Story]) -> tuple[Section, ...]:
    made, names = list[Section](), set[str]()
    groups = grouped(stories, lambda story: story.place)
    for group in sorted(groups.values(), key=_order):
        check_alike(group)
        title = _title(group[0])
        name = stem = re.sub(r"[^a-z0-9.]+", "_", title.lower()).strip("_.")[:60] or "runs"
        count = 2
        while name in names:
            name, count = f"{stem}-{count}", count + 1
        names.add(name)
        made.append(Section(name, title, _series(group)))
    return tuple(made)


def _order(group: Sequence[Story]) -> tuple[Any, ...]:
    """What a study wrote first, the longest training first; then run directories, the most runs first."""
    first = group[0]
    alone = first.path.is_dir()
    epochs = number(first.settings.get("epochs")) or 0.0
    return (alone, -len(group) if alone else 0, -epochs, _title(first), first.place)


def _title(story: Story) -> str:
    settings = story.settings
    data, widths = settings.get("data"), settings.get("widths")
    told = settings.get("dataset") or mapping(story.raw.get("settings")).get("dataset")  # of a run of `espalier train`
    words = [NAMES.get(str(told), str(told or ""))]
    if not words[0] and isinstance(data, dict) and data.get("examples"):
        words[0] = f"{data['examples']} examples"
    elif not words[0] and isinstance(data, list) and data and isinstance(data[0], list) and len(data[0]) > 1:
        words[0] = f"{data[0][1]} examples"
    if settings.get("epochs"):
        words.append(f"{settings['epochs']} epochs")
    # A study keeps other rates of the weights, and held-out images, in folders of their own.
    if "-rate_" in story.place[0] and number(settings.get("learning_rate")) is not None:
        words.append(f"learning rate {settings['learning_rate']:g}")
    if "-batch_" in story.place[0] and number(settings.get("batch_size")) is not None:
        words.append(f"batch {settings['batch_size']:g}")
    if "-held_out" in story.place[0]:
        words.append("held-out images")
    shape = str(settings.get("model") or settings.get("network") or "").partition(" ")[0]
    if isinstance(widths, list):
        shape = "-".join(map(str, widths))
    return ", ".join(word for word in (*words, shape) if word) or "runs"


def _series(group: Sequence[Story]) -> tuple[Series, ...]:
    """The search first, its variants, then what it is compared with; targets and penalties are series of their own."""
    kinds = grouped(group, lambda story: story.variant)
    both = {v: {s.setting.kind for s in runs if s.setting} for v, runs in kinds.items()}
    made = list[Series]()
    for (variant, kind), runs in grouped(group, lambda s: (s.variant, s.setting.kind if s.setting else "")).items():
        label = variant_label(variant)
        if len(both[variant]) > 1:
            label += f", {kind}" if kind else ""
        points = [Point(variant, setting, tuple(runs)) for setting, runs in grouped(runs, lambda s: s.setting).items()]
        # A stronger penalty makes a smaller network.
        points.sort(key=lambda p: 0.0 if p.setting is None else p.setting.value * (-1 if kind == "penalty" else 1))
        made.append(Series(variant, label, tuple(points)))
    order = {name: i for i, name in enumerate(LABELS)}
    return tuple(sorted(made, key=lambda s: (s.variant != "search", not s.variant.startswith("search"),
                                             order.get(s.variant, 99), s.variant, s.label)))  # fmt: skip


def check_alike(group: Sequence[Story]) -> None:
    """Runs of one variant differ in their setting and seed, and in nothing else (but the machine and its rounding)."""
    for runs in grouped(group, lambda story: story.variant).values():
        for name in sorted({name for run in runs for name in run.settings} - FREE):
            found = {json.dumps(run.settings.get(name), sort_keys=True): run.path for run in runs}
            if len(found) > 1:
                _refuse(name, found)


def _refuse(name: str, found: dict[str, Path]) -> None:
    (one, here), (other, there), *_ = found.items()
    raise BadInput(
        f"a mixed study: {name} is {one} in {here} and {other} in {there}; keep such runs in folders of their own"
    )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Quartiles, None of nothing."""
    return quartiles(values) if values else None
