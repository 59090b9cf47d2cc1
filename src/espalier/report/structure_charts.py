"""The charts of the page that show structure: theta over time as a heat map, and what each group of gates keeps."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from espalier.report.charts import Chart, Control, View
from espalier.report.phrases import counted, listed, percent, plain
from espalier.report.run_reader import Theta
from espalier.report.significance import quartiles
from espalier.report.study_reader import Point, Section, Series

ROWS = 240  # of a heat map; more are narrower than a pixel
MOST_RUNS = 16  # with a heat map: they are the largest part of the page
BARS = 48  # in one chart; more are drawn as lines


def group_label(name: str) -> str:
    """Modules of a Sequential are numbers.

    >>> group_label("2"), group_label("fc1")
    ('layer 2', 'fc1')
    """
    return f"layer {name}" if name.isdigit() else name


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
    blocks, centres, edges = list[np.ndarray](), list[float](), list[float]()
    row, start, total = 0, 0, sum(theta.sizes.values())
    for size in theta.sizes.values():
        part = theta.values[:, start : start + size]
        if not theta.ranked:
            part = part[:, np.argsort(part[-1], kind="stable")]
        part = part[:, ::-1]  # the open ones above
        rows = min(size, max(1, round(ROWS * size / max(total, ROWS))))
        means = np.stack([piece.mean(1) for piece in np.array_split(part, rows, axis=1)])  # (rows, snapshots)
        blocks.append(means)
        centres.append(row + (rows - 1) / 2)
        row, start = row + rows, start + size
        edges.append(row - 0.5)
    z = np.concatenate(blocks)
    data = np.rint(100 * z).astype(np.uint8)
    packed = {"dtype": "u1", "bdata": base64.b64encode(data.tobytes()).decode(), "shape": f"{z.shape[0]}, {z.shape[1]}"}
    names = [plain(f"{group_label(name)} ({size:,})") for name, size in theta.sizes.items()]
    some = range(0, len(names), max(1, -(-len(names) // 16)))
    trace = {
        "type": "heatmap", "x": theta.updates, "z": packed, "zmin": 0, "zmax": 100, "colorscale": "Cividis",
        "hovertemplate": "theta %{z}%<br>update %{x:,}<extra></extra>", "zsmooth": False,
        "colorbar": {"title": {"text": "theta"}, "tickvals": [0, 50, 100], "ticktext": ["0", "0.5", "1"],
                     "thickness": 10, "outlinewidth": 0, "len": 0.9},
    }  # fmt: skip
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": "paper", "width": 2}}
    layout = {
        "xaxis": {"title": "updates", "showgrid": False, "tickformat": "~s"},
        "yaxis": {"tickvals": [centres[i] for i in some], "ticktext": [names[i] for i in some], "showgrid": False,
                  "autorange": "reversed"},
        "shapes": [line | {"y0": edge, "y1": edge} for edge in edges[:-1]],
    }  # fmt: skip
    last = theta.values[-1]
    decided = float(((last < 0.1) | (last > 0.9)).mean())
    words = (
        f"{label}: {counted(total, 'gate')}. At the end {percent(decided)} have a theta below 0.1 or above 0.9, and "
    )
    words += f"{percent(float((last >= 0.5).mean()))} are more likely open than closed."
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
    totals = {name: _total(section.points, name) for name in names}
    shares = all(totals.values())
    bars = len(points) * len(names) <= BARS
    traces, legend, words = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for k, point in enumerate(points):
        single = len(points) == 1
        colour = f"series:{styles[one.variant]}" if single else f"ramp:{k / (len(points) - 1):.3f}"
        counts = {name: [run.kept[name][0] for run in point.done if name in run.kept] for name in names}
        quarters = {name: quartiles(values) for name, values in counts.items() if values}
        scale = {name: 1 / (totals[name] or 1) if shares else 1.0 for name in quarters}
        of = {name: f" of {totals[name]:,}" if totals[name] else "" for name in quarters}
        trace: dict[str, Any] = {
            "type": "bar" if bars else "scatter", "name": plain(point.label), "legendgroup": str(k),
            "x": [plain(group_label(name)) for name in quarters], "y": [q[1] * scale[n] for n, q in quarters.items()],
            "text": [f"{q[1]:g}{of[n]} ({q[0]:g} to {q[2]:g}), {counted(len(counts[n]), 'run')}"
                     for n, q in quarters.items()],
            "textposition": "none", "marker": {"color": colour},
            "hovertemplate": f"{plain(point.label)}<br>%{{x}}: %{{text}}<extra></extra>",
        }  # fmt: skip
        if bars and len(point.done) > 1:
            arms: dict[str, Any] = {"type": "data", "symmetric": False, "thickness": 1, "width": 2, "color": "ink/0.7"}
            arms["array"] = [(q[2] - q[1]) * scale[n] for n, q in quarters.items()]
            trace["error_y"] = arms | {"arrayminus": [(q[1] - q[0]) * scale[n] for n, q in quarters.items()]}
        elif not bars:
            del trace["textposition"]
            trace |= {"mode": "lines+markers", "line": {"color": colour, "width": 1.5}}
        traces.append(trace)
        legend.append({"label": point.label, "color": colour, "symbol": "bar", "dash": "solid", "group": k})
        few = ", ".join(f"{q[1]:g}" for q in list(quarters.values())[:6])
        words.append(f"{few}{', …' * (len(quarters) > 6)} ({point.label})")
    axis = {"title": "share of the gates kept", "tickformat": ".0%", "range": [0, 1.04]}
    layout = {
        "xaxis": {"type": "category", "showgrid": False}, "yaxis": axis if shares else {"title": "gates kept"},
        "barmode": "group", "bargap": 0.25,
    }  # fmt: skip
    several = any(len(point.done) > 1 for point in points)
    groups = [group_label(name) + (f" (of {total:,})" if total else "") for name, total in list(totals.items())[:6]]
    summary = f"{one.label}: gates kept in {listed(groups)}{', medians' * several}: {'; '.join(words)}."
    return View(traces, layout, legend, summary)


def _total(points: list[Point], name: str) -> int | None:
    """Gates of a group, as the first run of any method tells that knows."""
    known = (run.kept[name][1] for point in points for run in point.done if name in run.kept)
    return next((total for total in known if total), None)
