"""Estimators of this library and the alternatives of a scikit-learn user, by name, with a time limit for a fit."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LOG_LOSS = "neg_log_loss"
FOLDS = 5
# Name -> classifier, regressor and parameters.
LOGISTIC, RIDGE = "BilevelLogisticRegression", "BilevelRidge"
OURS = {
    "bilevel": (LOGISTIC, RIDGE, {}),
    "bilevel single": (LOGISTIC, RIDGE, {"structure": "single"}),
    "bilevel per_group": (LOGISTIC, RIDGE, {"structure": "per_group"}),
    "bilevel per_feature": (LOGISTIC, RIDGE, {"structure": "per_feature"}),
    "bilevel elastic net": ("BilevelSparseLogisticRegression", "BilevelElasticNet", {}),
}
TAKES_GROUPS = ("bilevel", "bilevel per_group")
REFERENCE = {True: "LogisticRegressionCV", False: "RidgeCV"}  # by whether the task is classification


class Unavailable(Exception):
    """The reason why a model is not available, in general or for a set."""


class Model(NamedTuple):
    """Functions that build a model for a set and describe its choice, and a limit of processor seconds."""

    build: Callable[[Any], Any]
    describe: Callable[[Any], str]
    seconds: float = 20.0


def models(kind):
    """Return all models for a set, baselines first; ``kind`` is its `estimator_sets.Table`."""
    chosen = NUMBERS if kind.task == "regression" else CLASSES
    return {**chosen, **{name: ours(name) for name in OURS}}


def every_name():
    return list(dict.fromkeys([*CLASSES, *NUMBERS, *OURS]))


def ours(name):
    return Model(lambda kind: build_ours(name, kind), describe_ours, 120.0)


def build_ours(name, kind):
    classifier, regressor, parameters = OURS[name]
    parameters = dict(parameters)
    if name in TAKES_GROUPS and kind.groups is not None:
        parameters["groups"] = kind.groups
    elif name == "bilevel per_group":
        raise Unavailable("the set has no groups")
    wanted = regressor if kind.task == "regression" else classifier
    estimator = getattr(importlib.import_module("bilevel.estimators"), wanted, None)
    if estimator is None:
        raise Unavailable(f"bilevel.estimators has no {wanted}")
    return estimator(**parameters, random_state=0)


def describe_ours(model):
    """Return structure, prior scale, mean and spread of the penalties, and the share of nonzero coefficients."""
    logs = np.log(model.penalties_[model.penalties_ > 0]) if (model.penalties_ > 0).any() else np.zeros(1)
    chosen = f"{model.penalty_structure_}, scale {model.prior_scale_:.2g}"
    kept = f", {np.mean(model.coef_ != 0):.0%} of coefficients" if np.any(model.coef_ == 0) else ""
    return f"{chosen}: {np.exp(logs.mean()):.2g} (log-deviation {logs.std():.2g}){kept}"


def logistic(ratios, solver, max_iter):
    def build(kind):
        from sklearn.linear_model import LogisticRegressionCV

        rest = {"cv": FOLDS, "scoring": LOG_LOSS, "use_legacy_attributes": False, "random_state": 0}
        return LogisticRegressionCV(Cs=10, l1_ratios=ratios, solver=solver, max_iter=max_iter, **rest)

    return build


def describe_logistic(model):
    ratio, kept = float(np.ravel(model.l1_ratio_)[0]), np.mean(model.coef_ != 0)
    mix = f", l1_ratio={ratio:.2g}, {kept:.0%} of coefficients" if ratio else ""
    return f"C={float(np.ravel(model.C_)[0]):.2g}{mix}"


def linear(name, **parameters):
    def build(kind):
        return getattr(importlib.import_module("sklearn.linear_model"), name)(**parameters)

    return build


def describe_linear(model):
    alpha, ratio = float(np.mean(model.alpha_)), getattr(model, "l1_ratio_", 1.0)
    kept = np.mean(np.abs(model.coef_) > 0)
    return f"alpha={alpha:.2g}" + (f", l1_ratio={ratio:.2g}, {kept:.0%} of coefficients" if kept < 1 else "")


def describe_ard(model):
    return f"{np.mean(model.lambda_ < model.threshold_lambda):.0%} of coefficients"


# Searches of other packages for many penalties; they are skipped if their package is not installed.


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unavailable(f"{module} is not installed") from None


def group_ridge(kind):
    """Return the ridge regression of himalaya with a penalty per group, by random search."""
    group_ridge_cv = need("himalaya.ridge").GroupRidgeCV
    if kind.groups is None:
        raise Unavailable("the set has no groups")
    search = {"n_iter": 100, "alphas": np.geomspace(1e-3, 1e5, 20), "progress_bar": False, "warn": False}
    return group_ridge_cv(kind.groups, cv=FOLDS, fit_intercept=True, random_state=0, solver_params=search)


def describe_group_ridge(model):
    return f"log-weights of groups {np.round(np.ravel(model.deltas_), 1).tolist()[:8]}"


class OptunaPerGroup:
    """A penalty per group of columns by TPE of Optuna on five folds, with 50 trials."""

    def __init__(self, kind, trials=50):
        self.optuna, self.kind, self.trials = need("optuna"), kind, trials
        if kind.groups is None or max(kind.groups) >= 20:
            raise Unavailable("no groups, or more than 20")
        self.names = [f"group {group}" for group in range(max(kind.groups) + 1)]

    def fit(self, X, y):
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        study = self.optuna.create_study(direction="maximize", sampler=self.optuna.samplers.TPESampler(seed=0))
        for level in (1.0, 1e2, 1e4):
            study.enqueue_trial(dict.fromkeys(self.names, level))
        study.optimize(lambda trial: self.score(trial, X, y), n_trials=self.trials)
        self.penalties = self.of_columns(study.best_params)
        self.model = self.plain().fit(self.scale(X), y)
        return self

    def score(self, trial, X, y):
        from sklearn.model_selection import cross_val_score

        self.penalties = self.of_columns({name: trial.suggest_float(name, 1e-2, 1e5, log=True) for name in self.names})
        scoring = "neg_mean_squared_error" if self.kind.task == "regression" else LOG_LOSS
        return cross_val_score(self.plain(), self.scale(X), y, cv=FOLDS, scoring=scoring).mean()

    def of_columns(self, penalties):
        return np.array([penalties[self.names[group]] for group in self.kind.groups])

    def scale(self, X):
        """Return columns for which a penalty of one is equivalent to these penalties."""
        return X / np.sqrt(self.penalties)

    def plain(self):
        from sklearn.linear_model import LogisticRegression, Ridge

        return Ridge(1.0) if self.kind.task == "regression" else LogisticRegression(C=1.0, max_iter=1000)

    def predict(self, X):
        return self.model.predict(self.scale(X))

    def predict_proba(self, X):
        return self.model.predict_proba(self.scale(X))


class SparhoPerFeature:
    """A Lasso with a penalty per feature, by the gradients of sparho over five folds, starting from LassoCV."""

    def __init__(self, kind):
        self.sparho = need("sparho")

    def fit(self, X, y):
        from sklearn.linear_model import LassoCV

        self.mean = y.mean()
        y, sparho = y - self.mean, self.sparho
        start = np.full(X.shape[1], LassoCV(cv=FOLDS, max_iter=10_000).fit(X, y).alpha_)
        problem = sparho.Problem(sparho.SquaredLoss(), sparho.WeightedL1(), np.asfortranarray(X), y)
        folds = sparho.CrossVal.kfold(len(y), k=FOLDS, warm_start=True)
        solver = sparho.adapters.SklearnWeightedLasso()
        self.penalties = sparho.hoag_search(problem, start, solver=solver, criterion=folds, n_iter=30).best_hyperparam
        self.coef = solver(problem, self.penalties).coef
        return self

    def predict(self, X):
        return X @ self.coef + self.mean


def describe_penalties(model):
    logs = np.log(model.penalties)
    return f"{np.exp(logs.mean()):.2g} (log-deviation {logs.std():.2g})"


CLASSES = {
    "LogisticRegressionCV": Model(logistic((0.0,), "lbfgs", 1000), describe_logistic, 120.0),
    "LogisticRegressionCV L1": Model(logistic((1.0,), "saga", 100), describe_logistic),
    "LogisticRegressionCV elastic net": Model(logistic((0.1, 0.5, 0.9), "saga", 100), describe_logistic),
    "Optuna per group": Model(OptunaPerGroup, describe_penalties),
}
NUMBERS = {
    "RidgeCV": Model(linear("RidgeCV", alphas=np.geomspace(1e-3, 1e5, 30)), describe_linear, 120.0),
    "LassoCV": Model(linear("LassoCV", cv=FOLDS, max_iter=10_000), describe_linear),
    "ElasticNetCV": Model(
        linear("ElasticNetCV", l1_ratio=[0.1, 0.5, 0.9, 0.99], cv=FOLDS, max_iter=10_000), describe_linear
    ),
    "ARDRegression": Model(linear("ARDRegression"), describe_ard),
    "himalaya GroupRidgeCV": Model(group_ridge, describe_group_ridge),
    "sparho per feature": Model(SparhoPerFeature, describe_penalties),
    "Optuna per group": Model(OptunaPerGroup, describe_penalties),
}
