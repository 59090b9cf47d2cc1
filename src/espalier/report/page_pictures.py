"""Pictures of found networks, as SVG that stands in the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from espalier import picture
from espalier.picture.labels import raised
from espalier.report.phrases import percent
from espalier.report.run_reader import Run
from espalier.report.structure_charts import group_label
from espalier.report.study_reader import variant_label

WIDTH, HEIGHT, ROOM = 320, 150, 24  # of the drawing; below the columns there is room for their names


@dataclass(frozen=True)
class Picture:
    """svg: whole and safe to put into a page: every text of a run in it is escaped. alt: what it shows, in words.
    wide: it takes a row of its own, and scrolls where the page is too narrow."""

    title: str
    alt: str
    svg: str
    wide: bool = False


def pictures(runs: Sequence[Run]) -> list[Picture]:
    """A picture of each run whose structure is told: its graph where gates are connections, else its layers."""
    drawn = [graph(run) or layers(run) for run in runs]
    return [one for one in drawn if one is not None]


def graph(run: Run) -> Picture | None:
    """The found network as layers and connections; None where its gates are units."""
    if run.settings.get("network") != "DenseNet" or not run.result.get("mask"):
        return None
    drawing = picture.of_run(run.record)
    return Picture(_title(run), ". ".join([drawing["title"], *drawing["facts"]]), picture.draw(drawing), wide=True)


def theme() -> str:
    """Colours of graphs under the page's own switch between light and dark."""
    rules = list[str]()
    for name, colours in (("light", picture.LIGHT), ("dark", picture.DARK)):
        chosen = "; ".join(f"--ep-{part}: {colour}" for part, colour in (colours | {"paper": "transparent"}).items())
        rules.append(f":root[data-theme={name}] .espalier-picture {{ {chosen} }}")
    return "\n".join(rules)


def _title(run: Run) -> str:
    return raised(", ".join(word for word in (variant_label(run.variant), run.label) if word))


def layers(run: Run) -> Picture | None:
    """The groups of gates from input to output: a column each, as high as its gates, filled as far as they are kept.

    None where it is not known how many there are.
    """
    if not run.kept or not all(total for _, total in run.kept.values()):
        return None
    groups = [(group_label(name), count, total or count) for name, (count, total) in run.kept.items()]
    most = max(total for _, _, total in groups) or 1
    step = WIDTH / len(groups)
    thick = min(0.62 * step, 44.0)
    floor = HEIGHT - ROOM
    parts = list[str]()
    for i, (name, count, total) in enumerate(groups):
        x, full, high = (i + 0.5) * step - thick / 2, (floor - 20) * total / most, (floor - 20) * count / most
        hover = escape(f"{name}: {count:,} of {total:,} kept")
        parts.append(f"<g><title>{hover}</title>")
        parts.append(_bar("whole", x, floor - full, thick, full))
        if count:
            parts.append(_bar("kept", x, floor - high, thick, high))
        if step >= 38:
            middle = (i + 0.5) * step
            label = name if len(name) * 6.4 <= step else f"{name[: max(int(step / 6.4) - 1, 1)]}…"
            counts = f"{count:,} of {total:,}" if step >= 76 else f"{count:,}"
            parts += [_text(middle, floor - full - 6, counts, "count"), _text(middle, floor + 17, label, "name")]
        parts.append("</g>")
    title = _title(run)
    kept = "; ".join(f"{name} keeps {count:,} of {total:,}" for name, count, total in groups[:12])
    shares = ", ".join(f"{percent(share)} of the {name}" for name, share in run.shares.items())
    alt = f"{title}: {kept}{' and so on' if len(groups) > 12 else ''}." + (f" That is {shares}." if shares else "")
    svg = (
        f'<svg class="layers" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
    return Picture(title, alt, svg)


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 1):.1f}" rx="3"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
