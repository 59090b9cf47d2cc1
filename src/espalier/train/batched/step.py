"""One update of R runs at once: a vmap over runs of the gradient of the mean over (a vmap over) masks of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from espalier.gates.masking import Channels
from espalier.space import BadInput
from espalier.train import compiling, pytree
from espalier.train.batched.chain import Chain, Named, Parts
from espalier.train.batched.inputs import Reading, ResidentFeed, Source
from espalier.train.descent import SGD, Optimizer, Schedule
from espalier.train.gradients import Sized
from espalier.train.pytree import Nested
from espalier.train.scoring import wrong

Loss = Callable[[Tensor, Tensor], Tensor]
Measured = tuple[Tensor, Tensor]  # losses and numbers of wrong classes
Descent = tuple[list[Parts], Tensor, Tensor]  # factors of each layer's gradient, learning rates, the runs that move
Sloped = tuple[Named, Measured, Sized | None]  # gradients, what was measured, slopes by the gates where asked for
Found = tuple[Tensor, Tensor, Named, Measured, Sized | None]  # masks and targets before them
Call = Callable[..., Tensor]  # gated.call(params_and_buffers, mask, x)


@dataclass(frozen=True, eq=False)
class Stacked:
    """What R runs carry from update to update; every tensor is changed in place.

    params: name to ``(R, ...)``; fixed: buffers and frozen parameters, likewise; slots: the optimiser's, like params;
    done: updates so far, a scalar; sums: ``(4, R)`` float64, since they were last read: finite losses, their number,
    wrong classes, predicted ones; skipped: ``(R)`` int64, updates at which a run's weights stayed because a loss was
    not finite; broken: ``(R)`` int64, the first update at which none of a run's losses was finite, -1 for never.
    """

    params: Named
    fixed: Named
    slots: list[list[Tensor]]
    rates: Tensor  # (R): each run's learning rate before the schedule
    pace: Tensor  # (k, R): what the optimiser's next step takes from its number
    done: Tensor
    sums: Tensor
    skipped: Tensor
    broken: Tensor

    @classmethod
    def start(cls, params: Named, fixed: Named, optimizer: Optimizer, rates: Tensor) -> Stacked:
        runs, device = len(rates), rates.device
        slots = [[torch.zeros_like(p) for p in params.values()] for _ in range(optimizer.slots)]

        done, skipped = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((), (runs,)))
        sums = torch.zeros(4, runs, dtype=torch.float64, device=device)
        broken = torch.full((runs,), -1, dtype=torch.int64, device=device)
        pace = torch.zeros_like(optimizer.pace(rates, skipped + 1))
        return cls(params, fixed, slots, rates, pace, done, sums, skipped, broken)

    def by_name(self) -> list[Named]:
        """The parameters, what is fixed, and each of the optimiser's slots."""
        return [self.params, self.fixed, *(dict(zip(self.params, slot, strict=True)) for slot in self.slots)]


class Gradient:
    """What an update needs of the network: :class:`Differential`, or one that computes all runs and masks together,
    without automatic differentiation. That one compiles by itself what it wants compiled.
    """

    def pack(self, params: Named) -> Named:
        """From the model's own names and shapes ``(R, ...)`` to those that the weights are kept in."""
        return params

    def unpack(self, params: Named) -> Named:
        """And back."""
        return params

    def __call__(
        self, params: Named, fixed: Named, masks: Tensor, x: Nested, y: Nested, *, each: bool, slopes: bool = False
    ) -> Sloped:
        """Of each run's mean loss. masks: ``(R, samples, d)``. x: ``(R, B, ...)``; y likewise. each, slopes: see
        :class:`Differential`."""
        raise NotImplementedError


