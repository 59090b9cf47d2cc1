"""Shipping: the small network of a result or a run, written, checked, timed, and described on a card."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.compact import load, save
from espalier.compact.apply import copied, tensor_state
from espalier.gates.latency import timed
from espalier.gates.verify import distance, isolated_random
from espalier.records import RESULT, settings_of
from espalier.ship import import_spec, onnx, program, run_parts, standalone
from espalier.ship.card import Card, Loading, origin
from espalier.ship.factories import Network
from espalier.ship.parity import Checked, examples, repeated
from espalier.space import BadInput, BadType, Corrupt
from espalier.train import Result, checks, pytree
from espalier.train.checkpoint import write
from espalier.train.run_directory import CALL, PROBE, SMALL, hardware
from espalier.train.scoring import answers

SAME = 1e-4  # of the largest output: what another machine's arithmetic may change
CARD, TORCH = "README.md", ["model.safetensors", "plan.json"]
FILES = {"onnx": ["model.onnx"], "pt2": ["model.pt2"], "python": ["network.py", "network.safetensors"]}
OURS = tuple(f"{name}." for name in chain(TORCH, *FILES.values()))  # and what is written beside them
UNKNOWN = Loading("# factory: what builds the uncut network", "factory()")
Factory = Callable[[], nn.Module]
Format = Callable[[nn.Module, Any, Path], tuple[list[str], dict[str, Any]]]


@dataclass(frozen=True)
class Shipped:
    """files: their names. sizes: kept and full. checks: what was compared. speed: examples -> milliseconds of each.
    notes: what a reader should know."""

    files: list[str]
    sizes: dict[str, list[int]]
    checks: dict[str, Any]
    speed: dict[int, dict[str, float]]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What was checked and measured, in lines for a person."""
        lines, checks = list[str](), self.checks
        if "examples" in checks:
            said = f"saved and loaded, {checks['examples']} real examples give the same outputs bit for bit"
            lines.append(f"checked: {said}")
        for name, what in (("onnx", "onnxruntime"), ("pt2", "model.pt2"), ("python", "network.py")):
            if name in checks:
                sizes = ", ".join(map(str, checks[name]["batches"]))
                lines.append(f"checked: {what} differs by {checks[name]['difference']:.1g} at most, batches of {sizes}")
        for batch, times in self.speed.items():
            small, full = times["small"], times["full"]
            lines.append(f"{batch} at once: {small:.3f} ms, uncut {full:.3f} ms: {full / small:.2f} times as fast")
        return "\n".join(lines)


@dataclass(frozen=True)
class Parcel:
    """What is to be shipped. factory: of the uncut network, if it is known. inputs: some real examples, if there are.
    checks: what is known before it is written."""

    small: nn.Module
    factory: Factory | None
    inputs: Any
    card: Card
    checks: dict[str, Any]
    notes: tuple[str, ...] = ()


def _as_torch(small: nn.Module, inputs: Any, folder: Path) -> tuple[list[str], dict[str, Any]]:
    save(small, folder)
    return list(TORCH), {}


def _free(name: str, written: Callable[[nn.Module, Any, Path], Checked]) -> Format:
    """A format that needs nothing of Espalier. written: from a network, real examples and the path of the first file;
    what was checked."""

    def write_it(small: nn.Module, inputs: Any, folder: Path) -> tuple[list[str], dict[str, Any]]:
        if inputs is None:
            raise BadInput(f"the format {name} needs some real examples, which the file is checked with: give inputs")
        return list(FILES[name]), {name: asdict(written(small, inputs, folder / FILES[name][0]))}

    return write_it


FORMATS: dict[str, Format] = {
    "torch": _as_torch,
    "onnx": _free("onnx", onnx.export),
    "pt2": _free("pt2", program.export),
    "python": _free("python", standalone.export),
}
"""By name what writes a network to a folder, given real examples or None. It returns the names of its files, and what
it checked. All but "torch" are read without Espalier. Your own can be added."""


