"""Checkpoints: a run's whole state in one file, that a kill, a full disk or a flipped bit cannot take away.

A checkpoint is a safetensors file; its header carries the JSON part of the state, the settings of the run, and the
SHA-256 of everything else in the file. It is written under another name, flushed to the disk and then renamed, so that
a file under its final name is whole; the last two are kept, in case the disk itself damages one.

Where files have to be small, the same bytes are cut: the file of the usual name has the first ones, those named after
its checksum the others, in their order. It is put in place last, so that the others are there when it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from espalier import schema
from espalier.files import PARTIAL
from espalier.files import NotSaved as NotSaved  # for those who import both from here
from espalier.files import write as write
from espalier.space import BadInput, BadType, Corrupt

FORMAT, MOST = 1, 1 << 40  # bytes
_FRONT = schema.record({"__metadata__": schema.record({"espalier": schema.text(most=1 << 28)})})
_DEEP = partial(schema.anything, depth=-200)  # containers are two levels each
_HEADER = schema.record(
    {"state": _DEEP},
    {
        "step": schema.integer(0),
        "settings": schema.table(schema.anything),
        "forced": schema.each(schema.text()),
    },
)
KEPT = 2
NAME = re.compile(r"checkpoint-(\d{12})\.safetensors")
FURTHER = re.compile(r"(checkpoint-\d{12}-[0-9a-f]{16})\.part\d+")  # what follows, of a checkpoint in parts
SUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
BLANK = "0" * 64  # stands where the checksum will be, so that the checksum covers the header too


class Checkpoint:
    """The checkpoints of one run, in one folder.

    settings: JSON-able; a checkpoint written under others is refused, with both shown. Leave out what may change
    between the calls of one run (a time limit, the folder itself). anyway: it is not refused, but what differs is kept
    in ``forced``, and in every later checkpoint. part_size: bytes that no file exceeds, unless what is not tensors
    already does; None: a checkpoint is one file.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Checkpoint(folder, {"seed": 0}).save({"update": 7}, 7).name
    'checkpoint-000000000007.safetensors'
    >>> Checkpoint(folder, {"seed": 0}).load()
    {'update': 7}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        anyway: bool = False,
        part_size: int | None = None,
    ) -> None:
        self.folder, self.anyway, self.part_size = Path(folder), anyway, part_size
        if part_size is not None and part_size < 1:
            raise BadInput(f"part_size is a number of bytes from 1 up, not {part_size}")
        self.forced: list[str] = []
        try:
            self.settings = json.loads(json.dumps(dict(settings), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise BadType(f"the settings of a run are JSON-able: {error}") from None

    def files(self) -> list[Path]:
        """The checkpoints that are there, the newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        """Write the state after so many updates; then forget all but the last two. Returns the file.

        state: nested dicts, lists and tuples of tensors and JSON-able values.
        """
        structure, tensors = split_state(state)
        header = {"format": FORMAT, "step": step, "settings": self.settings, "state": structure}
        header |= {"forced": self.forced} if self.forced else {}
        path, data = self.folder / f"checkpoint-{step:012d}.safetensors", pack(header, tensors)
        size = max(self.part_size or len(data), _header_end(data))
        for number, start in enumerate(range(size, len(data), size), 1):
            write(_further(path, data, number), data[start : start + size])
        write(path, data[:size])
        kept = self.files()[:KEPT]
        for old in self.files():
            # Checkpoints of later updates are left from a run that fell back to an earlier one: damaged, or overtaken.
            if old not in kept:
                old.unlink(missing_ok=True)
        for left in self.folder.glob(f"checkpoint-*{PARTIAL}"):  # of a run that was killed while it wrote
            left.unlink(missing_ok=True)
        further = self._further()
        whole = {_further(one, _content(one), 1).stem for one in kept} if further else set()
        for left in further:
            if left.stem not in whole:
                left.unlink(missing_ok=True)
        return path

    def _further(self) -> list[Path]:
        """What follows the first parts of checkpoints, or has been left by a run that was killed before these."""
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        return [path for path in there if FURTHER.fullmatch(path.name)]

    def load(self) -> dict[str, Any] | None:
        """The newest state that is whole, tensors on the CPU; None where the folder holds no checkpoint."""
        files, damage = self.files(), list[str]()
        for path in files:
            try:
                header, tensors = unpack(_joined(path))
                self.forced = header.get("forced", [])
                self._check_settings(path, header.get("settings", {}))
                state: dict[str, Any] = join_state(header["state"], tensors)
            except Damaged as error:
                damage.append(f"{path.name}: {error}")
                continue
            if damage:
                warnings.warn(
                    f"{'; '.join(damage)} (in {self.folder}). Going on from {path.name} instead", stacklevel=2
                )
                for broken in files[: len(damage)]:  # else it would stay the newest one for good
                    broken.unlink(missing_ok=True)
            return state
        if damage:
            raise Corrupt(
                f"no checkpoint in {self.folder} is whole: {'; '.join(damage)}. Remove the folder to start again"
            )
        if self._further():  # killed while the first was written; or forgotten where files were copied
            warnings.warn(
                f"{self.folder} holds parts of a checkpoint without the first of them, checkpoint-*.safetensors: they "
                "are of no use. Starting anew",
                stacklevel=2,
            )
        return None

    def _check_settings(self, path: Path, theirs: Mapping[str, Any]) -> None:
        if theirs == self.settings:
            return
        differ = differences(theirs, self.settings)
        if self.anyway:
            self.forced = [*self.forced, *differ]
            return
        raise BadInput(
            f"{path} is of a run with other settings: {'; '.join(differ)}. Use the same settings to go on with it, or "
            'another folder to start anew (or resume="anyway", --force: the run then records what differed)'
        )


class Damaged(Corrupt):
    """One checkpoint file is not whole; an older one may be."""


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of the tensors, with the header as JSON and the checksum of all the rest in its metadata."""
    text = json.dumps(header, allow_nan=False, separators=(",", ":"))
    data = safetensors.torch.save(dict(tensors), metadata={"espalier": text, "sha256": BLANK})
    end = _header_end(data)
    digest = hashlib.sha256(data).hexdigest()
    blank, whole = f'"sha256":"{BLANK}"'.encode(), f'"sha256":"{digest}"'.encode()
    front = data[:end]
    # The header's text has its quotes escaped inside the metadata, so this string occurs there once only.
    assert front.count(blank) == 1
    return front.replace(blank, whole) + data[end:]


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of what :func:`pack` made; :class:`Damaged` if a single bit differs."""
    end = _header_end(data)
    if len(data) < 8 or end > len(data):
        raise Damaged(f"it is cut off, {len(data)} bytes are left")
    sums = SUM.findall(data[:end])
    if len(sums) != 1:
        raise Damaged("its header is not that of a checkpoint")
    check = hashlib.sha256(data[:end].replace(sums[0], BLANK.encode()))
    check.update(memoryview(data)[end:])
    if check.hexdigest() != sums[0].decode():
        raise Damaged("its checksum does not match its contents; where it is in parts, one may be missing")
    try:
        header = schema.parse(schema.parse(data[8:end], _FRONT)["__metadata__"]["espalier"].encode(), _HEADER)
        if header.get("format") != FORMAT:
            raise Corrupt(f"this checkpoint has format {header.get('format')}; this version of Espalier reads {FORMAT}")
        return header, safetensors.torch.load(data)
    except (schema.Mismatch, safetensors.SafetensorError, RuntimeError, OverflowError, RecursionError) as error:
        raise Damaged(str(error)) from None


def _further(path: Path, data: bytes, number: int) -> Path:
    """Where what follows the first part of a checkpoint lies. It is named by its checksum, so that another state of the
    same update is written beside it and not over it. data: its first bytes at least."""
    (digest,) = SUM.findall(data[: _header_end(data)])[:1] or [b"0" * 64]
    return path.with_name(f"{path.stem}-{digest[:16].decode()}.part{number}")


def _joined(path: Path) -> bytes:
    """A checkpoint with what follows its first part."""
    parts = [_content(path)]
    while (part := _further(path, parts[0], len(parts))).is_file():
        parts.append(_content(part))
    return b"".join(parts)


def _header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _content(path: Path) -> bytes:
    try:
        return schema.content(path, most=MOST)
    except Corrupt as error:
        raise Damaged(str(error)) from None


def differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], shown: Callable[[Any], str] = json.dumps
) -> list[str]:
    """In what two settings differ, with the values there and here."""

    def said(one: Mapping[str, Any], name: str) -> str:
        return shown(one[name]) if name in one else "not set"

    names = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name, ...) != ours.get(name, ...)]
    return [f"{name}: {said(theirs, name)} there, {said(ours, name)} here" for name in names]


# ---- a nested state as JSON and tensors apart, and back: exactly, and without pickle ---------------------------------


# A state is what ``state_dict()`` of an optimiser, a scheduler or a search gives: dicts (keys are strings or integers),
# lists, tuples, counters, tensors, numbers, strings, None. Tensors go to safetensors; the rest keeps its shape in JSON,
# in which every container is an object of one key that names its kind.

Json = Any  # what json.loads gives


def split_state(state: Mapping[str, Any]) -> tuple[Json, dict[str, Tensor]]:
    """The state as JSON in which tensors are names, and those tensors: on the CPU, contiguous, no memory shared.

    A tensor that occurs twice (tied weights) is stored once.

    >>> tree, tensors = split_state({"step": 3, "weight": torch.zeros(2)})
    >>> tree
    {'dict': [['step', 3], ['weight', {'tensor': 'weight'}]]}
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[object, ...], str] = {}

    def tensor(value: Tensor, path: str) -> Json:
        if value.layout is not torch.strided:
            raise BadType(f"{path} is a {value.layout} tensor; a checkpoint holds dense ones, use .to_dense()")
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if not value.numel() or place not in names:
            names[place] = path
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": names[place]}

    def node(value: object, path: str) -> Json:
        if isinstance(value, Tensor):
            return tensor(value, path)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, bool) or not isinstance(key, (str, int)):
                    raise BadType(f"{path or 'the state'} has the key {key!r}; keys are strings or integers")
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[key, node(item, f"{path}.{key}" if path else str(key))] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [node(item, f"{path}.{i}") for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise BadType(
            f"{path} is of type {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None, and dicts, "
            "lists and tuples of them"
        )

    return node(state, ""), tensors


def join_state(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The state that :func:`split_state` took apart."""
    try:
        return _join(tree, tensors)
    except (TypeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, Corrupt) else Corrupt(f"a node of the state is damaged: {error}") from None


def _join(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise Corrupt(f"a node of the state names one kind, not {sorted(tree)}")
    ((kind, value),) = tree.items()
    match kind:
        case "dict":
            return {key: _join(item, tensors) for key, item in value}
        case "counter":
            return Counter({key: _join(item, tensors) for key, item in value})
        case "list":
            return [_join(item, tensors) for item in value]
        case "tuple":
            return tuple(_join(item, tensors) for item in value)
        case "float":
            return float(value)
        case "tensor":
            if value not in tensors:
                raise Corrupt(f"the state names the tensor {value!r}, which is missing")
            return tensors[value]
    raise Corrupt(f"a node of the state is of the unknown kind {kind!r}")
