"""One JSON file for each run of a study: what was asked for, what came out, and where, when and with what it ran."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.space import BadInput, Corrupt
from espalier.train.checkpoint import write

FORMAT = 1


def save(path: Path, story: Mapping[str, Any]) -> None:
    """Whole or not at all. What is not a finite number is written as null: JSON has no word for it."""
    text = json.dumps(_clean({"format": FORMAT} | dict(story)), allow_nan=False, separators=(",", ":"))
    write(path, (_broken(text) + "\n").encode())


def load(path: Path) -> dict[str, Any]:
    try:
        story = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} is not a run file: {error}. Remove it to run it again") from None
    if not isinstance(story, dict) or story.get("format") != FORMAT:
        raise Corrupt(f"{path} is not a run file of format {FORMAT}. Remove it, or use another folder")
    return story


def done(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether this run is finished, under these settings; a file of other settings is refused."""
    if not path.exists():
        return False
    refuse_others(path, "a run", load(path)["settings"], settings)
    return True


def refuse_others(path: Path, content: str, theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """A file of other settings, unless it is of these; the error names each that differs."""
    ours = json.loads(json.dumps(dict(settings)))  # as a file has them
    differ = [
        f"{key}: {theirs.get(key, 'not set')} there, {ours.get(key, 'not set')} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key, ...) != ours.get(key, ...)
    ]
    if differ:
        raise BadInput(
            f"{path} is of {content} with other settings: {'; '.join(differ)}. Use the same settings, or another folder"
        )


def mask_to_hex(mask: Tensor) -> str:
    """A mask ``(d)`` as hexadecimal digits, its first gate the highest bit.

    >>> mask_to_hex(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]))
    'a4'
    """
    bits = "".join("1" if bit else "0" for bit in mask.flatten().tolist())
    bits += "0" * (-len(bits) % 4)
    return "".join(f"{int(bits[i : i + 4], 2):x}" for i in range(0, len(bits), 4))


def mask_from_hex(text: str, d: int) -> Tensor:
    """The mask ``(d)`` that a run file tells in hexadecimal digits.

    >>> mask_from_hex("a4", 6).tolist()
    [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    """
    try:
        bits = "".join(f"{int(digit, 16):04b}" for digit in text)
    except ValueError:
        raise Corrupt(f"a mask is written in hexadecimal digits, not as {text[:20]!r}") from None
    if len(bits) != d + (-d % 4) or "1" in bits[d:]:
        raise Corrupt(f"a mask of {len(text)} hexadecimal digits is not one of {d} gates")
    return torch.tensor([float(bit) for bit in bits[:d]])


def commit() -> str:
    """The revision of the source that runs, marked if files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        told = [
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "."))
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told[0].strip() + ("-modified" if told[1].strip() else "")


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


def _broken(text: str) -> str:
    """A line for each part of the file and for each row of the curve, so that differences can be read."""
    for part in ('"run":', '"settings":', '"result":', '"curve":', '"seconds":', '"hardware":', '"versions":'):
        text = text.replace(part, "\n" + part, 1)
    return text.replace('{"update":', '\n{"update":')
