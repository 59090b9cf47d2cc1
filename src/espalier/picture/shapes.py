"""A drawing as shapes: boxes, curves and words at their places, which SVG and PNG are both written from.

Lengths are pixels at full size, y pointing down. What a shape looks like is its ``style``, a name in a palette.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.picture.block_layout import Heights, arrange
from espalier.picture.describe import Drawing, share_label
from espalier.space import BadInput

Point = tuple[float, float]

EDGE = 24.0  # around the picture
CELL = (32.0, 24.0)
PITCH = 64.0  # from column to column
LEAST_WIDTH = 560.0
BAND_SIDE, BAND_GAP = 46.0, 24.0  # left and right of the cells; between bands
HEADER, AXIS = 38.0, 38.0  # of a band: room for its words above and below the cells
BAR = 18.0  # height of a layer's bar
LETTER, LETTER_BOLD = 0.6, 0.68  # mean width of a letter over its size, on the safe side
NARROW = 16.0  # the least width of a bar, to be seen


@dataclass(frozen=True)
class Box:
    """cell: which cell of the drawing it is, if it is one; hover: what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    style: str
    radius: float = 0.0
    cell: int | None = None
    hover: str = ""


@dataclass(frozen=True)
class Curve:
    """Starts at the first point; then a line to each single point, a cubic curve along each three. ends: the cells."""

    start: Point
    steps: tuple[tuple[Point, ...], ...]
    style: str
    ends: tuple[int, int] | None = None
    closed: bool = False

    @property
    def end(self) -> Point:
        return self.steps[-1][-1]


@dataclass(frozen=True)
class Text:
    """y: of the baseline. anchor: "start", "middle" or "end". cell: the cell it is the label of, if it is one."""

    x: float
    y: float
    text: str
    style: str
    size: float
    anchor: str = "start"
    bold: bool = False
    cell: int | None = None
    hover: str = ""


@dataclass
class Scene:
    """Shapes, in the order they are painted. words: what the picture shows, for who cannot see it."""

    title: str
    words: str
    width: float = 0.0
    height: float = 0.0
    shapes: list[Box | Curve | Text] = field(default_factory=list)

    def add(self, *shapes: Box | Curve | Text) -> None:
        self.shapes += shapes


def lay_out(drawing: Drawing) -> Scene:
    """What :mod:`espalier.picture.describe` described, laid out."""
    scene = Scene(drawing["title"], " ".join([", ".join(drawing["facts"]) + ".", *drawing["notes"]]))
    if drawing["kind"] == "graph":
        _graph(scene, drawing)
    elif drawing["kind"] == "layers":
        _layers(scene, drawing)
    else:
        raise BadInput(f"a drawing is of the kind graph or layers, not {drawing['kind']!r}")
    return scene


def _head(scene: Scene, drawing: Drawing) -> float:
    """Title and facts; returns where the picture may begin."""
    y = _lines(scene, drawing["title"], EDGE + 14.0, 17.0, 22.0, "ink", bold=True)
    return _lines(scene, "  \u00b7  ".join(drawing["facts"]), y, 13.0, 18.0, "muted")


def _foot(scene: Scene, notes: Sequence[str], y: float) -> None:
    for note in notes:
        y = _lines(scene, note, y + 11.5, 11.5, 17.0, "muted") - 11.5
    scene.height = y + EDGE - 6.0


def _lines(scene: Scene, text: str, y: float, size: float, pitch: float, style: str, *, bold: bool = False) -> float:
    """Text on as many lines as it needs; y: of its first baseline. Returns where the next one would be."""
    for line in textwrap.wrap(text, int((scene.width - 2 * EDGE) / (size * (LETTER_BOLD if bold else LETTER)))):
        scene.add(Text(EDGE, y, line, style, size, bold=bold))
        y += pitch
    return y


# ---- a graph in bands ------------------------------------------------------------------------------------------------


def _graph(scene: Scene, drawing: Drawing) -> None:
    bands = [_Band(drawing, i) for i in range(len(drawing["bands"]))]
    most = max((band.columns for band in bands), default=1)
    scene.width = max(LEAST_WIDTH, 2 * EDGE + 2 * BAND_SIDE + CELL[0] + PITCH * (most - 1))
    y = _head(scene, drawing)
    exit_at: Point | None = None
    for band in bands:
        exit_at = band.paint(scene, y, exit_at)
        y += band.height + BAND_GAP
    _foot(scene, drawing["notes"], y - BAND_GAP + 14.0)


