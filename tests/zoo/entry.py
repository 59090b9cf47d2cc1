"""One architecture of the zoo: how to build it, what to feed it, and what no gate can cut in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]
SMALL_SHARE = 0.05  # MLPs, CNNs and RNNs: the largest "smallest reachable share of the weights" that passes


@dataclass(frozen=True)
class Entry:
    """``make`` builds the module, ``example`` its inputs; both are called under a fixed seed.

    ``others``: inputs of other batch, sequence or image sizes. ``fixed``: patterns of the names of parameters that no
    gate can cut (a residual stream under a norm ties both of their axes); what they weigh is the bound of the smallest
    share. ``tolerance``: larger where the model itself rounds to float32 inside.
    """

    name: str
    family: Literal["mlp", "cnn", "rnn", "transformer"]
    make: Callable[[], nn.Module]
    example: Callable[[], Inputs]
    others: tuple[Callable[[], Inputs], ...] = ()
    fixed: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("units", "channels", "heads")
    source: Literal["own", "torch", "transformers"] = "own"
    tolerance: float = 1e-9  # relative, float64: law 5

    def build(self) -> nn.Module:
        """The module in float64, without dropout, every parameter and buffer away from its special initial value."""
        return copy.deepcopy(_built(self.make))

    def inputs(self) -> Inputs:
        return seeded(self.example)

    def other_inputs(self) -> list[Inputs]:
        return [seeded(other) for other in self.others]


@functools.cache
def _built(make: Callable[[], nn.Module]) -> nn.Module:
    """Made once, and copied: that is quicker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20191)
        model = make().double()
        scatter(model)
    return still(model)


def seeded(make: Callable[[], Inputs]) -> Inputs:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make()


def scatter(model: nn.Module) -> None:
    """Move what starts at 0 or 1 (biases, norms, layer scales, running statistics): there, errors would not show.

    Matrices keep unit gain, so that deep branches are seen at the output instead of vanishing beside the shortcut.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                fan_in = parameter[0].numel() if parameter.ndim > 2 else min(parameter.shape)
                parameter.normal_(0.0, fan_in**-0.5)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_(0.0, 0.3)
                module.running_var.uniform_(0.5, 1.5)


def still(model: nn.Module) -> nn.Module:
    """Switch dropout and stochastic depth off wherever they hide: as layers, or as numbers read in `forward`."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def tensors(output: Any) -> Iterator[Tensor]:
    """Every floating-point tensor of an output, in order: tensors, sequences, mappings, `ModelOutput`s."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from tensors(value)


def flat(output: Any) -> Tensor:
    """All of an output in one vector. Shape: (elements,)."""
    parts = [tensor.reshape(-1) for tensor in tensors(output)]
    assert parts, f"the model returned no tensor: {type(output).__name__}"
    return torch.cat(parts)
