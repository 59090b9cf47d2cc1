"""scikit-learn: a network for tables, shaped while it trains, as classifier, regressor and feature selector."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.gates import attach
from espalier.train import PRESETS, Callback, EarlyStopping, Recipe, Result, fit
from espalier.train.batched import AdamW
from espalier.train.batched.batch import one_thread

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.feature_selection import SelectorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state, column_or_1d, compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, validate_data
except ModuleNotFoundError as missing:
    if (missing.name or "").split(".")[0] != "sklearn":
        raise
    text = "espalier.integrations.sklearn needs scikit-learn: pip install 'espalier[sklearn]'"
    raise ModuleNotFoundError(text, name="sklearn") from None

__all__ = ["EspalierClassifier", "EspalierFeatureSelector", "EspalierRegressor"]

Array = NDArray[Any]
UPDATES = 1500  # of a run whose epochs are not given, about
ROUND = 600  # and of a round of selection
EPOCHS = (20, 300)  # and the fewest and the most epochs that these are made of
# A selector ships no weights, so that nearly all of a run is left to the search.
SELECTING = replace(PRESETS["default"], begin=0.1, ramp=0.8, settle=0.1)


@dataclass(frozen=True)
class Scale:
    """Standardises columns: of inputs, or of the targets of a regression. mean, scale: ``(columns)``."""

    mean: Array
    scale: Array

    @classmethod
    def of(cls, values: Array, weight: Array) -> Scale:
        """values: ``(rows, columns)``, weight: ``(rows)``. A column that does not vary keeps its unit."""
        mean = np.average(values, axis=0, weights=weight)
        scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
        flat = scale <= 10 * np.finfo(np.float64).eps * np.maximum(np.abs(mean), 1e-300)
        return cls(mean, np.where(flat, 1.0, scale))

    def __call__(self, values: Array) -> Array:
        standardised: Array = (values - self.mean) / self.scale
        return standardised

    def back(self, values: Array) -> Array:
        original: Array = values * self.scale + self.mean
        return original


@dataclass(frozen=True)
class Table:
    """What a network trains on. inputs: ``(rows, features)`` standardised. targets: ``(rows, outputs)`` standardised,
    or ``(rows, 1)`` numbers of classes. weight: ``(rows)``, none of them 0. outputs: of the network."""

    inputs: Array
    targets: Array
    weight: Array
    outputs: int
    classes: bool

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs, and targets whose last column is the weight of the example, 1 on average."""
        weight = self.weight / self.weight.mean()
        dtype = _dtype(device)
        targets = np.column_stack([self.targets, weight])
        return torch.as_tensor(self.inputs, dtype=dtype), torch.as_tensor(targets, dtype=dtype)

    def rows(self, index: Array) -> Table:
        return replace(self, inputs=self.inputs[index], targets=self.targets[index], weight=self.weight[index])

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return weighted_cross_entropy if self.classes else weighted_squares


def weighted_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """outputs: ``(rows, classes)``; targets: ``(rows, 2)``, the class and the weight."""
    losses = F.cross_entropy(outputs, targets[:, 0].long(), reduction="none")
    return (losses * targets[:, 1]).mean()


def weighted_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """outputs: ``(rows, outputs)``; targets: ``(rows, outputs + 1)``, the weight last."""
    losses = (outputs - targets[:, :-1]).square().mean(1)
    return (losses * targets[:, -1]).mean()


def _dtype(device: torch.device) -> torch.dtype:
    """float64 on a CPU: predictions then do not depend on the rows beside them, as users of scikit-learn expect."""
    return torch.float64 if device.type == "cpu" else torch.float32


def network(features: int, hidden: Sequence[int], outputs: int, seed: int, device: torch.device) -> nn.Sequential:
    widths = [features, *hidden]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
    return model.to(device, _dtype(device))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= least


