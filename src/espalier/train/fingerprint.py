"""What a run is of, in words that two calls can be compared by: the network, its weights, its code, the data, the loss.

Code is compared by the words of its source, without comments and layout: that of a class or function of one's own, not
of what it calls.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import io
import json
import platform
import re
import sys
import textwrap
import time
import tokenize
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy
import safetensors
import torch
from torch import Tensor, nn

from espalier import files, schema
from espalier.compact.apply import tensor_state
from espalier.space import Corrupt

PIECE = 1 << 24  # bytes
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
HASHES, FORMAT = "hashes.json", 2
RECENT = 2.0  # seconds: a file that changed so lately may change again and keep its time
_TABLE = schema.table(schema.text("[0-9a-f]{32}"), keys="[0-9a-f]{64}")
_SCHEMA = schema.record({"hashes": _TABLE, schema.CHECKSUM: schema.text()})


def network(model: nn.Module) -> str:
    """Its type, and a hash of its parts as it prints them, of the shapes of its tensors, of classes of one's own."""
    shapes = [[name, str(value.dtype), *value.shape] for name, value in tensor_state(model).items()]
    written = [source(kind) for kind in dict.fromkeys(type(module) for module in model.modules()) if _own(kind)]
    text = ADDRESS.sub("", repr(model)) + json.dumps(shapes) + (json.dumps(written) if written else "")
    return f"{type(model).__qualname__} {_hashed(text)}"


def source(thing: Any) -> str:
    """A hash of the words of its source; of its compiled code where there is no source (an interactive session)."""
    try:
        words = tokenize.generate_tokens(io.StringIO(textwrap.dedent(inspect.getsource(thing))).readline)
        left_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)
        return _hashed(repr([word.string for word in words if word.type not in left_out]))
    except (OSError, TypeError, SyntaxError, IndentationError, tokenize.TokenError):
        functions = [thing] if hasattr(thing, "__code__") else vars(thing).values()
        return _hashed(repr([_code(one.__code__) for one in functions if hasattr(one, "__code__")]))


def _own(thing: Any) -> bool:
    """Whether it is of the user's own code, which changes without a version."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] not in ("torch", "espalier", "builtins")


def tensors(given: Iterable[Tensor]) -> str:
    """A hash of every bit of the data."""
    return _bits(given)[:32]


def _bits(given: Iterable[Tensor]) -> str:
    """Piece by piece, in whatever memory the tensors lie."""
    digest = hashlib.sha256()
    for tensor in given:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        rows = max(1, PIECE // max(1, tensor[:1].numel() * tensor.element_size())) if tensor.ndim else 1
        for piece in torch.split(tensor.detach(), rows) if tensor.ndim else [tensor.detach().reshape(1)]:
            digest.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def settings(thing: Any, *without: str) -> dict[str, Any]:
    """The type of an object and what it was set to, JSON-able; numbers that are not finite in words."""
    set_to = {name: _plain(value) for name, value in vars(thing).items() if name not in without and name[0] != "_"}
    written: dict[str, Any] = json.loads(json.dumps(set_to, default=repr), parse_constant=str)
    return {type(thing).__qualname__: written}


def weights(given: Iterable[Tensor]) -> str:
    """A shorter one, of weights in their order."""
    return _bits(given)[:16]


def function(given: Any) -> str:
    """A function's name, and of one's own a hash of its source, its defaults and what it holds on to.

    >>> function(lambda x: x + 1) == function(lambda x: x + 2)
    False
    """
    if isinstance(given, functools.partial):
        return f"partial of {function(given.func)} {_hashed(repr(_plain([given.args, given.keywords])))}"
    if isinstance(given, nn.Module):
        set_to = {k: _plain(v) for k, v in vars(given).items() if not k.startswith("_") and k != "training"}
        held = [_plain(tensor) for tensor in given.state_dict().values()]  # weights of classes, say
        return f"{network(given)} {_hashed(repr([set_to, held] if held else set_to))}"
    name: str = getattr(given, "__qualname__", type(given).__qualname__)
    code = getattr(given, "__code__", None)
    if code is None or ("<" not in name and not _own(given)):
        return name
    held = [_cell(cell) for cell in given.__closure__ or ()]
    words = _code(code) if "<" in name else source(given)  # several lambdas may stand in one line
    return f"{name} {_hashed(repr([words, _plain(given.__defaults__), _plain(given.__kwdefaults__), held]))}"


def versions() -> dict[str, str]:
    package = sys.modules[__name__.partition(".")[0]]  # importing it here would point up the layers
    return {
        "espalier": package.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }


def _code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, [_plain(constant) for constant in code.co_consts]]


def _cell(cell: Any) -> Any:
    try:
        return _plain(cell.cell_contents)
    except ValueError:  # not bound yet
        return None


def _plain(value: Any) -> Any:
    """The value in a form whose repr is the same in another process."""
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, Tensor):
        return weights([value])
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return function(value) if callable(value) else type(value).__qualname__


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- hashes of files, kept -------------------------------------------------------------------------------------------


def stamp(path: Path) -> str | None:
    """Which file it is, as it is now: its place, size and times (of its content, and of anything about it: a content
    whose time was set back counts as changed). None where it has changed just now."""
    about = path.stat()
    if time.time() - max(about.st_mtime, about.st_ctime) < RECENT:
        return None
    return json.dumps([str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns])


def mark(tensor: Tensor, origin: str) -> None:
    """Note that a tensor is what was read from a file. origin: the file's stamp, how it was read, and by what."""
    tensor.espalier_origin = (origin, tensor._version)  # type: ignore[attr-defined]


def _origin(tensor: Tensor) -> str | None:
    """None of tensors that are of no file, or were changed since."""
    origin, version = getattr(tensor, "espalier_origin", (None, None))
    return origin if origin is not None and version == tensor._version else None


class Hashes:
    """Hashes of data that were read from files, kept in the folder of a run: a file that has not changed since, by its
    size and its times, is not hashed again. folder: None where nothing is known or kept.

    A tensor knows its file by a mark (:func:`mark`), which what is made of the tensor does not have. The file
    ``hashes.json`` carries a checksum; where a bit of it differs, or it is not there, all data are hashed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / HASHES
        self.known, self.asked, self.ours = dict[str, str](), dict[str, str](), True
        if self.path is None:
            return
        with contextlib.suppress(OSError, Corrupt):
            data = schema.content(self.path)
            self.ours = not data or schema.CHECKSUM.encode() in data
            with contextlib.suppress(schema.Mismatch):
                self.known = schema.parse(data, _SCHEMA, newest=FORMAT)["hashes"]

    def tensors(self, given: Iterable[Tensor]) -> str:
        """As :func:`tensors`; not computed where it is known."""
        given = list(given)
        origins = [(_origin(tensor), str(tensor.dtype), *tensor.shape) for tensor in given]
        if self.path is None or any(origin is None for origin, *_ in origins):
            return tensors(given)
        key = hashlib.sha256(json.dumps(origins).encode()).hexdigest()
        self.asked[key] = self.known.get(key) or self.asked.get(key) or tensors(given)
        return self.asked[key]

    def keep(self) -> None:
        """Write those that were asked for, by the process that holds the folder. A file of another kind stays, and a
        disk that is full has more important things to refuse."""
        if self.path is not None and self.ours and self.asked != self.known:
            with contextlib.suppress(files.NotSaved):
                files.write(self.path, schema.sealed({"format": FORMAT, "hashes": self.asked}, indent=1))
            self.known = dict(self.asked)
