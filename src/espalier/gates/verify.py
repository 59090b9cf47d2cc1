"""Never silently wrong: every group is tried out before its gates are offered, and refused by name if it disagrees.

A trial is on a copy of the model in float64, or float32 where that does not run, with random parameters. It compares
masked with cut: groups all together first; only a disagreement is taken apart, by halves, so that large models stay
quick.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

from espalier.compact.apply import apply_plan, without_graphs
from espalier.compact.plan import Plan
from espalier.gates.build_plan import build_plan, padded_axes, phantom_layers
from espalier.gates.integers import alike, candidates, kept_sizes, likewise, own_sizes, pattern
from espalier.gates.masking import Spot, install, set_mask, strip
from espalier.gates.norms import norm_of
from espalier.gates.structure import Adapted, GateGroup, Structure, canonical
from espalier.gates.trace import Array, Example, tensors_in, values_kept
from espalier.space import BadInput

TOLERANCE = 1e-6  # relative, in float64; what is inexact is so by far more, and some models round to float32 inside
ROUNDED = 1e-4  # where statistics of the open channels and of the cut norm are rounded to float32, one by one

Build = Callable[[Sequence[GateGroup]], Structure]


class Trial:
    """A copy of the model with random parameters, on which groups are tried out."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        try:
            self.model = rehearsed(model, seed=20190917)
        except (RuntimeError, TypeError) as error:
            raise BadInput(f"this model cannot be copied, which trying it out and cutting it need: {error}") from error
        self.example = example.each(to_float64)
        self.tolerance, self.dtype = TOLERANCE, torch.float64
        self.place = ""  # the module in whose code the last cut model failed
        self.recorded = False  # whether train mode is tried with gradients, since the model takes another road there
        self.anew = True  # whether a backward pass may compute layers anew; False once it is known not to
        self.modes = self._modes()
        if not self.modes:  # some kernels know no float64
            self.tolerance, self.dtype, self.model = ROUNDED, torch.float32, self.model.float()
            self.example = self.example.each(to_float32)
            self.modes = self._modes() or {False: True}
        self._refuse_original(model)

    def run(self, model: nn.Module, training: bool, seed: int = 7, backward: bool = False) -> list[Tensor]:
        """The output's tensors; buffers are put back afterwards. backward: from random gradients of them."""
        model.train(training)
        seed_all(seed)
        args, kwargs = self.example.copied()
        with (
            values_kept(model.buffers()),
            torch.set_grad_enabled(backward or (training and self.recorded)),
            warnings.catch_warnings(),
            MadeIn(self.dtype),
        ):
            warnings.simplefilter("ignore")
            outputs = list(tensors_in(model(*args, **kwargs)))
            if backward:
                ends = [output for output in outputs if output.requires_grad]
                torch.autograd.backward(ends, [torch.randn_like(output) for output in ends])
            return [output.detach() for output in outputs]

    def _modes(self) -> dict[bool, bool]:
        """Eval mode, and train mode where that runs and differs; for each whether its values are not random.

        Empty where neither runs.
        """
        try:
            with isolated_random():
                self.recorded = True
                again, called_again = self._called(True)
                self.recorded = False
                second, called_second = self._called(True, 8)
                if not distance(again, second) < TOLERANCE or called_again != called_second:  # by chance, or gradients
                    self.recorded = True
                    plain, called_plain = second, called_second
                    second, called_second = self._called(True, 8)
                    self.recorded = not distance(plain, second) < TOLERANCE or called_plain != called_second
        except Exception:
            self.recorded = False
            with contextlib.suppress(Exception):
                self.run(self.model, False)
                return {False: True}
            return {}
        if not distance(again, second) < TOLERANCE:
            return {False: True, True: False}
        whole, called = self._called(False)
        same = distance(whole, second) == 0.0 and called == called_again  # hooks act only where modules are called
        return {False: True} if same else {False: True, True: True}

    def _called(self, training: bool, seed: int = 7) -> tuple[list[Tensor], list[nn.Module]]:
        """The output's tensors, and the modules that ran for them."""
        called: list[nn.Module] = []
        hook = register_module_forward_pre_hook(lambda module, _: called.append(module))
        try:
            return self.run(self.model, training, seed), called
        finally:
            hook.remove()

    def _loses_masks(self, spots: Sequence[Spot]) -> bool:
        """Whether a backward pass reads weights without their masks, since it computes layers anew, as under
        torch.utils.checkpoint. Gradients are then others than those of weights that hold zeros themselves."""
        names = [(spot, *place) for spot in spots for place in spot.raw[:1]]
        raw = [(spot, self.model.get_submodule(path)._parameters[name]) for spot, path, name in names]

        def gradient() -> list[Tensor]:
            self.model.zero_grad()
            self.run(self.model, True, backward=True)
            found = [own.grad.to_dense().flatten() for own in self.model.parameters() if own.grad is not None]
            return [torch.cat(found)]

        if not raw or not self.anew:
            return False
        try:
            expected = gradient()
            with values_kept(self.model.parameters()), torch.no_grad():
                for spot, weight in raw:
                    assert weight is not None
                    weight.mul_(spot.held)
                self.anew = not distance(expected, gradient()) < self.tolerance
            return self.anew and distance(expected, gradient()) < self.tolerance  # else it is random
        except RuntimeError:  # no backward pass
            return False
        finally:
            self.model.zero_grad()

    def attributes_read(self) -> frozenset[tuple[str, str]] | None:
        """Path and name of each attribute of a module that a forward pass looks at; None where that cannot be seen."""
        read, classes = set[tuple[str, str]](), dict[type, type]()
        paths = {id(module): path for path, module in self.model.named_modules()}

        def watching(kind: Any) -> type:
            def get(module: nn.Module, name: str) -> Any:
                read.add((paths.get(id(module), ""), name))
                return kind.__getattribute__(module, name)

            return type(kind.__name__, (kind,), {"__getattribute__": get})

        kinds = [(module, type(module)) for module in self.model.modules()]
        try:
            for module, kind in kinds:
                module.__class__ = classes.setdefault(kind, watching(kind))
            for training in self.modes:
                self.run(self.model, training)
        except Exception:  # a class of another make, or code that asks for the class itself
            return None
        finally:
            for module, kind in kinds:
                module.__class__ = kind
        return frozenset(read)

    def _refuse_original(self, model: nn.Module) -> None:
        """Refuse a model whose copies run parts of the model itself, which no cut, mode or weight of theirs reaches."""
        own = {module: path for path, module in model.named_modules()}
        called = list[nn.Module]()
        with contextlib.suppress(Exception):  # what does not run is said where it is tried out
            _, called = self._called(False)
        if found := [own[module] for module in called if module in own]:
            raise BadInput(
                f"a copy of this model still runs {found[0]} of this one: a function that it keeps, such as a lambda "
                "or torch.compile(model.forward), holds that; make it a method of the class, and compile what comes out"
            )

    def disagreement(self, structure: Structure, masks: Sequence[Array], adapted: Sequence[Adapted] = ()) -> str:
        """What goes wrong between masked and cut under these masks; empty when nothing does."""
        norms = [norm_of(structure.modules[path]) for path in structure.trace.norms]
        tolerance = ROUNDED if any(norm is not None and norm.single for norm in norms) else self.tolerance
        installed = install(self.model, structure)
        try:
            for mask in masks:
                mask = canonical(structure, mask)
                plan = build_plan(structure, mask, adapted)
                set_mask(installed, torch.tensor(mask, dtype=torch.float64))
                if not mask.all() and self._loses_masks(installed.spots):
                    return "a backward pass reads weights anew, as under checkpoint, where no mask reaches them"
                problem = self._difference(plan, tolerance, _empties(structure, mask))
                if problem:
                    return problem
            return ""
        finally:
            set_mask(installed, None)
            installed.remove()

    def _difference(self, plan: Plan, tolerance: float, empties: bool) -> str:
        """What goes wrong between the model under its present mask and what the plan makes of it.

        Where train mode is random its values are not compared, but a cut has to run there and give the same shapes.
        """
        small: nn.Module | None = None
        self.place = ""
        for training, exact in self.modes.items():
            try:
                small = small or strip(apply_plan(self.model, plan, share=not self.recorded))
                with _SomeHeads() if empties else contextlib.nullcontext():
                    cut = self.run(small, training)
            except Exception as error:
                self.place = place_of(error, small)
                mode, place = "" if exact else " in train mode", f" (in {self.place})" if self.place else ""
                return f"the cut model does not run{mode}{place}: {short(error)}"
            whole = self.run(self.model, training)
            gap = distance(whole, cut)
            if exact and not gap < tolerance:
                mode = "train" if training else "eval"
                return f"masked and cut outputs differ by {gap:.1e} in {mode} mode"
            shapes = [[tuple(t.shape) for t in outputs] for outputs in (whole, cut)]
            if shapes[0] != shapes[1]:
                return f"in train mode the cut model gives shapes {shapes[1]}, not {shapes[0]}"
        return ""


