"""ONNX: a network as a file that onnxruntime runs with a batch of any size, checked against torch before it is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.exported import onnx_file, plain_outputs
from espalier.files import write
from espalier.ship.parity import BATCHES, Checked, NotExported, compare, reason
from espalier.ship.program import program_of
from espalier.train import checks, pytree

TOLERANCE = 1e-4  # of the largest output; float32 sums in another order differ by about 1e-6
BATCH = "batch"


def export(model: nn.Module, inputs: Any, path: str | os.PathLike[str], *, tolerance: float = TOLERANCE) -> Checked:
    """Write a model to a file, for a batch of any size, and check it with onnxruntime.

    inputs: some real examples, as the model takes them: a tensor, a tuple (positional) or a dict (keyword), examples
    first. A file that does not compute what the model does is not kept. What is no tensor in its outputs, such as a
    cache of a language model, is left out.
    """
    _needed()
    path, plain = Path(path), plain_outputs(model)
    program = program_of(plain, inputs)
    for node in program.graph.nodes:  # the exporter would write where on this machine each line of code lies
        node.meta.pop("stack_trace", None)
    with torch.no_grad():
        outputs = pytree.call(plain, pytree.each(lambda t: t.detach().cpu(), inputs))
    try:
        data = onnx_file(program, _names(inputs), _names(outputs, "outputs", _names(inputs)), BATCH)
    except Exception as error:  # torch's exporter raises of every kind; messages of protobuf end at 2 GB
        raise NotExported(f"torch cannot export this network to ONNX: {reason(error)}") from error
    checked = verify(data, plain, inputs, tolerance=tolerance)
    write(path, data)
    return checked


def verify(
    file: str | os.PathLike[str] | bytes,
    model: nn.Module,
    inputs: Any,
    *,
    batches: Sequence[int] = BATCHES,
    tolerance: float = TOLERANCE,
) -> Checked:
    """Compare an ONNX file with a model in torch, on real and on random inputs, at several batch sizes.

    file: its path, or what is in it.
    """
    name = "the ONNX file" if isinstance(file, bytes) else os.fspath(file)
    onnxruntime = _needed()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise NotExported(f"{name}: onnxruntime cannot load it: {reason(error)}") from error
    taken = tuple((i.name, str(i.type), tuple(i.shape)) for i in session.get_inputs())

    def run(given: Any) -> list[Tensor]:
        fed = dict(zip(_names(given), (t.numpy() for t in pytree.tensors(given))))
        return [torch.from_numpy(one) for one in session.run(None, {name: fed[name] for name, _, _ in taken})]

    checked = compare(run, model, inputs, name, tolerance, batches)
    return replace(checked, inputs=taken, outputs=tuple(o.name for o in session.get_outputs()))


def _names(value: Any, word: str = "inputs", taken: Sequence[str] = ()) -> list[str]:
    """One for each tensor: the word, word_0 and so on, or the keys of a dict if none of them is taken."""
    named = pytree.named(value)
    if named is not None and not {*named} & {*taken}:
        return list(named)
    count = len(pytree.tensors(value))
    return [word] if count == 1 else [f"{word}_{i}" for i in range(count)]


def _needed() -> Any:
    """onnxruntime, when everything is here."""
    names = ("onnx", "onnxscript", "onnxruntime")
    return [checks.needed(name, f"ONNX needs {name}: pip install 'espalier[onnx]'") for name in names][-1]
