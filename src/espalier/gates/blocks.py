"""Widths in multiples: the units of a group in blocks of like importance, one gate for each block.

Kernels run in steps of 8 or 16 channels, so that 13 of them cost as much as 16. With one gate for 8 units what is
searched is what ships. Units keep their places: a block is a set of them, and a cut takes its members out wherever they
lie, so that nothing has to be put in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from espalier.gates.structure import GateGroup, Structure, device_of
from espalier.gates.trace import Array
from espalier.space import BadInput, BadType, whole_number

SINGLE = ("branches", "blocks", "inputs", "choices", "placed")  # kinds that a number alone leaves as they are
Blocks = dict[str, list[list[int]]]  # by group: the units of each of its gates
RoundTo = int | str | Mapping[str, Any]


def rounded(
    structure: Structure, model: nn.Module, round_to: RoundTo
) -> tuple[list[GateGroup], dict[str, str], Blocks]:
    """The groups in blocks; those with too few units for two blocks, and why; and which units each block holds.

    structure: of one gate for each unit. round_to: as in :func:`espalier.attach`.
    """
    width_of, importance = spans(structure), _importance(structure)
    wanted = _wanted(structure, model, round_to, width_of)
    groups, small, blocks = list[GateGroup](), dict[str, str](), Blocks()
    for group in structure.groups:
        width = wanted.get(group.name)
        if width is None:
            groups.append(group)
            continue
        if isinstance(width, int):
            step = width // math.gcd(width, width_of[group.name])
            if step == 1:  # a head is as wide already
                groups.append(group)
                continue
            order = np.argsort(-importance[structure.where(group)], kind="stable")
            own = [order[start : start + step].tolist() for start in range(0, group.size, step)]
        else:
            own = [[int(unit) for unit in block] for block in width]
            if sorted(unit for block in own for unit in block) != list(range(group.size)):
                raise BadInput(f"the blocks of {group.name!r} do not hold each of its {group.size} units once")
        blocks[group.name] = own
        if len(own) == 1 and group.least:
            small[group.name] = f"its {group.size} units are one block, which is always open"
            continue
        units = tuple(np.concatenate([group.units[unit] for unit in block]) for block in own)
        groups.append(replace(group, units=units, blocks=tuple(map(len, own)), least=min(group.least, 1)))
    return groups, small, blocks


def _wanted(structure: Structure, model: nn.Module, round_to: RoundTo, spans: Mapping[str, int]) -> dict[str, Any]:
    """By group the number of channels of a block, or the blocks themselves. spans: by group the channels of a unit."""
    if isinstance(round_to, str):
        if round_to != "auto":
            raise BadInput(f'round_to is a number, "auto", or a dict of them by group, not {round_to!r}')
        usual, widths = usual_width(model), dict[str, int]()
        for group in structure.groups:
            width = usual
            while width > 1 and 2 * width > group.size * spans[group.name]:  # a single block could not go
                width //= 2
            if group.kind not in SINGLE:
                widths[group.name] = width
        return widths
    if not isinstance(round_to, Mapping):
        number = whole_number(round_to, "round_to", 1)
        return {group.name: number for group in structure.groups if group.kind not in SINGLE}
    names = [group.name for group in structure.groups]
    for name, given in round_to.items():
        if name not in names:
            raise BadInput(f"round_to names {name!r}, but the groups are {', '.join(names)}")
        if not isinstance(given, Sequence) or isinstance(given, str):
            whole_number(given, f"round_to of {name!r}", 1)
        elif not all(isinstance(block, Sequence) for block in given):
            raise BadType(f"round_to of {name!r} is a number, or blocks as lists of units, not {given!r}")
    return dict(round_to)


def usual_width(model: nn.Module) -> int:
    """Channels that the kernels of the model's device take at once: 16 float32 on a CPU with AVX-512, else 8."""
    return 16 if device_of(model).type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def spans(structure: Structure) -> dict[str, int]:
    """By group the channels of one unit: the size of a head."""
    classes = [(g.name, [np.unique(structure.trace.atoms.roots(unit)) for unit in g.units]) for g in structure.groups]
    return {name: max(1, *(int(structure.spans[own].sum()) for own in units)) for name, units in classes}


def _importance(structure: Structure) -> Array:
    """Of every unit ``(d)``: the size of the weights that write it times that of the weights that read it.

    That stays the same when one is scaled up and the other down. Behind a norm its scale stands for the weights that
    write.
    """
    d = structure.space.d
    written, scales, read = np.zeros(d), np.zeros(d), np.zeros(d)
    for axis in structure.axes:
        inside = axis.entries >= 0
        if not inside.any() or not axis.info.is_parameter or axis.info.name.endswith("bias"):
            continue
        squares = axis.info.tensor.detach().double().square()
        others = [dim for dim in range(squares.ndim) if dim != axis.dim]
        into = read if axis.is_read else written if others else scales
        np.add.at(into, axis.entries[inside], (squares.sum(others) if others else squares).cpu().numpy()[inside])
    for group in structure.groups:
        where = structure.where(group)
        if scales[where].any():
            written[where] = scales[where]
    return np.asarray(np.sqrt(written * read))
