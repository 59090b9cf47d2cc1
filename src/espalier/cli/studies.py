"""`espalier study` and `espalier paper`: grids of runs, trained as far as time allows, then reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier import records, schema
from espalier.cli.command import DataDir, command_line
from espalier.data import names
from espalier.files import below
from espalier.space import BadInput
from espalier.study.settings import ConnectionSettings, GridSettings, PaperSettings, Settings
from espalier.study.sources import as_dataset
from espalier.study.study import Grid, PaperStudy, Study
from espalier.study.training import METHODS, Sweeping, run_many
from espalier.train import Result, progress, recipes
from espalier.train.batched import Compute
from espalier.train.loop import Stop
from espalier.train.on_ray import Ray
from espalier.train.recipes import Recipe
from espalier.train.setting import changed, setting, usual_device, whole, words

Out = Annotated[Path, typer.Option(help="Folder of the run files; the same command goes on with what is in it.")]


@dataclass(frozen=True)
class Running:
    """How many runs are trained, beside their settings: how many at once, how long, and what is written."""

    runs_at_once: int | None = setting(None, "The most runs in one batch; batches follow one another.", least=1)
    updates_at_once: int = setting(50, "Updates recorded as one CUDA graph.", least=1)
    time_limit: float | None = setting(None, "Stop cleanly after so many seconds.")
    report: bool = setting(True, "Write the page, tables and figures of what is in the folder.")
    as_json: bool = setting(False, "The outcome as one JSON object, the last line of stdout.", flag="json")
    quiet: bool = setting(False, "No progress.")
    force: bool = setting(False, "Go on although data, code or settings have changed, or another host left its lock.")

    def batches(self) -> dict[str, Any]:
        """What a sweep is told."""
        names = ("updates_at_once", "quiet", "force")
        return {"at_once": self.runs_at_once, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class StudyRunning(Running):
    """Of studies: also on what they are computed, which is a setting of the task for a sweep."""

    device: str = setting("", "cpu or cuda; default: cuda where there is one.", after="updates_at_once")
    runs_at_once: int | None = changed(Running, "runs_at_once", None, old="at-once")
    commit: str = setting("", "The revision to record, where git cannot tell.", after="time_limit")
    report: bool = changed(Running, "report", True, help="Write tables and figures of what is in the folder.")

    def origin(self) -> dict[str, Any]:
        """Where the runs are computed, and what their files say of it."""
        return {
            "device": usual_device(self.device),
            "commit": self.commit or None,
            "command": command_line(),
            "force": self.force,
        }


@dataclass(frozen=True)
class PaperRunning(StudyRunning):
    """Of the paper's studies."""

    compile: bool | None = setting(None, "Compile the update; default: on cuda.", after="device")
    autotune: bool = setting(False, "Look longer for faster kernels.", after="compile")
    inductor: str = setting("{}", "Options of torch's compiler, as JSON.", after="autotune")
    keep_state: bool = setting(
        False,
        "Keep the last checkpoints of finished batches, and of connection selection each run's weights.",
        after="commit",
    )
    part_size: float | None = setting(
        None,
        "MiB of the largest file of a checkpoint, which is then in parts; default: one file.",
        least=0,
        after="keep_state",
    )
    reproduction: Path | None = setting(None, "A page whose generated part is to be replaced as well.", after="report")

    def compute(self, precision: str) -> Compute:
        try:
            options = json.loads(self.inductor)
        except ValueError as error:
            example = '{"combo_kernels": true}'
            raise BadInput(f"--inductor is JSON such as '{example}', not {self.inductor!r}: {error}") from None
        if not isinstance(options, dict):
            raise BadInput(f"--inductor is a JSON object, not {self.inductor!r}")
        given: dict[str, Any] = {"precision": precision, "compile": self.compile, "autotune": self.autotune}
        return Compute(**given, options=options, updates_at_once=self.updates_at_once)


@dataclass(frozen=True)
class ConnectionRunning(PaperRunning):
    """Of connection selection: fewer runs and updates at once, for its networks are large."""

    runs_at_once: int | None = changed(StudyRunning, "runs_at_once", 8)
    updates_at_once: int = changed(Running, "updates_at_once", 5)


