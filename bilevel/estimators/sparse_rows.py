"""A loss summed over weighted rows, as proximal Newton steps need it: gradient, and curvature on chosen variables.

Coefficients are (features, outputs); a variable is one of them, numbered as in their flat array. Rows may be sparse.
"""

from typing import Any

import numpy as np
import scipy.sparse as sp

from bilevel.estimators.losses import Loss, Softmax, Squared

_GRAM_ENTRIES = 5e7  # up to which the products of all columns are kept, of all fits together


def scale_entries(X: Any, factors: np.ndarray) -> Any:
    """Multiply each row, or with factors (rows, columns) each entry."""
    if not sp.issparse(X):
        return X * (factors if factors.ndim == 2 else factors[:, None])
    scaled = X.copy()
    columns = np.repeat(np.arange(X.shape[1]), np.diff(X.indptr))
    scaled.data *= factors[X.indices, columns] if factors.ndim == 2 else factors[X.indices]
    return scaled


def multiply(A: Any, B: Any) -> np.ndarray:
    """Return A'B as an array."""
    product = A.T @ B
    return product.toarray() if sp.issparse(product) else product


class Columns:
    """The columns of all rows, and of a constant where there is an intercept; products of columns are kept."""

    def __init__(self, X: Any, fit_intercept: bool) -> None:
        constant = np.ones((X.shape[0], int(fit_intercept)))
        self.X = X
        self.n_features = X.shape[1]
        self.with_constant = (
            sp.hstack([X, constant], format="csc") if sp.issparse(X) else np.asfortranarray(np.hstack([X, constant]))
        )
        self.fit_intercept = fit_intercept
        self._base: tuple[np.ndarray, np.ndarray] | None = None

    def take(self, columns: np.ndarray, used: np.ndarray) -> Any:
        """Return some columns of the rows that are used."""
        chosen = self.with_constant[:, columns]
        return chosen if used.all() else chosen[np.flatnonzero(used)]

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
        A = self.take(np.arange(self.with_constant.shape[1]), weights != 0)
        return multiply(A, scale_entries(A, weights[weights != 0]))


class WeightedLoss:
    """Sum of weight_i loss_i over the rows."""

    def __init__(self, columns: Columns, y: np.ndarray, loss: Loss, weights: np.ndarray, n_fits: int) -> None:
        self.columns, self.y, self.loss, self.weights = columns, y, loss, weights
        self.used = weights > 0
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

    def curvature(self, eta: np.ndarray, variables: np.ndarray) -> np.ndarray:
        """Return the Hessian in some variables, followed by the intercepts where there are any."""
        outputs = self.y.shape[1]
        features, classes = np.divmod(variables, outputs)
        constants = np.arange(outputs) if self.columns.fit_intercept else np.arange(0)
        features = np.concatenate([features, np.full(len(constants), self.columns.n_features)])
        classes = np.concatenate([classes, constants])
        if self._gram is not None:
            return self._gram[np.ix_(features, features)]
        return self._blocks(eta[self.used], self.columns.take(features, self.used), classes)

    def _blocks(self, eta: np.ndarray, columns: Any, classes: np.ndarray) -> np.ndarray:
        """Return Σ_i weight_i (diag(d_i) − p_i p_i') ⊗ x_i x_i' on the chosen pairs; p appears for softmax only."""
        weights, y = self.weights[self.used], self.y[self.used]
        if isinstance(self.loss, Softmax):
            bend = np.exp(eta - eta.max(axis=1, keepdims=True))
            bend /= bend.sum(axis=1, keepdims=True)
            mixed = scale_entries(columns, (np.sqrt(weights)[:, None] * bend)[:, classes])
            hessian = -multiply(mixed, mixed)
        else:
            bend, hessian = self.loss.curvature(y, eta), np.zeros((len(classes), len(classes)))
        for k in range(y.shape[1]):
            own = np.flatnonzero(classes == k)
            part = scale_entries(columns[:, own], np.sqrt(weights * bend[:, k]))
            hessian[np.ix_(own, own)] += multiply(part, part)
        return hessian


class Reduced:
    """The Hessian on some variables once the intercepts are at their best."""

    def __init__(self, hessian: np.ndarray, size: int) -> None:
        self.cross = hessian[:size, size:]
        self.inverse = np.linalg.pinv(hessian[size:, size:], rcond=1e-12, hermitian=True)
        self.matrix = hessian[:size, :size] - self.cross @ self.inverse @ self.cross.T

    def reduce(self, by_coef: np.ndarray, by_intercept: np.ndarray) -> np.ndarray:
        """Return the gradient on the variables once the intercepts have moved."""
        return by_coef - self.cross @ (self.inverse @ by_intercept[: len(self.inverse)])

    def intercept_step(self, step: np.ndarray, by_intercept: np.ndarray) -> np.ndarray:
        """Return how the intercepts follow."""
        return -self.inverse @ (by_intercept[: len(self.inverse)] + self.cross.T @ step)
