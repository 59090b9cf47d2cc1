"""Every JSON file of ours is read here: size, depth and numbers bounded, parts of the types that its format states.

A format is a description made of the functions below: ``record({"seed": integer(0), "tied": table(text())})``. What a
file holds beyond it is bounded and left alone, so that a newer version may add to it. Damage is :class:`Corrupt` with
the file's name and the way out.

A file may carry its own checksum (:func:`sealed`): a single bit that differs is damage then.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.space import Corrupt

BYTES = 1 << 28  # of a file
DEPTH = 40  # of lists in lists
LARGEST = 1 << 63
TEXT = 1 << 20  # characters
CHECKSUM, BLANK = "espalier_sha256", "0" * 64  # the blank stands where the checksum will be, so that it covers all else
_SEAL = re.compile(rb'"espalier_sha256": ?"([0-9a-f]{64})"')

Spec = Callable[[Any, str], None]  # given a value and its place; raises Mismatch


class Mismatch(ValueError):
    """A value is not what the format states; its place, and what it should be."""


# ---- descriptions ----------------------------------------------------------------------------------------------------


def anything(value: Any, where: str, depth: int = 0) -> None:
    if depth > DEPTH:
        raise Mismatch(f"{where} is nested deeper than {DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            anything(item, f"{where}.{key}" if depth < 3 else where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            anything(item, where, depth + 1)


def kind(fits: Callable[[Any], bool], words: str) -> Spec:
    """Of a single value: whether it fits, and what it should be."""

    def check(value: Any, where: str) -> None:
        if not fits(value):
            raise Mismatch(f"{where} is {words}, not {_shown(value)}")

    return check


def integer(low: int = -LARGEST, high: int = LARGEST) -> Spec:
    return kind(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def number(low: float = -math.inf, high: float = math.inf) -> Spec:
    """Finite: a file that holds another is not read at all."""
    return kind(lambda value: type(value) in (int, float) and low <= value <= high, "a number")


def text(pattern: str = "", most: int = TEXT) -> Spec:
    form = re.compile(pattern or "(?s).*")
    words = f"text of the form {pattern}" if pattern else "text"
    return kind(lambda value: type(value) is str and len(value) <= most and bool(form.fullmatch(value)), words)


flag = kind(lambda value: type(value) is bool, "true or false")
_OBJECT = kind(lambda value: type(value) is dict, "an object")


def maybe(spec: Spec) -> Spec:
    """Or null."""
    return lambda value, where: None if value is None else spec(value, where)


def either(first: Spec, second: Spec) -> Spec:
    """One of two kinds."""

    def check(value: Any, where: str) -> None:
        try:
            first(value, where)
        except Mismatch:
            second(value, where)

    return check


def each(spec: Spec, least: int = 0, most: int = 1 << 24) -> Spec:
    """A list."""
    sized = kind(lambda value: type(value) is list and least <= len(value) <= most, "a list")

    def check(value: Any, where: str) -> None:
        sized(value, where)
        for item in value:
            spec(item, where)

    return check


def table(spec: Spec, keys: str = "") -> Spec:
    """An object with names of any kind, or such as the pattern says."""

    def check(value: Any, where: str) -> None:
        _OBJECT(value, where)
        for key, item in value.items():
            if keys and not re.fullmatch(keys, key):
                raise Mismatch(f"{where} has the name {_shown(key)}")
            spec(item, f"{where}.{key}")

    return check


def record(needs: Mapping[str, Spec], may: Mapping[str, Spec] | None = None) -> Spec:
    """An object with these parts, and perhaps those; of others only the depth is checked."""
    known = {**needs, **(may or {})}

    def check(value: Any, where: str) -> None:
        _OBJECT(value, where)
        for key in needs:
            if key not in value:
                raise Mismatch(f"{key} is missing" if where == "it" else f"{where}.{key} is missing")
        for key, item in value.items():
            known.get(key, anything)(item, key if where == "it" else f"{where}.{key}")

    return check


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}.."


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, spec: Spec, *, newest: int | None = None, way_out: str = "") -> Any:
    """What a file holds. newest: the highest format number that is read; None: the file has none. way_out: a sentence.

    What cannot be opened is an OSError, as of :func:`open`.
    """
    data = content(path, way_out=way_out)
    with _named(path, way_out):
        return parse(data, spec, newest)


def read_lines(
    path: Path, head: Spec, rows: Spec, *, newest: int, values: list[Any] | None = None, way_out: str = ""
) -> list[Any]:
    """Of a file with a JSON value in each line; the first, which has the format number, is of another kind.

    values: those of the file as they were kept elsewhere, under another checksum."""
    data = content(path, way_out=way_out) if values is None else None
    with _named(path, way_out):
        values = [_value(line) for line in data.splitlines() or [b""]] if data is not None else values
        head(values[0] if values else None, "it")
        assert values is not None
        for i, value in enumerate(values[1:], 2):
            rows(value, f"line {i}")
        check_format(values[0], newest, data)
    return values


@contextmanager
def _named(path: Path, way_out: str) -> Iterator[None]:
    """What is wrong with a file, said with its name."""
    try:
        yield
    except (Mismatch, Corrupt) as error:
        raise Corrupt(f"{path} is damaged: {error}{_after(way_out)}") from None


def content(path: Path, most: int = BYTES, way_out: str = "") -> bytes:
    """The bytes of a plain file of bounded size: no pipe is waited for."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise Corrupt(f"{path} is not a file{_after(way_out)}")
        if about.st_size > most:
            raise Corrupt(f"{path} has {about.st_size} bytes; such a file has at most {most}{_after(way_out)}")
        return file.read(about.st_size + 1)


