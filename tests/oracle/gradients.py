"""The gradient of many runs by ordinary automatic differentiation, for networks that compute their own."""

from __future__ import annotations

import torch
from torch import nn

from espalier.train.batched.step import Gradient


class Together(Gradient):
    """What a network that computes all runs and masks together gives, here by ordinary automatic differentiation.

    call: ``(params, masks, x) -> logits``, of params ``(R, ...)``, masks ``(R, S, d)`` and x ``(R, B, ...)``; logits
    are ``(R, S, B, classes)``. Runs do not read each other's weights, so the gradient of their sum is each run's own.
    """

    def __init__(self, call):
        self.call = call

    def __call__(self, params, fixed, masks, x, y, *, each, slopes=False):
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            out = self.call(leaves, masks, x)
            targets = y.unsqueeze(1).expand(out.shape[:3])
            each = nn.functional.cross_entropy(out.movedim(-1, 1), targets, reduction="none")
            losses = each.mean(-1)
            finite = losses.detach().isfinite()
            means = torch.where(finite, losses, 0.0).sum(-1) / finite.sum(-1).clamp(min=1)
            grads = torch.autograd.grad(means.sum(), list(leaves.values()), materialize_grads=True)
        wrong = (out.detach().argmax(-1) != targets).sum(-1)
        return dict(zip(leaves, grads)), (losses.detach(), wrong), None
