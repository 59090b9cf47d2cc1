"""Once the structure has settled: the compact network in the model's place, trained by the same optimiser."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from espalier.compact.apply import apply_plan, cut, named_tensors, put_back
from espalier.compact.plan import Plan, from_runs
from espalier.gates.blocks import SINGLE, spans
from espalier.gates.gated import Gated
from espalier.gates.masking import strip
from espalier.gates.one_pass import state_of
from espalier.gates.verify import Trial, distance, isolated_random
from espalier.space import BadInput

Places = Mapping[int, Any]  # by dimension: runs of indices
HELD = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_pre_hooks", "_forward_hooks",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class Settled:
    """A gated model's compact network in its place, trained by the same optimiser. ``small``: the network; ``pieces``:
    its tensors, by the names of the model's.

    Masked training computes the closed gates too, and multiplies them by zero. The compact network computes the same
    without them. Its tensors are slices of the model's, the optimiser's state is cut along, and what was trained is
    written back. padded: the plan of a mask with more gates, which are in the network as zeros; see :func:`widened`.
    """

    def __init__(self, model: nn.Module, plan: Plan, padded: Plan | None = None) -> None:
        self.model, self.pieces = model, dict[str, Tensor]()
        self.small = strip(apply_plan(model, padded or plan, pieces=self.pieces))
        self.cuts = Cuts(model, plan, padded)
        for name in self.cuts.inside:
            self.cuts.clear(self.pieces[name].detach(), name)
        self._insides: Insides | None = None

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimiser the smaller parameters in the places of the whole ones, with their state."""
        names = {id(tensor): name for name, tensor in named_tensors(self.model).items()}
        for own in family(optimizer):
            held = [parameter for group in own.param_groups for parameter in group["params"]]
            for parameter in [*held, *(one for one in own.state if isinstance(one, Tensor))]:
                name = names.get(id(parameter))
                if name is not None and parameter in own.state:
                    state = self._cut_state(own.state.pop(parameter), parameter, name)
                    own.state[self.pieces[name]] = state
            for group in own.param_groups:  # which an optimiser may share with one that it wraps
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) in names:
                        group["params"][place] = self.pieces[names[id(parameter)]]
        for parameter in self.model.parameters():
            parameter.grad = None  # of the last update before; to be clipped or summed by nobody
        self.together, self.is_named, self.looked = state_of(self.model).together, False, 0
        self.together.bare = False
        self.learned = {name: own.requires_grad for name, own in self.model.named_parameters()}

    def name_what_is_missed(self) -> None:
        """Warn, once, of what is done to the model alone, which stands still unless it runs the network itself."""
        if self.is_named or self.inside:
            return
        model, small = self.model, self.small
        self.looked += 1
        named = list(model.named_parameters()) if self.looked & (self.looked - 1) == 0 else []  # ever more seldom
        reached = next((name for name, own in named if own.grad is not None), None)
        frozen = next((name for name, own in named if own.requires_grad is not self.learned.get(name)), None)
        mode = "train" if model.training else "eval"
        done = (
            "has run" if self.together.bare
            else f"has a gradient at {reached}" if reached
            else f"has another requires_grad at {frozen}" if frozen
            else f"is in {mode} mode, and .network is not" if model.training is not small.training
            else ""
        )  # fmt: skip
        if done:
            self.is_named = True
            warnings.warn(
                f"your model {done}: it stands still since the structure has settled. What is trained is .network; "
                "use that in its place",
                stacklevel=4,
            )

    def _cut_state(self, state: Mapping[str, Any], whole: Tensor, name: str) -> dict[str, Any]:
        """What is as large as the parameter is cut as it is, along those dimensions that it has: Adafactor keeps sums
        over others. A state of another form, which cannot be cut, is begun anew."""
        if name not in self.cuts.own:
            return dict(state)
        leaves, form = tree_flatten(dict(state))  # also in lists, as of the last gradients
        for place, value in enumerate(leaves):
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.shape != whole.shape):
                continue
            if value.ndim != whole.ndim or not all(a in (1, b) for a, b in zip(value.shape, whole.shape)):
                return {}
            dims = [dim for dim, size in enumerate(whole.shape) if value.shape[dim] == size]
            leaves[place] = self.cuts.cut(value, name, dims)
        left: dict[str, Any] = tree_unflatten(leaves, form)
        return left

    def write_back(self) -> None:
        """Write the trained slices into the model; what was cut away stays there as it was."""
        current = named_tensors(self.small)  # a module may have put another tensor in a buffer's place
        for name, tensor in named_tensors(self.model).items():
            piece = current.get(name, self.pieces.get(name))
            # A model that runs the compact network itself holds the pieces: see ``Insides``.
            if piece is not None and piece is not tensor and not name.rpartition(".")[2].startswith("espalier_"):
                self.cuts.write(tensor, piece, name)

    @property
    def inside(self) -> bool:
        """Whether the model itself runs the compact network now."""
        return self._insides is not None and self._insides.inside

    def enter(self) -> None:
        """From here on the model itself runs the compact network, until :meth:`leave`."""
        if self._insides is None:
            self._insides = Insides(self.model, self.small)
        if not self._insides.inside:
            self._insides.exchange()

    def leave(self) -> None:
        """From here on the model is the whole network again, with what was trained."""
        if self._insides is not None and self._insides.inside:
            self._insides.exchange()
        self.write_back()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model is the whole network, with what was trained."""
        inside = self.inside
        self.leave()
        try:
            yield
        finally:
            if inside:
                self.enter()

    def is_proven(self, trial: Trial, own: nn.Module) -> bool:
        """Whether it computes what the network itself does, and no gradient reaches its zeros, so that they stay."""
        for training, compared in trial.modes.items():
            if compared and not distance(trial.run(own, training), trial.run(self.small, training)) < trial.tolerance:
                return False
        dead = self._reached(trial, self.cuts.inside)
        if dead:  # where all that follows is dead, none reaches what would move either: tried the other way round
            with torch.no_grad():
                parameters: list[Tensor] = list(self.small.parameters())
                torch._foreach_neg_(parameters)
                try:
                    dead = self._reached(trial, dead)
                finally:
                    torch._foreach_neg_(parameters)
        return dead is not None and not dead

    def _reached(self, trial: Trial, names: Iterable[str]) -> list[str] | None:
        """Those of the padded tensors that get a gradient of nothing but zeros. None: one reaches the zeros of another,
        or is not a number."""
        self.small.zero_grad()
        trial.run(self.small, True, backward=True)
        dead = list[str]()
        for name in names:
            gradient = self.pieces[name].grad
            if gradient is not None:
                before = gradient.clone()
                self.cuts.clear(gradient, name)
                if not before.equal(gradient):
                    return None
                dead += [] if bool(gradient.any()) else [name]
        return dead


class Insides:
    """The insides of a compact network in the model that it was cut from; out of it again they leave no trace."""

    def __init__(self, model: nn.Module, small: nn.Module) -> None:
        if type(small) is not type(model):
            raise BadInput(f"{type(model).__name__} is one layer, which the cut replaces; put it into a module")
        plan: Mapping[str, Any] = small.__dict__["espalier_plan"]
        names = {*HELD, *(name for name in plan["attributes"] if "." not in name)}
        names |= {name for name, value in small.__dict__.items() if _holds_modules(value)}
        self.model, self.inside = model, False
        self._other = {name: small.__dict__[name] for name in names}

    def exchange(self) -> None:
        own = self.model.__dict__
        self._other, held = {name: own[name] for name in self._other}, self._other
        own.update(held)
        self.inside = not self.inside


def _holds_modules(value: object) -> bool:
    """Whether it is a list, tuple or dict with a module in it, which is no child of the module that holds it."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, nn.Module) or _holds_modules(v) for v in value)


