"""Several masks on one mini-batch: one after another, under vmap, or as one larger batch. Same outputs, same gradients.

All three are pure: they take the model's tensors and return outputs ``(samples, ..)``. Running statistics that
BatchNorm updates in train mode are updated on copies and dropped; re-estimate them with ``espalier.recalibrate``.
Batch statistics are those of each mask alone, as if it had been run by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.gates.masking import Spot
from espalier.space import BadInput

BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def _running(gated: Gated, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The running statistics that a forward pass would change in place."""
    names = []
    for path, module in gated.model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training and module.track_running_stats:
            names += [
                f"{path}.{name}" if path else name for name in ("running_mean", "running_var", "num_batches_tracked")
            ]
    return {name: tensors[name] for name in names if name in tensors}


def sequential(gated: Gated, tensors: Mapping[str, Tensor], masks: Tensor, *args: Any, **kwargs: Any) -> Any:
    """One mask after another, for any module. masks: ``(samples, d)``."""
    outs = []
    for mask in masks:
        fresh = {name: value.clone() for name, value in _running(gated, tensors).items()}
        outs.append(gated.call({**tensors, **fresh}, mask, *args, **kwargs))
    return tree_map(lambda *parts: torch.stack(parts), *outs)


def by_vmap(gated: Gated, tensors: Mapping[str, Tensor], masks: Tensor, *args: Any, **kwargs: Any) -> Any:
    """All masks ``(samples, d)`` at once through ``vmap``: what does not depend on the mask is computed once."""
    count = masks.shape[0]
    own = {name: v.expand(count, *v.shape).clone() for name, v in _running(gated, tensors).items()}

    def one(mask: Tensor, running: dict[str, Tensor]) -> Any:
        return gated.call({**tensors, **running}, mask, *args, **kwargs)

    return torch.vmap(one, in_dims=(0, 0), randomness="different")(masks, own)


def grouped(gated: Gated, tensors: Mapping[str, Tensor], masks: Tensor, *args: Any, **kwargs: Any) -> Any:
    """All masks as one batch ordered (image, mask), each image with its own mask. masks: ``(samples, d)``.

    For models whose tensors keep the batch in front, and whose masks act on inputs. BatchNorm sees ``(N, samples C,
    ..)``, so that its statistics stay per mask.
    """
    count = masks.shape[0]
    batch = _batch_of(args, kwargs)

    def spread(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
            return value.repeat_interleave(count, 0)
        return value

    values = dict(tensors)
    installed = gated._installed
    for spot, module in zip(installed.spots, installed.modules):
        each = torch.stack([spot.value(mask, module).reshape(-1) for mask in masks])  # (samples, width)
        values[spot.name] = _per_image(gated, spot, module, each.repeat(batch, 1))
    with _per_mask_norms(gated.model, count):
        out = functional_call(gated.model, values, tree_map(spread, args), tree_map(spread, kwargs))
    return tree_map(lambda part: part.unflatten(0, (batch, count)).transpose(0, 1), out)


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return int(value.shape[0])
    raise BadInput("grouped evaluation needs a tensor with a batch dimension among its arguments")


def _per_image(gated: Gated, spot: Spot, module: nn.Module, rows: Tensor) -> Tensor:
    """The mask of each image ``(N samples, width)`` in the shape that broadcasts over the module's input."""
    if isinstance(module, Gate):
        return rows
    if spot.raw or not spot.shape:
        raise BadInput(f"grouped evaluation cannot mask {spot.name}: its mask acts on a weight; use sequential")
    shapes = {layout.shape for layout in gated.structure.trace.entries[spot.path]}
    example = gated.structure.trace.batch
    if len({len(shape) for shape in shapes}) > 1 or any(shape[0] != example for shape in shapes):
        raise BadInput(f"grouped evaluation needs the batch in front, but {spot.path} reads otherwise; use sequential")
    after = len(spot.shape) - 1
    between = len(next(iter(shapes))) - 2 - after
    return rows.reshape(rows.shape[0], *(1,) * between, rows.shape[1], *(1,) * after)


@contextlib.contextmanager
def _per_mask_norms(model: nn.Module, count: int) -> Iterator[None]:
    """While inside, BatchNorm in train mode normalises the images of each mask apart."""
    norms = [m for m in model.modules() if isinstance(m, BATCH_NORMS) and m.training]
    for norm in norms:
        object.__setattr__(norm, "forward", _PerMask(norm, count))
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


class _PerMask:
    """BatchNorm over ``(N samples, C, ..)``, seen as ``(N, samples C, ..)``."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, count: int) -> None:
        self.norm, self.count = norm, count

    def __call__(self, x: Tensor) -> Tensor:
        norm, count = self.norm, self.count
        wide = x.reshape(x.shape[0] // count, count * x.shape[1], *x.shape[2:])
        weight, bias = (None if t is None else t.repeat(count) for t in (norm.weight, norm.bias))
        return F.batch_norm(wide, None, None, weight, bias, True, 0.0, norm.eps).reshape(x.shape)
