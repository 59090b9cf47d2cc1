"""Once the structure has settled: the compact network in the model's place, trained by the same optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.apply import apply_plan, cut, named_tensors, put_back
from espalier.compact.plan import Plan, from_runs
from espalier.gates.blocks import SINGLE, spans
from espalier.gates.gated import Gated
from espalier.gates.masking import strip
from espalier.gates.verify import Trial, distance, isolated_random

Places = Mapping[int, Any]  # by dimension: runs of indices


class Settled:
    """A gated model's compact network in its place, trained by the same optimiser. ``small``: the network.

    Masked training computes the closed gates too, and multiplies them by zero. The compact network computes the same
    without them. Its tensors are slices of the model's, the optimiser's state is cut along, and what was trained is
    written back. padded: the plan of a mask with more gates, which are in the network as zeros; see :func:`widened`.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer, padded: Plan | None = None
    ) -> None:
        self.model, self.form = model, Form(model, plan, padded)
        self.small = self.form.small
        self._hand_over(optimizer)

    def _hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimiser the smaller parameters in the places of the whole ones, with their state."""
        names = {id(tensor): name for name, tensor in named_tensors(self.model).items()}
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                name = names[id(parameter)]
                piece = self.form.pieces[name]
                group["params"][place] = piece
                if parameter in optimizer.state:
                    optimizer.state[piece] = self._cut_state(optimizer.state.pop(parameter), parameter, name)

    def _cut_state(self, state: Mapping[str, Any], whole: Tensor, name: str) -> dict[str, Any]:
        """What is as large as the parameter is cut as it is, along those dimensions that it has: Adafactor keeps sums
        over others. A state of another form, which cannot be cut, is begun anew."""
        dims, left = self.form.cuts.get(name, {}), dict(state)
        for key, value in state.items() if dims else ():
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.shape != whole.shape):
                continue
            if value.ndim != whole.ndim or not all(a in (1, b) for a, b in zip(value.shape, whole.shape)):
                return {}
            has = [dim for dim in dims if value.shape[dim] == whole.shape[dim]]
            left[key] = cut(value, name, {dim: dims[dim] for dim in has})
            self.form.clear(left[key], name, has)
        return left

    def write_back(self) -> None:
        """Write the trained slices into the model; what was cut away stays there as it was."""
        current = named_tensors(self.small)  # a module may have put another tensor in a buffer's place
        for name, tensor in named_tensors(self.model).items():
            piece = current.get(name, self.form.pieces.get(name))
            # A model that runs the compact network itself holds the pieces: see ``integrations.carried``.
            if piece is not None and piece is not tensor and not name.rpartition(".")[2].startswith("espalier_"):
                self.form.write(tensor, piece, name)


class Form:
    """A compact network as it is trained. ``pieces``: its tensors, by the names of the model's.

    padded: a plan that keeps more than ``plan`` does; the network then has zeros in what that one would cut."""

    def __init__(self, model: nn.Module, plan: Plan, padded: Plan | None = None) -> None:
        named, self.pieces = named_tensors(model), dict[str, Tensor]()
        self.small = strip(apply_plan(model, padded or plan, pieces=self.pieces))
        # By name: which places of the model's tensor a piece has, which of them the network itself keeps, and where
        # those are in the piece.
        self.cuts, self.own = _by_name(named, padded or plan), _by_name(named, plan)
        self.inside = {} if padded is None else {name: self._inside(name) for name in self.own}
        for name, inside in self.inside.items():
            self.clear(self.pieces[name].detach(), name, inside)

    def _inside(self, name: str) -> dict[int, Tensor]:
        """Where a piece has what the network keeps, by dimension."""
        kept = {dim: from_runs(runs) for dim, runs in self.cuts.get(name, {}).items()}
        places = {dim: {index: place for place, index in enumerate(own)} for dim, own in kept.items()}
        return {
            dim: torch.tensor(
                [places[dim][index] if dim in places else index for index in from_runs(runs)], dtype=torch.int64
            )
            for dim, runs in self.own[name].items()
        }

    def clear(self, piece: Tensor, name: str, dims: Iterable[int]) -> None:
        """Put zeros where a piece, or what is of its shape along these dimensions, is wider than the network."""
        inside = self.inside.get(name, {})
        for dim in dims:
            if dim in inside:
                wider = torch.ones(piece.shape[dim], dtype=torch.bool)
                wider[inside[dim]] = False
                piece.index_fill_(dim, wider.nonzero().flatten().to(piece.device), 0)

    def write(self, tensor: Tensor, piece: Tensor, name: str) -> None:
        """Write a piece into the model's tensor of this name, without the zeros that make it wider."""
        for dim, inside in self.inside.get(name, {}).items():
            piece = piece.detach().index_select(dim, inside.to(piece.device))
        put_back(tensor, piece, self.own.get(name, {}))

    def is_proven(self, trial: Trial, own: nn.Module) -> bool:
        """Whether it computes what the network itself does, and no gradient reaches its zeros, so that they stay."""
        for training, compared in trial.modes.items():
            if compared and not distance(trial.run(own, training), trial.run(self.small, training)) < trial.tolerance:
                return False
        trial.run(self.small, True, backward=True)
        for name, inside in self.inside.items():
            gradient = self.pieces[name].grad
            if gradient is not None:
                before = gradient.clone()
                self.clear(gradient, name, inside)
                if not before.equal(gradient):  # also where it is not a number
                    return False
        return True


def _by_name(named: Mapping[str, Tensor], plan: Plan) -> dict[str, Places]:
    """What a plan keeps of each tensor. Of a tied one it tells under one name alone."""
    kept = {id(named[name]): dims for name, dims in plan.tensors.items()}
    return {name: kept[id(tensor)] for name, tensor in named.items() if id(tensor) in kept}


def widened(gated: Gated, mask: Tensor, multiple: int) -> Tensor | None:
    """The mask with more gates open: what each group keeps is a multiple of so many channels, or its whole width.

    Kernels of a GPU run in steps of 8 channels, so that 13 take longer than 16. What is opened is trained as zeros.
    It is tried out, group by group where need be: a norm over channels, or an activation that is not 0 at 0, forbids
    it. None where no group is wider by it.
    """
    structure, width = gated.structure, spans(gated.structure)
    mask = gated.canonical(mask)
    more = dict[str, Tensor]()
    for group in structure.groups:
        where, step = structure.where(group), multiple // math.gcd(multiple, width[group.name])
        closed = (mask[where] == 0).nonzero().flatten() + where.start
        lacking = -int(mask[where].sum()) % step
        if group.kind not in SINGLE and not group.blocks and len(closed) and lacking:
            more[group.name] = closed[:lacking]
    if not more:
        return None
    with isolated_random():
        trial = Trial(gated.model, gated.example)
        plan = gated.plan(mask)
        own = strip(apply_plan(trial.model, plan, share=True))

        def opened(names: Iterable[str]) -> Tensor | None:
            wide = mask.clone()
            for name in names:
                wide[more[name]] = 1
            wide = gated.canonical(wide)
            try:
                return wide if Form(trial.model, plan, gated.plan(wide)).is_proven(trial, own) else None
            except (KeyError, RuntimeError):  # something else than widths changes, too
                return None

        wide = opened(more)
        return opened([name for name in more if opened([name]) is not None]) if wide is None else wide
