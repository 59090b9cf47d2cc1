"""What a figure is written as: shorter than matplotlib writes it, and the same picture."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from espalier.report.figures import RULES, shorter

USE = "{http://www.w3.org/2000/svg}use"


def drawn(svg: bytes) -> list[tuple[str, ...]]:
    """Every marker with its place and its style, which its group may have."""
    parents = {child: parent for parent in ElementTree.fromstring(svg).iter() for child in parent}
    return [
        (f"{float(use.attrib['x']):.2f}", f"{float(use.attrib['y']):.2f}", use.get("style") or parent.attrib["style"])
        for use, parent in parents.items()
        if use.tag == USE
    ]


def picture() -> bytes:
    figure, buffer = Figure(), io.BytesIO()
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1, 4, 9], "o-", color="#0072B2")
    axes.plot([1, 2, 3], [2, 3, 5], "s--", color="#D55E00", label="a text  with two spaces")
    axes.scatter([1, 2], [3, 4], c=["#009E73", "#CC79A7"])  # in two colours
    axes.legend()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def test_a_style_is_said_once_and_every_marker_has_its_own():
    with matplotlib.rc_context(RULES):
        before = picture()
    after = shorter(before)
    assert drawn(before) == drawn(after)
    assert len(after) < 0.9 * len(before)
    texts = [re.findall(rb">([^<>]*\S[^<>]*)</text>", svg) for svg in (before, after)]
    assert texts[0] == texts[1]
