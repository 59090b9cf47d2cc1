"""Runs described by settings: their network, data and loss by name or reference, then `espalier.fit` or a sweep.

`espalier train` is :func:`run` of a :class:`Training`, and keeps what ships; `espalier sweep` is :func:`run_many` of a
:class:`Sweeping`, every target or penalty with every seed as one batch, each with its own run directory.
"""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from espalier import files
from espalier.data import Dataset
from espalier.gates import attach
from espalier.records import COUNTED
from espalier.ship import import_spec, run_parts
from espalier.ship.factories import Network
from espalier.space import BadInput, EspalierError, RankLost, first_line
from espalier.study import sources
from espalier.study.settings import COSTS
from espalier.study.sources import Source
from espalier.train import Recipe, Result, checks, evaluate, feed, fit, pytree, recipes, sweep
from espalier.train.batched import Compute, Run
from espalier.train.batched.batch import Precision
from espalier.train.descent import NAMED, SGD, Adam, AdamW, Optimizer
from espalier.train.loop import Stop
from espalier.train.on_ray import Ray
from espalier.train.ranks import Ranks
from espalier.train.run_directory import RunDirectory
from espalier.train.setting import check, declared, number, one_of, setting, share, usual_device
from espalier.train.targets import kinds_of

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
LOG = "error.log"
UNFINISHED = "stopped by its time limit; the same command goes on"
PRECISIONS = ("float32", "tf32", "bf16")
METHODS = ("search", "found", "permuted", "penalty")  # of many runs
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "binary-cross-entropy": F.binary_cross_entropy_with_logits,
}


def size(word: str) -> float | str:
    """A share, or what :mod:`espalier.train.targets` reads: an amount, or several costs."""
    try:
        kinds_of(word)
    except BadInput as error:
        raise BadInput(f"--target {word!r}: {error}") from None
    return word if any(letter.isalpha() for letter in word.lower().replace("e", "")) else share(word, "--target")