def place_of(error: Exception, model: nn.Module | None) -> str:
    """The path of the innermost module in whose code an error was raised; empty where there is none."""
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    place, step = "", error.__traceback__
    while step is not None:
        place = paths.get(id(step.tb_frame.f_locals.get("self")), place)
        step = step.tb_next
    return place


def rehearsed(model: nn.Module, seed: int) -> nn.Module:
    """A copy in float64 without gates, with random parameters.

    Random, because a shift of zero, or a scale of 1e-6, hides what a wrong cut would leave behind.
    """
    twin = strip(copy.deepcopy(model, without_graphs(model))).double()
    _perturb(twin, torch.Generator().manual_seed(seed))
    return twin


def to_float64(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value


def to_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


@torch.no_grad()
def _perturb(model: nn.Module, random: torch.Generator) -> None:
    """Move every parameter and running statistic, and switch dropout off."""
    stock = torch.randn(100_003, generator=random, dtype=torch.float64)

    def noise(like: Tensor) -> Tensor:
        """Normal numbers in a tensor's shape; large ones repeat a stock of a prime length, which is quicker."""
        first = int(torch.randint(len(stock), (), generator=random))
        times = -(-(first + like.numel()) // len(stock))
        row = stock if times == 1 else stock.repeat(times)
        return row[first : first + like.numel()].reshape(like.shape).to(like.device)

    for parameter in model.parameters():
        if parameter.is_floating_point():
            fan = parameter.shape[1:].numel() if parameter.ndim > 1 else 10
            parameter.add_(noise(parameter), alpha=0.3 / max(fan, 1) ** 0.5)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name.lower() or isinstance(module, nn.Dropout)):
                object.__setattr__(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.add_(noise(module.running_mean), alpha=0.3)
            module.running_var.add_(noise(module.running_var).abs())


@contextlib.contextmanager
def isolated_random() -> Iterator[None]:
    """Draw random numbers inside, and leave the user's random states as they were: of torch, NumPy and Python."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started else []
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def seed_all(seed: int) -> None:
    """For a model that draws: from torch, or in its own code from NumPy or Python, as stochastic depth does."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest finite value of each of the first list;
    infinite where shapes are unlike, or where one value is finite and the other is not.

    >>> distance([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 2.0])])
    0.2
    """
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


def short(error: Exception) -> str:
    said = (str(error).strip() or "no message").splitlines()
    return f"{type(error).__name__}: {said[0][:90]}"


# ---- which groups are exact ------------------------------------------------------------------------------------------


def random_masks(
    structure: Structure, names: set[str] | None, rng: np.random.Generator, count: int, empty: bool = False
) -> list[Array]:
    """Masks that close about half, or nearly all, of the gates of the named groups (None: of all), or every one.

    The first leaves blocks and branches open, for the sake of what is inside them. One more closes every branch alone.
    Where parts of an axis are taken, groups of one size keep unlike numbers in the first and the third, falling and
    rising: code that halves the width would agree by chance.
    """
    masks, whole = [], ("blocks", "branches")
    chosen = [group for group in structure.groups if names is None or group.name in names]
    inside = any(group.kind not in whole for group in chosen)
    alike = dict[int, list[GateGroup]]()
    for group in chosen if structure.trace.p.parts else ():
        if group.size > 1 and group.kind in ("units", "channels", "heads"):
            alike.setdefault(group.size, []).append(group)
    for i in range(count):
        mask, share = structure.whole(), (0.5, 0.85, 0.2)[i % 3]
        for group in chosen:
            if inside and i == 0 and not empty and group.kind in whole:
                continue
            own, branch = mask[structure.where(group)], group.kind == "branches"
            if group.kind == "choices":
                own[:] = np.arange(group.size) == rng.integers(group.size)
                continue
            own[:] = 0.0 if empty else rng.random(group.size) >= share
            if own.all() and (names is not None or not branch):
                own[rng.integers(group.size)] = 0.0
            if not own.any() and not branch and not empty:
                own[rng.integers(group.size)] = 1.0
        for size, groups in alike.items() if i % 2 == 0 and not empty else ():
            numbers = sorted(rng.permutation(size)[: len(groups)] + 1, reverse=i % 4 == 0)
            for group, number in zip(groups if len(groups) > 1 else (), cycle(numbers)):
                mask[structure.where(group)] = rng.permutation(size) < number
        masks.append(mask)
    branches = [g for g in chosen if g.kind == "branches"]
    if branches and not empty:
        masks.append(structure.whole())
        for group in branches:
            masks[-1][structure.where(group)] = 0.0
    return masks


def approved(trial: Trial, groups: Sequence[GateGroup], build: Build) -> tuple[list[GateGroup], dict[str, str]]:
    """The groups that are exact, alone and together, and for each refused one why."""
    rng = np.random.default_rng(17)
    left, refused = list(groups), dict[str, str]()
    searched: set[str] = set()
    while left:
        structure = build(left)
        problem = trial.disagreement(structure, random_masks(structure, None, rng, 3))
        if not problem:
            break
        group, problem = isolated(trial, structure, left, rng, problem)
        if group is not None and group.name not in searched:
            searched.add(group.name)
            learned = structure.learned
            proposed = group.name in learned.padded or any(a.group == group.name for a in learned.adapted)
            learned.forget([group.name])
            masks = random_masks(structure, {group.name}, rng, 2)
            agrees = proposed and not trial.disagreement(structure, masks)
            if agrees or _adapt(trial, structure, group, masks) or _pad(trial, structure, group, masks):
                continue
        if group is None:
            group = _first_wrong(trial, left, build, rng)
            problem = f"together with others: {problem}"
        refused[group.name] = problem
        for other in likewise(structure, group) if group.name in searched else ():  # at once: each search is long
            problem = trial.disagreement(structure, random_masks(structure, {other.name}, rng, 2))
            refused |= {other.name: problem} if problem else {}
        structure.learned.forget(refused)
        left = [other for other in left if other.name not in refused]
    return (_emptiable(trial, left, build) if left else []), refused


def isolated(
    trial: Trial, structure: Structure, groups: Sequence[GateGroup], rng: np.random.Generator, problem: str
) -> tuple[GateGroup | None, str]:
    """A group that disagrees by itself, and how; None when only several together do.

    Where the cut model does not run, the groups of the module that failed are tried first.
    """
    while len(groups) > 1:
        middle, failed = len(groups) // 2, f"{trial.place}."
        near = [g for g in groups if any(name.startswith(failed) for name in (*g.writes, *g.reads))]
        for half in ([near] if 0 < len(near) < middle else []) + [groups[:middle], groups[middle:]]:
            difference = trial.disagreement(structure, random_masks(structure, {g.name for g in half}, rng, 3))
            if difference:
                groups, problem = half, difference
                break
        else:
            return None, problem
    alone = trial.disagreement(structure, random_masks(structure, {groups[0].name}, rng, 3))
    return (groups[0], alone) if alone else (None, problem)


def _first_wrong(trial: Trial, groups: Sequence[GateGroup], build: Build, rng: np.random.Generator) -> GateGroup:
    """The first group that, added to those before it, makes joint masks disagree."""
    for count in range(1, len(groups) + 1):
        structure = build(groups[:count])
        if trial.disagreement(structure, random_masks(structure, None, rng, 4)):
            return groups[count - 1]
    return groups[-1]


# ---- integers that have to follow a cut ------------------------------------------------------------------------------


def _adapt(trial: Trial, structure: Structure, group: GateGroup, masks: Sequence[Array]) -> bool:
    """Find the integer attributes that have to follow the cut; accepted only when the outputs then agree.

    What is found for one layer is proposed for those that look alike, and tried with everything else.
    """
    learned = structure.learned
    learned.read = learned.read or trial.attributes_read()
    own = kept_sizes(structure, group)
    if group.kind == "width":  # every layer along the stream may keep its own size: all of them follow at once
        own += own_sizes(structure, group)
    if own and not trial.disagreement(structure, masks, own):
        needed = _needed(trial, structure, masks, own)
        learned.adapted += [*needed, *alike(structure, needed, group)]
        return True
    near = candidates(structure, group)
    for count in range(1, min(len(near), 4) + 1):
        for chosen in islice(combinations(near, count), 60):
            places = {(c.path, c.attribute) for c in chosen}
            for items in [chosen, (*own, *chosen)] if own else [chosen]:
                if len(places) == count and not trial.disagreement(structure, masks, items):
                    needed = _needed(trial, structure, masks, items)
                    learned.adapted += [*needed, *alike(structure, needed, group)]
                    return True
    return False


def _needed(trial: Trial, structure: Structure, masks: Sequence[Array], items: Sequence[Adapted]) -> Sequence[Adapted]:
    """Of integers under which the outputs agree those without which they do not: another may be equal by chance, such
    as a window as long as the layer is wide, and the example may be too short to tell. Layers that look alike go at
    once."""
    for one in dict.fromkeys(pattern(item) for item in items):
        rest = [item for item in items if pattern(item) != one]
        if rest and not trial.disagreement(structure, masks, rest):
            items = rest
    return items


def _pad(trial: Trial, structure: Structure, group: GateGroup, masks: Sequence[Array]) -> bool:
    """Where no integer helps, as with sizes written out: let zeros stand between the layers that are cut.

    Layers that look alike are padded at once where they disagree, too.
    """
    learned, around = structure.learned, padded_axes(structure, group)
    if group.kind not in ("units", "channels", "heads") or around is None:
        return False
    learned.padded[group.name] = around[2]
    if trial.disagreement(structure, masks):
        del learned.padded[group.name]
        return False
    rng = np.random.default_rng(19)
    for other in likewise(structure, group):
        around = padded_axes(structure, other)
        if around and trial.disagreement(structure, random_masks(structure, {other.name}, rng, 1)):
            learned.padded[other.name] = around[2]
    return True


# ---- groups that may be emptied --------------------------------------------------------------------------------------


def _emptiable(trial: Trial, groups: Sequence[GateGroup], build: Build) -> list[GateGroup]:
    """The groups with ``least`` 0 where closing all their gates runs and is exact, alone and together, else 1."""
    rng = np.random.default_rng(18)
    fixed = [g for g in groups if g.kind in ("channels", "branches", "inputs", "width", "choices")]
    trying = [g for g in groups if g not in fixed]

    def runs(chosen: Sequence[GateGroup]) -> bool:
        names = {group.name for group in chosen}
        structure = build([replace(g, least=0) if g.name in names else g for g in groups])
        return not trial.disagreement(structure, random_masks(structure, names, rng, 1, empty=True))

    free = [g for kind in ("units", "heads", "blocks") for g in _halved([g for g in trying if g.kind == kind], runs)]
    structure = build(groups)
    stuck = [g for g in trying if g not in free and g.kind != "blocks"]
    stuck = [g for g in stuck if phantom_layers(structure, g, {}) is not None]
    structure.learned.phantoms += [group.name for group in stuck]
    free += _halved(stuck, runs)
    structure.learned.phantoms = [group.name for group in stuck if group in free]
    for together in _side_by_side(structure, free):  # each alone may run where both emptied do not
        while len(together) > 1 and not runs(together):
            gone = together.pop(0)
            free = [group for group in free if group is not gone]
    while free and not runs(free):
        free.pop(0)
    names = {group.name for group in free}
    return [replace(g, least=0) if g.name in names else g for g in groups]


def _empties(structure: Structure, mask: Array) -> bool:
    """Whether a mask closes all heads of a group, and this torch does not survive that."""
    if TorchVersion(torch.__version__) >= TorchVersion("2.13"):
        return False
    where = structure.space.slices
    return any(not mask[where[group.name]].any() for group in structure.groups if group.kind == "heads")


class MadeIn(TorchFunctionMode):
    """What the model makes anew, as a first hidden state of zeros, is of this type, as its parameters are.

    Refuses a row that a wrong cut left behind the last one of a sparse matrix, where torch writes without a look.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch._convert_indices_from_coo_to_csr
            and len(args) == 2
            and len(args[0])
            and args[0].max() >= args[1]
        ):
            raise BadInput(f"row {int(args[0].max())} of a sparse matrix of {args[1]} rows")
        out = func(*args, **(kwargs or {}))
        single = isinstance(out, Tensor) and out.dtype == torch.float32
        return out.to(self.dtype) if single and next(tensors_in((args, kwargs)), None) is None else out


