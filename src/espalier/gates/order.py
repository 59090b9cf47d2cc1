"""The order of channels in a compact model: what one reader keeps of a stream lies together, so that a view serves it.

Readers of one stream may keep different channels. A *segment* is a row of classes that occurs everywhere as a whole and
in the same order, so that it may be permuted everywhere at once. Of the sets that its readers keep as many as possible
are made consecutive, the largest first: a set that fits no order in which those taken so far are consecutive is left,
and is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from espalier.gates.trace import Array, Trace
from espalier.gates.trace.layout import Atoms


@dataclass(frozen=True, eq=False)
class Segments:
    """Per class its segment and its place there; ``size``: by segment how many it has."""

    segment: Array
    place: Array
    size: Array


def segments_of(trace: Trace, fixed: Iterable[Array]) -> Segments:
    """Segments of a model. fixed: atoms whose places mean something, beside those that are frozen."""
    atoms = trace.atoms
    same = Atoms()
    same.new(atoms.count)
    for joint in _joints(trace):  # both sides of a boundary move alike
        same.tie(*map(atoms.roots, joint))
    row_of = same.roots(atoms.roots(np.arange(atoms.count)))
    held = {int(c) for part in fixed for c in row_of[part.reshape(-1)]}
    held |= {int(c) for c in row_of[atoms.frozen(np.arange(atoms.count))]}
    after: dict[int, int] = {}
    before: dict[int, int] = {}
    seen = set[bytes]()
    for own in _occurrences(trace, held, row_of):
        row = row_of[own]
        if row.tobytes() in seen:
            continue
        seen.add(row.tobytes())
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        if len(set(np.diff([*starts, len(row)]).tolist())) > 1:
            held |= set(row.tolist())
        kinds = [-1, *row[starts].tolist(), -1]
        for a, b in itertools.pairwise(kinds):
            after[a] = b if after.get(a, b) == b else -1
            before[b] = a if before.get(b, a) == a else -1
    segment, place = np.arange(atoms.count), np.zeros(atoms.count, dtype=np.int64)
    size = np.ones(atoms.count, dtype=np.int64)
    free = {a for a in after if a >= 0 and a not in held}

    def follows(a: int) -> int:
        b = after.get(a, -1)
        return b if b in free and a in free and before.get(b, -1) == a else -1

    heads = [b for b in free if follows(before.get(b, -1)) != b]
    for head in heads:
        at, count = head, 0
        while at >= 0:
            segment[at], place[at] = head, count
            at, count = follows(at), count + 1
        size[head] = count
    return Segments(segment[row_of], place[row_of], size)


def _joints(trace: Trace) -> list[tuple[Array, Array]]:
    """What is before and after each boundary at which a slice may be left out."""
    return [(one.before, one.after) for one in trace.copies] + [(one.before, one.after) for one in trace.gates]


def _occurrences(trace: Trace, held: set[int], row_of: Array) -> Iterable[Array]:
    """Every row of atoms that an axis is made of; what is spread over several axes is held where it is."""
    for info in trace.tensors:
        yield from (own for own in info.atoms if len(own) > 1)
    for joint in _joints(trace):
        yield from joint
    for layouts in (*trace.entries.values(), *trace.exits.values()):
        for block in (block for layout in layouts for block in layout.blocks):
            if len(block.dims) > 1:
                held |= set(row_of[block.atoms.reshape(-1)].tolist())
            else:
                yield block.atoms


def positional(modules: Iterable[tuple[str, nn.Module]], trace: Trace) -> Iterable[Array]:
    """Atoms whose places mean something: of groups of channels, and of what the user feeds."""
    yield from trace.inputs
    for path, module in modules:
        groups = isinstance(module, nn.modules.conv._ConvNd) and 1 < module.groups != module.out_channels
        if groups or isinstance(module, nn.GroupNorm):
            for layout in (*trace.entries.get(path, ()), *trace.exits.get(path, ())):
                yield layout.all()


class Order:
    """The order of channels under one mask."""

    def __init__(
        self, segments: Segments, roots: Callable[[Array], Array], readers: Iterable[tuple[Array, Array]]
    ) -> None:
        """readers: what each reads, and which of it stays there."""
        self.segments, self.roots = segments, roots
        wanted: dict[int, set[frozenset[int]]] = {}
        for own, stay in readers:
            classes = roots(own)
            which = segments.segment[classes]
            for part in np.split(np.arange(len(own)), np.flatnonzero(np.diff(which)) + 1):
                chosen = np.unique(segments.place[classes[part][stay[part]]])
                if len(part) and 1 < len(chosen) < segments.size[which[part[0]]]:
                    wanted.setdefault(int(which[part[0]]), set()).add(frozenset(chosen.tolist()))
        self.rank = {
            segment: np.argsort(arranged(int(segments.size[segment]), sorted(sets, key=lambda s: (-len(s), sorted(s)))))
            for segment, sets in wanted.items()
        }

    def __call__(self, own: Array) -> Array:
        """The indices of an axis in their new order."""
        places = np.arange(len(own))
        if not self.rank:
            return places
        classes = self.roots(own)
        which, place = self.segments.segment[classes], self.segments.place[classes]
        for segment, rank in self.rank.items():
            inside = which == segment
            if inside.any():
                row = place[inside]
                many = np.flatnonzero(np.diff(row, append=-1))[0] + 1  # indices of each class
                places[inside] += (rank[row] - row) * many
        return np.argsort(places, kind="stable")


# ---- consecutive ones ------------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """No order has these sets together."""


def arranged(count: int, sets: Sequence[frozenset[int]]) -> list[int]:
    """An order of so many things in which these sets are consecutive; a set that fits none with those before is left.

    >>> arranged(5, [frozenset({0, 3}), frozenset({3, 4})])
    [1, 2, 0, 3, 4]
    """
    kept, order = list[frozenset[int]](), list(range(count))
    for one in sets:
        try:
            order = _ordered(range(count), [*kept, one])
        except _Unfit:
            continue
        kept.append(one)
    return order


def _ordered(things: Iterable[int], sets: Sequence[frozenset[int]]) -> list[int]:
    """Things in an order in which all of the sets, of these things, are consecutive.

    Sets that overlap, each of the largest one or of another that does, have their places in one row of parts, but for
    its direction. Every other set lies within one part, or beside the row.
    """
    if not sets:
        return sorted(things)
    largest = max(sets, key=len)
    woven, left, row = [largest], [one for one in sets if one != largest], [largest]
    while one := next((one for one in left if any(_overlap(one, other) for other in woven)), None):
        row, left = _woven(row, one), [other for other in left if other != one]
        woven.append(one)
    beside = set(things).difference(*row)
    order = _ordered(beside, [one for one in left if one <= beside])
    for part in row:
        order += _ordered(part, [one for one in left if one < part])
    return order


def _overlap(a: frozenset[int], b: frozenset[int]) -> bool:
    return not (a.isdisjoint(b) or a <= b or b <= a)


def _woven(row: Sequence[frozenset[int]], one: frozenset[int]) -> list[frozenset[int]]:
    """A row of parts, in its direction or the other, cut up so that a set which overlaps it is a stretch of parts."""
    for direction in (row, row[::-1]):
        parts = list[frozenset[int]]()
        for part in direction:
            met = any(part & one for part in parts)
            parts += [part & one, part - one] if met else [part - one, part & one]
        parts = [part for part in (*parts, one.difference(*row)) if part]
        places = [place for place, part in enumerate(parts) if part <= one]
        if places[-1] - places[0] < len(places):
            return parts
    raise _Unfit
