"""A network as one Python file of plain torch layers, their widths written out, and its weights beside it.

torch.export gives the graph of operations. An operation on the parameters of one layer is written as that layer, made
in ``__init__``; every other one as a method, a function of torch, or the operation itself. The file needs torch and
safetensors alone, and is checked before it is kept.
"""

from __future__ import annotations

import inspect
import keyword
import math
import operator
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodDescriptorType
from typing import Any

import torch
from safetensors.torch import save as tensors_as_bytes
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_unflatten

from espalier.compact.exported import plain_outputs
from espalier.files import put_in_place, write_beside
from espalier.ship.parity import Checked, NotExported, compare
from espalier.ship.program import TOLERANCE, program_of
from espalier.train import pytree

PYTHON, WEIGHTS = "network.py", "network.safetensors"
END = 2**63 - 1  # torch's word for "to the end" of a slice
TAKEN = {"self", "device", "torch", "nn", "F", "Tensor"}

FUNCTIONAL = {
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "conv1d", "conv2d", "conv3d", "elu", "embedding", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh",
    "leaky_relu", "linear", "log_softmax", "max_pool1d", "max_pool2d", "max_pool3d", "mish", "pad", "relu", "relu6",
    "scaled_dot_product_attention", "silu", "softmax", "softplus",
}  # fmt: skip
INFIX = {
    "add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/", "matmul.default": "@",
    "pow.Tensor_Scalar": "**", "pow.Scalar": "**", "__and__.Tensor": "&", "__or__.Tensor": "|",
    **{f"{name}.{kind}": sign for kind in ("Tensor", "Scalar") for name, sign in
       (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))},
}  # fmt: skip
ARITHMETIC = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.pow: "**",
}  # fmt: skip
PYTHON_METHODS = {"split", "unflatten"}  # methods of torch that are written in Python and read as the operation does
CHECKS = ("_assert", "sym_constrain", "_guards_fn")


@dataclass(frozen=True)
class Layer:
    """One of torch.nn. made: the call that makes it. parts: its tensors by their names in it. call: what it is given.
    nested: whether it gives (a, (b, c)), as the LSTM of torch.nn does, where the operation gives (a, b, c)."""

    made: str
    parts: dict[str, Node]
    call: tuple[Any, ...]
    nested: bool = False


def export(model: nn.Module, inputs: Any, path: str | os.PathLike[str]) -> Checked:
    """Write a Python file, and network.safetensors beside it, and check them.

    inputs: some real examples, as the model takes them. Files that do not compute what the model does are not kept.
    """
    folder, plain = Path(path).parent, plain_outputs(model)
    text, tensors = source(plain, inputs)
    folder.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    try:
        for name, data in ((WEIGHTS, tensors_as_bytes(tensors)), (PYTHON, text.encode())):
            written.append(write_beside(folder / name, data))
        again = _loaded(written[1], written[0])
        checked = compare(lambda given: _run(again, given), plain, inputs, PYTHON, TOLERANCE)
        for partial, name in zip(written, (WEIGHTS, PYTHON), strict=True):
            put_in_place(partial, folder / name)
    finally:
        for partial in written:
            partial.unlink(missing_ok=True)
    return checked


def _run(network: nn.Module, given: Any) -> list[Tensor]:
    named = pytree.named(given)
    return pytree.tensors(network(*pytree.tensors(given)) if named is None else network(**named))


def _loaded(code: Path, weights: Path) -> nn.Module:
    names: dict[str, Any] = {"__name__": Path(PYTHON).stem, "__file__": os.fspath(code)}
    exec(compile(code.read_text(encoding="utf-8"), PYTHON, "exec"), names)
    return names["load"](weights)  # type: ignore[no-any-return]


def source(plain: nn.Module, inputs: Any) -> tuple[str, dict[str, Tensor]]:
    """The text of the file, and the tensors beside it. plain: by :func:`plain_outputs`."""
    writer = Writer(plain, program_of(plain, inputs))
    return writer.text(type(plain).__name__, inputs), writer.tensors


