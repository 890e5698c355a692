"""Many rows replaced by few that have the same loss to second order, fold by fold.

Around some coefficients w0 the loss of the rows that a set of folds uses alike is g'(w - w0) + ½ (w - w0)' H (w - w0)
and a constant. With H = R'R that is ½ ||R w - t||², t = R w0 - R⁻ᵀ g, and a constant: as many rows as coefficients, and
one. For the squared error this is exact.
"""

from typing import Any

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from bilevel.estimators.coordinates import times
from bilevel.estimators.glm import RidgeGLM, State
from bilevel.estimators.hessian import ROWS_PER_COORDINATE, find_patterns, flat_gram, gram
from bilevel.estimators.losses import Loss, Softmax, Squared
from bilevel.estimators.selection import Arena, Fits, Folds

_MOST_COEFFICIENTS = 600
_JITTER = 1e-10
_MANY_ENTRIES = 2e4  # of X; exact fits of fewer are quick


class Surrogate:
    """The model that the rows of a surrogate define; coefficients are those of the columns, times outputs."""

    def __init__(self, model: RidgeGLM, X: np.ndarray, targets: np.ndarray, copies: int) -> None:
        data = model.data
        self.full, self.copies, self.n_penalties = model, copies, model.n_penalties
        penalized = (copies * data.penalized[:, None] + np.arange(copies)).ravel()
        loss = Squared()
        loss.has_scale, loss.least_scale = model.loss.has_scale, model.loss.least_scale
        self.inner = RidgeGLM(X, targets, loss, penalized=penalized, intercept=False, tol=model.tol)
        self.loss, self.y = self.inner.loss, targets

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        return self.inner.fit(weights, np.repeat(log_penalties, self.copies), start)

    def pull_back(self, fits: Fits, cotangent: np.ndarray) -> np.ndarray:
        each = self.inner.pull_back(fits, cotangent)
        return each.reshape(len(each), -1, self.copies).sum(axis=-1)

    def push_forward(self, fits: Fits, move: np.ndarray) -> np.ndarray:
        return self.inner.push_forward(fits, np.repeat(move, self.copies))

    def work(self, n_fits: int) -> float:
        return self.inner.work(n_fits)

    def predict(self, fits: Fits) -> np.ndarray:
        """Return the predictors of the rows that these stand for, (fits, rows, outputs)."""
        model = self.full
        columns = np.moveaxis(fits.coef.reshape(len(fits.coef), model.data.Z.shape[1], -1), 0, 1)
        return np.moveaxis(times(model.data.Z, columns), 0, 1)


def can_compress(model: Any, folds: Folds) -> bool:
    """Tell whether rows are so many that a surrogate is about exact, and much smaller."""
    if not isinstance(model, RidgeGLM) or not isinstance(model.loss, Loss):  # rows have a loss only together
        return False
    rows, size = model.data.n_rows, model.data.Z.shape[1]
    copies = model.y.shape[1] if isinstance(model.loss, Softmax) else 1
    size *= copies
    if size > _MOST_COEFFICIENTS or rows <= 2 * len(find_patterns(folds.fitted.T, folds.held_out.T)[0]) * size:
        return False
    return isinstance(model.loss, Squared) or (rows > ROWS_PER_COORDINATE * size and rows * size > _MANY_ENTRIES)


def compress(model: RidgeGLM, folds: Folds, fits: Fits) -> Arena:
    """Return a surrogate around the mean of some fits."""
    weights = np.concatenate([folds.fitted, folds.held_out]).T
    first, pattern = find_patterns(weights)
    weight = weights.max(axis=1)
    shares = weights[first] / weight[first, None]
    state: State = fits.state
    w0 = state.w.mean(axis=1)
    parts = [_compress_rows(model, pattern == k, weight, w0) for k in range(len(first))]
    X, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
    shares = np.repeat(shares, len(X) // len(first), axis=0).T
    surrogate = Surrogate(model, X, targets, X.shape[1] // model.data.Z.shape[1])
    small = folds._replace(fitted=shares[: len(folds.fitted)], held_out=shares[len(folds.fitted) :])
    return Arena(surrogate, small, surrogate.predict)


def _compress_rows(
    model: RidgeGLM, rows: np.ndarray, weight: np.ndarray, w0: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    Z, y, weight, loss = model.data.Z[rows], model.y[rows], weight[rows], model.loss
    assert isinstance(loss, Loss)
    eta = Z @ w0
    gradient = Z.T @ loss.total_derivative(y, eta, weight)
    if isinstance(loss, Softmax):
        hessian = flat_gram(Z, loss.total_bender(y, eta, weight), w0.shape[1])
        gradient, w0 = gradient.reshape(-1, 1), w0.reshape(-1, 1)
    else:
        hessian = gram(Z, weight * loss.curvature(y, eta)[:, 0])
    hessian[np.diag_indices_from(hessian)] += _JITTER * np.trace(hessian) / len(hessian) + np.finfo(float).tiny
    root = cholesky(hessian)
    back = solve_triangular(root, gradient, trans=1)
    constant = 2 * weight @ loss.value(y, eta) - np.sum(back**2)
    last = np.sqrt(max(constant, 0.0) / w0.shape[1])
    return np.vstack([root, np.zeros(len(root))]), np.vstack([root @ w0 - back, np.full(w0.shape[1], last)])
