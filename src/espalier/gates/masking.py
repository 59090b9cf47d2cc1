"""Applying a mask: on a consumer's input where a hook reaches it, else on its weight; and reading slopes by the gates.

The mask lives in non-persistent buffers of the modules that use it, so it follows ``.to(device)`` and ``deepcopy``, is
no part of ``state_dict``, and changes by ``copy_`` without recompilation. While no mask is set the buffers hold ones,
and a product with one is exact. Masking a layer's weight gives what masking its input gives; while a mask is set it is
done where the weight is the smaller of the two. While slopes are asked for the buffers require gradients, so that the
backward pass leaves there what autograd knows of every gate, open or closed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.gates.depth import PASS, mask_pass
from espalier.gates.gate import Gate
from espalier.gates.mixed import MIXED
from espalier.gates.norms import NORM, mask_norm, norm_of
from espalier.gates.one_pass import (
    GROUPS,
    HELD,
    STATE,
    Together,
    can_group,
    group_masks,
    has_rule,
    join_batch,
    join_groups,
    product,
    split_batch,
)
from espalier.gates.structure import Reader, Structure, is_inside
from espalier.gates.trace import Array
from espalier.space import BadInput

BUFFER = "espalier_mask"
MARK = "_espalier_attached"  # on the root
EXAMPLES = 32  # an update reads at least so many, where it matters whether weights or inputs are masked


class Spot:
    """One mask buffer: its module, its name, its shape, and which entry each of its values is (-1: always one).

    All that :meth:`value` needs is laid out here as plain integers and a tensor, so that ``gated.call`` traces under
    ``torch.compile`` without a look at NumPy.
    """

    def __init__(
        self,
        path: str,
        buffer: str,
        shape: tuple[int, ...],
        entries: Array,
        raw: tuple[tuple[str, str], ...] = (),
        weight: tuple[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.path, self.buffer, self.shape = path, buffer, shape
        self.weight = weight  # the module's own parameter that may be masked instead, and the mask's shape there
        self.name = f"{path}.{buffer}" if path else buffer
        self.width = len(entries)
        self.raw = raw  # for a masked weight: the places that hold it
        self.raw_names = tuple(f"{owner}.{name}" if owner else name for owner, name in raw)
        first = int(entries[0])
        is_run = first >= 0 and np.array_equal(entries, np.arange(first, first + len(entries)))
        self.run = (first, first + len(entries)) if is_run else None  # a stretch of the mask needs no index
        self.index = torch.as_tensor(np.ascontiguousarray(entries), dtype=torch.int64)
        self.index_buffer = f"{buffer}_index"

    def value(self, mask: Tensor, module: nn.Module) -> Tensor:
        """mask: ``(*S, d)``, on the device of ``module``, which holds this buffer. Returns the buffer's value."""
        several = mask.shape[:-1]
        if self.run is not None:
            return mask[..., self.run[0] : self.run[1]].reshape((*several, *self.shape))
        extended = torch.cat([mask, torch.ones_like(mask[..., :1])], -1)  # entry -1, the last, is always one
        return extended[..., module._buffers[self.index_buffer]].reshape((*several, *self.shape))


