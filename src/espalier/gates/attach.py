"""Attaching gates to a model: trace it, find or take its gates, try them out, and hand back a handle.

A gate placed by hand lets *its* consumer leave a slice out; other consumers may still read it. So, unlike found gates,
what comes after a gate and what comes before it are different classes, and every leaf module is a boundary at which a
slice can be left out by an index selection. A class follows an entry when that entry alone decides whether it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from espalier.compact.apply import uncompiled
from espalier.gates.blocks import Blocks, RoundTo, rounded
from espalier.gates.find import KINDS, choice_groups, find_groups, structure_of
from espalier.gates.gate import Gate, Mixed
from espalier.gates.gated import Gated
from espalier.gates.masking import COMPILED, strip
from espalier.gates.norms import norm_of
from espalier.gates.one_pass import STATE
from espalier.gates.order import positional, segments_of
from espalier.gates.structure import GateGroup, Learned, Structure, connected, finish, is_inside, join, leads
from espalier.gates.trace import Array, Example, Trace, trace
from espalier.gates.verify import Trial, approved, isolated, isolated_random, random_masks
from espalier.space import BadInput, BadType, NoGates


def attach(
    model: nn.Module,
    example_inputs: Any,
    *,
    kinds: Collection[str] = ("units", "channels", "heads"),
    ignore: Collection[str] = (),
    check: bool = True,
    round_to: RoundTo | None = None,
) -> Gated:
    """Put gates on a model: those placed by hand if there are any, else those that ``attach`` finds.

    ``example_inputs``: a tensor, a tuple (positional) or a dict (keyword); run once to see what the model does.
    ``kinds``: which gates to find. On request also "width" (channels behind LayerNorm and RMSNorm), "branches" (whole
    residual branches), "blocks" (whole layers of a transformer, residual blocks), "inputs" (features), and kinds that
    were registered by ``espalier.gates.register_kind``.
    ``ignore``: names of modules whose own units are left alone.
    ``check``: whether every group is tried out in numbers. False is for huge models; then ``least`` is 1 everywhere.
    ``round_to``: one gate for each block of so many channels, so that widths are multiples of it. "auto" is what suits
    the model's device, 8 or 16, and less where a group would be one block. A dict gives numbers by group, or the blocks
    themselves, as ``gated.blocks`` holds them. A block holds units of like importance.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> gated = attach(model, torch.randn(3, 4))
    >>> gated.space
    Space([Bits(name='0', size=8, least=1)])
    """
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise BadType(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    example = Example.of(example_inputs)
    for tensor in example.tensors:
        if tensor.layout is not torch.strided:
            raise BadType("example_inputs are dense tensors; use .to_dense()")
        is_mask = tensor.is_floating_point() and bool(((tensor == 0) | tensor.isneginf()).all())  # an attention mask
        if tensor.is_floating_point() and not is_mask and not bool(tensor.isfinite().all()):
            raise BadInput("example_inputs hold infinite values or NaN, under which nothing can be compared")
    lazy = next((name for name, tensor in model.named_parameters() if is_lazy(tensor)), "")
    if lazy:
        raise BadInput(f"{lazy} has no shape before the first call: call the model once on its inputs, then attach")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise BadInput(
                f"{path or 'the model'} is of TorchScript, which cannot be watched or cut; give the module that it was "
                "made from"
            )
    _check_names(model, kinds, ignore)
    state = model.__dict__.get(STATE)
    if state is not None and not state.path:
        if state.is_original:
            raise BadInput("this model has gates already; use them, or call .detach() on their handle first")
        strip(model)  # a deepcopy of a gated model: its hooks belong to nobody
    compiled = [(module, module.__dict__.pop(COMPILED)) for module in model.modules() if COMPILED in module.__dict__]
    try:
        with isolated_random():
            if any(isinstance(module, Gate) for module in model.modules()):
                if round_to is not None:
                    raise BadInput(
                        "round_to is for gates that are found; those placed by hand have the sizes they were given"
                    )
                if any(isinstance(module, Mixed) for module in model.modules()):
                    raise BadInput("a model holds espalier.Gate modules or espalier.Mixed ones, not both")
                gated = _attach_placed(model, example, check)
            else:
                gated = _attach_found(model, example, kinds, ignore, check, round_to)
    except BaseException:
        for module, call in compiled:
            module.__dict__[COMPILED] = call
        raise
    gated._installed.compiled = compiled
    gated.example, gated.examples, gated.checks = example, max(example.examples, 1), check
    return gated


def _attach_found(
    model: nn.Module,
    example: Example,
    kinds: Collection[str],
    ignore: Collection[str],
    check: bool,
    round_to: RoundTo | None,
) -> Gated:
    modules = dict(model.named_modules())
    norms = [path for path, module in modules.items() if norm_of(module)] if "width" in kinds else []
    watched = functools.partial(
        trace, model, example, inputs="inputs" in kinds, placed=False, norms=norms, unchecked=not check
    )
    seen = watched()
    even = _stuck(modules, seen)
    if even:
        seen = watched(even=even)
    refused: dict[str, str] = {}
    groups = []
    for group in find_groups(seen, kinds, modules):
        problem = _unusable(group, seen, ignore, modules)
        if problem:
            refused[group.name] = problem
        else:
            groups.append(group)
    groups += choice_groups(modules)
    learned = Learned()

    def build(chosen: Sequence[GateGroup]) -> Structure:
        return finish(structure_of(seen, chosen, learned), model)

    if check and groups:
        groups, wrong = approved(Trial(model, example), groups, build)
        refused |= wrong
    if not groups:
        raise NoGates(_nothing(seen, refused))
    free = build([replace(group, least=0) for group in groups])
    groups, blocks = connected(free, groups), Blocks()
    if round_to is not None:
        groups, small, blocks = rounded(build(groups), model, round_to)
        refused |= small
        if not groups:
            raise NoGates(_nothing(seen, refused))
    return Gated(model, build(groups), refused=refused, blocks=blocks)


def _stuck(modules: Mapping[str, nn.Module], seen: Trace) -> list[str]:
    """Grouped convolutions whose groups cannot go one by one: a shuffle ties them, or their input is fixed."""
    paths = []
    for path, module in modules.items():
        if not isinstance(module, nn.modules.conv._ConvNd) or module.groups == 1 or module.transposed:
            continue
        if module.groups == module.in_channels or path not in seen.calls:
            continue
        info = next((t for t in seen.tensors if (path, "weight") in t.places), None)
        if info is None:  # its weight is computed, as by weight normalisation
            continue
        roots = seen.atoms.roots(info.atoms[0])
        if len(set(roots.tolist())) == 1 or bool(seen.atoms.frozen(info.atoms[0]).all()):
            paths.append(path)
    return paths


def _unusable(group: GateGroup, seen: Trace, ignore: Collection[str], modules: Mapping[str, nn.Module]) -> str:
    if group.kind in ("branches", "blocks"):
        return ""
    if group.size < 2:
        return "a single unit: closing it would empty the layer"
    writers = [name.rpartition(".")[0] for name in group.writes]
    for name in ignore:
        if any(path == name or path.startswith(name + ".") for path in writers):
            return f"ignored, as asked ({name})"
    for path in writers:
        module = modules.get(path)
        if isinstance(module, nn.LSTM) and module.proj_size > 0:
            return "an LSTM with a projection: torch knows it by its two widths being different, which a cut may end"
    return _unseen(group, seen)


def _unseen(group: GateGroup, seen: Trace) -> str:
    """A parameter the example never used, in a layer that would be cut or beside it and as wide: it may belong too.

    Beside it is also what lies deeper, in modules that never ran. A matrix behind maps may read them flattened.
    """
    names = {name.rpartition("[")[0]: int(name[:-1].rpartition("[")[2]) for name in (*group.writes, *group.reads)}
    tensors = [info for info in seen.tensors if info.name in names]
    widths = {info.tensor.shape[names[info.name]] for info in tensors} - {1}
    maps = any(info.tensor.ndim > 2 for info in tensors)
    paths = {name.rpartition(".")[0] for name in names}
    parents = {path.rpartition(".")[0] for path in paths}
    for info in seen.tensors:
        if info.touched or not info.is_parameter:
            continue
        shape = tuple(info.tensor.shape)
        for path, _ in info.places:
            beside = path.rpartition(".")[0] in parents and len(shape) > 1 and bool(widths & set(shape[:2]))
            flat = maps and len(shape) == 2 and any(shape[1] % width == 0 for width in widths)
            fits = bool(widths & set(shape)) or flat
            if path in paths or beside or (fits and any(_never_ran(path, parent, seen) for parent in parents)):
                return (
                    f"{info.name} was never used by the example in eval mode, and may read or write these units too: "
                    "delete it, or let the example use it, in eval mode as well"
                )
    return ""


def _never_ran(path: str, parent: str, seen: Trace) -> bool:
    """Whether a module lies inside another, and neither it nor any between the two ever ran."""
    if path == parent or (parent and not is_inside(path, parent)):
        return False
    below = path.removeprefix(parent).removeprefix(".").split(".")
    return not any(join(parent, ".".join(below[:depth])) in seen.calls for depth in range(1, len(below) + 1))


def _nothing(seen: Trace, refused: dict[str, str]) -> str:
    """Why there are no gates: what was seen, and what stood in the way."""
    lines = ["no gates: nothing in this model can be cut exactly."]
    weights = len({event.weight for event in seen.events})
    lines.append(f"Seen: {len(seen.tensors)} tensors, {weights} of them weights of linear maps or convolutions.")
    for name, why in list(refused.items())[:8]:
        lines.append(f"  {name}: {why}")
    for why, axes in list(seen.frozen_axes().items())[:8]:
        lines.append(f"  {axes[0]}: {why}")
    computed = list(dict.fromkeys(event.module or "the model" for event in seen.computed))
    if computed:
        lines.append(
            f"  {_listed(computed)}: the weight is computed from parameters (weight or spectral normalisation, or a "
            "mask, say), so it cannot be cut by itself; bake it in first, with "
            "torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm, or "
            "torch.nn.utils.prune.remove(module, 'weight')"
        )
    for operation, modules in list(seen.unknown.items())[:8]:
        lines.append(f"  {_listed(sorted(modules))}: uses `{operation}`, an operation without a rule")
    lines.append("Place espalier.Gate modules by hand where a layer reads what may be left out.")
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_names(model: nn.Module, kinds: Collection[str], ignore: Collection[str]) -> None:
    for given in (kinds, ignore):
        if not isinstance(given, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in given):
            raise BadType("kinds and ignore are collections of names, such as ('units', 'channels')")
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput(f"kinds of gates are {', '.join(KINDS)}, not {kind!r}")
    names = dict(model.named_modules())
    for name in ignore:
        if name not in names:
            raise BadInput(f"ignore names {name!r}, but the model has no such module")


# ---- gates placed by hand --------------------------------------------------------------------------------------------


def _attach_placed(model: nn.Module, example: Example, check: bool) -> Gated:
    """The handle of a model with hand-placed gates: one group for each, in the order the model holds them."""
    gates = {path: module for path, module in model.named_modules() if isinstance(module, Gate)}
    seen = trace(model, example, inputs=False, placed=True)
    used = {use.module for use in seen.gates}
    for path in gates:
        if path not in used:
            raise BadInput(f"the gate {path!r} is never reached by the example inputs; give others, or remove it")
    _refuse_before_batch_norm(model, seen)
    structure = _placed_structure(seen, gates)
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
            gate, problem = isolated(trial, structure, structure.groups, np.random.default_rng(18), problem)
            if gate is None:
                raise BadInput(f"these gates cannot be compacted exactly together: {problem}")
            raise BadInput(
                f"the gate {gate.name!r} cannot be compacted exactly: {problem}; place it at a consumer's input"
            )
    return Gated(model, structure)


def _read_alone(structure: Structure, own: Array) -> bool:
    """Whether what these gates read is read through them alone, as the units of a layer are.

    A layer of connections whose sources others read as well may be emptied.
    """
    sources = [layer for layer in structure.layers if np.isin(own, layer.read_by).any()]
    return bool(sources) and all(np.isin(layer.read_by, own).all() for layer in sources)


def _refuse_before_batch_norm(model: nn.Module, seen: Trace) -> None:
    norms = {path for path, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    read = [own for info in seen.tensors if any(path in norms for path, _ in info.places) for own in info.atoms]
    read += [copy.before for copy in seen.copies if copy.module in norms]
    roots = {root for own in read for root in seen.atoms.roots(own).tolist()}
    for use in seen.gates:
        if not roots.isdisjoint(seen.atoms.roots(use.after).tolist()):
            raise BadInput(
                f"the gate {use.module!r} is directly before BatchNorm, where a closed slice would leave the shift of "
                "BatchNorm behind; place it after BatchNorm and activation, where the next layer reads"
            )


def _placed_structure(seen: Trace, gates: dict[str, Gate]) -> Structure:
    """Groups, and the entry that each class follows."""
    start, groups, placed = 0, [], {}
    for path, gate in gates.items():
        placed[path] = start + np.repeat(np.arange(gate.bits), gate.sizes)
        groups.append(GateGroup(path or "gate", "placed", (np.zeros(0, np.int64),) * gate.bits, (), (), 0))
        start += gate.bits
    structure = Structure(seen, groups, _followed(seen, placed), placed=placed)
    structure.groups[:] = [_described(structure, group) for group in groups]
    return structure


def _described(structure: Structure, group: GateGroup) -> GateGroup:
    """The group with the names of the parameter axes that follow it."""
    axes = [axis for axis, _ in structure.along(group)]
    reads = tuple(axis.name for axis in axes if axis.is_read)
    return replace(group, writes=tuple(axis.name for axis in axes if not axis.is_read), reads=reads)


def _followed(seen: Trace, placed: Mapping[str, Array]) -> Array:
    """The entry that each class follows, -1: none."""
    atoms = seen.atoms
    roots = atoms.roots(np.arange(atoms.count))
    real, read = atoms.tensor[: atoms.count] >= 0, atoms.read[: atoms.count]
    # classes that are fixed, that hold more than what a layer reads, and that a layer reads
    frozen, written, summed = (set(roots[which].tolist()) for which in (atoms.frozen(roots), real & ~read, real & read))
    copies, gates = leads(seen, placed)
    fed: dict[int, set[int]] = {}  # by class what leads to it: classes, and entries e as ~e
    for a, further in copies.items():
        for b in further:
            fed.setdefault(b, set()).add(a)
    starts = [pair for use in seen.gates for pair in zip(atoms.roots(use.after).tolist(), placed[use.module].tolist())]
    for b, own in starts:
        fed.setdefault(b, set()).add(~own)
    entry = np.full(atoms.count, -1)
    for start, own in starts:  # what is only ever zero when a gate is closed goes with it, up to layers that read it
        reached, todo = {start}, [start]
        while todo:
            onward = copies.get(todo.pop(), set()) - reached
            reached |= onward
            todo += onward
        alone = all(fed.get(root, set()) <= {*reached, ~own} for root in reached)
        if alone and reached.isdisjoint(frozen | written | gates.keys()):
            entry[list(reached)] = own
    changed = True
    while changed:  # what is read through one entry alone follows it
        changed = False
        for root in {*copies, *gates}:
            if entry[root] >= 0 or root in frozen or root in summed:
                continue
            onward = gates.get(root, set()) | {int(entry[r]) for r in copies.get(root, ())}
            if len(onward) == 1 and min(onward) >= 0:
                entry[root] = onward.pop()
                changed = True
    return entry
