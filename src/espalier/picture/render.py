"""The picture of a described network: laid out as shapes, boxes, curves and words at their places, and drawn from these
as SVG, by a writer of its own, to be put into a page as it is, or as PNG, by matplotlib.

Lengths are pixels at full size, y pointing down. What a shape looks like is its ``style``, a name in a palette. Colours
are CSS variables named ``--ep-...``, set for light and for dark by what the reader's system prefers; a page with a
switch of its own sets them on ``.espalier-picture``.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from espalier import files
from espalier.picture.block_layout import Heights, arrange
from espalier.picture.describe import Drawing, share_label
from espalier.space import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = tuple[float, float]

EDGE = 24.0  # around the picture
CELL = (32.0, 24.0)
PITCH = 64.0  # from column to column
LEAST_WIDTH = 560.0
BAND_SIDE, BAND_GAP = 46.0, 24.0  # left and right of the cells; between bands
HEADER, AXIS = 38.0, 38.0  # of a band: room for its words above and below the cells
BAR = 18.0  # height of a layer's bar
LETTER, LETTER_BOLD = 0.6, 0.68  # mean width of a letter over its size, on the safe side
NARROW = 16.0  # the least width of a bar, to be seen
# Okabe and Ito's blue for what is kept and for what a block's input feeds; the rest is grey, told apart by lightness.
PALETTE = {  # in the light, in the dark
    "paper": ("#ffffff", "#13171c"),
    "band": ("#f5f6f8", "#1b2128"),
    "ink": ("#1c242d", "#e8ecf1"),
    "muted": ("#5b6672", "#a3aebb"),
    "faint": ("#66717d", "#8692a0"),
    "cell": ("#ffffff", "#2a323c"),
    "rim": ("#4a5763", "#94a1ae"),
    "end": ("#2c3844", "#d5dce4"),
    "on-end": ("#ffffff", "#13171c"),
    "near": ("#4a5763", "#a9b5c1"),
    "far": ("#848f9b", "#6c7986"),
    "input": ("#0072b2", "#56b4e9"),
    "fixed": ("#87929e", "#66727f"),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
"""The colours of a picture on white, by their use."""
DARK = {name: dark for name, (_, dark) in PALETTE.items()}
"""The colours of a picture on black, by their use."""
# style: (fill, stroke, width of the stroke, opacity of the fill)
LOOKS: dict[str, tuple[str, str, float, float]] = {
    "band": ("band", "", 0.0, 1.0),
    "cell": ("cell", "rim", 1.2, 1.0),
    "end": ("end", "", 0.0, 1.0),
    "port": ("end", "", 0.0, 1.0),
    "edge near": ("", "near", 1.3, 1.0),
    "edge far": ("", "far", 1.1, 1.0),
    "edge input": ("", "input", 1.1, 1.0),
    "link": ("", "end", 1.6, 1.0),
    "whole": ("", "faint", 1.0, 1.0),
    "kept": ("input", "", 0.0, 1.0),
    "flow": ("input", "", 0.0, 0.16),
    "fixed": ("fixed", "", 0.0, 1.0),
}
INKS = {"ink": "ink", "muted": "muted", "faint": "faint", "on cell": "ink", "on end": "on-end"}
ALIGN = {"start": "left", "middle": "center", "end": "right"}
NARROWER = 0.92  # DejaVu Sans, which matplotlib brings along, is wider than what browsers use
LEAST = 0.66  # of its size: below that a picture in a page is not shrunk
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


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

    start: Place
    steps: tuple[tuple[Place, ...], ...]
    style: str
    ends: tuple[int, int] | None = None
    closed: bool = False


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
    exit_at: Place | None = None
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

    def paint(self, scene: Scene, y: float, came_from: Place | None) -> Place | None:
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

    def _curve(self, a: int, b: int, places: dict[int, Place], middle: float) -> Curve:
        (x0, y0), (x1, y1) = places[a], places[b]
        half = CELL[0] / 2 if a != self.entry else 4.0
        start, end = (x0 + half, y0), (x1 - CELL[0] / 2, y1)
        steps: list[tuple[Place, ...]]
        if self.at[b] == self.at[a] + 1:
            steps = [_bend(start, end)]
        else:
            lane = middle + self.heights.lanes[a]
            on, off = (x0 + PITCH - CELL[0] / 2, lane), (x1 - PITCH + CELL[0] / 2, lane)
            steps = [_bend(start, on), (off,), _bend(off, end)]
        kind = "input" if self.at[a] == 0 else "near" if len(steps) == 1 else "far"
        return Curve(start, tuple(steps), f"edge {kind}", ends=(a, b))

    def _cell(self, scene: Scene, at: Place, cell: dict[str, Any]) -> None:
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

    def _enter(self, scene: Scene, at: Place, came_from: Place | None, cell: dict[str, Any]) -> None:
        """The line from the band above, where the cell itself stands, to this one's beginning."""
        x, y = at
        if came_from is not None:
            (x0, y0), r = came_from, 8.0
            x0 += CELL[0] / 2
            right, left = x0 + 18.0, EDGE / 2
            above = y - (HEADER - self.top) - self.heights.cells[cell["id"]] - BAND_GAP / 2
            end = (x - 4.0, y)
            tips = [(right, y0), (right, above), (left, above), (left, y)]
            scene.add(Curve((x0, y0), (*_around((x0, y0), tips, end, r), (end,)), "link"))
        scene.add(Box(x - 4.0, y - 4.0, 8.0, 8.0, "port", 4.0, hover=f"from {cell['label']}, {cell['name']}"))
        scene.add(Text(x + 4.0, y - 10.0, f"from {cell['label']}", "muted", 10.5, "end"))


