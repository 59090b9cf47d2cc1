"""Atoms: every index of every dimension of every parameter and buffer, tied into classes that live or go together."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    index: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
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
            for name in ("parent", "reason", "tensor", "dim", "index", "read", "joined", "normed"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros(grown, dtype=array.dtype)]))
        atoms = np.arange(start, self.count)
        self.parent[atoms], self.reason[atoms] = atoms, -1
        self.tensor[atoms], self.dim[atoms], self.index[atoms] = tensor, dim, atoms - start
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