@dataclass(eq=False)
class Installed:
    """What was added to a model, so that it can be taken away again."""

    spots: list[Spot]
    modules: list[nn.Module]  # of each spot
    handles: list[RemovableHandle]
    added: list[tuple[nn.Module, str]]
    states: list[nn.Module]  # modules with a State
    copies: Copies
    together: Together
    aside: list[Tensor] = field(default_factory=list)  # the buffers of one mask, while those of several are set
    tables: dict[torch.device, Tensor] = field(default_factory=dict)  # see readings

    def readings(self, d: int, device: torch.device) -> Tensor:
        """Where the gradients of an entry lie among those of all buffers side by side ``(d, K)``, K for the entry that
        is read most; what is left over points one past the last."""
        if device not in self.tables:
            entries = torch.cat([spot.index for spot in self.spots]).numpy()
            order = np.argsort(entries, kind="stable")
            order = order[entries[order] >= 0]  # the others are always one
            counts = np.bincount(entries[order], minlength=d)
            table = np.full((d, max(int(counts.max(initial=0)), 1)), len(entries))
            table[entries[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
            self.tables[device] = torch.as_tensor(table, device=device)
        return self.tables[device]

    def remove(self) -> None:
        for module in self.states:
            module.__dict__.pop(STATE, None)
        for handle in self.handles:
            handle.remove()
        for module, name in self.added:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)


def spots_of(structure: Structure) -> list[Spot]:
    """Where masks act: hand-placed gates, inputs of single layers, else weights."""
    spots = [Spot(path, BUFFER, (len(entries),), entries) for path, entries in structure.placed.items()]
    if structure.placed:
        return spots
    for path, entry in structure.branches.items():
        spots.append(Spot(path, "espalier_branch", (), np.array([entry])))
    for path, entry in structure.blocks.items():
        spots.append(Spot(path, PASS, (), np.array([entry])))
    for group in structure.groups:
        if group.kind == "choices":
            path = group.reads[0].rpartition("options.")[0].removesuffix(".")
            first = structure.where(group).start
            spots.append(Spot(path, MIXED, (1, group.size), np.arange(first, first + group.size)))
    for path, entries in structure.norms.items():
        if path in structure.trace.norms:
            spots.append(Spot(path, NORM, (1, len(entries)), entries))
    places: dict[str, list[Reader]] = {}
    for reader in structure.readers:
        places.setdefault(structure.trace.tensors[reader.tensor].places[0][0], []).append(reader)
    raw = 0
    for reader in structure.readers:
        info = structure.trace.tensors[reader.tensor]
        path = info.places[0][0]
        axis = _input_axis(structure, reader) if len(places[path]) == 1 and len(info.places) == 1 else None
        if axis is not None:
            weight = _smaller_weight(structure, reader)
            spots.append(Spot(path, BUFFER, (-1, *(1,) * (-1 - axis)), reader.entries, weight=weight))
        else:
            shape = tuple(-1 if d == reader.dim else 1 for d in range(info.tensor.ndim))
            spots.append(Spot("", f"{BUFFER}_{raw}", shape, reader.entries, tuple(info.places)))
            raw += 1
    return spots


def _input_axis(structure: Structure, reader: Reader) -> int | None:
    """The axis of the owner's first argument that it reads with this parameter, from the end; None: no hook reaches."""
    trace = structure.trace
    path = trace.tensors[reader.tensor].places[0][0]
    layouts = trace.entries.get(path, [])
    if path in trace.p.heads:  # it reads keys and values with the same parameter
        return None
    if any(is_inside(path, layer) for layer in trace.p.fused):  # weights reach the fused kernel, hooks rule it out
        return None
    if not path or len(layouts) != trace.calls.get(path) or trace.reads.get(reader.tensor) != {path}:
        return None
    axes = set()
    for layout in layouts:
        fits = [
            block.dims[0] - len(layout.shape)
            for block in layout.blocks
            if len(block.dims) == 1 and np.array_equal(structure.follow(block.atoms), reader.entries)
        ]
        axes.add(fits[0] if len(fits) == 1 else None)
    return axes.pop() if len(axes) == 1 else None


def _smaller_weight(structure: Structure, reader: Reader) -> tuple[str, tuple[int, ...]] | None:
    """The owner's parameter and the mask's shape on it, where it holds fewer numbers than what it is applied to."""
    info = structure.trace.tensors[reader.tensor]
    path, name = info.places[0]
    shape = structure.trace.entries[path][0].shape
    if info.tensor.numel() > EXAMPLES * math.prod(shape[1:]):
        return None
    return name, tuple(-1 if dim == reader.dim else 1 for dim in range(info.tensor.ndim))


def install(model: nn.Module, structure: Structure) -> Installed:
    """Add buffers and hooks."""
    spots = spots_of(structure)
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    modules = [model.get_submodule(spot.path) for spot in spots]
    handles: list[RemovableHandle] = []
    added: list[tuple[nn.Module, str]] = []
    for spot, module in zip(spots, modules):
        if spot.run is None:
            module.register_buffer(spot.index_buffer, spot.index.to(reference.device), persistent=False)
            added.append((module, spot.index_buffer))
        if isinstance(module, Gate):
            continue
        like = reference
        if spot.buffer in (BUFFER, NORM):
            like = next((p for p in module.parameters(recurse=False) if p.is_floating_point()), reference)
        ones = torch.ones(spot.width, dtype=like.dtype, device=like.device)
        ones = ones if spot.buffer in (NORM, MIXED) else ones.reshape(spot.shape)
        module.register_buffer(spot.buffer, ones, persistent=False)
        added.append((module, spot.buffer))
        if spot.buffer == "espalier_branch":
            handles.append(module.register_forward_hook(_mask_output))
        elif spot.buffer == MIXED:
            pass  # the module itself reads its mask
        elif spot.buffer == PASS:
            handles.append(module.register_forward_hook(mask_pass, with_kwargs=True))
        elif spot.buffer == NORM:
            kind = norm_of(module)
            assert kind is not None
            handles.append(module.register_forward_hook(functools.partial(mask_norm, kind), with_kwargs=True))
        elif spot.weight is not None:
            hook = functools.partial(_mask_smaller, *spot.weight)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            handles.append(module.register_forward_hook(_restore_smaller, always_call=True))
            if can_group(module):
                handles.append(module.register_forward_hook(join_groups, prepend=True, always_call=True))
        elif not spot.raw:
            handles.append(module.register_forward_pre_hook(_mask_input, with_kwargs=True))
    raw = [spot for spot in spots if spot.raw]
    if raw:
        places = [(spot.buffer, spot.raw) for spot in raw]
        handles.append(model.register_forward_pre_hook(functools.partial(_mask_weights, places), with_kwargs=True))
        handles.append(model.register_forward_hook(_restore_weights, always_call=True))
    norms = [norm for norm in model.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm) and has_rule(norm)]
    for norm in norms:
        handles.append(norm.register_forward_pre_hook(split_batch))
        handles.append(norm.register_forward_hook(join_batch, prepend=True, always_call=True))
    handles.append(model.register_forward_pre_hook(_count_examples, with_kwargs=True))
    states, copies, together = list(dict.fromkeys([model, *modules, *norms])), Copies(), Together()
    paths = {module: path for path, module in model.named_modules()}
    for module in states:
        module.__dict__[STATE] = State(module, copies, path=paths[module], together=together)
    return Installed(spots, modules, handles, added, states, copies, together)


