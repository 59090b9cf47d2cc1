"""Feature selection: ours against LassoNet, L1, mutual information and random forests, at equal numbers of features.

    python benchmarks/features.py --out results/sklearn/features.jsonl [--tasks madelon,...] [--methods ours,...]
    python benchmarks/features.py --out results/sklearn/features.jsonl --into docs/sklearn.md

A line for each task, method and seed; lines that are there are not made again. Features are chosen on training rows.
The judge is one for all: a support vector machine with the RBF kernel and scikit-learn's defaults, trained on the
chosen features of the training rows, scored on test rows. ``--into`` writes the tables between the marks of a page.
LassoNet is the package ``lassonet``; without it its lines are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import mutual_info_classif, mutual_info_regression
from sklearn.linear_model import LogisticRegression, lasso_path
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from espalier.integrations.sklearn import EspalierFeatureSelector
from espalier.report.tables import put_between
from evidence_table import interval

MARKS = ("<!-- generated: features -->", "<!-- end of generated: features -->")
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]  # train, test, and what is informative


def shuffled(inputs: np.ndarray, targets: np.ndarray, informative: int, seed: int) -> Rows:
    """The first columns are informative; half of the rows are for the judge."""
    random = np.random.default_rng(seed)
    columns = random.permutation(inputs.shape[1])
    train, test, targets, judged = train_test_split(inputs[:, columns], targets, test_size=0.5, random_state=seed)
    return train, test, targets, judged, columns < informative


def madelon(seed: int) -> Rows:
    """Madelon's form: 30 of the 32 corners of a cube in 5 dimensions have a class each, by chance; 15 sums of these 5
    features, 480 of noise; 2,000 rows. With all 32 corners scikit-learn's classes are those of a single feature."""
    made = datasets.make_classification(
        4000, 500, n_informative=5, n_redundant=15, n_clusters_per_class=15, class_sep=2.0, shuffle=False,
        random_state=seed,
    )  # fmt: skip
    return shuffled(*made, 20, seed)


def linear(seed: int) -> Rows:
    """Two classes by a weighted sum of 10 of 200 features; 500 rows."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(1000, 200))
    scores = inputs[:, :10] @ random.choice([-1.0, 1.0], 10) * random.uniform(0.5, 1.5) + random.normal(size=1000)
    return shuffled(inputs, (scores > 0).astype(int), 10, seed)


def friedman(seed: int) -> Rows:
    """Friedman's first function of 5 of 100 features, with noise; 500 rows."""
    return shuffled(*datasets.make_friedman1(1000, 100, noise=1.0, random_state=seed), 5, seed)


def known(load: Callable[..., Any]) -> Callable[[int], Rows]:
    def read(seed: int) -> Rows:
        inputs, targets = load(return_X_y=True)
        parts = train_test_split(inputs, targets, test_size=1 / 3, random_state=seed)
        return parts[0], parts[1], parts[2], parts[3], None

    return read


# name: rows by seed, features to choose, whether it is a regression
TASKS: dict[str, tuple[Callable[[int], Rows], int, bool]] = {
    "madelon": (madelon, 20, False),
    "linear": (linear, 10, False),
    "friedman": (friedman, 5, True),
    "digits": (known(datasets.load_digits), 16, False),
    "breast_cancer": (known(datasets.load_breast_cancer), 5, False),
    "wine": (known(datasets.load_wine), 4, False),
    "diabetes": (known(datasets.load_diabetes), 4, True),
}
TITLES = {"ours": "EspalierFeatureSelector", "lassonet": "LassoNet", "l1": "L1", "mutual": "mutual information",
          "forest": "random forest", "truth": "the informative ones", "chance": "chance"}  # fmt: skip


def ours(inputs: np.ndarray, targets: np.ndarray, k: int, regression: bool, seed: int, **own: Any) -> np.ndarray:
    task = "regression" if regression else "classification"
    return EspalierFeatureSelector(k, task=task, random_state=seed, **own).fit(inputs, targets).get_support()


