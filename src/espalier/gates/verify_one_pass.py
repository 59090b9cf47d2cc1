"""Whether several masks may run in one pass: decided from the gates, then tried out on a batch.

As every trial on a copy of the model in float64 with random parameters: one pass under random masks is compared with
one mask at a time, without dropout; outputs, and what the buffers hold afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from espalier.gates.gate import MIXED
from espalier.gates.masking import PASS, Spot, install, is_mask, set_mask
from espalier.gates.norms import NORM
from espalier.gates.one_pass import Unfit, apart, examples_dim, examples_of, has_rule
from espalier.gates.structure import Structure, device_of
from espalier.gates.trace import Example, values_kept
from espalier.gates.verify import (
    TOLERANCE,
    MadeIn,
    distance,
    isolated_random,
    rehearsed,
    seed_all,
    short,
    to_float64,
)


@dataclass(frozen=True)
class Verdict:
    """why: masks have to run one at a time; empty where they may run in one pass.

    dims: by module, the dimension of its input that holds the examples. outputs: that of each tensor of the output.
    """

    why: str
    dims: dict[str, int] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()


def forbidden(model: nn.Module, spots: list[Spot]) -> str:
    """What in the model itself forbids one pass; empty if nothing does."""
    raw = next((spot for spot in spots if spot.raw), None)
    if raw is not None:
        return f"the mask acts on the weight {raw.raw_names[0]}, which all examples share"
    alone = {
        NORM: "normalises over a gated width, by statistics of one mask",
        PASS: "is a block that may go, for all examples at once",
        MIXED: "runs one of its options, for all examples at once",
    }
    one = next((spot for spot in spots if spot.buffer in alone), None)
    if one is not None:
        return f"{one.path} {alone[one.buffer]}"
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not has_rule(module):
            return f"{path} is a {type(module).__name__}, a BatchNorm with a forward pass of its own"
    return ""


def tried(model: nn.Module, structure: Structure, args: Any, kwargs: Any, samples: int) -> Verdict:
    """args, kwargs: what the model is called with; tensors as long as the first hold the examples first."""
    exact = torch.autocast(device_of(model).type, enabled=False)
    with isolated_random(), warnings.catch_warnings(), torch.no_grad(), exact:
        warnings.simplefilter("ignore")
        try:
            return _OnePass(model, structure, args, kwargs, samples).verdict()
        except Unfit as error:
            return Verdict(str(error))
        except Exception as error:  # a forward pass of the user's own may raise anything
            return Verdict(f"it does not run so: {short(error)}")


class _OnePass:
    """A trial of one pass under random masks."""

    def __init__(self, model: nn.Module, structure: Structure, args: Any, kwargs: Any, samples: int) -> None:
        self.model = rehearsed(model, seed=20190918)
        self.installed = install(self.model, structure)
        self.inputs = tree_map_only(Tensor, to_float64, (tuple(args), dict(kwargs)))
        self.samples, self.size = samples, examples_of(self.inputs)
        generator = torch.Generator().manual_seed(7)
        masks = torch.rand(samples, structure.space.d, generator=generator, dtype=torch.float64) < 0.6
        self.masks = masks.double().to(device_of(model))

    def verdict(self) -> Verdict:
        if not self.size or self.size % self.samples:
            raise Unfit(f"{self.size} examples are no multiple of {self.samples} masks")
        self._shuffle()
        together = self.installed.together
        together.watched = {}
        with values_kept(self.model.buffers()):
            single = [self._single(mask) for mask in range(self.samples)]
            kept = self._buffers()
        shapes = {path: seen[: len(seen) // self.samples] for path, seen in together.watched.items()}
        together.watched, together.expected = None, shapes
        set_mask(self.installed, self.masks)
        both = self._run(self.inputs)
        together.expected = None
        mine, all_ = _tensors(single[0]), _tensors(both)
        dims = [examples_dim(tuple(a.shape), tuple(b.shape), self.samples) for a, b in zip(mine, all_)]
        if len(mine) != len(all_) or None in dims or not dims:
            return Verdict("its output holds something that is not of single examples, each in one dimension")
        outputs = tuple(dim for dim in dims if dim is not None)
        own = apart(both, outputs, self.size, self.samples)
        gap = max(distance(_tensors(a), _tensors(b)) for a, b in zip(single, own))
        if not gap < TOLERANCE:
            again = distance(_tensors(self._single(0, seed=8)), mine)
            if not again < TOLERANCE:
                return Verdict("it draws random numbers that are not dropout, so the two cannot be compared")
            return Verdict(f"its examples depend on each other, or change places: outputs differ by {gap:.1e}")
        for name, value in self._buffers().items():
            if name not in kept or not distance([kept[name]], [value]) < TOLERANCE:
                return Verdict(f"buffer {name} ends otherwise than after one mask at a time")
        return Verdict("", dict(together.dims), outputs)

    def _shuffle(self) -> None:
        """Give the masks different examples, where all were to read the same ones: else mixing would not show."""
        generator = torch.Generator().manual_seed(11)
        order = torch.randperm(self.size, generator=generator)

        def other(leaf: Tensor) -> Tensor:
            leaf = leaf[order.to(leaf.device)]
            if self.size == self.samples and leaf.is_floating_point():
                leaf = leaf + 0.3 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
            return leaf

        self.inputs = _each(other, self.inputs, self.size)

    def _single(self, mask: int, seed: int = 7) -> Any:
        set_mask(self.installed, self.masks[mask])
        return self._run(_each(lambda leaf: leaf[mask :: self.samples], self.inputs, self.size), seed)

    def _run(self, inputs: Any, seed: int = 7) -> Any:
        seed_all(seed)
        with _NoDropout(), MadeIn(torch.float64):
            args, kwargs = Example(*inputs).copied()
            return self.model(*args, **kwargs)

    def _buffers(self) -> dict[str, Tensor]:
        named = self.model.named_buffers()
        return {name: value.clone() for name, value in named if not is_mask(name.rpartition(".")[2])}


class _NoDropout(TorchFunctionMode):
    """Dropout that is called in a forward pass, not held as a module, gives its input."""

    NAMES = frozenset(
        f"{kind}dropout{end}"
        for kind in ("", "alpha_", "feature_", "feature_alpha_")
        for end in ("", "_", "1d", "2d", "3d")
    )

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.NAMES:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def enlarged(args: Any, kwargs: Any, samples: int) -> tuple[Any, Any]:
    """An example with as many rows as a trial needs; what is repeated is changed, so that none are alike."""
    size = next((len(leaf) for leaf in _tensors((args, kwargs)) if leaf.ndim), 0)
    wanted = samples * max(2, -(-size // samples))
    if not size or wanted == size:
        return args, kwargs
    generator = torch.Generator().manual_seed(9)

    def longer(leaf: Tensor) -> Tensor:
        more = leaf[torch.arange(size, wanted, device=leaf.device) % size]
        if more.is_floating_point():
            more = more + 0.3 * torch.randn(more.shape, generator=generator, dtype=torch.float64).to(more)
        elif more.ndim > 1:
            more = more.roll(1, 1)
        return torch.cat([leaf, more])

    enlarged_: tuple[Any, Any] = _each(longer, (tuple(args), dict(kwargs)), size)
    return enlarged_


def _each(change: Callable[[Tensor], Tensor], inputs: Any, size: int) -> Any:
    """Inputs in which every tensor of so many examples is changed."""
    return tree_map_only(Tensor, lambda leaf: change(leaf) if leaf.ndim and len(leaf) == size else leaf, inputs)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
