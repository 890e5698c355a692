"""Predictions of a linear classifier from `coef_`, `intercept_` and `classes_`."""

from typing import Any

import numpy as np
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel.estimators.scaling import Scaling


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
