"""The run files of a study, read back: one Run each, and the sections of runs that may stand in one table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.picture.labels import whole_power
from espalier.space import BadInput, Corrupt

FORMAT = 1
SHARED = {"batch_size", "learning_rate", "momentum", "weight_decay", "pad"}  # by all methods of one table
FREE = {"precision", "points", "device"}
OTHERS = ("fixed", "random", "full", "dropout")  # methods that search for nothing, in the order of tables


@dataclass(frozen=True)
class Run:
    """One finished run. story: the whole file. Errors and shares are of the last update."""

    path: Path
    story: dict[str, Any]

    @property
    def method(self) -> str:
        return str(self.story["run"]["method"])

    @property
    def variant(self) -> str:
        return str(self.story["run"]["variant"])

    @property
    def seed(self) -> int:
        return int(self.story["run"]["seed"])

    @property
    def penalty(self) -> float | None:
        found: float | None = self.story["run"].get("penalty")
        return None if found is None else whole_power(found)

    @property
    def setting(self) -> float:
        """What tells runs of one variant apart: the penalty, the share of a given network, the rate of dropout."""
        asked = self.story["run"]
        if self.penalty is not None:
            return self.penalty
        return float(next(asked[name] for name in ("size", "rate") if name in asked))

    @property
    def units(self) -> list[int]:
        return list(self.story["result"]["units"])

    @property
    def connections(self) -> list[int]:
        return list(self.story["result"]["connections"])

    @property
    def canonical(self) -> dict[str, Any]:
        """What is known of the network that ships: the mask without its dead parts."""
        return dict(self.story["result"]["canonical"])

    @property
    def mac_share(self) -> float:
        return float(self.story["result"]["mac_share"])

    @property
    def shipped_weight_share(self) -> float:
        return float(self.canonical["weight_share"])

    @property
    def shipped_mac_share(self) -> float:
        return float(self.canonical["mac_share"])

    @property
    def unit_share(self) -> float:
        return float(self.story["result"]["unit_share"])

    @property
    def weight_share(self) -> float:
        return float(self.story["result"]["weight_share"])

    @property
    def error(self) -> float:
        """Share of wrong test images under the structure that ships; 1 where training diverged."""
        found = self.story["result"]["test_error"]
        return 1.0 if found is None else float(found)

    @property
    def stochastic_error(self) -> float | None:
        found = self.story["result"].get("stochastic")
        return None if found is None else found["test_error"]

    @property
    def curve(self) -> list[dict[str, Any]]:
        return list(self.story["curve"])

    @property
    def study(self) -> str:
        return str(self.story["study"])

    @property
    def widths(self) -> tuple[int, ...]:
        """Of a fully-connected network."""
        return tuple(self.story["settings"]["widths"])

    @property
    def network(self) -> tuple[Any, ...]:
        """What tells its network from another: its widths, or its name, depth and growth."""
        settings = self.story["settings"]
        return self.widths if "widths" in settings else tuple(settings[k] for k in ("network", "depth", "growth"))

    @property
    def hardware(self) -> str:
        machine = self.story["hardware"]
        return str(machine.get("gpu") or machine["cpu"])

    @property
    def batch(self) -> tuple[Any, ...]:
        """Equal for runs that were trained as one batch."""
        return self.variant if self.method == "search" else "given", json.dumps(self.story["seconds"], sort_keys=True)


@dataclass(frozen=True)
class Section:
    """Runs on the same data with the same number of epochs and the same network."""

    name: str
    dataset: str
    epochs: int
    evaluated_on: str
    network: tuple[Any, ...]
    runs: tuple[Run, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        return self.runs[0].widths

    @property
    def title(self) -> str:
        shape = "-".join(map(str, self.network[:2] if isinstance(self.network[0], str) else self.network))
        return f"{self.dataset}, {self.epochs} epochs of the search, {shape}, errors on the {self.evaluated_on}"

    @property
    def hardware(self) -> str:
        return " and ".join(dict.fromkeys(run.hardware for run in self.runs))

    @property
    def note(self) -> str:
        """What every table and figure says of itself."""
        counts = [f"{len(self.of(variant))} {variant}" for variant in self.variants]
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"{runs} ({', '.join(counts)}), {self.epochs} epochs, {self.hardware}"

    @property
    def single(self) -> bool:
        """Whether there is one trial of every setting: no number is then a median."""
        return all(len(self.of(v, s)) == 1 for v in self.variants for s in self.settings(v))

    def of(self, variant: str, setting: float | None = None) -> list[Run]:
        """The runs of one variant (and setting); "search" is the paper's form alone."""
        return [r for r in self.runs if r.variant == variant and (setting is None or r.setting == setting)]

    @property
    def variants(self) -> list[str]:
        """The paper's search first, its variants, then the other methods."""
        found = dict.fromkeys(run.variant for run in self.runs)
        return sorted(found, key=lambda v: (v in OTHERS and 1 + OTHERS.index(v), v != "search", v))

    def settings(self, variant: str) -> list[float]:
        """From the smallest structures to the largest: strongest penalty first, smallest share first."""
        found = {run.setting for run in self.of(variant)}
        return sorted(found, reverse=variant.startswith("search"))


