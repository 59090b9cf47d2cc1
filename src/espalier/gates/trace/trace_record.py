"""The record of one forward pass: tensors and their atoms, products, boundaries, branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from espalier.gates.trace.atoms import Atoms
from espalier.gates.trace.layout import Layout, Propagation
from espalier.gates.trace.rules.call import Event
from espalier.space import BadType


@dataclass(eq=False)
class TensorInfo:
    """One parameter or buffer: its number, every place it is held in, and its own atoms by dimension."""

    number: int
    tensor: Tensor
    places: list[tuple[str, str]]  # (module path, attribute)
    atoms: list[np.ndarray]
    is_parameter: bool
    touched: bool = False

    @property
    def name(self) -> str:
        path, attribute = self.places[0]
        return f"{path}.{attribute}" if path else attribute


class Example(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: Any) -> Example:
        """A tensor, a tuple (positional) or a dict (keyword)."""
        if isinstance(given, Tensor):
            return cls((given,), {})
        if isinstance(given, dict) or hasattr(given, "keys"):
            return cls((), dict(given))
        if isinstance(given, (tuple, list)):
            return cls(tuple(given), {})
        raise BadType(f"example_inputs are a tensor, a tuple or a dict, not {type(given).__name__}")

    @property
    def tensors(self) -> list[Tensor]:
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]


@dataclass(frozen=True, eq=False)
class Copy:
    """A boundary at which a slice may be left out: ``before`` enters ``module``, ``after`` is what it reads, or, of a
    gate placed by hand, what it gives."""

    module: str
    dim: int
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, eq=False)
class Branch:
    """A residual addition: the module whose output is added, and the leaf modules that ran only for it."""

    module: str
    members: tuple[str, ...]


@dataclass(eq=False)
class Trace:
    """All that one forward pass shows: tied atoms, products, and what modules read."""

    p: Propagation
    tensors: list[TensorInfo]
    events: list[Event] = field(default_factory=list)  # products with parameters
    computed: list[Event] = field(default_factory=list)  # products with tensors computed from parameters
    products: list[Event] = field(default_factory=list)  # products of two activations, as in attention
    entries: dict[str, list[Layout]] = field(default_factory=dict)  # module -> layouts of its first argument
    exits: dict[str, list[Layout]] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    gates: list[Copy] = field(default_factory=list)  # calls of gates placed by hand
    inputs: list[np.ndarray] = field(default_factory=list)  # atoms of input features, when asked for
    unknown: dict[str, set[str]] = field(default_factory=dict)  # operation without a rule -> modules
    calls: dict[str, int] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    norms: dict[str, np.ndarray] = field(default_factory=dict)  # norm whose statistics can be masked -> its channels
    passes: dict[str, tuple[Layout, Layout]] = field(default_factory=dict)  # module -> input, result made of it
    order: list[tuple[int, str]] = field(default_factory=list)  # (time, leaf module) in the order of execution

    @property
    def atoms(self) -> Atoms:
        return self.p.atoms

    def note(self, events: list[Event]) -> None:
        """Products with parameters, with tensors computed from them, and of activations are kept apart."""
        for event in events:
            is_weight, is_computed = event.weight >= 0, event.computed is not None
            (self.events if is_weight else self.computed if is_computed else self.products).append(event)

    def frozen_axes(self) -> dict[str, list[str]]:
        """Why outputs and inputs of layers are always kept: by reason, the axes of weights that it holds."""
        reasons: dict[str, list[str]] = {}
        for number in dict.fromkeys(event.weight for event in self.events):
            info = self.tensors[number]
            for dim, own in enumerate(info.atoms[:2]):
                frozen = self.atoms.frozen(own) if len(own) > 1 else np.zeros(1, dtype=bool)
                if frozen.any():
                    why = self.atoms.why(int(own[int(np.flatnonzero(frozen)[0])]))
                    reasons.setdefault(why, []).append(f"{info.name}[{dim}]")
        return reasons


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's result: nested lists, tuples, mappings and dataclasses; caches are not results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "past_key_values":
                yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name))


def collect(model: nn.Module, p: Propagation) -> list[TensorInfo]:
    """Parameters and buffers, tied ones once, with fresh atoms."""
    tensors: dict[int, TensorInfo] = {}
    for path, module in model.named_modules():
        held = [(name, tensor, True) for name, tensor in module._parameters.items()]
        held += [(name, tensor, False) for name, tensor in module._buffers.items()]
        for name, tensor, is_parameter in held:
            if tensor is None or (name.startswith("espalier_") and not is_parameter):
                continue
            if id(tensor) in tensors:
                tensors[id(tensor)].places.append((path, name))
                continue
            number = len(tensors)
            atoms = [p.atoms.new(n, number, d) for d, n in enumerate(tensor.shape)]
            tensors[id(tensor)] = TensorInfo(number, tensor, [(path, name)], atoms, is_parameter)
    return list(tensors.values())
