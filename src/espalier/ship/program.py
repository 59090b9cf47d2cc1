"""torch.export: a network as one graph of plain torch operations with a batch of any size; as a file, model.pt2."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from espalier.compact.exported import exported, plain_outputs, quiet
from espalier.files import write
from espalier.gates.trace import Example
from espalier.ship.parity import Checked, NotExported, compare, reason, repeated
from espalier.train import pytree

TOLERANCE = 1e-6  # of the largest output: the same operations in the same order


def program_of(plain: nn.Module, inputs: Any) -> ExportedProgram:
    """plain: by :func:`plain_outputs`. inputs: some examples, as the network takes them, examples first."""
    inputs = repeated(pytree.each(lambda t: t.detach().cpu(), inputs), 3)
    try:
        program = exported(plain, *Example.of(inputs))
    except Exception as error:  # of every kind
        raise NotExported(f"torch cannot export this network: {reason(error)}{_where(error)}") from error
    given = program.graph_signature.user_inputs
    sizes = [str(node.meta["val"].shape[0]) for node in program.graph.nodes if node.name in given and node.users]
    if sizes and all(size.isdigit() for size in sizes):  # not a symbol
        raise NotExported(
            "torch exports this network for one batch size alone: its code makes a number of the size, as len(x) does; "
            "x.shape[0] stays open"
        )
    return program


def _where(error: Exception) -> str:
    """Where code decides by the values in a tensor; nothing of other errors."""
    if type(error).__name__ != "GuardOnDataDependentSymNode":  # to ask for its class would import sympy
        return ""
    call = str(error).partition("The following call raised this error:")[2].strip().partition("\n\n")[0]
    return f"; its code decides by the values in a tensor, which one graph for all cannot: {' '.join(call.split())}"


def export(model: nn.Module, inputs: Any, path: str | os.PathLike[str]) -> Checked:
    """Write a model as a file of torch.export, for a batch of any size, and check it.

    inputs: some real examples, as the model takes them. A file that does not compute what the model does is not kept.
    """
    path, plain = Path(path), plain_outputs(model)
    program = program_of(plain, inputs)
    for node in program.graph.nodes:  # notes on the way here: our file names among them
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
            node.meta.pop(key, None)
    data = io.BytesIO()
    try:
        with quiet():
            torch.export.save(program, data)
            data.seek(0)
            again = torch.export.load(data).module()
    except Exception as error:  # a module called "class", say, which torch writes into code of its own
        raise NotExported(f"torch cannot write this network: {reason(error)}") from error
    checked = compare(lambda given: pytree.tensors(pytree.call(again, given)), plain, inputs, path.name, TOLERANCE)
    write(path, data.getvalue())
    return checked
