"""A network as torch.export's graph of plain operations: what is measured, and what ships, without any module of ours.

A layer that a cut leaves nothing to read gives its bias. In the graph it is written as that, so that whatever leads to
it goes as well; onnxruntime refuses tensors without elements. A reader that selects from what was joined, as those of
a DenseNet do, joins what it keeps instead. A mask of attention that no input decides is no mask, or says causal.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from espalier.compact.apply import copied

ATEN = torch.ops.aten


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """An exporter's notes are about its own inside."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # the whole graph, when it fails
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def plain_outputs(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in eval mode, whose outputs are tensors, tuples, lists and dicts alone.

    What is none of them, such as a cache of a language model, is left out.
    """
    model = copied(model).cpu().eval()
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
    if is_dataclass(output) and not isinstance(output, type):
        return plain_output({field.name: getattr(output, field.name) for field in fields(output)})
    return output if isinstance(output, Tensor) else None


def exported(plain: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """The graph of a network for a batch of any size. plain: by :func:`plain_outputs`. args, kwargs: what it is called
    with, examples first, and more than one of them: a batch of one would be taken for a constant."""
    # By tensor, since a forward of *args holds them in a tuple of its own.
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor):  # None, numbers and words are written into the graph
            shapes[leaf] = {0: Dim.AUTO}
    _name_all(plain.forward, kwargs)
    with quiet(), torch.no_grad():
        program = torch.export.export(plain, args, dict(kwargs) or None, dynamic_shapes=shapes, strict=False)
    _without_empty(program.graph)
    _joined_as_read(program)
    _without_known_masks(program)
    program.graph_module.recompile()
    return program


def _name_all(forward: Any, kwargs: Mapping[str, Any]) -> None:
    """Say by name what a forward of **words takes: torch looks for a dict of them among what it is called with."""
    signature = inspect.signature(forward)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    if len(own) < len(signature.parameters):
        names = [name for name in kwargs if name not in {one.name for one in own}]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = signature.replace(parameters=[*own, *more])


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
        _replace(node, given)
    graph.eliminate_dead_code()


def _sized(graph: Graph, size: torch.SymInt) -> Node:
    """A size that is known when the network runs, read of the first tensor that has it."""
    tensors = [(node, node.meta["val"]) for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    shapes = ((node, dim, one) for node, value in tensors for dim, one in enumerate(value.shape))
    source, dim = next((node, dim) for node, dim, one in shapes if str(one) == str(size))
    read = graph.call_function(ATEN.sym_size.int, (source, dim))
    read.meta = {"val": size}
    return read


def _joined_as_read(program: ExportedProgram) -> None:
    """Write what is selected from a concatenation as one of just the slices selected. The concatenations that nothing
    else reads go; one of another is written as one, so that the inner goes as well."""
    graph, buffers = program.graph, program.graph_signature.inputs_to_buffers
    for node in [n for n in graph.nodes if n.target in (ATEN.index_select.default, ATEN.narrow.default)]:
        source, dim, *rest = node.args
        dim %= source.meta["val"].ndim
        parts = _parts(source, dim)
        sizes = [part.meta["val"].shape[dim] for part in parts]
        if not all(isinstance(size, int) for size in sizes):  # known when the network runs
            continue
        if node.target is ATEN.narrow.default and all(isinstance(number, int) for number in rest):
            index = list(range(rest[0], rest[0] + rest[1]))
        elif getattr(rest[0], "name", "") in buffers:
            index = program.state_dict[buffers[rest[0].name]].tolist()
        else:
            continue
        places = [(which, at) for which, size in enumerate(sizes) for at in range(size)]
        pieces = list[list[int]]()  # part, first, end
        for which, at in (places[i] for i in index):
            if pieces and pieces[-1][0] == which and pieces[-1][2] == at:
                pieces[-1][2] += 1
            else:
                pieces.append([which, at, at + 1])
        if len(parts) > 1 and 0 < len(pieces) <= len(parts):  # of more and smaller pieces a gather is faster
            with graph.inserting_before(node):
                taken = [_slice(graph, parts[which], dim, first, end) for which, first, end in pieces]
                _replace(node, taken[0] if len(taken) == 1 else graph.call_function(ATEN.cat.default, (taken, dim)))
    for node in [n for n in graph.nodes if n.target is ATEN.cat.default]:
        node.args = (_parts(node, _dim(node)), _dim(node))
    graph.eliminate_dead_code()


def _dim(joined: Node) -> int:
    """The dimension in which a concatenation joins."""
    _, dim = (*joined.args, 0)[:2]
    return int(dim % joined.meta["val"].ndim)


def _parts(node: Node, dim: int) -> list[Node]:
    """What a tensor is joined of in this dimension: itself where it is not."""
    if node.target is not ATEN.cat.default or _dim(node) != dim:
        return [node]
    return [part for own in node.args[0] for part in _parts(own, dim)]  # type: ignore[union-attr, arg-type]


def _slice(graph: Graph, part: Node, dim: int, first: int, end: int) -> Node:
    value = part.meta["val"]
    if (first, end) == (0, value.shape[dim]):
        return part
    node = graph.call_function(ATEN.slice.Tensor, (part, dim, first, end))
    node.meta = {"val": value.narrow(dim, first, end - first)}
    return node


def _without_known_masks(program: ExportedProgram) -> None:
    """Leave out masks of attention that no input decides and that are open everywhere, or to what came before alone:
    Transformers writes one into every graph. Runtimes would add it, and look for rows in which nothing is open."""
    for node in [n for n in program.graph.nodes if n.target is ATEN.scaled_dot_product_attention.default]:
        query, key, value, *rest = node.args
        words: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, **node.kwargs}
        words |= dict(zip(("attn_mask", "dropout_p", "is_causal"), rest))
        mask = words.pop("attn_mask")
        if mask is None or words["is_causal"] or mask.meta["val"].dtype is not torch.bool:
            continue
        try:
            values = [_known(program, mask, batch, {}) for batch in (2, 3)]
        except _Unknown:
            continue
        if all(one.all() for one in values):
            before = False
        elif all(torch.equal(one, torch.ones_like(one).tril()) for one in values):
            before = True
        else:
            continue
        node.args = (query, key, value, None, words.pop("dropout_p"), words.pop("is_causal") or before)
        node.kwargs = words
    program.graph.eliminate_dead_code()


class _Unknown(Exception):
    """What a node gives depends on what the network is given."""


def _known(program: ExportedProgram, node: Any, batch: int, found: dict[Node, Any]) -> Any:
    """What a node gives where so many examples are given, whatever is in them."""
    if node in found:
        return found[node]
    if node.target is ATEN.sym_size.int:
        size = node.meta["val"]
        if not isinstance(size, int) and not size.node.expr.is_symbol:
            raise _Unknown
        found[node] = size if isinstance(size, int) else batch  # no other size is left open
    elif node.op == "call_function":
        args, words = map_arg((node.args, node.kwargs), lambda one: _known(program, one, batch, found))
        found[node] = node.target(*args, **words)
    else:
        told = program.graph_signature
        kept = (told.inputs_to_lifted_tensor_constants | told.inputs_to_buffers).get(node.name)
        if kept is None or kept in told.buffers_to_mutate.values():
            raise _Unknown
        found[node] = program.constants[kept] if kept in program.constants else program.state_dict[kept]
    return found[node]


def _over_rows(graph: Graph) -> None:
    """Write linear layers over several dimensions as ones over rows: ONNX has a layer with its bias for those alone."""
    for node in [n for n in graph.nodes if n.target is ATEN.linear.default]:
        source, *weights = node.args
        sizes = [one.meta["val"].shape for one in (source, node)]
        if len(sizes[0]) < 3 or not all(isinstance(size, int) and size > 0 for one in sizes for size in one[1:]):
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(ATEN.reshape.default, (source, [-1, sizes[0][-1]]))
            rows.meta = {"val": source.meta["val"].reshape(-1, sizes[0][-1])}
            layer = graph.call_function(ATEN.linear.default, (rows, *weights))
            layer.meta = {"val": node.meta["val"].reshape(-1, sizes[1][-1])}
            _replace(node, graph.call_function(ATEN.reshape.default, (layer, [-1, *sizes[1][1:]])))


def _replace(node: Node, given: Node) -> None:
    if "val" not in given.meta:
        given.meta = dict(node.meta)
    node.replace_all_uses_with(given)
    node.graph.erase_node(node)


def onnx_file(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str] | None = None, batch: str | None = None
) -> bytes:
    """The graph as ONNX, for which it is changed. inputs, outputs: names for its tensors. batch: one for the first
    dimension of each input."""
    _over_rows(program.graph)
    program.graph_module.recompile()
    named = None if batch is None else [{0: batch} for _ in inputs]
    with quiet(), torch.no_grad():  # as above: attention under a mask that asks for a gradient has other strides
        written = torch.onnx.export(
            program, dynamo=True, dynamic_shapes=named, input_names=inputs, output_names=outputs, verbose=False
        )
        assert written is not None
        graph = written.model.graph
        outer = {id(value) for value in (*graph.inputs, *graph.outputs)}
        for value in [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]:
            if id(value) not in outer and value.name in (outputs or ()):  # torch gives outputs their names unseen
                value.name = f"{value.name}.inside"
        return bytes(written.model_proto.SerializeToString())
