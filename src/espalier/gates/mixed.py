"""A choice placed by hand: a module that is one of several operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.gates.structure import GateGroup
from espalier.gates.trace.watch import Options
from espalier.space import BadInput, BadType

# The mask's buffer: of one dimension where it is installed, of two where a call brings it.
MIXED = "espalier_mask_mixed"


class Mixed(Options):
    """One of several operations, which the search chooses among; the first while no mask is set.

    ``options``: modules that take the same input and give tensors of the same shape. Under a mask only the option that
    is taken runs; where slopes are asked for, or many masks are computed at once, all run, weighted by the mask.
    Its cost is that of the option taken, and the compact model holds that option in its place.

    >>> mixed = Mixed([nn.ReLU(), nn.Tanh()])
    >>> mixed(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """

    def __init__(self, options: Iterable[nn.Module]) -> None:
        super().__init__()
        given = list(options)
        if not all(isinstance(option, nn.Module) for option in given):
            raise BadType(f"the options of Mixed are torch modules, not {given!r}")
        if len(given) < 2:
            raise BadInput(f"Mixed chooses among two options or more, not {len(given)}")
        self.options = nn.ModuleList(given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = self._buffers.get(MIXED)
        if self.tracing:
            return self._sum(torch.ones(len(self.options)), *args, **kwargs)
        state = self.__dict__.get("_espalier_state")
        if mask is None or (mask.ndim == 1 and not (state is not None and state.masked)):
            return self.options[0](*args, **kwargs)
        if mask.ndim > 1 or mask.requires_grad or torch.compiler.is_compiling():
            return self._sum(mask, *args, **kwargs)
        return self.options[int(mask.argmax())](*args, **kwargs)

    def _sum(self, mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        total: Tensor | None = None
        for k, option in enumerate(self.options):
            result = option(*args, **kwargs)
            if not isinstance(result, Tensor) or (total is not None and result.shape != total.shape):
                raise BadInput("the options of Mixed give one tensor each, all of one shape")
            if not self.tracing:
                result = result * mask[..., k].to(result.dtype)
            total = result if total is None else total + result
        return total


def choice_groups(modules: Mapping[str, nn.Module]) -> list[GateGroup]:
    """One choice for each module that is one."""
    nothing = np.zeros(0, dtype=np.int64)
    groups = []
    for path, module in modules.items():
        if isinstance(module, Mixed):
            options = tuple(f"{path}.options.{k}" if path else f"options.{k}" for k in range(len(module.options)))
            groups.append(GateGroup(path or "mixed", "choices", (nothing,) * len(options), (), options, 0))
    return groups
