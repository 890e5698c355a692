"""Ours and what a scikit-learn user would take instead, by name, each with the seconds that one fit may take."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from estimator_searches import (
    FOLDS,
    LOG_LOSS,
    OptunaPerGroup,
    SparhoPerFeature,
    Unavailable,
    describe_group_ridge,
    describe_penalties,
    group_ridge,
)

# One line per model of ours: the class for classes, the class for numbers, and the parameters.
LOGISTIC, RIDGE = "BilevelLogisticRegression", "BilevelRidge"
OURS = {
    "bilevel": (LOGISTIC, RIDGE, {}),
    "bilevel single": (LOGISTIC, RIDGE, {"structure": "single"}),
    "bilevel per_group": (LOGISTIC, RIDGE, {"structure": "per_group"}),
    "bilevel per_feature": (LOGISTIC, RIDGE, {"structure": "per_feature"}),
    "bilevel elastic net": ("BilevelSparseLogisticRegression", "BilevelElasticNet", {}),
}
TAKES_GROUPS = ("bilevel", "bilevel per_group")
REFERENCE = {True: "LogisticRegressionCV", False: "RidgeCV"}  # for classes, for numbers


class Model(NamedTuple):
    """How to build a model for a set, what it has chosen, and the processor seconds of the longest fit allowed."""

    build: Callable[[Any], Any]
    describe: Callable[[Any], str]
    seconds: float = 20.0


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
    """The structure and the scale of its prior, the mean penalty, how far apart penalties are, and what is not zero."""
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
