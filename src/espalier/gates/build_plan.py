"""Making the plan: from a structure and a canonical mask to what stays, and what stands in for what does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.utils._pytree import tree_leaves

from espalier.compact.layers import is_attention
from espalier.compact.plan import Plan, Runs, to_runs
from espalier.gates.norms import norm_of
from espalier.gates.order import Order
from espalier.gates.structure import Adapted, Axis, GateGroup, Layer, Structure, all_closed, is_inside, join
from espalier.gates.trace import Array

ZERO_WIDE_FAILS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
# What torch's own layers keep of their sizes, beside convolutions and GroupNorm: which dimension of which tensor it is.
SIZES: dict[type[nn.Module], tuple[tuple[str, str, int], ...]] = {
    nn.Linear: (("out_features", "weight", 0), ("in_features", "weight", 1)),
    nn.modules.batchnorm._NormBase: (("num_features", "weight", 0), ("num_features", "running_mean", 0)),
    nn.Embedding: (("embedding_dim", "weight", 1),),
    nn.PReLU: (("num_parameters", "weight", 0),),
    nn.RNNBase: (("input_size", "weight_ih_l0", 1), ("hidden_size", "weight_hh_l0", 1)),
    nn.RNNCellBase: (("input_size", "weight_ih", 1), ("hidden_size", "weight_hh", 1)),
}
SCALES = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.PReLU)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


class Keeping:
    """Which atoms stay under one canonical mask."""

    def __init__(self, structure: Structure, mask: Array) -> None:
        self.structure = structure
        self.opened = mask != 0
        self.atoms = structure.trace.atoms
        self.dead: set[int] = set()  # classes no gate controls, of layers that nothing reads and that read nothing
        for layer in structure.layers:
            silent = any(all_closed(reads, self.opened) for reads in layer.reads)
            if silent and not layer.anchored and not self.opened[layer.read_by].any():
                self.dead |= self._written(layer)
        while self.dead and self._spread():
            pass
        self._dead = np.array(sorted(self.dead), dtype=np.int64)

    def _spread(self) -> bool:
        """What only enters a module from dead classes is dead as well; whether that added any."""
        size = len(self.dead)
        fed: dict[int, bool] = {}
        for copy in self.structure.trace.copies:
            for a, b in zip(self.atoms.roots(copy.before).tolist(), self.atoms.roots(copy.after).tolist()):
                fed[b] = fed.get(b, True) and a in self.dead
        self.dead |= {b for b, dead in fed.items() if dead and self.structure.entry[b] < 0}
        return len(self.dead) > size

    def _written(self, layer: Layer) -> set[int]:
        """The classes that go with a dead layer: none if they hold more than its weight, for that is counted."""
        info = self.structure.trace.tensors[layer.weight]
        own = np.concatenate([a for dim, a in enumerate(info.atoms) if dim not in layer.summed])
        roots = np.unique(self.atoms.roots(own))
        members = np.isin(self.structure.roots, roots[self.structure.entry[roots] < 0])
        tensors = self.atoms.tensor[: self.atoms.count][members]
        if not set(np.unique(tensors).tolist()) <= {-1, layer.weight}:
            return set()
        return {int(r) for r in roots[self.structure.entry[roots] < 0]}

    def count(self, entries: Array) -> int:
        """How many indices that follow these entries stay."""
        return int(np.where(entries < 0, True, self.opened[entries]).sum())

    def __call__(self, atoms: Array) -> Array:
        """atoms: any shape. Which of them stay."""
        roots = self.atoms.roots(atoms)
        entries = self.structure.follow(atoms)
        stay = np.where(entries < 0, True, self.opened[entries])
        return stay & ~np.isin(roots, self._dead) if len(self._dead) else stay


def build_plan(structure: Structure, mask: Array, adapted: Sequence[Adapted] = ()) -> Plan:
    """mask: ``(d)``, canonical. adapted: beside what the structure knows."""
    keep, modules, learned = Keeping(structure, mask), structure.modules, structure.learned
    order = _order(structure, keep)
    tensors: dict[str, dict[int, Runs]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for info in structure.trace.tensors:
        shape = list(info.tensor.shape)
        for dim, own in enumerate(info.atoms):
            stay = keep(own)
            index = order(own)[stay[order(own)]]
            if not stay.all() or not np.array_equal(index, np.arange(len(own))):
                tensors.setdefault(info.name, {})[dim] = to_runs(index)
                shape[dim] = len(index)
        if info.name in tensors:
            for path, name in info.places:
                shapes.setdefault(path, {})[name] = tuple(shape)
    layers: dict[str, Mapping[str, Any]] = {}
    _boundaries(structure, keep, order, layers)
    _attention(structure, keep, shapes, layers)
    _emptied_layers(structure, keep, layers)
    for group in structure.groups:
        if group.name in learned.phantoms and not keep.opened[structure.where(group)].any():
            layers.update(phantom_layers(structure, group, shapes) or {})
    _pad(structure, keep, order, layers)
    for path, entry in structure.members.items():
        if not keep.opened[entry]:
            weights = join(path, "out_proj") if path in structure.trace.p.heads else path
            stand_in = branch_layer(modules[path], shapes.get(weights, {}), layers.get(path))
            assert stand_in is not None, path
            layers[path] = stand_in
    attributes: dict[str, int] = {}
    for path, changed in shapes.items():
        if path not in layers or layers[path]["kind"] in ("select", "padded"):
            for name, value in known_attributes(modules[path], changed, path in structure.trace.p.even).items():
                attributes[join(path, name)] = value
    for path, entries in structure.norms.items():
        for name, value in _norm_attributes(modules[path], keep.count(entries)).items():
            attributes[join(path, name)] = value
    sizes = {group.name: int(group.widths[keep.opened[structure.where(group)]].sum()) for group in structure.groups}
    units = {group.name: int(group.widths.sum()) for group in structure.groups if group.name in learned.phantoms}
    for item in (*learned.adapted, *adapted):
        if item.tensor >= 0 or item.part >= 0:
            held, parts = structure.trace.tensors, structure.trace.p.parts
            own = held[item.tensor].atoms[item.dim] if item.part < 0 else parts[item.part][1]
            one = len(own) // units[item.group] if item.group in units else 0  # of the unit that stands in for all
            attributes[join(item.path, item.attribute)] = int(keep(own).sum()) or one
        elif item.group in sizes:
            attributes[join(item.path, item.attribute)] = item.per_unit * max(1, sizes[item.group])
    gone = {path: entry for path, entry in structure.branches.items() if not keep.opened[entry]}
    for path, entry in (structure.blocks | structure.options).items():
        around = {entry for branch, entry in gone.items() if branch == path or not is_inside(branch, path)}
        empty = any(own in around and is_inside(name, path) for name, own in structure.members.items())
        if empty and (keep.opened[entry] or path in structure.options):
            continue  # in a closed branch, whose layers have stand-ins
        if not keep.opened[entry]:  # nothing inside is left
            for part in (tensors, attributes, layers):
                for name in [n for n in part if is_inside(n, path)]:
                    del part[name]
        if path in structure.blocks and not keep.opened[entry]:
            length = structure.trace.passes[path].length
            layers[path] = {
                "kind": "pass",
                **({"length": length} if length else {}),
                **({"empty": True} if empty else {}),
            }
        elif path in structure.options and keep.opened[entry]:
            mixed, _, number = path.rpartition("options.")
            layers[mixed.removesuffix(".")] = {"kind": "option", "option": int(number)}
    changed_ = {name: v for name, v in attributes.items() if _current(modules, name) != v}
    before = {info.name: tuple(info.tensor.shape) for info in structure.trace.tensors if info.name in tensors}
    return Plan(tensors, changed_, layers, before)


def _current(modules: Mapping[str, nn.Module], name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    attribute, _, place = attribute.partition("[")
    value: Any = getattr(modules[path], attribute, None)
    if place:
        return tree_leaves(value)[int(place[:-1])]
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _order(structure: Structure, keep: Keeping) -> Callable[[Array], Array]:
    """The indices of an axis in the order that lets slices that one reader keeps lie together."""
    if structure.segments is None:
        return lambda own: np.arange(len(own))
    trace = structure.trace
    readers = [(copy.before, keep(copy.before) & keep(copy.after)) for copy in trace.copies]
    readers += [(use.before, keep(use.before) & keep.opened[structure.placed[use.module]]) for use in trace.gates]
    return Order(structure.segments, trace.atoms.roots, readers)


def _boundaries(
    structure: Structure, keep: Keeping, order: Callable[[Array], Array], layers: dict[str, Mapping[str, Any]]
) -> None:
    """What a module leaves out is cut before it. Hand-placed gates vanish; where what follows stays wide, zeros fill
    in, where what precedes does, it is cut."""
    for use in (*structure.trace.gates, *structure.trace.copies):
        row, is_gate = order(use.before), use.module in structure.placed
        before, after = keep(use.before)[row], keep(use.after)[row]
        opened = keep.opened[structure.placed[use.module]][row] if is_gate else np.ones_like(after)
        if (after & ~opened).any():  # closed, but the slice's place stays
            index = np.where(before & opened, np.cumsum(before) - 1, int(before.sum()))[after]
            layers[use.module] = {"kind": "fill", "dim": use.dim, "index": index.tolist()}
        elif (before & ~after).any():
            alone = {"alone": True} if is_gate else {}
            index = np.flatnonzero(after[before])
            layers[use.module] = {"kind": "select", **alone, "dim": use.dim, "index": index.tolist()}
        elif is_gate:
            layers[use.module] = {"kind": "identity"}


def padded_axes(structure: Structure, group: GateGroup) -> tuple[list[Axis], list[Axis], Array] | None:
    """The axes behind which zeros can stand in for what is closed, those before which it can be left out again, so that
    the code between them has its whole width, and the atoms of parameters in that code, such as a bias for each head,
    which stay whole. None: more than these depends on the group."""
    written, normed, read, whole = list[Axis](), dict[str, Axis](), list[Axis](), [np.zeros(0, dtype=np.int64)]
    used = {event.weight for event in structure.trace.events}
    for axis, _ in structure.along(group):
        path, name = axis.info.places[0]
        module = structure.modules[path]
        if isinstance(module, nn.modules.batchnorm._NormBase):
            normed[path] = axis
        elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            if len(axis.info.places) > 1 or getattr(module, "groups", 1) > 1:
                return None
            if name == "weight":
                (read if axis.dim else written).append(axis)
        elif axis.info.number in used or isinstance(module, nn.modules.conv._ConvNd) or axis.is_read:
            return None
        else:
            whole.append(axis.atoms)
    return None if _runs_for_each(structure, group) else (list(normed.values()) or written, read, np.concatenate(whole))


def _runs_for_each(structure: Structure, group: GateGroup) -> bool:
    """Whether a layer between those of the group runs once for each of its units that is open."""
    where, trace = structure.where(group), structure.trace
    rows = [structure.follow(row).ravel() for event in (*trace.events, *trace.computed) for row in event.rows]
    return any(((entries >= where.start) & (entries < where.stop)).any() for entries in rows)


def _pad(
    structure: Structure, keep: Keeping, order: Callable[[Array], Array], layers: dict[str, Mapping[str, Any]]
) -> None:
    """Layers around code that insists on a width are cut; zeros stand in between them."""
    groups = [group for group in structure.groups if group.name in structure.learned.padded]
    padded = np.zeros(structure.space.d + 1, dtype=bool)  # the last: what no gate closes
    for group in groups:
        padded[structure.where(group)] = True
    for group in groups:
        written, read, _ = padded_axes(structure, group) or ([], [], None)
        for axis in (*written, *read):
            row, path = order(axis.atoms), axis.info.places[0][0]
            stay = keep(axis.atoms)[row]
            wide = stay | padded[axis.entries][row]
            bare = {"kind": "padded", "dim": -1 if axis.info.tensor.ndim == 2 else 1}
            change = layers.get(path, bare)
            if change["kind"] == "select" and axis in written:  # of features of the input
                length = len(structure.trace.entries[path][0].shape)
                if (change["dim"] - bare["dim"]) % length == 0:
                    change = {**bare, "select": change["index"]}
            if change["kind"] != "padded" or stay.all():
                continue
            if axis in read:
                layers[path] = {**change, "select": np.flatnonzero(stay[wide]).tolist()}
            else:
                index = np.where(stay, np.cumsum(stay) - 1, int(stay.sum()))
                layers[path] = {**change, "fill": index[wide].tolist()}


def _attention(
    structure: Structure, keep: Keeping, shapes: Mapping[str, Any], layers: dict[str, Mapping[str, Any]]
) -> None:
    """torch's own attention insists on its width: whatever is cut of it, a plain one takes its place."""
    for info in structure.trace.tensors:
        path = info.name.rpartition(".")[0]
        owner = path.removesuffix("out_proj").removesuffix(".")
        if info.name.endswith("out_proj.weight") and owner in structure.trace.p.heads:
            module = structure.modules[owner]
            assert isinstance(module, nn.MultiheadAttention)
            if owner in shapes or path in shapes:
                layers[owner] = {"kind": "attention", "heads": int(keep(info.atoms[1]).sum()) // module.head_dim}


def known_attributes(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], even: bool = False) -> dict[str, int]:
    """The sizes that torch's own layers keep beside their tensors, after these tensors changed."""
    weight = shapes.get("weight")
    if isinstance(module, nn.modules.conv._ConvNd) and weight:
        out_axis = 1 if module.transposed else 0
        per_group = (module.in_channels if module.transposed else module.out_channels) // module.groups
        groups = module.groups if module.groups == 1 or even else weight[0] // per_group
        out, read = (groups, 1) if module.transposed else (1, groups)
        return {"groups": groups, "out_channels": weight[out_axis] * out, "in_channels": weight[1 - out_axis] * read}
    if isinstance(module, nn.GroupNorm) and weight:
        return _norm_attributes(module, weight[0])
    rows = next((rows for kind, rows in SIZES.items() if isinstance(module, kind)), ())
    return {attribute: shapes[name][dim] for attribute, name, dim in rows if name in shapes}