class Writer:
    """Writes the graph of one program."""

    def __init__(self, model: nn.Module, program: ExportedProgram) -> None:
        # the parts of the file: layers and other tensors as `__init__` makes them, and lines of `forward`
        self.made, self.loose, self.forward = dict[str, str](), dict[str, str](), list[str]()
        self.tensors = dict[str, Tensor]()  # what goes beside it
        self.children = {path for path, module in model.named_modules() if next(module.children(), None) is not None}
        graph = program.graph
        _inline(program.graph_module)
        for node in reversed(list(graph.nodes)):
            if node.op not in ("placeholder", "output") and any(part in str(node.target) for part in CHECKS):
                graph.erase_node(node)
            elif (same := _given_back(node)) is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
        graph.eliminate_dead_code()
        self.nodes = list(graph.nodes)
        self.program = program
        self.named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.path: dict[Node, str] = {}  # of a tensor the network holds
        self.value: dict[Node, Tensor] = {}
        self.inputs: list[Node] = []
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                if not isinstance(spec.arg, ConstantArgument):  # written where it is used
                    self.inputs.append(node)
            else:
                self.path[node] = str(spec.target)
                held = program.state_dict if spec.target in program.state_dict else program.constants
                self.value[node] = held[str(spec.target)].detach()
        self.names: dict[Node, str] = {}
        self.taken = set(TAKEN)
        self.layers = self._find_layers()
        for node, (_, layer) in self.layers.items():
            node.args, node.kwargs = (*layer.call, *layer.parts.values()), {}
        graph.eliminate_dead_code()  # what no layer reads, as a first state of zeros
        self.nodes = list(graph.nodes)
        self._name_tensors()
        self.names |= {node: self._fresh(node.name) for node in self.inputs}
        self._write_forward()
        body = "\n".join(self.forward)
        for name in [name for name in self.loose if f"self.{name}" not in body]:  # the index of what is now a view
            del self.loose[name], self.tensors[name]

    # ---- layers and tensors ----------------------------------------------------------------------------------------

    def _find_layers(self) -> dict[Node, tuple[str, Layer]]:
        """Which operations are layers, by the operation: the layer's path, and what it is."""
        found: dict[Node, tuple[str, Layer]] = {}
        made: dict[str, str] = {}
        for node in self.nodes:
            layer = self._layer(node)
            if layer is None or not all(part in self.path for part in layer.parts.values()):
                continue
            owners = {self.path[part].rpartition(".")[0] for part in layer.parts.values()}
            leaves = all(self.path[part].rpartition(".")[2] == name for name, part in layer.parts.items())
            if len(owners) == 1 and leaves and made.setdefault(path := owners.pop(), layer.made) == layer.made:
                found[node] = path, layer
        return found

    def _layer(self, node: Node) -> Layer | None:
        if node.op != "call_function" or str(node.target) not in LAYERS:
            return None
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = {one.name: one.default_value for one in schema}
        given |= {one.name: value for one, value in zip(schema, node.args)} | node.kwargs
        held = next(given[name] for name in ("running_mean", "params", "weight") if name in given)
        tensor = self.value.get(held[0] if isinstance(held, (list, tuple)) else held)
        sized = None if tensor is None else LAYERS[str(node.target)](tensor, given)
        return None if tensor is None or sized is None else _made(*sized, tensor, given)

    def _name_tensors(self) -> None:
        members: dict[str, str] = {}
        used: set[str] = set()
        for path, layer in self.layers.values():
            name = members.setdefault(path, _identifier(path or "layer", used))
            used.add(name)
            if name in self.made:
                continue
            self.made[name] = layer.made
            for part, node in layer.parts.items():
                self.names.setdefault(node, f"self.{name}.{part}")
                self.tensors[f"{name}.{part}"] = self._stored(node)
            counter = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
            if "BatchNorm" in layer.made:
                self.tensors[f"{name}.num_batches_tracked"] = self.named.get(counter, torch.tensor(0)).detach()
        for node, path in self.path.items():
            if node in self.names or not node.users:
                continue
            name = _identifier(path, used)
            used.add(name)
            self.names[node] = f"self.{name}"
            tensor = self.value[node]
            self.tensors[name] = self._stored(node)
            made = f"torch.empty({_literal(tuple(tensor.shape))}{_dtype(tensor)})"
            parameter = isinstance(self.named.get(path), nn.Parameter)
            self.loose[name] = (
                f"self.{name} = nn.Parameter({made})" if parameter else f'self.register_buffer("{name}", {made})'
            )

    def _stored(self, node: Node) -> Tensor:
        return self.value[node].contiguous().clone()

    # ---- the forward pass ------------------------------------------------------------------------------------------

    def _write_forward(self) -> None:
        last = {arg: node for node in self.nodes for arg in node.all_input_nodes}
        held, free, block = set(self.names), list[str](), ""
        for node in self.nodes:
            if node.op == "output":
                self.forward.append(f"return {self._outputs(node)}")
            if node.op in ("output", "placeholder"):
                continue
            expression = self._expression(node)
            # A name is free again after the last use of its value, so that the memory is.
            free += [self.names[arg] for arg in node.all_input_nodes if last[arg] is node and arg not in held]
            if isinstance(node.meta.get("val"), (int, torch.SymInt)):
                held.add(node)
                self.names[node] = self._fresh("n")
            else:
                self.names[node] = min(free, key=lambda name: (len(name), name)) if free else self._fresh("x")
                free = [name for name in free if name != self.names[node]]
            if (now := self._block(node)) != block:
                self.forward.append(f"# {now or 'the network itself'}")
                block = now
            self.forward.append(f"{self.names[node]} = {expression}")

    def _fresh(self, wanted: str) -> str:
        name, count = _identifier(wanted, set()), 1
        while name in self.taken:
            count += 1
            name = f"{wanted}{count}"
        self.taken.add(name)
        return name

    def _block(self, node: Node) -> str:
        """The module whose forward this line is in; of a layer the one that holds it."""
        stack = [str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values()]
        stack = [path for path in stack if path in self.children or path == ""]
        return stack[-1] if stack else ""

    def _outputs(self, node: Node) -> str:
        spec = self.program.call_spec.out_spec
        assert spec is not None
        listed = list(node.args[0])  # type: ignore[arg-type]
        return self._value(tree_unflatten(listed, spec))

    def _value(self, value: Any) -> str:
        """Python for an argument of an operation."""
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._value(one)}" for key, one in value.items()) + "}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return "[" + ", ".join(map(self._value, value)) + "]"
        if isinstance(value, torch.device):
            return "device"
        return _literal(value)

    def _expression(self, node: Node) -> str:
        if node in self.layers:
            layer = self.layers[node][1]
            member = next(self.names[part].rpartition(".")[0] for part in layer.parts.values())
            return f"{member}({', '.join(map(self._value, layer.call))})"
        target, args, keywords = node.target, list(node.args), dict(node.kwargs)
        if target is operator.getitem:
            place = f"[{args[1]}]"
            if args[0] in self.layers and self.layers[args[0]][1].nested and args[1]:  # type: ignore[index]
                place = f"[1][{args[1] - 1}]"  # type: ignore[operator]
            return f"{self._value(args[0])}{place}"
        if target in ARITHMETIC:
            return f"{self._value(args[0])} {ARITHMETIC[target]} {self._value(args[1])}"
        if not isinstance(target, torch._ops.OpOverload):
            return f"torch.{getattr(target, '__name__', target)}({self._given(args, keywords)})"
        name, overload = target._schema.name.rpartition("::")[2], target._overloadname
        if name in FORMS and (text := FORMS[name](self, args, keywords)) is not None:
            return text
        if (sign := INFIX.get(f"{name}.{overload}")) and not keywords and len(args) == 2:
            return f"{self._value(args[0])} {sign} {self._value(args[1])}"
        for key in ("pin_memory", "layout"):
            if keywords.get(key) in (False, None, torch.strided):
                keywords.pop(key, None)
        if name.endswith("_") and name[:-1] in FUNCTIONAL:
            name, keywords = name[:-1], keywords | {"inplace": True}
        if name in FUNCTIONAL:
            return f"F.{name}({self._given(args, keywords)})"
        method = getattr(Tensor, name, None)
        known = isinstance(method, MethodDescriptorType) or name in PYTHON_METHODS
        if known and target._schema.arguments[0].name == "self":
            return f"{self._value(args[0])}.{name}({self._given(args[1:], keywords)})"
        if type(getattr(torch, name, None)).__name__ == "builtin_function_or_method":
            return f"torch.{name}({self._given(args, keywords)})"
        return (
            f"torch.ops.{target._schema.name.replace('::', '.')}.{overload or 'default'}({self._given(args, keywords)})"
        )

    def _given(self, args: list[Any], keywords: dict[str, Any]) -> str:
        return ", ".join([*map(self._value, args), *(f"{key}={self._value(one)}" for key, one in keywords.items())])

    def _at(self, x: Node, dim: int, place: str) -> str:
        """A place, or several, along one dimension."""
        return f"{self._value(x)}[{':, ' * (dim % x.meta['val'].ndim)}{place}]"

    def _slice(self, x: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> str:
        first, last = "" if start in (0, None) else self._value(start), "" if end in (None, END) else self._value(end)
        return self._at(x, dim, f"{first}:{last}{'' if step == 1 else f':{step}'}")

    def _narrow(self, x: Node, dim: int, start: Any, length: Any) -> str | None:
        known = isinstance(start, int) and isinstance(length, int)
        return self._slice(x, dim, start, start + length) if known else None

    def _index_select(self, x: Node, dim: int, index: Node) -> str | None:
        """Slices that lie together are a view: no gather."""
        places = self.value.get(index)
        if places is None or not len(places) or not bool((places.diff() == 1).all()):
            return None
        return self._slice(x, dim, int(places[0]), int(places[-1]) + 1)

    def _to(self, x: Node, given: Sequence[Any]) -> str | None:
        kinds = [one for one in given if isinstance(one, torch.dtype)]
        moved = ["device"] if any(isinstance(one, torch.device) for one in given) else []
        words = [*moved, *map(_literal, kinds[:1])]
        return f"{self._value(x)}.to({', '.join(words)})" if words else None

    # ---- the file --------------------------------------------------------------------------------------------------

    def text(self, title: str, inputs: Any) -> str:
        names = [self.names[node] for node in self.inputs]
        shapes = [(str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for t in pytree.tensors(inputs)]
        described = ", ".join(
            f"{name}: {kind} ({', '.join(map(str, ('batch', *shape)))})" for name, (kind, shape) in zip(names, shapes)
        )
        body = [*self.forward]
        if any("device" in line for line in body):
            body.insert(0, f"device = {names[0]}.device")
        made = [f"self.{name} = {made}" for name, made in self.made.items()] + list(self.loose.values())
        return (
            f'"""{title} as plain torch layers, with its weights in {WEIGHTS}. It needs torch and safetensors.\n\n'
            f"    from {Path(PYTHON).stem} import load\n\n"
            f"    model = load()\n"
            f"    outputs = model({', '.join(names)})  # {described}\n"
            '"""\n\n'
            "from pathlib import Path\n\n"
            "import torch\n"
            "import torch.nn.functional as F\n"
            "from safetensors.torch import load_file\n"
            "from torch import nn\n\n\n"
            "class Network(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n" + _indented(made) + "\n"
            f"    def forward(self, {', '.join(names)}):\n" + _indented(body) + "\n\n"
            f'def load(weights=Path(__file__).with_name("{WEIGHTS}")):\n'
            '    """The network with its weights, in eval mode."""\n'
            "    model = Network()\n"
            "    model.load_state_dict(load_file(weights))\n"
            "    return model.eval()\n"
        )


# By operation how Python says it, from its arguments and those by name; None: as any other operation.
FORMS: dict[str, Callable[[Writer, list[Any], dict[str, Any]], str | None]] = {
    "sym_size": lambda w, args, _: f"{w._value(args[0])}.shape[{args[1]}]",
    "einsum": lambda w, args, _: f"torch.einsum({args[0]!r}, {', '.join(map(w._value, args[1]))})",
    "neg": lambda w, args, _: f"-{w._value(args[0])}",
    "slice": lambda w, args, _: w._slice(*args),
    "narrow": lambda w, args, _: w._narrow(*args),
    "select": lambda w, args, _: w._at(args[0], args[1], w._value(args[2])),
    "index": lambda w, args, _: f"{w._value(args[0])}[{', '.join(':' if i is None else w._value(i) for i in args[1])}]",
    "index_select": lambda w, args, _: w._index_select(*args),
    "dropout": lambda w, args, _: f"F.dropout({w._value(args[0])}, {args[1]!r}, self.training)",
    "dropout_": lambda w, args, _: f"F.dropout({w._value(args[0])}, {args[1]!r}, self.training)",
    "to": lambda w, args, named: w._to(args[0], [*args[1:], *named.values()]),
}


def _inline(module: GraphModule) -> None:
    """Write what runs with autocast switched off as all else is written: without autocast that is the same."""
    for node in [n for n in module.graph.nodes if n.target is torch.ops.higher_order.wrap_with_autocast]:
        _, _, enabled, _, inner, *given = node.args
        if not enabled:
            part = getattr(module, inner.target)
            _inline(part)
            own = dict(zip((n for n in part.graph.nodes if n.op == "placeholder"), given))
            with module.graph.inserting_before(node):
                outputs: Any = module.graph.graph_copy(part.graph, own)
            for user in list(node.users):  # each takes one of them
                user.replace_all_uses_with(outputs[user.args[1]])
                module.graph.erase_node(user)
            module.graph.erase_node(node)
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotExported(
                f"{PYTHON} holds plain operations, and this network has a part that runs by {node.target}: ship it as "
                "pt2 or onnx"
            )


def _given_back(node: Node) -> Node | None:
    """The argument that an operation gives back as it is."""
    name, args = str(node.target), node.args
    whole = name == "aten.slice.Tensor" and len(args) < 5 and (args[2:] or (0, END))[:2] in ((0, END), (None, END))
    dropped = name.startswith("aten.dropout") and args[1] == 0.0
    same = name in ("aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default")
    return args[0] if (whole or dropped or same) and isinstance(args[0], Node) else None


def _indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines) + "\n", " " * 8)


