"""`espalier demo`: handwritten digits on a CPU: many sizes at once, one size asked for, images, and what ships.

Many sizes at once are a study: searches towards several targets and their control are one batch, uniform networks of
the same sizes from scratch another.
"""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from espalier import files, schema
from espalier.cli.command import Quiet, command_line
from espalier.records import COUNTED
from espalier.report import Point, Section, Study, read, write
from espalier.report.study_reader import middle, numbers
from espalier.ship import ship
from espalier.space import BadInput, Corrupt
from espalier.study import Grid, training
from espalier.study.settings import GridSettings
from espalier.study.training import Training
from espalier.train import PRESETS, progress
from espalier.train.batched.batch import one_thread
from espalier.train.loop import Stop

WIDTHS = (64, 64, 64, 10)  # pixels, two hidden layers, classes
TARGETS = (0.05, 0.1, 0.25, 0.5, 1.0)
MASKS, BATCH = 2, 32  # of the search: in every update two masks, and the examples that each of them reads
# Of networks from scratch, in every update: the best of 16, 32 and 64 on held-out folds of the training part, by
# `espalier study` (results/demo; a test compares them). All read as many examples.
RIVALS_BATCH = 32
STORY = "demo.json"
STATE = "state"  # of what is not finished
FOLDERS = (STATE, "runs", "quarter", "images", "quarter-small", "images-small", "figures", "tables")


@dataclass(frozen=True)
class Sizes(GridSettings):
    """Networks of many sizes, all in one folder: their curves stand in one chart. To a report they are any runs."""

    study, folder = "", "digits"
    sharing = (("search", "permuted"), ("scratch",))


@dataclass(frozen=True)
class Single:
    """A network that is asked for at one size. run: its folder. what: it is, for a person."""

    run: str
    what: str
    training: Training