@dataclass(frozen=True)
class Task:
    """A network, data, and how the one learns the other: what one run and many have in common. Empty text and None: the
    default that the help of the setting states."""

    model: str = setting(help="mlp, cnn, densenet; your own: package.module:function or file.py:function.")
    data: str = setting(
        "digits", "A set by name; a file.npz with x, y (or x_train, y_train, x_test, y_test); module:function."
    )
    model_arg: tuple[str, ...] = setting(
        (), "An argument of the network, as hidden=[64,64]; may be repeated.", metavar="NAME=VALUE", repeated=True
    )
    cost: str = setting(
        "weights", "What is counted: weights, macs, units, parameters; or latency.", choices=(*COSTS, "latency")
    )
    epochs: int = setting(20, "Passes over the training data.", least=1)
    batch_size: int = setting(64, "Examples of an update, read under each of its masks.", least=1)
    samples: int | None = setting(None, "Masks in an update; default: the recipe's, 1 or 2.", least=1)
    round_to: str = setting(
        "", "Widths in multiples of so many channels, such as 8; auto: what suits the device.", metavar="<number>|auto"
    )
    optimizer: str = setting(
        "", "Of the weights: sgd (Nesterov), adam or adamw; default: sgd for classes, else adamw.", choices=OPTIMIZERS
    )
    learning_rate: float | None = setting(
        None, "Of the weights; default: the recipe's, 0.001 for adam.", old="lr", least=0
    )
    momentum: float | None = setting(None, "Of sgd; default: the recipe's.", least=0)
    weight_decay: float | None = setting(None, "Default: the recipe's, or the optimizer's own.", least=0)
    schedule: str = setting(
        "", "Of that rate: steps, cosine, linear or constant; default: the recipe's.", choices=NAMED
    )
    settle: float | None = setting(None, "The share of the run, at its end, under a fixed structure.")
    recipe: str = setting(
        "default",
        "default, ranked, paper, or finetune for a network that is already trained.",
        old="preset",
        choices=recipes.PRESETS,
    )
    loss: str = setting("", "cross-entropy, mse, binary-cross-entropy, module:function; default: by the targets.")
    validation: str = setting(
        "", "What to judge by: test, none, or a share to hold out, as 0.1; default: test, else 0.1."
    )
    data_dir: str = setting("", "Where the sets known by name are.", metavar="<path>")
    flatten: bool = setting(False, "Give the network every input as a vector.")
    scale: float | None = setting(None, "What inputs of a file are multiplied by; uint8: 1/255 by default.")
    device: str = setting("", "cpu, cuda, cuda:1, mps; default: cuda where there is one.")
    precision: str = setting("", "float32, tf32 or bf16 products; default: torch's own.", choices=PRECISIONS)

    def __post_init__(self) -> None:
        check(self)
        if self.loss and not import_spec.is_reference(self.loss):
            one_of("--loss", self.loss, LOSSES, "or your own, as file.py:function")
        if self.momentum is not None and self.optimizer not in ("", "sgd"):
            raise BadInput(f"--momentum is of sgd; {self.optimizer} has none")
        if self.round_to not in ("", "auto") and not (self.round_to.isdigit() and int(self.round_to)):
            raise BadInput(f"--round-to is a number of channels, such as 8, or auto, not {self.round_to!r}")

    def numbers(self) -> Recipe:
        """The recipe of that name, with what was given of SGD's numbers."""
        given = {name: getattr(self, name) for name in ("momentum", "weight_decay")}
        given["weights_learning_rate"] = self.learning_rate
        return replace(recipes.read(self.recipe), **{name: value for name, value in given.items() if value is not None})

    def descent(self) -> Optimizer | None:
        """The optimiser of the weights by its settings; None where nobody chose."""
        if self.optimizer in ("", "sgd"):
            return self.numbers().sgd if self.optimizer else None
        given = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        return OPTIMIZERS[self.optimizer](**{name: value for name, value in given.items() if value is not None})

    def common(self) -> dict[str, Any]:
        """What ``fit`` and ``sweep`` are asked for by the same words."""
        names = ("epochs", "cost", "batch_size", "samples", "settle")
        own = {"optimizer": self.descent(), "schedule": self.schedule or None, "recipe": self.numbers()}
        return {name: getattr(self, name) for name in names} | own

    def place(self) -> torch.device:
        return checks.device(usual_device(self.device))

    def source(self) -> Source:
        """The data, read."""
        return sources.read(
            self.data,
            data_dir=Path(self.data_dir) if self.data_dir else None,
            validation=self.validation,
            flatten=self.flatten,
            scale=self.scale,
        )


