"""One forward pass of the example, watched operation by operation, and the record of what it shows.

The watcher applies the rule of each operation to the layouts of its operands; hooks tell it which module is running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from espalier.compact.apply import named_tensors
from espalier.compact.layers import is_attention
from espalier.gates.gate import Gate, Mixed
from espalier.gates.trace.layout import Atoms, Block, Layout, Propagation
from espalier.gates.trace.rules import RULES, Call, Event, pointwise
from espalier.space import BadInput, BadType, EspalierError


@dataclass(eq=False)
class TensorInfo:
    """One parameter or buffer: its number, every place it is held in, and its own atoms by dimension."""

    number: int
    tensor: Tensor
    places: list[tuple[str, str]]  # (module path, attribute)
    atoms: list[np.ndarray]
    is_parameter: bool
    touched: bool = False

    @property
    def name(self) -> str:
        path, attribute = self.places[0]
        return f"{path}.{attribute}" if path else attribute


class Example(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: Any) -> Example:
        """A tensor, a tuple (positional) or a dict (keyword)."""
        if isinstance(given, Tensor):
            return cls((given,), {})
        if isinstance(given, dict) or hasattr(given, "keys"):
            return cls((), dict(given))
        if isinstance(given, (tuple, list)):
            return cls(tuple(given), {})
        raise BadType(f"example_inputs are a tensor, a tuple or a dict, not {type(given).__name__}")

    @property
    def tensors(self) -> list[Tensor]:
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]

    def each(self, change: Callable[[Tensor], Tensor]) -> Example:
        """The same with another tensor for each; one that is given twice stays one."""
        changed: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        return Example(*tree_map_only(Tensor, once, tuple(self)))

    def copied(self) -> Example:
        """The same with copies, since a model may write into what it is given."""
        return self.each(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))

    @property
    def examples(self) -> int:
        """The length of the batch."""
        return next((len(tensor) for tensor in self.tensors if tensor.ndim), 1)


@dataclass(frozen=True, eq=False)
class Copy:
    """A boundary at which a slice may be left out: ``before`` enters ``module``, ``after`` is what it reads, or, of a
    gate placed by hand, what it gives."""

    module: str
    dim: int
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, eq=False)
class Branch:
    """A residual addition: the module whose output is added, and the layers that ran only for it."""

    module: str
    members: tuple[str, ...]


class Passed(NamedTuple):
    """What a module was given and what it gave, alone or, of a ``length``, in a tuple with None beside it."""

    given: Layout
    result: Layout
    length: int


@dataclass(eq=False)
class Trace:
    """All that one forward pass shows: tied atoms, products, and what modules read."""

    p: Propagation
    tensors: list[TensorInfo]
    events: list[Event] = field(default_factory=list)  # products with parameters
    computed: list[Event] = field(default_factory=list)  # products with tensors computed from parameters
    products: list[Event] = field(default_factory=list)  # products of two activations, as in attention
    entries: dict[str, list[Layout]] = field(default_factory=dict)  # module -> layouts of its first argument
    exits: dict[str, list[Layout]] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    gates: list[Copy] = field(default_factory=list)  # calls of gates placed by hand
    inputs: list[np.ndarray] = field(default_factory=list)  # atoms of input features, when asked for
    unknown: dict[str, set[str]] = field(default_factory=dict)  # operation without a rule -> modules
    calls: dict[str, int] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    norms: dict[str, np.ndarray] = field(default_factory=dict)  # norm whose statistics can be masked -> its channels
    passes: dict[str, Passed] = field(default_factory=dict)  # of modules whose result is made of their input
    order: list[tuple[int, str]] = field(default_factory=list)  # (time, layer) in the order of execution

    @property
    def atoms(self) -> Atoms:
        return self.p.atoms

    def note(self, events: list[Event]) -> None:
        """Products with parameters, with tensors computed from them, and of activations are kept apart."""
        for event in events:
            is_weight, is_computed = event.weight >= 0, event.computed is not None
            (self.events if is_weight else self.computed if is_computed else self.products).append(event)

    def frozen_axes(self) -> dict[str, list[str]]:
        """Why outputs and inputs of layers are always kept: by reason, the axes of weights that it holds."""
        reasons: dict[str, list[str]] = {}
        for number in dict.fromkeys(event.weight for event in self.events):
            info = self.tensors[number]
            for dim, own in enumerate(info.atoms):
                frozen = self.atoms.frozen(own) if len(own) > 1 else np.zeros(1, dtype=bool)
                why = self.atoms.why(int(own[int(np.flatnonzero(frozen)[0])])) if frozen.any() else ""
                if why and not why.startswith("a kernel's extent"):
                    reasons.setdefault(why, []).append(f"{info.name}[{dim}]")
        return reasons


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's result: nested lists, tuples, mappings and dataclasses; caches are not results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "past_key_values":
                yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name))


def collect(model: nn.Module, p: Propagation) -> list[TensorInfo]:
    """Parameters and buffers, tied ones once, with fresh atoms."""
    tensors: dict[int, TensorInfo] = {}
    for full, tensor in named_tensors(model).items():
        path, _, name = full.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        if id(tensor) in tensors:
            tensors[id(tensor)].places.append((path, name))
        elif is_parameter or not name.startswith("espalier_"):
            number = len(tensors)
            atoms = [p.atoms.new(n, number, d) for d, n in enumerate(tensor.shape)]
            tensors[id(tensor)] = TensorInfo(number, tensor, [(path, name)], atoms, is_parameter)
    return list(tensors.values())


# ---- watching -------------------------------------------------------------------------------------------------------


def trace(
    model: nn.Module,
    example: Example,
    *,
    inputs: bool,
    placed: bool,
    even: Collection[str] = (),
    norms: Collection[str] = (),
    unchecked: bool = False,
) -> Trace:
    """Run the model once on the example, in eval mode and without gradients, and see what it does.

    ``inputs``: give the features of floating-point inputs atoms, so that they can be gated. ``placed``: the model holds
    gates placed by hand; then a slice may also be left out where a module reads it (see ``Copy``). ``even``: grouped
    convolutions to cut evenly inside their groups instead of by whole groups. ``norms``: modules whose statistics can
    be masked, so that the axis they are of may be cut. ``unchecked``: what is found is not tried out.
    """
    p, example = Propagation(), example.copied()
    p.even, p.examples, p.unchecked = set(even), example.examples, unchecked
    p.heads = {path for path, module in model.named_modules() if is_attention(module)}
    p.fused = {path for path, module in model.named_modules() if isinstance(module, nn.TransformerEncoderLayer)}
    record = Trace(p, collect(model, p))
    p.idle += [info.number for info in record.tensors if not info.is_parameter]
    watcher = Watcher(record, placed, norms)
    if inputs:
        for tensor in example.tensors:
            if tensor.is_floating_point() and tensor.ndim > 1:
                shape = tuple(tensor.shape)
                atoms = p.atoms.new(int(np.prod(shape[1:])))
                record.inputs.append(atoms)
                watcher.set(tensor, p.clean(shape, [Block(tuple(range(1, len(shape))), atoms.reshape(shape[1:]))]))
    try:
        with _hooked(model, watcher), quiet_kernels(), torch.no_grad(), Leaks(watcher), watcher:
            output = model(*example.args, **example.kwargs)
    except EspalierError:
        raise
    except Exception:
        _refuse_unless_it_runs(model, example.copied())
        raise
    record.branches = watcher.branches_alone()
    p.where = "the model"
    for tensor in tensors_in(output):
        p.freeze(watcher.of(tensor), "reaches the model's output")
    p.settle_splits()
    return record


def _refuse_unless_it_runs(model: nn.Module, example: Example) -> None:
    """After a failure: raise the model's own error if it fails on these inputs unwatched too."""
    try:
        with eval_mode(model), torch.no_grad():
            model(*example.args, **example.kwargs)
    except Exception as error:
        said = " ".join(str(error).split())
        said = said if len(said) <= 300 else said[:300] + " .."
        raise BadInput(f"the model does not run on example_inputs: {type(error).__name__}: {said}") from error


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in train or eval mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards in its own."""
    with modes_kept(model):
        model.eval()
        yield


@contextlib.contextmanager
def values_kept(tensors: Iterable[Tensor], on_failure: bool = False) -> Iterator[None]:
    """Afterwards every tensor, such as a buffer, holds what it held; on_failure: only where what is inside fails."""
    held = [(tensor, tensor.clone()) for tensor in tensors]
    keep = True
    try:
        yield
        keep = not on_failure
    finally:
        with torch.no_grad():
            for tensor, value in held if keep else ():
                tensor.copy_(value)


@contextlib.contextmanager
def quiet_kernels() -> Iterator[None]:
    """Switch fused kernels off, so that operations arrive one by one; afterwards restore the user's settings."""
    fast = torch.backends.mha.get_fastpath_enabled()
    mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)


