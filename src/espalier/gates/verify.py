"""Trying out a cut: masked against cut, on a copy of the model in float64 with random parameters."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.apply import apply_plan
from espalier.compact.plan import Plan
from espalier.gates.build_plan import Adapted, build_plan
from espalier.gates.canonical import canonical
from espalier.gates.masking import install, set_mask, strip
from espalier.gates.structure import Structure
from espalier.gates.trace import Array, tensors_in
from espalier.space import BadInput

TOLERANCE = 1e-6  # relative, in float64; what is inexact is so by far more, and some models round to float32 inside


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
        self.stock = torch.randn(1_000_003, generator=self.random, dtype=torch.float64)
        try:
            self.model = copy.deepcopy(model).double()
        except (RuntimeError, TypeError) as error:
            raise BadInput(f"this model cannot be copied, which trying it out and cutting it need: {error}") from error
        self.args, self.kwargs = to_float64(args), to_float64(kwargs)
        self.modules = dict(self.model.named_modules())
        self._perturb()
        self.runs_in_training = False  # train mode is random, but runs; then a cut has to run there as well
        self.modes = self._modes()
        self.adapted: list[Adapted] = []
        self.phantoms: list[str] = []

    def _noise(self, like: Tensor) -> Tensor:
        """Normal numbers in a tensor's shape; large ones repeat a stock of a prime length, which is quicker."""
        first = int(torch.randint(len(self.stock), (), generator=self.random))
        times = -(-(first + like.numel()) // len(self.stock))
        return self.stock.repeat(times)[first : first + like.numel()].reshape(like.shape).to(like.device)

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

    def _modes(self) -> list[bool]:
        """Eval mode, and train mode where that runs, is not random, and differs."""
        apart = self._apart(True)
        if apart is None or not apart < TOLERANCE:
            self.runs_in_training = apart is not None
            return [False]
        same = distance(self.run(self.model, False), self.run(self.model, True)) == 0.0
        return [False] if same else [False, True]

    def _apart(self, training: bool) -> float | None:
        """How far two runs in this mode are apart under different random numbers; None: it does not run."""
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
            return None
        return distance(first, second)

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
                        small = strip(apply_plan(self.model, plan, share=True))
                        cut = self.run(small, training)
                    except Exception as error:
                        return f"the cut model does not run: {_short(error)}"
                    apart = distance(self.run(self.model, training), cut)
                    if not apart < TOLERANCE:
                        mode = "train" if training else "eval"
                        return f"masked and cut outputs differ by {apart:.1e} in {mode} mode"
                problem = self._random_training(plan) if self.runs_in_training else ""
                if problem:
                    return problem
            return ""
        finally:
            set_mask(self.model, installed, None)
            installed.remove()

    def _random_training(self, plan: Plan) -> str:
        """What goes wrong with the cut model in a train mode whose values are random; empty when nothing does."""
        try:
            cut = self.run(strip(apply_plan(self.model, plan, share=True)), True)
        except Exception as error:
            return f"the cut model does not run in train mode: {_short(error)}"
        shapes = [[tuple(t.shape) for t in made] for made in (self.run(self.model, True), cut)]
        return (
            "" if shapes[0] == shapes[1] else f"in train mode the cut model gives shapes {shapes[1]}, not {shapes[0]}"
        )


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