def best(scores: np.ndarray, k: int) -> np.ndarray:
    return np.isin(np.arange(len(scores)), np.argsort(-scores, kind="stable")[:k])


def l1(inputs: np.ndarray, targets: np.ndarray, k: int, regression: bool, seed: int) -> np.ndarray:
    """The k features of largest coefficients where the penalty first leaves as many in; the lasso for regressions."""
    if regression:
        centred = targets - targets.mean()
        first = np.abs(inputs.T @ centred).max() / len(inputs)  # the penalty at which the first feature enters
        _, path, _ = lasso_path(inputs, centred, alphas=np.geomspace(first, 1e-3 * first, 200))
        sizes = np.abs(path).T
    else:
        sizes = np.array([])
        for c in np.geomspace(1e-3, 10, 41):
            model = LogisticRegression(l1_ratio=1.0, C=c, solver="saga", max_iter=300, tol=1e-3, random_state=seed)
            size = np.abs(model.fit(inputs, targets).coef_).max(0)
            sizes = size[None]
            if (size > 0).sum() >= k:
                break
    for size in sizes:
        if (size > 0).sum() >= k:
            return best(size, k)
    return best(sizes[-1], k)


def mutual(inputs: np.ndarray, targets: np.ndarray, k: int, regression: bool, seed: int) -> np.ndarray:
    score = mutual_info_regression if regression else mutual_info_classif
    return best(score(inputs, targets, random_state=seed), k)


def forest(inputs: np.ndarray, targets: np.ndarray, k: int, regression: bool, seed: int) -> np.ndarray:
    model = RandomForestRegressor if regression else RandomForestClassifier
    return best(model(500, random_state=seed, n_jobs=2).fit(inputs, targets).feature_importances_, k)


def lassonet(inputs: np.ndarray, targets: np.ndarray, k: int, regression: bool, seed: int) -> np.ndarray:
    """Its own defaults; the importance of a feature is the penalty at which it goes."""
    from lassonet import LassoNetClassifier, LassoNetRegressor

    model = (LassoNetRegressor if regression else LassoNetClassifier)(random_state=seed, torch_seed=seed, verbose=0)
    targets = (targets - targets.mean()) / targets.std() if regression else targets
    model.path(inputs.astype(np.float32), targets.astype(np.float32) if regression else targets)
    return best(model.feature_importances_.numpy(), k)


METHODS = {"ours": ours, "lassonet": lassonet, "l1": l1, "mutual": mutual, "forest": forest}


def judged(rows: Rows, chosen: np.ndarray, regression: bool) -> float:
    """Share of right classes, or R^2."""
    train, test, targets, answers, _ = rows
    scale = StandardScaler().fit(train[:, chosen])
    middle, spread = (targets.mean(), targets.std()) if regression else (0, 1)
    judge = SVR() if regression else SVC()
    judge.fit(scale.transform(train[:, chosen]), (targets - middle) / spread if regression else targets)
    answers = (answers - middle) / spread if regression else answers
    return float(judge.score(scale.transform(test[:, chosen]), answers))