def _norm_attributes(module: nn.Module, channels: int) -> dict[str, int]:
    if isinstance(module, nn.GroupNorm):
        per_group = module.num_channels // module.num_groups
        return {"num_channels": channels, "num_groups": channels // per_group}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": channels}
    return {"num_features": channels} if isinstance(module, nn.modules.instancenorm._InstanceNorm) else {}


# ---- stand-ins: plain layers for those that a cut leaves without input or output, or in a closed branch --------------


def _emptied_layers(structure: Structure, keep: Keeping, layers: dict[str, Mapping[str, Any]]) -> None:
    """Layers left without a single channel to write or to read, which torch would refuse to run."""
    for info in structure.trace.tensors:
        path, name = info.places[0]
        module = structure.modules[path]
        if name != "weight" or not isinstance(module, nn.modules.conv._ConvNd) or module.groups > 1:
            continue
        out, read = (keep(info.atoms[dim]) for dim in ((1, 0) if module.transposed else (0, 1)))
        if out.any() and not read.any():
            layers[path] = {"kind": "bias", "width": int(out.sum()), "dim": 1, "reach": _reach(module)}
    for path, layouts in structure.trace.exits.items():
        module = structure.modules[path]
        if not isinstance(module, ZERO_WIDE_FAILS + POOLS) or len(layouts[0].shape) < 3:
            continue
        blocks = [layout.at(1) for layout in layouts]
        if all(block is not None and not keep(block.atoms).any() for block in blocks):
            layers[path] = _zeros(0, 1, _reach(module))


def _zeros(width: int, dim: int = -1, reach: Sequence[list[int]] = (), lookup: bool = False) -> dict[str, Any]:
    """Zeros of this width in place of a layer; see :class:`espalier.compact.layers.Constant`."""
    return {"kind": "zeros", "width": width, "dim": dim, "reach": list(reach), "lookup": lookup}


def _reach(module: nn.Module) -> list[list[int]]:
    if isinstance(module, nn.modules.conv._ConvNd):
        n = len(module.kernel_size)
        padding = [0] * n if isinstance(module.padding, str) else list(module.padding)
        if module.padding == "same":  # as wide as before: a kernel of one
            return [[1, 1, 0, 1]] * n
        rows = [list(r) for r in zip(module.kernel_size, module.stride, padding, module.dilation)]
        extra = module.output_padding if module.transposed else ()
        return [[*row, more] for row, more in zip(rows, extra)] if module.transposed else rows
    if isinstance(module, POOLS):
        n = next(k for k in (1, 2, 3) if type(module).__name__.endswith(f"{k}d"))

        def each(value: Any) -> list[int]:
            return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)] * n

        dilation = each(getattr(module, "dilation", 1))
        return [list(r) for r in zip(each(module.kernel_size), each(module.stride), each(module.padding), dilation)]
    return []


