"""The common level of penalties by a score, where the loss is not what the user counts."""

import copy
from typing import Any

import numpy as np
from sklearn.metrics import check_scoring

from bilevel.estimators.selection import Folds, InnerModel

_LEVELS = np.log(10.0) * np.array([0.0, -0.5, 0.5, -1.0, 1.0, -1.5, 1.5, -2.0, 2.0])


def choose_level(
    estimator: Any, model: InnerModel, folds: Folds, log_penalties: np.ndarray, X: Any, y: np.ndarray
) -> float:
    """Return the logarithm of the factor of all penalties that scores best in the mean over folds; 0 where several do.

    `X` are the columns that the model is fitted to, `y` the targets as the user has them.
    """
    scorer = check_scoring(estimator, scoring=estimator.scoring)
    held_out = [np.flatnonzero(weights) for weights in folds.held_out]
    means = []
    for level in _LEVELS:
        fits = model.fit(folds.fitted, log_penalties + level)
        scores = [
            scorer(_fitted(estimator, coef, intercept), X[rows], y[rows])
            for coef, intercept, rows in zip(fits.coef, fits.intercept, held_out, strict=True)
        ]
        means.append(np.mean(scores))
    return float(_LEVELS[np.argmax(means)]) if np.isfinite(means).any() else 0.0


def _fitted(estimator: Any, coef: np.ndarray, intercept: np.ndarray) -> Any:
    """Return the estimator with these coefficients of columns without names."""
    view = copy.copy(estimator)
    vars(view).pop("feature_names_in_", None)
    view._set_model(coef.T, intercept)
    return view
