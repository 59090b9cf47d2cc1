"""The charts of the page as data: size against error, learning curves, theta over time, what is kept.

A view holds traces (lines with marks, bands, bars, a heat map) and a layout (two axes, labels); ``templates/draw.js``
draws them.

Colours are named by tokens: ``series:0`` or ``ramp:0.5/0.2`` (with an opacity) is a place in a palette, and the page
knows the palettes of its light and its dark form.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.picture import raised
from espalier.report.run_reader import COLUMNS, Run, Theta
from espalier.report.significance import Quartiles, median, quartiles
from espalier.report.study_reader import Point, Section, Series
from espalier.report.tables import amount, counted, facts, layer, listed, percent, score

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MEASURES = tuple(dict.fromkeys(COLUMNS.values()))
MOST = 120  # points of a curve: more cannot be told apart
ROWS = 240  # of a heat map; more are narrower than a pixel
MOST_RUNS = 16  # with a heat map: they are the largest part of the page
BARS = 48  # in one chart; more are drawn as lines
IF_CUT = (
    "While the search goes on, errors, losses and sizes are of the network if it were cut now, which is not what its "
    "weights learn for: that part of a line is dotted. Once the structure has settled they are of what ships."
)
Trace = dict[str, Any]
Mark = tuple[float, float, str]  # x, y and what it is called


@dataclass(frozen=True)
class View:
    """One state of a chart. legend: label, colour, marker and line of each group of traces; summary: in words."""

    traces: list[Trace]
    layout: dict[str, Any]
    legend: list[dict[str, Any]]
    summary: str

    def to_json(self) -> dict[str, Any]:
        legend = [entry | {"label": raised(entry["label"])} for entry in self.legend]
        return {"traces": self.traces, "layout": self.layout, "legend": legend, "summary": raised(self.summary)}


@dataclass(frozen=True)
class Control:
    """A choice between views. kind: "radio" or "select"; options: key and label."""

    label: str
    kind: str
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chart:
    """views: by the keys of the chosen options, joined by a bar."""

    id: str
    title: str
    lead: str
    controls: tuple[Control, ...]
    views: Mapping[str, View]


def trade_off(section: Section, styles: Mapping[str, int]) -> Chart | None:
    """Medians and quartiles of size and error, every run beside them, and the Pareto front of the medians.

    None where there is a single mark: that is a sentence, and no chart.
    """
    if section.measure is None or not section.axes or len(section.marks) < 2:
        return None
    views = {axis: _trade_off(section, axis, styles) for axis in section.axes}
    control = Control("Size counted in", "radio", tuple((axis, axis[0].upper() + axis[1:]) for axis in section.axes))
    lead = f"Each mark is the median over {section.over}; its arms reach to the quartiles, faint dots are single runs."
    lead = lead if section.middle else "Each mark is a run."
    lead += " Rings mark the Pareto front: nothing here is both smaller and better."
    return Chart("trade-off", "Size against error", lead, (control,), views)


def _trade_off(section: Section, axis: str, styles: Mapping[str, int]) -> View:
    measure = section.measure or "error"
    traces, legend, heights = list[Trace](), list[dict[str, Any]](), list[float]()
    labelled = list[tuple[Point, float, float]]()
    for i, one in enumerate(section.series):
        curve = one.curve(axis, measure)
        if not curve:
            continue
        style = styles[one.variant]
        colour, symbol, dash = f"series:{style}", SYMBOLS[style % len(SYMBOLS)], DASHES[style % len(DASHES)]
        points, x, y = zip(*curve)
        heights += [value for q in y for value in q]
        if any(len(p.done) > 1 for p in points):
            single = [(run, run.share(axis), run.score(measure)) for p in points for run in p.done]
            known = [(run, size, value) for run, size, value in single if size is not None and value is not None]
            heights += [value for _, _, value in known]
            dots = {"symbol": symbol, "size": 5, "color": f"{colour}/0.4"}
            texts = [_hover(run) for run, _, _ in known]
            traces.append(_marks([size for _, size, _ in known], [value for _, _, value in known], i, dots, texts))
        texts = [_hover_of_point(p, one, axis, measure) for p in points]
        marker = {"symbol": symbol, "size": 9, "color": colour}
        arms = {"x": [_ends(q) for q in x], "y": [_ends(q) for q in y], "color": f"{colour}/0.8"}
        traces.append(_marks([q[1] for q in x], [q[1] for q in y], i, marker, texts) | {
            "line": {"color": colour, "width": 2, "dash": dash}, "arms": arms,
        })  # fmt: skip
        legend.append(_entry(one.label, colour, symbol, i, dash))
        if not i:
            labelled = [(p, q[1], r[1]) for p, q, r in curve]
    front = section.front(axis)
    most = max((share for point in section.points for share in point.shares(axis)), default=1.0) or 1.0
    group = len(section.series)
    traces.append({
        "type": "line", "group": group, "x": [_short(x) for x, _, _ in front], "y": [_short(y) for _, y, _ in front],
        "line": {"color": "ink/0.55", "width": 1, "dash": "dot", "step": True},
        "marker": {"symbol": "ring", "size": 17, "color": "ink/0.75"},
    })  # fmt: skip
    legend.append(_entry("Pareto front", "ink", "ring", group, "dot"))
    height = error_axis(heights) if measure == "error" else loss_axis(heights)
    layout = {
        "xaxis": {"title": f"{axis} kept", "format": "percent", "range": [0, 1.1 * most]},
        "yaxis": {"title": f"{measure} · {section.error_of}"} | height,
        "labels": _labels(labelled, most, height.get("type") == "log", legend[0]["color"]),
    }
    return View(traces, layout, legend, _front_in_words(section, axis, measure))


def _marks(x: Sequence[float], y: Sequence[float], group: int, marker: dict[str, Any], text: list[str]) -> Trace:
    places = {"x": [_short(v) for v in x], "y": [_short(v) for v in y]}
    return {"type": "line", **places, "group": group, "marker": marker, "text": text}


def _ends(quarters: Quartiles) -> list[float]:
    return [_short(quarters[0]), _short(quarters[2])]


def _entry(label: str, colour: str, symbol: str, group: int, dash: str = "solid") -> dict[str, Any]:
    """Of a legend. group: of the traces that it shows or hides."""
    return {"label": label, "color": colour, "symbol": symbol, "dash": dash, "group": group}


def _colour(one: Series, k: int, count: int, styles: Mapping[str, int]) -> str:
    """Of the k-th of so many settings of one variant: dark to light, or the variant's own where there is one."""
    return f"series:{styles[one.variant]}" if count == 1 else f"ramp:{k / (count - 1):.3f}"


