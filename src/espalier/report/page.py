"""The report page: one HTML file with everything in it, its charts too, that asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2

from espalier import picture, schema
from espalier.picture import raised
from espalier.report import charts, tables
from espalier.report.charts import Chart
from espalier.report.run_reader import Run
from espalier.report.study_reader import Section, Study, grouped
from espalier.report.tables import Table, amount, duration, headline, layer, listed, made_by, percent
from espalier.space import BadInput, Corrupt

NAME = "report.html"
MARK = '<meta name="generator" content="espalier report">'
MOST_PICTURES = 16
WIDTH, HEIGHT, ROOM = 320, 150, 24  # of the drawing; below the columns there is room for their names
FORMATS = {"seconds": duration, "error": percent, "loss": amount}


def render(study: Study, files: Iterable[Path] = ()) -> str:
    """The page as text. files: figures and tables that lie beside it, to be linked."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["pretty"] = raised
    styles = {variant: i for i, variant in enumerate(dict.fromkeys(run.variant for run in study.runs))}
    sections = [_section(one, i, styles, one is _largest(study)) for i, one in enumerate(study.sections)]
    drawn = {
        chart["dom"]: {key: view.to_json() for key, view in chart["chart"].views.items()}
        for section in sections
        for chart in section["charts"]
    }
    texts = _pooled(trace for views in drawn.values() for view in views.values() for trace in view["traces"])
    return environment.get_template("page.html").render(
        study=study,
        headline=_headline(study),
        facts=_facts(study),
        sections=sections,
        runs_table=_table(tables.runs(study, short=True), [r.setting.value if r.setting else "" for r in study.runs]),
        methods=list(dict.fromkeys(run.called for run in study.runs)),
        made=[
            {
                "title": section.title,
                "settings": _settings(section.runs),
                "commands": made_by(run.command for run in section.runs),
            }
            for section in study.sections
        ],
        versions=_alike(run.versions for run in study.runs),
        hardware=_alike(run.hardware for run in study.runs),
        commits=list(dict.fromkeys(run.commit for run in study.runs if run.commit)),
        files=[(path.relative_to(study.root).as_posix(), path.name) for path in files],
        data={"charts": drawn, "texts": texts},
        css=_template("page.css") + theme(),
        script=_template("draw.js") + _template("page.js"),
    )


def _headline(study: Study) -> str:
    """The sentence of the section with most runs, by name where there are others: theirs may hold a lower error."""
    first = _largest(study)
    words = headline(first)
    return f"{first.title}: {words[0].lower()}{words[1:]}" if words and len(study.sections) > 1 else words


def _largest(study: Study) -> Section:
    return max(study.sections, key=lambda section: len(section.runs))


def _pooled(traces: Iterable[dict[str, Any]]) -> list[str]:
    """The labels of all traces, each once: a run is told under every axis. In the traces stand their numbers."""
    numbers = dict[str, int]()
    for trace in traces:
        if "text" in trace:
            trace["text"] = [numbers.setdefault(text, len(numbers)) for text in trace["text"]]
    return list(numbers)


def check_place(path: Path) -> None:
    """Refuse to write over a page that no report has made."""
    try:
        own = MARK.encode() in schema.content(path)[:4096]
    except OSError:  # nothing there, or nothing to be read: writing will say so
        return
    except Corrupt:
        own = False
    if not own:
        raise BadInput(f"{path} was not written by a report and would be overwritten; move it away")


def _template(name: str) -> str:
    return (resources.files("espalier.report") / "templates" / name).read_text(encoding="utf-8")


def _section(section: Section, number: int, styles: Mapping[str, int], first: bool) -> dict[str, Any]:
    """first: its finding is the page's headline already."""
    every: list[Chart | None] = [charts.trade_off(section, styles), charts.learning(section, styles)]
    every += [charts.theta(section), charts.kept(section, styles)]
    examples = [point.example for point in section.points if point.variant.startswith("search") and point.done]
    return {
        "id": f"s{number}",
        "section": section,
        "finding": "" if first else headline(section),
        "charts": [{"dom": f"s{number}-{chart.id}", "chart": chart} for chart in every if chart is not None],
        "pictures": pictures(examples[:MOST_PICTURES] or section.runs[:1]),
        "table": _table(tables.trade_off(section)) if section.measure and section.axes else None,
    }


def _table(table: Table, settings: Sequence[object] = ()) -> dict[str, Any]:
    """Cells as text, and what to sort them by where that is not their text. settings: the values behind the labels."""
    rows = list[list[dict[str, Any]]]()
    for i, row in enumerate(table.rows):
        cells = list[dict[str, Any]]()
        for value, (name, form) in zip(row, table.columns):
            key = settings[i] if name == "setting" and settings else None
            key = ("" if value is None else value) if form else key
            cells.append({"text": _shown(value, name, form), "key": key})
        rows.append(cells)
    return {"caption": table.caption, "columns": [(name, bool(form)) for name, form in table.columns], "rows": rows}


