"""`espalier compact`: the small network of a run, ready to ship: saved, checked, with a card, and as ONNX."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from espalier.cli.config import configurable
from espalier.ship import Shipped, ship


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
    shipped = ship(run, to, model=model or None, formats=("torch", *(["onnx"] if onnx else [])))
    for note in shipped.notes:
        typer.echo(f"espalier: {note}", err=True)
    if as_json:
        told = {"to": str(to), "files": shipped.files, "sizes": shipped.sizes, "checks": shipped.checks}
        typer.echo(json.dumps(told | {"milliseconds": shipped.speed}))
    else:
        _say(shipped, to)


def _say(shipped: Shipped, to: Path) -> None:
    checks, speed = shipped.checks, shipped.speed
    typer.echo(f"wrote {', '.join(shipped.files)} to {to}")
    typer.echo(f"checked: saved and loaded, {checks['examples']} real examples give the same outputs bit for bit")
    if "onnx" in checks:
        sizes = ", ".join(map(str, checks["onnx"]["batches"]))
        typer.echo(f"checked: onnxruntime differs by {checks['onnx']['difference']:.1g} at most, batches of {sizes}")
    for batch, times in speed.items():
        faster = times["full"] / times["small"]
        typer.echo(
            f"{batch} at once: {times['small']:.3f} ms, uncut {times['full']:.3f} ms: {faster:.2f} times as fast"
        )