@dataclass(eq=False)
class Differential(Gradient):
    """The gradient of each run's mean loss, the losses and the errors ``(R, samples)``. Pure.

    dtype: what the network computes in, where that differs from its parameters' (bfloat16 over float32 masters).
    channels: that the gates multiply, on the device of the runs; None: one for each gate. even: of the search, see
    ``Channels.sized``.
    """

    call: Call
    loss: Loss
    dtype: torch.dtype | None = None
    channels: Channels | None = None
    even: float = 0.0

    def __call__(
        self, params: Named, fixed: Named, masks: Tensor, x: Nested, y: Nested, *, each: bool, slopes: bool = False
    ) -> Sloped:
        """masks ``(R, samples, d)``, or ``(R, B, d)`` if each example has its own; x ``(R, B, ...)``; y likewise.

        slopes: also those ``(R, samples, d)`` of each mask's own loss by its entries, closed gates included. Each mask
        then has examples of its own, x ``(R, samples, B, ...)`` and y likewise.
        """
        mean = _mean(self._one_each if each else partial(self._losses, own=slopes))
        if not slopes:
            grads, measured = vmap(grad(mean, has_aux=True), randomness="different")(params, masks, fixed, x, y)
            return grads, measured, None
        masks = masks.to(next(iter(params.values())).dtype)  # a derivative has the precision of what it is by
        masks = masks if self.channels is None else self.channels.of(masks)
        by_both = grad(mean, argnums=(0, 1), has_aux=True)
        (grads, by_mask), measured = vmap(by_both, randomness="different")(params, masks, fixed, x, y)
        by_mask = by_mask * masks.shape[1]  # the gradient is of the mean, a slope of its own mask's loss
        return grads, measured, (by_mask, None) if self.channels is None else self.channels.sized(by_mask, self.even)

    def outputs(self, params: Named, fixed: Named, mask: Tensor, x: Nested) -> Any:
        """One run under one mask ``(d)``."""
        if self.dtype is not None:
            params = {name: p.to(self.dtype) for name, p in params.items()}
            fixed = {name: f.to(self.dtype) if f.is_floating_point() else f for name, f in fixed.items()}
            x = pytree.each(lambda part: part.to(self.dtype) if part.is_floating_point() else part, x)
        mask = mask.to(self.dtype or next(iter(params.values())).dtype)
        out = pytree.call(partial(self.call, {**fixed, **params}, mask), x)
        return out if self.dtype is None else pytree.each(lambda part: part.float(), out)

    def measured(self, out: Any, y: Nested) -> Measured:
        """The loss and the number of wrong classes, NaN where there are no classes: scalars. Targets that are no class
        count as the others do on average, so that the share of all is that of those."""
        loss, counts = self.loss(out, y), wrong(out, y)
        if loss.ndim:
            raise BadInput(f"the loss is a scalar, the mean over the mini-batch, not of shape {tuple(loss.shape)}")
        if counts is None:
            return loss, loss.detach().new_full((), torch.nan)
        missed, counted = counts
        return loss, missed * (y.numel() / counted.clamp(min=1))

    def _losses(self, params: Named, fixed: Named, masks: Tensor, x: Nested, y: Nested, own: bool) -> Measured:
        """own: each mask has examples of its own."""

        def under(mask: Tensor, x: Nested, y: Nested) -> Measured:
            return self.measured(self.outputs(params, fixed, mask, x), y)

        if len(masks) == 1:  # nothing to map over
            loss, wrong = under(masks[0], *(pytree.each(lambda part: part[0], (x, y)) if own else (x, y)))
            return loss.unsqueeze(0), wrong.unsqueeze(0)
        if not own:  # each has its targets, though they are the same: torch maps no mean square with one side mapped
            y = pytree.each(lambda part: part.expand(len(masks), *part.shape), y)
        losses: Measured = vmap(under, (0, 0 if own else None, 0), randomness="different")(masks, x, y)
        return losses

    def _one_each(self, params: Named, fixed: Named, masks: Tensor, x: Nested, y: Nested) -> Measured:
        def under(mask: Tensor, x: Nested) -> Any:
            out = self.outputs(params, fixed, mask, pytree.each(lambda part: part.unsqueeze(0), x))
            return pytree.each(lambda part: part.squeeze(0), out)

        loss, wrong = self.measured(vmap(under, randomness="different")(masks, x), y)
        return loss.unsqueeze(0), wrong.unsqueeze(0)