def branch_layer(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], planned: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """What stands for a layer of a closed residual branch: zeros without weights. None: there is nothing that could."""
    if is_attention(module):
        zeros = branch_layer(module.get_submodule("out_proj"), shapes)
        return zeros and {**zeros, "length": 2}
    if planned is not None and planned["kind"] == "zeros":
        return planned
    weight = getattr(module, "weight", None)
    if isinstance(module, (*SCALES, nn.RMSNorm)):
        return {"kind": "identity"}
    if norm_of(module):
        return {"kind": "pass"}  # one written out may take more than a tensor, such as a gate
    shape = shapes.get("weight", () if weight is None else tuple(weight.shape))
    if planned is not None and "fill" in planned:  # the code behind it insists on a width
        shape = (len(planned["fill"]), *shape[1:])
    if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        reach = _reach(module)
        return _zeros(shape[0], -1 - len(reach), reach)
    buffers = [name for name in module._buffers if not name.startswith("espalier_")]
    if len(shape) == 2 and set(module._parameters) <= {"weight", "bias"} and not buffers:
        out = 0 if isinstance(module, nn.Linear) else 1
        return _zeros(shape[out], lookup=isinstance(module, nn.Embedding))
    return None


def phantom_layers(
    structure: Structure, group: GateGroup, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> dict[str, Mapping[str, Any]] | None:
    """An emptied group whose code does not run on width zero: one unit of zeros, without weights, stands in.

    Layers that write the group give zeros of one unit's width, layers that read it give their bias. None where one of
    them does more than that.
    """
    layers: dict[str, Mapping[str, Any]] = {}
    if _runs_for_each(structure, group):  # it would cost, and read zeros
        return None
    for axis, inside in structure.along(group):
        tensor, (path, name) = axis.info.tensor, axis.info.places[0]
        module = structure.modules[path]
        if not inside.all() or any(True for _ in module.children()) or len(axis.info.places) > 1:
            return None
        if axis.is_read and tensor.ndim == 2 and name == "weight":
            changed = shapes.get(path, {}).get("weight", tuple(tensor.shape))
            layers[path] = {"kind": "bias", "width": int(changed[1 - axis.dim]), "dim": -1, "reach": []}
        elif not axis.is_read and name in ("weight", "bias") and tensor.ndim <= 2:
            if layers.get(path, {}).get("kind") == "bias" or isinstance(module, SCALES):
                return None
            layers[path] = _zeros(len(inside) // int(group.widths.sum()), lookup=isinstance(module, nn.Embedding))
        else:
            return None
    return layers
