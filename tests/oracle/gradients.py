"""The gradient of many runs by ordinary automatic differentiation, for networks that compute their own."""

from __future__ import annotations

import torch
from torch import nn


def own_gradients(call):
    """What a network that computes all runs and masks together gives, here by ordinary automatic differentiation.

    call: ``(params, masks, x) -> logits``, of params ``(R, ...)``, masks ``(R, S, d)`` and x ``(R, B, ...)``; logits
    are ``(R, S, B, classes)``. Runs do not read each other's weights, so the gradient of their sum is each run's own.
    """

    def gradients(params, masks, x, y):
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            out = call(leaves, masks, x)
            targets = y.unsqueeze(1).expand(out.shape[:3])
            each = nn.functional.cross_entropy(out.movedim(-1, 1), targets, reduction="none")
            losses = each.mean(-1)
            finite = losses.detach().isfinite()
            means = torch.where(finite, losses, 0.0).sum(-1) / finite.sum(-1).clamp(min=1)
            grads = torch.autograd.grad(means.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads)), losses.detach(), (out.detach().argmax(-1) != targets).sum(-1)

    return gradients
