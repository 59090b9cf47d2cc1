"""The scikit-learn estimators: scikit-learn's own checks, sizes that are met, features that are found."""

from __future__ import annotations

import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import espalier
from espalier.integrations.sklearn import EspalierClassifier, EspalierFeatureSelector, EspalierRegressor

QUICK = {"hidden": (16, 16), "epochs": 20, "learning_rate": 0.02, "random_state": 0}
EVERY = [EspalierClassifier(**QUICK), EspalierRegressor(**QUICK), EspalierFeatureSelector(1, hidden=(8,), epochs=3)]


@parametrize_with_checks(EVERY)
def test_what_scikit_learn_asks_of_an_estimator(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


def products(rows=300, features=12, seed=0):
    """Classes by the product of two features, which neither of them tells alone."""
    inputs = np.random.RandomState(seed).normal(size=(rows, features))
    return inputs, np.where(inputs[:, 2] * inputs[:, 9] > 0, "yes", "no")


@pytest.mark.parametrize("target", [0.1, 0.4, 1.0])
def test_the_size_asked_for_is_not_exceeded(iris, target):
    model = EspalierClassifier(**QUICK | {"target": target}).fit(*iris)
    assert model.result_.shares["weight_share"] <= target
    kept = sum(p.numel() for p in model.model_.parameters() if p.ndim == 2)
    full = 4 * 16 + 16 * 16 + 16 * 3
    assert kept / full == pytest.approx(model.result_.shares["weight_share"])
    assert model.mask_.shape == (32,)
    assert model.n_iter_ == len(model.loss_curve_) == 20


def test_a_penalty_instead_of_a_target(iris):
    kept = [EspalierClassifier(**QUICK, target=None, penalty=p).fit(*iris).mask_.sum() for p in (-0.5, 2.0)]
    assert kept[0] > kept[1]
    with pytest.raises(ValueError, match="target"):
        EspalierClassifier(**QUICK, target=0.5, penalty=1.0).fit(*iris)


def test_a_recipe_of_ones_own(iris):
    for recipe in ("ranked", "paper", espalier.train.Recipe(settle=0.4)):
        model = EspalierClassifier(**QUICK, target=0.3, recipe=recipe).fit(*iris)
        assert model.result_.shares["weight_share"] <= 0.3
        assert EspalierFeatureSelector(3, recipe=recipe, epochs=2).fit(*iris).get_support().sum() == 3


def test_words_as_classes_and_probabilities_that_agree():
    X, y = products()
    model = EspalierClassifier(hidden=(32, 32), epochs=120, learning_rate=0.01, random_state=0).fit(X, y)
    assert list(model.classes_) == ["no", "yes"]
    assert model.score(X, y) > 0.9
    probabilities = model.predict_proba(X)
    assert probabilities.sum(1) == pytest.approx(1)
    assert model.decision_function(X).shape == (300,)
    np.testing.assert_allclose(np.log(probabilities), model.predict_log_proba(X))
    np.testing.assert_allclose(np.diff(np.log(probabilities))[:, 0], model.decision_function(X))
    np.testing.assert_array_equal(model.classes_[(model.decision_function(X) > 0).astype(int)], model.predict(X))


def test_the_compact_model_is_what_predicts(iris):
    X, y = iris
    model = EspalierClassifier(**QUICK).fit(X, y)
    with torch.no_grad():
        outputs = model.model_(torch.as_tensor(model.input_scale_(X)))
    np.testing.assert_allclose(outputs.softmax(1).numpy(), model.predict_proba(X))


def test_targets_of_any_unit_are_learned_and_come_back_in_it():
    X, y = load_diabetes(return_X_y=True)
    plain = EspalierRegressor(**QUICK).fit(X, y)
    large = EspalierRegressor(**QUICK).fit(X * 1e-6, 1e9 * y - 1e12)
    assert plain.score(X, y) > 0.4
    np.testing.assert_allclose(large.predict(X * 1e-6), 1e9 * plain.predict(X) - 1e12, rtol=1e-6)
    several = EspalierRegressor(**QUICK).fit(X, np.column_stack([y, -1000 * X[:, 2]]))
    assert several.predict(X).shape == (len(X), 2)
    assert several.score(X, np.column_stack([y, -1000 * X[:, 2]])) > 0.5
    assert EspalierRegressor(**QUICK).fit(X, y[:, None]).predict(X).shape == (len(X), 1)


def test_weights_of_examples_and_of_classes(iris):
    X, y = iris
    twice = np.r_[np.arange(150), np.arange(50)]
    weight = np.where(np.arange(150) < 50, 2.0, 1.0)
    own = QUICK | {"batch_size": 256}
    repeated = EspalierClassifier(**own).fit(X[twice], y[twice]).predict_proba(X)
    np.testing.assert_allclose(EspalierClassifier(**own).fit(X, y, weight).predict_proba(X), repeated, rtol=1e-6)
    by_class = EspalierClassifier(**own, class_weight={0: 2.0}).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(by_class, repeated, rtol=1e-6)
    rare = np.r_[np.arange(50, 100), np.arange(100, 105)]
    balanced = EspalierClassifier(**own, class_weight="balanced").fit(X[rare], y[rare])
    plain = EspalierClassifier(**own).fit(X[rare], y[rare])
    assert balanced.predict_proba(X[100:])[:, 1].mean() > plain.predict_proba(X[100:])[:, 1].mean()


def test_early_stopping_waits_until_the_structure_is_settled():
    X, y = load_breast_cancer(return_X_y=True)
    model = EspalierClassifier(
        (16,), epochs=60, early_stopping=True, n_iter_no_change=3, learning_rate=0.05, random_state=0
    ).fit(X, y)
    rows = model.result_.history
    assert 30 < model.n_iter_ < 60
    assert "did not get better for 3" in model.result_.stopped
    settled = [row["validation_loss"] for row in rows if row["settled"]]
    best = len(settled) - 4
    assert min(settled) == settled[best]
    assert model.score(X, y) > 0.9
    assert not EspalierClassifier(**QUICK).fit(X, y).result_.stopped


def test_the_same_random_state_gives_the_same_network_and_leaves_torch_alone(iris):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = (EspalierClassifier(**QUICK).fit(*iris) for _ in range(2))
    np.testing.assert_array_equal(first.predict_proba(iris[0]), second.predict_proba(iris[0]))
    other = EspalierClassifier(**QUICK | {"random_state": 1}).fit(*iris)
    assert not np.array_equal(first.predict_proba(iris[0]), other.predict_proba(iris[0]))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    again = pickle.loads(pickle.dumps(first))  # noqa: S301
    np.testing.assert_array_equal(again.predict(iris[0]), first.predict(iris[0]))


def test_pipelines_grids_and_folds(iris):
    X, y = iris
    pipe = make_pipeline(
        EspalierFeatureSelector(2, epochs=60, random_state=0), EspalierClassifier(**QUICK | {"epochs": 60})
    )
    assert cross_val_score(pipe, X, y, cv=2).mean() > 0.85
    grid = GridSearchCV(EspalierClassifier(**QUICK), {"target": [0.2, 0.8], "hidden": [(8,), (16, 16)]}, cv=2)
    grid.fit(X, y)
    assert set(grid.best_params_) == {"target", "hidden"}
    assert clone(grid.best_estimator_).get_params() == grid.best_estimator_.get_params()
    assert EspalierRegressor().set_params(target=0.2).target == 0.2


@pytest.mark.parametrize(("asked", "count"), [({"n_features_to_select": 2}, 2), ({"target": 0.45}, 5), ({}, 6)])
def test_exactly_as_many_features_as_asked_for(asked, count):
    X, y = products()
    selector = EspalierFeatureSelector(**asked, epochs=30, random_state=0).fit(X, y)
    support = selector.get_support()
    assert support.sum() == count
    assert support[[2, 9]].all()
    assert selector.transform(X).shape == (300, count)
    np.testing.assert_array_equal(selector.transform(X), X[:, support])
    assert (selector.ranking_ == 1).sum() == count
    assert (support == (selector.ranking_ == 1)).all()
    order = np.argsort(-selector.scores_, kind="stable")
    assert (np.diff(selector.ranking_[order]) >= 0).all()


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("step", [0.3, 1.0])
def test_every_number_of_features_is_met(count, step):
    X, y = products(rows=40, features=7 + 3)
    assert EspalierFeatureSelector(count, step=step, hidden=(4,), epochs=2).fit(X, y).get_support().sum() == count


def test_features_of_a_regression():
    X, _ = products()
    y = X[:, 4] ** 2 + X[:, 7] + 0.1 * X[:, 0]
    selector = EspalierFeatureSelector(2, epochs=30, random_state=0).fit(X, y)
    assert selector.get_support(indices=True).tolist() == [4, 7]
    both = EspalierFeatureSelector(2, epochs=30, random_state=0).fit(X, np.column_stack([X[:, 1], X[:, 5]]))
    assert both.get_support(indices=True).tolist() == [1, 5]
    counts = np.round(y).astype(int)
    assert EspalierFeatureSelector(2, task="regression", epochs=30, random_state=0).fit(X, counts).mask_[[4, 7]].all()


def test_names_of_features():
    pandas = pytest.importorskip("pandas")
    X, y = products()
    frame = pandas.DataFrame(X, columns=[f"column {i}" for i in range(12)])
    selector = EspalierFeatureSelector(2, epochs=30, random_state=0).set_output(transform="pandas").fit(frame, y)
    assert selector.get_feature_names_out().tolist() == ["column 2", "column 9"]
    assert list(selector.transform(frame).columns) == ["column 2", "column 9"]
    model = EspalierClassifier(**QUICK).fit(frame, y)
    assert list(model.feature_names_in_) == list(frame.columns)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"column 2": "other"}))


