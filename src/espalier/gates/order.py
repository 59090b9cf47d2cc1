"""The order of channels in a compact model: what one reader keeps of a stream lies together, so that a view serves it.

Readers of one stream may keep different channels. A *segment* is a row of classes that occurs everywhere as a whole and
in the same order, so that it may be permuted everywhere at once. Of the sets that its readers keep as many as possible
are made consecutive, the largest first, by a PQ-tree: it holds all orders in which the sets taken so far are
consecutive, so a set that fits none of them is left, and is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from espalier.gates.trace import Array, Trace


@dataclass(frozen=True, eq=False)
class Segments:
    """Per class its segment and its place there; ``size``: by segment how many it has."""

    segment: Array
    place: Array
    size: Array


def segments_of(trace: Trace, fixed: Iterable[Array]) -> Segments:
    """Segments of a model. fixed: atoms whose places mean something, beside those that are frozen."""
    atoms = trace.atoms
    same = np.arange(atoms.count)
    joints = [(atoms.roots(before), atoms.roots(after)) for before, after in _joints(trace)]
    changed = True
    while changed:  # both sides of a boundary move alike
        changed = False
        for a, b in joints:
            least = np.minimum(same[a], same[b])
            if (same[a] != least).any() or (same[b] != least).any():
                changed = True
                np.minimum.at(same, a, least)
                np.minimum.at(same, b, least)
    row_of = same[atoms.roots(np.arange(atoms.count))]
    held = {int(c) for part in fixed for c in row_of[part.reshape(-1)]}
    held |= {int(c) for c in row_of[atoms.reason[atoms.roots(np.arange(atoms.count))] >= 0]}
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
    """No order of the tree has the set together."""


@dataclass(frozen=True)
class _Node:
    """``turns``: children in this order or the reverse (Q); else in any order (P). No children: a leaf."""

    leaves: frozenset[int]
    children: tuple[_Node, ...] = ()
    turns: bool = False


def _node(children: Sequence[_Node], turns: bool = False) -> _Node:
    if len(children) == 1:
        return children[0]
    turns = turns and len(children) > 2
    return _Node(frozenset[int]().union(*(child.leaves for child in children)), tuple(children), turns)


def arranged(count: int, sets: Sequence[frozenset[int]]) -> list[int]:
    """An order of so many things in which these sets are consecutive; a set that fits none with those before is left.

    >>> arranged(5, [frozenset({0, 3}), frozenset({3, 4})])
    [1, 2, 0, 3, 4]
    """
    alike: dict[tuple[bool, ...], list[int]] = {}  # things that the same sets hold stay as they are
    for thing in range(count):
        alike.setdefault(tuple(thing in one for one in sets), []).append(thing)
    members = list(alike.values())
    tree = _node([_Node(frozenset({i})) for i in range(len(members))])
    for one in sets:
        try:
            tree = _together(tree, frozenset(i for i, own in enumerate(members) if own[0] in one))
        except _Unfit:
            continue
    return [thing for leaf in _frontier(tree) for thing in members[leaf]]


def _frontier(node: _Node) -> list[int]:
    if not node.children:
        return list(node.leaves)
    return [leaf for child in node.children for leaf in _frontier(child)]


def _together(node: _Node, wanted: frozenset[int]) -> _Node:
    """The tree of those orders in which the wanted leaves are consecutive."""
    if node.leaves <= wanted:
        return node
    for place, child in enumerate(node.children):
        if wanted <= child.leaves:
            children = (*node.children[:place], _together(child, wanted), *node.children[place + 1 :])
            return _Node(node.leaves, children, node.turns)
    touched = [child for child in node.children if child.leaves & wanted]
    full = [child for child in touched if child.leaves <= wanted]
    partial = [child for child in touched if not child.leaves <= wanted]
    if len(partial) > 2:
        raise _Unfit
    if not node.turns:
        middle = [_node(full)] if full else []
        left = _ending(partial[0], wanted) if partial else []
        right = _ending(partial[1], wanted)[::-1] if len(partial) > 1 else []
        rest = [child for child in node.children if not child.leaves & wanted]
        return _node([*rest, _node([*left, *middle, *right], turns=True)])
    first = node.children.index(touched[0])
    if node.children[first : first + len(touched)] != tuple(touched) or any(p in touched[1:-1] for p in partial):
        raise _Unfit
    row = list[_Node]()
    for child in node.children:
        if child not in partial:
            row.append(child)
        else:
            ending = _ending(child, wanted)
            row += ending if child is touched[0] else ending[::-1]
    return _node(row, turns=True)


def _ending(node: _Node, wanted: frozenset[int]) -> list[_Node]:
    """The children of a node in a row whose wanted leaves are its end."""
    if node.leaves <= wanted or not node.leaves & wanted:
        return [node]
    empty = [child for child in node.children if not child.leaves & wanted]
    full = [child for child in node.children if child.leaves <= wanted]
    partial = [child for child in node.children if child.leaves & wanted and not child.leaves <= wanted]
    if len(partial) > 1:
        raise _Unfit
    inner = _ending(partial[0], wanted) if partial else []
    if not node.turns:
        return [*([_node(empty)] if empty else []), *inner, *([_node(full)] if full else [])]
    for row in (node.children, node.children[::-1]):
        at, end = len(empty), len(empty) + len(partial)
        if all(child in empty for child in row[:at]) and list(row[at:end]) == partial:
            return [*row[:at], *inner, *row[end:]]
    raise _Unfit
