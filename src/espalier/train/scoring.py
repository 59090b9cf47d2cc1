"""How good a network is: its loss, its error and further metrics; under the structure that ships, and averaged over
structures drawn from theta."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from espalier.compact.exported import plain_output
from espalier.gates.trace import eval_mode
from espalier.search.distribution import Distribution
from espalier.space import BadInput, BadType, whole_number
from espalier.train import checks, pytree
from espalier.train import feed as feeds
from espalier.train.feed import Batch
from espalier.train.gradients import Gated, scalar
from espalier.train.setting import near

Loss = Callable[[Any, Any], Tensor]
Metric = Any  # a function of (outputs, targets), or an object with update, compute and reset
Metrics = Mapping[str, Metric] | Sequence[str] | None


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


def evaluate(model: nn.Module, data: object, *, loss: Loss, batch_size: int = 512, metrics: Metrics = None) -> Score:
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
    gated: Gated, mask: Tensor, data: object, *, loss: Loss, batch_size: int = 512, metrics: Metrics = None
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
    with torch.no_grad(), eval_mode(gated.model):
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


def wrong(outputs: Any, targets: Any) -> tuple[Tensor, Tensor] | None:
    """How many predicted classes are wrong, and of how many; None where shapes do not say where the classes are.

    targets: integers; negative ones are not predicted, nor those that no score is of, as an ignore_index of 255. See
    :func:`class_dim`.
    """
    dim = class_dim(outputs, targets)
    if dim is None:
        return None
    counted = predicted(targets, outputs.shape[dim])
    return ((outputs.detach().argmax(dim) != targets) & counted).sum(), counted.sum()


def predicted(targets: Tensor, classes: int) -> Tensor:
    """Which targets are one of so many classes; what a loss leaves out is numbered otherwise."""
    return (targets >= 0) & (targets.long() < classes)


@torch.no_grad()
def answers(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors a model gives in eval mode, on the CPU. inputs: on its device; a tensor, a tuple or a dict."""
    with eval_mode(model):
        given = plain_output(pytree.call(model, inputs))
        return [tensor.detach().cpu() for tensor in pytree.tensors(given)]


def _score(
    model: nn.Module, batches: Iterable[Batch], loss: Loss, predict: Callable[[Any], Any], metrics: Metrics = None
) -> Score:
    total, examples = torch.zeros((), dtype=torch.float64), 0
    missed, predictions = 0, 0
    answers = list[Tensor]()
    measured = read_metrics(metrics)
    for metric in measured.values():
        metric.reset()
    with torch.no_grad(), eval_mode(model):
        for batch in batches:
            inputs, targets = _on(model, batch)
            if not examples:
                checks.few(model, inputs)
            outputs = predict(inputs)
            size = feeds.examples((inputs, targets))
            total += scalar(loss(outputs, targets)).cpu().double() * size
            examples += size
            if measured:
                here = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), (_scores(outputs), targets))
                for metric in measured.values():
                    metric.update(*here)
            dim, counts = class_dim(outputs, targets), wrong(outputs, targets)
            if dim is not None and counts is not None:
                missed += int(counts[0])
                predictions += int(counts[1])
                answers.append(targets[predicted(targets, outputs.shape[dim])])
            elif isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.is_floating_point():
                answers += [targets] if outputs.shape == targets.shape else []
    if not examples:
        raise BadInput("the data are empty: there is nothing to evaluate on")
    error = missed / predictions if predictions else None
    values = {name: _number(name, metric.compute()) for name, metric in measured.items()}
    return Score(float(total) / examples, error, examples, best_guess(answers, loss), values)


def best_guess(parts: list[Tensor], loss: Loss) -> float | None:
    """The error of always guessing the most frequent class; else the loss of the mean of all targets, or of its logit
    where that is lower, as in binary cross entropy. parts: of the targets; without any there is no such answer."""
    if not parts:
        return None
    if not parts[0].is_floating_point():
        times = torch.bincount(torch.cat([part.flatten() for part in parts]))
        return int(times.sum() - times.max()) / int(times.sum()) if times.numel() else None
    if len({part.shape[1:] for part in parts}) > 1:  # of images or sequences of several sizes
        return None
    examples = sum(len(part) for part in parts)
    mean = torch.stack([part.sum(0) for part in parts]).sum(0, keepdim=True) / examples
    constants = [mean, mean.logit()] if ((mean > 0) & (mean < 1)).all() else [mean]
    totals = [sum([float(scalar(loss(c.expand_as(p), p))) * len(p) for p in parts]) for c in constants]
    finite = [total for total in totals if math.isfinite(total)]  # a correlation with a constant is none
    return min(finite) / examples if finite else None


def _on(model: nn.Module, batch: Batch) -> Batch:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, targets = pytree.each(lambda t: t.to(device, non_blocking=True), batch)
    return inputs, targets


def _batches(model: nn.Module, data: object, batch_size: int) -> Iterator[Batch]:
    if hasattr(data, "once"):  # a feed
        return data.once()  # type: ignore[no-any-return]
    return feeds.read_held_out(data, batch_size, pytree.dtype(model)).once()


# ---- metrics beside the loss: functions by name, some that are known by name, and objects of torchmetrics ------------