class _Band:
    """One block: its input, its layers, and what reads them all."""

    def __init__(self, drawing: Drawing, number: int) -> None:
        self.words = drawing["bands"][number]
        every = {cell["id"]: cell for cell in drawing["cells"]}
        self.edges = [(edge["from"], edge["to"]) for edge in drawing["edges"] if edge["band"] == number]
        self.cells = {i: every[i] for i in sorted({end for edge in self.edges for end in edge})}
        self.first = min((cell["column"] for cell in self.cells.values()), default=0)
        at = {i: cell["column"] - self.first for i, cell in self.cells.items()}
        self.heights = arrange(at, self.edges) if self.cells else Heights({}, {}, 0)
        self.at = at
        self.columns = max(at.values(), default=0) + 1
        cells, lines = (list(part.values()) or [0.0] for part in (self.heights.cells, self.heights.lanes))
        self.top = min(min(cells) - CELL[1] / 2, min(lines), -CELL[1] / 2 - 16.0)  # room for the names of both ends
        self.bottom = max(max(cells) + CELL[1] / 2, max(lines))
        self.height = HEADER + self.bottom - self.top + AXIS if self.cells else HEADER
        self.entry = next((i for i, cell in self.cells.items() if cell["band"] != number), None)

    def paint(self, scene: Scene, y: float, came_from: Point | None) -> Point | None:
        """Returns where the line to the next band leaves."""
        left, width = EDGE + BAND_SIDE, scene.width - 2 * EDGE
        scene.add(Box(EDGE, y, width, self.height, "band", radius=8.0))
        scene.add(Text(EDGE + 14, y + 22, self.words["label"], "ink", 13.0, bold=True))
        scene.add(Text(EDGE + width - 14, y + 22, self.words["fact"], "muted", 12.0, anchor="end"))
        if not self.cells:
            return None
        middle = y + HEADER - self.top
        places = {i: (left + CELL[0] / 2 + PITCH * self.at[i], middle + self.heights.cells[i]) for i in self.cells}
        for a, b in sorted(self.edges, key=lambda edge: (self.at[edge[0]] - self.at[edge[1]], edge)):
            scene.add(self._curve(a, b, places, middle))
        for i, cell in self.cells.items():
            if i == self.entry:
                self._enter(scene, places[i], came_from, cell)
            else:
                self._cell(scene, places[i], cell)
        scene.add(Text(EDGE + 14, y + self.height - 12, "depth", "faint", 10.5))
        for column in range(self.columns):
            x = left + CELL[0] / 2 + PITCH * column
            scene.add(Text(x, y + self.height - 12, str(self.first + column), "faint", 10.5, anchor="middle"))
        exit_cell = max(self.cells)
        return places[exit_cell]

    def _curve(self, a: int, b: int, places: dict[int, Point], middle: float) -> Curve:
        (x0, y0), (x1, y1) = places[a], places[b]
        half = CELL[0] / 2 if a != self.entry else 4.0
        start, end = (x0 + half, y0), (x1 - CELL[0] / 2, y1)
        steps: list[tuple[Point, ...]]
        if self.at[b] == self.at[a] + 1:
            steps = [_bend(start, end)]
        else:
            lane = middle + self.heights.lanes[a]
            on, off = (x0 + PITCH - CELL[0] / 2, lane), (x1 - PITCH + CELL[0] / 2, lane)
            steps = [_bend(start, on), (off,), _bend(off, end)]
        kind = "input" if self.at[a] == 0 else "near" if len(steps) == 1 else "far"
        return Curve(start, tuple(steps), f"edge {kind}", ends=(a, b))

    def _cell(self, scene: Scene, at: Point, cell: dict[str, Any]) -> None:
        (x, y), (width, height) = at, CELL
        layer = cell["role"] == "layer"
        sources = [a for a, b in self.edges if b == cell["id"]]
        readers = [b for a, b in self.edges if a == cell["id"]]
        hover = f"{cell['label']}: {cell['name']}"
        if sources:
            hover += f"; reads {cell['kept']} of {cell['total']}: {', '.join(map(str, sources))}"
        if readers:
            hover += f"; read by {', '.join(map(str, readers))}"
        style = "cell" if layer else "end"
        radius = 5.0 if layer else 12.0
        scene.add(Box(x - width / 2, y - height / 2, width, height, style, radius, cell["id"], hover))
        scene.add(Text(x, y + 4.5, cell["label"], f"on {style}", 12.5, "middle", cell=cell["id"], bold=not layer))
        if not layer:
            # Its name above a cell that begins or ends a band, on the side where no connection runs.
            first, side = self.at[cell["id"]] == 0, width / 2 - 3.0
            x, anchor = (x + side, "end") if first else (x - side, "start")
            scene.add(Text(x, y - height / 2 - 6.0, cell["name"], "muted", 10.5, anchor))

    def _enter(self, scene: Scene, at: Point, came_from: Point | None, cell: dict[str, Any]) -> None:
        """The line from the band above, where the cell itself stands, to this one's beginning."""
        x, y = at
        if came_from is not None:
            (x0, y0), r = came_from, 8.0
            x0 += CELL[0] / 2
            right, left = x0 + 18.0, EDGE / 2
            above = y - (HEADER - self.top) - self.heights.cells[cell["id"]] - BAND_GAP / 2
            steps = [
                (((right - r), y0),),
                _corner((right - r, y0), (right, y0), (right, y0 + r)),
                ((right, above - r),),
                _corner((right, above - r), (right, above), (right - r, above)),
                ((left + r, above),),
                _corner((left + r, above), (left, above), (left, above + r)),
                ((left, y - r),),
                _corner((left, y - r), (left, y), (left + r, y)),
                ((x - 4.0, y),),
            ]
            scene.add(Curve((x0, y0), tuple(steps), "link"))
        scene.add(Box(x - 4.0, y - 4.0, 8.0, 8.0, "port", 4.0, hover=f"from {cell['label']}, {cell['name']}"))
        scene.add(Text(x + 4.0, y - 10.0, f"from {cell['label']}", "muted", 10.5, "end"))