def _labels(marks: Sequence[tuple[Point, float, float]], most: float, log: bool, colour: str) -> list[dict[str, Any]]:
    """What each mark of the first series was asked for, in short; marks close to each other share a label."""
    asked = [(x, y, p.label.partition(" ")[2]) for p, x, y in marks if p.setting is not None and (y > 0 or not log)]
    labels = list[dict[str, Any]]()
    for group in close_together(asked, 0.06 * most, 0.85, 1.18):
        x, words = group[0][0], raised(", ".join(text for _, _, text in group))
        beside = x < 0.08 * most  # there the curve is steep, and would run through a label below
        place = {"x": _short(x), "y": _short(min(y for _, y, _ in group)), "beside": beside}
        labels.append(place | {"text": words, "color": colour, "group": 0})
    return labels


def close_together(marks: Iterable[Mark], wide: float, low: float, high: float) -> list[list[Mark]]:
    """Marks in groups that may share a label: nearer than ``wide`` to the first of the group, ``low`` to ``high`` times
    as high as the one before."""
    groups = list[list[Mark]]()
    for x, y, text in marks:
        if not groups or abs(x - groups[-1][0][0]) >= wide or not low < y / (groups[-1][-1][1] or 1.0) < high:
            groups.append([])
        groups[-1].append((x, y, text))
    return groups


def _hover(run: Run) -> str:
    """Lines, the first of them a heading."""
    return raised("\n".join([run.name, *(f"{name}: {value}" for name, value in facts(run))]))


def _hover_of_point(point: Point, one: Series, axis: str, measure: str) -> str:
    if len(point.done) == 1:
        return _hover(point.done[0])
    low, middle, high = (score(measure, value) for value in quartiles(point.errors(measure)))
    lines = [f"{one.label}, {point.label}", f"{measure}: {middle} ({low} to {high})"]
    names = [axis, *(name for name in point.done[0].shares if name != axis)]
    lines += [f"{name} kept: {percent(median(shares))}" for name in names if (shares := point.shares(name))]
    totals = [(name, [r.kept[name][0] for r in point.done if name in r.kept]) for name in list(point.done[0].kept)[:6]]
    if totals:
        lines.append("gates kept: " + ", ".join(f"{median(values):g}" for _, values in totals))
    return raised("\n".join([*lines, f"median and quartiles of {counted(len(point.done), 'run')}"]))