def _count_examples(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state = module.__dict__[STATE]
    if torch.compiler.is_compiling():
        bool(state.slopes)  # code compiled without gradients at the masks is not for passes that want them: torch may
        return  # not look at the masks again
    together = state.together
    if together.active:
        together.begin(args, kwargs)


def _product(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    mask = mask.to(x.dtype)
    if not torch.compiler.is_compiling() and module.__dict__[STATE].together.active:
        return product(module, x, mask)
    if x.is_nested and x.layout == torch.strided:  # as nn.TransformerEncoder packs padded batches in eval mode
        return torch.nested.as_nested_tensor([part * mask for part in x.unbind()])
    return x * mask


def _mask_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = module._buffers[BUFFER]
    assert mask is not None
    if args:
        return (_product(module, args[0], mask), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: _product(module, kwargs[name], mask)}


def _mask_smaller(
    name: str, shape: tuple[int, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """While a mask is set: put the masked weight where the parameter is, for the length of one forward pass."""
    mask = module._buffers[BUFFER]
    assert mask is not None
    if torch.compiler.is_compiling():  # a compiled step multiplies in passing
        return _mask_input(module, args, kwargs)
    state = module.__dict__[STATE]
    if state.together.samples and args and can_group(module):
        return (group_masks(module, args[0], mask, shape), *args[1:]), kwargs
    if not state.masked or state.together.active:
        return _mask_input(module, args, kwargs)
    weight = module._parameters[name]
    assert weight is not None
    module.__dict__["_espalier_saved"] = ([(module, name, weight)], ())
    module._parameters[name] = weight * mask.reshape(shape).to(weight.dtype)  # type: ignore[assignment]
    return args, kwargs


def _mask_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    mask = module._buffers["espalier_branch"]
    assert mask is not None
    if isinstance(output, tuple):
        return (_product(module, output[0], mask), *output[1:])
    return _product(module, output, mask)


Places = list[tuple[str, tuple[tuple[str, str], ...]]]


def _mask_weights(places: Places, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put masked weights where the parameters are, for the length of one forward pass."""
    saved: list[tuple[nn.Module, str, Tensor]] = []
    masked: dict[tuple[tuple[str, str], ...], Tensor] = {}
    for buffer, held in places if module.__dict__[STATE].masked else ():
        mask = module._buffers[buffer]
        path, name = held[0]
        weight = masked.get(held)
        if weight is None:
            weight = module.get_submodule(path)._parameters[name]
        assert weight is not None
        assert mask is not None
        masked[held] = weight * mask.to(weight.dtype)
    for held, weight in masked.items():
        for path, name in held:
            owner = module.get_submodule(path)
            original = owner._parameters[name]
            assert original is not None
            saved.append((owner, name, original))
            owner._parameters[name] = weight  # type: ignore[assignment]
    flat = []
    for path in dict.fromkeys(path for _, held in places for path, _ in held):
        owner = module.get_submodule(path)
        if isinstance(owner, nn.RNNBase):  # these keep a second list of their weights, which functional_call forgets
            flat.append((owner, owner._flat_weights))
            owner._flat_weights = [owner._parameters[n] for n in owner._flat_weights_names]
    module.__dict__["_espalier_saved"] = (saved, flat)


def _restore_smaller(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():  # there the input was masked
        _restore_weights(module, args, output)


def _restore_weights(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    saved, flat = module.__dict__.pop("_espalier_saved", ((), ()))
    for owner, name, original in saved:
        owner._parameters[name] = original
    for owner, weights in flat:
        owner._flat_weights = weights


def set_mask(model: nn.Module, installed: Installed, mask: Tensor | None, slopes: bool = False) -> None:
    """Copy a mask ``(d)`` into the buffers; None: ones. slopes: let gradients reach the buffers."""
    _put_back(installed)
    own: dict[torch.device, Tensor] = {}
    buffers, values = list[Tensor](), list[Tensor]()
    for spot, module in zip(installed.spots, installed.modules):
        buffer = module._buffers[spot.buffer]
        assert buffer is not None
        buffer.grad = None
        buffer.requires_grad_(False)
        if buffer.device not in own:
            one = torch.ones((), device=buffer.device)
            own[buffer.device] = one if mask is None else mask.detach().to(buffer.device)
        value = own[buffer.device]
        buffers.append(buffer)
        values.append(value.expand_as(buffer) if mask is None else spot.value(value, module).reshape(buffer.shape))
    torch._foreach_copy_(buffers, values)
    for buffer in buffers:
        buffer.requires_grad_(slopes)
    # All open: the weights themselves, since a fresh copy of equal numbers may be multiplied in another order. A mask
    # on a GPU is not looked at, which would wait for it.
    masked = mask is not None and (slopes or mask.device.type != "cpu" or bool((mask != 1).any()))
    for module in installed.states:
        module.__dict__[STATE].masked, module.__dict__[STATE].slopes = masked, slopes


def set_masks(installed: Installed, masks: Tensor, slopes: bool = False) -> None:
    """Put masks ``(samples, d)`` in the places of the buffers: one for each example, see ``one_pass``."""
    _put_back(installed)
    own: dict[torch.device, Tensor] = {}
    for spot, module in zip(installed.spots, installed.modules):
        buffer = module._buffers[spot.buffer]
        assert buffer is not None
        buffer.grad = None
        buffer.requires_grad_(False)
        if buffer.device not in own:
            own[buffer.device] = masks.detach().to(buffer.device)
        installed.aside.append(buffer)
        several = spot.value(own[buffer.device], module).to(buffer.dtype)
        module._buffers[spot.buffer] = several.detach().requires_grad_(slopes)
    installed.together.samples = len(masks)
    for module in installed.states:
        # masked: of what masks weights; here inputs are masked
        module.__dict__[STATE].masked, module.__dict__[STATE].slopes = False, slopes


def _put_back(installed: Installed) -> None:
    """The buffers of one mask in their places again."""
    together = installed.together
    together.samples, together.examples, together.check = 0, 0, None
    for spot, module, buffer in zip(installed.spots, installed.modules, installed.aside):
        several = module._buffers[spot.buffer]
        assert several is not None
        module._buffers[spot.buffer] = buffer.to(several.device)
    installed.aside = []


def slopes_of(installed: Installed, d: int) -> Tensor:
    """The slopes ``(d)`` that backward passes have left at the buffers since the mask was set.

    Of several masks ``(samples, d)``: samples times the derivative of the loss, which is the mean over the masks.
    A gate that several layers read has a slope from each; those of all gates are gathered and added at once.
    """
    samples = installed.together.samples
    buffers = [module._buffers[spot.buffer] for spot, module in zip(installed.spots, installed.modules)]
    first = next((b for b in buffers if b is not None and b.grad is not None), None)
    if first is None:
        raise BadInput(
            "no backward pass has reached a gate under this mask, so there are no slopes: call backward() on a loss of "
            "the masked model before they are read"
        )
    zeros = torch.zeros(samples or 1, 1, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
    parts = [
        zeros.expand(-1, spot.width) if b is None or b.grad is None else b.grad.reshape(len(zeros), -1).to(zeros)
        for spot, b in zip(installed.spots, buffers)
    ]
    total = torch.cat([*parts, zeros], 1)[:, installed.readings(d, first.device)].sum(-1)
    return total * samples if samples else total[0]


def with_mask(installed: Installed, tensors: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Parameters and buffers for ``functional_call``, under a mask ``(d)``; pure."""
    values = dict(tensors)
    if values:
        mask = mask.to(next(iter(values.values())).device)
    for spot, module in zip(installed.spots, installed.modules):
        if not spot.raw_names:
            values[spot.name] = spot.value(mask, module)
            continue
        given = [name for name in spot.raw_names if name in values]
        if not given:
            raise BadInput(f"the mask acts on {spot.raw_names[0]}, which is not among the parameters given")
        weight = values[given[0]]
        masked = weight * spot.value(mask, module).to(weight.dtype)
        for name in given:
            values[name] = masked
    return values


HOOKS = (
    _mask_input, _mask_smaller, _mask_output, _mask_weights, _restore_smaller, _restore_weights, _count_examples,
    mask_norm, mask_pass, split_batch, join_batch, join_groups,
)  # fmt: skip


def strip(model: nn.Module) -> nn.Module:
    """Take every trace of gates off a copy of a gated model; hand-placed gates stay."""
    for name in (MARK, "_espalier_saved"):
        model.__dict__.pop(name, None)
    for module in model.modules():
        module.__dict__.pop(STATE, None)
        module.__dict__.pop(HELD, None)
        module.__dict__.pop(GROUPS, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                function = hook.func if isinstance(hook, functools.partial) else hook
                if function in HOOKS:
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)
        if isinstance(module, Gate):
            if module.espalier_mask.ndim > 1:  # of several masks
                module.espalier_mask = torch.ones_like(module.espalier_mask[0])
        else:
            for name in [n for n in module._buffers if n == "espalier_branch" or n.startswith(BUFFER)]:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
    return model


# ---- copies of a gated model -----------------------------------------------------------------------------------------


class Copies:
    """The copies of a gated model, or of parts of it, that were made while a mask is set; they carry it until it ends.

    No handle reaches a copy, so without this list it would stay masked for good.
    """

    def __init__(self) -> None:
        self.states: list[State] | None = None  # None: no mask is set

    @contextlib.contextmanager
    def opened_afterwards(self) -> Iterator[None]:
        outer, self.states = self.states, []
        try:
            yield
        finally:
            for state in self.states:
                module = state.of()
                if module is None or module.__dict__.get(STATE) is not state:
                    continue  # it is gone, or has got gates of its own
                several, state.masked = state.together.samples, False
                for name in filter(is_mask, module._buffers):
                    buffer = module._buffers[name]
                    assert buffer is not None
                    one = buffer[0] if several else buffer
                    module._buffers[name] = torch.ones_like(one)  # not in place: a backward pass may need the old
            for state in self.states:
                state.together.samples, state.together.check = 0, None
            self.states = outer


class State:
    """Kept beside a module's mask buffers: whether a mask is set, and the list that every copy of the module enters.

    path: of the module. together: of the whole model, the pass under several masks. slopes: gradients reach the masks.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        copies: Copies | None = None,
        masked: bool = False,
        path: str = "",
        together: Together | None = None,
    ) -> None:
        self.of: Callable[[], nn.Module | None] = _nobody if module is None else weakref.ref(module)
        self.copies, self.masked, self.path, self.together = copies or Copies(), masked, path, together or Together()
        self.slopes = False

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        module = memo.get(id(self.of()))  # the copy of the module, which is under way
        state = State(module, self.copies, self.masked, self.path, copy.deepcopy(self.together, memo))
        if self.copies.states is not None:
            self.copies.states.append(state)
        return state

    def __reduce__(self) -> tuple[type[State], tuple[None, None, bool]]:
        return State, (None, None, self.masked)  # in another process it is of nobody


def is_mask(name: str) -> bool:
    """Whether a buffer holds a mask, or part of one."""
    return name == "espalier_branch" or (name.startswith(BUFFER) and not name.endswith("_index"))


class Mark:
    """Says that a model has gates. A copy carries the mark of the original, so that the two can be told apart."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.of: Callable[[], nn.Module | None] = _nobody if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()  # in another process it is of nobody


def _nobody() -> None:
    return None