@contextlib.contextmanager
def _hooked(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Hook every module, so that the watcher knows which one runs, in eval mode; afterwards put all of it back."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(functools.partial(watcher.enter, path), with_kwargs=True))
        handles.append(module.register_forward_hook(functools.partial(watcher.leave, path), with_kwargs=True))
    choices = [module for module in model.modules() if isinstance(module, Mixed)]
    for choice in choices:
        choice.tracing = True
    try:
        with eval_mode(model):
            yield
    finally:
        for choice in choices:
            del choice.tracing
        for handle in handles:
            handle.remove()


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Applies the rule of each operation to the layouts of its operands, and knows which module runs."""

    def __init__(self, trace: Trace, placed: bool, norms: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.placed = trace, placed
        self.norms = set(norms)  # modules whose statistics can be masked
        self.layouts: dict[int, Layout] = {}
        self.alive: list[Tensor] = []  # ids stay unique only while their tensors live
        self.stack: list[str] = []
        self.time = 0
        self.times: dict[int, int] = {}  # tensor -> when it was made
        self.results: dict[int, list[tuple[str, int]]] = {}  # tensor -> modules that returned it, and when they began
        self.began: list[int] = []
        self.given: dict[str, list[int]] = {}  # layer -> the tensors it gave
        self.added: list[int] = []  # the tensor that each branch gives
        self.parents: dict[int, tuple[int, ...]] = {}  # tensor -> the tensors it was made from
        self.paused = False  # inside a hand-placed gate, whose meaning is known
        self.awaited: dict[int, tuple[Tensor, Layout]] = {}  # averaged attention, and what is fixed if it is looked at
        self.numbers = {id(t.tensor): t for t in trace.tensors}
        self.of_parameters: dict[int, bool | None] = {id(t.tensor): t.is_parameter for t in trace.tensors}
        self.sizes = {t.number: t.tensor.numel() for t in trace.tensors}
        for info in trace.tensors:
            blocks = [Block((d,), atoms) for d, atoms in enumerate(info.atoms) if len(atoms) > 1]
            self.set(
                info.tensor, Layout(tuple(info.tensor.shape), tuple(blocks), info.number if info.is_parameter else -1)
            )

    def set(self, tensor: Tensor, layout: Layout) -> None:
        self.layouts[id(tensor)] = layout
        self.alive.append(tensor)

    def of(self, tensor: Tensor) -> Layout:
        info = self.numbers.get(id(tensor))
        if info is not None:
            info.touched = True
        if id(tensor) in self.awaited:
            self.trace.p.freeze(self.awaited.pop(id(tensor))[1], "attention is averaged over the heads")
        layout = self.layouts.get(id(tensor))
        if layout is None:
            layout = Layout(tuple(tensor.shape))
            self.set(tensor, layout)
        return layout

    # ---- modules ----------------------------------------------------------------------------------------------------

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hook before a module runs."""
        record = self.trace
        self.stack.append(path)
        self.began.append(self.time)
        if self._is_layer(path, module):
            record.order.append((self.time, path))
        record.calls[path] = record.calls.get(path, 0) + 1
        if not args or not isinstance(args[0], Tensor):
            return None
        if isinstance(module, Gate) or path in self.norms:
            self.paused = True
            return None
        layout = self.of(args[0])
        inner = self._boundary(path, module, layout) if _is_leaf(module) and len(args) == 1 and not kwargs else None
        record.entries.setdefault(path, []).append(inner or layout)
        if inner is None:
            return None
        tensor = args[0].clone()  # with its gradients, which the model may ask for inside
        self.set(tensor, inner)
        return (tensor,), kwargs

    def _is_layer(self, path: str, module: nn.Module) -> bool:
        """Torch's own attention is one, too: it never calls what it holds."""
        return _is_leaf(module) or path in self.trace.p.heads

    def _boundary(self, path: str, module: nn.Module, layout: Layout) -> Layout | None:
        """Fresh atoms on the axis a leaf module works along, joined to the old ones by a ``Copy``."""
        record, p = self.trace, self.trace.p
        if not layout.blocks or layout.weight >= 0:
            return None
        if not self.placed:
            mine = np.concatenate(record.inputs) if record.inputs else np.zeros(0, dtype=np.int64)
            if not np.isin(layout.all(), mine).all():
                return None
        if isinstance(module, nn.modules.conv._ConvNd):  # of an input image whole channels can be left out
            layout, _ = p.only(layout, len(layout.shape) - len(module.kernel_size) - 1, "convolved over")
        blocks = []
        for block in layout.blocks:
            if len(block.dims) > 1:
                blocks.append(block)
                continue
            after = p.atoms.new(len(block.atoms))
            record.copies.append(Copy(path, block.dims[0], block.atoms, after))
            blocks.append(Block(block.dims, after))
        return Layout(layout.shape, tuple(blocks))

    def leave(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The hook after a module has run."""
        self.stack.pop()
        began = self.began.pop()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            self.results.setdefault(id(first), []).append((path, began))
        if self._is_layer(path, module):
            self.given.setdefault(path, []).extend(id(tensor) for tensor in tensors_in(output))
        given = args[0] if args else next(iter(kwargs.values()), None)
        alone = not isinstance(output, tuple) or all(item is None for item in output[1:])
        is_block = alone and not _is_leaf(module)
        if is_block and isinstance(first, Tensor) and isinstance(given, Tensor) and self.made(first, given):
            length = len(output) if isinstance(output, tuple) else 0
            self.trace.passes[path] = Passed(self.of(given), self.of(first), length)
        known = self._gated if isinstance(module, Gate) else self._normed if path in self.norms else None
        if known is not None and self.paused:
            self.paused = False
            self.set(output, known(path, module, self.of(args[0])))
        elif isinstance(output, Tensor):
            self.trace.exits.setdefault(path, []).append(self.of(output))

    def _gated(self, path: str, gate: Any, layout: Layout) -> Layout:
        """Behind a hand-placed gate an axis has atoms of its own."""
        p, dim = self.trace.p, gate.dim % len(layout.shape)
        layout, atoms = p.only(layout, dim, "gated along one of its axes")
        if atoms is None:
            atoms = p.atoms.new(layout.shape[dim])
            p.atoms.freeze(atoms, f"a tensor of fixed size (in {path})")
        after = p.atoms.new(len(atoms))
        self.trace.gates.append(Copy(path, gate.dim, atoms, after))
        rest = tuple(b for b in layout.blocks if dim not in b.dims)
        return p.clean(layout.shape, (*rest, Block((dim,), after)))

    def _normed(self, path: str, module: nn.Module, layout: Layout) -> Layout:
        """A norm over the last axis whose statistics can be masked: the channel goes with its scale and shift."""
        p, last, why = self.trace.p, len(layout.shape) - 1, "layer normalisation over the axis"
        p.where = path
        layout, block = layout.activation(), layout.at(last)
        if block is not None and len(block.dims) > 1:  # inside each head: heads are the units
            layout, block = p.mixed(layout, last, why), None
        atoms = None if block is None else block.atoms
        p.beside(atoms, [self.of(parameter) for parameter in module._parameters.values() if parameter is not None], why)
        if atoms is not None:
            p.atoms.tie(self.trace.norms.setdefault(path, atoms), atoms)
            p.atoms.normed[atoms] = True
        return layout

    # ---- operations -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor):
            self.of(args[0])  # known before `transpose_` and the like change the shape under the same tensor
        strides = args[0].stride() if func._schema.name in ("aten::as_strided", "aten::as_strided_") else ()
        out = func(*args, **kwargs)
        if any(tensor.is_nested for tensor in tensors_in(out)):
            where = f"in {self.stack[-1]}" if self.stack and self.stack[-1] else "in the model"
            raise BadInput(f"a nested tensor is made {where}: gates need padded tensors, each axis of one length")
        self.time += 1
        self._note_origin(args, kwargs, out)
        if self.paused:
            self._note_computed(func, args, kwargs, out)
            return out
        if func._schema.name in ("aten::add", "aten::add_"):
            self._note_addition(args)
        module = self.stack[-1] if self.stack else ""
        self.trace.p.where = module or "the model"
        p = self.trace.p
        call = Call(p, func._schema.name, tuple(args), kwargs, out, self.of, self.sizes, module, strides)
        known = RULES.get(call.name) or (pointwise if torch.Tag.pointwise in func.tags else None)
        if call.name == "aten::mean" and module in p.heads:  # as a rule nobody looks at these weights
            self.set(out, Layout(tuple(out.shape)))
            self.awaited[id(out)] = (out, call.x)
        elif known is not None:
            result = known(call)
            for tensor, layout in zip(call.outs, result if isinstance(result, list) else [result]):
                if isinstance(tensor, Tensor):
                    self.set(tensor, layout)
        else:
            self._freeze_all(call)
        if not self._note_computed(func, args, kwargs, out) or _is_layer(call):
            self.trace.note(call.events)
        return out

    def _note_origin(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What a tensor was made from, and when."""
        parents = tuple(id(tensor) for tensor in (*tensors_in(args), *tensors_in(kwargs)))
        for tensor in tensors_in(out):
            self.alive.append(tensor)
            self.parents[id(tensor)] = (*self.parents.get(id(tensor), ()), *parents)
            self.times[id(tensor)] = self.time

    def _note_computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """What depends on parameters (and buffers) alone is as much a weight as they are; whether this does.

        Given to every example, as learned queries are, it is an activation: layers read it.
        """
        given = [self.of_parameters.get(id(t)) for t in (*tensors_in(args), *tensors_in(kwargs))]
        if not given or None in given:
            return False
        if func._schema.name in ("aten::expand", "aten::repeat"):
            before = (0,) * (out.ndim - args[0].ndim) + tuple(args[0].shape)
            spread = [n for d, n in enumerate(out.shape) if before[d] < n or (d == 0 and before[d] == 1)]
            if self.trace.p.examples in spread:
                return False
        for tensor in tensors_in(out):
            if id(tensor) not in self.numbers:
                self.of_parameters[id(tensor)] = any(given)
                layout = self.of(tensor)
                if any(given) and layout.weight < 0:
                    self.set(tensor, replace(layout, computed=True))
        return True

    def _note_addition(self, args: tuple[Any, ...]) -> None:
        """A tensor added to one it was made from: what ran in between and ends in a module's result is a branch."""
        if len(args) < 2 or not all(isinstance(t, Tensor) for t in args[:2]) or args[0].shape != args[1].shape:
            return
        for skip, branch in ((args[0], args[1]), (args[1], args[0])):
            since, until = self.times.get(id(skip), 0), self.times.get(id(branch), 0)
            ends = [path for path, began in self.results.get(id(branch), ()) if began >= since]
            members = tuple(path for time, path in self.trace.order if since <= time < until)
            if since < until and ends and members and self.made(branch, skip):
                self.trace.branches.append(Branch(ends[-1], members))
                self.added.append(id(branch))

    def made(self, of: Tensor, source: Tensor) -> bool:
        """Whether one tensor was computed from another."""
        tensor, origin = id(of), id(source)
        seen, todo = {tensor}, [tensor]
        while todo:
            for parent in self.parents.get(todo.pop(), ()):
                if parent == origin:
                    return True
                if parent not in seen and self.times.get(parent, 0) > self.times.get(origin, 0):
                    seen.add(parent)
                    todo.append(parent)
        return False

    def branches_alone(self) -> list[Branch]:
        """The branches, each with the layers that ran for nothing else: a norm may feed two branches, and a table
        of positions all attention."""
        children: dict[int, list[int]] = {}
        for tensor, parents in self.parents.items():
            for parent in parents:
                children.setdefault(parent, []).append(tensor)

        def alone(path: str, end: int) -> bool:
            seen = set(self.given.get(path, ())) | {end}
            todo = list(seen - {end})
            while todo:
                further = set(children.get(todo.pop(), ())) - seen
                if any(self.times[tensor] > self.times[end] for tensor in further):
                    return False
                seen |= further
                todo += further
            return True

        return [
            replace(branch, members=tuple(path for path in branch.members if alone(path, end)))
            for branch, end in zip(self.trace.branches, self.added, strict=True)
        ]

    def _freeze_all(self, call: Call) -> None:
        operation = call.name.removeprefix("aten::")
        live = [x for x in call.tensors if x.blocks]
        for layout in live:
            self.trace.p.freeze(layout, f"used by `{operation}`, an operation without a rule")
        if live:
            self.trace.unknown.setdefault(operation, set()).add(self.trace.p.where)
        for tensor in tensors_in(call.out):
            self.set(tensor, Layout(tuple(tensor.shape)))
        for tensor in tensors_in(call.args):  # it may have been written in place
            if id(tensor) not in self.numbers:
                self.set(tensor, Layout(tuple(tensor.shape)))


def _is_layer(call: Call) -> bool:
    """Whether a product of parameters and buffers alone is a layer: one matrix, and what is fed to it, as a table of
    positions that becomes a bias of attention. Factors of a weight, and vectors that take its norm, are none."""
    bare = [x for x in call.tensors if x.weight >= 0 and len(x.shape) > 1]
    return len(bare) == 1 and call.events != [] and call.events[0].weight >= 0 and "mv" not in call.name


class Leaks(TorchFunctionMode):
    """Values taken out to Python or NumPy: what happens to them there cannot be seen."""

    OUT = frozenset({"numpy", "tolist", "item", "__array__", "__float__", "__int__", "__bool__", "__dlpack__"})

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.OUT and args and isinstance(args[0], Tensor):
            layout = self.watcher.of(args[0])
            if layout.blocks:
                trace = self.watcher.trace
                trace.p.freeze(layout, f"values taken out to Python by .{name}()")
        return func(*args, **(kwargs or {}))
