"""Integers that modules keep, such as a number of heads: which of them may have to follow a cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from torch import nn
from torch.utils._pytree import tree_leaves

from espalier.gates.build_plan import SIZES
from espalier.gates.structure import Adapted, Axis, GateGroup, Structure
from espalier.gates.trace.layout import depends_only_on

KNOWN_SIZES = (*SIZES, nn.modules.conv._ConvNd, nn.GroupNorm, nn.LayerNorm)


def _integers(structure: Structure, path: str, inside: bool = False) -> dict[str, int]:
    """The positive integers that a module keeps and looks at, unless it is known which of them are sizes; ``inside``:
    also those in its tuples, lists and dicts, where "sizes[1]" is the second."""
    module, read = structure.modules[path], structure.learned.read
    held = {} if isinstance(module, KNOWN_SIZES) else vars(module)
    held = {name: value for name, value in held.items() if read is None or (path, name) in read}
    several = {name: value for name, value in held.items() if isinstance(value, (tuple, list, dict)) and inside}
    held |= {f"{name}[{i}]": one for name, value in several.items() for i, one in enumerate(tree_leaves(value))}
    return {name: value for name, value in held.items() if type(value) is int and value > 0}


def own_sizes(structure: Structure, group: GateGroup) -> list[Adapted]:
    """Integers of the modules that hold the group's tensors, equal to the length of the axis it lies along there."""
    sizes = dict[tuple[str, str], Adapted]()
    for axis, inside in structure.along(group):
        for path, _ in axis.info.places:
            for name, value in _integers(structure, path).items():
                if value == len(inside):
                    sizes[path, name] = Adapted(path, name, group.name, tensor=axis.info.number, dim=axis.dim)
    return list(sizes.values())


def kept_sizes(structure: Structure, group: GateGroup) -> list[Adapted]:
    """Integers of the modules that split an axis of the group, equal to the length of a part; and of modules without
    tensors that give its axis another shape, as nn.Unflatten does. Torch's other layers keep no sizes of channels."""
    where, own, trace = structure.where(group), structure.numbers(group), structure.trace
    sizes = dict[tuple[str, str], Adapted]()
    for number, (path, atoms) in enumerate(trace.p.parts):
        if np.isin(structure.follow(atoms), own).any():
            for name, value in _integers(structure, path, inside=True).items():
                if value == len(atoms):
                    sizes.setdefault((path, name), Adapted(path, name, group.name, part=number))
    for path, layouts in (*trace.exits.items(), *trace.entries.items()):
        module = structure.modules[path]
        if module._modules or module._parameters or module._buffers:
            continue
        if type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Unflatten):
            continue
        for block in (block for layout in layouts for block in layout.blocks):
            entries = structure.follow(block.atoms)
            length = next((n for i, n in enumerate(entries.shape) if depends_only_on(entries, i)), 0)
            if not length or length % group.size or not ((entries >= where.start) & (entries < where.stop)).all():
                continue
            for name, value in _integers(structure, path, inside=True).items():
                if value == length:
                    sizes.setdefault((path, name), Adapted(path, name, group.name, length // group.size))
    return list(sizes.values())


def alike(structure: Structure, chosen: Sequence[Adapted], group: GateGroup) -> Iterator[Adapted]:
    known = {a.group for a in structure.learned.adapted}
    taken = {(a.path, a.attribute) for a in (*structure.learned.adapted, *chosen)}  # an integer follows one group
    wanted = {pattern(c) for c in chosen}
    for other in structure.groups:
        if other is group or other.name in known or _shape(other.name) != _shape(group.name):
            continue
        around = (*kept_sizes(structure, other), *candidates(structure, other))
        free = [c for c in around if (c.path, c.attribute) not in taken]
        matches = [c for c in free if pattern(c) in wanted]
        if {pattern(c) for c in matches} == wanted:
            yield from matches


def likewise(structure: Structure, group: GateGroup) -> list[GateGroup]:
    """The groups of layers that look alike, with the same integers around them and none known to follow."""
    known = {a.group for a in structure.learned.adapted}
    wanted = [pattern(c) for c in candidates(structure, group)]
    shaped = [g for g in structure.groups if g.name not in known and _shape(g.name) == _shape(group.name)]
    return [g for g in shaped if g is not group and [pattern(c) for c in candidates(structure, g)] == wanted]


def pattern(item: Adapted) -> tuple[str, str, int, bool]:
    return _shape(item.path), item.attribute, item.per_unit, item.tensor >= 0


def _shape(path: str) -> str:
    """A path without its numbers, which layers that look alike share."""
    return re.sub(r"\d+", "#", path)


def candidates(structure: Structure, group: GateGroup) -> list[Adapted]:
    """Integers of the modules that write or read the group, and of those around them, equal to a gated length."""
    lengths, axes, around = {group.size}, list[Axis](), dict[str, None]()
    for axis, inside in structure.along(group):
        axes.append(axis)
        count = int(inside.sum())
        lengths |= {count // k for k in (1, 2, 3, 4) if count % (k * group.size) == 0}
        for path, _ in axis.info.places:
            while path:
                around[path] = None
                path = path.rpartition(".")[0]
    around[""] = None
    integers = []
    for path in sorted(around, key=lambda p: -p.count(".") - bool(p)):
        for name, value in _integers(structure, path).items():
            fits = next((axis for axis in axes if value == len(axis.entries)), None)
            if value in lengths and value % group.size == 0:
                integers.append(Adapted(path, name, group=group.name, per_unit=value // group.size))
            elif fits is not None:
                integers.append(Adapted(path, name, tensor=fits.info.number, dim=fits.dim))
    return integers