def _mean(measured: Callable[..., Measured]) -> Callable[..., tuple[Tensor, Measured]]:
    """The mean over one run's losses as a function that can be differentiated by parameters and masks."""

    def mean(params: Named, masks: Tensor, fixed: Named, x: Nested, y: Nested) -> tuple[Tensor, Measured]:
        losses, wrong = measured(params, fixed, masks, x, y)
        return losses.sum() / len(losses), (losses, wrong)

    return mean


def own_parts(tensor: Tensor, samples: int) -> Tensor:
    """What each mask reads ``(R, samples, B, ...)`` of the examples of an update ``(R, B', ...)``: a part of its own,
    unless that leaves fewer than two examples in a part; then each reads all of them, as in a single run."""
    examples = tensor.shape[1]
    if samples > 1 and examples < 2 * samples:
        return tensor.unsqueeze(1).expand(-1, samples, *[-1] * (tensor.ndim - 1))
    return tensor.reshape(len(tensor), samples, examples // samples, *tensor.shape[2:])


@dataclass(eq=False)
class Step:
    """One update of all runs, in place. Call it eagerly, or compile it: there is one body for both.

    chain: what the network is known to be; its gradient is then written out instead of derived. tf32: its precision.
    """

    state: Stacked
    differential: Gradient
    optimizer: Optimizer
    schedule: Schedule
    total: int
    feed: ResidentFeed
    chain: Chain | None = None
    tf32: bool = False

    def __post_init__(self) -> None:
        single = all(p.is_cuda and p.dtype == torch.float32 for p in self.state.params.values())
        momentum = isinstance(self.optimizer, SGD) and self.optimizer.momentum > 0
        self.fused = self.chain is not None and single and momentum
        self.set_pace()

    def __call__(self, source: Source, reading: Reading, noise: tuple[Tensor, ...]) -> None:
        """Without a look at any value. A run with a loss that is not finite leaves its weights and slots alone."""
        self.descend(self.begin(source, reading, noise))

    def begin(self, source: Source, reading: Reading, noise: tuple[Tensor, ...]) -> Descent | None:
        """The update, up to what is left for :meth:`descend`: what a compiler can make one graph of."""
        if self.chain is None:
            self.finish(source, noise, *self.gradients(source, reading, noise))
            return None
        masks, x, y = self._read(source, reading, noise)
        each, by_gate = source.masks_each, source.reads_slopes
        factors, measured, slopes = self.chain(self.state.params, masks, x, y, each=each, slopes=by_gate)
        left: Descent | None = None
        if self.fused:
            ok = measured[0].isfinite().all(-1)
            left = [f.contiguous() for f in factors], self.state.pace[0].clone(), ok
            grads = {one.bias: one.left.sum(-1) for one in factors}
        else:
            grads = {name: g for one in factors for name, g in one.gradients().items()}
        self.finish(source, noise, masks, y, grads, measured, None if slopes is None else (slopes, None))
        return left

    def gradients(self, source: Source, reading: Reading, noise: tuple[Tensor, ...]) -> Found:
        """The part of an update that reads the network."""
        masks, x, y = self._read(source, reading, noise)
        params, fixed, each, by_gate = self.state.params, self.state.fixed, source.masks_each, source.reads_slopes
        grads, measured, slopes = self.differential(params, fixed, masks, x, y, each=each, slopes=by_gate)
        # A parameter that no run reads has one zero for all runs; the optimiser writes where the gradient is.
        grads = {name: g.clone() if 0 in g.stride() else g for name, g in grads.items()}
        return masks, y, grads, measured, slopes

    def finish(
        self,
        source: Source,
        noise: tuple[Tensor, ...],
        masks: Tensor,
        y: Tensor,
        grads: Named,
        measured: Measured,
        slopes: Sized | None,
        look: bool = False,
    ) -> None:
        """The part that does not: weights, theta and counters move. look: whether all losses are finite, to save work
        where they are."""
        state, (losses, wrong) = self.state, measured
        finite = losses.isfinite()
        ok = None if look and bool(finite.all()) else finite.all(-1)
        self._move(grads, ok)
        source.learn(masks, losses.to(torch.float32) if losses.dtype == torch.bfloat16 else losses, noise, slopes)
        if ok is not None:
            broken = (state.broken < 0) & ~finite.any(-1)
            state.broken.copy_(torch.where(broken, state.done + 1, state.broken))
            state.skipped.add_(~ok)
        state.done.add_(1)
        self.set_pace()
        sums = torch.where(finite, losses, 0.0).sum(-1), finite.sum(-1), wrong.sum(-1)
        state.sums[:3] += torch.stack([part.to(torch.float64) for part in sums])
        masks_of_an_example = 1 if source.reads_slopes else losses.shape[-1]
        state.sums[3] += sum(part[0].numel() for part in pytree.tensors(y)) * masks_of_an_example

    def descend(self, factors: Descent | None) -> None:
        """Each layer's gradient multiplied and applied in one kernel, which changes the weights where they are.

        Inside what is compiled the compiler would copy the weights for it, and back.
        """
        if factors is None:
            return
        from espalier.train.batched.fused import descend

        assert self.chain is not None
        assert isinstance(self.optimizer, SGD)
        parts, rates, ok = factors
        velocities = dict(zip(self.state.params, self.state.slots[0]))
        for (weight, _), (left, right) in zip(reversed(self.chain.layers), parts, strict=True):
            p, v = self.state.params[weight], velocities[weight]
            descend(left, right, p, v, rates, ok, self.optimizer, tf32=self.tf32)

    def exactly(self, source: Source, reading: Reading, noise: tuple[Tensor, ...]) -> None:
        """The same with a look at the losses, and without a chain: on a CPU."""
        self.finish(source, noise, *self.gradients(source, reading, noise), look=True)

    def _read(self, source: Source, reading: Reading, noise: tuple[Tensor, ...]) -> tuple[Tensor, Nested, Nested]:
        """Masks, inputs and targets; these with a dimension for masks where each has examples of its own."""
        masks, x, y = source.masks(noise), *self.feed.batch(reading)
        if source.reads_slopes:
            x, y = pytree.each(lambda part: own_parts(part, masks.shape[1]), (x, y))
        return masks, x, y

    def _move(self, grads: Named, ok: Tensor | None) -> None:
        """The optimiser's step of the parameters that have a gradient here."""
        state = self.state
        where = [i for i, name in enumerate(state.params) if name in grads]
        params, slots = list(state.params.values()), [[slot[i] for i in where] for slot in state.slots]
        ordered = [grads[name] for name in state.params if name in grads]
        self.optimizer.move([params[i] for i in where], ordered, slots, state.pace, ok)

    def set_pace(self) -> None:
        """For the next update, of which a run has skipped some. Kept as a tensor: a compiler would compute it anew for
        every single weight."""
        state = self.state
        lr = state.rates * self.schedule.factor(state.done, self.total)
        state.pace.copy_(self.optimizer.pace(lr, state.done - state.skipped + 1))


def compiled(
    step: Step, options: Mapping[str, Any] | None = None, backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., Any]:
    """The whole update, theta and weights included, as one graph of fixed shapes; behind it
    the kernels that apply a chain's gradient, if it has one.

    Where the network computes all runs together and compiles itself, the rest of the update alone.
    options: of torch's inductor, by name.
    """

    def update(source: Source, reading: Reading, noise: tuple[Tensor, ...]) -> Descent | None:
        return step.begin(source, reading, noise)

    def finish(*parts: Any) -> None:
        step.finish(*parts)

    settings = {"fullgraph": True, "backend": backend, "options": dict(options or {}) or None}

    if step.chain is not None or isinstance(step.differential, Differential):
        begin = compiling.compiled(update, **settings)
        return lambda source, reading, noise: step.descend(begin(source, reading, noise))
    rest = compiling.compiled(finish, **settings)
    return lambda source, reading, noise: rest(source, noise, *step.gradients(source, reading, noise))


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of scores ``(n, classes)`` and classes ``(n)``, as torch.nn.functional has it.

    The class is picked by comparison: torch's own gathers, and its gradient scatters, which nothing melts with.

    >>> round(cross_entropy(torch.tensor([[2.0, 0.0]]), torch.tensor([0])).item(), 4)
    0.1269
    """
    chosen = y.unsqueeze(-1) == torch.arange(out.shape[-1], device=out.device)
    return -torch.where(chosen, torch.log_softmax(out, -1), 0.0).sum(-1).mean()
