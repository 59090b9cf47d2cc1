"""What ships of a run directory, and how `espalier train` was called; see :mod:`espalier.train.run_directory`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from espalier.compact import load as load_compact
from espalier.ship.factories import Network
from espalier.ship.parity import apart
from espalier.space import BadInput, Corrupt
from espalier.train import state_codec
from espalier.train.callbacks import Callback
from espalier.train.checkpoint import unpack, write
from espalier.train.loop import Loop
from espalier.train.run_directory import PROBE, RESULT, SMALL
from espalier.train.scoring import answers

FORMAT = 1
CALL, FORMER = "call.json", "shipped.json"  # the latter in folders of version 0.1, for result.json
FREE = ("data_dir", "device")  # may change between the calls of one run


@dataclass(frozen=True)
class Probe:
    """inputs: some real ones, as the network reads them. outputs: the tensors that it gave for them."""

    inputs: Any
    outputs: list[Tensor]

    def difference(self, model: nn.Module) -> float:
        """The largest difference of a model's outputs from these, relative to the largest of them."""
        return apart(answers(model, self.inputs), self.outputs)


def numbers_of(folder: Path) -> dict[str, Any]:
    """Sizes and errors of what ships."""
    path = folder / (FORMER if (folder / FORMER).exists() else RESULT)
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read: {error}. Run the same training command again") from None
    if not isinstance(numbers, dict) or not {"finished", "sizes"} <= numbers.keys():
        raise Corrupt(f"{path} is not what a training wrote. Run the same training command again")
    usual: dict[str, Any] = {"inputs": "as they were in training", "judged_on": "the validation data"}
    usual |= dict.fromkeys(f"{part}_{key}" for part in ("validation", "test") for key in ("loss", "error", "examples"))
    return usual | numbers


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


class Called(Callback):
    """Says in the run directory how it is called, once it is this process that trains there."""

    def __init__(self, out: Path, settings: Mapping[str, Any], network: Network, command: str) -> None:
        self.path = out / CALL
        self.call = {"format": FORMAT, "command": command, "model": network.to_json(), "settings": dict(settings)}

    def on_begin(self, loop: Loop) -> None:
        if not loop.update:
            write(self.path, (json.dumps(self.call, indent=2) + "\n").encode())


def check_call(out: Path, settings: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Refuse a run directory that was called otherwise, and one of somebody else.

    flags: the names of the settings on the command line.
    A run has begun with its first checkpoint: a call that ended before that leaves nothing to keep to.
    """
    path = out / CALL
    begun = any(out.glob("checkpoint-*.safetensors"))
    if not path.exists() and (begun or (out / "settings.json").exists()):
        raise BadInput(
            f"{out} holds a run that `espalier train` did not begin (there is no {CALL}); name another folder"
        )
    theirs = call_of(out)["settings"] if path.exists() else {}
    if not begun:
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
