"""What estimators are compared on, and what a scikit-learn user would take instead of them.

A baseline is a generator of `Found`: what it has after so many seconds of fitting, and its own score of that. All but
`bilevel`'s own estimators, which do so inside, get columns standardized by a pipeline.
"""

import signal
import time
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import optuna
from auto_sets import labeled
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LassoCV, LogisticRegression, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import bilevel

COVTYPE_ROWS = 20_000
STRENGTHS = 1e-4, 1e4  # of C and of alpha, as LogisticRegressionCV has them
PENALTIES = 1e-5, 1e3  # of one feature beside the mean loss, as bilevel's estimators have them
STARTS = 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5  # penalties alike for all features, which those begin with too
MOST_FEATURES = 60  # that Optuna is asked to tune one by one
LOG_LOSS, SQUARES = "neg_log_loss", "neg_mean_squared_error"


class Rows(NamedTuple):
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


class Effort(NamedTuple):
    """Seconds that methods are looked at after, sizes of grids, most trials of Optuna; steps and penalties of ours."""

    budgets: tuple[float, ...]
    sizes: tuple[int, ...]
    trials: int
    trials_per_feature: int
    steps: tuple[int, ...]
    penalties: tuple[str, ...]

    @property
    def seconds(self):
        return self.budgets[-1]


class Found(NamedTuple):
    """A model, the seconds until it was there, and its method's own score: higher is better."""

    seconds: float
    score: float
    model: Any


def ijcnn1(seed):
    """IJCNN1 with its own test rows; seeds differ in what methods draw."""
    data = bilevel.datasets.load("ijcnn1")
    return Rows(data.X_train.astype(np.float64), data.y_train, data.X_test.astype(np.float64), data.y_test)


def covtype(seed):
    """Covertype, class 2 against the rest: two times 20 000 of its rows."""
    data = bilevel.datasets.load("covtype")
    rows = np.random.default_rng(seed).permutation(len(data.X_train))[: 2 * COVTYPE_ROWS]
    features, labels = data.X_train[rows].astype(np.float64), (data.y_train[rows] == 2).astype(int)
    return cut(features, labels, COVTYPE_ROWS)


def breast_cancer(seed):
    """569 rows, 30 features, 30 % of the rows for testing."""
    return drawn(*load_breast_cancer(return_X_y=True), seed, stratified=True)


def noisy_breast_cancer(seed, noise=300):
    """The same rows with 300 columns of noise."""
    features, labels = load_breast_cancer(return_X_y=True)
    useless = np.random.default_rng(seed).standard_normal((len(features), noise))
    return drawn(np.column_stack([features, useless]), labels, seed, stratified=True)


def digits(seed):
    """Ten classes, 1797 rows, 64 pixels, 30 % of the rows for testing."""
    return drawn(*load_digits(return_X_y=True), seed, stratified=True)


def useless(seed, n=4000, n_test=10_000, dim=500, useful=20):
    """Five hundred normal features of which twenty matter, labels by the logistic model."""
    rng = np.random.default_rng(seed)
    truth = np.where(np.arange(dim) < useful, rng.standard_normal(dim), 0)
    return cut(*labeled(rng.standard_normal((n + n_test, dim)), truth, rng), n)


def diabetes(seed):
    """442 rows, 10 features, 30 % of the rows for testing."""
    return drawn(*load_diabetes(return_X_y=True), seed, stratified=False)