def _identifier(path: str, used: set[str]) -> str:
    """A name of Python for a path of modules, unlike those used and what every module has."""
    name = re.sub(r"\W", "_", path)  # a key of a ModuleDict may hold anything but a point
    name = name if name.isidentifier() else f"layer_{name}"
    while name in used or keyword.iskeyword(name) or hasattr(nn.Module, name):
        name += "_"
    return name


def _literal(value: Any) -> str:
    if isinstance(value, (float, int)) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (torch.Size, tuple)):
        return repr(tuple(value))
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


def _dtype(tensor: Tensor) -> str:
    return "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"


# ---- which operation is which layer ----------------------------------------------------------------------------------


Given = dict[str, Any]  # the arguments of an operation by their names, which a layer mostly has too
Sized = tuple[str, Sequence[Any]]  # a class of torch.nn, and the sizes that it takes first


def _one(values: Any) -> Any:
    """A size for each dimension, as one number where they are equal."""
    if not isinstance(values, (list, tuple)):
        return values
    return values[0] if len(set(values)) == 1 else tuple(values)


def _normalized(given: Given) -> tuple[Any]:
    shape = given["normalized_shape"]
    return (shape[0] if len(shape) == 1 else tuple(shape),)


def _made(name: str, sizes: Sequence[Any], tensor: Tensor, given: Given) -> Layer:
    """The layer of an operation. tensor: one of its own. Options that are its own defaults are left away."""
    recurrent = "params" in given
    signature = inspect.signature(nn.RNNBase if recurrent else getattr(nn, name)).parameters
    usual = {key: one.default for key, one in signature.items()} | ({"nonlinearity": "tanh"} if name == "RNN" else {})
    options = {key: _one(given[key]) for key in [*usual][len(sizes) :] if key in given}
    if not recurrent and "bias" in options:
        options["bias"] = "affine" in options or options["bias"] is not None
    options["dtype"] = None if tensor.dtype == torch.float32 else tensor.dtype
    changed = [f"{key}={_literal(value)}" for key, value in options.items() if value != usual[key]]
    made = f"nn.{name}({', '.join([*map(_literal, sizes), *changed])})"
    if recurrent:
        states = given["hx"] if name == "LSTM" else [given["hx"]]
        call: tuple[Any, ...] = given["input"], tuple(states) if name == "LSTM" else states[0]
        if all(str(state.target) == "aten.zeros.default" for state in states):
            call = call[:1]  # the layer makes zeros of its own, in the type and on the device of its inputs
        return Layer(made, given["params"], call, nested=name == "LSTM")
    parts = {key: given[key] for key in ("weight", "bias", "running_mean", "running_var") if given.get(key) is not None}
    return Layer(made, parts, (next(given[key] for key in ("input", "indices", "self") if key in given),))


