"""The reports of the paper's two studies: tables, figures and a README in their folders, and a section for the docs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from espalier import picture
from espalier.paper import connection_claims, printed_values, unit_claims
from espalier.paper.paper_tables import MACS, compared, connection_tables, counts, far_cells, unit_tables
from espalier.paper.sections import epochs, network, note, searches, sections_of, stem, title, trials
from espalier.paper.unit_claims import UNDECIDED, Verdict
from espalier.picture.labels import power
from espalier.report.files import MARK, put, put_between, readme_of
from espalier.report.phrases import made_by
from espalier.report.study_reader import Section, Study, middle
from espalier.report.tables import Table, escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 8  # connections of 91, and 15%
FAR_SHARE = 0.05  # of the weights


@dataclass(frozen=True)
class Report:
    """One study's own part. title: in words. titles: of its figures, by name. tables: the first one is the paper's.

    methods, penalties, epochs: of a whole study; what a section lacks is said. far: what is far from the paper.
    pictures: of networks that were found. documented: names of further tables that the docs hold, where there are.
    """

    title: str
    titles: Mapping[str, str]
    tables: Callable[[Section], list[Table]]
    figures: Callable[[Section], dict[str, Figure]]
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

        The page is README.md, or REPORT.md beside a README.md that no report has made.
        figures: draw them too; without matplotlib there are none, and the README says so. Returns the files written.
        """
        root, sections, readme = study.root, sections_of(study), readme_of(study.root)
        can_draw = importlib.util.find_spec("matplotlib") is not None
        written, pieces = list[Path](), [f"# {self.title}", "", MARK, ""]
        if figures and not can_draw:
            pieces += ["There are no figures: matplotlib was not installed.", ""]
        for section in sections:
            tables = self.tables(section)
            for table in tables:
                written += table.write(root / "tables" / f"{stem(section)}-{table.name}")
            drawn = self._draw(section, root / "figures") if figures and can_draw else {}
            written += [path for paths in drawn.values() for path in paths]
            pieces.append(self._section(section, tables, list(drawn)))
        written.append(put(readme, "\n".join(pieces)))
        if reproduction is not None:
            written.append(put_between(Path(reproduction), [(self.marks, self.reproduced(sections))]))
        return written

    def _draw(self, section: Section, folder: Path) -> dict[str, list[Path]]:
        """The paths of each figure and picture."""
        from espalier.report.figures import save

        place = f"{folder}/{stem(section)}"
        paths = {name: save(figure, Path(f"{place}-{name}")) for name, figure in self.figures(section).items()}
        for name, drawing in self.pictures(section).items():
            paths[name] = [put(Path(f"{place}-{name}.{k}"), picture.encoded(drawing, k)) for k in ("svg", "png")]
        return paths

    def reproduced(self, sections: Iterable[Section]) -> str:
        """The part of docs/reproduction.md made from run files: verdicts, the paper's table, what is far from it."""
        pieces = list[str]()
        for section in sections:
            pieces += [f"### {escaped(title(section))}", "", self.missing(section), "", self._claims(section), ""]
            if section.of("search"):
                first, *others = self.tables(section)
                pieces += [first.markdown(), self.far(section), ""]
                further = [table for table in others if table.name in self.documented]
                pieces += [table.markdown() for table in further if len(table.rows) > 1]
            commands = made_by(run.command for run in section.members)
            pieces += ["Commands:", "", "```", *commands, "```", ""]
        return "\n".join(pieces)

    def _section(self, section: Section, tables: list[Table], figures: list[str]) -> str:
        lines = [f"## {escaped(title(section))}", "", self.missing(section), ""]
        for name in figures:
            text = f"{self.titles[name]}: {title(section)}; {note(section)}"
            lines += [f"![{escaped(text)}](figures/{stem(section)}-{name}.svg)", ""]
        for table in tables:
            lines += [table.markdown(), ""]
        if (far := self.far(section)) and section.of("search"):
            lines += [far, ""]
        lines += ["### The paper's claims", "", self._claims(section), ""]
        revisions = ", ".join(dict.fromkeys(run.commit for run in section.members))
        versions = ", ".join(f"{name} {version}" for name, version in section.members[0].versions.items())
        origin = "; ".join(escaped(words) for words in (f"Revision {revisions}", versions, section.machines))
        return "\n".join([*lines, f"{origin}.", ""])

    def _claims(self, section: Section) -> str:
        columns = (("claim", ""), ("verdict", ""), ("runs", "g"), ("found", ""), ("test", ""))
        verdicts = self.verdicts(section)
        rows = tuple((f"{v.claim}. {v.words}", v.verdict, v.n, v.evidence, v.test) for v in verdicts)
        undecided = sum(v.verdict == UNDECIDED for v in verdicts)
        caption = f"Claims on {self.title.lower()}: {len(rows) - undecided} decided, {undecided} undecided"
        return Table("claims", caption, columns, rows, note(section)).markdown()

    def missing(self, section: Section) -> str:
        """How many trials there are, what a whole study has and this one lacks, and how long the paper trains."""
        lacks = [method for method in self.methods if not section.of(method)]
        absent = [power(p) for p in self.penalties if p not in searches(section)]
        if section.of("search") and absent:
            lacks.append(f"the penalties {', '.join(absent)}")
        words = [f"Trials of each setting: {trials(section)}."]
        if lacks:
            words.append(f"**Partial results: without {'; '.join(lacks)}.**")
        if epochs(section) != self.epochs:
            words.append(f"The paper trains for {self.epochs} epochs, these runs for {epochs(section)}.")
        if any(run.record.get("standard_data") is False for run in section.members):
            words.append("**The data are not the published ones.**")
        return " ".join(words)