@isolated_random()
def ship(
    result_or_run: Result | str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    model: Factory | str | None = None,
    formats: Sequence[str] = ("torch",),
    inputs: Any = None,
    trust: bool = False,
) -> Shipped:
    """Write the small network of a result or of a run to a folder, check it, time it, and describe it on a card.

    result_or_run: what ``fit`` returned, or one result of ``sweep``; or the run directory of one of them, or of
        `espalier train`.
    to: a new or empty folder, or one that an earlier call wrote, in these formats or some of them.
    model: the factory of the uncut network, also as text such as ``file.py:function``. Of a run directory it is needed,
        unless the run is of a network known by name: code is run because you name it, not because a file does. Of a
        result it is needed for times, and to check what is loaded again.
    trust: run the code that the run directory of `espalier train` names, and code that has changed since the run.
    formats: names in ``FORMATS``; "torch", which :func:`espalier.load` reads, is always among them. "onnx" writes
        model.onnx, "pt2" what torch.export.load reads, "python" a file of plain torch layers with its weights beside
        it; these three need nothing of Espalier.
    inputs: other real examples than those that the result has, as the network reads them, on which copies are compared
        and timed. A run directory has its own.
    """
    if not isinstance(to, (str, os.PathLike)):
        raise BadType(f"to is the path of a folder, not {to!r}")
    if not isinstance(formats, Sequence) or isinstance(formats, str):
        raise BadType(f"formats is a list of names, not {formats!r}")
    if isinstance(model, nn.Module):
        raise BadType(f"model is a factory of the uncut network: give its class, or lambda: {type(model).__name__}(..)")
    folder = Path(to)
    names = list(dict.fromkeys(("torch", *map(str, formats))))
    if unknown := [name for name in names if name not in FORMATS]:
        raise BadInput(f"there is no format {unknown[0]!r}; known are {', '.join(FORMATS)}")
    if isinstance(result_or_run, (str, os.PathLike)):
        run = Path(result_or_run)
        call = _call(run)
        _check_free(folder, run, names)
        parcel = _of_run(run, call, model, trust)
    elif isinstance(result_or_run, Result):
        _check_free(folder, None, names)
        parcel = _of_result(result_or_run, model, inputs)
    else:
        raise BadType(f"ship takes a result or a run directory, not a {type(result_or_run).__name__}")
    files, checks = list[str](), dict(parcel.checks)
    older = [CARD, *chain.from_iterable(FILES.get(name, []) for name in names)]
    for name in names:
        written, compared = FORMATS[name](parcel.small, parcel.inputs, folder)
        if name == "torch":  # the first: a format that fails leaves nothing that is of another network
            for file in older:
                (folder / file).unlink(missing_ok=True)
        files += written if name != "torch" else [*written, CARD]
        checks |= compared | (_loaded_again(parcel, folder) if name == "torch" else {})
    speed = _speed(parcel)
    text = parcel.card.text(folder.resolve().name, checks, speed, hardware(torch.device("cpu")))
    write(folder / CARD, text)
    return Shipped(files, parcel.card.numbers["sizes"], checks, speed, parcel.notes)


def _of_result(result: Result, model: Factory | str | None, inputs: Any) -> Parcel:
    factory, _, loading = (None, "", UNKNOWN) if model is None else _built_by(model)
    small, summary = copied(result.model).cpu().eval(), result.summary()
    if inputs is not None:
        checks.readable(small, inputs)
    inputs = result.examples if inputs is None else inputs
    numbers = run_parts.USUAL | summary
    asked = {"target": result.target, "cost": result.counted, "data": ""}
    asked["penalty"] = None if result.target is not None else summary["penalty"]
    return Parcel(small, factory, inputs, Card(asked, numbers, loading), {})


def _of_run(run: Path, call: dict[str, Any] | None, model: Factory | str | None, trust: bool) -> Parcel:
    """call: of `espalier train`; None of a run of ``fit`` or ``sweep``, which does not know what built its network."""
    numbers, settings, notes = run_parts.numbers_of(run), settings_of(run), list[str]()
    command, told = "", settings["settings"]
    asked = {"data": ""} | {key: told.get(key) for key in ("target", "penalty", "cost")}
    if call is not None:
        command, told = call["command"], call["settings"]
        asked = told
        factory, name, loading, notes = _of_call(run, call["model"], model, trust)
    elif model is not None:
        factory, name, loading = _built_by(model)
    else:
        raise BadInput(
            f"the run in {run} does not name what builds its network: give the uncut one, as ship(run, to, "
            "model=factory), or --model file.py:function"
        )
    inputs, outputs = run_parts.probe(run)
    try:
        small = load(run / SMALL, factory).eval()
    except Corrupt as error:
        raise Corrupt(f"{error}{_after(notes)}") from None
    difference = distance(outputs, answers(small, inputs))
    if not difference <= SAME:
        raise BadInput(
            f"the network that {name} builds now does not answer as the trained one did: outputs differ by "
            f"{difference:.2g} of the largest; give the factory the run was trained with, by --model{_after(notes)}"
        )
    checks = {"examples": examples(inputs), "difference": difference}
    card = Card(asked, numbers, loading, origin(command, told, settings))
    return Parcel(small, factory, inputs, card, checks, tuple(notes))


def _built_by(model: Factory | str) -> tuple[Factory, str, Loading]:
    """A factory, given or named in text; its name; and how a card says it, where it can be imported."""
    if isinstance(model, str):
        network = Network(model, {})
        return network.build, model, network.loading
    name, module = (getattr(model, key, "") for key in ("__qualname__", "__module__"))
    if name and "<" not in name and module != "__main__":
        return model, name, Loading(f"from {module} import {name.split('.')[0]}", f"{name}()", module)
    return model, name or "the factory", UNKNOWN


