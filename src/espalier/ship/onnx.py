"""ONNX: a network as a file that onnxruntime runs with a batch of any size, checked against torch before it is kept."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from espalier.files import put_in_place, write_beside
from espalier.gates.latency import quiet
from espalier.ship.parity import apart, random_like, repeated
from espalier.space import BadInput, EspalierError
from espalier.train import pytree
from espalier.train.scoring import answers

TOLERANCE = 1e-4  # of the largest output; float32 sums in another order differ by about 1e-6
BATCHES = (1, 2, 7, 33)
BATCH = "batch"


class NotExported(EspalierError, RuntimeError):
    """The network could not be written as ONNX, or the file does not compute what the network does."""


@dataclass(frozen=True)
class Checked:
    """What was compared with torch: batches of these sizes, each of real and of random inputs. difference: the largest,
    relative to the largest output. inputs: name, type and shape of what the file takes."""

    batches: tuple[int, ...]
    difference: float
    inputs: tuple[tuple[str, str, tuple[str | int, ...]], ...]
    outputs: tuple[str, ...]


def export(model: nn.Module, inputs: Any, path: str | os.PathLike[str], *, tolerance: float = TOLERANCE) -> Checked:
    """Write a model to a file, for a batch of any size, and check it with onnxruntime.

    inputs: some real examples, as the model takes them: a tensor, a tuple (positional) or a dict (keyword), examples
    first. A file that does not compute what the model does is not kept.
    """
    _needed()
    path, model = Path(path), deepcopy(model).cpu().eval()
    inputs = pytree.each(lambda t: t.detach().cpu(), inputs)
    program = _program(model, repeated(inputs, 3))  # a batch of one would be taken for a constant
    try:
        data = program.model_proto.SerializeToString()
    except Exception as error:  # of protobuf, whose messages end at 2 GB
        raise NotExported(f"this network cannot be written as one ONNX file: {first_line(error)}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = write_beside(path, data)
    try:
        checked = verify(partial, model, inputs, tolerance=tolerance)
        put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return checked


def verify(
    path: str | os.PathLike[str],
    model: nn.Module,
    inputs: Any,
    *,
    batches: Sequence[int] = BATCHES,
    tolerance: float = TOLERANCE,
) -> Checked:
    """Compare an ONNX file with a model in torch, on real and on random inputs, at several batch sizes."""
    onnxruntime = _needed()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise NotExported(f"{path}: onnxruntime cannot load it: {first_line(error)}") from error
    taken = [(i.name, str(i.type), tuple(i.shape)) for i in session.get_inputs()]
    worst = 0.0
    for batch in batches:
        for what, given in (("real", repeated(inputs, batch)), ("random", random_like(inputs, batch))):
            fed = dict(zip(_names(given), (t.numpy() for t in pytree.tensors(given))))
            try:
                outputs = session.run(None, {name: fed[name] for name, _, _ in taken})
            except Exception as error:
                raise NotExported(f"{path}: onnxruntime fails at {batch} examples: {first_line(error)}") from error
            difference = apart([torch.from_numpy(one) for one in outputs], answers(model, given))
            if not difference <= tolerance:
                raise NotExported(
                    f"{path}: at {batch} {what} examples onnxruntime and torch differ by {difference:.2g} of the "
                    f"largest output; {tolerance:g} is allowed"
                )
            worst = max(worst, difference)
    return Checked(tuple(batches), worst, tuple(taken), tuple(o.name for o in session.get_outputs()))


def _program(model: nn.Module, inputs: Any) -> Any:
    """The model as torch's exporter reads it, with a batch of any size."""
    keywords: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    arguments: tuple[Any, ...] = ()
    if not keywords:
        arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    shapes = tree_map(lambda _: {0: BATCH}, keywords or arguments)
    outputs = len(answers(model, inputs))
    try:
        with quiet():
            return torch.onnx.export(
                model,
                arguments,
                kwargs=keywords or None,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=_names(inputs),
                output_names=["outputs"] if outputs == 1 else [f"outputs_{i}" for i in range(outputs)],
                verbose=False,
            )
    except Exception as error:  # torch's exporter raises of every kind
        raise NotExported(f"torch cannot export this network to ONNX: {first_line(error)}") from error


def _names(inputs: Any) -> list[str]:
    """One for each tensor: inputs, inputs_0 and so on, or the words of a dict."""
    if isinstance(inputs, dict) and all(isinstance(value, Tensor) for value in inputs.values()):
        return list(inputs)
    count = len(pytree.tensors(inputs))
    return ["inputs"] if count == 1 else [f"inputs_{i}" for i in range(count)]


def _needed() -> Any:
    """onnxruntime, when everything is here."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != name:
                raise
            raise BadInput(f"ONNX needs {name}: pip install 'espalier[onnx]'") from None
    return module


def first_line(error: BaseException) -> str:
    """The deepest reason, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