def test_names_without_a_frame():
    selector = EspalierFeatureSelector(2, epochs=30, random_state=0).fit(*products())
    assert selector.get_feature_names_out([f"f{i}" for i in range(12)]).tolist() == ["f2", "f9"]
    assert selector.get_feature_names_out().tolist() == ["x2", "x9"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden": ()}, "hidden is the widths"),
        ({"hidden": "64"}, "hidden is the widths"),
        ({"hidden": (64, 1)}, "from 2 up"),
        ({"epochs": 0}, "epochs is a whole number"),
        ({"batch_size": 1.5}, "batch_size is a whole number"),
        ({"n_iter_no_change": 0}, "n_iter_no_change"),
        ({"learning_rate": -1}, "learning_rate is a number"),
        ({"weight_decay": "much"}, "weight_decay is a number"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"target": 1.5}, "target"),
        ({"target": 1e-4}, "smallest"),
        ({"cost": "euros"}, "euros"),
        ({"recipe": "none"}, "none"),
        ({"class_weight": "wrong"}, "class_weight"),
    ],
)
def test_bad_settings_are_named(iris, settings, words):
    with pytest.raises(ValueError, match=words):
        EspalierClassifier(**QUICK | settings).fit(*iris)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_features_to_select": 5}, "more than the 4 features"),
        ({"n_features_to_select": 0}, "from 1 up"),
        ({"n_features_to_select": 0.5}, "whole number"),
        ({"target": 0.0}, "in \\(0, 1\\]"),
        ({"n_features_to_select": 1, "target": 0.5}, "give one of them"),
        ({"step": 0}, "step is the share"),
        ({"task": "clustering"}, "task is one of"),
    ],
)
def test_bad_settings_of_a_selector_are_named(iris, settings, words):
    with pytest.raises(ValueError, match=words):
        EspalierFeatureSelector(**settings, epochs=2).fit(*iris)


