"""Training that goes on with the smaller network once the structure is settled.

Masked training computes the closed gates too, and multiplies them by zero. The compact network computes the same
without them. Its tensors are slices of the model's, the optimiser's state is cut along, and what was trained is written
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.apply import apply_plan, cut, named_tensors, put_back
from espalier.compact.plan import Plan
from espalier.gates.masking import strip


class Settled:
    """A gated model's compact network in its place, trained by the same optimiser. ``small``: the network."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        self.model, named = model, named_tensors(model)
        self.cuts = {id(named[name]): dims for name, dims in plan.tensors.items()}  # a tied tensor has several names
        self.pieces: dict[str, Tensor] = {}
        self.small = strip(apply_plan(model, plan, pieces=self.pieces))
        self._hand_over(optimizer)

    def _hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimiser the smaller parameters in the places of the whole ones, with their state."""
        names = {id(tensor): name for name, tensor in named_tensors(self.model).items()}
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                name = names[id(parameter)]
                piece = self.pieces[name]
                group["params"][place] = piece
                if parameter in optimizer.state:
                    optimizer.state[piece] = self._cut_state(optimizer.state.pop(parameter), parameter, name)

    def _cut_state(self, state: Mapping[str, Any], whole: Tensor, name: str) -> dict[str, Any]:
        dims = self.cuts.get(id(whole), {})
        return {
            key: cut(value, name, dims) if isinstance(value, Tensor) and value.shape == whole.shape else value
            for key, value in state.items()
        }

    def write_back(self) -> None:
        """Write the trained slices into the model; what was cut away stays there as it was."""
        current = named_tensors(self.small)  # a module may have put another tensor in a buffer's place
        for name, tensor in named_tensors(self.model).items():
            if not name.rpartition(".")[2].startswith("espalier_"):
                put_back(tensor, current.get(name, self.pieces[name]), self.cuts.get(id(tensor), {}))
