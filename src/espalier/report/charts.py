"""The charts of the page in plotly's words: size against error, and learning curves. Colours are named by tokens.

A token such as ``series:0`` or ``ramp:0.5/0.2`` (with an opacity) is a place in a palette; the page knows the palettes
of its light and its dark form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.picture import raised
from espalier.report.phrases import amount, counted, facts, listed, percent, plain, score
from espalier.report.run_reader import Run
from espalier.report.significance import median, quartiles
from espalier.report.study_reader import Point, Section, Series

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MEASURES = (
    "error", "loss", "training error", "training loss", "weights kept", "MACs kept", "units kept", "connections kept",
    "parameters kept", "expected share of the cost", "entropy of the mask", "penalty", "learning rate of the weights",
)  # fmt: skip
MOST = 120  # points of a curve: more cannot be told apart
Trace = dict[str, Any]


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
    """Medians and quartiles of size and error, every run beside them, and the Pareto front of the medians."""
    if section.measure is None or not section.axes:
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
        points = [p for p in one.points if p.shares(axis) and p.errors(measure)]
        if not points:
            continue
        style = styles[one.variant]
        colour, symbol, dash = f"series:{style}", SYMBOLS[style % len(SYMBOLS)], DASHES[style % len(DASHES)]
        x = [quartiles(p.shares(axis)) for p in points]
        y = [quartiles(p.errors(measure)) for p in points]
        heights += [value for q in y for value in q]
        if any(len(p.done) > 1 for p in points):
            single = [(run, run.share(axis), _score(run, measure)) for p in points for run in p.done]
            known = [(run, size, value) for run, size, value in single if size is not None and value is not None]
            heights += [value for _, _, value in known]
            dots = {"symbol": symbol, "size": 5, "color": f"{colour}/0.4"}
            texts = [_hover(run) for run, _, _ in known]
            traces.append(_marks([size for _, size, _ in known], [value for _, _, value in known], i, dots, texts))
        texts = [_hover_of_point(p, one, axis, measure) for p in points]
        marker = {"symbol": symbol, "size": 9, "color": colour}
        traces.append(_marks([q[1] for q in x], [q[1] for q in y], i, marker, texts) | {
            "mode": "lines+markers" if len(points) > 1 else "markers", "name": plain(one.label),
            "line": {"color": colour, "width": 2, "dash": dash}, "error_x": _arms(x, colour),
            "error_y": _arms(y, colour),
        })  # fmt: skip
        legend.append({"label": one.label, "color": colour, "symbol": symbol, "dash": dash, "group": i})
        if not i:
            labelled = [(p, q[1], r[1]) for p, q, r in zip(points, x, y)]
    front = section.front(axis)
    most = max((share for point in section.points for share in point.shares(axis)), default=1.0) or 1.0
    group = len(section.series)
    traces.append({
        "type": "scatter", "mode": "lines+markers", "name": "Pareto front", "legendgroup": str(group),
        "hoverinfo": "skip", "x": [_short(x) for x, _, _ in front], "y": [_short(y) for _, y, _ in front],
        "line": {"color": "ink/0.55", "width": 1, "dash": "dot", "shape": "hv"},
        "marker": {"symbol": "circle-open", "size": 17, "color": "ink/0.75", "line": {"width": 1.4}},
    })  # fmt: skip
    legend.append({"label": "Pareto front", "color": "ink", "symbol": "ring", "dash": "dot", "group": group})
    height = error_axis(heights) if measure == "error" else loss_axis(heights)
    layout = {
        "xaxis": {"title": f"{axis} kept", "tickformat": ".0%", "range": [0, 1.1 * most]},
        "yaxis": {"title": plain(f"{measure} · {section.error_of}")} | height,
        "annotations": _labels(labelled, most, height.get("type") == "log", legend[0]["color"]),
    }
    return View(traces, layout, legend, _front_in_words(section, axis, measure))


def _marks(x: Sequence[float], y: Sequence[float], group: int, marker: dict[str, Any], text: list[str]) -> Trace:
    return {
        "type": "scatter", "mode": "markers", "x": [_short(v) for v in x], "y": [_short(v) for v in y],
        "legendgroup": str(group), "marker": marker, "customdata": text,
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _arms(quarters: Sequence[tuple[float, float, float]], colour: str) -> dict[str, Any]:
    up, down = [_short(q[2] - q[1]) for q in quarters], [_short(q[1] - q[0]) for q in quarters]
    arms = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
    return arms | {"thickness": 1.2, "width": 3, "color": f"{colour}/0.8"}


def _labels(marks: Sequence[tuple[Point, float, float]], most: float, log: bool, colour: str) -> list[dict[str, Any]]:
    """What each mark of the first series was asked for, in short; marks close to each other share a label."""
    groups = list[tuple[float, list[float], list[str]]]()
    for point, x, y in marks:
        if point.setting is None or (log and y <= 0):
            continue
        near = bool(groups) and abs(x - groups[-1][0]) < 0.06 * most and 0.85 < y / (groups[-1][1][-1] or 1.0) < 1.18
        if not near:
            groups.append((x, [], []))
        groups[-1][1].append(y)
        groups[-1][2].append(point.label.partition(" ")[2])
    labels = list[dict[str, Any]]()
    for x, heights, names in groups:
        beside = x < 0.08 * most  # there the curve is steep, and would run through a label below
        place = {"xanchor": "left", "xshift": 9, "yshift": 10} if beside else {"yanchor": "top", "yshift": -10}
        y = min(heights)
        labels.append({
            "x": _short(x), "y": math.log10(y) if log else _short(y), "text": plain(", ".join(names)), "name": "0",
            "showarrow": False, "font": {"color": colour, "size": 12}, "bgcolor": "paper/0.7", "borderpad": 1,
        } | place)  # fmt: skip
    return labels


def _score(run: Run, measure: str) -> float | None:
    return run.error if measure == "error" else run.loss


def _hover(run: Run) -> str:
    lines = [f"<b>{plain(run.name)}</b>", *(f"{plain(name)}: {plain(value)}" for name, value in facts(run))]
    return "<br>".join(lines)


def _hover_of_point(point: Point, one: Series, axis: str, measure: str) -> str:
    if len(point.done) == 1:
        return _hover(point.done[0])
    low, middle, high = (score(measure, value) for value in quartiles(point.errors(measure)))
    lines = [f"<b>{plain(one.label)}, {plain(point.label)}</b>", f"{measure}: {middle} ({low} to {high})"]
    names = [axis, *(name for name in point.done[0].shares if name != axis)]
    lines += [f"{name} kept: {percent(median(shares))}" for name in names if (shares := point.shares(name))]
    totals = [(name, [r.kept[name][0] for r in point.done if name in r.kept]) for name in list(point.done[0].kept)[:6]]
    if totals:
        lines.append("gates kept: " + ", ".join(f"{median(values):g}" for _, values in totals))
    return "<br>".join([*lines, f"median and quartiles of {counted(len(point.done), 'run')}"])


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
    return Chart("learning", "Over the training", lead, controls, views)


def _learning(one: Series, name: str, error_of: str, styles: Mapping[str, int]) -> View | None:
    traces, legend, heights, ends = list[Trace](), list[dict[str, Any]](), list[float](), list[str]()
    shares = name.endswith(("error", "kept", "share of the cost"))
    for k, point in enumerate(one.points):
        updates, low, middle, high = over_updates(point.runs, name)
        if len(updates) < 2:
            continue
        single = len(one.points) == 1
        colour = f"series:{styles[one.variant]}" if single else f"ramp:{k / max(len(one.points) - 1, 1):.3f}"
        if len(point.runs) > 1:
            traces.append({
                "type": "scatter", "mode": "lines", "hoverinfo": "skip", "legendgroup": str(k), "fill": "toself",
                "x": [*updates, *updates[::-1]], "y": [_short(v) for v in (*high, *low[::-1])],
                "fillcolor": f"{colour}/0.16", "line": {"width": 0},
            })  # fmt: skip
        form = "%{y:.2%}" if shares else "%{y:.4~g}"
        traces.append({
            "type": "scatter", "mode": "lines", "legendgroup": str(k), "name": plain(point.label),
            "x": updates, "y": [_short(v) for v in middle], "line": {"color": colour, "width": 2},
            "hovertemplate": f"{plain(point.label)}<br>update %{{x:,}}<br>{plain(name)} {form}<extra></extra>",
        })  # fmt: skip
        heights += [*low, *high]
        legend.append({"label": point.label, "color": colour, "symbol": "line", "dash": "solid", "group": k})
        ends.append(f"{percent(middle[-1]) if shares else amount(middle[-1])} ({point.label})")
    if not traces:
        return None
    if name.endswith("error"):
        axis = error_axis(heights)
    else:
        axis = {"tickformat": ".0%", "rangemode": "tozero"} if shares else loss_axis(heights) if "loss" in name else {}
    of_runs = "median " if any(len(point.runs) > 1 for point in one.points) else ""
    title = f"{name} · {error_of}" if name in ("error", "loss") else name
    layout = {
        "xaxis": {"title": "updates", "rangemode": "tozero", "tickformat": "~s"},
        "yaxis": {"title": plain(title)} | axis,
    }
    return View(traces, layout, legend, f"{one.label}: {of_runs}{name} at the end of the training: {listed(ends)}.")


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
    """Logarithmic where errors span much; ticks that a person would choose."""
    positive = [v for v in values if v > 0]
    if not positive or len(positive) < len(values):
        return {"tickformat": ".2~%", "rangemode": "tozero"}
    if max(positive) == min(positive):
        return {"tickformat": ".2~%", "range": [0, 1.3 * max(positive)]}
    if max(positive) / min(positive) < 2.5:
        return {"tickformat": ".2~%"}
    low, high = min(positive) * 0.9, max(positive) * 1.12
    fine = [s * 10.0**k for k in range(-6, 1) for s in ((1, 1.2, 1.5, 2, 3, 5, 7) if high / low < 8 else (1, 2, 5))]
    ticks = [s for s in fine if low <= s <= high]
    text = [f"{100 * tick:.3g}%" for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": text, "range": [math.log10(low), math.log10(high)]}


def loss_axis(values: Sequence[float]) -> dict[str, Any]:
    positive = [v for v in values if v > 0]
    wide = len(positive) == len(values) and positive and max(positive) / min(positive) > 8
    return {"type": "log", "dtick": "D2", "tickformat": ".3~g"} if wide else {"tickformat": ".3~g"}


def _short(value: float) -> float:
    """Five digits: what a screen can show."""
    return float(f"{value:.5g}")