def _bend(a: Place, b: Place) -> tuple[Place, ...]:
    """From a to b, level at both."""
    half = (a[0] + b[0]) / 2
    return (half, a[1]), (half, b[1]), b


def _corner(a: Place, tip: Place, b: Place) -> tuple[Place, ...]:
    """From a to b, a quarter of a circle around the corner at the tip."""
    k = 0.5523
    (ax, ay), (tx, ty), (bx, by) = a, tip, b
    return (ax + k * (tx - ax), ay + k * (ty - ay)), (bx + k * (tx - bx), by + k * (ty - by)), b


def _around(start: Place, tips: Sequence[Place], end: Place, r: float) -> list[tuple[Place, ...]]:
    """The steps from the start along level and upright lines to near the end, with a rounded corner at each tip."""
    points, steps = [start, *tips, end], list[tuple[Place, ...]]()
    for (x0, y0), (x, y), (x1, y1) in zip(points, points[1:], points[2:]):
        before = (x - r * _sign(x - x0), y - r * _sign(y - y0))
        steps += [(before,), _corner(before, (x, y), (x + r * _sign(x1 - x), y + r * _sign(y1 - y)))]
    return steps


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def rounded(box: Box) -> Curve:
    """A box as its outline."""
    r = min(box.radius, box.width / 2, box.height / 2)
    left, top, right, bottom = box.x, box.y, box.x + box.width, box.y + box.height
    start, corners = (left + r, top), [(right, top), (right, bottom), (left, bottom), (left, top)]
    return Curve(start, tuple(_around(start, corners, start, r)), box.style, closed=True)


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


# ---- SVG and PNG -----------------------------------------------------------------------------------------------------


