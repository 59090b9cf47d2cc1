"""The paper's own: the reports of its two studies, tables, figures and a README in their folders, a section for the
docs; with its values and its claims."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from espalier import files, picture, report
from espalier.paper import claims
from espalier.paper import paper_tables as paper
from espalier.paper.claims import UNDECIDED, Verdict
from espalier.picture import power
from espalier.report.study_reader import Section, Study
from espalier.report.tables import MARK, Table, escaped, made_by, put_between, readme_of

__all__ = ["REPORTS", "write"]


@dataclass(frozen=True)
class Report:
    """One study's own part. title: in words. titles: of its figures, by name. tables: the first one is the paper's.

    methods, penalties, epochs: of a whole study; what a section lacks is said. far: what is far from the paper.
    pictures: of networks that were found. documented: names of further tables that the docs hold, where there are.
    """

    title: str
    titles: Mapping[str, str]
    tables: Callable[[Section], list[Table]]
    verdicts: Callable[[Section], list[Verdict]]
    methods: tuple[str, ...]
    penalties: tuple[float, ...]
    epochs: int
    far: Callable[[Section], str]
    pictures: Callable[[Section], dict[str, picture.Drawing]] = lambda section: {}
    documented: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, str]:
        """Between these lines a page of the docs is generated."""
        name = self.title.lower()
        return f"<!-- generated: {name} -->", f"<!-- end of generated: {name} -->"

    def write(self, study: Study, reproduction: str | os.PathLike[str] | None, figures: bool) -> list[Path]:
        """Make everything anew from the runs. reproduction: a page whose generated part is replaced as well.
        That part has the sections with all methods, if there are such; README.md has every section.

        The page is README.md, or REPORT.md beside a README.md that no report has made.
        figures: draw them too; without matplotlib there are none, and the README says so. Returns the files written.
        """
        root, readme = study.root, readme_of(study.root)
        can_draw = importlib.util.find_spec("matplotlib") is not None
        written, pieces = list[Path](), [f"# {self.title}", "", MARK, ""]
        every, documented = list[str](), list[str]()
        if figures and not can_draw:
            pieces += ["There are no figures: matplotlib was not installed.", ""]
        for section in paper.sections_of(study):
            tables, claims = self.tables(section), self._claims(section)
            for table in tables:
                written += table.write(root / "tables" / f"{paper.stem(section)}-{table.name}")
            drawn = self._draw(section, root / "figures") if figures and can_draw else {}
            written += [path for paths in drawn.values() for path in paths]
            pieces.append(self._section(section, tables, claims, list(drawn)))
            every.append(self._documented(section, tables, claims))
            documented += every[-1:] if all(section.of(method) for method in self.methods) else []
        written.append(files.write(readme, "\n".join(pieces)))
        if reproduction is not None:
            written.append(put_between(Path(reproduction), [(self.marks, "\n".join(documented or every))]))
        return written

    def _draw(self, section: Section, folder: Path) -> dict[str, list[Path]]:
        """The paths of each figure and picture."""
        from espalier.paper.paper_figures import figures  # matplotlib may be absent
        from espalier.report.figures import save

        place = f"{folder}/{paper.stem(section)}"
        paths = {name: save(figure, Path(f"{place}-{name}")) for name, figure in figures(section).items()}
        for name, drawing in self.pictures(section).items():
            paths[name] = [picture.save(drawing, f"{place}-{name}.{kind}") for kind in ("svg", "png")]
        return paths

    def _documented(self, section: Section, tables: list[Table], claims: str) -> str:
        """The part of docs/reproduction.md made from run files: verdicts, the paper's table, what is far from it."""
        pieces = [f"### {escaped(paper.title(section))}", "", self.missing(section), "", claims, ""]
        if section.of("search"):
            first, *others = tables
            pieces += [first.markdown(), self.far(section), ""]
            further = [table for table in others if table.name in self.documented]
            pieces += [table.markdown() for table in further if len(table.rows) > 1]
        return "\n".join([*pieces, "Commands:", "", "```", *made_by(run.command for run in section.members), "```", ""])

    def _section(self, section: Section, tables: list[Table], claims: str, figures: list[str]) -> str:
        lines = [f"## {escaped(paper.title(section))}", "", self.missing(section), ""]
        for name in figures:
            text = f"{self.titles[name]}: {paper.title(section)}; {paper.note(section)}"
            lines += [f"![{escaped(text)}](figures/{paper.stem(section)}-{name}.svg)", ""]
        for table in tables:
            lines += [table.markdown(), ""]
        if (far := self.far(section)) and section.of("search"):
            lines += [far, ""]
        lines += ["### The paper's claims", "", claims, ""]
        revisions = ", ".join(dict.fromkeys(run.commit for run in section.members))
        versions = ", ".join(f"{name} {version}" for name, version in section.members[0].versions.items())
        origin = "; ".join(escaped(words) for words in (f"Revision {revisions}", versions, section.machines))
        return "\n".join([*lines, f"{origin}.", ""])

    def _claims(self, section: Section) -> str:
        """A list: each claim with its verdict, what was found and the test."""
        verdicts = self.verdicts(section)
        undecided = sum(v.verdict == UNDECIDED for v in verdicts)
        name, decided = self.title.lower(), len(verdicts) - undecided
        lines = [f"**Claims on {name}: {decided} decided, {undecided} undecided**", ""]
        for v in verdicts:
            lines += [f"- **{v.claim}, {v.verdict}: {escaped(v.words)}** {v.n} run{'s' * (v.n != 1)}."]
            lines += [f"    - Found: {escaped(v.evidence)}.", f"    - Test: {escaped(v.test)}."]
        return "\n".join([*lines, "", f"*{escaped(paper.note(section))}*"])

    def missing(self, section: Section) -> str:
        """How many trials there are, what a whole study has and this one lacks, and how long the paper trains."""
        lacks = [method for method in self.methods if not section.of(method)]
        absent = [power(p) for p in self.penalties if p not in paper.searches(section)]
        if section.of("search") and absent:
            lacks.append(f"the penalties {', '.join(absent)}")
        words = [f"Trials of each setting: {paper.trials(section)}."]
        if lacks:
            words.append(f"**Partial results: without {'; '.join(lacks)}.**")
        if paper.epochs(section) != self.epochs:
            words.append(f"The paper trains for {self.epochs} epochs, these runs for {paper.epochs(section)}.")
        if any(run.record.get("standard_data") is False for run in section.members):
            words.append("**The data are not the published ones.**")
        return " ".join(words)


