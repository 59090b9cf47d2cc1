"""What the words of a command mean: numbers as the paper writes them, lists, options; and a command told again."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from espalier.space import BadInput


def told(words: list[str]) -> str:
    """The command as run files tell it: without the folders of the machine it ran on.

    >>> told(["paper", "unit-selection", "--out=/home/me/results/units", "--data-dir", "/data/sets"])
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