def draw(drawing: Drawing) -> str:
    """The picture as SVG text. Equal drawings give equal text. Its ids and style rules touch nothing else in a page."""
    scene = lay_out(drawing)
    body = "\n".join(_element(shape) for shape in scene.shapes)
    title, words = _text(scene.title), _text(scene.words)
    name = "ep" + hashlib.sha256((title + words + body).encode()).hexdigest()[:10]
    width, height = _n(scene.width), _n(scene.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="espalier-picture" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="{name}-title {name}-told" '
        f'style="--ep-width:{width}px;--ep-least:{_n(LEAST * scene.width)}px" font-family="{FONT}">\n'
        f'<title id="{name}-title">{title}</title>\n'
        f'<desc id="{name}-told">{words}</desc>\n'
        f"<style>{_rules(scene)}</style>\n"
        f'<rect class="ep-paper" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


def save(drawing: Drawing, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Writes the picture as ``.svg`` or ``.png``. dark: of the PNG, which cannot know what its reader prefers."""
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise BadInput(f"a picture is written as .svg or .png, not as {path.name!r}")
    return files.write(path, encoded(drawing, path.suffix[1:], dark=dark))


def encoded(drawing: Drawing, kind: str, *, dark: bool = False) -> bytes:
    """The content of a file. kind: "svg" or "png"."""
    if kind == "svg":
        return draw(drawing).encode()
    buffer = io.BytesIO()
    figure(drawing, dark=dark).savefig(buffer, format=kind, dpi=200, metadata={"Software": None})
    return buffer.getvalue()


def _rules(scene: Scene) -> str:
    light, dark = (";".join(f"--ep-{name}:{value}" for name, value in p.items()) for p in (LIGHT, DARK))
    root = ".espalier-picture"
    rules = [
        f"{root}{{{light}}}",
        # In a page it takes the room there is, down to what can be read; a narrower place has to scroll.
        f"{root}:not(:root){{display:block;width:100%;height:auto;max-width:var(--ep-width);min-width:var(--ep-least)}}",
        f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}",
        f"{root} .ep-paper{{fill:var(--ep-paper)}}",
    ]
    for style, (fill, stroke, width, opacity) in LOOKS.items():
        look = [f"fill:var(--ep-{fill})" if fill else "fill:none"]
        if stroke:
            look.append(f"stroke:var(--ep-{stroke});stroke-width:{width:g}")
        if opacity < 1:
            look.append(f"fill-opacity:{opacity:g}")
        rules.append(f"{root} .{_class(style)}{{{';'.join(look)}}}")
    rules += [f"{root} .{_class(style)}{{fill:var(--ep-{ink})}}" for style, ink in INKS.items()]
    ends = sorted({end for shape in scene.shapes if isinstance(shape, Curve) and shape.ends for end in shape.ends})
    if ends:  # pointing at a layer shows what it reads and what reads it
        rules.append(f"{root}:has(rect[data-cell]:hover) [data-from]{{opacity:.15}}")
        mine = [f'{root}:has(rect[data-cell="{i}"]:hover) path:is([data-from="{i}"],[data-to="{i}"])' for i in ends]
        rules.append(",".join(mine) + "{opacity:1;stroke-width:2}")
    return "".join(rules)


def _class(style: str) -> str:
    return "ep-" + style.replace(" ", "-")


def _element(shape: Box | Curve | Text) -> str:
    style = f'class="{_class(shape.style)}"'
    if isinstance(shape, Curve):
        ends = "" if shape.ends is None else ' data-from="{}" data-to="{}"'.format(*shape.ends)
        return f'<path {style}{ends} d="{_path(shape)}"/>'
    place = f'x="{_n(shape.x)}" y="{_n(shape.y)}"'
    cell = "" if shape.cell is None else f' data-cell="{shape.cell}"'
    hover = f"<title>{_text(shape.hover)}</title>" if shape.hover else ""
    if isinstance(shape, Text):
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        weight = ' font-weight="600"' if shape.bold else ""
        cell += "" if shape.hover or not shape.style.startswith("on ") else ' pointer-events="none"'
        look = f'font-size="{_n(shape.size)}"{anchor}{weight}'
        return f"<text {style} {place} {look}{cell}>{hover}{_text(shape.text)}</text>"
    radius = f' rx="{_n(shape.radius)}"' if shape.radius else ""
    size = f'width="{_n(shape.width)}" height="{_n(shape.height)}"{radius}'
    return f"<rect {style}{cell} {place} {size}>{hover}</rect>"


def _path(curve: Curve) -> str:
    parts = [f"M{_n(curve.start[0])} {_n(curve.start[1])}"]
    for step in curve.steps:
        points = " ".join(f"{_n(x)} {_n(y)}" for x, y in step)
        parts.append(("C" if len(step) == 3 else "L") + points)
    return "".join(parts) + ("Z" if curve.closed else "")


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(text: str) -> str:
    return escape(_clean(text))


def _clean(text: str) -> str:
    """Text without the signs that XML cannot hold."""
    return re.sub("[\x00-\x1f\ud800-\udfff\ufffe\uffff]", " ", text)


def figure(drawing: Drawing, *, dark: bool = False) -> Figure:
    """The same shapes with matplotlib, 100 pixels to the inch."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    scene = lay_out(drawing)
    palette = DARK if dark else LIGHT
    with matplotlib.rc_context({"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "text.usetex": False}):
        result = Figure(figsize=(scene.width / 100, scene.height / 100), facecolor=palette["paper"])
        axes = result.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        for order, shape in enumerate(scene.shapes):
            if isinstance(shape, Text):
                axes.text(
                    shape.x, shape.y, _clean(shape.text), parse_math=False, color=palette[INKS[shape.style]],
                    fontsize=shape.size * 0.72 * NARROWER, ha=ALIGN[shape.anchor], va="baseline",
                    fontweight="bold" if shape.bold else "normal", zorder=order,
                )  # fmt: skip
                continue
            outline = shape if isinstance(shape, Curve) else rounded(shape)
            points, codes = [outline.start], [Outline.MOVETO]
            for step in outline.steps:
                points += step
                codes += [Outline.CURVE4] * 3 if len(step) == 3 else [Outline.LINETO]
            if outline.closed:
                points.append(outline.start)
                codes.append(Outline.CLOSEPOLY)
            fill, stroke, width, opacity = LOOKS[shape.style]
            look = {
                "facecolor": (palette[fill], opacity) if fill else "none",
                "edgecolor": palette[stroke] if stroke else "none",
                "linewidth": width * 0.72,
                "capstyle": "butt",
            }
            axes.add_patch(PathPatch(Outline(points, codes), zorder=order, **look))
    return result
