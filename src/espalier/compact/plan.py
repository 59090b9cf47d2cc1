"""The plan: which indices of which tensors stay, and which attributes and layers change. Data, not action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from espalier.space import Corrupt

FORMAT = 1
Runs = tuple[tuple[int, int], ...]


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

    ``tensors``: name -> dimension -> runs of indices that stay; ``shapes``: name -> shape before.
    ``attributes``: "module.attribute" -> value. ``layers``: module -> the change of the layer itself, ``{"kind": ..}``
    with what that kind needs: ``select`` before it; ``identity``, ``fill``, ``zeros``, ``bias``, ``attention`` or
    ``pass`` in its place; one ``option`` of a choice.
    """

    tensors: Mapping[str, Mapping[int, Runs]]
    attributes: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensors", "attributes", "layers", "shapes"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, strings and numbers."""
        return {
            "format": FORMAT,
            "tensors": {
                name: {str(dim): [list(run) for run in runs] for dim, runs in dims.items()}
                for name, dims in self.tensors.items()
            },
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "attributes": dict(self.attributes),
            "layers": {name: json.loads(json.dumps(dict(layer))) for name, layer in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        if not isinstance(data, Mapping) or not isinstance(data.get("format"), int):
            raise Corrupt("this is no plan of a compact model: it has no format number")
        if data["format"] > FORMAT:
            raise Corrupt(
                f"this plan is of format {data['format']}, this Espalier reads up to {FORMAT}; use a newer one"
            )
        try:
            tensors = {
                str(name): {int(dim): tuple((int(a), int(b)) for a, b in runs) for dim, runs in dims.items()}
                for name, dims in data["tensors"].items()
            }
            attributes = {str(name): int(value) for name, value in data["attributes"].items()}
            layers = {str(name): dict(layer) for name, layer in data["layers"].items()}
            shapes = {str(name): tuple(int(n) for n in shape) for name, shape in data["shapes"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"this plan of a compact model is damaged: {error!r}") from None
        return cls(tensors, attributes, layers, shapes)

    def __str__(self) -> str:
        lines = []
        for name, dims in self.tensors.items():
            for dim, runs in dims.items():
                count = sum(b - a for a, b in runs)
                shown = " ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in runs[:8])
                lines.append(f"{name} dim {dim}: keep {count}: {shown}{' ..' if len(runs) > 8 else ''}")
        lines += [f"{name} = {value}" for name, value in self.attributes.items()]
        lines += [f"{name}: {layer['kind']}" for name, layer in self.layers.items()]
        return "\n".join(lines) or "nothing changes"
