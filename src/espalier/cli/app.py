"""The commands: one run, what ships and is reported of it; many runs, of a sweep or a study; data sets."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier import __version__, records
from espalier.cli.command import DataDir, Quiet, TimeLimit, command_line, register
from espalier.cli.demo import demo
from espalier.data import available, get, names, verify
from espalier.files import below, clean
from espalier.paper import write
from espalier.report import Study as Runs
from espalier.report import grid_tables, read
from espalier.report.tables import PAGES
from espalier.ship import FORMATS, ship
from espalier.space import BadInput
from espalier.study import Grid, PaperStudy, Study
from espalier.study.settings import ConnectionSettings, GridSettings, PaperSettings, Settings
from espalier.study.sources import as_dataset
from espalier.study.training import METHODS, UNFINISHED, Sweeping, Training, in_words, run_many
from espalier.study.training import run as training_run
from espalier.train import Result, progress, ranks, recipes
from espalier.train.batched import Compute
from espalier.train.loop import Stop
from espalier.train.on_ray import Ray
from espalier.train.recipes import Recipe
from espalier.train.setting import setting, usual_device, whole, words

PLAIN: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "rich_markup_mode": None}
app = typer.Typer(
    name="espalier",
    help="Train a neural network and shape it in the same loop: a plain, smaller network at the size you ask for.",
    pretty_exceptions_enable=False,
    **PLAIN,
)
paper = typer.Typer(help="The paper's studies.", **PLAIN)
data = typer.Typer(help="The data sets known by name: list, get, verify.", **PLAIN)

FOLDER = typer.Option(None, "--data-dir", help="Where to look first; then ESPALIER_DATA and the cache folder.")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"espalier {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def train(
    *,
    out: Path = typer.Option(..., help="The run directory; the same command goes on with what is in it."),
    training: Training,
    time_limit: TimeLimit = None,
    force: bool = typer.Option(
        False, "--force", help="Go on although data, code or settings have changed, or another host left its lock."
    ),
    parallel: str = typer.Option(
        "", metavar="data|structure", help="Under torchrun: each rank its share of the mini-batch, or its own masks."
    ),
    rank_timeout: float = typer.Option(
        300.0, min=1.0, help="Under torchrun: seconds after which a rank that does not answer counts as lost."
    ),
    quiet: Quiet = False,
    as_json: bool = typer.Option(False, "--json", help="The result as one JSON object, the last line of stdout."),
) -> None:
    """Train one network and shape it on the way. The run directory holds the small network.

    Example: espalier train --model mlp --data digits --target 0.25 --out runs/digits

    Example: espalier train --model net.py:build --model-arg width=64 --data arrays.npz --target 30% --out runs/own

    Example: torchrun --nproc-per-node=2 -m espalier train --parallel data --model cnn --target 0.3 --out runs/two
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the network has not learned")  # said below, in one line
            with ranks.started(parallel, usual_device(training.device), rank_timeout) as several:
                about: dict[str, Any] = {"time_limit": time_limit, "quiet": quiet, "force": force, "ranks": several}
                result, ships = training_run(training, out, command_line(), **about)
    except KeyboardInterrupt:
        saved = any(out.glob("checkpoint-*.safetensors"))
        how = f"the same command goes on from {out}" if saved else "nothing was trained yet"
        typer.echo(f"espalier: stopped; {how}", err=True)
        raise typer.Exit(130) from None
    if several is not None and not several.first:
        return
    if not as_json:
        typer.echo(in_words(result, ships, training, out))
    else:
        typer.echo(json.dumps({"run": str(out), **clean(result.summary()), **ships}, allow_nan=False))
    if result.finished and result.warning:
        typer.echo(f"espalier: warning: {result.warning}", err=True)


def compact(
    run: Path = typer.Argument(help="The run directory of `espalier train`."),
    to: Path = typer.Option(..., help="The folder to write."),
    onnx: bool = typer.Option(False, "--onnx", help="Write model.onnx too, checked with onnxruntime."),
    formats: str = typer.Option("", help=f"Further formats, by commas: {', '.join(FORMATS)}."),
    model: str = typer.Option("", help="The factory of the uncut network; needed where it is code of your own."),
    trust: bool = typer.Option(False, "--trust", help="Run the code that the run names, although it may have changed."),
    as_json: bool = typer.Option(False, "--json", help="What was written and checked as one JSON object."),
) -> None:
    """Write the small network of a run, ready to ship. A card says what it is and how to load it.

    Example: espalier compact runs/digits --to digits-small --onnx
    """
    wanted = [name.strip() for name in formats.split(",") if name.strip()]
    shipped = ship(run, to, model=model or None, formats=("torch", *(["onnx"] if onnx else []), *wanted), trust=trust)
    for note in shipped.notes:
        typer.echo(f"espalier: {note}", err=True)
    if as_json:
        written = {"to": str(to), "files": shipped.files, "sizes": shipped.sizes, "checks": shipped.checks}
        typer.echo(json.dumps(written | {"milliseconds": shipped.speed}))
    else:
        typer.echo(f"wrote {', '.join(shipped.files)} to {to}\n{shipped}")


