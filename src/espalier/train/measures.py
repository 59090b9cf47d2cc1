"""Metrics beside the loss: functions by name, some that are known by name, and objects of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.space import BadInput, BadType
from espalier.train import pytree
from espalier.train.setting import near

Metric = Any  # a function of (outputs, targets), or an object with update, compute and reset
Given = Mapping[str, Metric] | Sequence[str] | None


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


# ---- known by name -------------------------------------------------------------------------------------------------


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
        predicted, true = outputs.argmax(dim).reshape(-1), targets.reshape(-1)
        return predicted[true >= 0], true[true >= 0]  # negative ones are not predicted
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


# ---- of a run ------------------------------------------------------------------------------------------------------


def read(given: Given) -> dict[str, Metric]:
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
            named[name] = KNOWN[metric]
        elif not _counts(metric) and not callable(metric):
            raise BadType(f"metric {name!r} is a function of (outputs, targets) or of torchmetrics, not {metric!r}")
    return named


def _counts(metric: Metric) -> bool:
    """Whether it is an object of torchmetrics, or one that is used as they are."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class Meters:
    """The metrics of one pass over data: told of every batch, asked for their values at the end.

    Functions are given all outputs and targets together. Of a model of Transformers the outputs are its logits.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self._kept: list[tuple[Any, Any]] = []
        for metric in metrics.values():
            if _counts(metric):
                metric.reset()

    def see(self, outputs: Any, targets: Any) -> None:
        if not self.metrics:
            return
        scores = outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
        scores, targets = pytree.each(lambda tensor: tensor.detach().cpu(), (scores, targets))
        for metric in self.metrics.values():
            if _counts(metric):
                metric.update(scores, targets)
        if not all(map(_counts, self.metrics.values())):
            self._kept.append((scores, targets))

    def values(self) -> dict[str, float]:
        together = [pytree.join(parts) for parts in zip(*self._kept)]
        return {
            name: _number(name, metric.compute() if _counts(metric) else metric(*together))
            for name, metric in self.metrics.items()
        }


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadType(f"metric {name!r} gives one number, not {type(value).__name__}") from None