@dataclass(frozen=True)
class Training(Task):
    """One run."""

    target: float | str | None = setting(
        None,
        "What to end at: a share of the full cost (0.25, 25%), an amount (250k parameters, 30 MMACs, 10 MB, 3 ms), or "
        "several costs, as macs=0.4,weights=0.5: the first is the target, the others are limits.",
        read=size,
        after="model_arg",
    )
    penalty: float | None = setting(
        None, "Instead of a target: how strongly cost counts, such as 0.1 or 2^-6.", read=number
    )
    weights: str = setting(
        "", "A .safetensors file to start from, with --recipe finetune.", metavar="<path>", after="loss"
    )
    seed: int = setting(0, "Of the weights, the masks and the order of the examples.", least=0, after="scale")
    channels_last: bool = setting(False, "Images and weights lie in memory channels last.", after="precision")
    compile: bool | None = setting(
        None, "Train the network as torch.compile makes it; default: long runs on cuda are recorded as they are."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.penalty is not None:
            raise BadInput(
                f"--target {self.target} and --penalty {self.penalty:g} exclude each other: a target sets the penalty"
            )

    def to_json(self) -> dict[str, Any]:
        """What a run directory records; what has another name now keeps the key that it had."""
        record = {one.old or one.name: getattr(self, one.name) for one in declared(Training)}
        return record | {"model_arg": list(self.model_arg)}


@dataclass(frozen=True)
class Sweeping(Task):
    """Every target, or every penalty, with every seed."""

    targets: tuple[float, ...] = setting(
        (),
        "Shares of the full cost to end at, as 0.1,0.3 or 10%,30%.",
        read=partial(share, name="a target"),
        after="model_arg",
    )
    penalties: tuple[float, ...] = setting((), "Instead of targets: how strongly cost counts, as 2^-6,0.", read=number)
    seeds: int = setting(1, "Runs of each setting.", least=1, after="scale")
    first_seed: int = setting(0, "The first seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.targets) == bool(self.penalties):
            raise BadInput("give either --targets, as 0.1,0.3, or --penalties, as 2^-6,0")

    def runs(self, method: str, penalties: Sequence[float], searched: Sequence[Result]) -> list[Run]:
        """The runs of a method. searched: what the search came to, for the structures it found."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        if method == "found":
            given = [(one.run.seed, one) for one in searched if one.run is not None]
            return [Run(seed, mask=one.mask, found=one.target) for seed, one in given]
        if method == "penalty" or not self.targets:
            return [Run(seed, penalty=penalty) for penalty in penalties for seed in seeds]
        control = method == "permuted"
        return [Run(seed, target=target, permuted=control) for target in self.targets for seed in seeds]


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a task comes to before anything is trained. example: a few inputs, on the device."""

    source: Source
    network: Network
    model: nn.Module
    example: Any
    loss: Callable[[Any, Any], Tensor]


def prepared(task: Task, seed: int, device: torch.device, weights: str = "") -> Prepared:
    """Data, network and loss; one that is no default is tried on what the network gives. weights: a file of them."""
    source = task.source()
    network = Network(task.model, import_spec.arguments(task.model_arg), source.shape, source.outputs)
    model = network.build(seed)
    if weights:
        _load(model, Path(weights))
    model.to(device)
    reading = feed.read(source.train, task.batch_size, seed, pytree.dtype(model))
    example = pytree.each(lambda t: t.to(device), reading.example())
    outputs = checks.readable(model, example)
    loss = _loss(task.loss, reading)
    if loss is not F.cross_entropy:  # which fit and sweep try, over all targets
        _try(loss, task.loss, outputs, reading, device)
    return Prepared(source, network, model, example, loss)


@contextmanager
def own_code(out: Path) -> Iterator[None]:
    """Where code of the user's own fails, the network, the loss, the data: one line with the place in it, and the
    traceback in the log of the run."""
    try:
        yield
    except RankLost:
        raise
    except EspalierError as error:
        cause = error.__cause__
        if cause is None or (isinstance(cause, (EspalierError, OSError)) and not import_spec.blamed(cause)):
            raise
        said = str(error)
        failed: Exception = error
    except Exception as error:
        why = import_spec.blamed(error)
        if not why:
            raise
        said, failed = f"code of your own failed: {why}. What was saved in {out} is intact", error
    else:
        return
    if not out.is_dir():
        raise BadInput(f"{said} (--traceback prints more)") from failed
    files.write(files.below(out, out / LOG), "".join(traceback.format_exception(failed)))
    raise BadInput(f"{said} (traceback: {out / LOG})") from failed


def run(
    training: Training,
    out: Path,
    command: str,
    *,
    time_limit: float | None,
    quiet: bool,
    force: bool = False,
    ranks: Ranks | None = None,
) -> tuple[Result, dict[str, Any]]:
    """Train to the end, or as far as time allows; the run directory then holds the small network too.

    force: go on with what is there although it is of other data, code or settings, which the run then records. ranks:
    that train it together, each of them by this call. Returns the result, and what ships from it: sizes and errors.
    """
    with nullcontext() if ranks is None else ranks.telling(), own_code(out):
        device = training.place()
        parts = prepared(training, training.seed, device, training.weights)
        source, model = parts.source, parts.model
        if not force:
            flags = {one.old or one.name: one.flag for one in declared(Training)}
            run_parts.check_call(out, training.to_json(), flags)
        gated = attach(model, parts.example, round_to=multiple(training.round_to))
        first = ranks is None or ranks.first
        if not quiet and first:
            count, groups = sum(p.numel() for p in model.parameters()), len(gated.space.slices)
            sizes = f"{count:,} parameters, {gated.d} gates in {groups} group{'s' * (groups != 1)}"
            judged = f"{_named(parts.loss)}, judged on {source.judged_on}"
            print(f"{training.model}: {sizes}, on {device}; {judged}", file=sys.stderr)
        result = fit(
            gated,
            source.train,
            loss=parts.loss,
            penalty=training.penalty,
            target=training.target,
            seed=training.seed,
            precision=cast(Precision, training.precision) if training.precision else None,
            channels_last=training.channels_last,
            compile=training.compile,
            validation=source.validation,
            checkpoint=out,
            resume="anyway" if force else "same",
            callbacks=[run_parts.Called(out, training.to_json(), parts.network, command)],
            time_limit=time_limit,
            parallel=ranks,
            quiet=quiet,
            **training.common(),
        )
        if not first:
            return result, {}
        test = None if source.test is None else evaluate(result.model, source.test, loss=parts.loss)
        scores = {f"test_{name}": getattr(test, name, None) for name in ("loss", "error", "examples")}
        about = {"inputs": source.prepared, "judged_on": source.judged_on}
        return result, RunDirectory(out).add(about | scores, run_parts.origin(out))


def in_words(result: Result, ships: dict[str, Any], training: Training, out: Path) -> str:
    """What came of a run, in lines for a person. ships: what :func:`run` says of it."""
    asked = "none" if result.target is None else f"{result.target:.2%} of the "
    if result.target is not None and isinstance(training.target, str):
        asked = f"{training.target}, {asked}full cost"
    elif result.target is not None:
        asked += COUNTED.get(training.cost, training.cost)
    lines = {
        "target": asked,
        "reached": f"{result.share_before:.2%} before the selection, {result.share_after:.2%} after it",
        "kept": ", ".join(f"{name} {small:,} of {full:,}" for name, (small, full) in ships["sizes"].items()),
    }
    for name, where in (("validation", ships["judged_on"]), ("test", "the test part, which nothing was chosen by")):
        loss, error = ships[f"{name}_loss"], ships[f"{name}_error"]
        if loss is not None:
            lines[name] = (f"loss {loss:.4f}" if error is None else f"error {error:.2%}") + f" on {where}"
    if not result.finished:
        lines["unfinished"] = UNFINISHED
    again = f" --model {shlex.quote(training.model)}" if ":" in training.model else ""  # code is named again
    lines["run"] = f"{out}; to ship it: espalier compact {shlex.quote(str(out))}{again} --to DIR --onnx"
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def run_many(
    sweeping: Sweeping,
    out: Path,
    *,
    methods: Sequence[str] = ("search",),
    penalties: Sequence[float] = (),
    recipes: dict[str, Recipe] | None = None,
    at_once: int | None = None,
    updates_at_once: int = 50,
    stop: Stop,
    executor: Ray | None = None,
    quiet: bool = False,
    force: bool = False,
) -> dict[str, list[Result]]:
    """Train each method as one sweep into ``out/METHOD/run-000`` and so on; the same call goes on with what is there.

    methods: "search"; "found", the structures of the search from scratch; "permuted", the control, a search that is
    told its signal in random order; "penalty", every one of ``penalties``. recipes: by method, where it is not that of
    the task. force: go on with what is there although it is of other data, code or settings, which the runs record.
    executor: where the batches are trained, if not here.
    Returns the results by method; those that follow one that was stopped by the time limit are not begun.
    """
    results = dict[str, list[Result]]()
    with own_code(out):
        parts = prepared(sweeping, sweeping.first_seed, torch.device("cpu"))
        source = parts.source
        if not isinstance(source.train, Dataset) and source.pair is None:
            raise BadInput(
                f"--data {sweeping.data}: many runs at once read one tensor of inputs and one of targets, which these "
                "data are not; train one run at a time by espalier train"
            )
        precision: dict[str, Any] = {"precision": sweeping.precision} if sweeping.precision else {}
        common = sweeping.common() | ({} if parts.loss is F.cross_entropy else {"loss": parts.loss})
        for method in methods:
            if stop.now():
                break
            runs = sweeping.runs(method, penalties or sweeping.penalties, results.get("search", []))
            results[method] = sweep(
                parts.network.build,  # from the random state as it is, which a sweep sets for each seed
                source.train,
                runs=runs,
                round_to=multiple(sweeping.round_to),
                validation=source.validation,
                compute=Compute(updates_at_once=updates_at_once, **precision),
                at_once=at_once,
                device=sweeping.place() if executor is None else sweeping.device or None,
                checkpoint=files.below(out, out / method),
                resume="anyway" if force else "same",
                time_limit=None if stop.end is None else max(stop.end - time.monotonic(), 1e-3),
                executor=executor,
                quiet=quiet,
                **common | ({"recipe": recipes[method]} if recipes else {}),
            )
            if not all(result.finished for result in results[method]):
                break
    return results


def multiple(word: str) -> int | str | None:
    """What --round-to says: a number, auto, or nothing."""
    return int(word) if word.isdigit() else word or None


def _load(model: nn.Module, path: Path) -> None:
    """The weights of an already trained network, all of them."""
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise BadInput(
            f"--weights {path}: files of pickle are not loaded; write it anew with "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        )
    try:
        weights = load_file(path)
    except FileNotFoundError:
        raise BadInput(f"--weights: there is no file {path}") from None
    except (OSError, SafetensorError) as error:
        raise BadInput(f"--weights {path} cannot be read: {error}") from None
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise BadInput(f"--weights {path} does not fit the network: {lines[0] if lines else error}") from None


def _loss(name: str, reading: feed.Feed) -> Callable[[Any, Any], Tensor]:
    """By name, the user's own, or what fits the targets: cross entropy for integers, the mean square for numbers."""
    if import_spec.is_reference(name):
        return import_spec.function(name, "--loss")
    if name:
        return LOSSES[name]
    targets = reading.first()[1]
    if not isinstance(targets, Tensor):
        raise BadInput("these targets are several tensors; say what is to be minimised, as --loss file.py:function")
    return F.mse_loss if targets.is_floating_point() else F.cross_entropy


def _named(loss: Callable[..., Any]) -> str:
    return next((name for name, given in LOSSES.items() if given is loss), getattr(loss, "__name__", "loss"))


def _try(loss: Callable[[Any, Any], Tensor], name: str, outputs: Any, reading: feed.Feed, device: Any) -> None:
    """The loss takes what the network gives, said before anything is trained."""
    targets = pytree.each(lambda t: t[:4].to(device), reading.first(4)[1])
    name = name or _named(loss)
    shapes = [", ".join(str(tuple(t.shape)) for t in pytree.tensors(part)) for part in (outputs, targets)]
    if loss in (F.mse_loss, F.binary_cross_entropy_with_logits) and shapes[0] != shapes[1]:
        way = "--loss cross-entropy is for classes"
        if shapes[0] == shapes[1].replace(",)", ", 1)"):
            way = "give the targets a last dimension of 1, y[:, None]"
        raise BadInput(
            f"--loss {name} compares outputs and targets of one shape; here they are {shapes[0]} and {shapes[1]}: {way}"
        )
    try:
        with torch.no_grad():
            loss(outputs, targets)
    except Exception as error:  # the user's own function may raise anything
        why = first_line(error)
        raise BadInput(f"--loss {name} does not take outputs {shapes[0]} and targets {shapes[1]}: {why}") from error