def _convolution(weight: Tensor, given: Given) -> Sized | None:
    ends = weight.shape[0], weight.shape[1] * given["groups"]
    word, ends = ("ConvTranspose", ends) if "output_padding" in given else ("Conv", ends[::-1])
    fits = given["input"].meta["val"].ndim == weight.ndim
    return (f"{word}{weight.ndim - 2}d", (*ends, _one(tuple(weight.shape[2:])))) if fits else None


def _batch_norm(mean: Tensor, given: Given) -> Sized | None:
    given["affine"] = given["weight"] is not None
    if given["training"] or given["affine"] != (given["bias"] is not None):
        return None
    return f"BatchNorm{ {2: 1, 3: 1, 4: 2, 5: 3}[given['input'].meta['val'].ndim] }d", (len(mean),)


def _embedding(weight: Tensor, given: Given) -> Sized:
    given["padding_idx"] = None if given["padding_idx"] == -1 else given["padding_idx"]
    return "Embedding", weight.shape


def _recurrent(name: str, weight: Tensor, given: Given, **more: str) -> Sized | None:
    """more: what the operation is called by, and the layer is told."""
    ends = [f"_l{k}{way}" for k in range(given["num_layers"]) for way in ("", "_reverse")[: 1 + given["bidirectional"]]]
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if given["has_biases"] else 2]
    names, weights = [f"{kind}{end}" for end in ends for kind in kinds], given["params"]
    if len(names) != len(weights) or given["input"].meta["val"].ndim != 3:  # projected states have one more
        return None
    given |= {"params": dict(zip(names, weights)), "bias": given["has_biases"], **more}
    return name, (weight.shape[1], weights[1].meta["val"].shape[1])


