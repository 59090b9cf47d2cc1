"""A chain of linear layers with a gate on every hidden unit: its gradient by hand, of each weight as two factors.

What :class:`~espalier.train.batched.step.Differential` computes for any network, for this one written out. A weight's
gradient is a product of two small matrices; left as such, it can be multiplied where it is applied, and never crosses
the memory that the weights themselves fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from espalier.gates.gate import Gate

Named = dict[str, Tensor]
Parts = tuple[Tensor, Tensor]  # left, right


@dataclass(frozen=True, eq=False)
class Factors:
    """The gradients of one layer of R runs: ``left @ right^T`` of the weight, the sum over ``left`` of the bias.

    left: ``(R, out, K)``; right: ``(R, in, K)``; K runs over masks and examples.
    """

    weight: str
    bias: str
    left: Tensor
    right: Tensor

    def gradients(self) -> Named:
        """Multiplied out."""
        return {self.weight: self.left @ self.right.mT, self.bias: self.left.sum(-1)}

    def contiguous(self) -> Parts:
        """The tensors, laid out for a kernel that reads along K."""
        return self.left.contiguous(), self.right.contiguous()


@dataclass(frozen=True)
class Chain:
    """layers: names of weight ``(out, in)`` and bias ``(out)`` of each linear layer. gates: of each hidden layer, its
    place in a mask. ReLU after each hidden layer, then its gates; the loss is the mean cross entropy.
    """

    layers: tuple[tuple[str, str], ...]
    gates: tuple[slice, ...]

    def __call__(
        self, params: Named, masks: Tensor, x: Tensor, y: Tensor, *, each: bool = False, slopes: bool = False
    ) -> tuple[list[Factors], tuple[Tensor, Tensor], Tensor | None]:
        """The factors of the gradient of each run's mean loss, last layer first; losses and wrong classes ``(R, S)``.

        masks ``(R, S, d)``, or ``(R, B, d)`` if each example has its own; x ``(R, B, inputs)``; y ``(R, B)`` classes.
        slopes: also those ``(R, S, d)`` of each mask's own loss by its gates, closed ones included; each mask then has
        examples of its own, x ``(R, S, B, inputs)`` and y ``(R, S, B)``.

        Everything in between is ``(R, units, masks x examples)``: so laid out both factors are read along K.
        """
        x, y = (x.flatten(1, 2), y) if slopes else (x, y.unsqueeze(1))
        runs, _, examples = y.shape
        open = (masks.unsqueeze(1) if each else masks.unsqueeze(2)).permute(0, 3, 1, 2)  # (R, d, S or 1, 1 or B)
        samples = open.shape[2]
        rights = [x.mT]
        actives: list[Tensor] = []  # a compiler does not follow list[Tensor]()
        for (weight, bias), where in zip(self.layers, self.gates):
            z = params[weight] @ rights[-1] + params[bias].unsqueeze(-1)
            active = z.view(runs, z.shape[1], -1, examples).relu()  # one layer for all masks, or each
            if slopes:
                actives.append(active)
            rights.append((active * open[:, where]).reshape(runs, z.shape[1], samples * examples))
        weight, bias = self.layers[-1]
        scores = params[weight] @ rights[-1] + params[bias].unsqueeze(-1)
        left, losses, wrong = _loss(scores.view(runs, -1, samples, examples), y)

        factors = [Factors(weight, bias, left, rights[-1])]
        by_gate: list[Tensor] = []
        for i in range(len(self.gates) - 1, -1, -1):
            back = params[self.layers[i + 1][0]].mT @ left
            if slopes:  # by what the gate multiplies, not by what comes of it: a closed gate has a slope, too
                by_gate.append((back.view(runs, -1, samples, examples) * actives[i]).sum(-1))
            through = (
                torch.where(rights[i + 1] > 0, back, 0.0).view(runs, -1, samples, examples) * open[:, self.gates[i]]
            )
            shared = i == 0 and not slopes  # an input that is the same under all masks
            left = through.sum(2) if shared else through.reshape(runs, -1, samples * examples)
            factors.append(Factors(*self.layers[i], left, rights[i]))
        if not slopes:
            return factors, (losses, wrong), None
        # The gradient is of the mean over the losses, a slope of its own mask's loss.
        return factors, (losses, wrong), torch.cat(by_gate[::-1], 1).mT * samples

    def outputs(self, params: Named, mask: Tensor, x: Tensor) -> Tensor:
        """One network under one mask ``(d)``: ``(B, classes)``."""
        for (weight, bias), where in zip(self.layers, self.gates):
            x = nn.functional.linear(x, params[weight], params[bias]).relu() * mask[where]
        weight, bias = self.layers[-1]
        return nn.functional.linear(x, params[weight], params[bias])


def _loss(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the mean over the losses by the scores ``(R, classes, S, B)``, as ``(R, classes, S * B)``; the
    losses and the numbers of wrong classes ``(R, S)``. y: ``(R, S or 1, B)``."""
    runs, classes, samples, examples = scores.shape
    chosen = y.unsqueeze(1) == torch.arange(classes, device=y.device)[None, :, None, None]
    logs = torch.log_softmax(scores, 1)
    losses = -torch.where(chosen, logs, 0.0).sum(1).mean(-1)
    wrong = (scores.argmax(1) != y).sum(-1)
    left = (logs.exp() - chosen.to(scores.dtype)) * (1 / (samples * examples))
    return left.reshape(runs, classes, samples * examples), losses, wrong


def chain_of(
    model: nn.Module, gates: Sequence[slice], call: Callable[..., Tensor], params: Named, x: Tensor
) -> Chain | None:
    """The chain that a model is, if it is one: it has the layers of one, in order, and computes what one computes.

    call: of the gated model; params: of one run, by name; x: a few examples ``(n, inputs)``.
    """
    leaves = [(n, m) for n, m in model.named_modules() if not any(m.children())]
    linear = [(n, m) for n, m in leaves if isinstance(m, nn.Linear)]
    others = [m for _, m in leaves if not isinstance(m, nn.Linear | nn.ReLU | nn.Flatten | nn.Identity | Gate)]
    if len(linear) < 2 or x.ndim != 2 or any(not isinstance(m, nn.Dropout) or m.p for m in others):
        return None
    chain = Chain(tuple((f"{n}.weight", f"{n}.bias") for n, _ in linear), tuple(gates))
    widths = [m.out_features for _, m in linear[:-1]]
    if sorted(sum(chain.layers, ())) != sorted(params) or widths != [where.stop - where.start for where in gates]:
        return None
    masks = torch.stack([torch.ones(gates[-1].stop), (torch.arange(gates[-1].stop) % 3 > 0).float()]).to(x)
    # Of what a forward of one's own computes between the layers only its values tell: near 0, where ReLU bends, and far
    # away, where an activation that ends somewhere would show.
    for size in (1.0, 1e3):
        for mask in masks:
            ours, theirs = chain.outputs(params, mask, size * x), call(params, mask, size * x)
            if ours.shape != theirs.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5 * size):
                return None
    return chain
