"""Ours and what a scikit-learn user would take instead, by name, each with the seconds that one fit may take."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# One line per model of ours: the class for classes, the class for numbers, and the parameters.
LOGISTIC, RIDGE = "BilevelLogisticRegression", "BilevelRidge"
OURS = {
    "bilevel": (LOGISTIC, RIDGE, {}),
    "bilevel single": (LOGISTIC, RIDGE, {"penalty": "single"}),
    "bilevel per_group": (LOGISTIC, RIDGE, {"penalty": "per_group"}),
    "bilevel per_feature": (LOGISTIC, RIDGE, {"penalty": "per_feature"}),
    "bilevel elastic net": ("BilevelElasticNetClassifier", "BilevelElasticNet", {}),
}
TAKES_GROUPS = ("bilevel", "bilevel per_group")
REFERENCE = {True: "LogisticRegressionCV", False: "RidgeCV"}  # for classes, for numbers
LOG_LOSS = "neg_log_loss"
FOLDS = 5


class Model(NamedTuple):
    """How to build a model for a set, what it has chosen, and the processor seconds of the longest fit allowed."""

    build: Callable[[Any], Any]
    describe: Callable[[Any], str]
    seconds: float = 20.0


class Unavailable(Exception):
    """Why a model cannot be had here, or not for this set."""


def models(kind):
    """All models for a set, baselines first; `kind` has task, groups and the number of features."""
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
    """What was chosen, where the model says so, and how far apart the penalties are."""
    penalties = np.log(np.ravel(model.penalty_))
    structure = getattr(model, "structure_", "")
    return f"{structure} {np.exp(penalties.mean()):.2g} (log-deviation {penalties.std():.2g})".strip()


def logistic(ratios, solver, max_iter):
    def build(kind):
        from sklearn.linear_model import LogisticRegressionCV

        if solver == "liblinear" and kind.task != "binary":
            return build_logistic(LogisticRegressionCV, ratios, "saga", 200)
        return build_logistic(LogisticRegressionCV, ratios, solver, max_iter)

    return build


def build_logistic(model, ratios, solver, max_iter):
    rest = {"cv": FOLDS, "scoring": LOG_LOSS, "use_legacy_attributes": False, "random_state": 0}
    if solver == "liblinear":
        rest["intercept_scaling"] = 10.0  # it penalizes the intercept too: this makes that weak
    return model(Cs=10, l1_ratios=ratios, solver=solver, max_iter=max_iter, **rest)


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


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unavailable(f"{module} is not installed") from None


def group_ridge(kind):
    """himalaya's ridge regression with a penalty per group, by random search."""
    group_ridge_cv = need("himalaya.ridge").GroupRidgeCV
    if kind.groups is None:
        raise Unavailable("the set has no groups")
    search = {"n_iter": 100, "alphas": np.geomspace(1e-3, 1e5, 20), "progress_bar": False, "warn": False}
    return group_ridge_cv(kind.groups, cv=FOLDS, fit_intercept=True, random_state=0, solver_params=search)


def describe_group_ridge(model):
    return f"log-weights of groups {np.round(np.ravel(model.deltas_), 1).tolist()[:8]}"


class OptunaPerGroup:
    """A penalty per group of columns by Optuna's TPE on five folds; the same folds for each of 50 trials."""

    def __init__(self, kind, trials=50):
        self.optuna, self.kind, self.trials = need("optuna"), kind, trials
        if kind.groups is None or max(kind.groups) >= 20:
            raise Unavailable("no groups, or more than 20")

    def fit(self, X, y):
        from sklearn.model_selection import cross_val_score

        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        scoring = "neg_mean_squared_error" if self.kind.task == "regression" else LOG_LOSS
        study = self.optuna.create_study(direction="maximize", sampler=self.optuna.samplers.TPESampler(seed=0))
        for level in (1.0, 1e2, 1e4):
            study.enqueue_trial({f"g{g}": level for g in range(max(self.kind.groups) + 1)})
        study.optimize(lambda trial: cross_val_score(self.plain(), *self.scaled(trial, X, y), scoring=scoring).mean(),
                       n_trials=self.trials)  # fmt: skip
        self.scale = self.columns(study.best_params)
        self.model = self.plain().fit(X * self.scale, y)
        return self

    def scaled(self, trial, X, y):
        names = [f"g{g}" for g in range(max(self.kind.groups) + 1)]
        return X * self.columns({name: trial.suggest_float(name, 1e-2, 1e5, log=True) for name in names}), y

    def columns(self, penalties):
        """What columns are multiplied by, so that a penalty of one acts as these."""
        return np.array([penalties[f"g{g}"] for g in self.kind.groups]) ** -0.5

    def plain(self):
        from sklearn.linear_model import LogisticRegression, Ridge

        return Ridge(1.0) if self.kind.task == "regression" else LogisticRegression(C=1.0, max_iter=1000)

    def predict(self, X):
        return self.model.predict(X * self.scale)

    def predict_proba(self, X):
        return self.model.predict_proba(X * self.scale)


def describe_optuna(model):
    logs = -2 * np.log(model.scale)
    return f"{np.exp(logs.mean()):.2g} (log-deviation {logs.std():.2g})"


CLASSES = {
    "LogisticRegressionCV": Model(logistic((0.0,), "lbfgs", 1000), describe_logistic, 120.0),
    "LogisticRegressionCV L1": Model(logistic((1.0,), "liblinear", 1000), describe_logistic),
    "LogisticRegressionCV elastic net": Model(logistic((0.1, 0.5, 0.9), "saga", 200), describe_logistic),
    "Optuna per group": Model(OptunaPerGroup, describe_optuna),
}
NUMBERS = {
    "RidgeCV": Model(linear("RidgeCV", alphas=np.geomspace(1e-3, 1e5, 30)), describe_linear, 120.0),
    "LassoCV": Model(linear("LassoCV", cv=FOLDS, max_iter=10_000), describe_linear),
    "ElasticNetCV": Model(
        linear("ElasticNetCV", l1_ratio=[0.1, 0.5, 0.9, 0.99], cv=FOLDS, max_iter=10_000), describe_linear
    ),
    "ARDRegression": Model(linear("ARDRegression"), describe_ard),
    "himalaya GroupRidgeCV": Model(group_ridge, describe_group_ridge),
    "Optuna per group": Model(OptunaPerGroup, describe_optuna),
}
