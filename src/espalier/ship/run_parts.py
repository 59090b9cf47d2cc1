"""What ships of a run directory, and how `espalier train` was called; see :mod:`espalier.train.run_directory`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from espalier import files, schema
from espalier.records import AGAIN, RESULT, SETTINGS, result_of
from espalier.schema import anything, each, either, integer, maybe, number, record, table, text
from espalier.ship.factories import Network
from espalier.space import BadInput, Corrupt, EspalierError
from espalier.train.callbacks import Callback
from espalier.train.checkpoint import join_state, unpack, write
from espalier.train.loop import Loop
from espalier.train.run_directory import CALL, PROBE

FORMAT = 1
FREE = ("data_dir", "device")  # may change between the calls of one run
USUAL: dict[str, Any] = {  # sizes and errors of what ships, as far as nothing else is said of them
    "inputs": "as they were in training",
    "judged_on": "the validation data",
    **dict.fromkeys(f"{part}_{key}" for part in ("validation", "test") for key in ("loss", "error", "examples")),
}
_SIZE = integer(0, 1 << 31)
_MODEL = record(
    {"reference": text(), "arguments": table(anything)},
    {"shape": maybe(each(_SIZE, 0, 8)), "outputs": maybe(_SIZE), "file_sha256": maybe(text("[0-9a-f]{64}"))},
)
_ASKED = record({"data": text(), "cost": text(), "target": maybe(either(text(), number())), "penalty": maybe(number())})
_CALL = record({"command": text(), "model": _MODEL, "settings": _ASKED})


def numbers_of(folder: Path) -> dict[str, Any]:
    """Sizes and errors of what ships."""
    try:
        numbers = result_of(folder)
    except OSError as error:
        raise Corrupt(f"{folder / RESULT} cannot be read: {error.strerror}. {AGAIN}") from None
    if "sizes" not in numbers:
        raise Corrupt(f"{folder / RESULT} has no sizes, so it is not what a training wrote. {AGAIN}")
    return USUAL | numbers


def probe(folder: Path) -> tuple[Any, list[Tensor]]:
    """Some real inputs, as the network reads them, and the tensors that it gave for them."""
    try:
        header, tensors = unpack(schema.content(folder / PROBE, most=1 << 34))
        state = join_state(header["state"], tensors)
        return state["inputs"], state["outputs"]
    except OSError as error:
        raise BadInput(f"{folder / PROBE} cannot be read: {error.strerror}") from None
    except (Corrupt, KeyError, TypeError) as error:
        raise Corrupt(f"{folder / PROBE}: {error}. {AGAIN}") from None


class Called(Callback):
    """Says in the run directory how it is called, once it is this process that trains there."""

    once = True

    def __init__(self, out: Path, settings: Mapping[str, Any], network: Network, command: str) -> None:
        self.path = out / CALL
        self.call = {"format": FORMAT, "command": command, "model": network.to_json(), "settings": dict(settings)}

    def on_begin(self, loop: Loop) -> None:
        if not loop.update or _call(self.path.parent) is None:
            write(self.path, (json.dumps(self.call, indent=2) + "\n").encode())


def check_call(out: Path, settings: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Refuse a run directory that was called otherwise, and one of somebody else.

    flags: the names of the settings on the command line.
    A run has begun with its first checkpoint: a call that ended before that leaves nothing to keep to.
    """
    begun = any(out.glob("checkpoint-*.safetensors"))
    if not (out / CALL).exists() and (out / SETTINGS).exists():
        raise BadInput(
            f"{out} holds a run that `espalier train` did not begin (there is no {CALL}); name another folder"
        )
    call = _call(out)
    if call is None and not begun and (out / CALL).exists():
        raise BadInput(
            f"{out / CALL} was not written by `espalier train`, or is damaged; remove it, or name another folder"
        )
    theirs = settings if call is None else call["settings"]  # the checkpoint tells, too; this says it by flags
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


def _call(out: Path) -> dict[str, Any] | None:
    """How the run was called; None where that is missing or damaged, which is no reason to stop a run that is whole."""
    try:
        return call_of(out)
    except EspalierError:
        return None


def origin(out: Path) -> dict[str, str]:
    """The command that began the run, and the name of its data, for its settings, where reports look for them."""
    call = call_of(out)
    return {"command": call["command"], "dataset": Path(call["settings"]["data"]).name}


def call_of(folder: Path) -> dict[str, Any]:
    """How the run in a folder was called."""
    try:
        files.check(folder, CALL, AGAIN)
        return schema.read(folder / CALL, _CALL, newest=FORMAT, way_out=AGAIN)  # type: ignore[no-any-return]
    except OSError as error:
        raise BadInput(f"{folder / CALL} cannot be read: {error.strerror}") from None
