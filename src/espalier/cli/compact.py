"""`espalier compact`: the small network of a run, ready to ship: saved, checked, with a card, and as ONNX."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer

import espalier
from espalier.cli import calls, card, references, shipped
from espalier.cli.calls import CALL
from espalier.cli.config import configurable
from espalier.cli.networks import Network
from espalier.cli.timing import milliseconds
from espalier.integrations.compare import answers, repeated
from espalier.space import BadInput, Corrupt
from espalier.train import nested
from espalier.train.checkpoint import write
from espalier.train.record import hardware

SAME = 1e-4  # of the largest output: what another machine's arithmetic may change
CARD, ONNX = "README.md", "model.onnx"


@configurable
def compact(
    run: Path = typer.Argument(help="The run directory of `espalier train`."),
    to: Path = typer.Option(..., help="The folder to write."),
    onnx: bool = typer.Option(False, "--onnx", help="Write model.onnx too, checked with onnxruntime."),
    model: str = typer.Option("", help="The factory of the uncut network, if it has moved since the run."),
    as_json: bool = typer.Option(False, "--json", help="What was written and checked as one JSON object."),
) -> None:
    """Write the small network of a run, with its plan and a card that says what it is and how to load it.

    Example: espalier compact runs/digits --to digits-small --onnx
    """
    found = ship(run, to, onnx=onnx, model=model)
    if as_json:
        story = {"to": str(to), "files": found.files, "sizes": found.sizes, "checks": found.checks}
        typer.echo(json.dumps(story | {"milliseconds": found.speed}))
        return
    _say(found, to)


@dataclass(frozen=True)
class Shipped:
    """files: their names. sizes: kept and full. checks: what was compared. speed: examples -> milliseconds of each."""

    files: list[str]
    sizes: dict[str, list[int]]
    checks: dict[str, Any]
    speed: dict[int, dict[str, float]]


def ship(run: Path, to: Path, *, onnx: bool, model: str = "") -> Shipped:
    """Write and check the small network of a run. model: its factory, instead of the one the run names."""
    call = _call(run)
    ships, network = shipped.story(run), Network.from_json(call["model"])
    if model:
        network = Network(model, network.arguments, network.shape, network.outputs)
    _free(to, run)
    probe = shipped.probe(run)
    small = _small(run, network, call)
    checks: dict[str, Any] = {"examples": nested.count(probe.inputs, "the inputs")}
    checks["difference"] = probe.difference(small)
    if not checks["difference"] <= SAME:
        raise BadInput(
            f"the network that {network.reference!r} builds now does not answer as the trained one did: outputs differ "
            f"by {checks['difference']:.2g} of the largest; give the factory the run was trained with, by --model"
        )
    espalier.save(small, to)
    again = espalier.load(to, network.build)
    if any(not torch.equal(a, b) for a, b in zip(answers(again, probe.inputs), answers(small, probe.inputs))):
        raise Corrupt(f"what was saved in {to} does not answer as the network of {run}; nothing of the run is lost")
    if onnx:
        from espalier.integrations.onnx import export

        checks["onnx"] = asdict(export(small, probe.inputs, to / ONNX))
    full = network.build().eval()
    counted = {1: repeated(probe.inputs, 1), checks["examples"]: probe.inputs}
    speed = {batch: milliseconds({"full": full, "small": small}, inputs) for batch, inputs in counted.items()}
    text = card.write(
        title=to.resolve().name,
        network=network,
        ships=ships,
        call=call,
        settings=_settings(run),
        checks=checks,
        speed=speed,
        here=hardware(torch.device("cpu")),
    )
    write(to / CARD, text.encode())
    return Shipped(["model.safetensors", "plan.json", CARD, *([ONNX] if onnx else [])], ships["sizes"], checks, speed)


def _say(found: Shipped, to: Path) -> None:
    checks, speed = found.checks, found.speed
    typer.echo(f"wrote {', '.join(found.files)} to {to}")
    typer.echo(f"checked: saved and loaded, {checks['examples']} real examples give the same outputs bit for bit")
    if "onnx" in checks:
        sizes = ", ".join(map(str, checks["onnx"]["batches"]))
        typer.echo(f"checked: onnxruntime differs by {checks['onnx']['difference']:.1g} at most, batches of {sizes}")
    for batch, times in speed.items():
        faster = times["full"] / times["small"]
        typer.echo(
            f"{batch} at once: {times['small']:.3f} ms, uncut {times['full']:.3f} ms: {faster:.2f} times as fast"
        )


def _call(run: Path) -> dict[str, Any]:
    """How the run was called; what is no finished run of `espalier train` is refused in a line that says what it is."""
    if not run.is_dir():
        raise BadInput(f"there is no folder {run}" if not run.exists() else f"{run} is a file, not a run directory")
    if not (run / CALL).exists():
        inside = sorted(path.parent.name for path in run.glob("*/settings.json"))
        callable_ones = [name for name in inside if (run / name / CALL).exists()]
        if callable_ones:
            raise BadInput(f"{run} holds {len(inside)} runs; name one of them, such as {run / callable_ones[0]}")
        if inside or (run / "settings.json").exists():
            raise BadInput(
                f"{run} keeps the numbers of its runs, not their networks: train the one you want with `espalier "
                "train`, or in Python use espalier.save(result.model, folder)"
            )
        raise BadInput(f"{run} is not a run directory: it has no {CALL}, as `espalier train --out` writes")
    call = calls.read(run)
    if not all((run / name).exists() for name in (shipped.STORY, shipped.SMALL, shipped.PROBE, "settings.json")):
        raise BadInput(
            f"the run in {run} did not get to its end; go on with it by the same command, as {call['command']} "
            f"(its --out being {run})"
        )
    return call


def _settings(run: Path) -> dict[str, Any]:
    try:
        story = json.loads((run / "settings.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise Corrupt(f"{run / 'settings.json'} is damaged: {error}") from None
    if not isinstance(story, dict) or not {"hardware", "versions"} <= story.keys():
        raise Corrupt(f"{run / 'settings.json'} was not written by a run")
    return story


def _small(run: Path, network: Network, call: dict[str, Any]) -> torch.nn.Module:
    before = call["model"].get("file_sha256")
    now = references.fingerprint(network.reference)
    if before and now and before != now:
        typer.echo(f"espalier: {network.reference.rpartition(':')[0]} has changed since the run", err=True)
    try:
        return shipped.load(run, network)
    except BadInput as error:
        if references.is_reference(network.reference):
            raise BadInput(
                f"{error}. The run names its network {network.reference!r}: call this from the folder where it was "
                "trained, or give --model"
            ) from None
        raise


def _free(to: Path, run: Path) -> None:
    """Only an empty folder, a new one, or what an earlier call wrote is written to."""
    if to.resolve() == run.resolve() or to.resolve() == (run / shipped.SMALL).resolve():
        raise BadInput(f"--to {to} is the run itself; name another folder")
    if to.exists() and not to.is_dir():
        raise BadInput(f"--to {to} is a file; name a folder")
    left = {path.name.removesuffix(".partial") for path in to.iterdir()} if to.is_dir() else set()
    cut_short = left <= {"model.safetensors", "plan.json", ONNX}  # a call that a full disk or a kill ended
    if left and not cut_short and not (to / "plan.json").exists():
        raise BadInput(f"--to {to} holds other files; name a new or empty folder")
