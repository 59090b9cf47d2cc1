"""Small networks and data that the training tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import espalier
from espalier.data.digits import digits

Pair = tuple[Tensor, Tensor]


def digit_vectors(count: int | None = None) -> tuple[Pair, Pair]:
    """The digits as vectors of 64 floats: training (the first ``count``) and test."""
    data = digits().flatten().as_floats()
    (x, y), test = data.train, data.test
    return (x[:count], y[:count]), test


def mlp(width: int = 16, hidden: int = 2, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [64, *[width] * hidden]
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Gated:
    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.linear = [m for m in model if isinstance(m, nn.Linear)]
        self.space = espalier.Space(
            [espalier.Bits(f"h{i}", m.out_features, least=1) for i, m in enumerate(self.linear[:-1])]
        )
        self.mask = None
        for i, m in enumerate(self.linear[1:]):
            m.register_forward_pre_hook(lambda mod, args, i=i: self._apply(i, args))

    @property
    def d(self):
        return self.space.d

    def _apply(self, i, args):
        if self.mask is None:
            return None
        return (args[0] * self.mask[self.space.slices[f"h{i}"]],)

    @contextmanager
    def masked(self, mask: Tensor) -> Iterator[None]:
        before, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = before

    def canonical(self, mask):
        return mask

    def cost(self, kind):
        d = self.space.d
        F = espalier.Form
        if kind == "units":
            return espalier.Cost.linear(torch.ones(d))
        s = list(self.space.slices.values())
        total = espalier.Cost.product([F.run(s[0].start, s[0].stop, 64.0)], d=d)
        for a, b in zip(s, s[1:]):
            total = total + espalier.Cost.product([F.run(a.start, a.stop), F.run(b.start, b.stop)], d=d)
        return total + espalier.Cost.product([F.run(s[-1].start, s[-1].stop, 10.0)], d=d)

    def compact(self, mask):
        keep = (
            [torch.arange(64)]
            + [mask[s].nonzero().squeeze(-1) for s in self.space.slices.values()]
            + [torch.arange(10)]
        )
        layers = []
        for i, m in enumerate(self.linear):
            new = nn.Linear(len(keep[i]), len(keep[i + 1]))
            with torch.no_grad():
                new.weight.copy_(m.weight[keep[i + 1]][:, keep[i]])
                new.bias.copy_(m.bias[keep[i + 1]])
            layers += [new, nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def attach(model, example=None):
    return Gated(model)


def shuffled(data: Pair, batch: int):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch, shuffle=True, drop_last=True)


def norm_mlp():
    torch.manual_seed(0)
    return attach(
        nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
    )
