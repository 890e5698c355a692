"""Softmax regression of labels that may be wrong, fitted without each fold in turn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax

from bilevel.estimators.noise import weigh

_INTERCEPT = 1e-3  # its penalty: a class without rows in a fold keeps a finite one
_TINY = np.finfo(float).tiny
STEP = 10**0.5  # between penalties that are tried
_WEAKEST = 1e-6  # penalty for each row


class Softmax:
    """Minimizes -sum weight_i log sum_t p_i(t) evidence_i(t) + penalty/2 ||coef||², with p the softmax of X coef.

    Evidence is that of `noise.weigh`; rows of the identity make it the usual regression.

    Parameters
    ----------
    tol : stop where a step gains less than this part of the mean loss
    max_iter : most steps
    """

    def __init__(self, *, intercept: bool = True, tol: float = 1e-5, max_iter: int = 100) -> None:
        self.intercept, self.tol, self.max_iter = intercept, tol, max_iter

    def fit(
        self, X: Any, evidence: np.ndarray, weights: np.ndarray, penalty: float, start: np.ndarray | None = None
    ) -> np.ndarray:
        """Return coefficients, (features + 1, classes), those of the intercept last."""
        shape = X.shape[1] + 1, evidence.shape[1]
        ridge = np.full((shape[0], 1), penalty)
        ridge[-1] = _INTERCEPT

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            coef = flat.reshape(shape)
            value, slope = self._loss(np.ascontiguousarray(self.score(X, coef).T), by_class, weights)
            gradient = np.vstack([X.T @ slope.T, self.intercept * slope.sum(axis=1)]) + ridge * coef
            return (value + np.sum(ridge * coef**2) / 2) / total, gradient.ravel() / total

        total, by_class = weights.sum(), np.ascontiguousarray(evidence.T)
        options = {"maxiter": self.max_iter, "ftol": self.tol, "gtol": self.tol}
        first = np.zeros(shape) if start is None else start
        return minimize(objective, first.ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(shape)

    def score(self, X: Any, coef: np.ndarray) -> np.ndarray:
        return X @ coef[:-1] + coef[-1]

    @staticmethod
    def _loss(scores: np.ndarray, evidence: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the summed loss and its derivative in the scores; classes come first, so that sums run along rows."""
        prior = np.exp(scores - scores.max(axis=0))
        joint = prior * evidence
        all_of_it, seen = prior.sum(axis=0), np.maximum(joint.sum(axis=0), _TINY)
        slope = prior * (weights / all_of_it) - joint * (weights / seen)
        return float(weights @ np.log(all_of_it / seen)), slope


class CrossFit(NamedTuple):
    """Models of all folds: penalty, coefficients, probabilities of held-out rows, their summed loss."""

    penalty: float
    coefs: list[np.ndarray]
    probabilities: np.ndarray
    loss: float


class CrossFitter:
    """Fits models without each fold, at penalties that the held-out rows choose."""

    def __init__(
        self, model: Softmax, X: Any, folds: Sequence[tuple[np.ndarray, np.ndarray]], weights: np.ndarray
    ) -> None:
        self.model, self.X, self.folds, self.weights = model, X, folds, weights

    def fit(self, evidence: np.ndarray, penalty: float, start: CrossFit | None = None) -> CrossFit:
        """Fit at one penalty."""
        coefs, probabilities = [], np.empty(evidence.shape)
        for k, (train, test) in enumerate(self.folds):
            near = None if start is None else start.coefs[k]
            coefs.append(self.model.fit(self.X[train], evidence[train], self.weights[train], penalty, near))
            probabilities[test] = softmax(self.model.score(self.X[test], coefs[-1]), axis=1)
        return CrossFit(penalty, coefs, probabilities, -float(self.weights @ weigh(probabilities, evidence)[1]))

    def weaken(self, evidence: np.ndarray, penalty: float, start: CrossFit | None = None) -> CrossFit:
        """Fit at this penalty, and at weaker ones as long as the loss falls."""
        best = self.fit(evidence, penalty, start)
        while best.penalty > _WEAKEST * self.weights.sum():
            found = self.fit(evidence, best.penalty / STEP, best)
            if not found.loss < best.loss:
                break
            best = found
        return best
