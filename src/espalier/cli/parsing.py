"""What the words of a command mean: numbers as the paper writes them, lists, options; settings of its flags."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch

from espalier.space import BadInput

T = TypeVar("T")


def settings(kind: type[T], flags: Mapping[str, Any], **parsed: Any) -> T:
    """Settings, a dataclass, whose fields are the flags of their names, those parsed in place of what was written.

    >>> from espalier.train import Recipe
    >>> settings(Recipe, {"initial": 0.5, "quiet": True, "ramp": "1/4"}, ramp=0.25).ramp
    0.25
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in flags.items() if name in names} | parsed)


def device_and_precision(device: str, precision: str) -> tuple[str, str]:
    """As they are given, or what is usual where there is a GPU, and where there is none."""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return place, precision or ("tf32" if place.startswith("cuda") else "float32")


def command_line(words: list[str]) -> str:
    """The command as run files have it: without the folders of the machine it ran on.

    >>> command_line(["paper", "unit-selection", "--out=/home/me/results/units", "--data-dir", "/data/sets"])
    'espalier paper unit-selection --out=units --data-dir sets'
    """
    return shlex.join(["espalier", *[re.sub(r"(?<![^=])/\S*/([^/]*)", r"\1", word) for word in words]])


def number(word: str) -> float:
    """A number as the paper writes it, or as a computer does.

    >>> number("2^-6"), number("-2^-3"), number("0.25")
    (0.015625, -0.125, 0.25)
    """
    try:
        if power := re.fullmatch(r"([+-]?)(\d+)\^([+-]?\d+)", word):
            sign, base, exponent = power.groups()
            return (-1.0 if sign == "-" else 1.0) * float(base) ** int(exponent)
        return float(word)
    except (ValueError, ArithmeticError):  # 0^-1 and 2^9999 too
        raise BadInput(f"{word!r} is not a number; write 0.015625 or 2^-6") from None


def share(word: str, flag: str) -> float:
    """A share as a number or in per cent.

    >>> share("0.25", "--target"), share("25%", "--target")
    (0.25, 0.25)
    """
    try:
        return number(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except BadInput:
        raise BadInput(f"{flag} is a share of the full cost, such as 0.25 or 25%, not {word!r}") from None


def options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise BadInput(f"--inductor is JSON such as '{{\"combo_kernels\": true}}', not {text!r}: {error}") from None
    if not isinstance(options, dict):
        raise BadInput(f"--inductor is a JSON object, not {text!r}")
    return options


def whole(word: str) -> int:
    if not word.isdigit():
        raise BadInput(f"{word!r} is not a number of units")
    return int(word)


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
