"""A loss summed over weighted rows, as proximal Newton steps need it: gradient, and curvature on chosen variables.

Coefficients are (features, outputs); a variable is one of them, numbered as in their flat array. Rows may be sparse.
"""

from copy import copy
from typing import Any

import numpy as np
import scipy.sparse as sp

from bilevel.estimators.losses import Loss, Softmax, Squared
from bilevel.estimators.quadratic import take_both

_GRAM_ENTRIES = 5e7  # up to which the products of all columns are kept, of all fits together
_CHUNK = 512  # rows whose products stay in the cache


def scale_entries(X: Any, factors: np.ndarray) -> Any:
    """Multiply each column, or with factors (rows, columns) each entry."""
    if not sp.issparse(X):
        return X * factors
    scaled = X.copy()
    rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    scaled.data *= factors[rows, X.indices] if factors.ndim == 2 else factors[X.indices]
    return scaled


def multiply(A: Any, B: Any) -> np.ndarray:
    """Return AB' as an array."""
    product = A @ B.T
    return product.toarray() if sp.issparse(product) else product


class Columns:
    """The columns of all rows, and of a constant where there is an intercept; products of columns are kept."""

    def __init__(self, X: Any, fit_intercept: bool) -> None:
        constant = np.ones((int(fit_intercept), X.shape[0]))
        self.X = X
        self.n_features = X.shape[1]
        self.transposed = sp.vstack([X.T, constant], format="csr") if sp.issparse(X) else np.vstack([X.T, constant])
        self.fit_intercept = fit_intercept
        self._base: tuple[np.ndarray, np.ndarray] | None = None

    def take(self, columns: np.ndarray, rows: np.ndarray) -> Any:
        """Return some columns of some rows, transposed."""
        chosen = self.transposed[columns]
        return chosen[:, rows] if sp.issparse(chosen) else chosen.take(rows, axis=1)

    def mean_squares(self, weights: np.ndarray) -> float:
        """Return the mean over the features of Σ_i weight_i x_ij², of centered features if there is an intercept."""
        squares = (self.X.multiply(self.X) if sp.issparse(self.X) else self.X**2).T @ weights
        if self.fit_intercept:
            squares = squares - (self.X.T @ weights) ** 2 / max(weights.sum(), np.finfo(float).tiny)
        return max(float(np.mean(squares)), 0.0)

    def gram(self, weights: np.ndarray) -> np.ndarray:
        """Return X' diag(weights) X: that of an earlier call, less the rows that are left out now."""
        if self._base is None or np.count_nonzero(weights != self._base[0]) > len(weights) / 2:
            self._base = weights, self._product(weights)
        base, product = self._base
        return product if np.array_equal(base, weights) else product + self._product(weights - base)

    def _product(self, weights: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(weights)
        A = self.take(np.arange(self.transposed.shape[0]), rows)
        return multiply(A, scale_entries(A, weights[rows]))


class WeightedLoss:
    """Sum of weight_i loss_i over the rows."""

    def __init__(self, columns: Columns, y: np.ndarray, loss: Loss, weights: np.ndarray, n_fits: int) -> None:
        self.columns, self.y, self.loss, self.weights = columns, y, loss, weights
        self.used = np.flatnonzero(weights > 0)
        keep = isinstance(loss, Squared) and y.shape[1] == 1 and n_fits * columns.n_features**2 <= _GRAM_ENTRIES
        self._gram = columns.gram(weights) if keep else None
        by_coef, by_intercept = self.gradient(np.zeros(y.shape))
        self.scale = max(np.abs(by_coef).max(initial=0), np.abs(by_intercept).max(initial=0))

    def predict(self, coef: np.ndarray, intercept: np.ndarray) -> np.ndarray:
        """Return the predictor of every row, (rows, outputs)."""
        return self.columns.X @ coef + intercept

    def value(self, eta: np.ndarray) -> float:
        return float(self.weights @ self.loss.value(self.y, eta))

    def gradient(self, eta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradient by the coefficients, (features, outputs), and by the intercepts."""
        return self.transpose(self.weights[:, None] * self.loss.derivative(self.y, eta))

    def transpose(self, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take derivatives by the predictor to coefficients and intercepts; the latter are zero without one."""
        return np.asarray(self.columns.X.T @ slopes), slopes.sum(axis=0) * self.columns.fit_intercept

    def curvature(self, eta: np.ndarray, variables: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """Return the Hessian in some variables, followed by the intercepts where there are any."""
        outputs, n_features = self.y.shape[1], self.columns.n_features
        intercepts = n_features * outputs + np.arange(outputs * self.columns.fit_intercept)
        features, classes = np.divmod(np.append(variables, intercepts), outputs)
        if self._gram is not None:
            return take_both(self._gram, features)
        unique, places = np.unique(features, return_inverse=True)
        hessian = self._blocks(eta[self.used], self.columns.take(unique, self.used).astype(dtype), places, classes)
        hessian[np.diag_indices_from(hessian)] *= 1 + 10 * np.finfo(dtype).eps  # stays positive with rounding
        return hessian.astype(np.float64)

    def work(self, size: int) -> float:
        """Return about how many multiplications a gradient and the Hessian in this number of variables take."""
        X, outputs = self.columns.X, self.y.shape[1]
        per_entry = 0.0 if self._gram is not None else size**2 / (1 if isinstance(self.loss, Softmax) else outputs)
        return X.size * (2 * outputs + per_entry / X.shape[1])

    def _blocks(self, eta: np.ndarray, A: Any, places: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return Σ_i weight_i (diag(d_i) − p_i p_i') ⊗ x_i x_i' on the chosen pairs; p appears for softmax only."""
        weights, y, hessian = self.weights[self.used], self.y[self.used], np.zeros((len(classes),) * 2, A.dtype)
        bend = self.loss.curvature(y, eta)
        if isinstance(self.loss, Softmax):
            bend = self.loss.derivative(np.zeros(1), eta)
            mixed = np.ascontiguousarray((np.sqrt(weights)[:, None] * bend).T, A.dtype)
            size = len(weights) if sp.issparse(A) else _CHUNK
            for rows in (slice(begin, begin + size) for begin in range(0, len(weights), size)):
                part = scale_entries(A[:, rows][places], mixed[classes, rows])
                hessian -= multiply(part, part)
        for k in range(y.shape[1]):
            own = np.flatnonzero(classes == k)
            part = scale_entries(A[places[own]], np.sqrt(weights * bend[:, k]).astype(A.dtype))
            hessian[np.ix_(own, own)] += multiply(part, part)
        return hessian


class Reduced:
    """The Hessian on some variables once the intercepts are at their best."""

    def __init__(self, hessian: np.ndarray, size: int) -> None:
        self.cross = hessian[:size, size:]
        self.inverse = np.linalg.pinv(hessian[size:, size:], rcond=1e-12, hermitian=True)
        self.matrix = hessian[:size, :size] - self.cross @ self.inverse @ self.cross.T

    def take(self, variables: np.ndarray) -> "Reduced":
        """Return a copy on some of the variables."""
        part = copy(self)
        part.cross, part.matrix = self.cross[variables], take_both(self.matrix, variables)
        return part

    def reduce(self, by_coef: np.ndarray, by_intercept: np.ndarray) -> np.ndarray:
        """Return the gradient on the variables once the intercepts have moved."""
        return by_coef - self.cross @ (self.inverse @ by_intercept[: len(self.inverse)])

    def intercept_step(self, step: np.ndarray, by_intercept: np.ndarray) -> np.ndarray:
        """Return how the intercepts follow."""
        return -self.inverse @ (by_intercept[: len(self.inverse)] + self.cross.T @ step)