def _front_in_words(section: Section, axis: str, measure: str) -> str:
    front = section.front(axis)
    if not front:
        return ""
    few = front if len(front) <= 5 else [*front[:4], front[-1]]
    parts = [f"{score(measure, y)} at {percent(x)} of the {axis}" for x, y, _ in few]
    return f"Along the Pareto front the {section.middle}{measure} ({section.error_of}) is {listed(parts)}."


def learning(section: Section, styles: Mapping[str, int]) -> Chart | None:
    """Medians over seeds along the training, a line for each setting, a band for the quartiles."""
    views, methods, measures = dict[str, View](), dict[str, str](), dict[str, str]()
    for i, one in enumerate(section.series):
        for name in MEASURES:
            view = _learning(one, name, section.error_of, styles)
            if view is not None:
                views[f"{i}|{name}"] = view
                methods[str(i)], measures[name] = one.label, name[0].upper() + name[1:]
    if not views:
        return None
    controls = (
        Control("Method", "select", tuple(methods.items())),
        Control("Shown", "select", tuple((name, measures[name]) for name in MEASURES if name in measures)),
    )
    lead = f"One line for each setting, the median over {section.over}, in a band from quartile to quartile."
    lead = lead if section.middle else "One line for each setting, of one run."
    if any(run.searches for run in section.runs):
        lead += f" {IF_CUT}"
    return Chart("learning", "Over the training", lead, controls, views)


def _learning(one: Series, name: str, error_of: str, styles: Mapping[str, int]) -> View | None:
    traces, legend, heights, ends = list[Trace](), list[dict[str, Any]](), list[float](), list[str]()
    shares = name.endswith(("error", "kept", "share of the cost"))
    of_cut = (name in ("error", "loss") or name.endswith(" kept")) and any(run.searches for run in one.runs)
    for k, point in enumerate(one.points):
        updates, low, middle, high = over_updates(point.runs, name)
        if len(updates) < 2:
            continue
        colour = _colour(one, k, len(one.points), styles)
        if len(point.runs) > 1:
            traces.append({
                "type": "band", "group": k, "x": updates, "low": [_short(v) for v in low],
                "high": [_short(v) for v in high], "color": f"{colour}/0.16",
            })  # fmt: skip
        told = {"label": raised(point.label), "name": name, "format": "percent" if shares else "number"}
        line = {"type": "line", "group": k, "x": updates, "y": [_short(v) for v in middle], "hover": told}
        until = {} if not of_cut else {"until": _settled(point.runs) or updates[-1]}
        traces.append(line | {"line": {"color": colour, "width": 2}} | until)
        heights += [*low, *high]
        legend.append(_entry(point.label, colour, "line", k))
        ends.append(f"{percent(middle[-1]) if shares else amount(middle[-1])} ({point.label})")
    if not traces:
        return None
    if name.endswith("error"):
        axis = error_axis(heights)
    else:
        axis = {"format": "percent", "zero": True} if shares else loss_axis(heights) if "loss" in name else {}
    of_runs = "median " if any(len(point.runs) > 1 for point in one.points) else ""
    title = name + (", if cut now" if of_cut else "") + (f" · {error_of}" if name in ("error", "loss") else "")
    settled = _settled(one.runs)
    moments = [] if settled is None else [{"x": settled, "text": "structure settled"}]
    layout = {
        "xaxis": {"title": "updates", "zero": True, "format": "count"},
        "yaxis": {"title": title} | axis,
        "marks": moments,
    }
    words = f"{one.label}: {of_runs}{name} at the end of the training: {listed(ends)}."
    if settled is not None:
        words += f" The structure settled after {settled:,} updates."
    return View(traces, layout, legend, words)


def _settled(runs: Sequence[Run]) -> int | None:
    """After how many updates the structure was fixed, where one number says it of all runs."""
    known = {run.settled_at for run in runs}
    return known.pop() if len(known) == 1 else None