def family(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimiser and those that it holds, as Lookahead does: their states are of the same parameters."""
    found = [optimizer]
    for one in found:
        kept = [value for name, value in vars(one).items() if name not in ("state", "param_groups")]
        inside = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.optim.Optimizer)]
        found += [leaf for leaf in inside if not any(leaf is known for known in found)]
    return found


def moved(
    step: Callable[[], None], parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], losses: Tensor
) -> bool:
    """One step of an optimiser, and whether it moves the settled network. One that does not, since it moves a list of
    parameters of its own, is named; False where that cannot be told, as of gradients that are 0."""
    versions, before = [own._version for own in parameters], [own.detach().clone() for own in parameters]
    step()
    # As torch counts changes, so that a GPU is not waited for. Those by fused kernels are not counted: look at numbers.
    if any(own._version != version for own, version in zip(parameters, versions)):
        return True
    if not bool(losses.isfinite().all()):
        return False
    rates = {id(own): float(group.get("lr", 1.0)) for group in groups for own in group["params"]}
    pushed = [
        not own.detach().equal(old)
        for own, old in zip(parameters, before)
        if own.grad is not None and rates[id(own)] and bool((own.grad.to_dense() != 0).any())
    ]
    if pushed and not any(pushed):
        warnings.warn(
            "the optimizer has not moved the settled network: does it keep a list of parameters of its own? Its "
            "step() is to go through its param_groups, in which the smaller parameters are",
            stacklevel=4,
        )
    return bool(pushed)


class Cuts:
    """Which places of each tensor a compact network has, by the names of the model's. ``held``: those of the network as
    it is trained; ``own``: those that it ends with.

    padded: a plan that keeps more than ``plan`` does; the network then has zeros in what that one would cut."""

    def __init__(self, model: nn.Module, plan: Plan, padded: Plan | None = None) -> None:
        named = named_tensors(model)
        self.held, self.own = _by_name(named, padded or plan), _by_name(named, plan)
        self.inside = {} if padded is None else {name: self._inside(name) for name in self.own}

    def _inside(self, name: str) -> dict[int, Tensor]:
        """Where a piece has what the network ends with, by dimension."""
        held = {dim: from_runs(runs) for dim, runs in self.held.get(name, {}).items()}
        places = {dim: {index: place for place, index in enumerate(indices)} for dim, indices in held.items()}
        return {
            dim: torch.tensor(
                [places[dim][index] if dim in places else index for index in from_runs(runs)], dtype=torch.int64
            )
            for dim, runs in self.own[name].items()
        }

    def cut(self, tensor: Tensor, name: str, dims: Collection[int] | None = None) -> Tensor:
        """The piece of the model's tensor of this name, or of what is as large along these dimensions."""
        held = {dim: runs for dim, runs in self.held.get(name, {}).items() if dims is None or dim in dims}
        piece = cut(tensor, name, held) if held else tensor.detach().clone()
        self.clear(piece, name, dims)
        return piece

    def clear(self, piece: Tensor, name: str, dims: Collection[int] | None = None) -> None:
        """Put zeros where a piece is wider than what the network ends with, along these dimensions or all."""
        for dim, inside in self.inside.get(name, {}).items():
            if dims is None or dim in dims:
                wider = torch.ones(piece.shape[dim], dtype=torch.bool)
                wider[inside] = False
                piece.index_fill_(dim, wider.nonzero().flatten().to(piece.device), 0)

    def write(self, tensor: Tensor, piece: Tensor, name: str) -> None:
        """Write a piece into the model's tensor of this name, without the zeros that make it wider."""
        for dim, inside in self.inside.get(name, {}).items():
            piece = piece.detach().index_select(dim, inside.to(piece.device))
        put_back(tensor, piece, self.own.get(name, {}))


class OneShape:
    """Networks of several runs, each under a mask of its own, as networks of one shape. ``small``: computes with the
    tensors of any of them.

    Each group is as wide as in the run that keeps most of it. What a run keeps less is in its network as zeros."""

    def __init__(self, small: nn.Module, cuts: Sequence[Cuts]) -> None:
        self.small, self.cuts = small, cuts

    def cut(self, stack: Tensor, name: str) -> Tensor:
        """Of a tensor of all runs ``(R, ...)``, or of what is of its shape."""
        return torch.stack([own.cut(tensor, name) for own, tensor in zip(self.cuts, stack, strict=True)])

    def write(self, stack: Tensor, pieces: Tensor, name: str) -> None:
        """Write what was cut, as it is now, into its places; in place."""
        for own, tensor, piece in zip(self.cuts, stack, pieces, strict=True):
            own.write(tensor, piece, name)

    def call(self, params_and_buffers: Mapping[str, Tensor], mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``gated.call``: the mask is what the network was cut by."""
        return functional_call(self.small, dict(params_and_buffers), args, kwargs)


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
    more = list[tuple[slice, Tensor]]()
    for group in structure.groups:
        where, step = structure.where(group), multiple // math.gcd(multiple, width[group.name])
        wide = _with_more(mask[where], -mask[where].sum() % step)
        if group.kind not in SINGLE and not group.blocks and not wide.equal(mask[where]):
            more.append((where, wide))
    if not more:
        return None
    with isolated_random():
        trial = Trial(gated.model, gated.example)
        plan = gated.plan(mask)
        own = strip(apply_plan(trial.model, plan, share=True))

        def opened(groups: Iterable[tuple[slice, Tensor]]) -> Tensor | None:
            wide = mask.clone()
            for where, gates in groups:
                wide[where] = gates
            wide = gated.canonical(wide)
            try:
                return wide if Settled(trial.model, plan, gated.plan(wide)).is_proven(trial, own) else None
            except (KeyError, RuntimeError):  # something else than widths changes, too
                return None

        together = opened(more)
        return opened([one for one in more if opened([one]) is not None]) if together is None else together


def of_one_shape(gated: Gated, masks: Tensor, names: Collection[str]) -> OneShape | None:
    """The compact networks of runs under these masks ``(R, d)``, if they can be trained in one shape that is smaller
    than the whole. It is tried out for each run. names: of the tensors that the runs have."""
    structure, masks = gated.structure, gated.canonical(masks)
    wide = masks.clone()
    for group in structure.groups:
        where = structure.where(group)
        kept = masks[:, where].sum(-1, keepdim=True)
        wide[:, where] = _with_more(masks[:, where], kept.amax() - kept)
    if bool(wide.all()):
        return None
    plans = [(gated.plan(mask), gated.plan(wider)) for mask, wider in zip(masks, wide)]
    first, shapes, cuts = plans[0][1], set[tuple[torch.Size, ...]](), list[Cuts]()
    if any((wider.attributes, wider.layers) != (first.attributes, first.layers) for _, wider in plans):
        return None
    try:
        with isolated_random():
            trial = Trial(gated.model, gated.example)
            for plan, wider in plans:
                one = Settled(trial.model, plan, wider)
                if not one.is_proven(trial, strip(apply_plan(trial.model, plan, share=True))):
                    return None
                held = named_tensors(one.small)
                shapes.add(tuple(held[name].shape for name in names))
                if len(shapes) > 1 or any(held[name] is not one.pieces[name] for name in names):  # kept elsewhere
                    return None
                cuts.append(one.cuts)
    except (BadInput, KeyError, RuntimeError):  # something else than widths differs, or the model cannot be tried out
        return None
    return OneShape(strip(apply_plan(gated.model, first)), cuts)


def _with_more(masks: Tensor, count: Tensor) -> Tensor:
    """masks ``(*R, n)`` of a group with so many ``(*R, 1)`` more gates open, the first of those that are closed."""
    closed = 1 - masks
    return masks + closed * (closed.cumsum(-1) <= count)
