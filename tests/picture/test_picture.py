"""The picture of a found network, read back: everything is there once, in its place, on top of nothing."""

import re
import struct
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import combinations, pairwise
from xml.sax.saxutils import escape

import drawn_masks
import matplotlib.image
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

import espalier
from espalier import picture
from espalier.picture import block_layout
from espalier.picture.render import shortened

SVG = "{http://www.w3.org/2000/svg}"
MASKS = {**drawn_masks.TABLE_2, "random": drawn_masks.RANDOM}
MODEL = {f"stage{i}.block{j}.conv": (3 * i + j, 16 * (i + 1)) for i in range(4) for j in range(3)}
LAYERS = {
    "perceptron": picture.mlp([784, 784, 784, 784, 10], [340, 141, 126]),
    "model": picture.layers(MODEL | {"a.very.long.name.of.a.module.inside.of.another.module": (1, 1000)}),
}
FONTS = {bold: FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal") for bold in (False, True)}


@pytest.fixture(scope="module")
def graphs():
    drawings = {name: picture.densenet(mask) for name, mask in MASKS.items()}
    return {name: (drawing, ET.fromstring(picture.draw(drawing))) for name, drawing in drawings.items()}


def attributes(element, *names):
    return tuple(float(element.get(name)) for name in names)


def boxes(svg):
    result = [
        (int(r.get("data-cell")), attributes(r, "x", "y", "width", "height"))
        for r in svg.iter(f"{SVG}rect")
        if r.get("data-cell")
    ]
    return result


def shown(text):
    """Without the title inside, which is shown when pointed at."""
    return text.text if text.text else text[-1].tail


def words(svg):
    """Text with the box it takes in DejaVu Sans, which is wider than most fonts for reading."""
    result = []
    for text in svg.iter(f"{SVG}text"):
        x, y, size = attributes(text, "x", "y", "font-size")
        width = TextPath((0, 0), shown(text), size, FONTS[text.get("font-weight") is not None]).get_extents().x1
        x -= {"middle": width / 2, "end": width}.get(text.get("text-anchor"), 0)
        result.append((text, (x, y - 0.75 * size, width, 0.95 * size)))
    return result


def overlap(one, other):
    (a, b, w, h), (c, d, v, g) = one, other
    return a < c + v and c < a + w and b < d + g and d < b + h


def points(path):
    """Many points along a path of lines and cubic curves."""
    result, here = [], None
    for command, numbers in re.findall(r"([MLC])([^MLCZ]*)", path.get("d")):
        values = [float(n) for n in numbers.split()]
        if command == "M":
            result.append(here := tuple(values))
            continue
        corners = [here, *zip(values[::2], values[1::2])]
        a, *middle, b = corners
        p, q = middle or [tuple((2 * s + e) / 3 for s, e in zip(a, b)), tuple((s + 2 * e) / 3 for s, e in zip(a, b))]
        for i in range(1, 25):
            t = i / 24
            weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            result.append(tuple(sum(w * c[k] for w, c in zip(weights, (a, p, q, b))) for k in (0, 1)))
        here = b
    return result


@pytest.mark.parametrize("name", MASKS)
class TestGraph:
    def test_every_kept_layer_is_there_once_under_its_original_depth(self, graphs, name):
        drawing, svg = graphs[name]
        kept = [cell["id"] for cell in drawing["cells"]]
        assert sorted(number for number, _ in boxes(svg)) == sorted(kept)
        labels = [(int(t.get("data-cell")), t.text) for t in svg.iter(f"{SVG}text") if t.get("data-cell")]
        assert sorted(labels) == [(number, str(number)) for number in sorted(kept)]
        assert not {number for number, _ in boxes(svg)} & set(drawing["summary"]["dead"])

    def test_labels_stand_in_their_cells(self, graphs, name):
        _, svg = graphs[name]
        cells = dict(boxes(svg))
        for text, (x, y, width, height) in words(svg):
            if text.get("data-cell"):
                left, top, w, h = cells[int(text.get("data-cell"))]
                assert left < x
                assert top < y
                assert x + width < left + w
                assert y + height < top + h

    def test_nothing_overlaps(self, graphs, name):
        _, svg = graphs[name]
        cells = boxes(svg)
        for (_, one), (_, other) in combinations(cells, 2):
            assert not overlap(one, other)
        text = words(svg)
        for (one, a), (other, b) in combinations(text, 2):
            assert not overlap(a, b), (one.text, other.text)
        for one, a in text:
            for number, b in cells:
                assert one.get("data-cell") == str(number) or not overlap(a, b), (one.text, number)

    def test_connections_lead_from_cell_to_cell_and_through_none(self, graphs, name):
        drawing, svg = graphs[name]
        cells = dict(boxes(svg))
        paths = [path for path in svg.iter(f"{SVG}path") if path.get("data-from")]
        ends = [(int(path.get("data-from")), int(path.get("data-to"))) for path in paths]
        assert sorted(ends) == sorted((edge["from"], edge["to"]) for edge in drawing["edges"])
        bands = {cell["id"]: cell["band"] for cell in drawing["cells"]}
        ports = [
            attributes(r, "x", "y", "width", "height") for r in svg.iter(f"{SVG}rect") if r.get("class") == "ep-port"
        ]
        assert len(ports) == 2
        for path, (a, b) in zip(paths, ends):
            line = points(path)
            x, y, width, height = cells[a] if bands[a] == bands[b] else ports[bands[b] - 1]
            assert line[0] == pytest.approx((x + width, y + height / 2), abs=0.02)
            x, y, width, height = cells[b]
            assert line[-1] == pytest.approx((x, y + height / 2), abs=0.02)
            assert all(p[0] <= q[0] + 1e-6 for p, q in pairwise(line)), "from left to right"
            for number, (left, top, w, h) in cells.items():
                inside = [p for p in line if left < p[0] < left + w and top - 2 < p[1] < top + h + 2]
                assert number in (a, b) or not inside, f"{a} to {b} runs through {number}"

    def test_columns_are_depths(self, graphs, name):
        drawing, svg = graphs[name]
        cells = dict(boxes(svg))
        for band in range(3):
            inside = [cell for cell in drawing["cells"] if cell["band"] == band]
            places = {(cell["column"], cells[cell["id"]][0]) for cell in inside}
            columns, lefts = zip(*sorted(places))
            assert len(set(columns)) == len(columns), "one place for each depth"
            steps = {round((q - p) / (b - a), 3) for (a, p), (b, q) in pairwise(zip(columns, lefts))}
            assert len(steps) <= 1
        below = [(float(t.get("x")), t.text) for t in svg.iter(f"{SVG}text") if t.get("class") == "ep-faint"]
        for cell in drawing["cells"]:
            x, _, width, _ = cells[cell["id"]]
            assert (x + width / 2, str(cell["column"])) in below

    def test_everything_is_inside(self, graphs, name):
        _, svg = graphs[name]
        _, _, width, height = map(float, svg.get("viewBox").split())
        for path in svg.iter(f"{SVG}path"):
            assert all(0 < x < width and 0 < y < height for x, y in points(path))
        for text, (x, y, w, h) in words(svg):
            assert x > 0, text.text
            assert x + w < width, text.text
            assert 0 < y < y + h < height, text.text


def test_all_273_connections_are_at_most_12_lines_a_block(graphs):
    drawing, svg = graphs["-2^0"]
    assert len(drawing["edges"]) == 273
    level = {round(p[1], 2) for path in svg.iter(f"{SVG}path") for p, q in pairwise(points(path)) if p[1] == q[1]}
    assert len(level) <= 3 * 13 + 2  # with the spine, and the lines between bands


def crossings(result, columns, edges):
    """Counted in every gap between columns, from the heights."""
    total = 0
    for gap in range(max(columns.values())):
        lines = set()
        for a, b in edges:
            if columns[a] <= gap < columns[b]:
                near = columns[b] == columns[a] + 1
                start = result.cells[a] if columns[a] == gap else result.lanes[a]
                end = result.cells[b] if columns[b] == gap + 1 else result.lanes[a]
                lines.add((a if columns[a] == gap else -a, start, b if columns[b] == gap + 1 else -a, end, near))
        for (a, p, b, q, _), (c, r, d, s, _) in combinations(lines, 2):
            total += a != c and b != d and (p - r) * (q - s) < 0
    return total


@pytest.mark.parametrize("seed", range(6))
def test_heights_keep_their_distance_and_the_crossings_are_as_told(seed):
    layers = 6
    drawing = picture.densenet([int(bool((seed * 7919 + i * 104729) % 11 < 6)) for i in range(84)], layers=layers)
    cells, cell_to_lane, lanes = block_layout.SPACING
    for band in range(3):
        edges = [(edge["from"], edge["to"]) for edge in drawing["edges"] if edge["band"] == band]
        columns = {c["id"]: c["column"] for c in drawing["cells"] if c["id"] in {end for edge in edges for end in edge}}
        if not columns:
            continue
        first = min(columns.values())
        columns = {cell: column - first for cell, column in columns.items()}
        result = block_layout.arrange(columns, edges)
        assert result.crossings == crossings(result, columns, edges)
        for column in range(max(columns.values()) + 1):
            here = [("cell", y) for cell, y in result.cells.items() if columns[cell] == column]
            reach = {cell: max(columns[b] for a, b in edges if a == cell) for cell in result.lanes}
            here += [("lane", y) for cell, y in result.lanes.items() if columns[cell] < column < reach[cell]]
            for (kind, p), (other, q) in pairwise(sorted(here, key=lambda item: item[1])):
                least = {"cell cell": cells, "lane lane": lanes}.get(f"{kind} {other}", cell_to_lane)
                assert q - p > least - 2.1, "up to a slight step that was levelled"


def test_cells_alone_in_their_column_stand_on_one_line():
    result = block_layout.arrange({i: i for i in range(6)}, [(a, b) for b in range(6) for a in range(b)])
    assert set(result.cells.values()) == {0.0}
    assert len(set(result.lanes.values())) == 4


def test_what_may_stand_in_any_order_stands_in_its_own():
    wide = block_layout.arrange(
        {0: 0, 9: 2} | dict.fromkeys(range(1, 7), 1), [(0, 9), *[e for i in range(1, 7) for e in ((0, i), (i, 9))]]
    )
    assert sorted(range(1, 7), key=wide.cells.__getitem__) == [1, 2, 3, 4, 5, 6]
    assert wide.crossings == 0
    two = block_layout.arrange({0: 0, 1: 1, 2: 1, 3: 2, 4: 3}, [(0, 1), (0, 2), (1, 3), (3, 4), (2, 4)])
    assert two.cells[1] < two.cells[2]
    assert two.crossings == 0
    first = block_layout.arrange({i: i for i in range(4)}, [(a, b) for b in range(4) for a in range(b)])
    assert first.lanes[0] < 0 < first.lanes[1]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_bars_to_scale(name):
    drawing = LAYERS[name]
    svg = ET.fromstring(picture.draw(drawing))
    bars = dict(boxes(svg))
    assert list(bars) == [cell["id"] for cell in drawing["cells"]]
    most = max(cell["total"] for cell in drawing["cells"])
    kept = [attributes(r, "x", "y", "width") for r in svg.iter(f"{SVG}rect") if r.get("class") == "ep-kept"]
    groups = [cell for cell in drawing["cells"] if cell["role"] == "group" and cell["kept"]]
    assert len(kept) == len(groups)
    for cell, (x, y, width) in zip(groups, kept):
        left, top, full, _ = bars[cell["id"]]
        assert full == pytest.approx(max(300 * cell["total"] / most, 16), abs=0.01)
        assert width == pytest.approx(max(full * cell["kept"] / cell["total"], 1), abs=0.01)
        assert left - 0.01 <= x
        assert x + width <= left + full + 1.01
        assert y == top
    flows = [path for path in svg.iter(f"{SVG}path") if path.get("class") == "ep-flow"]
    assert len(flows) == (4 if name == "perceptron" else 0)
    for (_, one), (_, other) in combinations(bars.items(), 2):
        assert not overlap(one, other)
    for (one, a), (other, b) in combinations(words(svg), 2):
        assert not overlap(a, b), (one.text, other.text)


def test_a_long_name_is_shortened_and_told_whole():
    svg = picture.draw(LAYERS["model"])
    name = "a.very.long.name.of.a.module.inside.of.another.module"
    assert f"<title>{name}</title>" in svg
    assert f"{shortened(name, 218, 12.0)}</text>" in svg


def test_a_long_title_takes_more_lines():
    title = "The network found by the seventh of twelve runs under the second strongest penalty " * 2
    svg = ET.fromstring(picture.draw(picture.layers({"a": (1, 2)}, title=title)))
    lines = [(text, box) for text, box in words(svg) if text.get("font-weight")]
    assert " ".join(shown(text) for text, _ in lines) == title.strip()
    assert len(lines) > 2
    assert all(x + width < float(svg.get("width")) for _, (x, _, width, _) in lines)
    for (one, a), (other, b) in combinations(words(svg), 2):
        assert not overlap(a, b), (shown(one), shown(other))


def test_a_severed_network_is_a_picture_too():
    svg = ET.fromstring(picture.draw(picture.densenet(drawn_masks.SEVERED)))
    assert boxes(svg) == []
    assert "nothing leads from the image to the classifier" in [text.text for text in svg.iter(f"{SVG}text")]


def test_text_is_text_whatever_a_run_is_called():
    title = "<script>alert('1')</script> & \"quoted\" ]]> \x00\x1b \ud800"
    for drawing in (picture.densenet(drawn_masks.FULL, title=title), picture.layers({title: (1, 2)}, title=title)):
        text = picture.draw(drawing)
        svg = ET.fromstring(text.encode())
        assert {element.tag.removeprefix(SVG) for element in svg.iter()} <= {
            "svg", "title", "desc", "style", "rect", "path", "text",
        }  # fmt: skip
        assert svg.find(f"{SVG}title").text.startswith("<script>alert('1')</script> & \"quoted\" ]]>")
        assert "<script" not in text
        assert escape("<script>") in text


def test_a_picture_can_stand_in_a_page_beside_others():
    texts = [picture.draw(picture.densenet(mask)) for mask in (drawn_masks.FULL, drawn_masks.TABLE_2["2^-2"])]
    svgs = [ET.fromstring(text) for text in texts]
    ids = [element.get("id") for svg in svgs for element in svg.iter() if element.get("id")]
    assert len(ids) == len(set(ids)) == 4
    for svg, text in zip(svgs, texts):
        assert svg.get("role") == "img"
        assert [e.get("id") for e in svg.iter() if e.get("id")] == svg.get("aria-labelledby").split()
        assert not text.startswith("<?xml")
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched"
        css = re.sub(r"@media [^{]*\{(.*?\})\}", r"\1", svg.find(f"{SVG}style").text)
        selectors = [one for rule in re.findall(r"([^{}]+)\{", css) for one in re.split(r",(?![^(]*\))", rule)]
        assert len(selectors) > 20
        assert all(one.startswith(".espalier-picture") for one in selectors)
        used = {e.get("class") for e in svg.iter() if e.get("class")} - {"espalier-picture"}
        assert all(any(f".{name}" in one for one in selectors) for name in used), "every style is described"


def test_equal_drawings_are_equal_files(tmp_path):
    drawing = picture.densenet(drawn_masks.TABLE_2["2^-2"])
    first = picture.draw(drawing)
    one, other = (picture.save(drawing, tmp_path / name).read_bytes() for name in ("one.png", "other.png"))
    block_layout._arranged.cache_clear()
    assert picture.draw(picture.densenet(drawn_masks.TABLE_2["2^-2"])) == first
    assert one == other
    assert picture.save(drawing, tmp_path / "new" / "one.svg").read_text(encoding="utf-8") == first


@pytest.mark.parametrize("dark", [False, True])
def test_png_shows_the_same(tmp_path, dark):
    drawing = LAYERS["perceptron"]
    svg = ET.fromstring(picture.draw(drawing))
    path = picture.save(drawing, tmp_path / "picture.png", dark=dark)
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == tuple(pytest.approx(2 * n, abs=1.5) for n in attributes(svg, "width", "height"))
    palette = picture.DARK if dark else picture.LIGHT
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)
    assert "#{:02x}{:02x}{:02x}".format(*pixels[1, 1]) == palette["paper"]
    x, y, w, h = next(
        attributes(r, "x", "y", "width", "height") for r in svg.iter(f"{SVG}rect") if r.get("class") == "ep-kept"
    )
    assert "#{:02x}{:02x}{:02x}".format(*pixels[round(2 * y + h), round(2 * x + w)]) == palette["input"]


def test_other_files_and_kinds_are_refused(tmp_path):
    with pytest.raises(espalier.BadInput, match=r"\.svg or \.png, not as 'picture.pdf'"):
        picture.save(LAYERS["model"], tmp_path / "picture.pdf")
    with pytest.raises(espalier.BadInput, match="not 'tree'"):
        picture.draw(LAYERS["model"] | {"kind": "tree"})


def contrast(one, other):
    """Of two colours, as the accessibility guidelines of the web count it."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear))

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [picture.LIGHT, picture.DARK], ids=["light", "dark"])
def test_words_and_lines_can_be_seen(palette):
    assert Counter(picture.LIGHT.keys()) == Counter(picture.DARK.keys())
    for ground in ("paper", "band"):
        assert all(contrast(palette[ink], palette[ground]) >= 4.5 for ink in ("ink", "muted", "faint"))
        assert all(contrast(palette[line], palette[ground]) >= 3 for line in ("near", "far", "input", "rim", "end"))
    assert contrast(palette["ink"], palette["cell"]) >= 4.5
    assert contrast(palette["on-end"], palette["end"]) >= 4.5
