"""The gated model: a handle beside the user's own module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from espalier.compact.apply import apply_plan
from espalier.compact.plan import Plan
from espalier.cost import Cost
from espalier.gates.build_plan import Adapted, build_plan
from espalier.gates.canonical import canonical
from espalier.gates.costs import cost_of
from espalier.gates.explain import explain
from espalier.gates.latency import Latency, latency_of
from espalier.gates.masking import MARK, Mark, install, set_mask, slopes_of, strip, with_mask
from espalier.gates.structure import Structure, as_array
from espalier.space import BadInput, BadMask, Space


class Gated:
    """Gates on a model, made by :func:`espalier.attach`.

    ``model``: the user's module, with masks of ones. ``space``: the groups of gates. ``refused``: what was found but
    is not offered, and why. ``examples``: in the inputs that it was attached with, over which MACs are counted.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        *,
        adapted: Sequence[Adapted] = (),
        phantoms: Sequence[str] = (),
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.structure = structure
        self.space: Space = structure.space
        self.refused = dict(refused or {})
        self.examples = 1
        self.example: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # what it was attached with
        self.latencies: dict[str, Latency] = {}  # measured, by the label of their cost
        self._adapted, self._phantoms = tuple(adapted), tuple(phantoms)
        self._costs: dict[str, Cost] = {}
        self._installed = install(model, structure)
        self._mask: Tensor | None = None
        self._slopes = False
        self._held = [
            (f"{path}.{name}" if path else name, module._modules, name, child)
            for path, module in model.named_modules()
            for name, child in module._modules.items()
        ]
        model.__dict__[MARK] = Mark(model)

    @property
    def d(self) -> int:
        """The number of entries of a mask."""
        return self.space.d

    def __repr__(self) -> str:
        return f"Gated({type(self.model).__name__}, d={self.d}, groups={len(self.space.groups)})"

    def _checked(self, mask: Tensor, wait: bool = True) -> Tensor:
        """wait: look at the values of a mask on a GPU too."""
        self._attached()
        self.space.check_mask_form(mask)
        if wait or mask.device.type == "cpu":
            self.space.check_mask(mask)
        return mask.detach()

    def _attached(self) -> None:
        """Refuse detached gates, and a module put in another's place since: it has no mask, and fits no plan."""
        if self._installed is None:
            raise BadInput("these gates were detached; attach again to use them")
        for path, children, name, child in self._held:
            if children.get(name) is not child:
                raise BadInput(f"module {path!r} was replaced since the gates were attached; detach and attach again")

    def _one(self, mask: Tensor, wait: bool = True) -> Tensor:
        mask = self._checked(mask, wait)
        if mask.ndim != 1:
            raise BadMask(f"one mask of {self.d} entries at a time, not shape {tuple(mask.shape)}")
        return mask

    # ---- using a mask ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def masked(self, mask: Tensor, *, slopes: bool = False) -> Iterator[Callable[[], Tensor]]:
        """While inside, the model runs under this mask ``(d)``; outside it is as before. May be nested.

        So does a ``deepcopy`` of it: made inside, the copy runs under this mask too, and without one afterwards.

        slopes: the context then yields a function that returns, after a backward pass, the slopes ``(d)``: the
        derivative of the loss by each entry of the mask, closed gates included::

            with gated.masked(mask, slopes=True) as slopes:
                loss(model(x), y).backward()
                gradient = slopes()
        """
        mask, previous = self._one(mask, wait=False), (self._mask, self._slopes)
        self._set(mask, slopes)
        try:
            with self._installed.copies.opened_afterwards():
                yield lambda: slopes_of(self._installed, self.d)
        finally:
            self._set(*previous)

    def _set(self, mask: Tensor | None, slopes: bool = False) -> None:
        self._mask, self._slopes = mask, slopes
        set_mask(self.model, self._installed, mask, slopes)

    def call(self, params_and_buffers: Mapping[str, Tensor], mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model as a pure function of its tensors and one mask ``(d)``; made for ``vmap``, ``grad``, ``compile``.

        The mask's values are not looked at. Under ``vmap`` over masks, BatchNorm in train mode needs running
        statistics of its own for each mask: give a copy of them a batch dimension.
        """
        if not torch.compiler.is_compiling():  # there every look at a module would become a guard
            self._attached()
        return functional_call(self.model, with_mask(self._installed, params_and_buffers, mask), args, kwargs)

    # ---- what a mask means -----------------------------------------------------------------------------------------

    def canonical(self, mask: Tensor) -> Tensor:
        """mask: ``(*B, d)``. The mask ``(*B, d)`` with dead gates closed and no group emptier than it may be."""
        mask = self._checked(mask)
        rows = as_array(mask).reshape(-1, self.d)
        masks = np.stack([canonical(self.structure, self.space, row) for row in rows]) if len(rows) else rows
        return torch.as_tensor(masks, dtype=mask.dtype, device=mask.device).reshape(mask.shape)

    def plan(self, mask: Tensor) -> Plan:
        """How the model would be cut: which index of which tensor stays. The mask ``(d)`` is made canonical first."""
        rows = as_array(self.canonical(self._one(mask)))
        return build_plan(self.structure, dict(self.model.named_modules()), rows, self._adapted, self._phantoms)

    def compact(self, mask: Tensor) -> nn.Module:
        """The plain, smaller module for a mask ``(d)``; the user's model is untouched."""
        return strip(apply_plan(self.model, self.plan(mask)))

    def cost(self, kind: str | Cost = "weights", **how: Any) -> Cost:
        """The cost of a mask: "weights", "macs", "units", "parameters", "latency" or a registered kind, exact for
        canonical masks; or a cost of one's own, over the space of these gates.

        how: of "latency", in milliseconds: ``runtime="torch" | "onnxruntime"``, ``device="cpu"``, ``batch=1``. It is
            measured on this machine, once.
        """
        if isinstance(kind, Cost):
            return kind.over(self.space)
        if kind == "latency":
            return self.latency(**how).cost
        if how:
            raise BadInput(f"{', '.join(how)}: only the latency is measured in a way that can be chosen, not {kind!r}")
        if kind not in self._costs:
            self._costs[kind] = cost_of(self, kind)
        return self._costs[kind]

    def latency(self, runtime: str = "torch", device: str = "cpu", batch: int = 1) -> Latency:
        """The latency as it was measured, with its cost, its residual, and a way to measure a network again."""
        for kept in self.latencies.values():
            if (kept.runtime, kept.device, kept.batch) == (runtime, device, batch):
                return kept
        measured = latency_of(self, runtime, device, batch)
        self.latencies[measured.cost.label] = measured
        return measured

    def explain(self, mask: Tensor | None = None) -> str:
        """What is gated and what is not, and why; with a mask also what of each layer stays. 80 columns."""
        chosen = None if mask is None else as_array(self.canonical(self._one(mask)))
        return explain(self, chosen)

    def detach(self) -> nn.Module:
        """Take the gates off again; the model is then as it was before. Hand-placed gates stay, open."""
        if self._installed is not None:
            self._set(None)
            self._installed.remove()
            self._installed = None  # type: ignore[assignment]
            self.model.__dict__.pop(MARK, None)
        return self.model
