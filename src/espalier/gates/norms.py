"""Norms over a gated axis (the kind "width"): while a mask is set, statistics are of the open channels alone.

A weighted sum over the mask, divided by the sum of the mask, is what the norm of the cut model computes; and the slopes
by the gates see what leaving a channel out does to the statistics. With every gate open the norm is the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NORM = "espalier_mask_norm"  # the mask's buffer; of one dimension where it is installed, of more where a call brings it


@dataclass(frozen=True)
class Norm:
    """What a module computes over its last axis. centred: it subtracts the mean. single: it rounds to float32."""

    eps: float | None
    centred: bool
    single: bool = False


def norm_of(module: nn.Module) -> Norm | None:
    """What kind of norm over the last axis a module is; None: it is none whose statistics can be masked."""
    if isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward:
        return Norm(module.eps, True) if len(module.normalized_shape) == 1 else None
    if isinstance(module, nn.RMSNorm) and type(module).forward is nn.RMSNorm.forward:
        return Norm(module.eps, False) if len(module.normalized_shape) == 1 else None
    return _by_hand(module)


def _by_hand(module: nn.Module) -> Norm | None:
    """A root-mean-square norm written out, as of Llama: one weight, an epsilon, and the numbers that it should give."""
    weight, others = module._parameters.get("weight"), len(module._parameters) + len(module._modules)
    eps = next((e for e in (vars(module).get(name) for name in ("variance_epsilon", "eps")) if type(e) is float), None)
    if weight is None or weight.ndim != 1 or len(weight) < 2 or others > 1 or eps is None:
        return None
    size = len(weight)
    given = torch.cos(torch.arange(3.0 * size, dtype=torch.float64) ** 1.5).reshape(3, size)
    given = given * torch.tensor([[1.0], [10.0], [2 * eps**0.5]], dtype=torch.float64)
    factors = 1.5 + torch.sin(torch.arange(size, dtype=torch.float64))
    try:
        with torch.no_grad():
            outputs = torch.func.functional_call(module, {"weight": factors}, (given.to(weight.device),)).cpu()
    except Exception:  # whatever it is, it is no norm of one tensor
        return None
    expected = factors * given * (given.square().mean(-1, keepdim=True) + eps).rsqrt()
    if not isinstance(outputs, Tensor) or outputs.shape != expected.shape:
        return None
    apart = float((outputs - expected).abs().max())
    return Norm(eps, False, single=apart > 1e-12) if apart < 1e-5 else None


def masked_norm(norm: Norm, x: Tensor, mask: Tensor, affine: dict[str, Any]) -> Tensor:
    """x: ``(*B, n)``. mask: ``(n)``, or of more dimensions, which broadcast against those of x. Returns ``(*B, n)``."""
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    low = norm.single or x.dtype in (torch.float16, torch.bfloat16)
    x = x.float() if low else x
    m = mask.to(x.dtype)
    count = m.sum(-1, keepdim=True)
    if norm.centred:
        x = x - (x * m).sum(-1, keepdim=True) / count
    x = x * ((x.square() * m).sum(-1, keepdim=True) / count + eps).rsqrt()
    weight, bias = affine.get("weight"), affine.get("bias")
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