@dataclass(frozen=True)
class GridRunning(StudyRunning):
    """Of a grid."""

    report: bool = changed(Running, "report", True, help="Write the tables of what is in the folder.")
    page: Path | None = setting(None, "A page whose generated parts are to be replaced as well.", after="report")


@dataclass(frozen=True)
class Executing:
    """Where batches of runs are trained."""

    executor: str = setting(
        "", "ray: batches of --runs-at-once as tasks of Ray; default: one by one, here.", choices=("ray",)
    )
    address: str = setting("", "Of a Ray cluster, as 10.0.0.1:6379, or auto; default: one is started here.")
    task_cpus: float = setting(1.0, "Cores of a Ray task.", least=0)
    task_gpus: float = setting(0.0, "GPUs of a Ray task, as 1 or 0.25.", least=0)
    task_time_limit: float | None = setting(
        None, "Seconds after which a Ray task makes room for others, with a checkpoint, and is queued again."
    )

    def ray(self) -> Ray | None:
        given = self.address or self.task_gpus or self.task_time_limit
        if not self.executor and given:
            raise BadInput("--address and --task-... are for --executor ray")
        if not self.executor:
            return None
        return Ray(self.address or None, self.task_cpus, self.task_gpus, self.task_time_limit)


@dataclass(frozen=True)
class RecipeChanges:
    """What is changed of the recipe of a grid, by the names of its fields; None: as it is."""

    recipe: str = setting("ranked", "The recipe that the flags below change.", old="preset", choices=recipes.PRESETS)
    theta_rate: float | None = setting(None, "Theta's learning rate times the degrees of freedom.")
    theta_way: float | None = setting(None, "Theta's learning rate times the updates of the search.")
    initial: float | None = setting(None, "Theta at the start.")
    begin: float | None = setting(None, "The share of the run, at its start, under the whole network.")
    ramp: float | None = setting(None, "The share of the run over which the cost is led to the target.")
    ramp_updates: int | None = setting(None, "The fewest updates of that, where the search can begin earlier.")
    even: float | None = setting(None, "0: the ramp takes from gates by their cost; 1: from all alike.")
    settle: float | None = setting(None, "The share of the run, at its end, under the structure found.")
    adaptive: bool = setting(False, "The step size of theta adapts itself (ASNG).")
    learning_rate: float | None = setting(None, "Of the weights, of all methods.")
    drops: tuple[float, ...] | None = setting(
        None, "After which shares of the run that rate is divided by ten, as 0.75,0.9."
    )

    def apply(self) -> Recipe:
        """The recipe with what is given in place of its own.

        Settling alone shortens what is the recipe's own before it, and a ramp alone lets the search begin earlier; what
        is given is taken at its word.
        """
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "recipe"}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        own, ramp, settle = recipes.read(self.recipe), given.pop("ramp", None), given.pop("settle", None)
        if "begin" not in given and ramp is None:
            return recipes.settled(replace(own, **given), settle)
        recipe = replace(own, **given | ({} if settle is None else {"settle": settle}))
        if ramp is None:
            return recipe
        return replace(recipe, ramp=ramp) if "begin" in given else recipes.ramped(recipe, ramp)


def unit_selection(*, out: Out, data_dir: DataDir = None, settings: Settings, running: PaperRunning) -> None:
    """Unit selection: seven penalties, fixed networks of several sizes, and dropout, as two batches of runs.

    Example: espalier paper unit-selection --out results/unit-selection --data-dir data --device cuda
    """
    _paper_study(settings, out, data_dir, running)


def connection_selection(
    *, out: Out, data_dir: DataDir = None, settings: ConnectionSettings, running: ConnectionRunning
) -> None:
    """Connection selection in a DenseNet: eight penalties, random selections of several sizes, the whole network.

    Example: espalier paper connection-selection --out results/connection-selection --data-dir data --device cuda
    """
    _paper_study(settings, out, data_dir, running)