def theta(section: Section) -> Chart | None:
    """One run of each setting: the probability of every gate, update by update."""
    options, views, ranked = dict[str, str](), dict[str, View](), False
    for i, one in enumerate(section.series):
        for point in one.points:
            snapshots = point.example.theta if len(views) < MOST_RUNS else None
            if snapshots is not None:
                key = f"{i}-{len(views)}"
                options[key] = f"{one.label}, {point.label}"
                views[key] = _heat(snapshots, options[key])
                ranked = ranked or snapshots.ranked
    if not views:
        return None
    order = "at every update in the order of their probability" if ranked else "in the order they ended in"
    lead = (
        f"Theta is the probability of each gate to be open. Rows are the gates of a layer, {order}. Of each setting "
        "one run is shown, that of the middle error."
    )
    return Chart("theta", "Theta over time", lead, (Control("Run", "select", tuple(options.items())),), views)


def _heat(theta: Theta, label: str) -> View:
    blocks, centres = list[np.ndarray](), list[float]()
    row, start, total = 0, 0, sum(theta.sizes.values())
    for size in theta.sizes.values():
        part = theta.values[:, start : start + size]
        if not theta.ranked:
            part = part[:, np.argsort(part[-1], kind="stable")]
        part = part[:, ::-1]  # the open ones above
        rows = min(size, max(1, round(ROWS * size / max(total, ROWS))))
        means = np.stack([piece.mean(1) for piece in np.array_split(part, rows, axis=1)])  # (rows, snapshots)
        blocks.append(means)
        centres.append(row + rows / 2)
        row, start = row + rows, start + size
    z = np.concatenate(blocks)
    data = np.rint(100 * z).astype(np.uint8)
    names = [layer(i, name) for i, name in enumerate(theta.sizes, 1)]
    sizes = [f"{name} ({size:,})" for name, size in zip(names, theta.sizes.values())]
    some = range(0, len(names), max(1, -(-len(names) // 16)))
    packed = base64.b64encode(data.tobytes()).decode()
    trace = {"type": "heat", "x": theta.updates, "z": packed, "shape": list(z.shape), "group": 0}
    layout = {
        "xaxis": {"title": "updates", "format": "count", "range": [theta.updates[0], theta.updates[-1] or 1]},
        # where there is little room, the number of the layer alone
        "yaxis": {"ticks": [[centres[i], sizes[i], names[i].partition(" · ")[0]] for i in some], "range": [len(z), 0]},
        "groups": [[name, len(block)] for name, block in zip(names, blocks)],
    }
    last = theta.values[-1]
    decided = float(((last < 0.1) | (last > 0.9)).mean())
    words = f"{label}: {counted(total, 'gate')}. At the end {percent(decided)} have a theta below 0.1 or above 0.9, "
    words += f"and {percent(float((last >= 0.5).mean()))} are more likely open than closed."
    return View([trace], layout, [], words)


def kept(section: Section, styles: Mapping[str, int]) -> Chart | None:
    """What each group of gates keeps under each setting: medians and quartiles."""
    views, methods = dict[str, View](), dict[str, str]()
    for i, one in enumerate(section.series):
        view = _kept(one, section, styles)
        if view is not None:
            views[str(i)], methods[str(i)] = view, one.label
    if not views:
        return None
    how = f": medians over {section.over}, with quartiles." if section.middle else "."
    part, what = "layer", "gates that ship"
    if any("connections" in run.result for run in section.runs):  # Table 2's numbers
        part, what = "block", "connections that the mask keeps, those of dead layers among them"
    lead = f"The {what}, of all that a {part} has{how}"
    return Chart("kept", f"What each {part} keeps", lead, (Control("Method", "select", tuple(methods.items())),), views)


def _kept(one: Series, section: Section, styles: Mapping[str, int]) -> View | None:
    points = [point for point in one.points if any(run.kept for run in point.done)]
    names = list(dict.fromkeys(name for point in points for run in point.done for name in run.kept))
    if not points:
        return None
    every = [run for other in section.points for run in other.done]
    # gates of each group, as the first run of any method says that knows
    totals = {name: next((r.kept[name][1] for r in every if r.kept.get(name, (0, 0))[1]), None) for name in names}
    shares = all(totals.values())
    bars = len(points) * len(names) <= BARS
    labels = {name: layer(i, name) for i, name in enumerate(names, 1)}
    columns = {name: label.partition(" ")[2] for name, label in labels.items()}  # on the axis, "layer" is its title
    traces, legend, words = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for k, point in enumerate(points):
        colour = _colour(one, k, len(points), styles)
        counts = {name: [run.kept[name][0] for run in point.done if name in run.kept] for name in names}
        quarters = {name: quartiles(values) for name, values in counts.items() if values}
        scale = {name: 1 / (totals[name] or 1) if shares else 1.0 for name in quarters}
        of = {name: f" of {totals[name]:,}" if totals[name] else "" for name in quarters}
        ticks = [columns[n] for n in quarters]
        trace: dict[str, Any] = {
            "type": "bar" if bars else "line", "group": k, "color": colour,
            "x": ticks, "y": [_short(q[1] * scale[n]) for n, q in quarters.items()],
            "text": [f"{raised(point.label)}\n{labels[n]}\n{q[1]:g}{of[n]} kept"
                     + (f", quartiles {q[0]:g} and {q[2]:g} of {len(counts[n])} runs" if len(counts[n]) > 1 else "")
                     for n, q in quarters.items()],
        }  # fmt: skip
        if bars and len(point.done) > 1:
            trace["arms"] = {"y": [[_short(q[0] * scale[n]), _short(q[2] * scale[n])] for n, q in quarters.items()]}
        elif not bars:
            trace["line"] = {"color": colour, "width": 1.5}
            trace["marker"] = {"symbol": "circle", "size": 6, "color": colour}
        traces.append(trace)
        legend.append(_entry(point.label, colour, "bar", k))
        few = ", ".join(f"{q[1]:g}" for q in list(quarters.values())[:6])
        words.append(f"{few}{', …' * (len(quarters) > 6)} ({point.label})")
    word = next(iter(labels.values())).partition(" ")[0]
    axis = {"title": "share of the gates kept", "format": "percent", "range": [0, 1.04]}
    layout = {
        "xaxis": {"title": f"{word}, from the input to the output", "categories": list(columns.values())},
        "yaxis": axis if shares else {"title": "gates kept", "zero": True},
    }
    several = any(len(point.done) > 1 for point in points)
    groups = [labels[name] + (f" (of {total:,})" if total else "") for name, total in list(totals.items())[:6]]
    summary = f"{one.label}: gates kept in {listed(groups)}{', medians' * several}: {'; '.join(words)}."
    return View(traces, layout, legend, summary)


Curve = tuple[list[int], list[float], list[float], list[float]]


def over_updates(runs: Sequence[Run], name: str, *, common: bool = False) -> Curve:
    """Updates, thinned, and the quartiles over runs of one column of their curves at each.

    common: those updates alone that all of the runs were measured at.
    """
    columns = dict[int, list[float]]()
    for run in runs:
        for row in run.curve:
            if name in row and "update" in row:
                columns.setdefault(int(row["update"]), []).append(row[name])
    updates = sorted(update for update in columns if not common or len(columns[update]) == len(runs))
    if len(updates) > MOST:
        places = [round(i * (len(updates) - 1) / (MOST - 1)) for i in range(MOST)]
        updates = [updates[i] for i in dict.fromkeys(places)]
    quarters = [quartiles(columns[update]) for update in updates]
    return updates, [q[0] for q in quarters], [q[1] for q in quarters], [q[2] for q in quarters]


def error_axis(values: Sequence[float]) -> dict[str, Any]:
    """Logarithmic where errors span much."""
    positive = [v for v in values if v > 0]
    if not positive or len(positive) < len(values):
        return {"format": "percent", "zero": True}
    if max(positive) == min(positive):
        return {"format": "percent", "range": [0, 1.3 * max(positive)]}
    if max(positive) / min(positive) < 2.5:
        return {"format": "percent"}
    low, high = min(positive) * 0.9, max(positive) * 1.12
    ticks = [[tick, f"{100 * tick:.3g}%"] for tick in error_ticks(low, high)]
    return {"type": "log", "ticks": ticks, "range": [low, high]}


def error_ticks(low: float, high: float) -> list[float]:
    """Of a logarithmic axis, such as a person would choose."""
    steps = (1, 1.2, 1.5, 2, 3, 5, 7) if high / low < 8 else (1, 2, 5)
    return [s * 10.0**k for k in range(-6, 1) for s in steps if low <= s * 10.0**k <= high]


def loss_axis(values: Sequence[float]) -> dict[str, Any]:
    positive = [v for v in values if v > 0]
    wide = len(positive) == len(values) and positive and max(positive) / min(positive) > 8
    return {"type": "log"} if wide else {}


def _short(value: float) -> float:
    """Five digits: what a screen can show."""
    return float(f"{value:.5g}")
