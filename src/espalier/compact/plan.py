"""The plan: which indices of which tensors stay, and which attributes and layers change. Data, not action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from espalier import schema
from espalier.schema import each, flag, integer, record, table, text
from espalier.space import Corrupt

FORMAT = 1
COMPOSED = 2  # of a plan with another one before it
Runs = tuple[tuple[int, int], ...]
WIDEST = 1 << 31  # a dimension
SIZE, DIM = integer(0, WIDEST), integer(-8, 8)
LAYER = record(
    {"kind": text(most=40)},
    {
        "index": each(integer(0, WIDEST)),
        "dim": DIM,
        "width": integer(0, 1 << 24),
        "reach": each(each(integer(0, 1 << 16), 4, 5), 0, 8),
        "alone": flag,
        "lookup": flag,
        "empty": flag,
        "heads": integer(0, 1 << 16),
        "option": integer(0, 1 << 16),
        "length": integer(0, 1 << 16),
        "select": each(integer(0, WIDEST)),
        "fill": each(integer(0, WIDEST)),
    },
)
SCHEMA = record(
    {
        "tensors": table(table(each(each(SIZE, 2, 2)), keys="[0-7]")),
        "shapes": table(each(SIZE, 0, 8)),
        "attributes": table(SIZE),
        "layers": table(LAYER),
    }
)


def to_runs(indices: Sequence[int] | np.ndarray) -> Runs:
    """Indices as runs ``(start, stop)``; an order that does not ascend makes short runs.

    >>> to_runs([0, 1, 2, 5])
    ((0, 3), (5, 6))
    """
    array = np.asarray(indices, dtype=np.int64)
    if not len(array):
        return ()
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(array, cuts))


def from_runs(runs: Sequence[Sequence[int]]) -> list[int]:
    return [i for start, stop in runs for i in range(start, stop)]


@dataclass(frozen=True)
class Plan:
    """How a model becomes its compact model. Names are those of the uncut model.

    ``tensors``: name -> dimension -> runs of indices that stay, in their new order; ``shapes``: name -> shape before.
    ``attributes``: "module.attribute" -> value; "module.attribute[1]" -> the second number in it. ``layers``:
    module -> the change of the layer itself, ``{"kind": ..}`` with what that kind needs: ``select`` before it;
    ``identity``, ``fill``, ``zeros``, ``bias``, ``attention`` or ``pass`` in its place; one ``option`` of a choice;
    ``padded``: a selection before it, zeros behind it, or both.
    ``earlier``: of a model that was cut before, the plan of that cut; names are then those of the model after it.
    """

    tensors: Mapping[str, Mapping[int, Runs]]
    attributes: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    earlier: Plan | None = None

    def __post_init__(self) -> None:
        for name in ("tensors", "attributes", "layers", "shapes"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, strings and numbers."""
        plan = {
            "format": FORMAT if self.earlier is None else COMPOSED,
            "tensors": {
                name: {str(dim): [list(run) for run in runs] for dim, runs in dims.items()}
                for name, dims in self.tensors.items()
            },
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "attributes": dict(self.attributes),
            "layers": {name: json.loads(json.dumps(dict(layer))) for name, layer in self.layers.items()},
        }
        return plan if self.earlier is None else plan | {"earlier": self.earlier.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan of what :meth:`to_dict` gave. Every number is bounded before anything is built from it."""
        try:
            schema.check_format(data, COMPOSED)
            SCHEMA(data, "it")
        except schema.Mismatch as error:
            raise Corrupt(f"this plan of a compact model is damaged: {error}") from None
        tensors = {
            name: {int(dim): tuple((start, stop) for start, stop in runs) for dim, runs in dims.items()}
            for name, dims in data["tensors"].items()
        }
        shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
        earlier = cls.from_dict(data["earlier"]) if "earlier" in data else None
        return cls(tensors, data["attributes"], data["layers"], shapes, earlier)

    def __str__(self) -> str:
        lines = [] if self.earlier is None else [*str(self.earlier).splitlines(), "then:"]
        for name, dims in self.tensors.items():
            for dim, runs in dims.items():
                count = sum(b - a for a, b in runs)
                shown = " ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in runs[:8])
                lines.append(f"{name} dim {dim}: keep {count}: {shown}{' ..' if len(runs) > 8 else ''}")
        lines += [f"{name} = {value}" for name, value in self.attributes.items()]
        for name, layer in self.layers.items():
            count, parts = len(layer.get("index", ())), len(to_runs(layer.get("index", ())))
            how = f" {count} of them, {'a view' if parts == 1 else f'gathered from {parts} places'}"
            lines.append(f"{name}: {layer['kind']}{how if layer['kind'] == 'select' else ''}")
        return "\n".join(lines) or "nothing changes"