def read(folder: str | os.PathLike[str]) -> list[Section]:
    """Every run file under the folder, in sections; a file that is not whole is named and refused."""
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give the folder of a study")
    paths = sorted((root / "runs").glob("*/*/*.json"))  # as the study writes them
    if not paths:
        raise BadInput(f"{root} holds no finished run (no runs/*/*/*.json); run the study first")
    runs = [Run(path, _story(path)) for path in paths]
    if len(studies := {run.study: run.path for run in runs}) > 1:
        (one, here), (other, there), *_ = studies.items()
        raise BadInput(f"two studies in one folder: {here} is of {one}, {there} of {other}; keep them apart")
    return [_section(group) for group in _grouped(runs, _place)]


def _story(path: Path) -> dict[str, Any]:
    try:
        story = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a run file: {error}. Remove it and run the study again") from None
    needed = {"study", "run", "settings", "result", "curve", "seconds", "hardware", "versions"}
    if not isinstance(story, dict) or story.get("format") != FORMAT or needed - story.keys():
        raise Corrupt(f"{path} is not a run file of format {FORMAT}; take it out of the folder")
    return story


def _place(run: Run) -> tuple[Any, ...]:
    settings = run.story["settings"]
    return settings["dataset"], run.story["evaluated_on"], -settings["epochs"], run.network


def _section(runs: list[Run]) -> Section:
    dataset, evaluated_on, epochs, network = _place(runs[0])
    _check_alike(runs)
    held = "" if evaluated_on == "test set" else "-held_out"
    name = f"{dataset}{held}-{-epochs}_epochs"
    if isinstance(network[0], str):
        name += "" if network[1:] == (40, 12) else f"-depth_{network[1]}-growth_{network[2]}"
    elif network[1:-1] != (network[0],) * 3:
        name += "-" + "_".join(map(str, network[1:-1]))
    return Section(name, dataset, -epochs, evaluated_on, network, tuple(runs))


def _check_alike(runs: list[Run]) -> None:
    """Runs of one table differ in what the table shows, and in nothing else (but the machine and its rounding)."""
    for variant, shared in [(None, SHARED), *[(v, None) for v in dict.fromkeys(r.variant for r in runs)]]:
        group = [r for r in runs if variant is None or r.variant == variant]
        names = {name for r in group for name in r.story["settings"]} - FREE if shared is None else shared
        for name in sorted(names):
            found = {json.dumps(r.story["settings"].get(name)): r.path for r in group}
            if len(found) > 1:
                (one, here), (other, there), *_ = found.items()
                raise BadInput(
                    f"a mixed study: {name} is {one} in {here} and {other} in {there}; keep such runs in folders of "
                    "their own"
                )


def _grouped(runs: Iterable[Run], key: Callable[[Run], tuple[Any, ...]]) -> list[list[Run]]:
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return [groups[place] for place in sorted(groups)]
