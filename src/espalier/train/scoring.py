"""How good a network is: under the structure that ships, and averaged over structures drawn from theta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.exported import plain_output
from espalier.search.distribution import Distribution
from espalier.space import BadInput, BadType, whole_number
from espalier.train import checks, pytree
from espalier.train import feed as feeds
from espalier.train.feed import Batch
from espalier.train.gradients import Gated, scalar
from espalier.train.measures import Given, Meters, class_dim
from espalier.train.measures import read as metrics_read

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Score:
    """loss: the mean over the examples. error: the share of wrong classes; None where targets are no classes, or
    shapes do not say which scores are theirs. guess: the error, or else the loss, of the best constant answer to these
    examples; None where there is no such answer. metrics: those that were asked for."""

    loss: float
    error: float | None
    examples: int
    guess: float | None = field(default=None, compare=False)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def learned(self) -> bool:
        """False where a constant answer would have been as good."""
        value = self.loss if self.error is None else self.error
        return not self.guess or value < self.guess


def evaluate(model: nn.Module, data: object, *, loss: Loss, batch_size: int = 512, metrics: Given = None) -> Score:
    """The score of a model in eval mode; data and metrics as for :func:`espalier.fit`, each example once.

    Of a Dataset, its test part. Tensors are given to the model as they are: the stored uint8 of ``dataset.test`` are
    refused by most; give the Dataset, or ``dataset.as_floats().test``.
    """
    module = isinstance(model, nn.Module)
    if not module or not callable(loss):
        raise BadType(f"loss is a function, not {loss!r}" if module else f"model is a torch module, not {model!r}")
    batch_size = whole_number(batch_size, "batch_size", 1)
    batches = _batches(model, data, batch_size)
    return _score(model, batches, loss, lambda inputs: pytree.call(model, inputs), metrics)


def deterministic(
    gated: Gated, mask: Tensor, data: object, *, loss: Loss, batch_size: int = 512, metrics: Given = None
) -> Score:
    """The score under one mask ``(d)``, made canonical: with ``search.select()``, that of what ships."""
    with gated.masked(gated.canonical(mask)):
        return evaluate(gated.model, data, loss=loss, batch_size=batch_size, metrics=metrics)


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
    with torch.no_grad(), checks.evaluating(gated.model):
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


@torch.no_grad()
def answers(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors a model gives in eval mode, on the CPU. inputs: on its device; a tensor, a tuple or a dict."""
    with checks.evaluating(model):
        given = plain_output(pytree.call(model, inputs))
        return [tensor.detach().cpu() for tensor in pytree.tensors(given)]


def _score(
    model: nn.Module, batches: Iterable[Batch], loss: Loss, predict: Callable[[Any], Any], metrics: Given = None
) -> Score:
    total, examples = torch.zeros((), dtype=torch.float64), 0
    missed, predictions = 0, 0
    answers = list[Tensor]()
    meters = Meters(metrics_read(metrics))
    with torch.no_grad(), checks.evaluating(model):
        for batch in batches:
            inputs, targets = _on(model, batch)
            if not examples:
                checks.readable(model, pytree.each(lambda t: t[:4], inputs))
            outputs = predict(inputs)
            size = pytree.count(inputs, "the inputs")
            total += scalar(loss(outputs, targets)).cpu().double() * size
            examples += size
            meters.see(outputs, targets)
            counts = wrong(outputs, targets)
            if counts is not None:
                missed += int(counts[0])
                predictions += int(counts[1])
                answers.append(targets)
            elif isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.is_floating_point():
                answers += [targets] if outputs.shape == targets.shape else []
    if not examples:
        raise BadInput("the data are empty: there is nothing to evaluate on")
    error = missed / predictions if predictions else None
    return Score(float(total) / examples, error, examples, best_guess(answers, loss), meters.values())


def best_guess(parts: list[Tensor], loss: Loss) -> float | None:
    """The error of always guessing the most frequent class; else the loss of the mean of all targets, or of its logit
    where that is lower, as in binary cross entropy. parts: of the targets; without any there is no such answer."""
    if not parts:
        return None
    if not parts[0].is_floating_point():
        times = torch.bincount(torch.cat([part[part >= 0].flatten() for part in parts]))
        return int(times.sum() - times.max()) / int(times.sum()) if times.numel() else None
    examples = sum(len(part) for part in parts)
    mean = torch.stack([part.sum(0) for part in parts]).sum(0, keepdim=True) / examples
    constants = [mean, mean.logit()] if ((mean > 0) & (mean < 1)).all() else [mean]
    totals = [sum([float(scalar(loss(c.expand_as(p), p))) * len(p) for p in parts]) for c in constants]
    return min(totals) / examples


def _on(model: nn.Module, batch: Batch) -> Batch:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, targets = pytree.each(lambda t: t.to(device, non_blocking=True), batch)
    return inputs, targets


def _batches(model: nn.Module, data: object, batch_size: int) -> Iterator[Batch]:
    if hasattr(data, "once"):  # a feed
        return data.once()  # type: ignore[no-any-return]
    return feeds.read_held_out(data, batch_size, pytree.dtype(model)).once()
