"""A network as torch.export's graph of plain operations: what is measured, and what ships, without any module of ours.

A layer that a cut leaves nothing to read gives its bias. In the graph it is written as that, so that whatever leads to
it goes as well; onnxruntime refuses tensors without elements.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

ATEN = torch.ops.aten


@contextmanager
def quiet() -> Iterator[None]:
    """An exporter's notes are about its own inside."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def plain_outputs(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in eval mode, whose outputs are tensors, tuples, lists and dicts alone.

    What is none of them, such as a cache of a language model, is left out.
    """
    model = deepcopy(model).cpu().eval()
    forward = model.forward

    @functools.wraps(forward)
    def plain(*arguments: Any, **keywords: Any) -> Any:
        return plain_output(forward(*arguments, **keywords))

    model.__dict__["forward"] = plain
    return model


def plain_output(output: Any) -> Any:
    """What a network gives, without what is no tensor."""
    if isinstance(output, Mapping):
        parts = {str(key): plain_output(value) for key, value in output.items()}
        return {key: value for key, value in parts.items() if value is not None}
    if isinstance(output, (tuple, list)):
        kept = [value for value in map(plain_output, output) if value is not None]
        return tuple(kept) if isinstance(output, tuple) else kept
    return output if isinstance(output, Tensor) else None


def exported(plain: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """The graph of a network for a batch of any size. plain: by :func:`plain_outputs`. args, kwargs: what it is called
    with, examples first, and more than one of them: a batch of one would be taken for a constant."""
    shapes = tree_map(lambda _: {0: Dim.AUTO}, dict(kwargs) or args)
    with quiet(), torch.no_grad():
        program = torch.export.export(plain, args, dict(kwargs) or None, dynamic_shapes=shapes, strict=False)
    _without_empty(program.graph)
    program.graph_module.recompile()
    return program


def _without_empty(graph: Graph) -> None:
    """Write layers that read nothing as their bias, and drop whatever led to them."""
    for node in list(graph.nodes):
        if node.target is not ATEN.linear.default or node.args[1].meta["val"].shape[1]:
            continue
        with graph.inserting_before(node):
            sizes = [size if isinstance(size, int) else _sized(graph, size) for size in node.meta["val"].shape]
            if len(node.args) > 2 and node.args[2] is not None:
                given = graph.call_function(ATEN.expand.default, (node.args[2], sizes))
            else:
                kind = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
                given = graph.call_function(ATEN.zeros.default, (sizes,), kind)
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _sized(graph: Graph, size: torch.SymInt) -> Node:
    """A size that is known when the network runs, read of the first tensor that has it."""
    tensors = [(node, node.meta["val"]) for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    shapes = ((node, dim, one) for node, value in tensors for dim, one in enumerate(value.shape))
    source, dim = next((node, dim) for node, dim, one in shapes if str(one) == str(size))
    read = graph.call_function(ATEN.sym_size.int, (source, dim))
    read.meta = {"val": size}
    return read


def onnx_file(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str] | None = None, batch: str | None = None
) -> bytes:
    """The graph as ONNX. inputs, outputs: names for its tensors. batch: one for the first dimension of each input."""
    named = None if batch is None else [{0: batch} for _ in inputs]
    with quiet():
        written = torch.onnx.export(
            program, dynamo=True, dynamic_shapes=named, input_names=inputs, output_names=outputs, verbose=False
        )
        assert written is not None
        return bytes(written.model_proto.SerializeToString())