def parse(data: bytes, spec: Spec = anything, newest: int | None = None) -> Any:
    """The value in JSON text, checked; :class:`Mismatch` or :class:`Corrupt` says what is wrong with it."""
    value = _value(data)
    if newest is not None:
        check_format(value, newest, data)
    spec(value, "it")
    return value


def _value(data: bytes) -> Any:
    try:
        value = json.loads(data.decode(), parse_int=_int, parse_float=_float, parse_constant=_refused)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be written anywhere
    except Mismatch:
        raise
    except RecursionError:
        raise Mismatch(f"it is nested deeper than {DEPTH}") from None
    except ValueError as error:
        raise Mismatch(f"it is not JSON: {error}") from None
    return value


def check_format(value: Any, newest: int, data: bytes | None = None) -> None:
    """A record has a number of a format that is read. data: of its file, if there is one, which is whole if it has a
    checksum; from format 2 on it has one."""
    if not isinstance(value, dict) or "format" not in value:
        raise Mismatch("it has no format number, so it was not written by Espalier")
    given = value["format"]
    integer(1)(given, "format")
    if given > newest:
        raise Mismatch(f"it is of format {given}, this Espalier reads up to format {newest}; use a newer one")
    if data is not None and (given > 1 or CHECKSUM in value):
        found = _SEAL.findall(data)
        blank = data.replace(found[0], BLANK.encode(), 1) if len(found) == 1 else b""
        if len(found) != 1 or hashlib.sha256(blank).hexdigest().encode() != found[0]:
            raise Corrupt("its checksum does not match its contents")


def _int(word: str) -> int:
    if len(word) > 20 or not -LARGEST <= int(word) <= LARGEST:
        raise Mismatch(f"the number {word[:20]} is too large")
    return int(word)


def _float(word: str) -> float:
    value = float(word)
    return value if math.isfinite(value) else _refused(word)


def _refused(word: str) -> float:
    raise Mismatch(f"the number {word[:20]} is not finite")


def _after(way_out: str) -> str:
    return f". {way_out}" if way_out else ""


# ---- writing ---------------------------------------------------------------------------------------------------------


def sealed(value: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = (), **form: Any) -> str:
    """A value, and rows in lines after it, as JSON text with the checksum of all of it in the value. form: as of
    :func:`json.dumps`."""
    return seal("\n".join(json.dumps(part, allow_nan=False, **form) for part in ({**value, CHECKSUM: BLANK}, *rows)))


def seal(words: str) -> str:
    """The text, a line end, and the checksum where the blank one was."""
    data = f"{words}\n".encode()
    digest = hashlib.sha256(data).hexdigest().encode()
    return _SEAL.sub(lambda found: found[0].replace(BLANK.encode(), digest), data).decode()
