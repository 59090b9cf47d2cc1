"""A setting, defined once: a field of a frozen dataclass with its default, meaning and bounds, and how text is read.

The command line makes flags, keys of TOML files and help from the definition, :func:`check` its checks, and a study the
settings that its run files hold.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch

from espalier.space import BadInput

DEFINITION = "setting"  # the key of a field's metadata


@dataclass(frozen=True)
class Setting:
    """What a field says of itself.

    help: one sentence. flag: its name on the command line, without dashes; default: the field's. old: the name that the
    flag had, accepted for one release. metavar: what stands for the value in the help.
    least: the smallest value. choices: the words it may be; a mapping may grow later.
    read: how one word gives a value; default: by the field's type. A tuple is words with commas between, or, repeated,
    a flag that may come several times. on_cuda: what it is on a GPU where it is not given.
    after: the field that it follows in the help and in records; default: the one above it in its class.
    recorded: "always" in the record of a run, or in that of a "search"; default: it says which runs there are.
    """

    name: str
    kind: Any
    default: Any
    help: str
    flag: str = ""
    old: str = ""
    metavar: str | None = None
    least: int | None = None
    choices: Collection[str] | None = None
    read: Callable[[str], Any] | None = None
    repeated: bool = False
    on_cuda: str = ""
    after: str = ""
    recorded: str = ""

    @property
    def type(self) -> Any:
        """Without the None of an optional one."""
        if isinstance(self.kind, types.UnionType):
            return next(part for part in typing.get_args(self.kind) if part is not types.NoneType)
        return self.kind

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def several(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def flag_type(self) -> Any:
        """The type of the flag: text where the value has to be read."""
        if self.repeated:
            return list[str]
        return str if self.several or self.read or self.on_cuda else self.kind

    @property
    def flag_default(self) -> Any:
        """What the flag is when it is not given."""
        if self.several:
            return [] if self.repeated else ",".join(map(text, self.default or ()))
        if self.read:
            return "" if self.default is None else text(self.default)
        return "" if self.on_cuda else self.default

    def parse(self, given: Any, cuda: bool = False) -> Any:
        """The value that a flag gives; cuda: on a GPU. Empty text where a value has to be read: the default."""
        if self.repeated:
            return tuple(given or ())
        if self.several:
            read = self.read or WORD[typing.get_args(self.type)[0]]
            values = tuple(read(word) for word in words(given))
            return values or (None if self.kind is not self.type else values)
        if self.on_cuda and not given:
            return self.on_cuda if cuda else self.default
        return (self.read(given) if given else self.default) if self.read else given

    def check(self, value: Any, name: str) -> None:
        """Refuse what is below the least value or none of the choices; name: what the error calls the setting."""
        if value == self.default or value is None:
            return
        for one in value if self.several else (value,):
            if self.choices is not None and self.several and one not in self.choices:
                known = f"{name} are {', '.join(self.choices)}{near(one, self.choices)}"
                raise BadInput(f"unknown {self.name.removesuffix('s')} {one!r}; {known}")
            if self.choices is not None:
                one_of(name, one, self.choices)
            if self.least is None:
                continue
            if isinstance(one, float) and not (math.isfinite(one) and one >= self.least):
                raise BadInput(f"{name} is a finite number from {self.least} up, not {one!r}")
            if one < self.least:
                raise BadInput(f"{name} is at least {self.least}, not {one}")
            if isinstance(one, int) and one >= 1 << 63:
                raise BadInput(f"{name} is {one}, more than torch counts to; use a smaller number")


def setting(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field with its definition; more: of :class:`Setting`. Without a default it has to be given. A class below has
    the same field with another default, and with what else it says of it.

    >>> @dataclass(frozen=True)
    ... class Growth:
    ...     penalties: tuple[float, ...] = setting((2**-6, 0.0), "How strongly cost counts.")
    ...     epochs: int = setting(20, "Passes over the data.", least=1)
    >>> [(one.name, one.flag_default) for one in declared(Growth)]
    [('penalties', '2^-6,0'), ('epochs', 20)]
    >>> @dataclass(frozen=True)
    ... class Slow(Growth):
    ...     epochs: int = 500
    >>> check(Slow(epochs=0))
    Traceback (most recent call last):
    espalier.space.BadInput: epochs is at least 1, not 0
    """
    return field(default=default, metadata={DEFINITION: ({"help": help} if help else {}) | more})


def declared(of: type[Any]) -> list[Setting]:
    """The settings of a dataclass in the order of the help; fields without a definition are none."""
    kinds, defaults = typing.get_type_hints(of), {one.name: one.default for one in fields(of)}
    definitions, order = dict[str, dict[str, Any]](), list[str]()
    for base in (base for base in reversed(of.__mro__) if is_dataclass(base)):
        own, above = {one.name: one.metadata for one in fields(base)}, order[-1] if order else None
        for name in inspect.get_annotations(base):
            if name not in definitions:
                if DEFINITION not in own.get(name, ()):
                    continue
                definitions[name] = {"flag": name.replace("_", "-"), "help": ""}
                after = own[name][DEFINITION].get("after", above)
                order.insert(order.index(after) + 1 if after else 0, name)
            definitions[name] |= own[name].get(DEFINITION, {})
            above = name
    return [Setting(name, kinds[name], defaults[name], **definitions[name]) for name in order]


def check(settings: Any) -> None:
    """The bounds and choices of every setting; the error names the field."""
    for one in declared(type(settings)):
        one.check(getattr(settings, one.name), one.name)


def one_of(name: str, given: str, allowed: Collection[str], more: str = "") -> None:
    """Refuse a word that is none of these, with the nearest one; more: what else it may be, in words."""
    if given not in allowed:
        words = f"one of {', '.join(allowed)}{', ' + more if more else ''}"
        words = " or ".join(map(repr, allowed)) if len(allowed) == 2 and not more else words
        raise BadInput(f"{name} is {words}, not {given!r}{near(given, allowed)}")


def near(given: str, allowed: Collection[str]) -> str:
    """A question by which an error ends, where some word is near the one given; else ""."""
    words = difflib.get_close_matches(given, allowed, 1)
    return f"; did you mean {words[0]!r}?" if words else ""


def usual_device(device: str) -> str:
    """The device that is named, or CUDA where there is one."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def words(line: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in line.split(",") if word.strip())


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


def text(value: Any) -> str:
    """A value as :func:`number` reads it, powers of two as the paper writes them where that is shorter.

    >>> [text(value) for value in (2**-9, -(2**-3), 0.25, 0.0, 1.0, "search")]
    ['2^-9', '-2^-3', '0.25', '0', '1', 'search']
    """
    if not isinstance(value, float):
        return str(value)
    plain = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    mantissa, exponent = math.frexp(abs(value))
    power = f"{'-' if value < 0 else ''}2^{exponent - 1}"
    return power if mantissa == 0.5 and len(power) < len(plain) else plain


def share(word: str, name: str) -> float:
    """A share as a number or in per cent. name: what the error calls it.

    >>> share("0.25", "--target"), share("25%", "--target")
    (0.25, 0.25)
    """
    try:
        return number(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except BadInput:
        raise BadInput(f"{name} is a share of the full cost, such as 0.25 or 25%, not {word!r}") from None


def whole(word: str, what: str = "of units") -> int:
    if not word.isdigit():
        raise BadInput(f"{word!r} is not a number {what}")
    return int(word)


WORD: dict[Any, Callable[[str], Any]] = {float: number, int: whole, str: str}  # how one word of a tuple is read
