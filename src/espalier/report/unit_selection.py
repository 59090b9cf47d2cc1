"""The report of the unit-selection study: tables, figures and a README in its folder, and a section for the docs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from espalier.report import paper_values
from espalier.report.claims import UNDECIDED, Verdict, verdicts
from espalier.report.runs import Section, read
from espalier.report.table import Table, escaped, power
from espalier.report.unit_tables import compared, far_cells, tables
from espalier.space import BadInput

BEGIN, END = "<!-- generated: unit selection -->", "<!-- end of generated: unit selection -->"
MARK = "Made from the files under `runs/`; edits are overwritten."
TITLES = {
    "error": "Size against error (Fig. 2a)",
    "learning": "Over the training",
    "theta": "Probabilities at the end of the training",
    "layers": "What each layer keeps",
}


def write(
    folder: str | os.PathLike[str], reproduction: str | os.PathLike[str] | None = None, *, figures: bool = True
) -> list[Path]:
    """Make everything anew from the run files. reproduction: a page whose generated part is replaced as well.

    The page is README.md, or REPORT.md beside a README.md that no report has made.
    figures: draw them too; without matplotlib there are none, and the README says so. Returns the files written.
    """
    root, sections = Path(folder), read(folder)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    written = list[Path]()
    page = _page(root)
    pieces = ["# Unit selection", "", MARK, ""]
    if figures and not can_draw:
        pieces += ["There are no figures: matplotlib was not installed.", ""]
    for section in sections:
        made = tables(section)
        for table in made:
            written += _write_table(root / "tables" / f"{section.name}-{table.name}", table)
        names = list[str]()
        if figures and can_draw:
            from espalier.report import figures as draw

            for name, figure in draw.figures(section).items():
                written += draw.save(figure, root / "figures" / f"{section.name}-{name}")
                names.append(name)
        pieces += [_section(section, made, names)]
    page.write_text("\n".join(pieces), encoding="utf-8")
    written.append(page)
    if reproduction is not None:
        written.append(_into(Path(reproduction), reproduced(sections, root)))
    return written


def _page(root: Path) -> Path:
    """Where the page goes: README.md, unless somebody else has written that."""
    for page in (root / "README.md", root / "REPORT.md"):
        if not page.exists() or MARK in page.read_text(encoding="utf-8", errors="replace").splitlines()[:5]:
            return page
    raise BadInput(
        f"{root} has a README.md and a REPORT.md that no report has made (their first lines would say so); move one of "
        "them away"
    )


def reproduced(sections: Iterable[Section], root: Path) -> str:
    """The part of docs/reproduction.md made from run files: verdicts, Table 1, what is far from the paper."""
    pieces = list[str]()
    for section in sections:
        pieces += [f"### {escaped(section.title)}", "", _missing(section), "", _verdict_table(section), ""]
        if section.of("search"):
            pieces += [tables(section)[0].markdown(), _far(section), ""]
        commands = dict.fromkeys(run.story["command"] for run in section.runs if run.story["command"])
        pieces += ["Commands:", "", "```", *commands, "```", ""]
    return "\n".join(pieces)


def _section(section: Section, made: list[Table], names: list[str]) -> str:
    lines = [f"## {escaped(section.title)}", "", _missing(section), ""]
    for name in names:
        text = f"{TITLES[name]}: {section.title}; {section.note}"
        lines += [f"![{escaped(text)}](figures/{section.name}-{name}.svg)", ""]
    for table in made:
        lines += [table.markdown(), ""]
    if compared(section) and section.of("search"):
        lines += [_far(section), ""]
    lines += ["### The paper's claims", "", _verdict_table(section), ""]
    revisions = ", ".join(dict.fromkeys(run.story["commit"] for run in section.runs))
    versions = section.runs[0].story["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, f"Revision {escaped(revisions)}; {escaped(shown)}; {escaped(section.hardware)}.", ""])


def _verdict_table(section: Section) -> str:
    columns = (("claim", ""), ("verdict", ""), ("runs", "g"), ("found", ""), ("test", ""))
    judged: list[Verdict] = verdicts(section)
    rows = tuple((f"{v.claim}. {v.words}", v.verdict, v.n, v.found, v.test) for v in judged)
    open_ = sum(v.verdict == UNDECIDED for v in judged)
    caption = f"Claims on unit selection: {len(judged) - open_} decided, {open_} undecided"
    return Table("claims", caption, columns, rows, section.note).markdown()


def _missing(section: Section) -> str:
    """What a whole study of this form would have and this one does not."""
    lacks = [m for m in ("search", "fixed", "dropout") if not section.of(m)]
    if section.of("search"):
        had = set(section.settings("search"))
        absent = [power(p) for p in paper_values.TABLE_1 if p not in had]
        if absent:
            lacks.append(f"the penalties {', '.join(absent)}")
    counts = {len(section.of(v, s)) for v in section.variants for s in section.settings(v)}
    trials = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    whole = f"Trials of each setting: {trials}."
    partial = f" **Partial results: without {'; '.join(lacks)}.**" if lacks else ""
    short = ""
    if section.epochs != paper_values.EPOCHS:
        short = f" The paper trains for {paper_values.EPOCHS} epochs, these runs for {section.epochs}."
    return whole + partial + short


def _far(section: Section) -> str:
    if not compared(section):
        return ""
    cells = [
        f"{power(p)}: {', '.join(found)}"
        for p in section.settings("search")
        if (found := far_cells(section.of("search", p), p))
    ]
    if not cells:
        return "Every cell of Table 1 is within 15% or 12 units of the paper's."
    return f"Cells of Table 1 further than 15% and 12 units from the paper's: {'; '.join(cells)}."


def _write_table(stem: Path, table: Table) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("md", "csv")]
    for path, text in zip(paths, (table.markdown(), table.csv()), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def _into(page: Path, text: str) -> Path:
    """Replace what stands between the marks; the rest of the page is written by people."""
    try:
        before = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{page} cannot be read: {error.strerror}") from None
    if before.count(BEGIN) != 1 or before.count(END) != 1 or before.index(BEGIN) > before.index(END):
        raise BadInput(f"{page} has no place for generated text: it needs the lines {BEGIN!r} and {END!r} once each")
    head, rest = before.split(BEGIN)
    tail = rest.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{text.strip()}\n\n{END}{tail}", encoding="utf-8")
    return page
