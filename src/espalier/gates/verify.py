"""Never silently wrong: every group is tried out, masked against cut, before its gates are offered."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.compact.apply import apply_plan
from espalier.compact.build import Adapted, build_plan, phantom_layers
from espalier.gates.atoms import Array
from espalier.gates.canonical import canonical
from espalier.gates.masking import install, set_mask
from espalier.gates.structure import GateGroup, Structure
from espalier.gates.trace import tensors_in

TOLERANCE = 1e-6  # relative, in float64; what is inexact is so by far more, and some models round to float32 inside
Build = Callable[[Sequence[GateGroup]], Structure]


def to_float64(value: Any) -> Any:
    """Floating-point tensors of nested arguments in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_float64(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(to_float64(item) for item in value)
    return value


class Trial:
    """A copy of the model in float64 with random parameters, on which groups are tried out.

    Random, because a shift of zero, or a scale of 1e-6, hides what a wrong cut would leave behind.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.random = torch.Generator().manual_seed(20190917)
        self.model = copy.deepcopy(model).double()
        self.args, self.kwargs = to_float64(args), to_float64(kwargs)
        self.modules = dict(self.model.named_modules())
        self._perturb()
        self.modes = [False] + ([True] if self._repeats(True) else [])
        self.adapted: list[Adapted] = []
        self.phantoms: list[str] = []

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.random, dtype=torch.float64).to(like.device)

    def _perturb(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    fan = parameter[0].numel() if parameter.ndim > 1 else 10
                    parameter.add_(self._noise(parameter), alpha=0.3 / max(fan, 1) ** 0.5)
            for module in self.model.modules():
                for name, value in vars(module).items():
                    if isinstance(value, float) and ("drop" in name.lower() or isinstance(module, nn.Dropout)):
                        object.__setattr__(module, name, 0.0)
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
                if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                    assert module.running_var is not None
                    module.running_mean.add_(self._noise(module.running_mean), alpha=0.3)
                    module.running_var.add_(self._noise(module.running_var).abs())

    def run(self, model: nn.Module, training: bool) -> list[Tensor]:
        """The output's tensors; buffers are put back afterwards."""
        held = [(b, b.clone()) for b in model.buffers()]
        model.train(training)
        torch.manual_seed(7)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return list(tensors_in(model(*self.args, **self.kwargs)))
        finally:
            with torch.no_grad():
                for buffer, value in held:
                    buffer.copy_(value)

    def _repeats(self, training: bool) -> bool:
        """Whether the model runs in this mode and gives the same twice under different random numbers."""
        try:
            with isolated_random():
                first = self.run(self.model, training)
                torch.manual_seed(8)
                self.model.train(training)
                held = [(b, b.clone()) for b in self.model.buffers()]
                with torch.no_grad():
                    second = list(tensors_in(self.model(*self.args, **self.kwargs)))
                    for buffer, value in held:
                        buffer.copy_(value)
        except Exception:
            return False
        return distance(first, second) < TOLERANCE

    def disagreement(self, structure: Structure, masks: Sequence[Array], adapted: Sequence[Adapted] = ()) -> str:
        """What goes wrong between masked and cut under these masks; empty when nothing does."""
        space = structure.space
        installed = install(self.model, structure)
        try:
            for mask in masks:
                mask = canonical(structure, space, mask)
                plan = build_plan(structure, self.modules, mask, [*self.adapted, *adapted], self.phantoms)
                set_mask(self.model, installed, torch.tensor(mask, dtype=torch.float64))
                for training in self.modes:
                    try:
                        small = apply_plan(self.model, plan, share=True)
                        cut = self.run(small, training)
                    except Exception as error:
                        return f"the cut model does not run: {_short(error)}"
                    apart = distance(self.run(self.model, training), cut)
                    if not apart < TOLERANCE:
                        mode = "train" if training else "eval"
                        return f"masked and cut outputs differ by {apart:.1e} in {mode} mode"
            return ""
        finally:
            set_mask(self.model, installed, None)
            installed.remove()


@contextlib.contextmanager
def isolated_random() -> Iterator[None]:
    """Whatever is drawn inside leaves the user's random state as it was."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started else []
    with torch.random.fork_rng(devices=devices):
        yield


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest value of each; infinite if unlike."""
    if len(a) != len(b):
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b):
        if x.shape != y.shape:
            return float("inf")
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        if bool(same.all()):
            continue
        finite = x[x.isfinite()]
        largest = finite.abs().max().item() if len(finite) else 0.0
        gap = (x - y)[~same].abs().max().item() / max(largest, 1e-12)
        worst = max(worst, gap) if gap == gap else float("inf")
    return worst


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:90] if text else ''}"