@dataclass(repr=False, eq=False)
class _Base(BaseEstimator):  # type: ignore[misc]
    """What the three have in common: how settings are checked, tables are read and a network is trained."""

    _: KW_ONLY
    hidden: Sequence[int] = (64, 64)
    target: float | None = None
    epochs: int | None = None
    batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 2.0
    recipe: str | Recipe | None = None
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False
    device: str | torch.device | None = None

    def _check_settings(self) -> None:
        given = self.get_params(deep=False)
        hidden = given["hidden"]
        if isinstance(hidden, (str, bytes)) or not isinstance(hidden, Sequence) or not hidden:
            raise ValueError(f"hidden is the widths of the hidden layers, such as (64, 64); got {hidden!r}")
        if not all(_is_whole(width, 2) for width in hidden):
            raise ValueError(f"every width of hidden is a whole number from 2 up; got {hidden!r}")
        for name in ("epochs", "batch_size", "n_iter_no_change"):
            missing = name == "epochs" and given[name] is None
            if name in given and not missing and not _is_whole(given[name], 1):
                raise ValueError(f"{name} is a whole number from 1 up; got {given[name]!r}")
        for name, most in (("learning_rate", np.inf), ("weight_decay", np.inf), ("validation_fraction", 1.0)):
            if name in given and not (_is_number(given[name]) and 0 <= given[name] < most):
                raise ValueError(f"{name} is a number in [0, {most:g}); got {given[name]!r}")

    def _read(self, X: Any, y: Any, sample_weight: Any, classes: bool) -> Table:
        """The training data, standardised; examples of weight 0 are left out."""
        X, y = validate_data(
            self, X, y, dtype=np.float64, ensure_min_samples=2, multi_output=not classes, y_numeric=not classes
        )
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if classes:
            y = column_or_1d(y, warn=True)
            check_classification_targets(y)
            self.classes_, targets = np.unique(y, return_inverse=True)
            weight = weight * compute_sample_weight(getattr(self, "class_weight", None), y)
            outputs = len(self.classes_)
        else:
            targets = np.asarray(y, dtype=np.float64)
            outputs, self._flat = (1, True) if targets.ndim == 1 else (targets.shape[1], False)
        used = weight > 0
        X, targets, weight = X[used], targets[used].reshape(int(used.sum()), -1), weight[used]
        if classes and len(np.unique(targets)) < 2:
            raise ValueError("the number of classes has to be greater than one; got 1 class")
        self.input_scale_ = Scale.of(X, weight)
        if not classes:
            self.target_scale_ = Scale.of(targets, weight)
            targets = self.target_scale_(targets)
        return Table(self.input_scale_(X), targets, weight, outputs, classes)

    def _train(self, table: Table, seed: int, kinds: Sequence[str], updates: int, **more: Any) -> Result:
        """A new network trained on a table and shaped. kinds: of gates. updates: about, where epochs are not given.
        more: for :func:`espalier.fit`."""
        device = torch.device("cpu" if self.device is None else self.device)
        validation, callbacks = None, list[Callback]()
        model = network(table.inputs.shape[1], self.hidden, table.outputs, seed, device)
        if getattr(self, "early_stopping", False):
            strata = table.targets[:, 0] if table.classes else None
            train, held_out = train_test_split(
                np.arange(len(table.inputs)), test_size=self.validation_fraction, random_state=seed, stratify=strata
            )
            validation, table = table.rows(held_out), table.rows(train)
            callbacks.append(EarlyStopping(patience=self.n_iter_no_change, best=True))
        inputs, targets = table.tensors(device)
        batch = min(self.batch_size, len(inputs))
        epochs = self.epochs or min(max(-(-updates // (len(inputs) // batch)), EPOCHS[0]), EPOCHS[1])
        gated = attach(model, inputs[:4].to(device), kinds=kinds, check=False)  # linear layers: nothing to find out
        with one_thread():
            result = fit(
                gated,
                (inputs, targets),
                epochs=epochs,
                loss=table.loss,
                batch_size=batch,
                optimizer=AdamW(self.learning_rate, weight_decay=self.weight_decay),  # with the schedule of the recipe
                seed=seed,
                validation=None if validation is None else validation.tensors(device),
                callbacks=callbacks,
                quiet=not self.verbose,
                **more,
            )
        gated.detach()
        return replace(result, search=None, gated=None)  # what is kept can be pickled


@dataclass(repr=False, eq=False)
class _Network(_Base):
    """A network for tables, in its two forms."""

    hidden: Sequence[int] = field(default=(64, 64), kw_only=False)
    _: KW_ONLY
    target: float | None = 0.5
    penalty: float | None = None
    cost: str = "weights"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10

    def _fit(self, X: Any, y: Any, sample_weight: Any, classes: bool) -> None:
        self._check_settings()
        table = self._read(X, y, sample_weight, classes)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        self.result_ = self._train(
            table,
            seed,
            ("units",),
            UPDATES,
            target=self.target,
            penalty=self.penalty,
            cost=self.cost,
            recipe=self.recipe,
        )
        self.model_ = self.result_.model
        self.mask_ = self.result_.mask.numpy(force=True) > 0
        self.n_iter_ = len(self.result_.history)
        self.loss_curve_ = [row["loss"] for row in self.result_.history]

    def _outputs(self, X: Any) -> Array:
        """What the network gives for each row, ``(rows, outputs)`` float64."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        first = next(self.model_.parameters())
        inputs = torch.as_tensor(self.input_scale_(X), dtype=first.dtype)
        with torch.no_grad(), one_thread():
            parts = [self.model_(part.to(first.device)).cpu() for part in torch.split(inputs, 8192)]
        outputs: Array = torch.cat(parts).double().numpy()
        return outputs

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")


@dataclass(repr=False, eq=False)
class EspalierClassifier(ClassifierMixin, _Network):  # type: ignore[misc]
    """A network of linear layers, trained and cut to the size you ask for; a scikit-learn classifier.

    Inputs are standardised inside, by the training data.

    hidden: widths of the hidden layers before they are cut.
    target: the share of the full cost to end at; None: no size is asked for.
    penalty: how strongly cost counts, instead of a target (``target=None``).
    cost: "weights", "macs", "units" or "parameters".
    epochs: None for about 1,500 updates, in 20 to 300 epochs.
    batch_size: examples in an update; at most all of them.
    learning_rate, weight_decay: of AdamW. The rate rises over the first twentieth of the run, then falls to 0.
    recipe: how structure and weights are trained; see :func:`espalier.fit`.
    early_stopping: hold out ``validation_fraction`` of the examples, and stop when their loss has not fallen for
        ``n_iter_no_change`` epochs after the structure is settled; the weights of the best epoch are kept.
    class_weight: None, "balanced", or a weight for each class.
    random_state: of the weights, the masks and the order of examples. device: "cpu" where it is None.

    After ``fit``: ``model_`` (the compact module, in eval mode; it reads ``input_scale_(X)``), ``result_`` (an
    :class:`espalier.train.Result`), ``mask_`` ``(d)`` bool, ``classes_``, ``n_iter_``, ``loss_curve_``.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = EspalierClassifier(target=0.25, epochs=60, random_state=0).fit(X, y)
    >>> bool(classifier.score(X, y) > 0.9), classifier.result_.shares["weight_share"] <= 0.25
    (True, True)
    """

    _: KW_ONLY
    class_weight: dict[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EspalierClassifier:
        """X: ``(rows, features)``; y: ``(rows)`` classes; sample_weight: ``(rows)``, from 0 up."""
        self._fit(X, y, sample_weight, classes=True)
        return self

    def decision_function(self, X: Any) -> Array:
        """The network's scores ``(rows, classes)``; of two classes ``(rows)``, that of the second minus the first."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs

    def predict_log_proba(self, X: Any) -> Array:
        outputs = self._outputs(X)
        outputs = outputs - outputs.max(1, keepdims=True)
        log_probabilities: Array = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
        return log_probabilities

    def predict_proba(self, X: Any) -> Array:
        """``(rows, classes)``, in the order of ``classes_``."""
        probabilities: Array = np.exp(self.predict_log_proba(X))
        return probabilities

    def predict(self, X: Any) -> Array:
        outputs = self._outputs(X)
        predicted: Array = self.classes_[outputs.argmax(1)]
        return predicted


@dataclass(repr=False, eq=False)
class EspalierRegressor(MultiOutputMixin, RegressorMixin, _Network):  # type: ignore[misc]
    """A network of linear layers, trained and cut to the size you ask for; a scikit-learn regressor.

    Inputs and targets are standardised inside, by the training data; predictions are in the unit of the targets. One
    target, or several. Parameters and attributes as of :class:`EspalierClassifier`; the loss is the squared error.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> bool(EspalierRegressor(epochs=60, random_state=0).fit(X, y).score(X, y) > 0.5)
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EspalierRegressor:
        """X: ``(rows, features)``; y: ``(rows)`` or ``(rows, outputs)``; sample_weight: ``(rows)``, from 0 up."""
        self._fit(X, y, sample_weight, classes=False)
        return self

    def predict(self, X: Any) -> Array:
        """In the unit of the targets: ``(rows)``, or ``(rows, outputs)`` where the targets were."""
        predicted = self._outputs(X)
        predicted = self.target_scale_.back(predicted)
        return predicted[:, 0] if self._flat else predicted


@dataclass(repr=False, eq=False)
class EspalierFeatureSelector(SelectorMixin, _Base):  # type: ignore[misc]
    """Chooses features: a network is trained with a gate on each of its inputs, and gates close until k are open.

    A round trains a new network and closes at most the share ``step`` of the features it was given; rounds follow each
    other until ``n_features_to_select`` are left. Their number is exact. New weights in each round forget what the
    weights before them had learned by heart from features that are gone.

    n_features_to_select: how many; target: which share, instead. Neither: half of them.
    task: "classification", "regression", or "auto": classification where y holds words, bools or integers by their
        dtype, regression where it holds floats.
    epochs: of each round; None for about 600 updates, in 20 to 300 epochs.
    Other parameters as of :class:`EspalierClassifier`.

    After ``fit``: ``scores_``, of each feature how many rounds it was left in, plus theta (how probably its gate is
    open) at the end of the last round it took part in; ``ranking_``, 1 for chosen features, 2 for the best of the
    others by their score, and so on; ``mask_``, which are chosen; ``results_``, an :class:`espalier.train.Result` for
    each round.

    >>> rows = np.random.RandomState(0).normal(size=(400, 10))
    >>> selector = EspalierFeatureSelector(2, random_state=0).fit(rows, rows[:, 3] * rows[:, 7] > 0)
    >>> selector.get_support(indices=True).tolist()
    [3, 7]
    """

    n_features_to_select: int | None = field(default=None, kw_only=False)
    _: KW_ONLY
    step: float = 0.67
    task: str = "auto"
    learning_rate: float = 1e-3
    weight_decay: float = 10.0
    class_weight: dict[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EspalierFeatureSelector:
        """X: ``(rows, features)``; y: ``(rows)``, or ``(rows, outputs)`` of a regression."""
        self._check_settings()
        table = self._read(X, y, sample_weight, self._classes(y))
        features = table.inputs.shape[1]
        wanted = self._wanted(features)
        random = check_random_state(self.random_state)
        left, scores = np.arange(features), np.zeros(features)
        self.results_: list[Result] = []
        while len(left) > wanted:
            size = max(wanted, len(left) - max(int(self.step * len(left)), 1))
            result = self._train(
                replace(table, inputs=table.inputs[:, left]),
                random.randint(2**31 - 1),
                ("inputs",),
                ROUND,
                cost=torch.ones(len(left)),
                target=min((size + 0.5) / len(left), 1.0),  # what ships is below it: size features, and no rounding
                recipe=SELECTING if self.recipe is None else self.recipe,
            )
            assert result.theta is not None
            open_ = result.mask.numpy(force=True) > 0
            scores[left] = len(self.results_) + result.theta.numpy(force=True)
            left = left[open_]
            self.results_.append(result)
        self.scores_ = scores
        self.mask_ = np.isin(np.arange(features), left)
        others = np.unique(-scores[~self.mask_], return_inverse=True)[1]
        self.ranking_ = np.ones(features, dtype=np.int64)
        self.ranking_[~self.mask_] = 2 + others
        return self

    def _classes(self, y: Any) -> bool:
        tasks = ("auto", "classification", "regression")
        if self.task not in tasks:
            raise ValueError(f"task is one of {tasks}; got {self.task!r}")
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        if self.task != "auto":
            return self.task == "classification"
        kind = np.asarray(check_array(y, dtype=None, ensure_2d=False, ensure_all_finite=False, ensure_min_samples=0))
        return kind.dtype.kind != "f" and kind.ndim == 1

    def _wanted(self, features: int) -> int:
        """How many features are to be chosen."""
        number, share = self.n_features_to_select, self.target
        if number is not None and share is not None:
            raise ValueError("n_features_to_select and target both say how many; give one of them")
        if not (_is_number(self.step) and 0 < self.step <= 1):
            raise ValueError(f"step is the share of the features that a round may close, in (0, 1]; got {self.step!r}")
        if number is not None:
            if not _is_whole(number, 1):
                raise ValueError(f"n_features_to_select is a whole number from 1 up; got {number!r}")
            if number > features:
                raise ValueError(f"n_features_to_select={number} is more than the {features} features of X")
            return int(number)
        share = 0.5 if share is None else share
        if not (_is_number(share) and 0 < share <= 1):
            raise ValueError(f"target is the share of the features to choose, in (0, 1]; got {share!r}")
        return max(int(share * features + 1e-9), 1)

    def _get_support_mask(self) -> Array:
        check_is_fitted(self)
        mask: Array = self.mask_
        return mask

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "mask_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags
