"""What the run directory of `espalier train` holds beside the run's own files: how it was called, and what ships.

``call.json``         the command, the network's factory, the settings
``small/``            the compact model, as espalier.save writes it
``shipped.json``      units, weights, MACs and parameters, kept and in full; errors, and on what
``probe.safetensors`` a few real inputs and the small network's outputs, by which every later copy of it is checked
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact import load as load_compact
from espalier.compact import save as save_compact
from espalier.ship.factories import Network
from espalier.ship.parity import answers, apart
from espalier.space import BadInput, Corrupt
from espalier.train import Result, Score, feed, pytree, state_codec
from espalier.train.checkpoint import pack, unpack, write
from espalier.train.metrics import clean
from espalier.train.optimizer import Gated

FORMAT = 1
CALL, SMALL, NUMBERS, PROBE = "call.json", "small", "shipped.json", "probe.safetensors"
FREE = ("data_dir", "device")  # may change between the calls of one run
COUNTED = ("units", "weights", "macs", "parameters")
PROBED = 64  # examples


@dataclass(frozen=True)
class Probe:
    """inputs: some real ones, as the network reads them. outputs: the tensors that it gave for them."""

    inputs: Any
    outputs: list[Tensor]

    def difference(self, model: nn.Module) -> float:
        """The largest difference of a model's outputs from these, relative to the largest of them."""
        return apart(answers(model, self.inputs), self.outputs)


def save(
    folder: Path, result: Result, gated: Gated, reading: feed.Feed, *, judged_on: str, prepared: str, test: Score | None
) -> dict[str, Any]:
    """Write what ships from a run beside the run's own files. Returns its numbers."""
    mask, ones = result.mask, torch.ones_like(result.mask)
    example = pytree.count(reading.example(), "the inputs")
    sizes = {}
    for kind in COUNTED:
        cost, per = gated.cost(kind), example if kind == "macs" else 1  # MACs are of the whole example batch
        sizes[kind] = [round(float(cost(mask)) / per), round(float(cost(ones)) / per)]
    inputs = pytree.each(lambda t: t[:PROBED].cpu(), next(iter(reading.once(PROBED)))[0])
    small = deepcopy(result.model).cpu()  # what ships runs anywhere
    outputs = answers(small, inputs)
    save_compact(small, folder / SMALL)
    structure, tensors = state_codec.split({"inputs": inputs, "outputs": outputs})
    write(folder / PROBE, pack({"format": 1, "state": structure}, tensors))
    numbers: dict[str, Any] = {"finished": result.finished, "sizes": sizes, "inputs": prepared, "judged_on": judged_on}
    for name, score in (("validation", result.validation), ("test", test)):
        values = {"loss": None, "error": None, "examples": None} if score is None else asdict(score)
        numbers |= clean({f"{name}_{key}": value for key, value in values.items()})
    write(folder / NUMBERS, (json.dumps(numbers, indent=2, allow_nan=False) + "\n").encode())
    return numbers


def numbers_of(folder: Path) -> dict[str, Any]:
    """Sizes and errors of what ships."""
    try:
        numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{folder / NUMBERS} cannot be read: {error}. Run the same training command again") from None
    if not isinstance(numbers, dict) or not {"finished", "sizes"} <= numbers.keys():
        raise Corrupt(f"{folder / NUMBERS} is not what a training wrote. Run the same training command again")
    return numbers


def probe(folder: Path) -> Probe:
    try:
        header, tensors = unpack((folder / PROBE).read_bytes())
    except OSError as error:
        raise BadInput(f"{folder / PROBE} cannot be read: {error.strerror}") from None
    except Corrupt as error:
        raise Corrupt(f"{folder / PROBE}: {error}") from None
    state = state_codec.join(header["state"], tensors)
    return Probe(state["inputs"], state["outputs"])


def small_network(folder: Path, factory: Callable[[], nn.Module]) -> nn.Module:
    """The small network of a run, in eval mode."""
    return load_compact(folder / SMALL, factory).eval()


def begin(out: Path, settings: Mapping[str, Any], network: Network, command: str, flags: Mapping[str, str]) -> None:
    """Say in the run directory how it is called; refuse one that was called otherwise, and one of somebody else.

    flags: the names of the settings on the command line.
    A run has begun with its first checkpoint: a call that ended before that leaves nothing to keep to.
    """
    path = out / CALL
    call = {"format": FORMAT, "command": command, "model": network.to_json(), "settings": dict(settings)}
    begun = any(out.glob("checkpoint-*.safetensors"))
    if not path.exists() and (begun or (out / "settings.json").exists()):
        raise BadInput(
            f"{out} holds a run that `espalier train` did not begin (there is no {CALL}); name another folder"
        )
    theirs = call_of(out)["settings"] if path.exists() else {}
    if not begun:
        write(path, (json.dumps(call, indent=2) + "\n").encode())
        return
    differ = [
        f"--{flags[name]} {json.dumps(theirs.get(name))} there, {json.dumps(value)} here"
        for name, value in settings.items()
        if name not in FREE and theirs.get(name) != value
    ]
    if differ:
        raise BadInput(
            f"{out} holds a run of other settings: {'; '.join(differ)}. Use the same to go on with it, or "
            "another folder"
        )


def name_origin(out: Path) -> None:
    """The command that began the run, and the name of its data, into its settings, where reports look for them."""
    path, call = out / "settings.json", call_of(out)
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"command": call["command"], "dataset": Path(call["settings"]["data"]).name}
    write(path, (json.dumps(settings, indent=2) + "\n").encode())


def call_of(folder: Path) -> dict[str, Any]:
    """How the run in a folder was called."""
    path = folder / CALL
    try:
        call = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if not isinstance(call, dict) or call.get("format") != FORMAT or not {"model", "settings"} <= call.keys():
        raise BadInput(f"{path} was not written by `espalier train`, or by another version of it; name another folder")
    return call