class _SomeHeads(TorchFunctionMode):
    """Refuses attention without a head: torch before 2.13 divides by their number, which ends the process."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            key = args[1] if len(args) > 1 else kwargs["key"]
            if key.ndim > 3 and key.shape[-3] == 0:
                raise BadInput("attention needs one head at least")
        return function(*args, **kwargs)


def _halved(groups: list[GateGroup], runs: Callable[[Sequence[GateGroup]], bool]) -> list[GateGroup]:
    """Those of the groups that pass, found by halves."""
    if not groups or runs(groups):
        return groups
    if len(groups) == 1:
        return []
    middle = len(groups) // 2
    return _halved(groups[:middle], runs) + _halved(groups[middle:], runs)


def _side_by_side(structure: Structure, groups: Sequence[GateGroup]) -> list[list[GateGroup]]:
    """Groups that together make up one axis of a tensor."""
    neighbours: dict[tuple[str, ...], list[GateGroup]] = {}
    for axis in structure.axes:
        entries = set(axis.entries.tolist())
        inside = [group for group in groups if not entries.isdisjoint(structure.numbers(group).tolist())]
        if len(inside) > 1 and -1 not in entries and sum(group.size for group in inside) >= len(entries):
            neighbours[tuple(group.name for group in inside)] = inside
    return list(neighbours.values())