def report(
    folder: Path = typer.Argument(help="A study, a sweep or a run: the folder that its runs were written to."),
    reproduction: Path | None = typer.Option(None, help="A page whose generated part is to be replaced as well."),
    figures: bool = typer.Option(True, help="Figures as SVG and PNG (needs matplotlib)."),
    as_json: bool = typer.Option(False, "--json", help="What was written, as one JSON object."),
    page: bool = typer.Option(True, help="The page report.html (needs jinja2)."),
) -> None:
    """Write a page about runs, report.html. Tables and figures are written beside it.

    Example: espalier report results/unit-selection
    """
    written, notes = write(folder, reproduction, figures=figures, page=page)
    _say_outcome([f"wrote {path}" for path in written], written, notes, as_json)


def _say_outcome(
    lines: Iterable[str], written: Sequence[Path], notes: Sequence[str], as_json: bool, **outcome: Any
) -> None:
    """How a command ended, in lines for a person or as JSON for a script; notes beside it in any case."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    outcome |= {"wrote": list(map(str, written)), "notes": notes}
    for line in [json.dumps(outcome)] if as_json else lines:
        typer.echo(line)


# ---- many runs -------------------------------------------------------------------------------------------------------

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
    runs_at_once: int | None = setting(None, old="at-once")
    commit: str = setting("", "The revision to record, where git cannot tell.", after="time_limit")
    report: bool = setting(True, "Write tables and figures of what is in the folder.")

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
    autotune: bool = setting(False, "Look longer for faster kernels.")
    inductor: str = setting("{}", "Options of torch's compiler, as JSON.")
    keep_state: bool = setting(
        False,
        "Keep the last checkpoints of finished batches, and of connection selection each run's weights.",
        after="commit",
    )
    part_size: float | None = setting(
        None, "MiB of the largest file of a checkpoint, which is then in parts; default: one file.", least=0
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

    runs_at_once: int | None = 8
    updates_at_once: int = 5


@dataclass(frozen=True)
class GridRunning(StudyRunning):
    """Of a grid."""

    report: bool = setting(True, "Write the tables of what is in the folder.")
    page: Path | None = setting(None, "A page whose generated parts are to be replaced as well.")


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
        given["weights_learning_rate"] = given.pop("learning_rate")
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
    _run([study], out, running, stop, running.reproduction, lambda _, written: [f"wrote {path}" for path in written])


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

    def said(runs: Runs, written: Sequence[Path]) -> list[str]:
        lines = [line for section in grid_tables.sections_of(runs) for line in grid_tables.lines(section)]
        readme = next(p for p in written if p.name in PAGES)
        return [*lines, f"wrote {len(written)} files: tables and figures, see {readme}"]

    _run(grids, out, running, stop, running.page, said, *([] if elsewhere is None else [elsewhere]))


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
        given = {"hidden": one.hidden, "folds": one.folds, "held-out": one.held_out, "page": running.page}
        if unfit := [name for name, value in given.items() if value]:
            raise BadInput(f"--{unfit[0]} is for --model mlp, not for {one.model}")
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
        by_method = _many(
            task,
            below(out, out / f"{one.epochs}_epochs"),
            methods=methods,
            penalties=one.penalties,
            recipes={method: one.recipe_of(method) for method in methods},
            stop=stop,
            executor=elsewhere,
            **running.batches(),
        )
        results += [result for some in by_method.values() for result in some]
        complete = complete and set(by_method) == set(methods) and all(result.finished for result in results)
        if not complete:
            break
    _end_of_sweep(results, complete, out, running)


def sweep(*, out: Out, task: Sweeping, running: Running, executing: Executing) -> None:
    """Train many sizes at once, and report. Every target, or penalty, with every seed is a run of one batch.

    Example: espalier sweep --model mlp --data digits --targets 5%,10%,25% --seeds 3 --out runs/sizes

    Example: espalier sweep --model net.py:build --data arrays.npz --targets 10%,30% --epochs 40 --out runs/own
    """
    by_method = _many(task, out, stop=Stop(running.time_limit), executor=executing.ray(), **running.batches())
    results = [result for some in by_method.values() for result in some]
    _end_of_sweep(results, bool(results) and all(result.finished for result in results), out, running)


def _many(*given: Any, **more: Any) -> dict[str, list[Result]]:
    """``run_many``, which says in any case when somebody pressed Ctrl-C: typer says nothing of it."""
    try:
        return run_many(*given, **more)
    except KeyboardInterrupt:
        typer.echo("espalier: stopped; the same command goes on", err=True)
        raise typer.Exit(130) from None


def _end_of_sweep(results: Sequence[Result], complete: bool, out: Path, running: Running) -> None:
    """Report run directories, and say what came of each run; there are none where the time limit came first."""
    written, notes = write(out) if running.report and results else ([], [])
    page = "".join(f"; the page: {path}" for path in written if path.suffix == ".html")
    lines = [*map(_run_in_words, results), f"{len(results)} runs are in {out}{page}"]
    lines += [] if complete else [UNFINISHED]
    _say_outcome(lines, written, notes, running.as_json, out=str(out), complete=complete, runs=len(results))


def _run_in_words(result: Result) -> str:
    run = result.run
    assert run is not None
    target, kind = (run.target, "") if run.mask is None else (run.found, ", found structure from scratch")
    asked = f"penalty {run.penalty}" if target is None else f"target {target:.2%}{kind}"
    asked += " (control)" if run.permuted else ""
    weights = result.shares["weight_share"]
    words = [asked, f"seed {run.seed}", f"{weights:.2%} of the weights" if weights is not None else ""]
    if result.validation is not None:
        score = result.validation
        words.append(f"loss {score.loss:.4f}" if score.error is None else f"error {score.error:.2%}")
    return ", ".join(word for word in words if word)


def _run(
    studies: Sequence[Study],
    out: Path,
    running: StudyRunning,
    stop: Stop,
    page: Path | None,
    said: Callable[[Runs, Sequence[Path]], list[str]],
    *elsewhere: Ray,
) -> None:
    """Train what is missing, report what is there, and say how it ended, to people and to scripts.

    page: of the docs, with parts that are made from the runs. said: lines for a person, of the runs and of the files of
    their report.
    Exit code 130 where somebody pressed Ctrl-C; a time limit is no error.
    """
    shown = progress.choose(running.quiet)
    if (out / records.PACKED).is_file():  # runs that were packed are gone on with as files
        records.unpack(out)
    with stop.on_interrupt():
        complete = all(one.run(stop, shown, *elsewhere) for one in studies)
    files, lines, written, notes = list(out.glob("runs/*/*/*.json*")), list[str](), list[Path](), list[str]()
    if running.report and files:
        written, notes = write(runs := read(out), page)
        lines = said(runs, written)
    if complete:
        shown.say(f"every run is in {out}")
    elif not stop.interrupted:
        lines.append(UNFINISHED)
    count = sum(len(records.runs_of(path)) for path in files) if running.as_json else 0
    _say_outcome(lines, written, notes, running.as_json, out=str(out), complete=complete, runs=count)
    if stop.interrupted:
        typer.echo("espalier: stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130)


# ---- data sets -------------------------------------------------------------------------------------------------------


@data.command("list")
def list_sets(data_dir: Path | None = FOLDER) -> None:
    """List the sets, and whether they are on this machine.

    Example: espalier data list --data-dir data
    """
    for status in available(data_dir):
        typer.echo(f"{status.name:<14} {status.state:<11} {status.title}\n{'':<26} {status.detail}")


@data.command("get")
def get_set(
    name: str = typer.Argument(help="A set by name: see espalier data list."), data_dir: Path | None = FOLDER
) -> None:
    """Download a set, if it is not here yet, and check it.

    Example: espalier data get mnist --data-dir data
    """
    status = get(name, data_dir)
    typer.echo(f"{status.name}: {status.state}; {status.detail}")


@data.command("verify")
def verify_sets(
    which: list[str] = typer.Argument(None, help="Sets; default: every one that is here."),
    data_dir: Path | None = FOLDER,
) -> None:
    """Check every byte of sets that are here. Exit code 2 if one is corrupt, or was named and is not usable.

    Example: espalier data verify mnist cifar10 --data-dir data
    """
    bad = False
    for name in which or names():
        status = verify(name, data_dir)
        typer.echo(f"{status.name}: {status.state}; {status.detail}")
        bad |= status.state == "corrupt" or (bool(which) and not status.usable)
    if bad:
        raise typer.Exit(2)


for command in (demo, train, sweep, compact, report, study):
    register(app, command)
register(paper, unit_selection, "unit-selection")
register(paper, connection_selection, "connection-selection")
app.add_typer(paper, name="paper")
app.add_typer(data, name="data")
