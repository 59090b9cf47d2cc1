"""Never silently wrong: every group is tried out before its gates are offered, and refused by name if it disagrees.

Groups are tried all together first; only a disagreement is taken apart, by halves, so that large models stay quick.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

import numpy as np
from torch import nn

from espalier.gates.build_plan import Adapted
from espalier.gates.standins import phantom_layers
from espalier.gates.structure import GateGroup, Structure
from espalier.gates.trace import Array
from espalier.gates.verify import Trial

Build = Callable[[Sequence[GateGroup]], Structure]


def random_masks(
    structure: Structure, names: set[str] | None, rng: np.random.Generator, count: int, empty: bool = False
) -> list[Array]:
    """Masks that close about half, or nearly all, of the gates of the named groups (None: of all), or every one."""
    masks = []
    for i in range(count):
        parts = []
        for group in structure.groups:
            mask = np.ones(group.size)
            if names is None or group.name in names:
                share = (0.5, 0.85, 0.2)[i % 3]
                mask = (rng.random(group.size) >= share).astype(np.float64) if not empty else np.zeros(group.size)
                branch = group.kind == "branches"
                if mask.all() and (names is not None or not branch):
                    mask[rng.integers(group.size)] = 0.0
                if not mask.any() and not branch and not empty:
                    mask[rng.integers(group.size)] = 1.0
            parts.append(mask)
        masks.append(np.concatenate(parts))
    return masks


def approved(trial: Trial, groups: Sequence[GateGroup], build: Build) -> tuple[list[GateGroup], dict[str, str]]:
    """The groups that are exact, alone and together, and for each refused one why."""
    rng = np.random.default_rng(17)
    left, refused = list(groups), dict[str, str]()
    searched: set[str] = set()
    while left:
        structure = build(left)
        problem = trial.disagreement(structure, random_masks(structure, None, rng, 3))
        if not problem:
            break
        group, problem = _isolated(trial, structure, left, rng, problem)
        if group is not None and group.name not in searched:
            searched.add(group.name)
            trial.adapted = [a for a in trial.adapted if a.group != group.name]
            if _adapt(trial, structure, group, random_masks(structure, {group.name}, rng, 2)):
                continue
        if group is None:
            group = _first_wrong(trial, left, build, rng)
            problem = f"together with others: {problem}"
        refused[group.name] = problem
        left = [other for other in left if other is not group]
    return (_emptiable(trial, left, build) if left else []), refused


def _isolated(
    trial: Trial, structure: Structure, groups: Sequence[GateGroup], rng: np.random.Generator, problem: str
) -> tuple[GateGroup | None, str]:
    """A group that disagrees by itself, and how; None when only several together do."""
    while len(groups) > 1:
        for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
            found = trial.disagreement(structure, random_masks(structure, {g.name for g in half}, rng, 3))
            if found:
                groups, problem = half, found
                break
        else:
            return None, problem
    alone = trial.disagreement(structure, random_masks(structure, {groups[0].name}, rng, 3))
    return (groups[0], alone) if alone else (None, problem)


def _first_wrong(trial: Trial, groups: Sequence[GateGroup], build: Build, rng: np.random.Generator) -> GateGroup:
    """The first group that, added to those before it, makes joint masks disagree."""
    for count in range(1, len(groups) + 1):
        structure = build(groups[:count])
        if trial.disagreement(structure, random_masks(structure, None, rng, 4)):
            return groups[count - 1]
    return groups[-1]


# ---- integers that have to follow a cut ------------------------------------------------------------------------------


def _adapt(trial: Trial, structure: Structure, group: GateGroup, masks: Sequence[Array]) -> bool:
    """Find the integer attributes that have to follow the cut; accepted only when the outputs then agree.

    What is found for one layer is proposed for those that look alike, and tried with everything else.
    """
    candidates = _candidates(trial, structure, group)
    for count in range(1, min(len(candidates), 4) + 1):
        for chosen in islice(combinations(candidates, count), 60):
            places = {(c.path, c.attribute) for c in chosen}
            if len(places) == count and not trial.disagreement(structure, masks, chosen):
                trial.adapted += [*chosen, *_alike(trial, structure, chosen, group)]
                return True
    return False


def _alike(trial: Trial, structure: Structure, chosen: Sequence[Adapted], group: GateGroup) -> Iterator[Adapted]:
    known = {a.group for a in trial.adapted}
    wanted = {_pattern(c) for c in chosen}
    for other in structure.groups:
        if other is group or other.name in known or other.size != group.size:
            continue
        found = [c for c in _candidates(trial, structure, other) if _pattern(c) in wanted]
        if {_pattern(c) for c in found} == wanted:
            yield from found


def _pattern(item: Adapted) -> tuple[str, str, int, bool]:
    return re.sub(r"\d+", "#", item.path), item.attribute, item.per_unit, item.tensor >= 0


def _candidates(trial: Trial, structure: Structure, group: GateGroup) -> list[Adapted]:
    """Integers of the modules that write or read the group, and of those around them, equal to a gated length."""
    trace = structure.trace
    lengths = {group.size}
    axes: list[tuple[int, int]] = []
    around: dict[str, None] = {}
    mine = [int(r) for unit in group.units for r in trace.atoms.roots(unit)]
    for info in trace.tensors:
        for dim, own in enumerate(info.atoms):
            inside = int(np.isin(trace.atoms.roots(own), mine).sum())
            if not inside:
                continue
            axes.append((info.number, dim))
            lengths |= {inside // k for k in (1, 2, 3, 4) if inside % (k * group.size) == 0}
            for path, _ in info.places:
                while path:
                    around[path] = None
                    path = path.rpartition(".")[0]
    around[""] = None
    found = []
    for path in sorted(around, key=lambda p: -p.count(".") - bool(p)):
        module = trial.modules[path]
        if isinstance(module, KNOWN_SIZES):
            continue
        for name, value in vars(module).items():
            if type(value) is not int or value < 1:
                continue
            if value in lengths and value % group.size == 0:
                found.append(Adapted(path, name, group=group.name, per_unit=value // group.size))
                continue
            length = next((a for a in axes if value == len(trace.tensors[a[0]].atoms[a[1]])), None)
            if length is not None:
                found.append(Adapted(path, name, tensor=length[0], dim=length[1]))
    return found


KNOWN_SIZES = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.Embedding,
    nn.RNNBase,
    nn.GroupNorm,
    nn.LayerNorm,
)


# ---- groups that may be emptied --------------------------------------------------------------------------------------


def _emptiable(trial: Trial, groups: Sequence[GateGroup], build: Build) -> list[GateGroup]:
    """The groups with ``least`` 0 where closing all their gates runs and is exact, alone and together, else 1."""
    rng = np.random.default_rng(18)
    fixed = [g for g in groups if g.kind in ("channels", "branches", "inputs")]
    trying = [g for g in groups if g not in fixed]

    def runs(chosen: Sequence[GateGroup]) -> bool:
        names = {group.name for group in chosen}
        structure = build([replace(g, least=0) if g.name in names else g for g in groups])
        return not trial.disagreement(structure, random_masks(structure, names, rng, 1, empty=True))

    free = [g for kind in ("units", "heads") for g in _halved([g for g in trying if g.kind == kind], runs)]
    structure = build(groups)
    stuck = [g for g in trying if g not in free and phantom_layers(structure, trial.modules, g, {}) is not None]
    trial.phantoms += [group.name for group in stuck]
    free += _halved(stuck, runs)
    trial.phantoms = [name for name in trial.phantoms if any(name == group.name for group in free)]
    for together in _side_by_side(structure, free):  # each alone may run where both emptied do not
        while len(together) > 1 and not runs(together):
            gone = together.pop(0)
            free = [group for group in free if group is not gone]
    while free and not runs(free):
        free.pop(0)
    names = {group.name for group in free}
    return [replace(g, least=0) if g.name in names else g for g in groups]


def _halved(groups: list[GateGroup], runs: Callable[[Sequence[GateGroup]], bool]) -> list[GateGroup]:
    """Those of the groups that pass, found by halves."""
    if not groups or runs(groups):
        return groups
    if len(groups) == 1:
        return []
    middle = len(groups) // 2
    return _halved(groups[:middle], runs) + _halved(groups[middle:], runs)


def _side_by_side(structure: Structure, groups: Sequence[GateGroup]) -> list[list[GateGroup]]:
    """Groups that together make up one axis of a tensor."""
    spaces = {group.name: structure.space.slices[group.name] for group in structure.groups}
    found: dict[tuple[str, ...], list[GateGroup]] = {}
    for info in structure.trace.tensors:
        for dim in range(info.tensor.ndim):
            entries = structure.entries(info.number, dim)
            if not len(entries) or (entries < 0).any():
                continue
            inside = [g for g in groups if ((entries >= spaces[g.name].start) & (entries < spaces[g.name].stop)).any()]
            covered = sum(g.size for g in inside) >= len(np.unique(entries))
            if len(inside) > 1 and covered:
                found[tuple(g.name for g in inside)] = inside
    return list(found.values())