def _paper_study(settings: PaperSettings, out: Path, data_dir: Path | None, running: PaperRunning) -> None:
    stop, compute = Stop(running.time_limit), running.compute(settings.precision)
    kept: dict[str, Any] = {"keep_state": running.keep_state, "runs_at_once": running.runs_at_once}
    kept["part_size"] = None if running.part_size is None else round(running.part_size * 2**20)
    study = PaperStudy(settings, out, data_dir=data_dir, compute=compute, **kept, **running.origin())

    def report() -> Written:
        from espalier.paper import write

        written, notes = write(out, running.reproduction)
        for path in () if running.as_json else written:
            typer.echo(f"wrote {path}")
        return written, notes

    _run([study], out, running, stop, "json", report)


def study(
    *,
    out: Out,
    data_dir: DataDir = None,
    settings: GridSettings,
    epochs: str = typer.Option(
        "20", help="Of a search with two masks, one number or several; every method takes as many example-gradients."
    ),
    changes: RecipeChanges,
    running: GridRunning,
    executing: Executing,
) -> None:
    """Compare the search with its rivals and its control. All methods have an equal budget.

    Example: espalier study --data digits --targets 0.1,0.3 --seeds 3 --epochs 20 --out runs/digits

    Example: espalier study --model net.py:build --data arrays.npz --targets 10%,30% --seeds 3 --out runs/own
    """
    stop, recipe, elsewhere = Stop(running.time_limit), changes.apply(), executing.ray()
    compute = Compute(precision=settings.precision, updates_at_once=running.updates_at_once)  # type: ignore[arg-type]
    common: dict[str, Any] = {"data_dir": data_dir, "compute": compute, "runs_at_once": running.runs_at_once}
    lengths = [whole(word, "of epochs") for word in words(epochs)]
    if not lengths:
        raise BadInput("epochs is empty, so there is nothing to run")
    each = [replace(settings, epochs=length, recipe=recipe) for length in lengths]
    if settings.model != "mlp":
        _own_network(each, out, data_dir, running, stop, elsewhere)
        return
    if settings.model_arg:
        raise BadInput("--model-arg is for a network of your own; the layers of mlp are --hidden 64,64")
    if settings.dataset not in names():
        common["data"] = as_dataset(settings.dataset)
        each = [replace(one, dataset=common["data"].name) for one in each]
    origin = running.origin()
    if elsewhere is not None:  # a task sees what it asks for
        origin["device"] = running.device or ("cuda" if elsewhere.gpus else "cpu")
    grids = [Grid(one, out, **common, **origin) for one in each]

    def report() -> Written:
        from espalier.report import grid_tables, read, write
        from espalier.report.tables import PAGES

        runs = read(out)
        written, notes = write(runs, running.page)
        if not running.as_json:
            for section in grid_tables.sections_of(runs):
                for line in grid_tables.lines(section):
                    typer.echo(line)
            readme = next(p for p in written if p.name in PAGES)
            typer.echo(f"wrote {len(written)} files: tables and figures, see {readme}")
        return written, notes

    _run(grids, out, running, stop, "jsonl", report, *([] if elsewhere is None else [elsewhere]))


def _own_network(
    each: Sequence[GridSettings],
    out: Path,
    data_dir: Path | None,
    running: GridRunning,
    stop: Stop,
    elsewhere: Ray | None,
) -> None:
    """A grid of any network: sweeps into run directories, a folder for each length and method."""
    shown, complete, results = progress.choose(running.quiet), True, list[Result]()
    for one in each:
        if unfit := [name for name in ("hidden", "folds", "held_out") if getattr(one, name)]:
            raise BadInput(f"--{unfit[0].replace('_', '-')} is for --model mlp, not for {one.model}")
        methods = [method for method in METHODS if method in one.methods]
        if "scratch" in one.methods:
            shown.say(f"scratch is left out: how {one.model} is made narrower in equal parts is not known")
        names_of = ("model", "model_arg", "cost", "epochs", "batch_size", "samples", "first_seed")
        task = Sweeping(
            data=one.dataset,
            targets=one.targets,
            seeds=one.trials,
            data_dir=str(data_dir or ""),
            device=running.device,
            precision="" if one.precision == "float32" else one.precision,
            **{name: getattr(one, name) for name in names_of},
        )
        found = run_many(
            task,
            below(out, out / f"{one.epochs}_epochs"),
            methods=methods,
            penalties=one.penalties,
            recipes={method: one.recipe_of(method) for method in methods},
            stop=stop,
            executor=elsewhere,
            **running.batches(),
        )
        results += [result for some in found.values() for result in some]
        complete = complete and set(found) == set(methods) and all(result.finished for result in results)
        if not complete:
            break
    _end_of_sweep(results, complete, out, running)


