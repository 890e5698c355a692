"""Predictions of a linear classifier from `coef_`, `intercept_` and `classes_`.

Logistic regression with learned penalties.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel.estimators.rows import Scaling, numbered
from bilevel.estimators.selection import PenaltySelector
from bilevel.problems import BilevelProblem, logistic_selection, softmax_selection


class LinearClassifier(ClassifierMixin):
    """Scores, classes and probabilities; one score for two classes, one per class for more."""

    coef_: np.ndarray
    intercept_: np.ndarray
    classes_: np.ndarray

    def _keep(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        columns = weights.reshape(len(weights), -1)
        self.coef_, self.intercept_ = scaling.undone(columns.T, np.atleast_1d(intercept))

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the score of each row, (samples,), or of each row and class."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr")
        scores = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes)."""
        scores = self.decision_function(X)
        return np.column_stack([expit(-scores), expit(scores)]) if scores.ndim == 1 else softmax(scores, axis=1)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the probabilities."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([log_expit(-scores), log_expit(scores)])
        return log_softmax(scores, axis=1)


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
    shrink : whether several penalties, which may fit the validation rows too well, are drawn back towards the best
        single one, as far as is best when training and validation rows change places
    refit : whether the final model is fitted on training and validation rows together; otherwise on training rows
    solver : a solver of `bilevel`; None means one that needs no tuning: Exact() for few rows and features,
        SRBA(step_size="auto") for many
    max_iter : most steps of the solver
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of the logarithms of the
        penalties
    random_state : of the split and of the solver's batches
    verbose : 1 shows a bar

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    penalty_ : (features,), the penalty of each feature (divided by its deviation, where standardized)
    classes_ : labels, sorted
    shrinkage_ : from 0, the penalties as learned, to 1, the best single one
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

    _stratified = True
    _y_numeric = False

    def _encoded(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        y, y_val = numbered(self, y, y_val)
        if len(self.classes_) > 2:
            return y, y_val
        return 2 * y - 1, None if y_val is None else 2 * y_val - 1

    def _builder(self) -> Callable[..., BilevelProblem]:
        if len(self.classes_) > 2:
            return partial(softmax_selection, per="feature")
        return logistic_selection
