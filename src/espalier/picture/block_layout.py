"""Where the layers and connections of one block go: few crossings, straight lines, nothing on top of anything.

Columns are given. A layer that is read further away than the next column gets a lane: one straight line at a height of
its own, from which each of those connections turns off to its reader. So 91 connections are at most 12 lines and
their turnings. Layers and lanes are ordered once for the whole block (no two lanes cross) to cross little; heights are
then the solution of a small quadratic programme: connections short, with the given distances between neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STARTS, ROUNDS = 8, 3  # orders to begin from besides the nested one, and how often each is improved
STEP = 50.0  # so much up and down is as bad as a crossing
STRAIGHTER = 6  # times that heights are solved for again, with small steps pulled harder
SLIGHT = 3.0  # a step that looks like a slip
SPINE = 1e4  # what holds the spine at height 0, against pulls of about 1 to 10
SPACING = (33.0, 20.0, 8.0)  # of neighbours in a column, from middle to middle: two cells, a cell and a lane, two lanes


@dataclass(frozen=True)
class Heights:
    """Of each cell, and of the lane of each cell that has one, around 0; crossings: how often connections cross."""

    cells: dict[int, float]
    lanes: dict[int, float]
    crossings: int


def arrange(columns: Mapping[int, int], edges: Iterable[tuple[int, int]]) -> Heights:
    """columns: of each cell; edges: (source, reader), the reader in a later column."""
    return _arranged(tuple(sorted(columns.items())), tuple(sorted(set(edges))))


@lru_cache(maxsize=64)  # blocks are often alike: all open, or drawn once for SVG and once for PNG
def _arranged(columns: tuple[tuple[int, int], ...], edges: tuple[tuple[int, int], ...]) -> Heights:
    block = _Block(dict(columns), edges)
    tried = dict[tuple[int, ...], float]()
    for start in block.starts():
        order = block.untangled(start)
        for _ in range(ROUNDS):
            crossed = int(block.crossings([order])[0])
            if tuple(order) in tried or crossed > min(tried.values(), default=crossed):
                break  # no shortness can make up for that
            y = block.heights(order, exact=0.5)
            tried[tuple(order)] = crossed + block.length(y) / STEP
            order = block.untangled(block.by_neighbours(y, order))
    _, order = min((score, list(one)) for one, score in tried.items())
    snapped = [round(2 * float(value)) / 2 for value in block.straightened(order)]
    cells = {cell: snapped[number] for cell, number in block.number.items()}
    lanes = {cell: snapped[number] for cell, number in block.lane.items()}
    return _read_downwards(block, Heights(cells, lanes, int(block.crossings([order])[0])))


def _read_downwards(block: _Block, heights: Heights) -> Heights:
    """The same picture, of its equals the one in which the first layers are above."""
    cells, lanes = dict(heights.cells), dict(heights.lanes)
    twins: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    for cell in sorted(cells):
        reads = frozenset(a for a, b in block.edges if b == cell)
        read_by = frozenset(b for a, b in block.edges if a == cell)
        twins.setdefault((reads, read_by), []).append(cell)
    for group in twins.values():  # they may change places
        for cell, other in zip(group, sorted(group, key=heights.cells.__getitem__)):
            cells[cell] = heights.cells[other]
            if other in lanes:
                lanes[cell] = heights.lanes[other]
    beside = [(a, b) for a, b in combinations(sorted(cells), 2) if block.columns[a] == block.columns[b]]
    upwards = sum(cells[a] > cells[b] for a, b in beside) - len(beside) / 2
    if upwards > 0 or (upwards == 0 and lanes and lanes[min(lanes)] > 0):  # upside down
        cells, lanes = ({cell: 0.0 - y for cell, y in part.items()} for part in (cells, lanes))
    return Heights(cells, lanes, heights.crossings)


@dataclass(frozen=True)
class _Block:
    """What is to be placed is numbered: 0 is the spine, which is all the cells that are alone in their column, on one
    line at height 0; then come the other cells, then the lanes."""

    columns: dict[int, int]
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def number(self) -> dict[int, int]:
        """Of each cell."""
        beside = Counter(self.columns.values())
        others = [cell for cell, column in self.columns.items() if beside[column] > 1]
        return dict.fromkeys(self.columns, 0) | {cell: i + 1 for i, cell in enumerate(others)}

    @cached_property
    def lane(self) -> dict[int, int]:
        """The number of the lane of each cell that has one."""
        sources = sorted({a for a, b in self.edges if self.columns[b] > self.columns[a] + 1})
        return {cell: self.lanes_from + i for i, cell in enumerate(sources)}

    @cached_property
    def lanes_from(self) -> int:
        return max(self.number.values()) + 1

    @cached_property
    def size(self) -> int:
        return self.lanes_from + len(self.lane)

    @cached_property
    def last(self) -> dict[int, int]:
        """The column of the last reader of each source."""
        return {a: max(self.columns[b] for s, b in self.edges if s == a) for a, _ in self.edges}

    @cached_property
    def present(self) -> list[list[int]]:
        """What stands in or passes through each column."""
        present: list[list[int]] = [[] for _ in range(max(self.columns.values()) + 1)]
        for cell, column in self.columns.items():
            present[column].append(self.number[cell])
        for source, lane in self.lane.items():
            for column in range(self.columns[source] + 1, self.last[source]):
                present[column].append(lane)
        return present

    @cached_property
    def together(self) -> NDArray[np.bool_]:
        """Whether two things share a column; if not, it is all the same which of them comes first."""
        shared = np.zeros((self.size, self.size), dtype=bool)
        for column in self.present:
            shared[np.ix_(column, column)] = True
        return shared

    @cached_property
    def segments(self) -> list[list[tuple[int, int]]]:
        """What runs in each gap between columns: the numbers at its left and right end."""
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
        return [sorted(gap) for gap in gaps]

    @cached_property
    def pairs(self) -> Ints:
        """Segments that may cross, ``(4, pairs)``: left ends of both, right ends of both. Level ones never do."""
        crossing = [
            (a, c, b, d)
            for gap in self.segments
            for (a, b), (c, d) in combinations(gap, 2)
            if a != c and b != d and (a != b or c != d)
        ]
        return np.array(crossing, dtype=np.int64).reshape(-1, 4).T

    def crossings(self, orders: Sequence[Sequence[int]]) -> Ints:
        """Of each of some orders."""
        table = np.array(orders, dtype=np.int64)
        ranks = np.empty_like(table)
        np.put_along_axis(ranks, table, np.broadcast_to(np.arange(self.size), table.shape), axis=1)
        a, c, b, d = (ranks[:, ends] for ends in self.pairs)
        return np.asarray(((a < c) != (b < d)).sum(-1))

    def nested(self) -> list[int]:
        """To begin with: cells in the middle, the longest lanes outside, taking turns above and below."""
        by_length = sorted(self.lane, key=lambda cell: (self.columns[cell] - self.last[cell], cell))
        above, below = by_length[::2], by_length[1::2][::-1]
        cells = list(range(1, self.lanes_from))
        half = len(cells) // 2
        middle = [*cells[:half], 0, *cells[half:]]
        return [*[self.lane[cell] for cell in above], *middle, *[self.lane[cell] for cell in below]]

    def starts(self) -> Iterator[list[int]]:
        """Orders to begin from: nested, and some drawn ones where cells stand beside each other."""
        yield self.nested()
        draw = np.random.default_rng(0)
        for _ in range(STARTS if self.lanes_from > 1 else 0):
            yield draw.permutation(self.size).tolist()

    def by_neighbours(self, y: Floats, order: Sequence[int]) -> list[int]:
        """Sorted by where each would like to be, given the others."""
        strength = np.diag(self.pull)
        wish = y - (self.pull @ y) / strength
        wish[0] = 0.0
        place = {item: i for i, item in enumerate(order)}
        return sorted(range(self.size), key=lambda i: (round(float(wish[i]), 6), place[i]))

    def untangled(self, order: list[int]) -> list[int]:
        """Each thing put where it crosses least, as long as that helps; of equal places the nearest."""
        best = int(self.crossings([order])[0])
        for _ in range(6):
            before = best
            for item in list(order):
                home = order.index(item)
                rest = [*order[:home], *order[home + 1 :]]
                places = sorted(range(len(order)), key=lambda p: abs(p - home))
                tried = [[*rest[:p], item, *rest[p:]] for p in places if self._differs(item, rest, home, p)]
                if tried:
                    crossings = self.crossings(tried)
                    if crossings.min() < best:
                        best, order = int(crossings.min()), tried[int(crossings.argmin())]
            if best == before:
                break
        return order

    def _differs(self, item: int, rest: Sequence[int], home: int, place: int) -> bool:
        """Whether moving there passes, as the last one, something that shares a column with it."""
        return place != home and bool(self.together[item, rest[place - 1] if place > home else rest[place]])

    @cached_property
    def ties(self) -> list[tuple[int, int, float]]:
        """What is connected, and how strongly it pulls together; a lane strongest to the cell it comes from."""
        near = [(a, b, self.columns[b] == self.columns[a] + 1) for a, b in self.edges]
        ties = [(self.number[a] if is_near else self.lane[a], self.number[b], 1.0) for a, b, is_near in near]
        ties += [(self.number[cell], lane, 6.0) for cell, lane in self.lane.items()]
        return [(a, b, strength) for a, b, strength in ties if a != b]

    @cached_property
    def pull(self) -> Floats:
        return self._form([strength for _, _, strength in self.ties])

    def _form(self, strengths: Iterable[float]) -> Floats:
        """The quadratic form of heights; everything is pulled a little to the middle, and the spine held there."""
        form = np.diag([SPINE] + [0.05] * (self.size - 1))
        for (a, b, _), strength in zip(self.ties, strengths):
            form[[a, b], [a, b]] += strength
            form[[a, b], [b, a]] -= strength
        return form

    def length(self, y: Floats) -> float:
        """The sum of all steps up and down."""
        return float(sum(abs(y[a] - y[b]) for a, b, _ in self.ties))

    def straightened(self, order: Sequence[int]) -> Floats:
        """Heights that make the sum of the steps small, not of their squares: few steps, and level lines between."""
        y = self.heights(order)
        for _ in range(STRAIGHTER):
            y = self.heights(order, self._form(s * 20 / max(abs(y[a] - y[b]), 0.5) for a, b, s in self.ties))
        apart = self._apart(order)
        for a, b, _ in sorted(self.ties, key=lambda tie: -tie[2]):
            for move, to in ((b, a), (a, b)) if 0 < abs(y[a] - y[b]) < SLIGHT else ():
                tried = y.copy()
                tried[move] = y[to]
                if move and all(tried[d] - tried[c] > least - SLIGHT / 2 for (c, d), least in apart.items()):
                    y = tried
                    break
        return y

    def heights(self, order: Sequence[int], form: Floats | None = None, *, exact: float = 0.05) -> Floats:
        """The best heights in this order, by Hildreth's method: one constraint after another, until all hold."""
        apart = self._apart(order)
        inverse = np.linalg.inv(self.pull if form is None else form)
        moves = {(a, b): inverse[:, b] - inverse[:, a] for a, b in apart}
        gains = {(a, b): float(move[b] - move[a]) for (a, b), move in moves.items()}
        held = dict.fromkeys(apart, 0.0)
        y = np.zeros(self.size)
        for _ in range(200):
            worst = 0.0
            for pair, least in apart.items():
                short = least - float(y[pair[1]] - y[pair[0]])
                step = max(short / gains[pair], -held[pair])
                if step:
                    held[pair] += step
                    y += step * moves[pair]
                worst = max(worst, short)
            if worst < exact:
                break
        return self._parted(y, order, apart)

    def _parted(self, y: Floats, order: Sequence[int], apart: Mapping[tuple[int, int], float]) -> Floats:
        """Heights with every distance kept, also where the method above was stopped: pushed away from the spine."""
        y[0], home = 0.0, order.index(0)
        for item in reversed(order[:home]):
            y[item] = min([y[item], *[y[b] - least for (a, b), least in apart.items() if a == item]])
        for item in order[home + 1 :]:
            y[item] = max([y[item], *[y[a] + least for (a, b), least in apart.items() if b == item]])
        return y

    def _apart(self, order: Sequence[int]) -> dict[tuple[int, int], float]:
        """How far neighbours of a column are to be from each other, in this order."""
        place = {item: i for i, item in enumerate(order)}
        distance = dict[tuple[int, int], float]()
        for column in self.present:
            for a, b in pairwise(sorted(column, key=place.__getitem__)):
                distance[a, b] = SPACING[(a >= self.lanes_from) + (b >= self.lanes_from)]
        return distance
