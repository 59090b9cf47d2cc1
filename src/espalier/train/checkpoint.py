"""Checkpoints: a run's whole state in one file, that a kill, a full disk or a flipped bit cannot take away.

A checkpoint is a safetensors file; its header carries the JSON part of the state, the settings of the run, and the
SHA-256 of everything else in the file. It is written under another name, flushed to the disk and then renamed, so that
a file under its final name is whole; the last two are kept, in case the disk itself damages one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from espalier import schema
from espalier.files import PARTIAL
from espalier.files import NotSaved as NotSaved  # for those who import both from here
from espalier.files import write as write
from espalier.space import BadInput, BadType, Corrupt
from espalier.train import state_codec

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
BLANK = "0" * 64  # stands where the checksum will be, so that the checksum covers the header too


class Checkpoint:
    """The checkpoints of one run, in one folder.

    settings: JSON-able; a checkpoint written under others is refused, with both shown. Leave out what may change
    between the calls of one run (a time limit, the folder itself). anyway: it is not refused, but what differs is kept
    in ``forced``, and in every later checkpoint.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Checkpoint(folder, {"seed": 0}).save({"update": 7}, 7).name
    'checkpoint-000000000007.safetensors'
    >>> Checkpoint(folder, {"seed": 0}).load()
    {'update': 7}
    """

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any], anyway: bool = False) -> None:
        self.folder, self.anyway = Path(folder), anyway
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
        structure, tensors = state_codec.split(state)
        header = {"format": FORMAT, "step": step, "settings": self.settings, "state": structure}
        header |= {"forced": self.forced} if self.forced else {}
        path = self.folder / f"checkpoint-{step:012d}.safetensors"
        write(path, pack(header, tensors))
        kept = self.files()[:KEPT]
        for old in self.files():
            # Checkpoints of later updates are left from a run that fell back to an earlier one: damaged, or overtaken.
            if old not in kept:
                old.unlink(missing_ok=True)
        for left in self.folder.glob(f"checkpoint-*{PARTIAL}"):  # of a run that was killed while it wrote
            left.unlink(missing_ok=True)
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest state that is whole, tensors on the CPU; None where the folder holds no checkpoint."""
        files, damage = self.files(), list[str]()
        for path in files:
            try:
                header, tensors = unpack(_content(path))
                self.forced = header.get("forced", [])
                self._check_settings(path, header.get("settings", {}))
                state: dict[str, Any] = state_codec.join(header["state"], tensors)
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
        return None

    def _check_settings(self, path: Path, theirs: Mapping[str, Any]) -> None:
        if theirs == self.settings:
            return
        differ = [
            f"{key}: {_shown(theirs, key)} there, {_shown(self.settings, key)} here"
            for key in sorted(theirs.keys() | self.settings.keys())
            if theirs.get(key, ...) != self.settings.get(key, ...)
        ]
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
    end = 8 + int.from_bytes(data[:8], "little")
    digest = hashlib.sha256(data).hexdigest()
    blank, whole = f'"sha256":"{BLANK}"'.encode(), f'"sha256":"{digest}"'.encode()
    front = data[:end]
    # The header's text has its quotes escaped inside the metadata, so this string occurs there once only.
    assert front.count(blank) == 1
    return front.replace(blank, whole) + data[end:]


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of what :func:`pack` made; :class:`Damaged` if a single bit differs."""
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > len(data):
        raise Damaged(f"it is cut off, {len(data)} bytes are left")
    found = re.findall(rb'"sha256":"([0-9a-f]{64})"', data[:end])
    if len(found) != 1:
        raise Damaged("its header is not that of a checkpoint")
    check = hashlib.sha256(data[:end].replace(found[0], BLANK.encode()))
    check.update(memoryview(data)[end:])
    if check.hexdigest() != found[0].decode():
        raise Damaged("its checksum does not match its contents")
    try:
        header = schema.parse(schema.parse(data[8:end], _FRONT)["__metadata__"]["espalier"].encode(), _HEADER)
        if header.get("format") != FORMAT:
            raise Corrupt(f"this checkpoint has format {header.get('format')}; this version of Espalier reads {FORMAT}")
        return header, safetensors.torch.load(data)
    except (schema.Mismatch, safetensors.SafetensorError, RuntimeError, OverflowError, RecursionError) as error:
        raise Damaged(str(error)) from None


def _content(path: Path) -> bytes:
    try:
        return schema.content(path, most=MOST)
    except Corrupt as error:
        raise Damaged(str(error)) from None


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "not set"
