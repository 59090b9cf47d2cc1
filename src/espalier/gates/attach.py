"""Attaching gates to a model: trace it, find or take its gates, try them out, and hand back a handle."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from espalier.gates.blocks import Blocks, RoundTo, rounded
from espalier.gates.find import KINDS, choice_groups, find_groups, structure_of
from espalier.gates.gate import Gate, Mixed
from espalier.gates.gated import Gated
from espalier.gates.masking import strip
from espalier.gates.norms import norm_of
from espalier.gates.one_pass import STATE
from espalier.gates.placed import attach_placed
from espalier.gates.structure import GateGroup, Learned, Structure, connected, finish
from espalier.gates.trace import Example, Trace, trace
from espalier.gates.verify import Trial, approved, isolated_random
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
    if not isinstance(model, nn.Module):
        raise BadType(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    example = Example.of(example_inputs)
    for tensor in example.tensors:
        if tensor.layout is not torch.strided:
            raise BadType("example_inputs are dense tensors; use .to_dense()")
        is_mask = tensor.is_floating_point() and bool(((tensor == 0) | tensor.isneginf()).all())  # an attention mask
        if tensor.is_floating_point() and not is_mask and not bool(tensor.isfinite().all()):
            raise BadInput("example_inputs hold infinite values or NaN, under which nothing can be compared")
    _check_names(model, kinds, ignore)
    state = model.__dict__.get(STATE)
    if state is not None and not state.path:
        if state.is_original:
            raise BadInput("this model has gates already; use them, or call .detach() on their handle first")
        strip(model)  # a deepcopy of a gated model: its hooks belong to nobody
    with isolated_random():
        if any(isinstance(module, Gate) for module in model.modules()):
            if round_to is not None:
                raise BadInput(
                    "round_to is for gates that are found; those placed by hand have the sizes they were given"
                )
            if any(isinstance(module, Mixed) for module in model.modules()):
                raise BadInput("a model holds espalier.Gate modules or espalier.Mixed ones, not both")
            gated = attach_placed(model, example, check)
        else:
            gated = _attach_found(model, example, kinds, ignore, check, round_to)
    first = next((len(tensor) for tensor in example.tensors if tensor.ndim), 1)
    gated.example, gated.examples, gated.checks = example, max(first, 1), check
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
    watched = functools.partial(trace, model, example, inputs="inputs" in kinds, placed=False, norms=norms)
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
        info = next(t for t in seen.tensors if (path, "weight") in t.places)
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
    """A parameter the example never used, in a layer that would be cut or beside it and as wide: it may belong too."""
    names = {name.rpartition("[")[0]: int(name[:-1].rpartition("[")[2]) for name in (*group.writes, *group.reads)}
    widths = {info.tensor.shape[names[info.name]] for info in seen.tensors if info.name in names}
    paths = {name.rpartition(".")[0] for name in names}
    parents = {path.rpartition(".")[0] for path in paths}
    for info in seen.tensors:
        if info.touched or not info.is_parameter:
            continue
        for path, _ in info.places:
            beside = path.rpartition(".")[0] in parents and info.tensor.ndim > 1
            if path in paths or (beside and widths & set(info.tensor.shape[:2])):
                return f"{info.name} was never used by the example, and may read or write these units too"
    return ""


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
            f"  {_listed(computed)}: the weight is computed from parameters (weight or spectral normalisation, say), "
            "so it cannot be cut by itself; bake it in first, with torch.nn.utils.parametrize.remove_parametrizations "
            "or torch.nn.utils.remove_weight_norm"
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