def _network(section: Section) -> dict[str, picture.Drawing]:
    """Fig. 3: the first trial's network at 2^-4, or at the penalty that ends nearest to the paper's 42%."""
    connected = [run for run in section.of("search") if run.number("canonical.depth")]
    if not connected:
        return {}
    share = paper.TABLE_2[2**-4].share
    nearest = min(connected, key=lambda run: abs(run.number("weight_share") - share))
    at = [run for run in section.of("search", 2**-4) if run in connected]
    return {"network": picture.of_run(min(at, key=lambda run: run.seed or 0, default=nearest).record)}


def _far(section: Section, number: int, name: str) -> str:
    """Which cells of Table 1 or 2 differ from the paper's by more than a little. name: of what they count."""
    if not paper.compared(section):
        return ""
    cells = {p: paper.far_cells(runs, p, name) for p, runs in paper.searches(section).items()}
    limits, points = f"{paper.FAR[name]} {name}", f"{100 * paper.FAR_SHARE:g} points"
    if not any(cells.values()):
        shares = f", every weight share within {points}" if name == "connections" else ""
        return f"Every cell of Table {number} is within 15% or {limits} of the paper's{shares}."
    limits += f", or than {points} of the weight share," if name == "connections" else ""
    listed = "; ".join(f"{power(p)}: {', '.join(names)}" for p, names in cells.items() if names)
    return f"Cells of Table {number} further than 15% and {limits} from the paper's: {listed}."


TITLES = {"learning": "Over the training", "theta": "Probabilities at the end of the training"}
REPORTS = {
    "unit-selection": Report(
        title="Unit selection",
        titles={"error": "Size against error (Fig. 2a)", "layers": "What each layer keeps", **TITLES},
        tables=paper.unit_tables,
        verdicts=claims.on_units,
        methods=("search", "fixed", "dropout"),
        penalties=tuple(paper.TABLE_1),
        epochs=paper.EPOCHS,
        far=lambda section: _far(section, 1, "units"),
    ),
    "connection-selection": Report(
        title="Connection selection",
        titles={
            "error": "Size against error (Fig. 2b)",
            "blocks": "What each block keeps",
            "macs": "Error at equal MACs: MACs as the cost against weights as the cost",
            "network": "A network found (Fig. 3)",
            **TITLES,
        },
        tables=paper.connection_tables,
        verdicts=claims.on_connections,
        methods=("search", "random", "full"),
        penalties=tuple(sorted((*paper.TABLE_2, 0.0, -(2**-3)), reverse=True)),
        epochs=paper.DENSENET_EPOCHS,
        far=lambda section: _far(section, 2, "connections"),
        pictures=_network,
        documented=("trade-off", "macs"),
    ),
}
"""The two studies of the paper by name, each with its tables, figures and claims."""


def write(
    folder: str | os.PathLike[str] | Study,
    reproduction: str | os.PathLike[str] | None = None,
    *,
    figures: bool = True,
    page: bool = True,
) -> tuple[list[Path], list[str]]:
    """What :func:`espalier.report.write` does, and of the paper's studies their own tables and figures."""
    own = {study: one.write for study, one in REPORTS.items()}
    return report.write(folder, reproduction, figures=figures, page=page, own=own)
