"""From trained stacked weights to what ships: each run's mask, its compact model, calibrated, and its score."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from espalier.data import standardise
from espalier.gates.recalibrate import recalibrate
from espalier.train.batched import stack
from espalier.train.batched.feed import HeldOut
from espalier.train.batched.group import Group
from espalier.train.batched.measure import known
from espalier.train.batched.result import SweepResult
from espalier.train.score import class_dim

CHUNK = 512


def results(group: Group) -> list[SweepResult]:
    """One for each run; the state of the group, which a checkpoint holds, is not changed."""
    state, search = group.batch.state, group.search
    masks = group.masks()
    shares = {name: share.tolist() for name, share in group.measure.shares(masks).items()}
    before = after = penalty = None
    if search is not None:
        before = (search.cost(search.mode()) / search.full_cost).tolist()
        after, penalty = search.usage().tolist(), search.penalty.tolist()
    calibrate = stack.has_norms(group.gated.model)
    # The template keeps no running statistics; what ships needs them.
    gated = stack.build(group.factory, group.runs[0].seed, group.example) if calibrate else group.gated
    found = list[SweepResult]()
    for i, run in enumerate(group.runs):
        stack.load(gated, state.params | state.fixed, i)
        model = gated.compact(masks[i].to(next(gated.model.parameters()).device)).to(group.device)
        if calibrate:
            recalibrate(model, inputs(group))
        model.eval()
        loss, error = (None, None) if group.validation is None else score(group, model, group.validation)
        broken = int(state.broken[i])
        found.append(
            SweepResult(
                run=run,
                model=model.cpu(),
                mask=masks[i].cpu(),
                theta=None if search is None else search.theta[i].cpu().clone(),
                history=group.histories[i],
                finished=group.finished,
                share_before=None if before is None else before[i],
                share_after=None if after is None else after[i],
                shares={name: known(column[i]) for name, column in shares.items()},
                validation_loss=loss,
                validation_error=error,
                penalty=None if penalty is None else penalty[i],
                updates=group.batch.done,
                seconds=group.seconds,
                diverged=broken if broken >= 0 else None,
                skipped=int(state.skipped[i]),
                space=group.gated.space,
            )
        )
    return found


def inputs(group: Group) -> Iterator[Tensor]:
    """Every training input once, as a network reads it, without augmentation."""
    gain, shift = group.gain.to(group.device), group.shift.to(group.device)
    for start in range(0, len(group.inputs), CHUNK):
        yield standardise(group.inputs[start : start + CHUNK].to(group.device), gain, shift)


@torch.no_grad()
def score(group: Group, model: nn.Module, validation: HeldOut) -> tuple[float | None, float | None]:
    """The compact model's own mean loss and share of wrong classes."""
    loss, wrong = 0.0, 0.0
    x, y = validation.inputs, validation.targets
    with group.batch.compute.applied():
        for start in range(0, len(x), CHUNK):
            out, targets = model(validation.read(x[start : start + CHUNK])), y[start : start + CHUNK]
            loss += float(group.plan.loss(out, targets)) * len(targets)
            dim = class_dim(out, targets)
            wrong += torch.nan if dim is None else int((out.argmax(dim) != targets).sum())
    return known(loss / len(x)), known(wrong / y.numel())
