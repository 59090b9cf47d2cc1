"""Keeping a compact model: its tensors in safetensors, its plan and checksums in JSON. No pickle."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as tensors_as_bytes
from torch import Tensor, nn

from espalier import schema
from espalier.compact.apply import apply_plan, tensor_state, uncompiled
from espalier.compact.plan import Plan
from espalier.files import PARTIAL, put_in_place, write_beside
from espalier.schema import anything, each, integer, record, table, text
from espalier.space import BadInput, BadType, Corrupt

TENSORS, PLAN = "model.safetensors", "plan.json"
FORMAT = 2  # 1: without a checksum of its own
STORED = record({"shape": each(integer(0, 1 << 40), 0, 8), "dtype": text("[a-z0-9_]+"), "sha256": text("[0-9a-f]{64}")})
AGAIN = "Save the model again, or use another copy of the folder"
SCHEMA = record({"plan": anything, "tensors": table(STORED), "tied": table(text())})


def save(small: nn.Module, folder: str | Path) -> None:
    """Write a compact model to a folder: ``model.safetensors`` and ``plan.json``. Tied tensors are stored once."""
    small = uncompiled(small)
    plan = getattr(small, "espalier_plan", None)
    if not isinstance(plan, dict):
        raise BadInput("save takes a compact model, made by gated.compact(mask); this module has no espalier_plan")
    folder = _path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise BadInput(f"{folder} is a file, or below one; save writes a folder of its own, so name another") from None
    except OSError as error:
        raise BadInput(f"the folder {folder} cannot be made: {error.strerror}") from None
    stored: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensor_state(small).items():
        tensor = tensor.detach()
        same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and same in first:
            places[name] = first[same]
            continue
        first[same] = places[name] = name
        stored[name] = tensor.cpu().contiguous().clone()
    index = {
        "format": FORMAT,
        "plan": plan,
        "tensors": {
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "sha256": _checksum(t)}
            for name, t in stored.items()
        },
        "tied": {name: where for name, where in places.items() if name != where},
    }
    try:
        packed = tensors_as_bytes(stored)
    except KeyError as error:  # what safetensors has no name for
        held = [name for name, tensor in stored.items() if tensor.dtype in error.args]
        raise BadInput(f"{', '.join(held)}: safetensors stores no {error}; convert the model to another type") from None
    # Both are complete beside the old ones before either takes its place: what fails on the way changes nothing. Until
    # the new plan is there the old tensors stay under a second name, by which a process that is killed leaves them.
    written, older = list[Path](), [old for name in (TENSORS, PLAN) for old in folder.glob(f"{name}.*{PARTIAL}")]
    try:
        for name, data in ((TENSORS, packed), (PLAN, schema.sealed(index, indent=1).encode())):
            written.append(write_beside(folder / name, data))
        if (folder / TENSORS).exists():
            older.append(folder / f"{TENSORS}.{secrets.token_hex(4)}{PARTIAL}")
            with contextlib.suppress(OSError):  # a file system without links
                os.link(folder / TENSORS, older[-1], follow_symlinks=False)
        for partial, name in zip(written, (TENSORS, PLAN), strict=True):
            put_in_place(partial, folder / name)
        for left in older:
            left.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:  # safetensors has no OSError of its own for a full disk
        for partial in written:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{folder} could not be written: {why}; what was there before is intact") from error


def load(folder: str | Path, factory: Callable[[], nn.Module]) -> nn.Module:
    """The compact model from a folder. ``factory()`` builds the original, uncut model; the plan is replayed on it."""
    folder = _path(folder)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BadType(
            f"load takes a factory, which builds the original, uncut model anew, not a {type(factory).__name__}: "
            "give its class, or a function such as lambda: Net(..)"
        )
    index = _index(folder)
    plan = Plan.from_dict(index["plan"])
    tensors = _tensors(folder, index)
    model = uncompiled(factory())
    if not isinstance(model, nn.Module):
        raise BadInput(f"the factory returns the original torch.nn.Module, not {type(model).__name__}")
    unfit = f"{folder} does not fit the model the factory builds"
    try:
        small = apply_plan(model, plan)
    except BadInput as error:
        raise Corrupt(f"{unfit}: {error}") from None
    wanted = tensor_state(small)
    given = {**{name: name for name in tensors}, **index["tied"]}
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or extra:
        raise Corrupt(f"{unfit}: missing {missing[:3] or 'nothing'}, not known there {extra[:3] or 'nothing'}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            source = tensors[given[name]]
            if source.shape != tensor.shape:
                shapes = f"with shape {tuple(source.shape)}, but the plan makes it {tuple(tensor.shape)}"
                raise Corrupt(f"{unfit}: {name} is stored {shapes}")
            if source.dtype != tensor.dtype:
                tensor.data = tensor.data.to(source.dtype)
            tensor.copy_(source)
    return small


def _path(folder: Any) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise BadType(f"a folder is named by a string or a path, not by {folder!r}")
    return Path(folder)


def _index(folder: Path) -> dict[str, Any]:
    path = folder / PLAN
    try:
        index: dict[str, Any] = schema.read(path, SCHEMA, newest=FORMAT, way_out=AGAIN)
    except (FileNotFoundError, NotADirectoryError):
        raise Corrupt(f"{path} is missing; the folder holds no compact model written by espalier.save") from None
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}") from None
    return index


def _tensors(folder: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that the plan tells of; where a save was killed between its two files, under their second name."""
    path = folder / TENSORS
    try:
        return _stored(path, index)
    except Corrupt:
        for older in sorted(folder.glob(f"{TENSORS}.*{PARTIAL}")):
            with contextlib.suppress(Corrupt):
                return _stored(older, index)
        raise


def _stored(path: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    if not path.is_file():
        raise Corrupt(f"{path} is missing")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        raise Corrupt(f"{path} is damaged or truncated: {error}. {AGAIN}") from None
    if set(tensors) != set(index["tensors"]):
        odd = sorted(set(tensors) ^ set(index["tensors"]))
        raise Corrupt(f"{path} does not hold the tensors of {PLAN}: {odd[:3]}")
    for name, tensor in tensors.items():
        entry, dtype = index["tensors"][name], str(tensor.dtype).removeprefix("torch.")
        if [list(tensor.shape), dtype, _checksum(tensor)] != [entry[key] for key in ("shape", "dtype", "sha256")]:
            raise Corrupt(f"{path}: tensor {name} is not the one that was saved (its checksum differs). {AGAIN}")
    for name, where in index["tied"].items():
        if where not in tensors:
            raise Corrupt(f"{path.with_name(PLAN)} ties {name} to {where}, which is not stored")
    return tensors


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
