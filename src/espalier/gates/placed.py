"""Gates placed by hand: what their slices mean for the layers around them.

A placed gate lets *its* consumer leave a slice out; other consumers may still read it. So, unlike found gates, what
comes after a gate and what comes before it are different classes, and every leaf module is a boundary at which a slice
can be left out by an index selection. A class follows an entry when that entry alone decides whether it is read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.gates.order import positional, segments_of
from espalier.gates.structure import GateGroup, Structure, connected, finish, leads
from espalier.gates.trace import Array, Example, Trace, trace
from espalier.gates.verify import Trial, random_masks
from espalier.space import BadInput


def attach_placed(model: nn.Module, example: Example, check: bool) -> Gated:
    """The handle of a model with hand-placed gates: one group for each, in the order the model holds them."""
    gates = {path: module for path, module in model.named_modules() if isinstance(module, Gate)}
    seen = trace(model, example, inputs=False, placed=True)
    used = {use.module for use in seen.gates}
    for path in gates:
        if path not in used:
            raise BadInput(f"the gate {path!r} is never reached by the example inputs; give others, or remove it")
    _refuse_before_batch_norm(model, seen)
    structure = placed_structure(seen, gates)
    finish(structure, model)
    least = [gate.least for gate in gates.values()]
    groups = connected(structure, structure.groups, _read_alone)
    structure.groups = [g if own is None else replace(g, least=own) for g, own in zip(groups, least, strict=True)]
    structure.__dict__.pop("space", None)  # its `least` changed
    structure.segments = segments_of(seen, positional(model.named_modules(), seen))
    if check:
        trial = Trial(model, example)
        masks = random_masks(structure, None, np.random.default_rng(17), 4)
        problem = trial.disagreement(structure, masks)
        if problem:  # of channels whose order means something that was not seen
            structure.segments = None
            problem = trial.disagreement(structure, masks)
        if problem:
            raise BadInput(_culprit(trial, structure, problem))
    return Gated(model, structure)


def _read_alone(structure: Structure, own: Array) -> bool:
    """Whether what these gates read is read through them alone, as the units of a layer are.

    A layer of connections whose sources others read as well may be emptied.
    """
    sources = [layer for layer in structure.layers if np.isin(own, layer.read_by).any()]
    return bool(sources) and all(np.isin(layer.read_by, own).all() for layer in sources)


def _culprit(trial: Trial, structure: Structure, problem: str) -> str:
    rng = np.random.default_rng(18)
    for group in structure.groups:
        alone = trial.disagreement(structure, random_masks(structure, {group.name}, rng, 2))
        if alone:
            return f"the gate {group.name!r} cannot be compacted exactly: {alone}; place it at a consumer's input"
    return f"these gates cannot be compacted exactly together: {problem}"


def _refuse_before_batch_norm(model: nn.Module, seen: Trace) -> None:
    modules = dict(model.named_modules())
    atoms = seen.atoms
    of_norms = np.zeros(atoms.count, dtype=bool)
    for info in seen.tensors:
        if any(isinstance(modules[path], nn.modules.batchnorm._BatchNorm) for path, _ in info.places):
            for own in info.atoms:
                of_norms[atoms.roots(own)] = True
    for use in seen.gates:
        roots = set(atoms.roots(use.after).tolist())
        direct = bool(of_norms[list(roots)].any())
        for copy in seen.copies:
            if isinstance(modules[copy.module], nn.modules.batchnorm._BatchNorm):
                direct = direct or not roots.isdisjoint(atoms.roots(copy.before).tolist())
        if direct:
            raise BadInput(
                f"the gate {use.module!r} is directly before BatchNorm, where a closed slice would leave the shift of "
                "BatchNorm behind; place it after BatchNorm and activation, where the next layer reads"
            )


def placed_structure(seen: Trace, gates: dict[str, Gate]) -> Structure:
    """Groups, and the entry that each class follows."""
    start, groups, placed = 0, [], {}
    for path, gate in gates.items():
        placed[path] = start + np.repeat(np.arange(gate.bits), gate.sizes)
        groups.append(GateGroup(path or "gate", "placed", tuple(np.zeros(0) for _ in range(gate.bits)), (), (), 0))
        start += gate.bits
    flow = _Flow(seen, placed)
    flow.forward()
    flow.backward()
    structure = Structure(seen, groups, flow.entry, placed=placed)
    structure.groups[:] = [_described(structure, group) for group in groups]
    return structure


def _described(structure: Structure, group: GateGroup) -> GateGroup:
    """The group with the names of the parameter axes that follow it."""
    axes = [axis for axis, _ in structure.along(group)]
    reads = tuple(axis.name for axis in axes if axis.is_read)
    return replace(group, writes=tuple(axis.name for axis in axes if not axis.is_read), reads=reads)


class _Flow:
    """Which class leads to which, at module boundaries and through gates."""

    def __init__(self, seen: Trace, placed: dict[str, np.ndarray]) -> None:
        atoms = seen.atoms
        everything = np.arange(atoms.count)
        roots = atoms.roots(everything)
        real = atoms.tensor[: atoms.count] >= 0
        read = atoms.read[: atoms.count]
        self.entry = np.full(atoms.count, -1)
        self.frozen = {int(r) for r in roots[atoms.reason[roots] >= 0]}
        self.written = {int(r) for r in roots[real & ~read]}  # classes that hold more than what a layer reads
        self.read = {int(r) for r in roots[real & read]}
        self.copies, self.gates = leads(seen, placed)
        self.sources: dict[int, set[tuple[str, int]]] = {}  # class -> what feeds it: ("copy", class), ("gate", entry)
        for a, further in self.copies.items():
            for b in further:
                self.sources.setdefault(b, set()).add(("copy", a))
        self.starts: list[tuple[int, int]] = []
        for use in seen.gates:
            for b, e in zip(atoms.roots(use.after).tolist(), placed[use.module].tolist()):
                self.sources.setdefault(b, set()).add(("gate", e))
                self.starts.append((b, e))

    def forward(self) -> None:
        """What is only ever zero when a gate is closed goes with it, up to the layers that read it."""
        for start, entry in self.starts:
            reached, todo = {start}, [start]
            while todo:
                for further in self.copies.get(todo.pop(), ()):
                    if further not in reached:
                        reached.add(further)
                        todo.append(further)
            if all(self._pure(root, entry, reached) for root in reached):
                self.entry[list(reached)] = entry

    def _pure(self, root: int, entry: int, reached: set[int]) -> bool:
        fed = self.sources.get(root, set())
        alone = all(name == entry if kind == "gate" else name in reached for kind, name in fed)
        return alone and root not in self.frozen and root not in self.written and root not in self.gates

    def backward(self) -> None:
        """What is read through one entry alone follows it."""
        changed = True
        while changed:
            changed = False
            for root in {*self.copies, *self.gates}:
                if self.entry[root] >= 0 or root in self.frozen or root in self.read:
                    continue
                onward = set(self.gates.get(root, ())) | {int(self.entry[r]) for r in self.copies.get(root, ())}
                if len(onward) == 1 and min(onward) >= 0:
                    self.entry[root] = onward.pop()
                    changed = True
