"""Norms over a gated axis (the kind "width"): while a mask is set, statistics are of the open channels alone.

A weighted sum over the mask, divided by the sum of the mask, is what the norm of the cut model computes; and the slopes
by the gates see what leaving a channel out does to the statistics. With every gate open the norm is the user's own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

NORM = "espalier_mask_norm"  # the mask's buffer; of one dimension where it is installed, of more where a call brings it


@dataclass(frozen=True)
class Norm:
    """What a module computes over its last axis. centred: it subtracts the mean. single: it rounds to float32. base:
    what its weight is added to, to scale by."""

    eps: float | None
    centred: bool
    single: bool = False
    base: float = 0.0


def norm_of(module: nn.Module) -> Norm | None:
    """What kind of norm over the last axis a module is; None: it is none whose statistics can be masked."""
    if isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward:
        return Norm(module.eps, True) if len(module.normalized_shape) == 1 else None
    if isinstance(module, nn.RMSNorm) and type(module).forward is nn.RMSNorm.forward:
        return Norm(module.eps, False) if len(module.normalized_shape) == 1 else None
    return _by_hand(module)


def _by_hand(module: nn.Module) -> Norm | None:
    """A norm written out, as of Llama, Gemma or Cohere: a scale, perhaps a shift, an epsilon, and the numbers that it
    should give."""
    weight, names = module._parameters.get("weight"), module._parameters.keys() | module._modules.keys()
    if weight is None or weight.ndim != 1 or len(weight) < 2 or not names <= {"weight", "bias"}:
        return None
    factors = 1.5 + torch.sin(torch.arange(len(weight), dtype=torch.float64))
    affine = {name: factors * (k + 1) for k, (name, own) in enumerate(module._parameters.items()) if own is not None}
    bare = copy.copy(module)  # without the hooks of gates, which may be there already
    bare.__dict__["_parameters"] = module._parameters | {n: own.to(weight.device) for n, own in affine.items()}
    buffers = {name: own if own is None else own.detach().clone() for name, own in module._buffers.items()}
    bare.__dict__["_buffers"] = buffers  # which BatchNorm moves in train mode
    for eps in (value for value in vars(module).values() if type(value) is float and 0 < value < 1):
        given = torch.cos(torch.arange(3.0 * len(weight), dtype=torch.float64) ** 1.5).reshape(3, -1)
        given = given * torch.tensor([[1.0], [10.0], [2 * eps**0.5]], dtype=torch.float64)
        try:
            with torch.no_grad():
                outputs = bare.forward(given.to(weight.device)).cpu()
        except Exception:  # whatever it is, it is no norm of one tensor
            return None
        for centred, base in product((False, True), (0.0, 1.0)):
            expected = masked_norm(Norm(eps, centred, base=base), given, torch.ones_like(factors), affine)
            if isinstance(outputs, Tensor) and outputs.shape == expected.shape:
                apart = float((outputs - expected).abs().max())
                if apart < 1e-5:
                    return Norm(eps, centred, apart > 1e-12, base)
    return None


def masked_norm(norm: Norm, x: Tensor, mask: Tensor, affine: dict[str, Any]) -> Tensor:
    """x: ``(*B, n)``. mask: ``(n)``, or of more dimensions, which broadcast against those of x. Returns ``(*B, n)``."""
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    low = norm.single or x.dtype in (torch.float16, torch.bfloat16)
    x = x.float() if low else x
    m = mask.to(x.dtype)
    count = m.sum(-1, keepdim=True).clamp_min(1)  # a mask as it is drawn may close them all
    if norm.centred:
        x = x - (x * m).sum(-1, keepdim=True) / count
    x = x * ((x.square() * m).sum(-1, keepdim=True) / count + eps).rsqrt()
    weight, bias = affine.get("weight"), affine.get("bias")
    x = x if weight is None else x * (weight + norm.base if norm.base else weight)
    return x if bias is None else x + bias