def _unit_figures(section: Section) -> dict[str, Figure]:
    from espalier.paper.paper_figures import Names, figures  # matplotlib may be absent

    names = Names(
        shares=(("unit_share", "Units kept"), ("weight_share", "Weights kept")),
        column="units kept",
        labels={"search": "unit selection", "fixed": "fixed, uniform layers", "dropout": "dropout, all units"},
        full="fixed",
        gates="units",
        part="layer",
        kept=lambda run: [k / w for k, w in zip(run.result["units"], run.settings["widths"][1:-1], strict=True)],
    )
    return figures(section, names)


def _connection_figures(section: Section) -> dict[str, Figure]:
    from espalier.paper.paper_figures import Names, Rival, figures

    layers = (network(section)[1] - 4) // 3
    per_block = (layers + 1) * (layers + 2) // 2
    names = Names(
        shares=(
            ("weight_share", "Weights kept"),
            ("canonical.weight_share", "Weights shipped, without dead parts"),
            ("canonical.mac_share", "MACs shipped"),
        ),
        column="weights kept",
        labels={
            "search": "connection selection",
            MACS: "MACs as the cost",
            "random": "random selection",
            "full": "whole network",
        },
        full="full",
        gates="connections",
        part="block",
        kept=lambda run: [kept / per_block for kept in run.result["connections"]],
        rival=Rival(
            variant=MACS,
            figure="macs",
            title="Error at equal MACs",
            share="canonical.mac_share",
            axis="MACs shipped, share of the full network",
            costs=("weights as the cost", "MACs as the cost"),
        ),
    )
    return figures(section, names)


def _network(section: Section) -> dict[str, picture.Drawing]:
    """Fig. 3: the first trial's network at 2^-4, or at the penalty that ends nearest to the paper's 42%."""
    whole = [run for run in section.of("search") if run.number("canonical.depth")]
    if not whole:
        return {}
    share = printed_values.TABLE_2[2**-4].share
    nearest = min(whole, key=lambda run: abs(run.number("weight_share") - share))
    at = [run for run in section.of("search", 2**-4) if run in whole]
    return {"network": picture.of_run(min(at, key=lambda run: run.seed or 0, default=nearest).record)}


def _far_units(section: Section) -> str:
    if not compared(section):
        return ""
    cells = {p: far_cells(runs, p) for p, runs in searches(section).items()}
    if not any(cells.values()):
        return "Every cell of Table 1 is within 15% or 12 units of the paper's."
    return f"Cells of Table 1 further than 15% and 12 units from the paper's: {_listed(cells)}."


def _far_connections(section: Section) -> str:
    """Which cells of Table 2 differ from the paper's by more than a little."""
    if not compared(section):
        return ""
    cells = dict[float, list[str]]()
    for p, runs in searches(section).items():
        if (printed := printed_values.TABLE_2.get(p)) is not None:
            pairs = enumerate(zip(counts(runs, "connections"), printed.counts, strict=True), 1)
            cells[p] = [f"block {i}" for i, (ours, theirs) in pairs if abs(ours - theirs) > max(0.15 * theirs, FAR)]
            cells[p] += ["weight share"] if abs(middle(runs, "weight_share") - printed.share) > FAR_SHARE else []
    if not any(cells.values()):
        near = f"within 15% or {FAR} connections of the paper's, every weight share within {100 * FAR_SHARE:g} points"
        return f"Every cell of Table 2 is {near}."
    limits = f"15% and {FAR} connections, or than {100 * FAR_SHARE:g} points of the weight share,"
    return f"Cells of Table 2 further than {limits} from the paper's: {_listed(cells)}."


def _listed(cells: Mapping[float, list[str]]) -> str:
    return "; ".join(f"{power(p)}: {', '.join(names)}" for p, names in cells.items() if names)


TITLES = {"learning": "Over the training", "theta": "Probabilities at the end of the training"}
REPORTS = {
    "unit-selection": Report(
        title="Unit selection",
        titles={"error": "Size against error (Fig. 2a)", "layers": "What each layer keeps", **TITLES},
        tables=unit_tables,
        figures=_unit_figures,
        verdicts=unit_claims.verdicts,
        methods=("search", "fixed", "dropout"),
        penalties=tuple(printed_values.TABLE_1),
        epochs=printed_values.EPOCHS,
        far=_far_units,
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
        tables=connection_tables,
        figures=_connection_figures,
        verdicts=connection_claims.verdicts,
        methods=("search", "random", "full"),
        penalties=tuple(sorted((*printed_values.TABLE_2, 0.0, -(2**-3)), reverse=True)),
        epochs=printed_values.DENSENET_EPOCHS,
        far=_far_connections,
        pictures=_network,
        documented=("trade-off", "macs"),
    ),
}
