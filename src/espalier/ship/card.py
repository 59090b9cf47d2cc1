"""The card of a small network: what it is, what it costs, how good it is, how it came about and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNSET = ("null", '""', "[]", "false")
GATES = ("space", "blocks")  # of a run of ``fit``: every gate that there was, in its settings.json
FORMER = {"preset": "recipe", "lr": "learning_rate"}  # as run directories name settings: as the flags do
Speed = Mapping[int, Mapping[str, float]]  # by the examples at once: milliseconds of each network
NAMES = {"units": "gates", "weights": "weights", "macs": "MACs per example", "parameters": "parameters"}


@dataclass(frozen=True)
class Loading:
    """How the uncut network is built: Python that imports the factory, and that calls it; where: a module or file of
    the user's that must be there for it, or ""."""

    imported: str
    called: str
    where: str = ""


@dataclass(frozen=True)
class Card:
    """asked: target, penalty, cost and data of the run. numbers: sizes and errors of what ships. origin: how it was
    made."""

    asked: Mapping[str, Any]
    numbers: dict[str, Any]
    loading: Loading
    origin: str = ""

    def text(self, title: str, checks: Mapping[str, Any], speed: Speed, hardware: Mapping[str, Any]) -> str:
        """As Markdown. checks: what was compared. speed: of the full and the small network, on ``hardware``."""
        numbers = self.numbers
        parts = [f"# {title}", _about(self.asked, numbers["finished"]), _sizes(numbers), _errors(numbers)]
        parts += [_speed(speed, hardware), _latency(numbers), _loading(self.loading, checks, numbers)]
        return "\n\n".join(part for part in (*parts, _checks(checks), self.origin) if part) + "\n"


def _about(asked: Mapping[str, Any], finished: bool) -> str:
    size, target = "no target", asked["target"]
    cost = "MACs" if asked["cost"] == "macs" else asked["cost"]
    if target is not None:
        size = f"a target of {target}" if isinstance(target, str) else f"a target of {target:.2%} of the {cost}"
    if asked["penalty"] is not None:
        size = f"a penalty of {asked['penalty']:g} on the {cost}"
    on = f", on `{asked['data']}`" if asked["data"] else ""
    text = f"A plain torch network, trained and cut to size in one training loop by Espalier, with {size}{on}."
    if not finished:
        text += " **The run was not finished**: this is what would have shipped when its time limit stopped it."
    return text


def _sizes(numbers: Mapping[str, Any]) -> str:
    lines = ["| | this network | uncut | share |", "|---|---|---|---|"]
    for kind, (small, full) in numbers["sizes"].items():
        share = f"{small / full:.2%}" if full else "-"
        lines.append(f"| {NAMES[kind]} | {small:,} | {full:,} | {share} |")
    return "## Size\n\n" + "\n".join(lines)


def _errors(numbers: Mapping[str, Any]) -> str:
    lines = []
    for name, where in (("validation", numbers["judged_on"]), ("test", "the test part, by which nothing was chosen")):
        loss, error = numbers[f"{name}_loss"], numbers[f"{name}_error"]
        if loss is not None:
            wrong = "" if error is None else f"error {error:.2%}, "
            count = numbers.get(f"{name}_examples")
            counted = "" if count is None or "examples" in where else f", {count} examples"
            lines.append(f"- {name}: {wrong}loss {loss:.4g}{counted} ({where})")
    return "## How good it is\n\n" + ("\n".join(lines) or "Nothing was held out, so that is not known.")


def _speed(speed: Speed, hardware: Mapping[str, Any]) -> str:
    if not speed:
        return ""
    lines = ["| examples at once | this network | uncut | times as fast |", "|---|---|---|---|"]
    for batch, times in speed.items():
        small, full = times["small"], times["full"]
        lines.append(f"| {batch} | {small:.3f} ms | {full:.3f} ms | {full / small:.2f} |")
    where = f"torch on {hardware['cpu']}, {hardware['threads']} of {hardware['cores']} threads; medians, in turns."
    return "## Speed\n\n" + "\n".join(lines) + f"\n\nMeasured when this card was written: {where}"