def demo(
    epochs: int = typer.Option(40, min=1, help="Passes over the training data; the images take a third of them."),
    seeds: int = typer.Option(3, min=1, help="Networks of each size."),
    out: Path = typer.Option(Path("espalier-demo"), help="Where runs, small networks and the page are written."),
    quiet: Quiet = False,
) -> None:
    """See it work on handwritten digits, on a CPU. Networks are trained and cut to size in the same loop.

    Example: espalier demo --epochs 20
    """
    console, began = Console(), time.perf_counter()
    settings = {"epochs": epochs, "seeds": seeds}
    _prepare(out, settings)
    try:
        with one_thread():
            _sizes(console, out, epochs, seeds, quiet)
            for number, single in enumerate(_singles(epochs), 2):
                _single(console, number, single, out, quiet)
    except KeyboardInterrupt:
        typer.echo("espalier: stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None
    study = read(out)
    sizes = next(section for section in study.sections if section.folder)
    console.print(_size_table(sizes, seeds))
    found, alone = sizes.of_each(["search"]), sizes.of("scratch")
    over = sum(share > point.value for point in found for share in numbers(point.runs, "weight_share"))
    led = [run for run in sizes.members if run.searches]
    times = [f"{some[0].record['seconds']['batch']:.0f} s" for some in (led, alone)]
    console.print(
        f"{over} of {sum(len(point.runs) for point in found)} networks of the batch exceed their target. "
        f"One of the 450 test images is {1 / 450:.2%} of the error."
    )
    console.print(
        f"Equal is the number of examples read, not the time: {len(led)} networks of the search and its control took "
        f"{times[0]}, {len(alone)} from scratch {times[1]}."
    )
    page = _page(study)
    _note(out, settings, finished=True)
    shutil.rmtree(out / STATE, ignore_errors=True)
    count, took = len(study.runs), time.perf_counter() - began
    console.print(f"{count} networks; this took {took:.0f} s. Runs and small networks are in {out}.")
    if page is not None:
        console.print(f"The page: {page}")


def _singles(epochs: int) -> list[Single]:
    perceptron = Training("mlp", "digits", ("hidden=[256, 256]",), target=0.25, epochs=epochs, device="cpu")
    images = Training("cnn", "digits", ("widths=[32, 64, 64]",), target=0.3, cost="macs", device="cpu")
    return [
        Single("quarter", "MLP 64-256-256-10", perceptron),
        Single("images", "CNN 32-64-64, BatchNorm", replace(images, epochs=-(-epochs // 3))),
    ]


def _prepare(out: Path, settings: dict[str, Any]) -> None:
    """An unfinished demo of the same settings is gone on with; of another, its own folders make room."""
    path = out / STORY
    for name in FOLDERS:
        files.below(out, out / name)
    if path.exists():
        try:
            before = schema.read(path, schema.record({"settings": schema.anything}, {"finished": schema.flag}))
        except (OSError, Corrupt):
            raise BadInput(f"{path} was not written by `espalier demo`; name another folder by --out") from None
        if before.get("finished") or before["settings"] != settings:
            for name in FOLDERS:
                shutil.rmtree(out / name, ignore_errors=True)
    elif any((out / name).exists() for name in FOLDERS):
        raise BadInput(f"{out} holds folders that `espalier demo` did not write; name another by --out")
    _note(out, settings, finished=False)


def _note(out: Path, settings: dict[str, Any], finished: bool) -> None:
    files.write(out / STORY, json.dumps({"settings": settings, "finished": finished}) + "\n")


def _sizes(console: Console, out: Path, epochs: int, seeds: int, quiet: bool) -> None:
    """All targets with all seeds, and their controls, as one batch; then all uniform networks as another. For a target
    of 1 there is nothing to search for: the uncut network alone is trained, as the uniform ones are."""
    led = tuple(target for target in TARGETS if target < 1)
    count = 2 * len(led) * seeds
    console.print(
        f"1. {count} networks {_shape(WIDTHS)} as one batch, each with a target of its own. Every update "
        "draws two structures for a network: its weights learn under both, and the search learns what every unit is "
        "worth, along a ramp to the target. Half way the structure settles, and the weights finish under what ships.\n"
        "   Half of the networks are the control: their signal is shuffled among the gates.\n"
        "   Beside them, from scratch: uniform networks of the same sizes, and the uncut one, in updates of "
        f"{RIVALS_BATCH} examples, which suit them best. Every network reads equally many examples."
    )
    common: dict[str, Any] = {"hidden": WIDTHS[1:-1], "trials": seeds, "epochs": epochs, "points": epochs}
    common |= {"samples": MASKS, "recipe": PRESETS["default"]}
    searched = Sizes(methods=("search", "permuted"), targets=led, batch_size=BATCH, **common)
    # Under one mask an update reads as many examples as under all of them.
    uniform = Sizes(methods=("scratch",), targets=TARGETS, batch_size=RIVALS_BATCH // MASKS, **common)
    for settings in (searched, uniform):
        if not Grid(settings, out, device="cpu", command=command_line()).run(Stop(), progress.choose(quiet)):
            raise KeyboardInterrupt  # there is no other end of a run without a time limit


def _single(console: Console, number: int, single: Single, out: Path, quiet: bool) -> None:
    """Train one network to one size and ship it, as the two commands do, and say what they say."""
    asked = single.training
    assert asked.target is not None
    place = out / single.run
    command = (
        f"espalier train --model {asked.model} --model-arg '{asked.model_arg[0]}' --target {asked.target:g} "
        f"--cost {asked.cost} --epochs {asked.epochs} --device cpu --out {place}"
    )
    console.print(
        f"{number}. {asked.target:.0%} of the {COUNTED[asked.cost]} asked for, {single.what}:", highlight=False
    )
    _quote(console, command)
    result, ships = training.run(asked, place, command, time_limit=None, quiet=quiet)
    small = out / f"{single.run}-small"
    _quote(console, training.in_words(result, ships, asked, place))
    _quote(console, f"espalier compact {place} --to {small} --onnx")
    _quote(console, str(ship(place, small, formats=("torch", "onnx") if _can_export(console) else ("torch",))))


def _quote(console: Console, lines: str) -> None:
    """A command, or what it says."""
    console.print(textwrap.indent(lines, "   "), highlight=False, soft_wrap=True)


def _can_export(console: Console) -> bool:
    lacking = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if lacking:
        console.print(f"   without ONNX, for {', '.join(lacking)} is not here: pip install 'espalier[onnx]'")
    return not lacking


def _size_table(sizes: Section, seeds: int) -> Table:
    """A row for each target: its networks, their control, and uniform ones of as many weights."""
    table = Table(title=f"Handwritten digits: weights kept, error on 450 test images; medians of {seeds}")
    for column in ("target", "kept", "for example", "error", "control's", "uniform", "its error"):
        table.add_column(column, justify="right")
    led = {point.value: point for point in sizes.of_each(["search"])}
    for target, uniform in zip(TARGETS, sizes.of_each(["scratch"]), strict=True):
        row = ["uncut", *[""] * 4]
        if target in led:
            control = middle(sizes.of("permuted", target), "error")
            shares = (led[target].median("weight_share"), led[target].median("error"), control)
            kept, *errors = (f"{share:.1%}" for share in shares)
            row = [f"{target:.0%}", kept, _network(led[target]), *errors]
        table.add_row(*row, _network(uniform), f"{uniform.median('error'):.1%}")
    return table


def _network(point: Point) -> str:
    """The widths of the run in the middle."""
    return _shape((WIDTHS[0], *point.example.result["units"], WIDTHS[-1]))


def _page(study: Study) -> Path | None:
    """The report of everything below the folder: its page; None where jinja2 is missing."""
    written, _ = write(study)
    return next((path for path in written if path.suffix == ".html"), None)


def _shape(widths: tuple[int, ...]) -> str:
    return "-".join(str(width) for width in widths)
