"""The gate placed by hand: a module that multiplies slices of its input by bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from espalier.gates.one_pass import STATE, product
from espalier.space import BadInput, BadType


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
        if least is not None and (isinstance(least, bool) or not isinstance(least, int)):
            raise BadType(f"Gate least is an integer or None, not {least!r}")
        if least is not None and not 0 <= least <= len(self.sizes):
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
