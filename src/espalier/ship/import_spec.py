"""Python things named in text: ``package.module:function`` or ``file.py:function``, and their arguments."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from espalier.space import BadInput
from espalier.train.setting import near


def is_reference(text: str) -> bool:
    """Whether it names a function of a module, not a set or a network known by name."""
    return ":" in text


def function(reference: str, what: str) -> Callable[..., Any]:
    """What is named, which can be called. what: of the command line, for messages, such as ``--model``."""
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise BadInput(f"{what} {reference!r}: write package.module:function or file.py:function")
    thing: Any = _module(where, what)
    for part in name.split("."):
        if not hasattr(thing, part):
            hint = near(part, [n for n in dir(thing) if not n.startswith("_")])
            raise BadInput(f"{what} {reference!r}: {where} has no {part!r}{hint}")
        thing = getattr(thing, part)
    if not callable(thing):
        raise BadInput(f"{what} {reference!r} is a {type(thing).__name__}, not a function")
    return thing  # type: ignore[no-any-return]


def call(factory: Callable[..., Any], arguments: dict[str, Any], reference: str, what: str) -> Any:
    """What the function gives. Its own errors become one line, with the place in the user's file."""
    try:
        return factory(**arguments)
    except Exception as error:
        raise BadInput(f"{what} {reference!r} failed: {_in_a_line(error)}") from error


def blamed(error: BaseException) -> str:
    """In one line, with the place, an error that came through code of the user's own; "" of any other: a file that is
    neither Espalier's nor installed."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    installed.append(Path(__file__).resolve().parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.resolve().is_relative_to(place) for place in installed):
            return _in_a_line(error, frame)
    return ""


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """``name=value`` each; a value is JSON where it can be read as that, text otherwise.

    >>> arguments(["width=64", "hidden=[8, 8]", "name=a", "bias=false"])
    {'width': 64, 'hidden': [8, 8], 'name': 'a', 'bias': False}
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip().isidentifier():
            raise BadInput(f"{word!r} is not an argument; write name=value, such as width=64 or hidden=[64, 64]")
        try:
            values[name.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            values[name.strip()] = value.strip()
    return values


def fingerprint(reference: str) -> str | None:
    """A hash of the file that is named, or of the module's; None of names, and of modules without a file.

    Nothing but the packages above a module is imported for it.
    """
    where = reference.rpartition(":")[0]
    path = Path(where)
    if not where.endswith(".py"):
        try:
            path = Path(str(importlib.util.find_spec(where).origin))  # type: ignore[union-attr]
        except (ImportError, ValueError, AttributeError):
            return None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _module(where: str, what: str) -> ModuleType:
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise BadInput(f"{what}: there is no file {where}")
        return _loaded(path, what)
    if os.getcwd() not in sys.path:  # the installed command does not look there, `python -m espalier` does
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and where.split(".")[: len(error.name.split("."))] == error.name.split("."):
            raise BadInput(
                f"{what}: there is no module {error.name!r} here; a file is named with its ending, as net.py:build"
            ) from None
        raise BadInput(f"{what}: {where} cannot be imported: {_in_a_line(error)}") from error
    except Exception as error:
        raise BadInput(f"{what}: {where} cannot be imported: {_in_a_line(error)}") from error


def _loaded(path: Path, what: str) -> ModuleType:
    """The module in a file; its neighbours can be imported by it."""
    full = path.resolve()
    name = f"espalier_own_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(full.parent) not in sys.path:
        sys.path.insert(0, str(full.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise BadInput(f"{what}: {path} cannot be imported: {_in_a_line(error)}") from error
    return module


def _in_a_line(error: BaseException, frame: traceback.FrameSummary | None = None) -> str:
    """The error and where it came from, in one line. frame: that place, if it is not the last."""
    last = [frame] if frame else traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename or '?').name}, line {error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    place = f" ({Path(last[0].filename).name}, line {last[0].lineno})" if last else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}{place}"