def _latency(numbers: Mapping[str, Any]) -> str:
    """Of a run against measured costs."""
    parts = list[str]()
    for told in numbers.get("latencies") or filter(None, [numbers.get("latency")]):
        missed = ""
        if told["compared"] > told["most"]:
            least = f" The smallest network takes {told['smallest']:.3g} ms." if "smallest" in told else ""
            missed = f" It misses the {told['most']:.3g} ms that were asked for.{least}"
        parts.append(
            f"The run was led by the latency in {told['runtime']} of {told['batch']} at once: {told['predicted']:.3g} "
            f"ms predicted, {told['measured']:.3g} ms measured at its end, {told['full']:.3g} ms uncut.{missed}"
        )
    return "\n\n".join(parts)


def _loading(loading: Loading, checks: Mapping[str, Any], numbers: Mapping[str, Any]) -> str:
    where = loading.where
    beside = f", where Python can import `{where}`" if where else ""
    if where.endswith(".py"):
        beside = f", with `{Path(where).name}` beside it or its folder in `PYTHONPATH`"
    text = (
        "## Loading it\n\n"
        f"In torch, from the folder that holds this card{beside}. Inputs are {numbers['inputs']}.\n\n"
        f"```python\nimport espalier\n{loading.imported}\n\n"
        f'small = espalier.load(".", lambda: {loading.called})  # the uncut network, cut again by plan.json\n'
        "small.eval()\n```"
    )
    if (python := checks.get("python")) is not None:
        shown = ", ".join(f"{name}: {kind} {shape}".replace("(0", "(batch") for name, kind, shape in python["inputs"])
        text += (
            "\n\nWithout Espalier and the uncut network, from the file `network.py` of plain torch layers:\n\n"
            f"```python\nfrom network import load\n\nsmall = load()  # {shown}\n```"
        )
    if "pt2" in checks:
        text += (
            "\n\nAs a program of torch.export, with a batch of any size:\n\n"
            '```python\nimport torch\n\nsmall = torch.export.load("model.pt2").module()\n```'
        )
    onnx = checks.get("onnx")
    if onnx is None:
        return text
    fed = ", ".join(f'"{name}": {_zeros(kind, shape)}' for name, kind, shape in onnx["inputs"])
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
    sentences = {
        "examples": "saved and loaded again, the outputs for {} real examples are equal bit for bit",
        "difference": "they differ from those at the end of training by {:.2g} of the largest output",
        "tensors": "saved and loaded again, its {} tensors are equal bit for bit",
    }
    lines = [f"- {text.format(checks[name])};" for name, text in sentences.items() if name in checks]
    for name, file in (("onnx", "`model.onnx` in onnxruntime"), ("pt2", "`model.pt2`"), ("python", "`network.py`")):
        if name in checks:
            sizes = ", ".join(map(str, checks[name]["batches"]))
            lines.append(
                f"- {file} differs from torch by at most {checks[name]['difference']:.2g} of the "
                f"largest output, on real and random batches of {sizes}."
            )
    return "## Checked\n\n" + "\n".join(lines) if lines else ""


def origin(command: str, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The command of a run, if one is known, what it was asked for, and what it ran on, by its settings.json."""
    told = {key: value for key, value in asked.items() if json.dumps(value) not in UNSET and key not in GATES}
    given = {FORMER.get(key, key): value for key, value in told.items()}
    shown = f"```console\n$ {command}\n```\n\n" if command else ""
    machine, versions = settings["hardware"], settings["versions"]
    device = machine.get("gpu") or machine.get("cpu", "unknown hardware")
    return (
        f"## How it was made\n\n{shown}"
        f"```json\n{json.dumps(given, indent=2)}\n```\n\n"
        f"On {device} ({machine.get('system', 'unknown system')}), with "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + "."
    )
