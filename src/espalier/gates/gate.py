"""What is placed by hand: a module that multiplies slices of its input by bits, and one that is one of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.gates.one_pass import STATE, product
from espalier.space import BadInput, BadType, whole_number

# The mask's buffer of a choice: of one dimension where it is installed, of two where a call brings it.
MIXED = "espalier_mask_mixed"


class Gate(nn.Module):
    """Bits on slices of the input along ``dim``; the identity while no mask is set.

    ``sizes``: an integer n for n bits, one for each index; or a sequence of widths, one bit for each slice of that
    width. ``least``: how many bits a structure that ships keeps open at least; None: one where nothing would lead
    through the model without it, else 0.

    One instance used twice shares its bits. Place it where a consumer reads, after BatchNorm and activation: directly
    before BatchNorm a closed slice would leave BatchNorm's shift behind, and is refused by ``attach``.

    >>> gate = Gate((16, 12), dim=1)
    >>> gate.bits, gate.width
    (2, 28)
    """

    espalier_mask: Tensor

    def __init__(self, sizes: int | Sequence[int], dim: int = 1, least: int | None = None) -> None:
        super().__init__()
        if isinstance(sizes, int) and not isinstance(sizes, bool):
            sizes = (1,) * sizes
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
            raise BadType(f"Gate sizes are an integer or a sequence of integers, not {sizes!r}")
        if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
            raise BadInput(f"Gate sizes are positive widths of slices, not {tuple(sizes)!r}")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise BadType(f"Gate dim is an integer, not {dim!r}")
        self.sizes = tuple(sizes)
        if least is not None and whole_number(least, "Gate least", 0) > len(self.sizes):
            raise BadInput(f"Gate least is a number of its {len(self.sizes)} bits, not {least}")
        self.dim, self.least = dim, least
        self.register_buffer("espalier_mask", torch.ones(sum(self.sizes)), persistent=False)

    @property
    def bits(self) -> int:
        return len(self.sizes)

    @property
    def width(self) -> int:
        return sum(self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        """x: any shape, of length ``width`` along ``dim``."""
        if x.shape[self.dim] != self.width:
            raise BadInput(
                f"this Gate holds {self.bits} bits over {self.width} indices of dimension {self.dim}, "
                f"but its input is of shape {tuple(x.shape)}; give it sizes that add up to {x.shape[self.dim]}"
            )
        dim = self.dim % x.ndim
        mask = self.espalier_mask.to(x.dtype)
        mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - 1 - dim))
        if not torch.compiler.is_compiling() and STATE in self.__dict__ and self.__dict__[STATE].together.active:
            return product(self, x, mask)
        return x * mask

    def extra_repr(self) -> str:
        same = len(set(self.sizes)) == 1
        sizes = f"{self.bits} x {self.sizes[0]}" if same else ", ".join(map(str, self.sizes))
        return f"{sizes}, dim={self.dim}"


class Mixed(nn.Module):
    """One of several operations, which the search chooses among; the first while no mask is set.

    ``options``: modules that take the same input and give tensors of the same shape. Under a mask only the option that
    is taken runs; where slopes are asked for, or many masks are computed at once, all run, weighted by the mask.
    Its cost is that of the option taken, and the compact model holds that option in its place.

    >>> mixed = Mixed([nn.ReLU(), nn.Tanh()])
    >>> mixed(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """

    tracing = False  # all options run and what they give is added, which ties their channels

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
        if mask is None or (mask.ndim == 1 and not self.__dict__[STATE].together.masked):
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
