"""The watcher: sees every operation of a forward pass, and applies its rule to the layouts of its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.gates import moves as _moves  # noqa: F401  (rules register themselves)
from espalier.gates import products as _products  # noqa: F401
from espalier.gates.layout import Block, Layout
from espalier.gates.record import Branch, Trace, tensors_in
from espalier.gates.rules import RULES, Call, pointwise


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Applies the rule of each operation to the layouts of its operands."""

    def __init__(self, trace: Trace, hand: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.hand = trace, hand
        self.layouts: dict[int, Layout] = {}
        self.alive: list[Tensor] = []  # ids stay unique only while their tensors live
        self.stack: list[str] = []
        self.time = 0
        self.made: dict[int, int] = {}  # tensor -> when it was made
        self.results: dict[int, list[tuple[str, int]]] = {}  # tensor -> modules that returned it, and when they began
        self.began: list[int] = []
        self.parents: dict[int, tuple[int, ...]] = {}  # tensor -> the tensors it was made from
        self.paused = False  # inside a hand-placed gate, whose meaning is known
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
        found = self.layouts.get(id(tensor))
        if found is None:
            found = Layout(tuple(tensor.shape))
            self.set(tensor, found)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor):
            self.of(args[0])  # known before `transpose_` and the like change the shape under the same tensor
        strides = args[0].stride() if func._schema.name in ("aten::as_strided", "aten::as_strided_") else ()
        out = func(*args, **kwargs)
        if self.paused:
            return out
        self.time += 1
        if func._schema.name in ("aten::add", "aten::add_"):
            self._note_addition(args)
        parents = tuple(id(tensor) for tensor in (*tensors_in(args), *tensors_in(kwargs)))
        for tensor in tensors_in(out):
            self.parents[id(tensor)] = (*self.parents.get(id(tensor), ()), *parents)
            self.made[id(tensor)] = self.time
        module = self.stack[-1] if self.stack else ""
        self.trace.p.where = module or "the model"
        p, events = self.trace.p, self.trace.events
        call = Call(p, func._schema.name, tuple(args), kwargs, out, self.of, self.sizes, events, module, strides)
        known = RULES.get(call.name) or (pointwise if torch.Tag.pointwise in func.tags else None)
        before = len(self.trace.events)
        if known is not None:
            result = known(call)
            outs = list(out) if isinstance(out, (tuple, list)) else [out]
            made = list(result) if isinstance(result, (tuple, list)) else [result]
            for tensor, layout in zip(outs, made):
                if isinstance(tensor, Tensor):
                    self.set(tensor, layout if isinstance(layout, Layout) else Layout(tuple(tensor.shape)))
        else:
            self._freeze_all(call)
        if self._note_computed(args, kwargs, out):
            del self.trace.events[before:]  # a computation on parameters is no layer
        self._sort_events(before)
        for event in self.trace.events[before:]:
            self.trace.reads.setdefault(event.weight, set()).add(module)
        return out

    def _sort_events(self, before: int) -> None:
        """Products with parameters, with tensors computed from them, and of activations are kept apart."""
        fresh, self.trace.events[before:] = self.trace.events[before:], []
        for event in fresh:
            if event.weight >= 0:
                self.trace.events.append(event)
            elif event.computed is not None:
                self.trace.computed.append(event)
            else:
                self.trace.products.append(event)

    def _note_computed(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """What depends on parameters (and buffers) alone is as much a weight as they are; whether this does."""
        given = [self.of_parameters.get(id(t)) for t in (*tensors_in(args), *tensors_in(kwargs))]
        if not given or None in given:
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
            since, until = self.made.get(id(skip), 0), self.made.get(id(branch), 0)
            ends = [path for path, began in self.results.get(id(branch), ()) if began >= since]
            members = tuple(path for time, path in self.trace.order if since <= time < until)
            if since < until and ends and members and self._made_from(id(branch), id(skip)):
                self.trace.branches.append(Branch(ends[-1], members))

    def _made_from(self, tensor: int, origin: int) -> bool:
        """Whether one tensor was computed from another."""
        seen, todo = {tensor}, [tensor]
        while todo:
            for parent in self.parents.get(todo.pop(), ()):
                if parent == origin:
                    return True
                if parent not in seen and self.made.get(parent, 0) > self.made.get(origin, 0):
                    seen.add(parent)
                    todo.append(parent)
        return False

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
