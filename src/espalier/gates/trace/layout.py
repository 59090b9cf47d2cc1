"""Atoms, every index of every dimension of every parameter and buffer, tied into classes that live or go together; and
layouts: which atoms the indices of an activation stand for, and how views, sums and products carry them on.

A *block* is one array of atoms over one or more dimensions of a tensor. Dimensions in no block are plain: batch, time,
space, and whatever is never cut. A dimension split by a view stays one block over both factors, so that heads, fused
projections and channel shuffles come out right however they are permuted and merged again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(eq=False)
class Atoms:
    """A union-find over integers, kept in growing arrays.

    An atom is one index of one dimension of one tensor, or a free index that no tensor holds (of a tensor made during
    the forward pass). ``tie`` says that two atoms are kept or cut together; ``freeze`` says that a class is always
    kept, and why. ``read`` marks the atoms of an axis over which a layer sums: there a mask acts. ``joined`` marks the
    atoms of a unit made of several slices, such as an attention head; ``normed`` those that a norm's statistics are of.
    """

    parent: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reason: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of a root; -1: not frozen
    tensor: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # -1: a free index
    dim: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    read: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    joined: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    normed: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    reasons: list[str] = field(default_factory=list)
    count: int = 0

    def new(self, count: int, tensor: int = -1, dim: int = -1) -> Array:
        """``count`` fresh atoms, the indices of one dimension of tensor number ``tensor``."""
        start, self.count = self.count, self.count + count
        while len(self.parent) < self.count:
            grown = max(1024, len(self.parent))
            for name in ("parent", "reason", "tensor", "dim", "read", "joined", "normed"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros(grown, dtype=array.dtype)]))
        atoms = np.arange(start, self.count)
        self.parent[atoms], self.reason[atoms] = atoms, -1
        self.tensor[atoms], self.dim[atoms] = tensor, dim
        return atoms

    def roots(self, atoms: Array) -> Array:
        """The representative of each atom's class."""
        roots = self.parent[atoms]
        while True:
            further = self.parent[roots]
            if np.array_equal(further, roots):
                break
            roots = further
        self.parent[atoms] = roots
        return np.asarray(roots)

    def tie(self, a: Array, b: Array) -> None:
        """Atoms at equal places go together (the arrays broadcast)."""
        first, second = np.broadcast_arrays(self.roots(a), self.roots(b))
        differ = first != second
        if not differ.any():
            return
        pairs = np.unique(np.stack([first[differ], second[differ]], axis=1), axis=0)
        left, right = pairs[:, 0], pairs[:, 1]
        ends = np.concatenate([left, right])
        if len(np.unique(ends)) == len(ends):  # disjoint pairs, the usual case: no loop
            self._link(left, right)
            return
        for x, y in pairs:
            p, q = self.roots(np.array([x, y]))
            if p != q:
                self._link(np.array([p]), np.array([q]))

    def _link(self, roots: Array, gone: Array) -> None:
        self.parent[gone] = roots
        self.reason[roots] = np.where(self.reason[roots] < 0, self.reason[gone], self.reason[roots])

    def freeze(self, atoms: Array, why: str) -> None:
        """These classes are always kept; the first reason given stays."""
        roots = self.roots(np.unique(atoms))
        if why not in self.reasons[-1:]:
            self.reasons.append(why)
        live = roots[self.reason[roots] < 0]
        self.reason[live] = len(self.reasons) - 1

    def frozen(self, atoms: Array) -> Array:
        return np.asarray(self.reason[self.roots(atoms)] >= 0)

    def why(self, atom: int) -> str:
        """Why a class is frozen; empty if it is not."""
        number = int(self.reason[self.roots(np.array([atom]))[0]])
        return self.reasons[number] if number >= 0 else ""


@dataclass(frozen=True, eq=False)
class Block:
    """``atoms``: one axis per entry of ``dims``, which ascend."""

    dims: tuple[int, ...]
    atoms: Array