def sweep(*, out: Out, task: Sweeping, running: Running, executing: Executing) -> None:
    """Train many sizes at once, and report. Every target, or penalty, with every seed is a run of one batch.

    Example: espalier sweep --model mlp --data digits --targets 5%,10%,25% --seeds 3 --out runs/sizes

    Example: espalier sweep --model net.py:build --data arrays.npz --targets 10%,30% --epochs 40 --out runs/own
    """
    found = run_many(task, out, stop=Stop(running.time_limit), executor=executing.ray(), **running.batches())
    results = [result for some in found.values() for result in some]
    _end_of_sweep(results, all(result.finished for result in results), out, running)


def _end_of_sweep(results: Sequence[Result], complete: bool, out: Path, running: Running) -> None:
    """Report run directories, and say what came of each run."""
    written, notes = list[Path](), list[str]()
    if running.report:
        from espalier.report import write

        written, notes = write(out)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if running.as_json:
        outcome = {"out": str(out), "complete": complete, "runs": len(results), "wrote": [str(p) for p in written]}
        typer.echo(json.dumps(outcome | {"notes": notes}))
        return
    for result in results:
        typer.echo(_run_in_words(result))
    page = [str(path) for path in written if path.suffix == ".html"]
    typer.echo(f"{len(results)} runs are in {out}{'; the page: ' + page[0] if page else ''}")
    if not complete:
        typer.echo("stopped by its time limit; the same command goes on")


def _run_in_words(result: Result) -> str:
    run = result.run
    assert run is not None
    asked = "found structure, from scratch" if run.mask is not None else f"penalty {run.penalty}"
    if run.target is not None:
        asked = f"target {run.target:.2%}" + (" (control)" if run.permuted else "")
    weights = result.shares["weight_share"]
    words = [asked, f"seed {run.seed}", f"{weights:.2%} of the weights" if weights is not None else ""]
    if result.validation is not None:
        score = result.validation
        words.append(f"loss {score.loss:.4f}" if score.error is None else f"error {score.error:.2%}")
    return ", ".join(word for word in words if word)


Written = tuple[list[Path], list[str]]  # the files of a report, and notes about it


def _run(
    studies: Sequence[Study],
    out: Path,
    running: StudyRunning,
    stop: Stop,
    ending: str,
    report: Callable[[], Written],
    *elsewhere: Ray,
) -> None:
    """Train what is missing, report what is there, and say how it ended, to people and to scripts.

    Exit code 130 where somebody pressed Ctrl-C; a time limit is no error. ending: of the names of the run files.
    """
    shown = progress.choose(running.quiet)
    if (out / records.PACKED).is_file():  # runs that were packed are gone on with as files
        records.unpack(out)
    with stop.on_interrupt():
        complete = all(one.run(stop, shown, *elsewhere) for one in studies)
    files = {kind: list(out.glob(f"runs/*/*/*.{kind}")) for kind in ("json", "jsonl")}
    written, notes = report() if running.report and files[ending] else ([], [])
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if stop.interrupted:
        typer.echo("espalier: stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130)
    if complete:
        shown.say(f"every run is in {out}")
    if running.as_json:
        lines = [len(schema.content(path).splitlines()) for path in files["jsonl"]]
        runs = len(files["json"]) + sum(max(count - 1, 0) for count in lines)  # a head, then a line for each run
        outcome = {"out": str(out), "complete": complete, "runs": runs, "wrote": [str(p) for p in written]}
        typer.echo(json.dumps(outcome | {"notes": notes}))
