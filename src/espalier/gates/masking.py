"""Applying a mask: on a consumer's input where a hook reaches it, else on its weight; and reading slopes by the gates.

The mask lives in non-persistent buffers of the modules that use it, so it follows ``.to(device)`` and ``deepcopy``, is
no part of ``state_dict``, and changes by ``copy_`` without recompilation. While no mask is set the buffers hold ones,
and a product with one is exact. Masking a layer's weight gives what masking its input gives; while a mask is set it is
done where the weight is the smaller of the two. While slopes are asked for the buffers require gradients, so that the
backward pass leaves there what autograd knows of every gate, open or closed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.gates.gate import MIXED, Gate
from espalier.gates.masked_weights import Places, host_of, mask_weights, put_hooks, unhook
from espalier.gates.norms import NORM, Norm, masked_norm, norm_of
from espalier.gates.one_pass import (
    HELD,
    STATE,
    State,
    Together,
    can_group,
    exchange,
    group_masks,
    has_rule,
    join_batch,
    product,
    restore_layer,
    split_batch,
    state_of,
)
from espalier.gates.structure import Axis, Structure, is_inside, join
from espalier.gates.trace import Array
from espalier.space import BadInput

BUFFER = "espalier_mask"
CHANNELS = "espalier_mask_channels_index"  # on the model: the gate of each channel, where a gate has several
BRANCH, PASS = "espalier_mask_branch", "espalier_mask_pass"  # of a residual branch, of a block that may go
COMPILED = "_compiled_call_impl"  # what ``module.compile()`` leaves, which was traced without gates
EXAMPLES = 32  # an update reads at least so many, where it matters whether weights or inputs are masked


class Spot:
    """One mask buffer: its module, its name, its shape, the entry that each of its values follows (-1: always one),
    and a number for its channel, which tells it from the other channels of that entry."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        buffer: str,
        shape: tuple[int, ...],
        entries: Array,
        numbers: Array | int = 0,
        raw: tuple[tuple[str, str], ...] = (),
        weight: tuple[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.module, self.path, self.buffer, self.shape = model.get_submodule(path), path, buffer, shape
        self.entries, self.numbers, self.width = entries, numbers, len(entries)
        self.weight = weight  # the module's own parameter that may be masked instead, and the mask's shape there
        self.name = join(path, buffer)
        self.raw = raw  # for a masked weight: the places that hold it
        self.raw_names = tuple(join(owner, name) for owner, name in raw)

    def follow(self, own: Array) -> None:
        """own: which channel each value is. It is laid out as plain integers and a tensor, so that ``gated.call``
        traces under ``torch.compile`` without a look at NumPy."""
        first = int(own[0])
        is_run = first >= 0 and np.array_equal(own, np.arange(first, first + len(own)))
        self.run = (first, first + len(own)) if is_run else None  # a stretch of the channels needs no index
        self.index = torch.as_tensor(np.ascontiguousarray(own), dtype=torch.int64)
        self.index_buffer = f"{self.buffer}_index"
        self.aside: Tensor | None = None  # the buffer of one mask, while that of several is in its place

    def value(self, mask: Tensor) -> Tensor:
        """mask: by channels ``(*S, channels)``, on the device of the module. Returns the buffer's value."""
        several = mask.shape[:-1]
        if self.run is not None:
            own = mask[..., self.run[0] : self.run[1]]
            return own if len(self.shape) == 1 else own.reshape((*several, *self.shape))
        extended = torch.cat([mask, torch.ones_like(mask[..., :1])], -1)  # entry -1, the last, is always one
        return extended[..., self.module._buffers[self.index_buffer]].reshape((*several, *self.shape))

    @property
    def held(self) -> Tensor:
        """The buffer."""
        return mask_of(self.module, self.buffer)

    def put_back(self) -> Tensor:
        """The buffer of one mask, in its place again."""
        if self.aside is not None:
            self.module._buffers[self.buffer], self.aside = self.aside.to(self.held.device), None
        return self.held


def mask_of(module: nn.Module, buffer: str = BUFFER) -> Tensor:
    mask = module._buffers[buffer]
    assert mask is not None
    return mask


class Channels:
    """What the gates multiply: a gate on a unit one channel, one on a head, a branch or a block of units several.

    A channel is one slice of what a producer gives, wherever and however often it is read: see ``Structure.spans``.
    The channels of a gate lie side by side, in the order of the gates. ``entries``: the gate of each ``(channels)``.
    ``whole``: gates on all that a branch or block gives. docs/signal.md says why their size is another.
    """

    def __init__(self, entries: Array, d: int, whole: Array, device: torch.device | None = None) -> None:
        self.d, self.count, self.whole = d, len(entries), whole
        self.entries = torch.as_tensor(entries, device=device)
        self.copies: dict[torch.device, Channels] = {}
        self.single = self.count == d  # one for each gate
        counts = np.bincount(entries, minlength=d)
        first, is_whole = np.cumsum(counts) - counts, np.isin(np.arange(d), whole)
        # Gates of a kind and width are added up at once: which gates, where their channels lie (gates, width), and
        # whether their size is the sum.
        self.by_width: list[tuple[Tensor, Tensor, bool]] = []
        for added, width in dict.fromkeys(zip(is_whole.tolist(), counts.tolist())):
            own = np.flatnonzero((counts == width) & (is_whole == added))
            where = torch.as_tensor(first[own, None] + np.arange(width), device=device)
            self.by_width.append((torch.as_tensor(own, device=device), where, added or width == 1))

    def on(self, device: torch.device) -> Channels:
        """The same, its indices on another device, where they are kept."""
        if device == self.entries.device:
            return self
        if device not in self.copies:
            self.copies[device] = Channels(self.entries.cpu().numpy(), self.d, self.whole, device)
        return self.copies[device]

    def of(self, mask: Tensor) -> Tensor:
        """A mask ``(*B, d)`` by channels ``(*B, channels)``; one that is so already as it is."""
        return mask if self.single or mask.shape[-1] == self.count else mask[..., self.entries]

    def sized(self, slopes: Tensor, even: float = 0.0) -> tuple[Tensor, Tensor | None]:
        """What ``search.tell`` takes as slopes and spreads ``(*B, d)``, of the slopes by channels ``(*B, channels)``.

        The slope of a gate is the sum of those by its channels, which cancel. Its size is their norm of the order
        ``1 / (1 - even)``: the sum of their sizes where the penalty pulls at gates by their cost (``even`` 0), the root
        of the sum of their squares where it pulls by the root of it. Of a whole branch or block it is the sum. None
        where every gate has one channel, so that its size is that of its slope.
        """
        if self.single:
            return slopes, None
        totals, sizes = (slopes.new_empty((*slopes.shape[:-1], self.d)) for _ in range(2))
        order = math.inf if even == 1 else 1 / (1 - even)
        for gates, where, added in self.by_width:
            own = slopes[..., where]
            totals[..., gates] = own.sum(-1)
            sizes[..., gates] = torch.linalg.vector_norm(own, 1 if added else order, -1)
        return totals, sizes


class Row:
    """The buffers of one device and type as pieces of one tensor: one copy sets the mask in all of them."""

    def __init__(self, spots: list[Spot], channels: int) -> None:
        self.spots, held = spots, [spot.held.detach() for spot in spots]
        self.values = torch.cat([buffer.reshape(-1) for buffer in held])
        pieces = torch.split(self.values, [buffer.numel() for buffer in held])
        # Leaves, to which gradients can go; what writes into the one tensor counts as a change of all.
        self.buffers = [piece.view(buffer.shape).detach() for piece, buffer in zip(pieces, held)]
        for spot, buffer in zip(spots, self.buffers):
            spot.module._buffers[spot.buffer] = buffer
        index = torch.cat([spot.index for spot in spots])
        self.index = None if torch.equal(index, torch.arange(channels)) else index.to(self.values.device)
        self.always = bool((index < 0).any())  # -1 stands for one

    def is_in_place(self) -> bool:
        """Whether the modules still hold these buffers; ``.to(device)`` gives them others."""
        return all(spot.module._buffers[spot.buffer] is buffer for spot, buffer in zip(self.spots, self.buffers))

    def set(self, mask: Tensor | None, slopes: bool) -> None:
        """mask: by channels ``(channels)``; None: ones. slopes: gradients are to reach the buffers."""
        for buffer in self.buffers:
            buffer.grad = None
            if buffer.requires_grad is not slopes:
                buffer.requires_grad_(slopes)
        if mask is None:
            self.values.fill_(1.0)
            return
        if self.always:
            mask = torch.cat([mask, torch.ones_like(mask[:1])])
        self.values.copy_(mask if self.index is None else mask[self.index])


@dataclass(eq=False)
class Installed:
    """What was added to a model, so that it can be taken away again."""

    model: nn.Module
    channels: Channels
    spots: list[Spot]
    modules: list[nn.Module]  # with a State, and with all buffers and hooks
    together: Together
    fused: dict[nn.Module, Places]  # layers that run as one kernel without hooks: they have theirs under a mask
    tables: dict[torch.device, Tensor] = field(default_factory=dict)  # see readings
    rows: list[Row] = field(default_factory=list)  # see in_rows
    compiled: list[tuple[nn.Module, Any]] = field(default_factory=list)  # modules compiled in place, and by what

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows: buffers that are pieces of one tensor here are so in no other process. A copy of a compiled
        module is not compiled."""
        return {**vars(self), "rows": [], "compiled": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The handle of a copy, which came with it: what the copy's modules know of its masks is what it says."""
        vars(self).update(state)
        self.make_known()

    def make_known(self) -> None:
        """Tell every module whose masks it reads."""
        paths = {module: path for path, module in self.model.named_modules()}
        for module in self.modules:
            module.__dict__[STATE] = State(paths[module], self.together, module)

    def in_rows(self) -> list[Row]:
        """All buffers, those of one device and type together. Laid out anew where a module holds other ones now."""
        if not self.rows or not all(row.is_in_place() for row in self.rows):
            kinds: dict[Any, list[Spot]] = {}
            for spot in self.spots:
                kinds.setdefault((spot.held.device, spot.held.dtype), []).append(spot)
            self.rows = [Row(spots, self.channels.count) for spots in kinds.values()]
        return self.rows

    def readings(self, device: torch.device) -> Tensor:
        """Where the gradients of a channel lie among those of all buffers side by side ``(channels, K)``, K for the one
        that is read most; what is left over points one past the last."""
        if device not in self.tables:
            own = torch.cat([spot.index for spot in self.spots]).numpy()
            order = np.argsort(own, kind="stable")
            order = order[own[order] >= 0]  # the others are always one
            counts = np.bincount(own[order], minlength=self.channels.count)
            table = np.full((len(counts), max(int(counts.max(initial=0)), 1)), len(own))
            table[own[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
            self.tables[device] = torch.as_tensor(table, device=device)
        return self.tables[device]

    @functools.cached_property
    def side_by_side(self) -> bool:
        """Whether the buffers, one after the other, are the channels: each is read once, and all in their order."""
        return torch.equal(torch.cat([spot.index for spot in self.spots]), torch.arange(self.channels.count))

    def remove(self) -> None:
        _strip(self.modules)
        for module, call in self.compiled:
            module.__dict__[COMPILED] = call


def spots_of(model: nn.Module, structure: Structure) -> tuple[list[Spot], Channels]:
    """Where masks act, and on which channels. An entry that nothing reads has a channel too."""
    d, spots = structure.space.d, list(_spots(model, structure))
    whole = np.array([*structure.branches.values(), *structure.blocks.values()])
    entries = np.concatenate([np.arange(d), *(spot.entries for spot in spots)])
    numbers = [np.broadcast_to(spot.numbers, spot.entries.shape) for spot in spots]
    entries[np.unique(entries[d:][entries[d:] >= 0])] = -1  # of the first d those stay that nothing reads
    rows = np.stack([entries, np.concatenate([np.full(d, -1), *numbers])])
    pairs, own = np.unique(rows[:, entries >= 0], axis=1, return_inverse=True)
    index = np.full(len(entries), -1)
    index[entries >= 0] = own.reshape(-1)
    for spot, part in zip(spots, np.split(index[d:], np.cumsum([spot.width for spot in spots])[:-1])):
        spot.follow(part)
    return spots, Channels(pairs[0], d, whole)


def _spots(model: nn.Module, structure: Structure) -> Iterator[Spot]:
    """Hand-placed gates, inputs of single layers, else weights."""
    for path, entries in structure.placed.items():
        # A slice is one channel, as it is to the kernels of ``models.densenet_fast``, which know its slope alone.
        yield Spot(model, path, BUFFER, (len(entries),), entries)
    if structure.placed:
        return
    for path, entries in structure.norms.items():
        if path in structure.trace.norms:  # first: it computes anew what a branch that ends in it then multiplies
            yield Spot(model, path, NORM, (1, len(entries)), entries, structure.channels(structure.trace.norms[path]))
    for buffer, gates in ((PASS, structure.blocks), (BRANCH, structure.branches)):  # a closed branch wins
        for path, entry in gates.items():
            shape = _output_channels(structure, path)
            width = math.prod(shape)
            yield Spot(model, path, buffer, shape, np.full(width, entry), np.arange(width))
    for group in structure.groups:
        if group.kind == "choices":  # what is compared is one option with another, not its channels
            path = group.reads[0].rpartition("options.")[0].removesuffix(".")
            yield Spot(model, path, MIXED, (1, group.size), structure.numbers(group))
    owners = [reader.info.places[0][0] for reader in structure.readers]
    raw = 0
    for reader in structure.readers:
        info, (path, name) = reader.info, reader.info.places[0]
        axis = _input_axis(structure, reader) if owners.count(path) == 1 and len(info.places) == 1 else None
        shape = tuple(-1 if d == reader.dim else 1 for d in range(info.tensor.ndim))
        channels = structure.channels(reader.atoms)
        if axis is not None:
            is_smaller = info.tensor.numel() <= EXAMPLES * math.prod(structure.trace.entries[path][0].shape[1:])
            weight = (name, shape) if is_smaller else None
            yield Spot(model, path, BUFFER, (-1, *(1,) * (-1 - axis)), reader.entries, channels, weight=weight)
        else:
            host = host_of(structure, reader)
            yield Spot(model, host, f"{BUFFER}_{raw}", shape, reader.entries, channels, raw=tuple(info.places))
            raw += 1


def _input_axis(structure: Structure, reader: Axis) -> int | None:
    """The axis of the owner's first argument that it reads with this parameter, from the end; None: no hook reaches."""
    trace = structure.trace
    path = reader.info.places[0][0]
    layouts = trace.entries.get(path, [])
    if path in trace.p.heads:  # it reads keys and values with the same parameter
        return None
    if any(is_inside(path, layer) for layer in trace.p.fused):  # weights reach the fused kernel, hooks rule it out
        return None
    readers = {event.module for event in trace.events if event.weight == reader.info.number}
    if not path or len(layouts) != trace.calls.get(path) or readers != {path}:
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


def _output_channels(structure: Structure, path: str) -> tuple[int, ...]:
    """The shape of one value for each channel of what a module gives; of a single one where channels are not known.

    Behind a norm inside whose channels are not followed, they lie along the last axis that is as long as the norm,
    unless a map has another one as long. Examples are no channels, also where a tensor was made for them.
    """
    layouts, examples = structure.trace.exits.get(path, []), structure.trace.p.examples
    axes = [(layout.shape, block.dims[0]) for layout in layouts for block in layout.blocks if len(block.dims) == 1]
    axes = [(shape, dim) for shape, dim in axes if dim > 0 or shape[0] != examples]
    if len(layouts) == 1 and not axes:
        norms = [module for name, module in structure.modules.items() if is_inside(name, path) and norm_of(module)]
        lengths = {parameter.numel() for norm in norms for parameter in norm.parameters(recurse=False)}
        shape = layouts[0].shape
        axes = [(shape, dim) for dim in range(1, len(shape)) if shape[dim] in lengths]
        axes = axes if len(shape) > 3 else axes[-1:]
    if len(axes) != 1:
        return (1,)
    shape, dim = axes[0]
    return (shape[dim], *(1,) * (len(shape) - 1 - dim))


def install(model: nn.Module, structure: Structure) -> Installed:
    """Add buffers and hooks."""
    spots, channels = spots_of(model, structure)
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    for spot in spots:
        own = (p for p in spot.module.parameters(recurse=False) if p.is_floating_point())
        like = reference if spot.raw else next(own, reference)
        new = {} if spot.run is not None else {spot.index_buffer: spot.index.to(like.device)}
        if not isinstance(spot.module, Gate):
            ones = torch.ones(spot.width, dtype=like.dtype, device=like.device)
            new[spot.buffer] = ones if spot.buffer in (NORM, MIXED) else ones.reshape(spot.shape)
            _hook(spot)
        for name, buffer in new.items():
            spot.module.register_buffer(name, buffer, persistent=False)
    if not channels.single:
        model.register_buffer(CHANNELS, channels.entries.to(reference.device), persistent=False)
    hosts, fused = mask_weights(model, structure, [(spot.path, spot.buffer, spot.raw) for spot in spots if spot.raw])
    norms = [norm for norm in model.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm) and has_rule(norm)]
    for norm in norms:
        norm.register_forward_pre_hook(split_batch)
        norm.register_forward_hook(join_batch, prepend=True, always_call=True)
    model.register_forward_pre_hook(_count_examples, with_kwargs=True)
    modules, together = list(dict.fromkeys([model, *(spot.module for spot in spots), *hosts, *norms])), Together()
    installed = Installed(model, channels, spots, modules, together, fused)
    installed.make_known()
    return installed


def _hook(spot: Spot) -> None:
    """What makes a module read its mask; options of a choice, and weights that hooks do not reach, need none here."""
    before, after = spot.module.register_forward_pre_hook, spot.module.register_forward_hook
    changes: dict[str, Change] = {BRANCH: _times, PASS: _between}
    if spot.buffer == NORM:
        kind = norm_of(spot.module)
        assert kind is not None
        changes[NORM] = functools.partial(_normed, kind)
    if spot.buffer in changes:
        after(functools.partial(_mask_output, spot.buffer, changes[spot.buffer]), with_kwargs=True)
    elif spot.weight is not None:
        before(functools.partial(_mask_smaller, *spot.weight), with_kwargs=True)
        if _is_plain(spot.module, *spot.weight):
            after(_restore_plain, prepend=True, with_kwargs=True, always_call=True)
        else:
            after(restore_layer, prepend=True, always_call=True)
    elif spot.buffer == BUFFER:
        before(_mask_input, with_kwargs=True)


def _count_examples(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    together = state_of(module).together
    if torch.compiler.is_compiling():
        bool(together.slopes)  # looked at by torch before each call, as the masks may not be: other code gives slopes
        return
    together.ran, together.bare = True, together.bare or not (together.masked or together.active)
    if together.active:
        together.begin(args, kwargs)


def _product(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    mask = mask.to(x.dtype)
    if not torch.compiler.is_compiling() and state_of(module).together.active:
        return product(module, x, mask)
    if x.is_nested and x.layout == torch.strided:  # as nn.TransformerEncoder packs padded batches in eval mode
        return torch.nested.as_nested_tensor([part * mask for part in x.unbind()])
    return x * mask


def _mask_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = mask_of(module)
    if not torch.compiler.is_compiling():
        together = state_of(module).together
        if together.open.get(id(mask)) is mask and not together.active:  # ones, and no other that a call has brought
            return None
    if args:
        return (_product(module, args[0], mask), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: _product(module, kwargs[name], mask)}


def _mask_smaller(
    name: str, shape: tuple[int, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """While a mask is set: put the masked weight where the parameter is, for the length of one forward pass."""
    if torch.compiler.is_compiling():
        return (args, kwargs) if _is_plain(module, name, shape) else _mask_input(module, args, kwargs)
    together, mask = state_of(module).together, mask_of(module)
    if together.samples and args and can_group(module):
        return (group_masks(module, args[0], mask, shape), *args[1:]), kwargs
    if not together.masked or together.active:
        return _mask_input(module, args, kwargs)
    weight = module._parameters[name]
    assert weight is not None
    exchange(module, [(module._parameters, name, weight * mask.reshape(shape).to(weight.dtype))])
    return args, kwargs


PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _is_plain(module: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a module is one of torch's layers, known as functions of their weight, masked by what it reads."""
    return type(module) in PLAIN and name == "weight" and shape[1] == -1


def _restore_plain(module: Any, args: Any, kwargs: Any, output: Tensor | None) -> Tensor | None:
    """After a layer of torch: its own weight again. In a compiled pass, where no parameter can be exchanged: the layer
    with its masked weight in place of its output, which nobody reads then and which is not computed (see
    ``train.compiling.as_it_is``)."""
    if not torch.compiler.is_compiling():
        return restore_layer(module, args, output)
    x = args[0] if args else next(iter(kwargs.values()))
    weight = module._parameters["weight"]
    masked = weight * mask_of(module).reshape(1, -1, *[1] * (weight.ndim - 2)).to(weight.dtype)
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, masked, module.bias)
    out: Tensor = module._conv_forward(x, masked, module.bias)
    return out


Change = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # of a module, its input, its output, and the mask


def _mask_output(
    buffer: str, change: Change, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """What a module gives, changed by its mask; the first of several tensors."""
    given, mask = args[0] if args else next(iter(kwargs.values())), mask_of(module, buffer)
    first = output[0] if isinstance(output, tuple) else output
    if first.is_nested:
        parts = [change(module, x, y, mask) for x, y in zip(given.unbind(), first.unbind())]
        result = torch.nested.as_nested_tensor(parts)
    else:
        result = change(module, given, first, mask)
    if hasattr(output, "_fields"):  # a tuple with names, by which the model's code reads it
        return output._replace(**{output._fields[0]: result})
    return (result, *output[1:]) if isinstance(output, tuple) else result


def _times(module: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Of a residual branch."""
    return _product(module, y, mask)


def _between(module: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Of a block, which hands its input on when closed: ``m y + (1 - m) x``, so that slopes compare the two."""
    m = mask.to(y.dtype)
    return y * m + x * (1 - m)


def _normed(norm: Norm, module: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """While a mask is set: the norm over the open channels in place of the module's result."""
    if mask.ndim == 1 and not torch.compiler.is_compiling() and not state_of(module).together.masked:
        return y
    return masked_norm(norm, x, mask, module._parameters).to(y.dtype)


def set_mask(installed: Installed, mask: Tensor | None, slopes: bool = False) -> None:
    """Copy a mask ``(d)`` into the buffers; None: ones. slopes: let gradients reach the buffers.

    Masks ``(samples, d)`` are put in the places of the buffers: one for each example, see ``one_pass``.
    """
    together, samples = installed.together, 0 if mask is None or mask.ndim == 1 else len(mask)
    for spot in installed.spots:
        spot.put_back()
    rows = installed.in_rows()
    own: dict[torch.device, Tensor] = {}
    for row in rows:
        device = row.values.device
        if mask is not None and device not in own:
            own[device] = installed.channels.on(device).of(mask.detach().to(device))
        row.set(None if samples else own.get(device), slopes and not samples)
    if samples:
        for spot in installed.spots:
            spot.aside = buffer = spot.held
            value = spot.value(own[buffer.device])
            spot.module._buffers[spot.buffer] = value.to(buffer.dtype).detach().requires_grad_(slopes)
    together.samples, together.examples, together.check = samples, 0, None
    # All open: the weights themselves, since a fresh copy of equal numbers may be multiplied in another order. A mask
    # on a GPU is not looked at, which would wait for it. Of several masks inputs are masked, not weights.
    is_open = mask is None or (not slopes and mask.device.type == "cpu" and not bool((mask != 1).any()))
    together.masked, together.slopes = not is_open and not samples, slopes
    for host, places in installed.fused.items():
        put_hooks(host, places if together.masked else None)
    together.open = {id(buffer): buffer for row in rows for buffer in row.buffers} if is_open else {}


def slopes_of(installed: Installed) -> Tensor:
    """The slopes by channels ``(channels)`` that backward passes have left at the buffers since the mask was set.

    Of several masks ``(samples, channels)``: samples times the derivative of the loss, which is the mean over the
    masks. What several layers read has a slope from each; those of all channels are gathered and added at once.
    """
    samples = installed.together.samples
    gradients = [spot.held.grad for spot in installed.spots]
    first = next((gradient for gradient in gradients if gradient is not None), None)
    if first is None:
        raise BadInput(
            "no backward pass has reached a gate under this mask, so there are no slopes: run the masked model, as "
            "inside the closure, and go backwards from there"
        )
    reached = [g for g in gradients if g is not None and g.device == first.device]
    if not samples and len(reached) == len(gradients) and installed.side_by_side:
        alone = torch.cat([gradient.reshape(-1) for gradient in reached])
        return alone.float() if alone.dtype in (torch.float16, torch.bfloat16) else alone
    dtype = torch.promote_types(first.dtype, torch.float32)
    zeros = torch.zeros(samples or 1, 1, dtype=dtype, device=first.device)
    parts = [
        zeros.expand(-1, spot.width) if gradient is None else gradient.reshape(len(zeros), -1).to(zeros)
        for spot, gradient in zip(installed.spots, gradients)
    ]
    table = installed.readings(first.device)
    read = torch.cat([*parts, zeros], 1).index_select(1, table.flatten())
    total = read.view(len(zeros), *table.shape).sum(-1)
    return total * samples if samples else total[0]


def with_mask(installed: Installed, tensors: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Parameters and buffers for ``functional_call``, under a mask ``(d)``, or one by channels; pure."""
    values = dict(tensors)
    if values:
        mask = mask.to(next(iter(values.values())).device)
    if not installed.channels.single and len(mask) != installed.channels.count:
        mask = mask[installed.model._buffers[CHANNELS]]
    for spot in installed.spots:
        if not spot.raw_names:
            values[spot.name] = spot.value(mask)
            continue
        given = [name for name in spot.raw_names if name in values]
        if not given:
            raise BadInput(f"the mask acts on {spot.raw_names[0]}, which is not among the parameters given")
        weight = values[given[0]]
        masked = weight * spot.value(mask).to(weight.dtype)
        for name in given:
            values[name] = masked
    return values


def strip(model: nn.Module) -> nn.Module:
    """Take every trace of gates off a copy of a gated model; hand-placed gates stay."""
    _strip(model.modules())
    return model


def _strip(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.__dict__.pop(STATE, None)
        module.__dict__.pop(HELD, None)
        unhook(module, OURS)
        own = BUFFER if isinstance(module, Gate) else ""
        if own and mask_of(module).ndim > 1:  # of several masks
            module._buffers[own] = torch.ones_like(mask_of(module)[0])
        for name in [n for n in module._buffers if n.startswith(BUFFER) and n != own]:
            del module._buffers[name]
            module._non_persistent_buffers_set.discard(name)


OURS = (__name__, join_batch.__module__, put_hooks.__module__)  # where hooks of gates are defined


# ---- copies of a gated model -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_afterwards(together: Together) -> Iterator[None]:
    """What is copied inside carries the mask that is set, and none afterwards: no handle reaches a copy, so that it
    would stay masked for good."""
    states = list[State]()
    together.copies.append(states)
    try:
        yield
    finally:
        for state in states:
            module = state.of()
            if module is None or module.__dict__.get(STATE) is not state:
                continue  # it is gone, or has got gates of its own
            for name in filter(is_mask, module._buffers):
                buffer = mask_of(module, name)
                one = buffer[0] if state.together.samples else buffer
                module._buffers[name] = torch.ones_like(one)  # not in place: a backward pass may need the old
        for state in states:
            state.together.samples, state.together.check, state.together.masked = 0, None, False
        together.copies.pop()


def is_mask(name: str) -> bool:
    """Whether a buffer holds a mask, or part of one."""
    return name.startswith(BUFFER) and not name.endswith("_index")
