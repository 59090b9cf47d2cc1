"""One run as the command line asks for it: its settings as data, their checks, and the call of `espalier.fit`."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.cli import losses, sources
from espalier.ship import import_spec, run_parts
from espalier.ship.factories import Network
from espalier.space import BadInput, EspalierError
from espalier.train import Recipe, Result, checks, evaluate, feed, nested, presets
from espalier.train.score import evaluating

COSTS = ("weights", "macs", "units", "parameters")
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
SCHEDULES = ("steps", "cosine", "constant")


@dataclass(frozen=True)
class Training:
    """What `espalier train` is told, by the names of its flags. Empty text and None: the default its help states."""

    model: str
    data: str
    model_arg: tuple[str, ...] = ()
    weights: str = ""
    data_dir: str = ""
    flatten: bool = False
    scale: float | None = None
    target: float | None = None
    penalty: float | None = None
    cost: str = "weights"
    loss: str = ""
    epochs: int = 20
    batch_size: int = 64
    samples: int = 2
    optimizer: str = ""
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    schedule: str = ""
    settle: float | None = None
    preset: str = "default"
    seed: int = 0
    validation: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if self.target is not None and self.penalty is not None:
            raise BadInput(
                f"--target {self.target:g} and --penalty {self.penalty:g} exclude each other: a target sets the penalty"
            )
        _one_of("--cost", self.cost, COSTS)
        _one_of("--preset", self.preset, tuple(presets.PRESETS))
        if self.optimizer:
            _one_of("--optimizer", self.optimizer, tuple(OPTIMIZERS))
        if self.schedule:
            _one_of("--schedule", self.schedule, SCHEDULES)
        if self.loss and not import_spec.is_reference(self.loss):
            _one_of("--loss", self.loss, tuple(losses.LOSSES), "or your own, as file.py:function")
        if self.momentum is not None and self.optimizer not in ("", "sgd"):
            raise BadInput(f"--momentum is of sgd; {self.optimizer} has none")
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise BadInput(f"--{name.replace('_', '-')} is a finite number from 0 up, not {value!r}")

    def recipe(self) -> Recipe:
        """The preset, with what was given of SGD's numbers."""
        given = {"learning_rate": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        numbers: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(presets.read(self.preset), **numbers)

    def descent(self) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None:
        """The optimiser of the weights where it is not the recipe's SGD."""
        if self.optimizer in ("", "sgd"):
            return None
        numbers = {"lr": 1e-3 if self.lr is None else self.lr}
        if self.weight_decay is not None:
            numbers["weight_decay"] = self.weight_decay
        return partial(OPTIMIZERS[self.optimizer], **numbers)

    def steps(self) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
        """The schedule of the learning rate, stepped after every epoch; None: the recipe's own."""
        rates = torch.optim.lr_scheduler
        if self.schedule == "cosine":
            return lambda inner: rates.CosineAnnealingLR(inner, self.epochs)
        if self.schedule == "constant":
            return lambda inner: rates.ConstantLR(inner, factor=1.0)
        if self.descent() is None:
            return None
        drops = self.recipe().drops
        if drops is None:
            return lambda inner: rates.LambdaLR(inner, lambda epoch: 1 - epoch / self.epochs)
        milestones = [math.ceil(share * self.epochs) for share in drops]
        return lambda inner: rates.MultiStepLR(inner, milestones, gamma=0.1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"model_arg": list(self.model_arg)}

    def place(self) -> torch.device:
        return checks.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def run(
    training: Training, out: Path, command: str, *, time_limit: float | None, quiet: bool
) -> tuple[Result, dict[str, Any]]:
    """Train to the end, or as far as time allows; the run directory then holds the small network too.

    Returns the result, and what ships from it: sizes and errors.
    """
    source = sources.read(
        training.data,
        data_dir=Path(training.data_dir) if training.data_dir else None,
        validation=training.validation,
        flatten=training.flatten,
        scale=training.scale,
    )
    arguments = import_spec.arguments(training.model_arg)
    network = Network(training.model, arguments, source.shape, source.outputs)
    device = training.place()
    model = network.build(training.seed)
    if training.weights:
        _load(model, Path(training.weights))
    model.to(device)
    reading = feed.read(source.train, training.batch_size, training.seed, nested.dtype(model))
    example = nested.each(lambda t: t.to(device), reading.example())
    checks.readable(model, example)
    with torch.no_grad(), evaluating(model):
        outputs = nested.call(model, example)
    loss = losses.chosen(training.loss, reading)
    if loss is F.cross_entropy and isinstance(outputs, Tensor) and outputs.ndim == 2:
        sources.checked(source, outputs.shape[1])
    losses.tried(loss, training.loss, outputs, reading, device)
    run_parts.begin(out, training.to_json(), network, command)
    gated = espalier.attach(model, example)
    if not quiet:
        count, groups = sum(p.numel() for p in model.parameters()), len(gated.space.slices)
        parts = f"{count:,} parameters, {gated.d} gates in {groups} groups"
        judged = f"{losses.named(loss)}, judged on {source.judged_on}"
        print(f"{training.model}: {parts}, on {device}; {judged}", file=sys.stderr)
    try:
        result = espalier.fit(
            gated,
            source.train,
            loss=loss,
            epochs=training.epochs,
            cost=training.cost,
            penalty=training.penalty,
            target=training.target,
            batch_size=training.batch_size,
            samples=training.samples,
            optimizer=training.descent(),
            scheduler=training.steps(),
            settle=training.settle,
            preset=training.recipe(),
            seed=training.seed,
            validation=source.validation,
            checkpoint=out,
            time_limit=time_limit,
            quiet=quiet,
        )
    except EspalierError:
        raise
    except Exception as error:  # the network, the loss and the data may be the user's own
        why = import_spec.blamed(error, (training.model, training.loss, training.data))
        if not why:
            raise
        raise BadInput(f"{why}. What was saved in {out} is intact") from error
    run_parts.name_origin(out)
    test = None if source.test is None else evaluate(result.model, source.test, loss=loss)
    return result, run_parts.save(
        out, result, gated, reading, judged_on=source.judged_on, prepared=source.prepared, test=test
    )


def _load(model: nn.Module, path: Path) -> None:
    """The weights of an already trained network, all of them."""
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise BadInput(
            f"--weights {path}: files of pickle are not loaded; write it anew with "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        )
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise BadInput(f"--weights: there is no file {path}") from None
    except (OSError, SafetensorError) as error:
        raise BadInput(f"--weights {path} cannot be read: {error}") from None
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise BadInput(f"--weights {path} does not fit the network: {lines[0] if lines else error}") from None


def _one_of(flag: str, given: str, allowed: Sequence[str], more: str = "") -> None:
    if given not in allowed:
        near = difflib.get_close_matches(given, allowed, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"{flag} is one of {', '.join(allowed)}{', ' + more if more else ''}, not {given!r}{hint}")