def test_bad_data_are_named(iris):
    X, y = iris
    with pytest.raises(NotFittedError):
        EspalierRegressor().predict(X)
    with pytest.raises(NotFittedError):
        EspalierFeatureSelector().get_support()
    with pytest.raises(ValueError, match="greater than one"):
        EspalierClassifier().fit(X, np.zeros(150, dtype=int))
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        EspalierClassifier(**QUICK).fit(X, y, -np.ones(150))
    with pytest.raises(ValueError, match="features"):
        EspalierClassifier(**QUICK).fit(X, y).predict(X[:, :3])


def test_without_scikit_learn_one_line_says_what_is_missing():
    program = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import espalier\n"
        "try:\n    import espalier.integrations.sklearn\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "espalier.integrations.sklearn needs scikit-learn: pip install 'espalier[sklearn]'\n"


def test_the_example(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "features.py"))
    said = capsys.readouterr().out
    assert said.startswith("chosen: 3 17 ")
    assert float(re.findall(r"([0-9.]+)%", said)[0]) > 90


def test_the_rate_falls_to_nothing_as_the_page_says():
    X, y = load_iris(return_X_y=True)
    rates = [row["learning_rate"] for row in EspalierClassifier(epochs=20, random_state=0).fit(X, y).result_.history]
    assert max(rates) <= 3e-3
    assert rates[-1] < 0.05 * max(rates)
    assert rates == sorted(rates, reverse=True)
