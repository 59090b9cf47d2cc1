"""Finding gates by themselves: from tied atoms to groups of units, channels, heads and input features.

Kinds of gates are a table by name, which others may add to: see :func:`register`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from espalier.gates.build_plan import branch_layer
from espalier.gates.gate import Mixed
from espalier.gates.structure import GateGroup, Learned, Structure, is_inside, join
from espalier.gates.trace import Array, Trace
from espalier.gates.trace.layout import Layout
from espalier.space import BadInput, BadType

Member = tuple[int, int, bool]  # tensor, dimension, whether it is read there
NOTHING = np.zeros(0, dtype=np.int64)  # the atoms of a gate that opens no channel
Finder = Callable[[Trace, Mapping[str, nn.Module]], list[GateGroup]]


def register(name: str, finder: Finder) -> None:
    """Add a kind of gates: afterwards ``attach(.., kinds=(name,))`` knows it.

    finder: given what the trace of a model shows and the model's modules by path, returns groups whose ``kind`` is this
    name. Each unit of a group is an array of the classes of atoms (see ``gates/trace/layout.py``) that one gate opens
    and closes; groups of another kind, regrouped, are the shortest way to some. Every group is tried out before it is
    offered.
    """
    if not isinstance(name, str) or not callable(finder):
        raise BadType(f"a kind of gates is a name and a function of a trace and modules, not {name!r} and {finder!r}")
    if KINDS.get(name, finder) is not finder:
        raise BadInput(f"there is a kind of gates {name!r} already; give this one another name")
    KINDS[name] = finder


def find_groups(trace: Trace, kinds: Collection[str], modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """The groups of these kinds: inputs first, then as the model holds them, and those without tensors last."""
    groups = list[GateGroup]()
    owner: dict[int, str] = {}  # of a class of atoms: the kind that gates it
    for finder in dict.fromkeys(KINDS[kind] for kind in kinds):
        for group in finder(trace, modules):
            if KINDS.get(group.kind) is not finder:
                raise BadInput(f"{group.name!r} is of kind {group.kind!r}, and its finder is registered for another")
            if group.kind not in kinds:
                continue
            for root in np.unique(trace.atoms.roots(np.concatenate(group.units))).tolist():
                if owner.setdefault(root, group.kind) != group.kind:
                    both = f"{owner[root]!r} and {group.kind!r}"
                    raise BadInput(f"{group.name!r} would be gated by two kinds, {both}; leave one of them out")
            groups.append(group)

    def place(group: GateGroup) -> tuple[int, int]:
        firsts = [int(unit.min()) for unit in group.units if len(unit)]
        return (0, 0) if group.kind == "inputs" else (1, min(firsts)) if firsts else (2, 0)

    return named(sorted(groups, key=place))


def _tied_groups(trace: Trace, modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """Every live class that some layer sums over, grouped by who writes it and who reads it.

    Grouping by both keeps units of two kinds apart even where one layer reads them side by side.
    """
    atoms = trace.atoms
    roots = atoms.roots(np.arange(atoms.count))
    live = np.flatnonzero((atoms.tensor[: atoms.count] >= 0) & (atoms.reason[roots] < 0))
    rows = np.stack([roots[live], atoms.tensor[live], atoms.dim[live], atoms.read[live]], axis=1)
    members, counts = np.unique(rows, axis=0, return_counts=True)
    by_root: dict[int, list[tuple[Member, int]]] = {}
    for (root, tensor, dim, read), count in zip(members.tolist(), counts.tolist()):
        by_root.setdefault(root, []).append(((tensor, dim, bool(read)), count))
    from_input = _input_classes(trace)
    grouped: dict[tuple[tuple[Member, int], ...], list[int]] = {}
    for root, signature in by_root.items():
        if root not in from_input and {read for (_, _, read), _ in signature} == {True, False}:
            grouped.setdefault(tuple(signature), []).append(root)

    behind_norms = np.concatenate([NOTHING, *map(atoms.roots, trace.norms.values())])
    firsts = np.full(atoms.count, atoms.count)
    np.minimum.at(firsts, roots[live], live)
    groups = []
    for members_of, classes in grouped.items():
        own = [member for member, _ in members_of]
        inside = live[np.isin(roots[live], classes)]
        normed = bool(atoms.normed[inside].any() or np.isin(classes, behind_norms).any())
        units = [np.array([root]) for root in sorted(classes, key=firsts.item)]
        groups.append(_group(trace, own, units, normed, bool(atoms.joined[inside].any())))
    return groups


def _branch_groups(trace: Trace, modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """Residual additions whose branch can be left out whole: one gate each.

    Every module of the branch must run once, hold its tensors alone, and have a stand-in without weights.
    """
    shared = _shared(trace)
    # torch's own layers look at their parts' weights before they run: of these the blocks can go, not a branch
    whole = [
        path for path, m in modules.items() if isinstance(m, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    ]
    shared |= {path for path in modules if any(path.startswith(layer + ".") for layer in whole)}
    groups: list[GateGroup] = []
    taken: set[str] = set()
    for branch in trace.branches:
        held = [path for path in dict.fromkeys(branch.members) if any(True for _ in modules[path].parameters())]
        apart = not any(is_inside(path, layer) for layer in held for path in shared)
        fits = apart and all(trace.calls[path] == 1 for path in held)
        if not held or not fits or trace.calls[branch.module] != 1 or taken & set(held):
            continue
        if trace.p.unchecked and _holds_more(branch.module, held, modules):
            continue
        if any(branch_layer(modules[path], {}) is None for path in held):
            continue
        taken |= set(held)
        groups.append(GateGroup(f"{branch.module}+", "branches", (NOTHING,), tuple(held), (branch.module,), 0))
    return groups


def _holds_more(path: str, layers: Sequence[str], modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module holds parameters beside those of these layers, which may add to what they give."""
    inside = [name for name, module in modules.items() if is_inside(name, path) and module._parameters]
    return any(not any(is_inside(name, layer) for layer in layers) for name in inside)


