"""What the report of every study has: tables, figures and a README in its folder, and a section for the docs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from espalier import picture
from espalier.picture import Drawing
from espalier.report.claims import UNDECIDED, Verdict
from espalier.report.commands import made_by
from espalier.report.files import put
from espalier.report.generated import MARK, into, place
from espalier.report.runs import Section, read
from espalier.report.table import Table, escaped
from espalier.space import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """One study's own part. study: its name in run files; title: in words. titles: of its figures, by name. tables: the
    first one is the paper's. missing: what a whole study has and a section lacks; far: what is far from the paper.
    pictures: of networks that were found. documented: names of further tables that the docs hold, where there are."""

    study: str
    title: str
    titles: Mapping[str, str]
    tables: Callable[[Section], list[Table]]
    figures: Callable[[Section], dict[str, Figure]]
    verdicts: Callable[[Section], list[Verdict]]
    missing: Callable[[Section], str]
    far: Callable[[Section], str]
    pictures: Callable[[Section], dict[str, Drawing]] = lambda section: {}
    documented: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, str]:
        """Between these lines a page of the docs is generated."""
        name = self.title.lower()
        return f"<!-- generated: {name} -->", f"<!-- end of generated: {name} -->"


def write(
    report: Report, folder: str | os.PathLike[str], reproduction: str | os.PathLike[str] | None, figures: bool
) -> list[Path]:
    """Make everything anew from the run files. reproduction: a page whose generated part is replaced as well.

    The page is README.md, or REPORT.md beside a README.md that no report has made.
    figures: draw them too; without matplotlib there are none, and the README says so. Returns the files written.
    """
    root, sections = Path(folder), read(folder)
    if (found := sections[0].runs[0].study) != report.study:
        raise BadInput(f"{root} holds runs of the study {found}, not of {report.study}")
    can_draw = importlib.util.find_spec("matplotlib") is not None
    written = list[Path]()
    page = place(root)
    pieces = [f"# {report.title}", "", MARK, ""]
    if figures and not can_draw:
        pieces += ["There are no figures: matplotlib was not installed.", ""]
    for section in sections:
        made = report.tables(section)
        for table in made:
            written += table.write(root / "tables" / f"{section.name}-{table.name}")
        names = list[str]()
        if figures and can_draw:
            from espalier.report.drawing import save

            for name, figure in report.figures(section).items():
                written += save(figure, root / "figures" / f"{section.name}-{name}")
                names.append(name)
            for name, drawing in report.pictures(section).items():
                stem = root / "figures" / f"{section.name}-{name}"
                written += [picture.save(drawing, stem.with_name(f"{stem.name}.{kind}")) for kind in ("svg", "png")]
                names.append(name)
        pieces += [_section(report, section, made, names)]
    written.append(put(page, "\n".join(pieces)))
    if reproduction is not None:
        written.append(into(Path(reproduction), [(report.marks, reproduced(report, sections))]))
    return written


def reproduced(report: Report, sections: Iterable[Section]) -> str:
    """The part of docs/reproduction.md made from run files: verdicts, the paper's table, what is far from it."""
    pieces = list[str]()
    for section in sections:
        pieces += [
            f"### {escaped(section.title)}",
            "",
            report.missing(section),
            "",
            _verdict_table(report, section),
            "",
        ]
        if section.of("search"):
            made = report.tables(section)
            pieces += [made[0].markdown(), report.far(section), ""]
            further = [table for table in made[1:] if table.name in report.documented]
            pieces += [table.markdown() for table in further if len(table.rows) > 1]
        commands = made_by(str(run.story["command"]) for run in section.runs if run.story["command"])
        pieces += ["Commands:", "", "```", *commands, "```", ""]
    return "\n".join(pieces)


def _section(report: Report, section: Section, made: list[Table], names: list[str]) -> str:
    lines = [f"## {escaped(section.title)}", "", report.missing(section), ""]
    for name in names:
        text = f"{report.titles[name]}: {section.title}; {section.note}"
        lines += [f"![{escaped(text)}](figures/{section.name}-{name}.svg)", ""]
    for table in made:
        lines += [table.markdown(), ""]
    if (far := report.far(section)) and section.of("search"):
        lines += [far, ""]
    lines += ["### The paper's claims", "", _verdict_table(report, section), ""]
    revisions = ", ".join(dict.fromkeys(run.story["commit"] for run in section.runs))
    versions = section.runs[0].story["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, f"Revision {escaped(revisions)}; {escaped(shown)}; {escaped(section.hardware)}.", ""])


def _verdict_table(report: Report, section: Section) -> str:
    columns = (("claim", ""), ("verdict", ""), ("runs", "g"), ("found", ""), ("test", ""))
    judged: list[Verdict] = report.verdicts(section)
    rows = tuple((f"{v.claim}. {v.words}", v.verdict, v.n, v.found, v.test) for v in judged)
    open_ = sum(v.verdict == UNDECIDED for v in judged)
    caption = f"Claims on {report.title.lower()}: {len(judged) - open_} decided, {open_} undecided"
    return Table("claims", caption, columns, rows, section.note).markdown()


def trials(section: Section, lacks: list[str], epochs: int) -> str:
    """How many trials there are, what is lacking, and how long the paper trains."""
    counts = {len(section.of(v, s)) for v in section.variants for s in section.settings(v)}
    count = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    whole = f"Trials of each setting: {count}."
    partial = f" **Partial results: without {'; '.join(lacks)}.**" if lacks else ""
    short = ""
    if section.epochs != epochs:
        short = f" The paper trains for {epochs} epochs, these runs for {section.epochs}."
    other = any(run.story.get("standard_data") is False for run in section.runs)
    return whole + partial + short + (" **The data are not the published ones.**" if other else "")
