"""The structure of a model: groups of gates, which entry of the mask each index of each tensor follows, and which masks
are canonical: gates that read nothing, or that nothing reads, closed; no group emptier than it may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from espalier.gates.order import Segments
from espalier.gates.trace import Array, TensorInfo, Trace
from espalier.space import Bits, Choice, Space

NORMS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True, eq=False)
class GateGroup:
    """Units of one kind that the same layers write and read."""

    name: str
    kind: str  # units, channels, heads, width, branches, inputs, or placed (by hand)
    units: tuple[Array, ...]  # the class representatives of each unit
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    least: int = 1
    blocks: tuple[int, ...] = ()  # units of each gate; empty: one each

    @property
    def size(self) -> int:
        """Gates."""
        return len(self.units)

    @property
    def widths(self) -> Array:
        """How many units each gate opens."""
        return np.array(self.blocks) if self.blocks else np.ones(self.size, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Layer:
    """One use of a weight in the flow of information: the entries it reads through, and those it is read through.

    A weight used in two ways, as in a tied autoencoder, is two layers.
    """

    weight: int
    summed: frozenset[int]  # the dimensions it sums over
    reads: tuple[Array, ...]  # per axis it sums over: entries, -1 where always read
    read_by: Array  # entries through which its output is read
    anchored: bool  # its output is needed whatever the mask says
    grouped: bool
    inside: tuple[int, ...] = ()  # the entries of the residual branch and of the block it lies in


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension of a parameter or buffer: its atoms, and the entry that each index follows, -1: always kept."""

    info: TensorInfo
    dim: int
    atoms: Array
    entries: Array
    is_read: bool  # a layer sums over it

    @property
    def name(self) -> str:
        return f"{self.info.name}[{self.dim}]"


@dataclass(frozen=True)
class Adapted:
    """An integer attribute that follows a cut: so many per open gate of a group, the length of a tensor's axis, or of a
    part of an axis that a module splits."""

    path: str
    attribute: str
    group: str = ""
    per_unit: int = 0
    tensor: int = -1
    dim: int = -1
    part: int = -1


@dataclass(eq=False)
class Learned:
    """What a trial found out: integers that follow a cut, groups for which, emptied, a unit of zeros stands in, and
    groups on whose width the code between their layers insists, each with the atoms of parameters that stay whole
    there. ``read``: path and name of each attribute that a forward pass looks at, once that was needed."""

    adapted: list[Adapted] = field(default_factory=list)
    phantoms: list[str] = field(default_factory=list)
    padded: dict[str, Array] = field(default_factory=dict)
    read: frozenset[tuple[str, str]] | None = None

    def forget(self, names: Collection[str]) -> None:
        """What was found out about these groups."""
        self.adapted = [item for item in self.adapted if item.group not in names]
        self.padded = {name: own for name, own in self.padded.items() if name not in names}