@dataclass(frozen=True, eq=False)
class Layout:
    """The blocks of one tensor of the given shape.

    ``weight``: the number of the parameter that the tensor is, or is a bare view of. ``computed``: it is the result of
    a computation on parameters alone. ``scaled``: what the tensor was just multiplied with, if that is a parameter.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    weight: int = -1
    computed: bool = False
    scaled: Layout | None = None

    def at(self, dim: int) -> Block | None:
        for block in self.blocks:
            if dim in block.dims:
                return block
        return None

    def all(self) -> Array:
        """Every atom of every block, flat."""
        parts = [block.atoms.reshape(-1) for block in self.blocks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def activation(self) -> Layout:
        """The same, no longer a bare view of a parameter."""
        return replace(self, weight=-1, scaled=None)

    def lifted(self, shape: Sequence[int]) -> Layout:
        """The same with dimensions of one index in front, as many as this shape has more."""
        shift = len(shape) - len(self.shape)
        blocks = tuple(Block(tuple(d + shift for d in b.dims), b.atoms) for b in self.blocks)
        return Layout((1,) * shift + self.shape, blocks, self.weight)


class Propagation:
    """The operations on layouts. All ties end up in ``atoms``; ``splits`` are checked when everything is known."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self.splits: list[Array] = []
        self.parts: list[tuple[str, Array]] = []  # of an axis that a module splits or slices
        self.even: set[str] = set()  # grouped convolutions cut evenly inside their groups
        self.heads: set[str] = set()  # torch's own attention modules, which a cut replaces by one that knows its heads
        self.fused: set[str] = set()  # torch's own encoder layers, one kernel while nothing in them has hooks
        self.where = "the model"  # the module now running, for reasons
        self.examples = 0  # the length of the batch
        self.unchecked = False  # nothing is tried out: places written out in code are taken to stay
        self.idle = [-1]  # what no parameter is: numbers of buffers, and that of atoms of no tensor

    def clean(self, shape: Sequence[int], blocks: Iterable[Block], weight: int = -1) -> Layout:
        """A layout without axes of length one, and without axes along which a block does not change."""
        long_blocks = []
        for block in blocks:
            dims, atoms = list(block.dims), block.atoms
            if not atoms.size:
                continue
            for axis in reversed(range(len(dims))):
                long = atoms.shape[axis] > 1
                if long and len(dims) > 1:
                    roots = self.atoms.roots(atoms)
                    long = bool((roots != roots.take([0], axis=axis)).any())
                if not long:
                    atoms = atoms.take(0, axis=axis)
                    del dims[axis]
            if dims:
                order = np.argsort(dims)
                long_blocks.append(Block(tuple(dims[i] for i in order), atoms.transpose(order)))
        return Layout(tuple(shape), tuple(long_blocks), weight)

    def freeze(self, layout: Layout, why: str) -> None:
        if layout.blocks:
            self.atoms.freeze(layout.all(), f"{why} (in {self.where})")

    def mixed(self, layout: Layout, dim: int, why: str) -> Layout:
        """The layout after something that needs the whole of dimension ``dim``.

        A block over other dimensions too keeps those: its slices along ``dim`` now go together (a head). Else frozen.
        """
        block = layout.at(dim)
        if block is None:
            return layout
        others = tuple(b for b in layout.blocks if b is not block)
        if len(block.dims) > 1:
            axis = block.dims.index(dim)
            first = block.atoms.take(0, axis=axis)
            self.atoms.tie(np.expand_dims(first, axis), block.atoms)
            if len(np.unique(self.atoms.roots(first))) > 1:
                self.atoms.joined[block.atoms.reshape(-1)] = True
                rest = Block(tuple(d for d in block.dims if d != dim), first)
                return self.clean(layout.shape, (*others, rest), layout.weight)
        self.atoms.freeze(block.atoms.reshape(-1), f"{why} (in {self.where})")
        return Layout(layout.shape, others, layout.weight)

    def mixed_all(self, layout: Layout, dims: Iterable[int], why: str) -> Layout:
        for dim in dims:
            layout = self.mixed(layout, dim, why)
        return layout

    def only(self, layout: Layout, dim: int, why: str) -> tuple[Layout, Array | None]:
        """The layout with the block at ``dim`` over that dimension alone, and its atoms."""
        block = layout.at(dim)
        while block is not None and len(block.dims) > 1:
            layout = self.mixed(layout, next(d for d in block.dims if d != dim), why)
            block = layout.at(dim)
        return layout, None if block is None else block.atoms

    # ---- layout operations -----------------------------------------------------------------------------------------

    def permuted(self, layout: Layout, order: Sequence[int]) -> Layout:
        return self.renumbered(layout, [layout.shape[d] for d in order], {old: new for new, old in enumerate(order)})

    def renumbered(self, layout: Layout, shape: Sequence[int], place: dict[int, int]) -> Layout:
        """Dimensions moved, and plain ones inserted or removed; ``place``: old to new."""
        blocks = [Block(tuple(place[d] for d in b.dims), b.atoms) for b in layout.blocks]
        return self.clean(shape, blocks, layout.weight)

    def without(self, layout: Layout, dims: Iterable[int]) -> Layout:
        """Plain dimensions taken out."""
        gone = set(dims)
        return self.permuted(layout, [d for d in range(len(layout.shape)) if d not in gone])

    def taken(self, layout: Layout, dim: int, index: Array | slice) -> Layout:
        """Indices taken along a dimension; the caller knows that this stays right after a cut."""
        blocks = []
        for block in layout.blocks:
            if dim in block.dims:
                axis = block.dims.index(dim)
                block = Block(block.dims, block.atoms[(slice(None),) * axis + (index,)])
            blocks.append(block)
        shape = list(layout.shape)
        shape[dim] = len(np.arange(shape[dim])[index])
        return self.clean(shape, blocks, layout.weight)

    def reshaped(self, layout: Layout, shape: Sequence[int]) -> Layout:
        """A view or reshape: blocks are spread over the dimensions they merge with, and split with them."""
        shape = tuple(shape)
        if 0 in layout.shape:
            return Layout(shape, (), layout.weight)
        groups = factor_groups(layout.shape, shape)
        for old, _ in groups:
            layout = self._one_block(layout, old)
        blocks = []
        for block in layout.blocks:
            touched = [(old, new) for old, new in groups if set(old) & set(block.dims)]
            over = [d for old, _ in touched for d in old]
            into = [d for _, new in touched for d in new]
            sizes = [layout.shape[d] if d in block.dims else 1 for d in over]
            atoms = np.broadcast_to(block.atoms.reshape(sizes), [layout.shape[d] for d in over])
            blocks.append(Block(tuple(into), atoms.reshape([shape[d] for d in into])))
        result = self.clean(shape, blocks, layout.weight)
        for block in result.blocks:
            if len(block.dims) > 1:
                self.splits.append(block.atoms)
        return result

    def _one_block(self, layout: Layout, dims: Sequence[int]) -> Layout:
        """At most one block in dimensions about to be merged: an index then stands for one class."""
        while True:
            blocks = [b for b in layout.blocks if set(dims) & set(b.dims)]
            if len(blocks) < 2:
                return layout
            blocks.sort(key=lambda b: self._worth(b, layout.weight >= 0))
            victim = blocks[-1]
            dim = next(d for d in victim.dims if d in dims)
            layout = self.mixed(layout, dim, "merged with another axis by a reshape")

    def _worth(self, block: Block, of_parameter: bool) -> tuple[Any, ...]:
        """Of several blocks about to be merged the last one in this order is given up: one that is frozen already, then
        one of no parameter; of a parameter the axis inside a head, which comes after that of the heads."""
        frozen = bool(self.atoms.frozen(block.atoms).all())
        if of_parameter:
            return (frozen, int(self.atoms.dim[block.atoms].max()))
        return (frozen, bool(np.isin(self.atoms.tensor[block.atoms], self.idle).all()), block.dims)

    def merged(self, layouts: Sequence[Layout], shape: Sequence[int], why: str) -> Layout:
        """The layout of an elementwise operation with broadcasting: equal places are tied."""
        shape = tuple(shape)
        lifted = [self.clean(x.shape, x.blocks) for x in (layout.lifted(shape) for layout in layouts)]
        while self._align(lifted, shape, why):
            pass
        out: dict[tuple[int, ...], Array] = {}
        for layout in lifted:
            for block in layout.blocks:
                if block.dims in out:
                    self.atoms.tie(out[block.dims], block.atoms)
                else:
                    out[block.dims] = block.atoms
        return self.clean(shape, [Block(dims, atoms) for dims, atoms in out.items()])

    def beside(self, atoms: Array | None, vectors: Iterable[Layout], why: str) -> None:
        """Tie vectors of parameters or statistics with the channels they belong to; None: these are fixed, and why."""
        for vector in vectors:
            if atoms is None:
                self.freeze(vector, why)
            else:
                channels = Layout((len(atoms),), (Block((0,), atoms),))
                self.merged([channels, vector], channels.shape, "normalised")

    def _align(self, layouts: list[Layout], shape: tuple[int, ...], why: str) -> bool:
        """One repair of blocks that do not lie exactly over each other; whether there was one."""
        for i, layout in enumerate(layouts):
            for block in layout.blocks:
                for j, other in enumerate(layouts):
                    for dim in block.dims:
                        match = other.at(dim)
                        if match is None and other.shape[dim] == shape[dim] and other is not layout:
                            layouts[i] = self.mixed(layout, dim, f"{why} with a tensor of fixed size")
                            return True
                        if match is None or match.dims == block.dims:
                            continue
                        if set(match.dims) < set(block.dims) and block.dims[0] in match.dims:
                            extra = next(d for d in block.dims if d not in match.dims)
                            layouts[i] = self.mixed(layout, extra, why)
                            return True
                        if set(block.dims) < set(match.dims) and match.dims[0] in block.dims:
                            continue  # when it is the other's turn
                        if match.dims[0] == block.dims[0]:  # heads, of other channels each
                            layouts[i] = self.mixed(layout, next(d for d in block.dims if d not in match.dims), why)
                            return True
                        layouts[i] = self.mixed(layout, dim, f"{why} with a tensor laid out otherwise")
                        layouts[j] = self.mixed(other, dim, f"{why} with a tensor laid out otherwise")
                        return True
        return False

    def settle_splits(self) -> None:
        """Make every split axis rectangular under any mask.

        A split block must depend on one of its axes alone, or different rows would keep different numbers of indices.
        Where nothing decided which, rows are made alike: as many indices go from each, and the view's own arithmetic
        (``C // groups``) stays right.
        """
        changed = True
        while changed:
            changed = False
            for split in self.splits:
                roots = self.atoms.roots(split)
                axes = range(split.ndim)
                if any(depends_only_on(roots, axis) for axis in axes) or bool(self.atoms.frozen(split).all()):
                    continue
                varying = [a for a in axes if bool((roots != roots.take([0], axis=a)).any())]
                first = split.take([0], axis=varying[0])
                self.atoms.tie(first, split)
                changed = True


def depends_only_on(roots: Array, axis: int) -> bool:
    """Whether an array changes along one axis alone."""
    moved = np.moveaxis(roots, axis, 0).reshape(roots.shape[axis], -1)
    return bool((moved == moved[:, :1]).all())


def factor_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The runs of dimensions of two shapes that have equal products: ``([old dims], [new dims])`` each."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = (old[i] if left else 1), (new[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
                left.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                right.append(j - 1)
        groups.append((left, right))
    return groups
