"""Logistic and ridge regression with learned penalties."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin

from bilevel.estimators.base import LinearClassifier
from bilevel.estimators.penalties import PenaltySelector
from bilevel.estimators.rows import Scaling
from bilevel.problems import BilevelProblem, logistic_selection, ridge_selection, softmax_selection


class BilevelLogisticRegression(LinearClassifier, PenaltySelector):
    """Logistic regression with a penalty for each feature, group of features, or for all, learned on validation rows.

    The penalties minimize the log-loss on validation rows of the model that minimizes, on training rows,
    mean log-loss + ½ sum penalty_k coef_k². Two classes have one row of coefficients, more have one each (softmax).

    Parameters
    ----------
    penalty : "per_feature", "per_group" or "single"
    groups : the group of each feature, any labels, for penalty="per_group"
    fit_intercept : whether to fit an intercept, which is not penalized (but by 1e-6, so that it is unique)
    standardize : whether penalties act on features of deviation 1; coefficients are given in the units of X
    validation_fraction : of the rows of X, held out at random with all classes, where `fit` gets no `X_val`
    shrink : whether several penalties, which may overfit the validation rows, are shrunk towards the best shared one,
        as far as is best when training and validation rows change places
    refit : whether the final model is fitted on training and validation rows together; otherwise on training rows
    solver : None means Exact() for few rows and features, SRBA(step_size="auto") for many; neither needs tuning
    max_iter : most steps of the solver
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of a log-penalty
    random_state : of the split and of the solver's batches
    verbose : 1 shows a bar

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    penalty_ : (features,), the penalty of each feature (divided by its deviation, where standardized)
    classes_ : labels, sorted
    shrinkage_ : from 0, the penalties as learned, to 1, the best shared one
    history_ : columns of the run, one entry per evaluation: "step", "seconds", "calls", "value" on validation rows, …
    n_calls_ : derivatives of one row's loss that were computed
    n_iter_ : steps of the solver
    status_ : "converged", "out_of_budget" or "diverged"
    n_features_in_, feature_names_in_ : of X

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = BilevelLogisticRegression(random_state=0).fit(X, y)
    >>> model.penalty_.shape
    (30,)
    """

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        y, y_val = super()._encode(y, y_val)
        if len(self.classes_) > 2:
            return y, y_val
        return 2 * y - 1, None if y_val is None else 2 * y_val - 1

    def _builder(self) -> Callable[..., BilevelProblem]:
        return logistic_selection if len(self.classes_) == 2 else partial(softmax_selection, per="feature")


class BilevelRidge(RegressorMixin, PenaltySelector):
    """Ridge regression with a penalty for each feature, group of features, or for all, learned on validation rows.

    The penalties minimize the squared error on validation rows of the model that minimizes, on training rows,
    mean ½ error² + ½ sum penalty_k coef_k², with targets of deviation 1.

    Parameters
    ----------
    penalty, groups : as in `BilevelLogisticRegression`
    fit_intercept : whether to fit an intercept, which is not penalized (but by 1e-6, once targets are centered)
    standardize : whether penalties act on features of deviation 1; coefficients are given in the units of X
    validation_fraction : of the rows of X, held out at random, where `fit` gets no `X_val`
    shrink, refit, solver, max_iter, tol, random_state, verbose : as in `BilevelLogisticRegression`

    Attributes
    ----------
    coef_ : (features,)
    intercept_ : float
    penalty_ : (features,), the penalty of each feature (divided by its deviation, where standardized)
    shrinkage_, history_, n_calls_, n_iter_, status_, n_features_in_, feature_names_in_ : as in
        `BilevelLogisticRegression`

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from bilevel.estimators import BilevelRidge
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BilevelRidge(random_state=0).fit(X, y)
    >>> model.coef_.shape
    (10,)
    """

    _classifies = False

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        self._target = Scaling.fit(y[:, None], center=self.fit_intercept, divide=True)
        return self._scale(y), None if y_val is None else self._scale(y_val)

    def _scale(self, y: np.ndarray) -> np.ndarray:
        return self._target.transform(y[:, None])[:, 0]

    def _builder(self) -> Callable[..., BilevelProblem]:
        return ridge_selection

    def _set_model(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        coef, intercept = scaling.unscale(weights, intercept)
        self.coef_ = coef * self._target.scale
        self.intercept_ = float(intercept * self._target.scale[0] + self._target.mean[0])

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each row."""
        return self._score(X)