@dataclass(eq=False)
class Structure:
    """Everything the mask, the cost, the plan and the explanation are made from."""

    trace: Trace
    groups: list[GateGroup]
    entry: Array  # per atom: the entry of the mask it follows, -1: always kept
    layers: list[Layer] = field(default_factory=list)
    placed: dict[str, Array] = field(default_factory=dict)  # hand-placed gate -> entries over its width
    norms: dict[str, Array] = field(default_factory=dict)  # norm without tensors -> entries of its channels
    branches: dict[str, int] = field(default_factory=dict)  # module whose output a branch gate masks -> entry
    members: dict[str, int] = field(default_factory=dict)  # layer that runs only for a branch -> entry
    blocks: dict[str, int] = field(default_factory=dict)  # module that hands its input on when closed -> entry
    options: dict[str, int] = field(default_factory=dict)  # option of a choice -> entry
    sources: set[int] = field(default_factory=set)  # entries that carry information whatever the mask says
    produced: dict[int, set[int]] = field(default_factory=dict)  # entry -> places in `layers` of those that write it
    segments: Segments | None = None  # what a plan may put in another order; None: nothing
    modules: Mapping[str, nn.Module] = field(default_factory=dict)  # the uncut model's, by path
    learned: Learned = field(default_factory=Learned)
    features: dict[int, int] = field(default_factory=dict)  # class of a copy of an input feature -> the feature's

    @functools.cached_property
    def flows(self) -> list[tuple[frozenset[int], frozenset[int], bool, Array]]:
        """Entries by who reads and who writes them: ``(readers, writers, is a source, entries)`` each."""
        readers: dict[int, set[int]] = {}
        for number, layer in enumerate(self.layers):
            for reads in layer.reads:
                for entry in np.unique(reads[reads >= 0]).tolist():
                    readers.setdefault(entry, set()).add(number)
        flows: dict[tuple[frozenset[int], frozenset[int], bool], list[int]] = {}
        for entry in range(self.space.d):
            key = (frozenset(readers.get(entry, ())), frozenset(self.produced.get(entry, ())), entry in self.sources)
            flows.setdefault(key, []).append(entry)
        return [(*key, np.array(entries)) for key, entries in flows.items()]

    @functools.cached_property
    def space(self) -> Space:
        return Space(
            Choice(g.name, g.size) if g.kind == "choices" else Bits(g.name, g.size, g.least) for g in self.groups
        )

    def whole(self) -> Array:
        """The mask ``(d)`` of the model as it is: all gates open, and the first option of every choice."""
        mask = np.ones(self.space.d)
        for _, where in self.space.choices:
            mask[where.start + 1 : where.stop] = 0
        return mask

    @functools.cached_property
    def roots(self) -> Array:
        """The class of every atom."""
        return self.trace.atoms.roots(np.arange(self.trace.atoms.count))

    def flow(self) -> tuple[str, ...]:
        """The names of the groups from the input to the output: in the order in which layers that write them ran."""
        ran = [self.trace.tensors[event.weight].name for event in self.trace.events]

        def place(group: GateGroup) -> int:
            writers = {name.partition("[")[0] for name in group.writes}
            first = (i for i, name in enumerate(ran) if name in writers or name.rpartition(".")[0] in writers)
            return -1 if group.kind == "inputs" else next(first, len(ran))

        return tuple(group.name for group in sorted(self.groups, key=place))

    def where(self, group: GateGroup) -> slice:
        """The entries of a group."""
        return self.space.slices[group.name]

    def numbers(self, group: GateGroup) -> Array:
        """The entries of a group, one by one."""
        return np.arange(self.where(group).start, self.where(group).stop)

    def inside(self, path: str) -> tuple[int, ...]:
        """The entries without which a module does not run at all: of its residual branch, its block, its option."""
        around = (self.members, self.blocks, self.options)
        return tuple(entry for part in around for name, entry in part.items() if is_inside(path, name))

    @functools.cached_property
    def axes(self) -> list[Axis]:
        """Every dimension of every parameter and buffer."""
        read = self.trace.atoms.read
        return [
            Axis(info, dim, own, self.follow(own), bool(read[own].any()))
            for info in self.trace.tensors
            for dim, own in enumerate(info.atoms)
        ]

    @functools.cached_property
    def readers(self) -> list[Axis]:
        """The axes that gates act on, since a layer sums over them; entries are -1 where no gate acts."""
        read = self.trace.atoms.read
        axes = [replace(a, entries=np.where(read[a.atoms], a.entries, -1)) for a in self.axes if a.is_read]
        return [axis for axis in axes if (axis.entries >= 0).any()]

    def along(self, group: GateGroup) -> Iterator[tuple[Axis, Array]]:
        """The axes that a group lies along, and which of their indices are its own."""
        where = self.where(group)
        for axis in self.axes:
            inside = (axis.entries >= where.start) & (axis.entries < where.stop)
            if inside.any():
                yield axis, inside

    def entries(self, tensor: int, dim: int) -> Array:
        """Per index of a tensor's dimension the entry it follows, -1: always kept."""
        return self.follow(self.trace.tensors[tensor].atoms[dim])

    @functools.cached_property
    def spans(self) -> Array:
        """By class of atoms: how many channels it is, as in a head, which goes as a whole. It is as many as it has
        slices where it has fewest: a channel that is flattened into several columns of a layer, or a unit of an LSTM
        with its four rows, is one. So is a feature of the input, which nothing in the model writes."""
        most = np.iinfo(np.int64).max
        spans = np.full(len(self.entry), most)
        for axis in self.axes:
            roots, counts = np.unique(self.trace.atoms.roots(axis.atoms[axis.entries >= 0]), return_counts=True)
            spans[roots] = np.minimum(spans[roots], counts)
        spans[spans == most] = 1
        for group in self.groups:
            if group.kind == "inputs":
                spans[self.trace.atoms.roots(np.concatenate(group.units))] = 1
        return spans

    def channels(self, atoms: Array) -> Array:
        """A number for each index of an axis, the same where it is the same channel; see :class:`Channels`."""
        roots = self.trace.atoms.roots(atoms)
        _, own, counts = np.unique(roots, return_inverse=True, return_counts=True)
        order = np.argsort(own, kind="stable")
        place = np.empty(len(roots), dtype=np.int64)  # among the indices of the same class
        place[order] = np.arange(len(roots)) - np.repeat(np.cumsum(counts) - counts, counts)
        spans, counts = self.spans[roots], counts[own]
        # Queries that share keys and values lie head by head, positions of a channel side by side.
        in_turn = np.isin(self.entry[roots], [n for g in self.groups if g.kind == "heads" for n in self.numbers(g)])
        part = np.where(in_turn, place % spans, place * spans // counts)
        features = np.array([self.features.get(root, root) for root in roots.tolist()], dtype=np.int64)
        return np.asarray(features * int(self.spans.max(initial=1)) + part)

    def follow(self, atoms: Array) -> Array:
        """Per atom the entry of its class; -1 also for what stays whole between layers with zeros between them."""
        entries = np.asarray(self.entry[self.trace.atoms.roots(atoms)])
        whole = [own for own in self.learned.padded.values() if len(own)]
        return np.where(np.isin(atoms, np.concatenate(whole)), -1, entries) if whole else entries


def join(path: str, name: str) -> str:
    """The name of what a module holds; the path of the model itself is empty."""
    return f"{path}.{name}" if path else name


def is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter lies."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def as_array(mask: Tensor) -> Array:
    return np.asarray(mask.detach().to("cpu").double().numpy())


def finish(structure: Structure, model: nn.Module) -> Structure:
    """Fill in what follows from groups and entries: layers, norms."""
    trace = structure.trace
    structure.modules = dict(model.named_modules())
    _layers(structure)
    for path, module in structure.modules.items():
        if isinstance(module, NORMS) and path in trace.entries:
            layout = trace.entries[path][0]
            block = layout.at(1) if len(layout.shape) > 2 or isinstance(module, nn.GroupNorm) else layout.at(0)
            if block is not None and len(block.dims) == 1:
                structure.norms[path] = structure.follow(block.atoms)
    for path, own in trace.norms.items():
        entries = structure.follow(own)
        if (entries >= 0).any():
            structure.norms[path] = entries
            structure.sources |= set(entries[entries >= 0].tolist())  # a shift, and the statistics
    return structure


def _layers(structure: Structure) -> None:
    """Layers, and which of them write each entry."""
    trace = structure.trace
    ways = {(event.weight, event.summed): event.grouped for event in trace.events}
    onward = _onward(structure)
    for (number, summed), is_grouped in ways.items():
        reads, read_by = list[Array](), set[int]()
        atoms = trace.tensors[number].atoms
        written = [dim for dim in range(len(atoms)) if dim not in summed]
        written = [dim for dim in written if len(atoms[dim]) > 1] or written  # a 1 x 1 kernel's extent says nothing
        anchored = not written  # a vector that is summed over: what comes of it has no axis to go
        for dim, own in enumerate(atoms):
            if dim in summed:
                reads.append(structure.entries(number, dim))
            for root in _representatives(structure, own) if dim in written else ():
                through = onward(int(root))
                anchored = anchored or through is None
                read_by |= through or set()
        readers = np.array(sorted(read_by), dtype=np.int64)
        inside = structure.inside(trace.tensors[number].places[0][0])
        for entry in read_by if not is_grouped else ():
            structure.produced.setdefault(entry, set()).add(len(structure.layers))
        structure.layers.append(Layer(number, summed, tuple(reads), readers, anchored, is_grouped, inside))
    _sources(structure, {number for number, _ in ways}, onward)


def _sources(structure: Structure, layers: set[int], onward: Callable[[int], set[int] | None]) -> None:
    """Entries fed by something other than a layer: a table, the model's input."""
    trace = structure.trace
    fed = [own for info in trace.tensors for own in info.atoms if info.tensor.ndim > 1 and info.number not in layers]
    fed += trace.inputs
    for own in fed:
        for root in _representatives(structure, own[~trace.atoms.read[own]]):
            structure.sources |= onward(int(root)) or set()
    for use in trace.gates:
        fixed = trace.atoms.frozen(use.before) & (trace.atoms.tensor[trace.atoms.roots(use.before)] < 0)
        structure.sources |= set(structure.placed[use.module][fixed].tolist())


def _representatives(structure: Structure, atoms: Array) -> Array:
    """Classes of these atoms: each one, or, where entries alone decide, one for each entry and one for none."""
    roots = np.unique(structure.trace.atoms.roots(atoms))
    if structure.trace.copies or structure.trace.gates:
        return roots
    return roots[np.unique(structure.entry[roots], return_index=True)[1]]


def leads(trace: Trace, placed: Mapping[str, Array]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Which classes a class leads to at module boundaries, and the entries of the placed gates that it goes through."""
    further: dict[int, set[int]] = {}
    gated: dict[int, set[int]] = {}
    for copy in trace.copies:
        for a, b in zip(trace.atoms.roots(copy.before).tolist(), trace.atoms.roots(copy.after).tolist()):
            further.setdefault(a, set()).add(b)
    for use in trace.gates:
        for a, entry in zip(trace.atoms.roots(use.before).tolist(), placed[use.module].tolist()):
            gated.setdefault(a, set()).add(entry)
    return further, gated


def _onward(structure: Structure) -> Callable[[int], set[int] | None]:
    """A function from a class to the entries through which it is read; None: it is needed in any case."""
    next_classes, gated = leads(structure.trace, structure.placed)
    cache: dict[int, set[int] | None] = {}

    def onward(root: int) -> set[int] | None:
        if root in cache:
            return cache[root]
        cache[root] = set()
        entries_through: set[int] | None
        if structure.entry[root] >= 0:
            entries_through = {int(structure.entry[root])}
        elif structure.trace.atoms.reason[root] >= 0 or (root not in next_classes and root not in gated):
            entries_through = None
        else:
            entries_through = set(gated.get(root, ()))
            for further in next_classes.get(root, ()):
                through = onward(further)
                if through is None:
                    entries_through = None
                    break
                entries_through |= through
        cache[root] = entries_through
        return entries_through

    return onward


# ---- canonical masks -------------------------------------------------------------------------------------------------


def canonical(structure: Structure, mask: Array) -> Array:
    """mask: ``(d)`` of 0 and 1. Returns the canonical mask ``(d)``.

    A layer all of whose readers are closed is dead, and the gates through which it reads close. A layer that reads
    nothing carries no information, and the gates that read it close. And so on until nothing changes. ``least`` gates
    of a group stay open, the first ones if none is.
    """
    space, opened = structure.space, mask != 0
    fixed = np.zeros_like(opened)  # gates that stay open for the sake of `least`
    for group, where in space.bits:
        lacking = max(group.least - int(opened[where].sum()), 0)
        opened[where.start + np.flatnonzero(~opened[where])[:lacking]] = True
        fixed[where.start + np.flatnonzero(opened[where])[: group.least]] = True
    layers = dict(enumerate(structure.layers))
    while True:
        empty = {n for n, layer in layers.items() if any(all_closed(reads, opened) for reads in layer.reads)}
        dead = {n for n, layer in layers.items() if not layer.anchored and not opened[layer.read_by].any()}
        dead |= {n for n, layer in layers.items() if layer.inside and not opened[list(layer.inside)].all()}
        if not empty and not dead:
            break
        before = int(opened.sum())
        for readers, writers, source, entries in structure.flows:
            unread = bool(readers) and readers <= dead
            silent = bool(writers) and writers <= empty | dead and not source
            if unread or silent:
                opened[entries[~fixed[entries]]] = False
        if int(opened.sum()) == before:
            break
    return np.asarray(opened, dtype=mask.dtype)


def connected(
    structure: Structure, groups: Sequence[GateGroup], only: Callable[[Structure, Array], bool] = lambda *_: True
) -> list[GateGroup]:
    """The groups, with ``least`` 1 where closing a whole one cuts every path from input to output.

    structure: of these groups, without a ``least``. only: whether the gates ``(n)`` of a group come into question.
    """
    result = []
    for group in groups:
        own = structure.numbers(group)
        if group.kind == "choices":
            result.append(group)
            continue
        mask = structure.whole()
        mask[own] = 0
        cut = only(structure, own) and _severed(structure, canonical(structure, mask) != 0)
        result.append(replace(group, least=1) if cut else group)
    return result


def _severed(structure: Structure, opened: Array) -> bool:
    """Whether under a mask ``(d)`` of booleans every layer that the output needs reads nothing."""
    needed = [layer for layer in structure.layers if layer.anchored and not layer.grouped]
    return bool(needed) and all(any(all_closed(reads, opened) for reads in layer.reads) for layer in needed)


def all_closed(entries: Array, opened: Array) -> bool:
    return bool((entries >= 0).all() and not opened[entries].any())
