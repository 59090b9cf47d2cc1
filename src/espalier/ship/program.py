"""torch.export: a network as one graph of plain torch operations with a batch of any size; as a file, model.pt2."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from espalier.files import put_in_place, write_beside
from espalier.gates.latency import quiet
from espalier.ship.onnx import BATCHES, NotExported, first_line
from espalier.ship.parity import apart, random_like, repeated
from espalier.train import pytree
from espalier.train.scoring import answers

TOLERANCE = 1e-6  # of the largest output: the same operations in the same order


@dataclass(frozen=True)
class Compared:
    """What was compared with the network: batches of these sizes, each of real and of random inputs. difference: the
    largest, relative to the largest output. inputs: name, type and shape of each, 0 for a batch of any size."""

    batches: tuple[int, ...]
    difference: float
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]


def plain_outputs(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in eval mode, whose outputs are tensors, tuples, lists and dicts alone.

    What is none of them, such as a cache of a language model, is left out.
    """
    model = deepcopy(model).cpu().eval()
    forward = model.forward

    @functools.wraps(forward)
    def plain(*arguments: Any, **keywords: Any) -> Any:
        return _plain(forward(*arguments, **keywords))

    model.__dict__["forward"] = plain
    return model


def _plain(output: Any) -> Any:
    if isinstance(output, Mapping):
        parts = {str(key): _plain(value) for key, value in output.items()}
        return {key: value for key, value in parts.items() if value is not None}
    if isinstance(output, (tuple, list)):
        kept = [value for value in map(_plain, output) if value is not None]
        return tuple(kept) if isinstance(output, tuple) else kept
    return output if isinstance(output, Tensor) else None


def program_of(plain: nn.Module, inputs: Any) -> ExportedProgram:
    """plain: by :func:`plain_outputs`. inputs: some examples, as the network takes them, examples first."""
    inputs = repeated(pytree.each(lambda t: t.detach().cpu(), inputs), 3)  # a batch of one would be a constant
    keywords: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    arguments: tuple[Any, ...] = ()
    if not keywords:
        arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    shapes = tree_map(lambda _: {0: Dim.AUTO}, keywords or arguments)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(plain, arguments, keywords or None, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # of every kind
        raise NotExported(f"torch cannot export this network: {first_line(error)}") from error


def export(model: nn.Module, inputs: Any, path: str | os.PathLike[str]) -> Compared:
    """Write a model as a file of torch.export, for a batch of any size, and check it.

    inputs: some real examples, as the model takes them. A file that does not compute what the model does is not kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = plain_outputs(model)
    program = program_of(plain, inputs)
    for node in program.graph.nodes:  # notes on the way here: our file names among them
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
            node.meta.pop(key, None)
    data = io.BytesIO()
    with quiet():
        torch.export.save(program, data)
        data.seek(0)
        again = torch.export.load(data).module()
    compared = compare(lambda given: pytree.call(again, given), plain, inputs, path)
    put_in_place(write_beside(path, data.getvalue()), path)
    return compared


def compare(
    run: Callable[[Any], Any], plain: nn.Module, inputs: Any, path: Path, batches: Sequence[int] = BATCHES
) -> Compared:
    """run: what was written, from inputs to outputs. Raises where it does not compute what the network does."""
    inputs = pytree.each(lambda t: t.detach().cpu(), inputs)
    worst = 0.0
    for batch in batches:
        for what, given in (("real", repeated(inputs, batch)), ("random", random_like(inputs, batch))):
            try:
                with torch.no_grad():
                    outputs = pytree.tensors(run(given))
            except Exception as error:
                raise NotExported(f"{path.name} fails at {batch} examples: {first_line(error)}") from error
            difference = apart(outputs, answers(plain, given))
            if not difference <= TOLERANCE:
                raise NotExported(
                    f"{path.name}: at {batch} {what} examples it differs from the network by {difference:.2g} of the "
                    f"largest output; {TOLERANCE:g} is allowed"
                )
            worst = max(worst, difference)
    return Compared(tuple(batches), worst, tuple(described(inputs)))


def described(inputs: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each tensor; 0 stands for the batch."""
    names = list(inputs) if isinstance(inputs, dict) else [f"input {i}" for i, _ in enumerate(pytree.tensors(inputs))]
    listed = zip(names, pytree.tensors(inputs))
    return [(name, str(t.dtype).removeprefix("torch."), (0, *t.shape[1:])) for name, t in listed]
