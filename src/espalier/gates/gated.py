"""The gated model: a handle beside the user's own module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree

from espalier.compact.apply import apply_plan
from espalier.compact.plan import Plan
from espalier.cost import Cost
from espalier.gates.blocks import Blocks
from espalier.gates.build_plan import build_plan
from espalier.gates.costs import cost_of, held
from espalier.gates.explain import explain
from espalier.gates.latency import Latency, asked_by, latency_of
from espalier.gates.masking import (
    Channels,
    Installed,
    install,
    opened_afterwards,
    set_mask,
    slopes_of,
    strip,
    with_mask,
)
from espalier.gates.one_pass import Together, Unfit, apart, examples_of
from espalier.gates.structure import Structure, as_array, canonical, device_of, join
from espalier.gates.trace import Example
from espalier.gates.verify_one_pass import Verdict, enlarged, forbidden, tried
from espalier.space import BadInput, BadMask, Space


class Slopes:
    """Reads what a backward pass has left at the gates under the mask that is set; see :meth:`Gated.masked`."""

    def __init__(self, installed: Installed, alone: bool) -> None:
        self.installed, self.alone = installed, alone  # alone: one of ``(1, d)`` masks

    def __call__(self) -> Tensor:
        return self.sized()[0]

    def sized(
        self, across: Callable[[Tensor], Tensor] = lambda slopes: slopes, even: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """The slopes and their sizes, see :meth:`Channels.sized`.

        across: the mean over processes that each compute a part of the loss. Sizes are of that mean. even: of the
        search that is told, ``search.even``.
        """
        slopes = across(slopes_of(self.installed))
        return self.installed.channels.on(slopes.device).sized(slopes.unsqueeze(0) if self.alone else slopes, even)


class Gated:
    """Gates on a model, made by :func:`espalier.attach`.

    ``model``: the user's module, with masks of ones. ``space``: the groups of gates. ``refused``: what was found but
    is not offered, and why. ``examples``: in the inputs that it was attached with, over which MACs are counted.
    ``blocks``: with ``round_to``, by group the units that each gate opens.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        *,
        refused: Mapping[str, str] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.model = model
        self.structure = structure
        self.space: Space = structure.space
        self.refused = dict(refused or {})
        self.blocks = dict(blocks or {})
        self.examples = 1
        self.example = Example((), {})  # what it was attached with
        self.latencies: dict[str, Latency] = {}  # measured, by the label of their cost
        self._costs: dict[str, Cost] = {}
        self._installed = install(model, structure)
        self._forbidden = forbidden(model, self._installed.spots)  # why masks run one at a time, whatever the batch
        self.checks = False  # whether gates were tried out; then masks in one pass are, too
        self._verdicts: dict[Hashable, Verdict] = {}
        self._mask: Tensor | None = None
        self._slopes = False
        self._held = [
            (join(path, name), module._modules, name, child)
            for path, module in model.named_modules()
            for name, child in module._modules.items()
        ]

    @property
    def d(self) -> int:
        """The number of entries of a mask."""
        return self.space.d

    @property
    def flow(self) -> tuple[str, ...]:
        """The names of the groups from the input to the output."""
        return self.structure.flow()

    def __repr__(self) -> str:
        return f"Gated({type(self.model).__name__}, d={self.d}, groups={len(self.space.groups)})"

    def _checked(self, mask: Tensor, wait: bool = True) -> Tensor:
        """wait: look at the values of a mask on a GPU too."""
        self._attached()
        unseen = not wait and isinstance(mask, Tensor) and mask.device.type != "cpu"
        (self.space.check_mask_form if unseen else self.space.check_mask)(mask)
        return mask.detach()

    @property
    def _is_attached(self) -> bool:
        return self._installed is not None

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
    def masked(self, mask: Tensor, *, slopes: bool = False) -> Iterator[Slopes]:
        """While inside, the model runs under this mask ``(d)``; outside it is as before. May be nested.

        So does a ``deepcopy`` of it: made inside, the copy runs under this mask too, and without one afterwards.

        slopes: the context then yields a function that returns, after a backward pass, the slopes ``(d)``: the
        derivative of the loss by each entry of the mask, closed gates included. Go backwards inside:
        ``with gated.masked(mask, slopes=True) as slopes: loss(model(x), y).backward(); gradient = slopes()``.
        ``slopes.sized()`` is both the slopes and their sizes, as ``search.tell`` takes them.

        Masks ``(samples, d)`` run in one pass: example n of the batch runs under mask ``n % samples``, and BatchNorm
        takes the statistics of each mask's examples alone. Each mask's outputs are ``outputs[s::samples]``. The loss is
        the mean over all examples, which is the mean of the masks' losses; then slopes are ``(samples, d)``, those of
        each mask's own mean loss (samples times the derivative of the loss). The first batch of each size is tried out;
        a model that cannot run so is refused with the reason, see :meth:`one_at_a_time`.
        """
        mask, previous = self._checked(mask, wait=False), (self._mask, self._slopes)
        if mask.ndim > 2 or (mask.ndim == 2 and not len(mask)):
            raise BadMask(f"a mask of {self.d} entries, or (samples, {self.d}) masks, not shape {tuple(mask.shape)}")
        alone = mask.ndim == 2 and len(mask) == 1
        self._set(mask[0] if alone else mask, slopes)
        try:
            with opened_afterwards(self._installed.together):
                yield Slopes(self._installed, alone)
        finally:
            self._set(*previous)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that says whether the model has run inside, uncompiled and with its hooks."""
        self._attached()
        together = self._installed.together
        together.ran = False
        yield lambda: together.ran

    @property
    def channels(self) -> Channels:
        """Which channels each gate multiplies."""
        self._attached()
        return self._installed.channels

    def _set(self, mask: Tensor | None, slopes: bool = False) -> None:
        if not self._is_attached:  # detached inside
            return
        several = mask is not None and mask.ndim == 2
        if several:
            self._refuse(self._forbidden)
        set_mask(self._installed, mask, slopes)
        self._installed.together.check = self._check_pass if several else None
        self._mask, self._slopes = mask, slopes

    # ---- several masks in one pass ---------------------------------------------------------------------------------

    def one_at_a_time(self, inputs: Any = None, samples: int = 2) -> str:
        """Why several masks cannot run in one pass on this model; empty where they can.

        inputs: of a batch, as for :func:`espalier.attach`, of which a multiple of ``samples`` examples; None: those of
        attach. Tried out once for each number of examples and each train or eval mode of the modules.
        """
        if inputs is None:
            if self._verdicts:
                return next((verdict.why for verdict in self._verdicts.values() if verdict.why), "")
            if not self._is_attached:
                return ""
            why = self._forbidden
            if why or not self.checks:
                return why
            device = device_of(self.model)
            example = enlarged(*self.example, samples)
            args, kwargs = _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
        else:
            args, kwargs = Example.of(inputs)
        try:
            return self._verdict(args, kwargs, samples).why
        except Unfit as error:  # no examples
            return str(error)

    def apart(self, outputs: Any, samples: int) -> list[Any]:
        """What the model gave for a batch under several masks, as each mask's own outputs, in the same form."""
        examples = self._installed.together.examples
        return apart(outputs, self._verdicts[self._key(examples, samples)].outputs, examples, samples)

    def _key(self, examples: int, samples: int) -> Hashable:
        return (examples, samples, self.model.training, *(child.training for *_, child in self._held if child))

    def _verdict(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> Verdict:
        self._attached()
        key = self._key(examples_of((args, kwargs)), samples)
        if key not in self._verdicts:
            why = self._forbidden
            self._verdicts[key] = Verdict(why) if why else tried(self.model, self.structure, args, kwargs, samples)
        return self._verdicts[key]

    def _check_pass(self, together: Together, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass under several masks: refuse what would not be exact."""
        verdict = self._verdict(args, kwargs, together.samples)
        self._refuse(verdict.why)
        together.dims = verdict.dims

    def _refuse(self, why: str) -> None:
        if why:
            raise Unfit(f"several masks cannot run in one pass on this model: {why}; set one mask at a time")

    def call(self, params_and_buffers: Mapping[str, Tensor], mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model as a pure function of its tensors and one mask ``(d)``; made for ``vmap``, ``grad``, ``compile``.

        The mask may also be given by channels, ``gated.channels.of(mask)``: its derivative then is. The values are not
        looked at. Under ``vmap`` over masks, BatchNorm in train mode needs running statistics of its own for each mask:
        give a copy of them a batch dimension.
        """
        if not torch.compiler.is_compiling():  # there every look at a module would become a guard
            self._attached()
            if self._installed.together.samples:
                raise BadInput("call takes one mask of its own; call it outside of masked(masks) with several")
        return functional_call(self.model, with_mask(self._installed, params_and_buffers, mask), args, kwargs)

    # ---- what a mask means -----------------------------------------------------------------------------------------

    def canonical(self, mask: Tensor) -> Tensor:
        """mask: ``(*B, d)``. The mask ``(*B, d)`` with dead gates closed and no group emptier than it may be."""
        mask = self._checked(mask)
        rows = as_array(mask).reshape(-1, self.d)
        masks = np.stack([canonical(self.structure, row) for row in rows]) if len(rows) else rows
        return torch.as_tensor(masks, dtype=mask.dtype, device=mask.device).reshape(mask.shape)

    def plan(self, mask: Tensor) -> Plan:
        """How the model would be cut: which index of which tensor stays. The mask ``(d)`` is made canonical first."""
        return build_plan(self.structure, as_array(self.canonical(self._one(mask))))

    def compact(self, mask: Tensor) -> nn.Module:
        """The plain, smaller module for a mask ``(d)``; the user's model is untouched."""
        plan = self.plan(mask)
        several = self._mask is not None and self._mask.ndim == 2
        with self.masked(torch.ones(self.d)) if several else contextlib.nullcontext():  # a plan cuts buffers of one
            return strip(apply_plan(self.model, plan))

    def cost(self, kind: str | Cost = "weights", **how: Any) -> Cost:
        """The cost of a mask: "weights", "macs", "units", "parameters", "latency" or a registered kind, exact for
        canonical masks; or a cost of one's own, over the space of these gates.

        how: of "latency", in milliseconds: ``runtime="torch" | "onnxruntime"``, ``device="cpu"``, ``batch=1``. It is
            measured on this machine, once. As one word: "latency:onnxruntime:64".
        """
        if isinstance(kind, Cost):
            return kind.over(self.space)
        if kind.partition(":")[0] == "latency":
            return self.latency(**asked_by(kind) | how).cost
        if how:
            raise BadInput(f"{', '.join(how)}: only the latency is measured in a way that can be chosen, not {kind!r}")
        if kind not in self._costs:
            self._costs[kind] = cost_of(self, kind)
        return self._costs[kind]

    def held(self, kind: str = "weights") -> list[tuple[str, float]]:
        """What the cheapest mask keeps of "weights", "macs" or "parameters", by tensor, the largest first."""
        return held(self, kind)

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
        return self.model