def _of_call(
    run: Path, recorded: dict[str, Any], model: Factory | str | None, trust: bool
) -> tuple[Factory, str, Loading, list[str]]:
    """The same of the network that `espalier train` recorded, or of what stands for it now; and notes on its code."""
    network = Network.from_json(recorded)
    if isinstance(model, str):
        network = replace(network, reference=model)
    name, loading = repr(network.reference), network.loading
    if callable(model) or not import_spec.is_reference(network.reference):
        return model if callable(model) else network.build, name, loading, []
    notes = _trusted(run, network.reference, recorded.get("file_sha256"), model is not None, trust)

    def build() -> nn.Module:
        try:
            return network.build()
        except BadInput as error:
            raise BadInput(
                f"{error}. The run names its network {name}: call this from the folder where it was trained, or give "
                f"--model{_after(notes)}"
            ) from None

    return build, name, loading, notes


def _trusted(run: Path, reference: str, before: str | None, named: bool, trust: bool) -> list[str]:
    """Notes on code that is about to be run; refused unless the user has named it and it is that of the run, or trusts
    it."""
    where = reference.rpartition(":")[0]
    if not named and not trust:
        raise BadInput(
            f"the run in {run} names code, {reference!r}; what a file names is not run: say it yourself, by --model "
            f"{reference}, or trust the file, by --trust"
        )
    now = import_spec.fingerprint(reference)
    if before is None or now is None:
        return [f"{where} could not be compared with the code of the run"] if now is not None else []
    if before != now and not trust:
        raise BadInput(
            f"{where} has changed since the run (SHA-256 {before[:16]}.. there, {now[:16]}.. here); give the code of "
            "the run by --model, or run this by --trust"
        )
    return [f"{where} has changed since the run"] if before != now else []


def _after(notes: Sequence[str]) -> str:
    return "".join(f"; {note}" for note in notes)


def _call(run: Path) -> dict[str, Any] | None:
    """How `espalier train` was called, None of another run; what is no finished run is refused in a line that says what
    it is."""
    if not run.is_dir():
        raise BadInput(f"there is no folder {run}" if not run.exists() else f"{run} is a file, not a run directory")
    if not (run / CALL).exists() and not (run / "settings.json").exists():
        inside = sorted(path.parent.name for path in run.glob("*/settings.json"))
        if inside:
            raise BadInput(f"{run} holds {len(inside)} runs; name one of them, such as {run / inside[0]}")
        raise BadInput(f"{run} is not a run directory: it has no settings.json, as every run writes")
    call = run_parts.call_of(run) if (run / CALL).exists() else None
    if not all((run / name).exists() for name in (SMALL, PROBE, "settings.json", RESULT)):
        how = "call" if call is None else f"command, as {call['command']} (its --out being {run})"
        raise BadInput(f"the run in {run} did not get to its end; go on with it by the same {how}")
    return call


def _check_free(to: Path, run: Path | None, names: Sequence[str]) -> None:
    """Only an empty folder, a new one, or what an earlier call wrote is written to. names: of the formats. Files of
    others would lie there beside another network's, on no card."""
    if run is not None and to.resolve() in (run.resolve(), (run / SMALL).resolve()):
        raise BadInput(f"{to} is the run itself; name another folder to write to")
    if to.exists() and not to.is_dir():
        raise BadInput(f"{to} is a file; name a folder to write to")
    left = [path.name for path in to.iterdir()] if to.is_dir() else []
    cut_short = all(f"{name}.".startswith(OURS) for name in left)  # a call that a full disk or a kill ended
    if left and not cut_short and not (to / "plan.json").exists():
        raise BadInput(f"{to} holds other files; name a new or empty folder to write to")
    for name in [name for name in FILES if name not in names]:
        if before := [file for file in FILES[name] if file in left]:
            raise BadInput(
                f"{to} holds {before[0]} from before; ask for the format {name} too, which makes it anew, or remove "
                "it, or name another folder"
            )


def _loaded_again(parcel: Parcel, folder: Path) -> dict[str, Any]:
    """What was saved is what was trained: outputs for real examples, or else every tensor, bit for bit."""
    if parcel.factory is None:
        return {}
    again, small = load(folder, parcel.factory), parcel.small
    if parcel.inputs is not None:
        pairs = list(zip(answers(again, parcel.inputs), answers(small, parcel.inputs), strict=True))
        compared = {"examples": examples(parcel.inputs)}
    else:
        pairs = list(zip(tensor_state(again).values(), tensor_state(small).values(), strict=True))
        compared = {"tensors": len(pairs)}
    if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
        raise Corrupt(f"what was saved in {folder} does not answer as the network it was saved from; nothing is lost")
    return compared


def _speed(parcel: Parcel) -> dict[int, dict[str, float]]:
    if parcel.factory is None or parcel.inputs is None:
        return {}
    models = {"full": parcel.factory().eval(), "small": parcel.small}
    counts = {1: repeated(parcel.inputs, 1), examples(parcel.inputs): parcel.inputs}
    return {count: milliseconds(models, inputs) for count, inputs in counts.items()}


@torch.no_grad()
def milliseconds(models: Mapping[str, nn.Module], inputs: Any) -> dict[str, float]:
    """The time of one forward pass of each, on the same inputs, in turns; for about half a second."""
    runs = [partial(pytree.call, model, inputs) for model in models.values()]
    return dict(zip(models, timed(runs, rounds=200, seconds=0.5), strict=True))
