"""Keeping a compact model: its tensors in safetensors, its plan and checksums in JSON. No pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as tensors_as_bytes
from torch import Tensor, nn

from espalier.compact.apply import apply_plan
from espalier.compact.plan import FORMAT, Plan
from espalier.files import put_in_place, write_beside
from espalier.space import BadInput, BadType, Corrupt

TENSORS, PLAN = "model.safetensors", "plan.json"


def save(small: nn.Module, folder: str | Path) -> None:
    """Write a compact model to a folder: ``model.safetensors`` and ``plan.json``. Tied tensors are stored once."""
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
    for name, tensor in small.state_dict(keep_vars=True).items():
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
    text = json.dumps(index, indent=1) + "\n"
    # Both are complete beside the old ones before either takes its place: what fails on the way changes nothing.
    written = list[Path]()
    try:
        for name, data in ((TENSORS, tensors_as_bytes(stored)), (PLAN, text.encode())):
            written.append(write_beside(folder / name, data))
        for partial, name in zip(written, (TENSORS, PLAN), strict=True):
            put_in_place(partial, folder / name)
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
    model = factory()
    if not isinstance(model, nn.Module):
        raise BadInput(f"the factory returns the original torch.nn.Module, not {type(model).__name__}")
    try:
        small = apply_plan(model, plan)
    except BadInput as error:
        raise Corrupt(f"{folder} does not fit the model the factory builds: {error}") from None
    wanted = small.state_dict(keep_vars=True)
    given = {**{name: name for name in tensors}, **index["tied"]}
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or extra:
        raise Corrupt(
            f"{folder} does not fit the model the factory builds: "
            f"missing {missing[:3] or 'nothing'}, not known there {extra[:3] or 'nothing'}"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            source = tensors[given[name]]
            if source.shape != tensor.shape:
                raise Corrupt(
                    f"{folder} does not fit the model the factory builds: {name} is stored with shape "
                    f"{tuple(source.shape)}, but the plan makes it {tuple(tensor.shape)}"
                )
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
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise Corrupt(f"{path} is missing; the folder holds no compact model written by espalier.save") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise Corrupt(f"{path} is damaged: {error}") from None
    if not isinstance(index, dict) or not isinstance(index.get("format"), int):
        raise Corrupt(f"{path} has no format number; it was not written by espalier.save")
    if index["format"] > FORMAT:
        raise Corrupt(f"{path} is of format {index['format']}, this Espalier reads up to {FORMAT}; use a newer one")
    if not all(isinstance(index.get(key), dict) for key in ("plan", "tensors", "tied")):
        raise Corrupt(f"{path} is damaged: plan, tensors or tied is missing")
    return index


def _tensors(folder: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / TENSORS
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise Corrupt(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise Corrupt(f"{path} is damaged or truncated: {error}") from None
    if set(tensors) != set(index["tensors"]):
        odd = sorted(set(tensors) ^ set(index["tensors"]))
        raise Corrupt(f"{path} does not hold the tensors of {PLAN}: {odd[:3]}")
    for name, tensor in tensors.items():
        entry = index["tensors"][name]
        if list(tensor.shape) != entry.get("shape") or _checksum(tensor) != entry.get("sha256"):
            raise Corrupt(f"{path}: tensor {name} is not the one that was saved (its checksum differs)")
    for name, where in index["tied"].items():
        if where not in tensors:
            raise Corrupt(f"{folder / PLAN} ties {name} to {where}, which is not stored")
    return tensors


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