def _shown(value: Any, name: str, form: str) -> str:
    if value is None or not form or isinstance(value, str):
        return "" if value is None else raised(str(value))
    special = FORMATS.get(name) or (percent if form.endswith("%") else None)
    return special(value) if special else format(value, form)


def _facts(study: Study) -> list[tuple[str, str]]:
    runs = study.runs
    states = [f"{len(group)} {state}" for state, group in grouped(runs, lambda run: run.state).items()]
    ended = sorted(run.ended for run in runs if run.ended)
    seconds = [run.seconds for run in runs if run.seconds is not None]
    counts = [len(point.runs) for section in study.sections for point in section.points]
    facts = [
        ("Runs", f"{len(runs):,} ({', '.join(states)})"),
        ("Runs of each setting", " to ".join(str(n) for n in dict.fromkeys((min(counts), max(counts))))),
        ("Time of training", duration(sum(seconds)) if seconds else ""),
        ("Hardware", listed(list(dict.fromkeys(run.machine for run in runs)))),
        ("Last run ended", ended[-1].replace("T", " ").replace("Z", " UTC") if ended else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _settings(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name and value for all, or each value with the methods that have it. Not what tells runs of a method apart, which
    stands in the table of runs."""
    hidden = {"seed", "target", "penalty", "mask", "found", "model"}
    settings = list[tuple[str, list[tuple[str, str]]]]()
    for name in dict.fromkeys(name for run in runs for name in run.settings if name not in hidden):
        values = grouped(((_plain(run.settings.get(name)), run.called) for run in runs), itemgetter(0))
        methods = {value: listed(list(dict.fromkeys(called for _, called in some))) for value, some in values.items()}
        settings.append((name, [("" if len(methods) == 1 else words, value) for value, words in methods.items()]))
    return settings


def _alike(descriptions: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Name and value; several values where runs differ."""
    texts: dict[str, dict[str, None]] = {}
    for description in descriptions:
        for name, value in description.items():
            text = f"{value / 2**30:.1f} GiB" if name == "gpu_memory" and isinstance(value, int) else _plain(value)
            texts.setdefault(str(name), {})[text] = None
    return [(name.replace("_", " "), " or ".join(values)) for name, values in texts.items()]


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "not set" if value is None else json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def pictures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A picture of each run whose structure is told: its graph where gates are connections, else its layers."""
    drawn = [graph(run) or layers(run) for run in runs]
    return [{"title": _title(run)} | one for run, one in zip(runs, drawn) if one is not None]


def graph(run: Run) -> dict[str, Any] | None:
    """The found network as layers and connections, in SVG that is whole and safe to put into a page: every text of a
    run in it is escaped. None where its gates are units."""
    if run.settings.get("network") != "DenseNet" or not run.result.get("mask"):
        return None
    return {"svg": picture.draw(picture.of_run(run.record))}


def theme() -> str:
    """Colours of graphs under the page's own switch between light and dark."""
    rules = list[str]()
    for name, colours in (("light", picture.LIGHT), ("dark", picture.DARK)):
        chosen = "; ".join(f"--ep-{part}: {colour}" for part, colour in (colours | {"paper": "transparent"}).items())
        rules.append(f":root[data-theme={name}] .espalier-picture {{ {chosen} }}")
    return "\n".join(rules)


def _title(run: Run) -> str:
    return raised(", ".join(word for word in (run.called, run.label) if word))


def layers(run: Run) -> dict[str, Any] | None:
    """The groups of gates from input to output: a column each, as high as its gates, filled as far as they are kept.

    None where it is not known how many there are.
    """
    if not run.kept or not all(total for _, total in run.kept.values()):
        return None
    kept = enumerate(run.kept.items(), 1)
    groups = [(layer(i, name), count, total or count) for i, (name, (count, total)) in kept]
    most = max(total for _, _, total in groups) or 1
    step = WIDTH / len(groups)
    floor = HEIGHT - ROOM
    columns = list[dict[str, Any]]()
    for i, (name, count, total) in enumerate(groups):
        column = {"middle": (i + 0.5) * step, "hover": f"{name}: {count:,} of {total:,} kept"}
        column |= {"full": (floor - 20) * total / most, "kept": (floor - 20) * count / most}
        if step >= 38:
            short = name.partition(" · ")[0]
            names = (text for text in (name, short) if len(text) * 6.4 <= step)
            column["name"] = next(names, short.partition(" ")[2])
            column["count"] = f"{count:,} of {total:,}" if step >= 76 else f"{count:,}"
        columns.append(column)
    words = "; ".join(f"{name} keeps {count:,} of {total:,}" for name, count, total in groups[:12])
    shares = ", ".join(f"{percent(share)} of the {name}" for name, share in run.shares.items())
    alt = f"{_title(run)}: {words}{' and so on' if len(groups) > 12 else ''}."
    alt += f" That is {shares}." if shares else ""
    size = {"width": WIDTH, "height": HEIGHT, "floor": floor, "thick": min(0.62 * step, 44.0)}
    return {"alt": alt, "columns": columns, **size}
