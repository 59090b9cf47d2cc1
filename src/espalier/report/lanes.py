"""Where the layers and connections of one block go: few crossings, straight lines, nothing on top of anything.

Columns are given. A layer that is read further away than the next column gets a lane: one straight line at a height of
its own, from which each of those connections turns off to its reader. So 91 connections are at most 12 lines and
their turnings. Layers and lanes are ordered once for the whole block (no two lanes cross) to cross little; heights are
then the solution of a small quadratic programme: connections short, with the given distances between neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ROUNDS = 6


@dataclass(frozen=True)
class Room:
    """Distances between the middles of neighbours in one column."""

    cells: float = 36.0
    cell_to_lane: float = 21.0
    lanes: float = 8.0


@dataclass(frozen=True)
class Heights:
    """Of each cell, and of the lane of each cell that has one, around 0; crossings: how often connections cross."""

    cells: dict[int, float]
    lanes: dict[int, float]
    crossings: int


def arrange(columns: Mapping[int, int], edges: Iterable[tuple[int, int]], room: Room | None = None) -> Heights:
    """columns: of each cell; edges: (source, reader), the reader in a later column."""
    block = _Block(tuple(sorted(columns)), dict(columns), tuple(sorted(set(edges))), room or Room())
    order = block.untangled(block.nested())
    best = None
    for _ in range(ROUNDS):
        y = block.heights(order)
        found = (block.crossings(order), round(block.length(y), 3))
        if best is None or found < best[0]:
            best = (found, y)
        order = block.untangled(block.by_neighbours(y, order))
    assert best is not None
    (crossed, _), y = best
    snapped = [round(2 * float(value)) / 2 for value in y]
    return Heights(
        {cell: snapped[i] for i, cell in enumerate(block.cells)},
        {cell: snapped[len(block.cells) + i] for i, cell in enumerate(block.sources)},
        crossed,
    )


@dataclass(frozen=True)
class _Block:
    """Things to place are numbered: first the cells, then the lanes."""

    cells: tuple[int, ...]
    columns: dict[int, int]
    edges: tuple[tuple[int, int], ...]
    room: Room

    @cached_property
    def sources(self) -> list[int]:
        """The cells that have a lane."""
        return sorted({a for a, b in self.edges if self.columns[b] > self.columns[a] + 1})

    @cached_property
    def number(self) -> dict[int, int]:
        return {cell: i for i, cell in enumerate(self.cells)}

    @cached_property
    def lane(self) -> dict[int, int]:
        return {cell: len(self.cells) + i for i, cell in enumerate(self.sources)}

    @property
    def size(self) -> int:
        return len(self.cells) + len(self.sources)

    @cached_property
    def last(self) -> dict[int, int]:
        """The column of the last reader of each source."""
        return {a: max(self.columns[b] for s, b in self.edges if s == a) for a, _ in self.edges}

    @cached_property
    def present(self) -> list[list[int]]:
        """What stands in or passes through each column."""
        found: list[list[int]] = [[] for _ in range(max(self.columns.values()) + 1)]
        for cell in self.cells:
            found[self.columns[cell]].append(self.number[cell])
        for source in self.sources:
            for column in range(self.columns[source] + 1, self.last[source]):
                found[column].append(self.lane[source])
        return found

    @cached_property
    def segments(self) -> tuple[Ints, Ints]:
        """What runs between columns: (gaps, most in a gap) numbers on the left and on the right, padded with 0."""
        gaps: list[set[tuple[int, int]]] = [set() for _ in self.present[1:]]
        for a, b in self.edges:
            start, end = self.columns[a], self.columns[b]
            if end == start + 1:
                gaps[start].add((self.number[a], self.number[b]))
                continue
            gaps[start].add((self.number[a], self.lane[a]))
            for column in range(start + 1, end - 1):
                gaps[column].add((self.lane[a], self.lane[a]))
            gaps[end - 1].add((self.lane[a], self.number[b]))
        most = max((len(gap) for gap in gaps), default=0)
        left, right = (np.zeros((len(gaps), most), dtype=np.int64) for _ in range(2))
        for i, gap in enumerate(gaps):
            for j, (a, b) in enumerate(sorted(gap)):
                left[i, j], right[i, j] = a, b
            left[i, len(gap) :], right[i, len(gap) :] = sorted(gap)[0] if gap else (0, 0)  # crosses nothing twice
        return left, right

    @cached_property
    def real(self) -> NDArray[np.bool_]:
        """(gaps, most in a gap): false where padded."""
        left, right = self.segments
        first = np.arange(left.shape[1]) == 0
        return first | (left != left[:, :1]) | (right != right[:, :1])

    def crossings(self, order: Sequence[int]) -> int:
        rank = np.empty(self.size)
        rank[list(order)] = np.arange(self.size)
        left, right = (rank[part] for part in self.segments)
        crossed = (left[:, :, None] - left[:, None, :]) * (right[:, :, None] - right[:, None, :]) < 0
        return int((crossed & self.real[:, :, None] & self.real[:, None, :]).sum()) // 2

    def nested(self) -> list[int]:
        """To begin with: cells in the middle, the longest lanes outside, taking turns above and below."""
        by_length = sorted(self.sources, key=lambda s: (self.columns[s] - self.last[s], s))
        above, below = by_length[::2], by_length[1::2][::-1]
        return [*[self.lane[s] for s in above], *range(len(self.cells)), *[self.lane[s] for s in below]]

    def by_neighbours(self, y: Floats, order: Sequence[int]) -> list[int]:
        """Sorted by where each would like to be, given the others."""
        pull = self.pull - np.diag(np.diag(self.pull))
        wish = -(pull @ y) / np.maximum(np.diag(self.pull), 1e-9)
        place = {item: i for i, item in enumerate(order)}
        return sorted(range(self.size), key=lambda i: (round(float(wish[i]), 6), place[i]))

    def untangled(self, order: list[int]) -> list[int]:
        """Each thing put where it crosses least, as long as that helps."""
        best = self.crossings(order)
        for _ in range(4):
            before = best
            for item in list(order):
                rest = [other for other in order if other != item]
                home = order.index(item)
                for place in sorted(range(len(order)), key=lambda p: abs(p - home)):
                    tried = [*rest[:place], item, *rest[place:]]
                    found = self.crossings(tried)
                    if found < best:
                        best, order = found, tried
            if best == before:
                break
        return order

    @cached_property
    def pull(self) -> Floats:
        """The quadratic form of heights: what is connected pulls together, and everything a little to the middle."""
        form = np.zeros((self.size, self.size))

        def tie(a: int, b: int, strength: float) -> None:
            form[[a, b], [a, b]] += strength
            form[[a, b], [b, a]] -= strength

        for a, b in self.edges:
            near = self.columns[b] == self.columns[a] + 1
            tie(self.number[a] if near else self.lane[a], self.number[b], 1.0)
        for source in self.sources:
            tie(self.number[source], self.lane[source], 3.0)
        alone = [column for column in self.present if sum(item < len(self.cells) for item in column) == 1]
        for column in alone:  # a chain of layers is a straight line
            form[column[0], column[0]] += 40.0
        form[np.diag_indices(self.size)] += 0.05
        return form

    def length(self, y: Floats) -> float:
        return float(y @ self.pull @ y)

    def heights(self, order: Sequence[int]) -> Floats:
        """The best heights in this order, by Hildreth's method: one constraint after another, until all hold."""
        place = {item: i for i, item in enumerate(order)}
        pairs = dict[tuple[int, int], float]()
        for column in self.present:
            line = sorted(column, key=place.__getitem__)
            for a, b in pairwise(line):
                pairs[a, b] = self._distance(a, b)
        inverse = np.linalg.inv(self.pull)
        y = np.zeros(self.size)
        held = dict.fromkeys(pairs, 0.0)
        moves = {(a, b): inverse[:, b] - inverse[:, a] for a, b in pairs}
        for _ in range(400):
            worst = 0.0
            for (a, b), apart in pairs.items():
                short = apart - (y[b] - y[a])
                move = moves[a, b]
                step = max(short / (move[b] - move[a]), -held[a, b])
                if step:
                    held[a, b] += step
                    y += step * move
                worst = max(worst, short)
            if worst < 0.02:
                break
        return y

    def _distance(self, a: int, b: int) -> float:
        lanes = (a >= len(self.cells)) + (b >= len(self.cells))
        return (self.room.cells, self.room.cell_to_lane, self.room.lanes)[lanes]