# By operation: its layer, from a tensor of the network, the first that it has, and its arguments. A function puts there
# what the layer calls otherwise.
LAYERS: dict[str, Callable[[Tensor, Given], Sized | None]] = {
    "aten.linear.default": lambda w, _: ("Linear", w.shape[::-1]) if w.ndim == 2 else None,
    **{f"aten.conv{rank}d.{kind}": _convolution for rank in (1, 2, 3) for kind in ("default", "padding")},
    "aten.conv_transpose1d.default": _convolution,
    "aten.conv_transpose2d.input": _convolution,
    "aten.conv_transpose3d.input": _convolution,
    "aten.batch_norm.default": _batch_norm,
    "aten.layer_norm.default": lambda _, given: ("LayerNorm", _normalized(given)),
    "aten.rms_norm.default": lambda _, given: ("RMSNorm", _normalized(given)),
    "aten.group_norm.default": lambda w, given: ("GroupNorm", (given["num_groups"], len(w))) if given["bias"] else None,
    "aten.embedding.default": _embedding,
    "aten.prelu.default": lambda w, _: ("PReLU", (w.numel(),)),
    "aten.lstm.input": partial(_recurrent, "LSTM"),
    "aten.gru.input": partial(_recurrent, "GRU"),
    "aten.rnn_tanh.input": partial(_recurrent, "RNN"),
    "aten.rnn_relu.input": partial(_recurrent, "RNN", nonlinearity="relu"),
}
