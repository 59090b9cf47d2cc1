"""Counting: units, weights, MACs and parameters as multilinear costs, from the same structure that is cut.

Kinds of cost are a table by name, which others may add to: see :func:`register`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from espalier.cost import Cost, Form
from espalier.gates.structure import Structure
from espalier.gates.trace import Array, Event
from espalier.space import BadInput, BadType

if TYPE_CHECKING:
    from espalier.gates.gated import Gated

CostOf = Callable[["Gated"], Cost]


def register(name: str, cost_of: CostOf) -> None:
    """Add a kind of cost: afterwards ``gated.cost(name)`` and ``fit(.., cost=name)`` know it.

    cost_of: given the gated model, returns the cost of its masks, an :class:`espalier.Cost` over ``gated.space``.
    """
    if not isinstance(name, str) or not callable(cost_of):
        raise BadType(f"a kind of cost is a name and a function of a gated model, not {name!r} and {cost_of!r}")
    if KINDS.get(name, cost_of) is not cost_of:
        raise BadInput(f"there is a kind of cost {name!r} already; give this one another name")
    KINDS[name] = cost_of


def cost_of(gated: Gated, kind: str) -> Cost:
    """The cost of this kind, over the space of the gated model."""
    if kind not in KINDS:
        raise BadInput(f"a cost is one of {', '.join((*KINDS, 'latency'))}, not {kind!r}")
    cost = KINDS[kind](gated)
    if not isinstance(cost, Cost):
        raise BadType(f"the kind of cost {kind!r} gave {type(cost).__name__}, not an espalier.Cost")
    return cost.over(gated.space)


def units(gated: Gated) -> Cost:
    """Units of open gates: one each, unless gates are blocks of several."""
    return Cost.linear(np.concatenate([group.widths for group in gated.structure.groups]).astype(np.float64))


def by_tensor(gated: Gated, kind: str) -> Iterator[tuple[str, Cost]]:
    """What each tensor has of a cost, by its name; a weight that is used in several ways has several parts of it.

    "weights": elements of every parameter that enters a linear map or a convolution, once each, however often it is
    used. "parameters": elements of all. "macs": multiplications of the weights in one forward pass of the example
    inputs, the whole batch as given; products of two activations, as in attention, are not in it.
    """
    structure = gated.structure
    trace, uses = structure.trace, dict[int, float]()
    if kind != "macs":
        numbers = {event.weight for event in trace.events if event.counted}
        counted = [info for info in trace.tensors if kind == "parameters" or info.number in numbers]
        uses = {info.number: 1.0 for info in counted if info.is_parameter}
    for event in (*trace.events, *trace.computed) if kind == "macs" else ():
        if event.computed is not None:
            yield event.module, computed_elements(structure, event, event.rows) * event.uses
        elif event.rows and event.uses:
            yield trace.tensors[event.weight].name, elements(structure, event.weight, event.rows) * event.uses
        elif event.uses:
            uses[event.weight] = uses.get(event.weight, 0.0) + event.uses
    for number, times in uses.items():
        yield trace.tensors[number].name, elements(structure, number, ()) * times
    for event in computed_weights(structure) if kind == "weights" else ():
        yield event.module, computed_elements(structure, event, ())


def held(gated: Gated, kind: str) -> list[tuple[str, float]]:
    """What the cheapest mask keeps of this cost, by the name of the tensor that holds it, the largest first."""
    mask = torch.zeros(gated.d, dtype=torch.float64)
    for _, where in gated.space.choices:
        mask[where.start] = 1.0
    mask, kept = gated.canonical(mask), dict[str, float]()
    for name, cost in by_tensor(gated, kind):
        kept[name] = kept.get(name, 0.0) + float(cost(mask))
    return sorted(((name, count) for name, count in kept.items() if count), key=lambda pair: -pair[1])


def _total(gated: Gated, kind: str) -> Cost:
    return sum((cost for _, cost in by_tensor(gated, kind)), _nothing(gated.structure))


KINDS: dict[str, CostOf] = {
    kind: units if kind == "units" else functools.partial(_total, kind=kind)
    for kind in ("weights", "macs", "units", "parameters")
}


def _nothing(structure: Structure) -> Cost:
    return Cost.product([Form.run(0, structure.space.d, 0.0)], d=structure.space.d)


def computed_weights(structure: Structure) -> list[Event]:
    """Weights computed from parameters, as by weight normalisation, each once."""
    return list({(e.module, e.computed.shape): e for e in structure.trace.computed if e.computed is not None}.values())


def computed_elements(structure: Structure, event: Event, rows: tuple[Array, ...]) -> Cost:
    """The number of elements of a computed weight, times the number of rows it is applied to."""
    layout = event.computed
    assert layout is not None
    plain = [np.full(n, -1) for dim, n in enumerate(layout.shape) if layout.at(dim) is None]
    blocks = [structure.follow(block.atoms) for block in layout.blocks]
    return _counted(structure, [*plain, *blocks], rows, event.module)


def elements(structure: Structure, number: int, rows: tuple[Array, ...]) -> Cost:
    """The number of elements of one tensor, times the number of rows it is applied to."""
    return _counted(structure, _axes(structure, number), rows, structure.trace.tensors[number].places[0][0])


def _counted(structure: Structure, axes: Sequence[Array], rows: Sequence[Array], path: str) -> Cost:
    """The product of the lengths of axes, given by their entries, and of rows; 0 where the module does not run."""
    lengths = [entries.reshape(-1) for entries in (*axes, *map(structure.follow, rows))]
    scale = math.prod(len(entries) for entries in lengths if not (entries >= 0).any())
    if scale == 0:
        return _nothing(structure)
    forms = [form_of(entries) for entries in lengths if (entries >= 0).any()]
    forms += [Form.run(entry, entry + 1) for entry in structure.inside(path)]
    return Cost.product(forms or [Form((), 1.0)], d=structure.space.d, scale=float(scale))


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
