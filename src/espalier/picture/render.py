"""The picture of a described network: SVG by a writer of its own, to be put into a page as it is, PNG by matplotlib.

Colours are CSS variables named ``--ep-...``, set for light and for dark by what the reader's system prefers; a page
with a switch of its own sets them on ``.espalier-picture``.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from espalier import files
from espalier.picture.describe import Drawing
from espalier.picture.shapes import Box, Curve, Scene, Text, lay_out, rounded
from espalier.space import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    if isinstance(shape, Text):
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        weight = ' font-weight="600"' if shape.bold else ""
        mine = "" if shape.cell is None else f' data-cell="{shape.cell}"'
        mine += "" if shape.hover or not shape.style.startswith("on ") else ' pointer-events="none"'
        hover = f"<title>{_text(shape.hover)}</title>" if shape.hover else ""
        attributes = f'class="{_class(shape.style)}" x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}"'
        return f"<text {attributes}{anchor}{weight}{mine}>{hover}{_text(shape.text)}</text>"
    if isinstance(shape, Curve):
        ends = "" if shape.ends is None else ' data-from="{}" data-to="{}"'.format(*shape.ends)
        return f'<path class="{_class(shape.style)}"{ends} d="{_path(shape)}"/>'
    known = "" if shape.cell is None else f' data-cell="{shape.cell}"'
    radius = f' rx="{_n(shape.radius)}"' if shape.radius else ""
    place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"{radius}'
    hover = f"<title>{_text(shape.hover)}</title>" if shape.hover else ""
    return f'<rect class="{_class(shape.style)}"{known} {place}>{hover}</rect>'


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
    return "".join(
        sign if sign >= " " and sign not in "\ufffe\uffff" and not "\ud800" <= sign <= "\udfff" else " "
        for sign in text
    )


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
