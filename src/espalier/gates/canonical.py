"""The canonical mask: gates that read nothing, or that nothing reads, closed; no group emptier than it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from espalier.gates.structure import GateGroup, Structure
from espalier.gates.trace import Array


def canonical(structure: Structure, mask: Array) -> Array:
    """mask: ``(d)`` of 0 and 1. Returns the canonical mask ``(d)``.

    A layer all of whose readers are closed is dead, and the gates through which it reads close. A layer that reads
    nothing carries no information, and the gates that read it close. And so on until nothing changes. ``least`` gates
    of a group stay open, the first ones if none is.
    """
    space, opened = structure.space, mask != 0
    fixed = np.zeros_like(opened)  # gates that stay open for the sake of `least`
    for group, where in space.bits:
        if group.least and opened[where].sum() < group.least:
            closed = np.flatnonzero(~opened[where])[: group.least - int(opened[where].sum())]
            opened[where.start + closed] = True
    for group, where in space.bits:
        if group.least:
            fixed[where.start + np.flatnonzero(opened[where])[: group.least]] = True
    layers = dict(enumerate(structure.layers))
    while True:
        empty = {n for n, layer in layers.items() if any(all_closed(reads, opened) for reads in layer.reads)}
        dead = {n for n, layer in layers.items() if not layer.anchored and not opened[layer.read_by].any()}
        dead |= {n for n, layer in layers.items() if layer.inside and not opened[list(layer.inside)].all()}
        if not empty and not dead:
            break
        before = int(opened.sum())
        for readers, writers, source, entries in structure.flows:
            unread = bool(readers) and readers <= dead
            silent = bool(writers) and writers <= empty | dead and not source
            if unread or silent:
                opened[entries[~fixed[entries]]] = False
        if int(opened.sum()) == before:
            break
    return np.asarray(opened, dtype=mask.dtype)


def connected(
    structure: Structure, groups: Sequence[GateGroup], only: Callable[[Structure, Array], bool] = lambda *_: True
) -> list[GateGroup]:
    """The groups, with ``least`` 1 where closing a whole one cuts every path from input to output.

    structure: of these groups, without a ``least``. only: whether the gates ``(n)`` of a group come into question.
    """
    result = []
    for group in groups:
        own = structure.numbers(group)
        if group.kind == "choices":
            result.append(group)
            continue
        mask = structure.whole()
        mask[own] = 0
        cut = only(structure, own) and _severed(structure, canonical(structure, mask) != 0)
        result.append(replace(group, least=1) if cut else group)
    return result


def _severed(structure: Structure, opened: Array) -> bool:
    """Whether under a mask ``(d)`` of booleans every layer that the output needs reads nothing."""
    needed = [layer for layer in structure.layers if layer.anchored and not layer.grouped]
    return bool(needed) and all(any(all_closed(reads, opened) for reads in layer.reads) for layer in needed)


def all_closed(entries: Array, opened: Array) -> bool:
    return bool((entries >= 0).all() and not opened[entries].any())