def useless_regression(seed, n=1000, n_test=10_000, dim=300, useful=15, noise=3.0):
    """Three hundred normal features of which fifteen matter, and noise in the target."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n + n_test, dim))
    truth = np.where(np.arange(dim) < useful, rng.standard_normal(dim), 0)
    return cut(features, features @ truth + noise * rng.standard_normal(len(features)), n)


def drawn(features, targets, seed, *, stratified):
    X, X_test, y, y_test = train_test_split(
        features, targets, test_size=0.3, random_state=seed, stratify=targets if stratified else None
    )
    return Rows(X, y, X_test, y_test)


def cut(features, targets, n):
    return Rows(features[:n], targets[:n], features[n:], targets[n:])


class Set(NamedTuple):
    rows: Any
    seeds: int
    classes: int  # 0: regression
    file: str | None = None  # of `bilevel.datasets`, where it is not made or scikit-learn's


SETS = {
    "IJCNN1": Set(ijcnn1, 2, 2, "ijcnn1"),
    "Covertype": Set(covtype, 2, 2, "covtype"),
    "breast cancer": Set(breast_cancer, 5, 2),
    "breast cancer and noise": Set(noisy_breast_cancer, 5, 2),
    "digits": Set(digits, 3, 10),
    "useless features": Set(useless, 3, 2),
    "diabetes": Set(diabetes, 5, 0),
    "regression with useless features": Set(useless_regression, 3, 0),
}


def baselines(kind, n_features):
    """The baselines of a set, by name: functions of rows, seed and effort."""
    named = {"Optuna, one penalty": by_trials(kind, one_penalty), "GridSearchCV": by_size(grid(kind))}
    if n_features <= MOST_FEATURES:
        named["Optuna, per feature"] = by_trials(kind, each_penalty)
    if kind.classes == 0:
        return {"RidgeCV": by_size(ridge_cv), **named, "LassoCV": by_size(lasso_cv)}
    if kind.classes == 2:  # liblinear has no softmax, and saga takes minutes
        named["GridSearchCV, L1"] = by_size(l1_grid)
    return {"LogisticRegressionCV": by_size(logistic_cv), **named}


def by_size(build):
    """One fit per size of grid; ``build`` returns the model, and how to read its own score once it is fitted."""

    def points(rows, seed, effort):
        for size in effort.sizes:
            model, score = build(size)
            began = time.perf_counter()
            try:
                with at_most(effort.seconds):
                    model.fit(rows.X, rows.y)
            except OutOfTime:
                return
            yield Found(time.perf_counter() - began, float(score(model)), model)

    return points


def by_trials(kind, space):
    """Optuna's TPE on five folds: each trial that is the best so far, refitted on all rows.

    Only the refit of the model at hand counts, for a user who stops there refits once.
    """

    def points(rows, seed, effort):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        suggested, trials, spent = *space(kind, rows, study, effort), 0.0
        for _ in range(trials):
            began = time.perf_counter()
            try:
                with at_most(effort.seconds - spent):
                    trial = study.ask()
                    model = suggested(trial)
                    score = cross_val_score(model, rows.X, rows.y, scoring=scoring(kind), error_score="raise").mean()
                    study.tell(trial, score)
            except OutOfTime:
                return
            spent += time.perf_counter() - began
            if study.best_trial.number == trial.number:
                began = time.perf_counter()
                model.fit(rows.X, rows.y)
                yield Found(spent + time.perf_counter() - began, float(score), model)

    return points


def one_penalty(kind, rows, study, effort):
    """C, or alpha, between the ends of the grids."""
    return lambda trial: plain(kind, trial.suggest_float("strength", *STRENGTHS, log=True)), effort.trials


def each_penalty(kind, rows, study, effort):
    """A penalty for each feature, after some that are alike for all."""
    names = [f"penalty {k}" for k in range(rows.X.shape[1])]
    for penalty in STARTS:
        study.enqueue_trial(dict.fromkeys(names, penalty))

    def suggested(trial):
        penalties = [trial.suggest_float(name, *PENALTIES, log=True) for name in names]
        return penalized(kind, np.array(penalties), len(rows.X))

    return suggested, effort.trials_per_feature


def plain(kind, strength):
    """The model with one penalty."""
    final = LogisticRegression(C=strength, max_iter=1000) if kind.classes else Ridge(strength)
    return make_pipeline(StandardScaler(), final)


def penalized(kind, penalties, n):
    """The model that minimizes mean loss + ½ sum penalty_k coef_k²: a column divided by √penalty, a penalty of 1."""
    divided = FunctionTransformer(lambda X: X / np.sqrt(penalties))
    final = LogisticRegression(C=1 / n, max_iter=1000) if kind.classes else Ridge(n)
    return make_pipeline(StandardScaler(), divided, final)


def grid(kind):
    name = "logisticregression__C" if kind.classes else "ridge__alpha"
    return lambda size: searched(plain(kind, 1.0), name, size, scoring(kind))


def l1_grid(size):
    model = make_pipeline(StandardScaler(), LogisticRegression(l1_ratio=1, solver="liblinear", max_iter=1000))
    return searched(model, "logisticregression__C", size, LOG_LOSS)


def searched(model, name, size, scoring):
    found = GridSearchCV(model, {name: np.geomspace(*STRENGTHS, size)}, scoring=scoring, error_score="raise")
    return found, lambda model: model.best_score_


def logistic_cv(size):
    cv = LogisticRegressionCV(Cs=size, l1_ratios=(0.0,), scoring=LOG_LOSS, max_iter=1000, use_legacy_attributes=False)
    return make_pipeline(StandardScaler(), cv), lambda model: model[-1].scores_.mean(axis=0).max()


def ridge_cv(size):
    cv = RidgeCV(np.geomspace(*STRENGTHS, size))
    return make_pipeline(StandardScaler(), cv), lambda model: model[-1].best_score_


def lasso_cv(size):
    cv = LassoCV(alphas=size, max_iter=10_000)
    return make_pipeline(StandardScaler(), cv), lambda model: -model[-1].mse_path_.mean(axis=-1).min()


def scoring(kind):
    return LOG_LOSS if kind.classes else SQUARES


class OutOfTime(Exception):
    pass


@contextmanager
def at_most(seconds):
    """Raise `OutOfTime` where the work inside takes longer."""

    def ring(*_):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