def _bend(a: Point, b: Point) -> tuple[Point, ...]:
    """From a to b, level at both."""
    half = (a[0] + b[0]) / 2
    return (half, a[1]), (half, b[1]), b


def _corner(a: Point, tip: Point, b: Point) -> tuple[Point, ...]:
    """From a to b, a quarter of a circle around the corner at the tip."""
    k = 0.5523
    (ax, ay), (tx, ty), (bx, by) = a, tip, b
    return (ax + k * (tx - ax), ay + k * (ty - ay)), (bx + k * (tx - bx), by + k * (ty - by)), b


def rounded(box: Box) -> Curve:
    """A box as its outline."""
    r = min(box.radius, box.width / 2, box.height / 2)
    left, top, right, bottom = box.x, box.y, box.x + box.width, box.y + box.height
    steps: list[tuple[Point, ...]] = []
    corners = [(right, top, 0, 1), (right, bottom, -1, 0), (left, bottom, 0, -1), (left, top, 1, 0)]
    for x, y, dx, dy in corners:  # clockwise; dx, dy: the way on from this corner
        before = (x - dy * r, y + dx * r)
        steps += [(before,), _corner(before, (x, y), (x + dx * r, y + dy * r))]
    return Curve((left + r, top), tuple(steps), box.style, closed=True)


# ---- layers one below the other --------------------------------------------------------------------------------------


def _layers(scene: Scene, drawing: Drawing) -> None:
    cells = drawing["cells"]
    chain = bool(drawing["edges"])
    names = min(max(len(cell["label"]) for cell in cells) * 12.0 * LETTER + 16, 230.0)
    bars, numbers = 300.0, 130.0
    scene.width = max(2 * EDGE + names + bars + numbers, 480.0)
    y = _head(scene, drawing) + 8.0
    pitch = BAR + (24.0 if chain else 9.0)
    scale = bars / max(cell["total"] for cell in cells)
    left = EDGE + names
    spans: list[tuple[float, float]] = []
    notes = list(drawing["notes"])
    if any(cell["total"] * scale < NARROW for cell in cells):
        notes.append("The narrowest layers are drawn wider than to scale.")
    for i, cell in enumerate(cells):
        full = max(cell["total"] * scale, NARROW)
        kept = full * cell["kept"] / cell["total"]
        start = left + (bars - full) / 2 if chain else left
        inner = left + (bars - kept) / 2 if chain else left
        spans.append((inner, inner + kept))
        if chain and i:
            (a, b), (c, d) = spans[-2], spans[-1]
            top, bottom = y + pitch * (i - 1) + BAR, y + pitch * i
            scene.add(Curve((a, top), (((b, top),), ((d, bottom),), ((c, bottom),)), "flow", closed=True))
        _bar(scene, cell, start, inner, y + pitch * i, full, kept)
        baseline = y + pitch * i + BAR / 2 + 4.3
        text = shortened(cell["label"], names - 12, 12.0)
        hover = cell["label"] if text != cell["label"] else ""
        scene.add(Text(EDGE, baseline, text, "ink", 12.0, cell=cell["id"], hover=hover))
        fixed = cell["role"] == "fixed"
        count = str(cell["kept"]) if fixed else f"{cell['kept']} of {cell['total']}"
        scene.add(Text(left + bars + 16, baseline, cell.get("note", count), "ink" if not fixed else "muted", 12.0))
        if not fixed and "note" not in cell:
            share = share_label(cell["kept"] / cell["total"])
            scene.add(Text(scene.width - EDGE, baseline, share, "muted", 12.0, anchor="end"))
    _foot(scene, notes, y + pitch * len(cells) + (0.0 if chain else 10.0))


def _bar(scene: Scene, cell: dict[str, Any], start: float, inner: float, y: float, full: float, kept: float) -> None:
    hover = f"{cell['label']}: {cell['kept']} of {cell['total']}"
    if cell["role"] == "fixed":
        scene.add(Box(start, y, full, BAR, "fixed", 2.0, cell["id"], hover))
        return
    scene.add(Box(start, y, full, BAR, "whole", 2.0, cell["id"], hover))
    if kept:
        scene.add(Box(inner, y, max(kept, 1.0), BAR, "kept", min(2.0, kept / 2), hover=hover))


def shortened(text: str, width: float, size: float) -> str:
    """Text that fits, its end kept: names of modules differ there.

    >>> shortened("encoder.layers.11.attention", 100, 12.0)
    '\u202611.attention'
    """
    most = max(int(width / (size * LETTER)), 4)
    return text if len(text) <= most else "\u2026" + text[-(most - 1) :]
