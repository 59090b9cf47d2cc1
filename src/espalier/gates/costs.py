"""Counting: units, weights, MACs and parameters as multilinear costs, from the same structure that is cut."""

from __future__ import annotations

import math

import numpy as np

from espalier.cost import Cost, Form
from espalier.gates.structure import Structure
from espalier.gates.trace import Array, Event
from espalier.space import BadInput

KINDS = ("weights", "macs", "units", "parameters")


def cost_of(structure: Structure, kind: str) -> Cost:
    """The cost of a mask.

    ``units``: open gates. ``weights``: elements of every parameter that enters a linear map or a convolution, once
    each, however often it is used. ``macs``: multiplications of those in one forward pass of the example inputs, the
    whole batch as given; products of two activations, as in attention, are not in it. ``parameters``: elements of
    all parameters.
    """
    space = structure.space
    if kind == "units":
        return Cost.linear(np.ones(space.d)).over(space)
    total = Cost.product([Form.run(0, space.d, 0.0)], d=space.d)
    if kind in ("weights", "parameters"):
        weights = {event.weight for event in structure.trace.events}
        for info in structure.trace.tensors:
            if info.is_parameter and (kind == "parameters" or info.number in weights):
                total = total + elements(structure, info.number, ())
        if kind == "weights":
            for event in computed_weights(structure):
                total = total + computed_elements(structure, event, ())
    elif kind == "macs":
        uses: dict[int, float] = {}
        for event in structure.trace.events:
            if event.rows and event.uses:
                total = total + elements(structure, event.weight, event.rows) * event.uses
            elif event.uses:
                uses[event.weight] = uses.get(event.weight, 0.0) + event.uses
        for event in structure.trace.computed:
            total = total + computed_elements(structure, event, event.rows) * event.uses
        for number, times in uses.items():
            total = total + elements(structure, number, ()) * times
    else:
        raise BadInput(f"a cost is one of {', '.join(KINDS)}, not {kind!r}")
    return total.over(space)


def computed_weights(structure: Structure) -> list[Event]:
    """Weights computed from parameters, as by weight normalisation, each once."""
    return list({(e.module, e.computed.shape): e for e in structure.trace.computed if e.computed is not None}.values())


def computed_elements(structure: Structure, event: Event, rows: tuple[Array, ...]) -> Cost:
    """The number of elements of a computed weight, times the number of rows it is applied to."""
    layout = event.computed
    assert layout is not None
    blocks = [structure.follow(block.atoms.reshape(-1)) for block in layout.blocks]
    inside = {dim for block in layout.blocks for dim in block.dims}
    axes = [*blocks, *(structure.follow(atoms.reshape(-1)) for atoms in rows)]
    scale = math.prod(n for dim, n in enumerate(layout.shape) if dim not in inside)
    forms = [form_of(axis) for axis in axes]
    return Cost.product(forms or [Form((), 1.0)], d=structure.space.d, scale=float(scale))


def elements(structure: Structure, number: int, rows: tuple[Array, ...]) -> Cost:
    """The number of elements of one tensor, times the number of rows it is applied to."""
    d = structure.space.d
    axes = _axes(structure, number)
    axes += [structure.follow(atoms.reshape(-1)) for atoms in rows]
    scale = math.prod(len(axis) for axis in axes if not (axis >= 0).any())
    if scale == 0:
        return Cost.product([Form.run(0, d, 0.0)], d=d)
    forms = [form_of(axis) for axis in axes if (axis >= 0).any()]
    branch = structure.members.get(structure.trace.tensors[number].places[0][0], -1)
    forms += [Form.run(branch, branch + 1)] if branch >= 0 else []
    return Cost.product(forms or [Form((), 1.0)], d=d, scale=float(scale))


def _axes(structure: Structure, number: int) -> list[Array]:
    """The entries of each axis of a tensor, as far as they have to be counted.

    A layer that reads through gates of its own alone, and whose whole output one hand-placed gate reads, needs no
    factor for that gate: where it is closed, the canonical mask closes the layer's gates too. The cost of connections
    is then linear, as in the paper.
    """
    axes = [structure.entries(number, dim) for dim in range(structure.trace.tensors[number].tensor.ndim)]
    place = next((i for i, layer in enumerate(structure.layers) if layer.weight == number), None)
    if not structure.placed or place is None:
        return axes
    layer = structure.layers[place]
    shared = {int(e) for readers, _, _, entries in structure.flows if readers != {place} for e in entries}
    if any(bool((reads >= 0).all()) and shared.isdisjoint(reads.tolist()) for reads in layer.reads):
        for dim, axis in enumerate(axes):
            if dim not in layer.summed and len(axis) and (axis == axis[0]).all():
                axes[dim] = np.full(len(axis), -1)
    return axes


def form_of(entries: Array) -> Form:
    """How many indices of an axis stay: a constant for those always kept, a run of entries for each stretch."""
    constant = float((entries < 0).sum())
    gated = entries[entries >= 0]
    if not len(gated):
        return Form((), constant)
    counts = np.bincount(gated)
    present = np.flatnonzero(counts)
    pieces: list[tuple[int, int, float | np.ndarray]] = []
    for run in np.split(present, np.flatnonzero(np.diff(present) > 1) + 1):
        weights = counts[run].astype(np.float64)
        same = bool((weights == weights[0]).all())
        pieces.append((int(run[0]), int(run[-1]) + 1, float(weights[0]) if same else weights))
    return Form(tuple(pieces), constant)
