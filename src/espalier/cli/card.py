"""The card of a small network: what it is, what it costs, how good it is, how it came about and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.cli.networks import Network

UNSET = ("null", '""', "[]", "false")
NAMES = {"units": "gates", "weights": "weights", "macs": "MACs per example", "parameters": "parameters"}


def write(
    *,
    title: str,
    network: Network,
    ships: Mapping[str, Any],
    call: Mapping[str, Any],
    settings: Mapping[str, Any],
    checks: Mapping[str, Any],
    speed: Mapping[int, Mapping[str, float]],
    here: Mapping[str, Any],
) -> str:
    """Markdown. ships: sizes and errors of the run. settings: the run's settings.json. checks: what was compared.
    speed: examples -> milliseconds of the full and the small network, measured ``here``."""
    parts = [f"# {title}", _about(ships, call), _sizes(ships), _errors(ships), _speed(speed, here)]
    parts += [_loading(network, checks, ships), _checks(checks), _how(call, settings)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(ships: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    asked = call["settings"]
    size = f"a target of {asked['target']:.2%} of the {asked['cost']}" if asked["target"] is not None else "no target"
    if asked["penalty"] is not None:
        size = f"a penalty of {asked['penalty']:g} on the {asked['cost']}"
    text = (
        f"A plain torch network, trained and cut to size in one training loop by Espalier, with {size}, on "
        f"`{asked['data']}`."
    )
    if not ships["finished"]:
        text += " **The run was not finished**: this is what would have shipped when its time limit stopped it."
    return text


def _sizes(ships: Mapping[str, Any]) -> str:
    lines = ["| | this network | uncut | share |", "|---|---|---|---|"]
    for kind, (small, full) in ships["sizes"].items():
        share = f"{small / full:.2%}" if full else "-"
        lines.append(f"| {NAMES[kind]} | {small:,} | {full:,} | {share} |")
    return "## Size\n\n" + "\n".join(lines)


def _errors(ships: Mapping[str, Any]) -> str:
    lines = []
    for name, where in (("validation", ships["judged_on"]), ("test", "the test part, by which nothing was chosen")):
        loss, error = ships[f"{name}_loss"], ships[f"{name}_error"]
        if loss is not None:
            wrong = "" if error is None else f"error {error:.2%}, "
            lines.append(f"- {name}: {wrong}loss {loss:.4g}, {ships[f'{name}_examples']} examples ({where})")
    return "## How good it is\n\n" + ("\n".join(lines) or "Nothing was held out, so that is not known.")


def _speed(speed: Mapping[int, Mapping[str, float]], here: Mapping[str, Any]) -> str:
    if not speed:
        return ""
    lines = ["| examples at once | this network | uncut | times as fast |", "|---|---|---|---|"]
    for batch, times in speed.items():
        small, full = times["small"], times["full"]
        lines.append(f"| {batch} | {small:.3f} ms | {full:.3f} ms | {full / small:.2f} |")
    where = f"torch on {here['cpu']}, {here['threads']} of {here['cores']} threads; medians, in turns."
    return "## Speed\n\n" + "\n".join(lines) + f"\n\nMeasured when this card was written: {where}"


def _loading(network: Network, checks: Mapping[str, Any], ships: Mapping[str, Any]) -> str:
    imported, called = network.code()
    where, _, _ = network.reference.rpartition(":")  # "" of a network known by name
    beside = f", where Python can import `{where}`" if where else ""
    if where.endswith(".py"):
        beside = f", with `{Path(where).name}` beside it or its folder in `PYTHONPATH`"
    text = (
        "## Loading it\n\n"
        f"In torch, from the folder that holds this card{beside}. Inputs are {ships['inputs']}.\n\n"
        f"```python\nimport espalier\n{imported}\n\n"
        f'small = espalier.load(".", lambda: {called})  # the uncut network, cut again by plan.json\nsmall.eval()\n```'
    )
    found = checks.get("onnx")
    if found is None:
        return text
    fed = ", ".join(f'"{name}": {_zeros(kind, shape)}' for name, kind, shape in found["inputs"])
    return text + (
        "\n\nIn onnxruntime, with a batch of any size:\n\n"
        "```python\nimport numpy\nimport onnxruntime\n\n"
        'session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])\n'
        f"outputs = session.run(None, {{{fed}}})\n```"
    )


def _zeros(kind: str, shape: list[Any]) -> str:
    types = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool", "uint8": "uint8"}
    inner = kind.removeprefix("tensor(").removesuffix(")")
    sizes = ", ".join("1" if isinstance(size, str) else str(size) for size in shape)
    return f"numpy.zeros(({sizes}{',' if len(shape) == 1 else ''}), numpy.{types.get(inner, inner)})"


def _checks(checks: Mapping[str, Any]) -> str:
    lines = [
        f"- saved and loaded again, the outputs for {checks['examples']} real examples are equal bit for bit;",
        f"- they differ from those at the end of training by {checks['difference']:.2g} of the largest output;",
    ]
    found = checks.get("onnx")
    if found is not None:
        sizes = ", ".join(map(str, found["batches"]))
        lines.append(
            f"- `model.onnx` in onnxruntime differs from torch by at most {found['difference']:.2g} of the largest "
            f"output, on real and random batches of {sizes}."
        )
    return "## Checked\n\n" + "\n".join(lines)


def _how(call: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    given = {key: value for key, value in call["settings"].items() if json.dumps(value) not in UNSET}
    machine, versions = settings["hardware"], settings["versions"]
    device = machine.get("gpu") or machine["cpu"]
    return (
        f"## How it was made\n\n```console\n$ {call['command']}\n```\n\n"
        f"```json\n{json.dumps(given, indent=2)}\n```\n\n"
        f"On {device} ({machine['system']}), with "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + "."
    )
