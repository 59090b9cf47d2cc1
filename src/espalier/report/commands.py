"""The commands that runs were made by, for a reader: without what changes no run, and the slices of one as one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

BESIDES = {"--commit": 1, "--time-limit": 1, "--page": 1, "--reproduction": 1}  # flags and how many words they take
BESIDES |= {"--quiet": 0, "--no-report": 0, "--report": 0, "--json": 0, "--keep-state": 0}
SLICES = ("--methods", "--targets", "--penalties", "--seeds", "--trials", "--first-seed")
FEW = 4  # calls that are still listed one by one


def made_by(commands: Iterable[str]) -> list[str]:
    """Lines that tell how runs were made: each distinct command, or the one that many of them are slices of.

    >>> made_by(["espalier study --quiet --seeds 2 --out x", "espalier study --seeds 2 --out x --commit abc"])
    ['espalier study --seeds 2 --out x']
    >>> made_by(f"espalier study --out x --first-seed {k} --seeds 2" for k in range(0, 10, 2))
    ['espalier study --out x   # in 5 calls, which share out --seeds, --first-seed; each run file has its own']
    """
    calls = dict.fromkeys(_without(command, BESIDES) for command in commands if command)
    whole: dict[str, list[str]] = {}
    for call in calls:
        whole.setdefault(_without(call, dict.fromkeys(SLICES, 1)), []).append(call)
    lines = list[str]()
    for base, slices in whole.items():
        if len(slices) <= FEW:
            lines += slices
            continue
        shared = ", ".join(flag for flag in SLICES if any(flag in call.split() for call in slices))
        lines.append(f"{base}   # in {len(slices)} calls, which share out {shared}; each run file has its own")
    return lines


def _without(command: str, flags: dict[str, int]) -> str:
    try:
        words, kept = shlex.split(command), list[str]()
    except ValueError:  # not one of ours
        return command
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in flags:
            del words[: 0 if equals else flags[name]]
        else:
            kept.append(word)
    return shlex.join(kept)