def random_masks(structure: Structure, only: GateGroup | None, rng: np.random.Generator, count: int) -> list[Array]:
    """Masks that close about half, or nearly all, of one group's gates or of every group's."""
    masks = []
    for i in range(count):
        parts = []
        for group in structure.groups:
            mask = np.ones(group.size)
            if only is None or group.name == only.name:
                share = (0.5, 0.85, 0.2)[i % 3]
                mask = (rng.random(group.size) >= share).astype(np.float64)
                if mask.all() and (only is not None or group.kind != "branches"):
                    mask[rng.integers(group.size)] = 0.0
                if not mask.any() and group.kind != "branches":
                    mask[rng.integers(group.size)] = 1.0
            parts.append(mask)
        masks.append(np.concatenate(parts))
    return masks


def verified(trial: Trial, groups: Sequence[GateGroup], build: Build) -> tuple[list[GateGroup], dict[str, str]]:
    """The groups that are exact, alone and together, and for each refused one why."""
    rng = np.random.default_rng(17)
    left, refused = list(groups), dict[str, str]()
    while left:
        structure = build(left)
        if not trial.disagreement(structure, random_masks(structure, None, rng, 3)):
            break
        wrong = {}
        for group in left:
            problem = trial.disagreement(structure, random_masks(structure, group, rng, 2))
            if problem and not _adapt(trial, structure, group, random_masks(structure, group, rng, 2)):
                wrong[group.name] = problem
        if not wrong:
            problem = trial.disagreement(structure, random_masks(structure, None, rng, 3))
            if not problem:
                break
            name = _first_wrong(trial, left, build, rng)
            wrong = {name: f"together with others: {problem}"}
        refused |= wrong
        left = [group for group in left if group.name not in wrong]
    return [_emptiable(trial, left, build, i) for i in range(len(left))], refused


def _first_wrong(trial: Trial, groups: Sequence[GateGroup], build: Build, rng: np.random.Generator) -> str:
    """The first group that, added to those before it, makes joint masks disagree."""
    for count in range(1, len(groups) + 1):
        structure = build(groups[:count])
        if trial.disagreement(structure, random_masks(structure, None, rng, 4)):
            return groups[count - 1].name
    return groups[-1].name


def _adapt(trial: Trial, structure: Structure, group: GateGroup, masks: Sequence[Array]) -> bool:
    """Find the integer attributes that have to follow the cut; accepted only when the outputs then agree."""
    candidates = _candidates(trial, structure, group)
    for count in range(1, min(len(candidates), 4) + 1):
        for chosen in itertools.islice(itertools.combinations(candidates, count), 40):
            if len({(c.path, c.attribute) for c in chosen}) == count and not trial.disagreement(
                structure, masks, chosen
            ):
                trial.adapted += chosen
                return True
    return False


def _candidates(trial: Trial, structure: Structure, group: GateGroup) -> list[Adapted]:
    """Integers of the modules that write or read the group, and of those around them, equal to a gated length."""
    trace = structure.trace
    lengths = {group.size}
    axes: list[tuple[int, int]] = []
    paths: list[str] = []
    mine = {int(r) for unit in group.units for r in trace.atoms.roots(unit)}
    for info in trace.tensors:
        for dim, own in enumerate(info.atoms):
            roots = trace.atoms.roots(own)
            inside = int(np.isin(roots, list(mine)).sum())
            if inside:
                axes.append((info.number, dim))
                lengths |= {inside // k for k in (1, 2, 3, 4) if inside % (k * group.size) == 0}
                paths += [path for path, _ in info.places]
    around: dict[str, None] = {}
    for path in paths:
        while path:
            around[path] = None
            path = path.rpartition(".")[0]
    around[""] = None
    found = []
    for path in sorted(around, key=lambda p: -p.count(".") - bool(p)):
        module = trial.modules[path]
        for name, value in vars(module).items():
            if type(value) is not int or value < 1:
                continue
            if value in lengths and value % group.size == 0:
                found.append(Adapted(path, name, group=group.name, per_unit=value // group.size))
            else:
                for number, dim in axes:
                    if value == len(trace.tensors[number].atoms[dim]):
                        found.append(Adapted(path, name, tensor=number, dim=dim))
                        break
    return [c for c in found if not _has_known_size(trial.modules[c.path])]


def _has_known_size(module: nn.Module) -> bool:
    known = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.Embedding, nn.RNNBase)
    return isinstance(module, (*known, nn.GroupNorm, nn.LayerNorm))


def _emptiable(trial: Trial, groups: Sequence[GateGroup], build: Build, i: int) -> GateGroup:
    """The group with ``least`` 0 where closing all its gates runs and is exact, else 1."""
    group = groups[i]
    if group.least == 0 or group.kind == "channels":
        return group
    trying = [replace(g, least=0) if g is group else g for g in groups]
    structure = build(trying)
    mask = np.concatenate([np.zeros(g.size) if g.name == group.name else np.ones(g.size) for g in trying])
    if not trial.disagreement(structure, [mask]):
        return trying[i]
    if phantom_layers(structure, trial.modules, group, {}) is not None:
        trial.phantoms.append(group.name)
        if not trial.disagreement(structure, [mask]):
            return trying[i]
        trial.phantoms.remove(group.name)
    return group
