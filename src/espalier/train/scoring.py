"""How good a network is: under the structure that ships, and averaged over structures drawn from theta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from espalier.search.distribution import Distribution
from espalier.space import BadInput, BadType, whole_number
from espalier.train import checks, pytree
from espalier.train import feed as feeds
from espalier.train.feed import Batch, Batches, Tensors
from espalier.train.optimizer import Gated, scalar

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Score:
    """loss: the mean over the examples. error: the share of wrong classes; None where targets are no classes, or
    shapes do not say which scores are theirs."""

    loss: float
    error: float | None
    examples: int


def evaluate(model: nn.Module, data: object, *, loss: Loss, batch_size: int = 512) -> Score:
    """The score of a model as it is, in eval mode; data as for :func:`espalier.fit`, each example once.

    Of a Dataset, its test part. Tensors are given to the model as they are: the stored uint8 of ``dataset.test`` are
    refused by most; give the Dataset, or ``dataset.as_floats().test``.
    """
    module = isinstance(model, nn.Module)
    if not module or not callable(loss):
        raise BadType(f"loss is a function, not {loss!r}" if module else f"model is a torch module, not {model!r}")
    batch_size = whole_number(batch_size, "batch_size", 1)
    return _score(model, _batches(model, data, batch_size), loss, lambda inputs: pytree.call(model, inputs))


def deterministic(gated: Gated, mask: Tensor, data: object, *, loss: Loss, batch_size: int = 512) -> Score:
    """The score under one mask ``(d)``, made canonical: with ``search.select()``, that of what ships."""
    with gated.masked(gated.canonical(mask)):
        return evaluate(gated.model, data, loss=loss, batch_size=batch_size)


def stochastic(
    gated: Gated,
    theta: Tensor,
    data: object,
    *,
    loss: Loss,
    structures: int = 16,
    seed: int = 0,
    batch_size: int = 512,
) -> Score:
    """The score of the averaged predictions of structures drawn from theta ``(d)``, the same ones for all examples.

    For classes the probabilities are averaged, else the outputs. BatchNorm reads its running statistics, which training
    has averaged over the structures it drew.
    """
    if structures < 1:
        raise BadInput(f"structures is at least 1, not {structures}")
    generator = torch.Generator(theta.device).manual_seed(seed)
    noise = torch.rand(structures, gated.space.n, dtype=torch.float64, device=theta.device, generator=generator)
    masks = Distribution(gated.space, 0.0, theta.device).draw(theta.detach(), noise)  # (structures, d)

    def predict(inputs: Any) -> Tensor:
        total: Tensor | None = None
        for mask in masks:
            with gated.masked(mask):  # as it was drawn, which is how the weights were trained
                outputs = pytree.call(gated.model, inputs)
            part = outputs if dim is None else outputs.softmax(dim)
            total = part if total is None else total + part
        assert total is not None
        return total / structures if dim is None else (total / structures).log()

    batches = list(_batches(gated.model, data, batch_size))
    with torch.no_grad(), evaluating(gated.model):
        inputs, targets = _on(gated.model, batches[0])
        dim = class_dim(pytree.call(gated.model, inputs), targets)
    return _score(gated.model, batches, loss, predict)


def own_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that a model computes itself of the labels among its inputs: ``outputs.loss``, or its key "loss"."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise BadInput(
            "loss=None means the model's own, outputs.loss, of a batch with labels; this model gives none. Give loss=, "
            "a function of (outputs, targets)"
        )
    return loss


def wrong(outputs: object, targets: object) -> tuple[Tensor, Tensor] | None:
    """How many predicted classes are wrong, and of how many; None where shapes do not say where the classes are.

    targets: integers; negative ones are not predicted. See :func:`class_dim`.
    """
    dim = class_dim(outputs, targets)
    if dim is None:
        return None
    assert isinstance(outputs, Tensor)
    assert isinstance(targets, Tensor)
    counted = targets >= 0
    return ((outputs.detach().argmax(dim) != targets) & counted).sum(), counted.sum()


def class_dim(outputs: object, targets: object) -> int | None:
    """The dimension of the outputs that holds a score for each class: what the integer targets have not.

    ``(n, classes, ...)`` with targets ``(n, ...)``, as torch's cross entropy reads it, or ``(n, ..., classes)``, as
    models of sequences give it. None where it could be either, where there is a single score, and for other targets.

    >>> class_dim(torch.zeros(8, 10), torch.zeros(8, dtype=torch.int64))
    1
    >>> class_dim(torch.zeros(8, 12, 50), torch.zeros(8, 12, dtype=torch.int64))
    2
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim != targets.ndim + 1:
        return None
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool or not targets.ndim:
        return None
    fitting = [
        dim
        for dim in dict.fromkeys((1, outputs.ndim - 1))
        if outputs.shape[:dim] + outputs.shape[dim + 1 :] == targets.shape and outputs.shape[dim] > 1
    ]
    return fitting[0] if len(fitting) == 1 else None


@torch.no_grad()
def answers(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors a model gives in eval mode, on the CPU. inputs: on its device; a tensor, a tuple or a dict."""
    with evaluating(model):
        return [tensor.detach().cpu() for tensor in pytree.tensors(pytree.call(model, inputs))]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _score(model: nn.Module, batches: Iterable[Batch], loss: Loss, predict: Callable[[Any], Any]) -> Score:
    total, examples = torch.zeros((), dtype=torch.float64), 0
    missed, predictions = 0, 0
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            inputs, targets = _on(model, batch)
            if not examples:
                checks.readable(model, pytree.each(lambda t: t[:4], inputs))
            outputs = predict(inputs)
            size = pytree.count(inputs, "the inputs")
            total += scalar(loss(outputs, targets)).cpu().double() * size
            examples += size
            counts = wrong(outputs, targets)
            if counts is not None:
                missed += int(counts[0])
                predictions += int(counts[1])
    if not examples:
        raise BadInput("the data are empty: there is nothing to evaluate on")
    return Score(float(total) / examples, missed / predictions if predictions else None, examples)


def _on(model: nn.Module, batch: Batch) -> Batch:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, targets = pytree.each(lambda t: t.to(device, non_blocking=True), batch)
    return inputs, targets


def _batches(model: nn.Module, data: object, batch_size: int) -> Iterator[Batch]:
    if isinstance(data, (Tensors, Batches)):
        return data.once()
    return feeds.read_held_out(data, batch_size, pytree.dtype(model)).once()