def _shared(trace: Trace) -> set[str]:
    """Modules that hold a tensor which others hold too."""
    return {path for info in trace.tensors if len(info.places) > 1 for path, _ in info.places}


def _block_groups(trace: Trace, modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """The blocks of every list or sequence of modules that give what they were given in shape: one gate each.

    A block must run once, hold its tensors alone, and give its input's channels. Where blocks hold blocks, the inner
    ones are gated.
    """
    groups, taken, shared = list[GateGroup](), list[str](), _shared(trace)
    for name, container in sorted(modules.items(), key=lambda item: -item[0].count(".") - bool(item[0])):
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        paths = [join(name, child) for child in container._modules]
        paths = [path for path in paths if not any(is_inside(inner, path) for inner in taken)]
        fits = [path for path in paths if _is_block(path, trace, modules, shared)]
        if fits:
            taken += fits
            groups.append(GateGroup(name or "blocks", "blocks", (NOTHING,) * len(fits), (), tuple(fits)))
    return groups


def _is_block(path: str, trace: Trace, modules: Mapping[str, nn.Module], shared: set[str]) -> bool:
    if path not in modules:  # the same module in a second place
        return False
    module = modules[path]
    inside = [name for name in modules if is_inside(name, path)]
    if path not in trace.passes or trace.calls.get(path) != 1 or not module._modules or shared & set(inside):
        return False
    given, result, _ = trace.passes[path]
    return any(True for _ in module.parameters()) and given.shape == result.shape and _same(trace, given, result)


def _same(trace: Trace, a: Layout, b: Layout) -> bool:
    """Whether two tensors hold the same units at the same places, as far as any of them can go."""

    def live(layout: Layout) -> dict[tuple[int, ...], list[int]]:
        left = [block for block in layout.blocks if not trace.atoms.frozen(block.atoms).all()]
        return {block.dims: trace.atoms.roots(block.atoms).reshape(-1).tolist() for block in left}

    return live(a) == live(b)


def choice_groups(modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """One choice for each module that is one."""
    groups = []
    for path, module in modules.items():
        if isinstance(module, Mixed):
            options = tuple(join(path, f"options.{k}") for k in range(len(module.options)))
            groups.append(GateGroup(path or "mixed", "choices", (NOTHING,) * len(options), (), options, 0))
    return groups


def _group(trace: Trace, members: Sequence[Member], units: Sequence[Array], normed: bool, joined: bool) -> GateGroup:
    """Units of one signature. normed: a norm's statistics are of them. joined: a unit is made of several slices."""
    used = {event.weight for event in trace.events}
    names = {flag: tuple(f"{trace.tensors[t].name}[{d}]" for t, d, r in members if r is flag) for flag in (True, False)}
    written = [trace.tensors[t] for t, _, read in members if not read]
    lead = [info for info in written if info.number in used] or written  # a learned key or position is no convolution
    is_wide = any(info.tensor.ndim > 2 for info in lead)
    kind = "width" if normed else "channels" if is_wide else "heads" if joined else "units"
    path, attribute = lead[0].places[0]
    stem = f"{path}.{attribute[10:]}" if attribute.startswith("weight_ih_l") else path
    return GateGroup(stem or attribute, kind, tuple(units), names[False], names[True])


def named(groups: Sequence[GateGroup]) -> list[GateGroup]:
    """The same groups with names that tell them apart."""
    seen: dict[str, int] = {}
    result = []
    for group in groups:
        seen[group.name] = seen.get(group.name, 0) + 1
        name = group.name if seen[group.name] == 1 else f"{group.name}#{seen[group.name]}"
        result.append(replace(group, name=name))
    return result


def _input_classes(trace: Trace) -> dict[int, set[int]]:
    """By class: the input feature that it is of, with the classes which its copies enter."""
    roots = trace.atoms.roots
    classes = {root: {root} for own in trace.inputs for root in roots(own).tolist()}
    for copy in trace.copies if classes else ():
        for a, b in zip(roots(copy.before).tolist(), roots(copy.after).tolist()):
            if a in classes:
                classes[a].add(b)
                classes.setdefault(b, classes[a])
    return classes


def _input_groups(trace: Trace, modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """The features of the input that some layer reads: one gate each."""
    atoms, from_input = trace.atoms, _input_classes(trace)
    everything = np.arange(atoms.count)
    roots = atoms.roots(everything)
    groups = []
    for number, flat in enumerate(trace.inputs):
        units, reads = [], set()
        ordered = list(dict.fromkeys(int(r) for r in atoms.roots(flat)))
        for root in ordered:
            classes = np.array(sorted(from_input[root]))
            if len(classes) < 2 or (atoms.reason[classes] >= 0).any():
                continue
            direct = everything[roots == root]
            inside = everything[np.isin(roots, classes)]
            inside = inside[atoms.tensor[inside] >= 0]
            if (atoms.tensor[direct] >= 0).any() or not atoms.read[inside].any():
                continue
            units.append(classes)
            reads |= {f"{trace.tensors[t].name}[{d}]" for t, d in zip(atoms.tensor[inside], atoms.dim[inside])}
        if len(units) > 1:
            name = "inputs" if len(trace.inputs) == 1 else f"inputs.{number}"
            groups.append(GateGroup(name, "inputs", tuple(units), (), tuple(sorted(reads)), 0))
    return groups


KINDS: dict[str, Finder] = {
    "units": _tied_groups,
    "channels": _tied_groups,
    "heads": _tied_groups,
    "width": _tied_groups,
    "branches": _branch_groups,
    "blocks": _block_groups,
    "inputs": _input_groups,
}


def structure_of(trace: Trace, groups: Sequence[GateGroup], learned: Learned | None = None) -> Structure:
    """Number the entries in the order of the groups."""
    structure = Structure(trace, list(groups), np.full(trace.atoms.count, -1), learned=learned or Learned())
    for group in groups:
        numbers = structure.numbers(group)
        classes = trace.atoms.roots(np.concatenate(group.units))
        structure.entry[classes] = np.repeat(numbers, [len(unit) for unit in group.units])
        if group.kind == "branches":
            structure.branches[group.reads[0]] = int(numbers[0])
            structure.members |= {path: int(numbers[0]) for path in group.writes}
        elif group.kind in ("blocks", "choices"):
            into = structure.blocks if group.kind == "blocks" else structure.options
            into.update(zip(group.reads, numbers.tolist()))
    structure.features = {root: min(copies) for root, copies in _input_classes(trace).items()}
    for atoms in trace.inputs:  # the input arrives whole; what is left out is left out where it is read
        structure.entry[trace.atoms.roots(atoms)] = -1
    return structure
