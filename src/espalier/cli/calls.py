"""How a run was called, in its run directory: the command, the network's factory, the settings; and what may differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.cli.networks import Network
from espalier.space import BadInput
from espalier.train.checkpoint import write

FORMAT = 1
CALL = "call.json"
FREE = ("data_dir", "device")  # may change between the calls of one run


def begin(out: Path, settings: Mapping[str, Any], network: Network, command: str) -> None:
    """Say in the run directory how it is called; refuse one that was called otherwise, and one of somebody else.

    A run has begun with its first checkpoint: a call that ended before that leaves nothing to keep to.
    """
    path = out / CALL
    story = {"format": FORMAT, "command": command, "model": network.to_json(), "settings": dict(settings)}
    begun = any(out.glob("checkpoint-*.safetensors"))
    if not path.exists() and (begun or (out / "settings.json").exists()):
        raise BadInput(
            f"{out} holds a run that `espalier train` did not begin (there is no {CALL}); name another folder"
        )
    theirs = read(out)["settings"] if path.exists() else {}
    if not begun:
        write(path, (json.dumps(story, indent=2) + "\n").encode())
        return
    differ = [
        f"--{name.replace('_', '-')} {json.dumps(theirs.get(name))} there, {json.dumps(value)} here"
        for name, value in settings.items()
        if name not in FREE and theirs.get(name) != value
    ]
    if differ:
        raise BadInput(
            f"{out} holds a run of other settings: {'; '.join(differ)}. Use the same to go on with it, or "
            "another folder"
        )


def tell(out: Path) -> None:
    """The command that began the run, and the name of its data, into its settings, where reports look for them."""
    path, call = out / "settings.json", read(out)
    story = json.loads(path.read_text(encoding="utf-8"))
    story |= {"command": call["command"], "dataset": Path(call["settings"]["data"]).name}
    write(path, (json.dumps(story, indent=2) + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """How the run in a folder was called."""
    path = folder / CALL
    try:
        story = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if not isinstance(story, dict) or story.get("format") != FORMAT or not {"model", "settings"} <= story.keys():
        raise BadInput(f"{path} was not written by `espalier train`, or by another version of it; name another folder")
    return story
