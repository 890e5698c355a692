"""Ridge regression of many targets through kernels of groups of features.

With K = sum_g exp(-l_g) X_g X_g', the fit to rows S with weights ω solves

    (K_SS + 1 / ω) a + U_S b = y_S,    U_S' a = 0,

where U are the columns without a penalty, and predicts K_RS a + U_R b for rows R. One Cholesky factor serves all
targets. The sum of squared errors depends on targets Y through Y Y' only, so that more targets than rows are replaced
by as many targets as rows.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from bilevel.estimators.base import Groups
from bilevel.estimators.losses import Array, Squared
from bilevel.estimators.ridge import FREE_RIDGE, to_dense
from bilevel.estimators.selection import Fits, InnerModel

_SPEEDUP = 8.0  # of products of large matrices, compared with the small ones of other models


class FoldFit(NamedTuple):
    """The fit without some rows: numbers of its rows and of the others, its linear system, and its solution."""

    rows: Array
    others: Array
    noise: Array  # 1 / ω, (rows, 1)
    factor: tuple[Array, bool]
    solved_free: Array  # solutions for the columns without a penalty
    border: tuple[Array, bool]
    a: Array = np.zeros(0)
    b: Array = np.zeros(0)

    def join(self, fitted: Array, others: Array) -> Array:
        """Return values of all rows in their order."""
        order = np.argsort(np.concatenate([self.rows, self.others]))
        return np.concatenate([fitted, others])[order]


class KernelFits(NamedTuple):
    """The kernel at some penalties, and the fits of all folds with it."""

    variances: Array
    kernel: Array
    fits: list[FoldFit]


class KernelRidge(InnerModel):
    """Ridge regression with a penalty per group: sum weight_i ½ error_i² + ½ sum_g exp(log_penalties_g) ||coef_g||².

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, targets)
    groups : groups of the features
    intercept : whether to fit an intercept, which is not penalized
    """

    def __init__(self, X: Any, y: Array, groups: Groups, *, intercept: bool) -> None:
        self.X, self.targets, self.groups = X, y, groups
        self.n_penalties, self.loss, self.y = len(groups.labels), Squared(y.shape[1]), reduce_targets(y)
        self.unpenalized = np.setdiff1d(np.arange(X.shape[1]), groups.penalized)
        constant = np.full((X.shape[0], 1), float(intercept))  # zeros have no effect
        self.free = np.hstack([to_dense(X[:, self.unpenalized]), constant])
        parts = [X[:, groups.penalized[groups.numbers == group]] for group in range(self.n_penalties)]
        self.kernels = np.array([to_dense(part @ part.T) for part in parts])

    def sketch(self, size: int) -> "KernelRidge":
        """Return the model of a few random combinations of targets, with the same expected mean squared error."""
        if self.y.shape[1] <= 2 * size:
            return self
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (self.y.shape[1], size)) / np.sqrt(size)
        few = copy.copy(self)
        few.y = self.y @ signs
        return few

    def fit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`; coefficients are computed by `refit` only."""
        variances = np.exp(-log_penalties)
        kernel = np.tensordot(variances, self.kernels, axes=1)
        fits, predictors = [self._fit(kernel, weight, self.y) for weight in weights], []
        for fit in fits:
            others = kernel[fit.others][:, fit.rows] @ fit.a + self.free[fit.others] @ fit.b
            predictors.append(fit.join(self.y[fit.rows] - fit.noise * fit.a, others))
        empty = np.zeros((len(fits), 0))
        return Fits(empty[..., None], empty, np.array(predictors), KernelFits(variances, kernel, fits))

    def _fit(self, kernel: Array, weight: Array, y: Array) -> FoldFit:
        rows, others = np.flatnonzero(weight), np.flatnonzero(weight == 0)
        noise, free = 1 / weight[rows], self.free[rows]
        jitter = float(np.finfo(float).eps) * kernel.trace() / len(kernel)
        factor = cho_factor(kernel[rows][:, rows] + np.diag(noise + 10 * jitter), lower=True, check_finite=False)
        solved = cho_solve(factor, free, check_finite=False)
        border = cho_factor(free.T @ solved + FREE_RIDGE * np.eye(free.shape[1]), lower=True)
        fit = FoldFit(rows, others, noise[:, None], factor, solved, border)
        a, b = self._solve(fit, y[rows], 0.0)
        return fit._replace(a=a, b=b)

    def _solve(self, fit: FoldFit, right: Array, border: Array | float) -> tuple[Array, Array]:
        """Solve the bordered system of a fit for a and b."""
        x = cho_solve(fit.factor, right, check_finite=False)
        b = cho_solve(fit.border, self.free[fit.rows].T @ x - border)
        return x - fit.solved_free @ b, b

    def vjp(self, fits: Fits, cotangent: Array) -> Array:
        state: KernelFits = fits.state
        return np.array([self._vjp(state, fit, part) for fit, part in zip(state.fits, cotangent, strict=True)])

    def _vjp(self, state: KernelFits, fit: FoldFit, cotangent: Array) -> Array:
        """Return -exp(-l_g) <β α', K_g>, where β is the cotangent less its effect through the solution."""
        held = cotangent[fit.others]
        right = state.kernel[fit.rows][:, fit.others] @ held
        if cotangent[fit.rows].any():
            right = right + state.kernel[fit.rows][:, fit.rows] @ cotangent[fit.rows]
        v, _ = self._solve(fit, right, self.free.T @ cotangent)
        beta = fit.join(cotangent[fit.rows] - v, held)
        alpha = fit.join(fit.a, np.zeros_like(held))
        return -state.variances * (self.kernels.reshape(self.n_penalties, -1) @ (beta @ alpha.T).ravel())

    def estimate_flops(self, n_fits: int) -> float:
        rows, columns = self.y.shape
        return n_fits * (rows**3 / 6 + 4 * rows**2 * columns) / _SPEEDUP

    def refit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> tuple[Array, Array]:
        """Fit all targets; return coefficients, (features, targets), and intercepts."""
        variances = np.exp(-log_penalties)
        fit = self._fit(np.tensordot(variances, self.kernels, axes=1), weights, self.targets)
        coef = self.X.T @ fit.join(fit.a, np.zeros((len(fit.others), self.targets.shape[1])))
        coef[self.groups.penalized] *= variances[self.groups.numbers, None]
        coef[self.unpenalized] = fit.b[:-1]
        return coef, fit.b[-1]


def reduce_targets(y: Array) -> Array:
    """Return targets with the same Y Y' and at most one column per row."""
    if y.shape[1] <= y.shape[0]:
        return y
    values, vectors = np.linalg.eigh(y @ y.T)
    return vectors * np.sqrt(np.maximum(values, 0.0))