def _numbers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets of a regression, float64, of one shape."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.numel() != targets.numel():
        raise BadInput("this metric compares numbers: outputs and targets are tensors of the same size")
    return outputs.double().reshape(targets.shape), targets.double()


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """The root of the mean squared error.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    1.4142135623730951
    """
    a, b = _numbers(outputs, targets)
    return float((a - b).square().mean().sqrt())


def mae(outputs: Tensor, targets: Tensor) -> float:
    """The mean absolute error."""
    a, b = _numbers(outputs, targets)
    return float((a - b).abs().mean())


def r2(outputs: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that is explained, the mean over several targets."""
    a, b = (part.reshape(len(targets), -1) for part in _numbers(outputs, targets))
    return float((1 - (a - b).square().sum(0) / (b - b.mean(0)).square().sum(0)).mean())


def _classes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted and true classes, flat; a single logit, or one for each label, says yes above 0."""
    dim = class_dim(outputs, targets)
    if dim is not None:
        given, true = outputs.argmax(dim).reshape(-1), targets.reshape(-1)
        counted = predicted(true, outputs.shape[dim])
        return given[counted], true[counted]
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.numel() != targets.numel():
        raise BadInput("this metric compares classes: outputs are scores of each class, or logits of yes")
    return (outputs.reshape(-1) > 0).long(), (targets.reshape(-1) > 0.5).long()


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of classes that are right."""
    predicted, true = _classes(outputs, targets)
    return float((predicted == true).double().mean())


def f1(outputs: Tensor, targets: Tensor) -> float:
    """Of two classes the F1 of the second one; of more, the mean over those that occur."""
    predicted, true = _classes(outputs, targets)
    if not len(true):
        return math.nan
    count = int(max(predicted.max(), true.max())) + 1
    both = torch.bincount(true[predicted == true], minlength=max(count, 2)).double()
    either = torch.bincount(predicted, minlength=len(both)) + torch.bincount(true, minlength=len(both))
    scores = 2 * both / either.clamp(min=1)
    two = class_dim(outputs, targets) is None or outputs.shape[class_dim(outputs, targets)] == 2  # type: ignore[index]
    return float(scores[1] if two else scores[either > 0].mean())


def auc(outputs: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve of two classes: how often a yes scores higher than a no; ties count half.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    dim = class_dim(outputs, targets)
    if dim is not None and outputs.shape[dim] == 2:
        outputs = outputs.select(dim, 1) - outputs.select(dim, 0)
    scores, yes = _numbers(outputs, targets)
    scores, yes = scores.reshape(-1), yes.reshape(-1) > 0.5
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]
    n, m = int(yes.sum()), int((~yes).sum())
    return float((ranks[yes].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")


KNOWN: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy, "auc": auc, "f1": f1, "mae": mae, "r2": r2, "rmse": rmse,
}  # fmt: skip
LARGER = ("accuracy", "auc", "f1", "r2")  # the larger, the better


def is_larger_better(name: str, metric: Metric | None = None) -> bool | None:
    """Whether the larger is the better, as the metric itself says, or its name; None where nobody says it.

    >>> is_larger_better("f1"), is_larger_better("top5_error"), is_larger_better("acc")
    (True, False, None)
    """
    if isinstance(metric, Together):
        known = [name for name, function in KNOWN.items() if function is metric.function]
        name, metric = known[0] if known else name, metric.function
    told = getattr(metric, "higher_is_better", None)
    if told is not None:
        return bool(told)
    if name in KNOWN:
        return name in LARGER
    return False if name.rpartition("_")[2] in ("loss", "error") else None


def read_metrics(given: Metrics) -> dict[str, Metric]:
    """The metrics of a call, by name."""
    if given is None:
        return {}
    if isinstance(given, str) or not isinstance(given, (Mapping, Sequence)):
        raise BadType(f"metrics is a dict of functions by name, or a list of some of {sorted(KNOWN)}, not {given!r}")
    named: dict[str, Metric] = dict(given) if isinstance(given, Mapping) else {name: name for name in given}
    for name, metric in named.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "error"):
            raise BadInput(f"a metric's name is a word of letters, and not loss or error, not {name!r}")
        if isinstance(metric, str):
            if metric not in KNOWN:
                raise BadInput(f"there is no metric {metric!r}, only {sorted(KNOWN)}{near(metric, KNOWN)}")
            named[name] = Together(KNOWN[metric])
        elif not all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")):
            if not callable(metric):
                raise BadType(f"metric {name!r} is a function of (outputs, targets) or of torchmetrics, not {metric!r}")
            named[name] = Together(metric)
    return named


class Together:
    """A function, used as an object of torchmetrics is: told of every batch, and given all of them together once."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.reset()

    def reset(self) -> None:
        self.parts: list[tuple[Any, Any]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        self.parts.append((outputs, targets))

    def compute(self) -> Any:
        parts, self.parts = self.parts, []
        try:
            outputs, targets = map(pytree.join, zip(*parts))
        except RuntimeError as error:
            raise BadInput(
                "a metric that is a function is given the whole validation at once, but its batches are of different "
                f"shapes: {error}. Pad them alike, or give an object of torchmetrics, which is told of each batch"
            ) from None
        return self.function(outputs, targets)


def _scores(outputs: Any) -> Any:
    """What metrics read of what a model gives: of a model of Transformers its logits."""
    return outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadType(f"metric {name!r} gives one number, not {type(value).__name__}") from None