def line(task: str, method: str, seed: int) -> dict[str, Any]:
    read, k, regression = TASKS[task]
    rows = read(seed)
    train, targets, informative = rows[0], rows[2], rows[4]
    standard = StandardScaler().fit_transform(train)
    began, spent = time.perf_counter(), time.process_time()
    if method == "truth":
        chosen = informative
    elif method == "chance":
        chosen = best(np.random.default_rng(seed).random(train.shape[1]), k)
    else:
        chosen = METHODS[method](standard, targets, k, regression, seed)
    seconds, processor = time.perf_counter() - began, time.process_time() - spent
    assert chosen is not None
    assert chosen.sum() == k
    right = None if informative is None else int((chosen & informative).sum())
    return {
        "task": task, "method": method, "seed": seed, "features": train.shape[1], "rows": len(train), "k": k,
        "regression": regression, "score": judged(rows, chosen, regression), "right": right,
        "seconds": round(seconds, 3), "processor_seconds": round(processor, 3),
        "chosen": np.flatnonzero(chosen).tolist(), "torch": torch.__version__,
    }  # fmt: skip


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A table for each task: mean score with its 95% interval over seeds, informative features found, seconds of the
    processor (all cores together), and how far ours is ahead over equal seeds."""
    parts = []
    for task in (name for name in TASKS if any(one["task"] == name for one in lines)):
        here = [one for one in lines if one["task"] == task]
        first = here[0]
        unit, times = ("R²", 1) if first["regression"] else ("accuracy %", 100)
        form = ".3f" if first["regression"] else ".1f"
        known_truth = first["right"] is not None
        found = ["informative ones"] if known_truth else []
        head = ["features by", f"{unit} of the judge", *found, "processor seconds", "ours minus it"]
        rows = []
        by = {
            method: {one["seed"]: one for one in here if one["method"] == method}
            for method in ("ours", "lassonet", "l1", "mutual", "forest", "truth", "chance")
        }
        for method, seeds in by.items():
            if not seeds:
                continue
            middle, low, _ = interval([times * one["score"] for one in seeds.values()])
            spread = f" ± {middle - low:{form}}" if len(seeds) > 1 else ""
            fewer = f" (n = {len(seeds)})" if len(seeds) < len(by["ours"]) else ""
            cells = [TITLES[method], f"{middle:{form}}{spread}{fewer}"]
            if known_truth:
                right = np.mean([one["right"] for one in seeds.values()])
                cells.append(f"{right:.1f} of {first['k']}")
            seconds = np.mean([one["processor_seconds"] for one in seeds.values()])
            cells.append("" if method in ("truth", "chance") else f"{seconds:.1f}")
            cells.append("" if method == "ours" else ahead(by["ours"], seeds, times, form))
            rows.append(f"| {' | '.join(cells)} |")
        heading = (
            f"**{task}: {first['k']} of {first['features']} features, {first['rows']:,} rows**, {len(by['ours'])} seeds"
        )
        parts.append("\n".join([heading, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]))
    return "\n\n".join(parts)


def ahead(own: dict[int, Any], rival: dict[int, Any], times: float, form: str) -> str:
    """Ours minus the rival over equal seeds, with its interval; bold where that leaves out 0."""
    seeds = sorted(own.keys() & rival.keys())
    if not seeds:
        return ""
    middle, low, high = interval([times * (own[seed]["score"] - rival[seed]["score"]) for seed in seeds])
    if len(seeds) < 2:
        return f"{middle:+{form}} (n = 1)"
    text = f"{middle:+{form}} [{low:+{form}}, {high:+{form}}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of lines")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default="ours,lassonet,l1,mutual,forest,truth,chance")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--into", type=Path, help="only write the tables of the lines into this page")
    given = parser.parse_args(words)
    lines = lines_of(given.out)
    if given.into is not None:
        put_between(given.into, [(MARKS, table(lines))])
        return
    torch.set_num_threads(1)  # threads of small networks wait for each other
    done = {(one["task"], one["method"], one["seed"]) for one in lines}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(given.seeds):
        for task in given.tasks.split(","):
            for method in given.methods.split(","):
                truthless = method == "truth" and TASKS[task][0](seed)[4] is None
                if (task, method, seed) in done or truthless:
                    continue
                try:
                    made = line(task, method, seed)
                except ModuleNotFoundError as missing:
                    if missing.name != "lassonet":
                        raise
                    continue
                with given.out.open("a") as file:
                    file.write(json.dumps(made) + "\n")
                print(json.dumps({key: made[key] for key in ("task", "method", "seed", "score", "right", "seconds")}))


if __name__ == "__main__":
    main()
