"""Ridge regression of many targets through kernels of groups of features, by NumPy or by JAX on a GPU.

With K = sum_g exp(-l_g) X_g X_g', the fit to rows S with weights ω solves

    (K_SS + 1 / ω) a + U_S b = y_S,    U_S' a = 0,

where U are the columns without a penalty, and predicts K_RS a + U_R b for rows R. One Cholesky factor serves all
targets. The sum of squared errors depends on targets Y through Y Y' only, so that more targets than rows are replaced
by as many targets as rows.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse as sp

from bilevel.estimators.base import Groups
from bilevel.estimators.losses import Array, Squared
from bilevel.estimators.ridge import FREE_RIDGE, to_dense
from bilevel.estimators.selection import Fits, InnerModel

DEVICES, DTYPES = ("cpu", "gpu"), ("float64", "float32")
_CHUNK = 4096  # features whose coefficients are computed together


def find_gpu() -> Any:
    """Return the first GPU that JAX finds."""
    import jax

    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        raise ValueError(
            "`device='gpu'`: JAX finds no GPU. Install JAX with CUDA (pip install 'jax[cuda12]'), or use device='cpu'."
        ) from None


class FoldFit(NamedTuple):
    """The fit without some rows: numbers of its rows and of the others, its linear system, and its solution."""

    rows: Array
    others: Array
    noise: Any  # 1 / ω, (rows, 1)
    factor: Any
    free: Any  # the columns without a penalty
    solved_free: Any
    border: Any
    a: Any = None
    b: Any = None


class KernelFits(NamedTuple):
    """The kernel at some penalties, and the fits of all folds with it."""

    variances: Any
    kernel: Any
    fits: list[FoldFit]


class KernelRidge(InnerModel):
    """Ridge regression with a penalty per group: sum weight_i ½ error_i² + ½ sum_g exp(log_penalties_g) ||coef_g||².

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, targets)
    groups : groups of the features
    intercept : whether to fit an intercept, which is not penalized
    dtype : precision of kernels and fits
    """

    _speedup = 8.0  # of products of large matrices, compared with the small ones of other models

    def __init__(self, X: Any, y: Array, groups: Groups, *, intercept: bool, dtype: str = "float64") -> None:
        self.X, self.targets, self.groups, self.dtype = X, y, groups, dtype
        self.xp, self.linalg = self._libraries()
        self.n_rows, self.n_penalties = X.shape[0], len(groups.labels)
        self.loss = Squared(y.shape[1])
        self.y = self._put(reduce_targets(y))
        free = to_dense(X[:, np.setdiff1d(np.arange(X.shape[1]), groups.penalized)])
        self.free = self._put(np.hstack([free, np.ones((self.n_rows, int(intercept)))]))
        members = [groups.penalized[groups.numbers == group] for group in range(self.n_penalties)]
        self.kernels = self.xp.stack([self._outer(X[:, of]) for of in members])

    @staticmethod
    def _libraries() -> tuple[Any, Any]:
        """Return the modules that compute: one like NumPy, and one like scipy.linalg."""
        return np, scipy.linalg

    def _put(self, x: Array) -> Any:
        """Return the array on the device, in the precision of the model."""
        return np.asarray(x, self.dtype)

    def _outer(self, X: Any) -> Any:
        if sp.issparse(X):
            return self._put((X @ X.T).toarray())
        X = self._put(X)
        return X @ X.T

    def sketch(self, size: int) -> "KernelRidge":
        """Return the model of a few random combinations of targets, with the same expected mean squared error."""
        if self.y.shape[1] <= 2 * size:
            return self
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (self.y.shape[1], size)) / np.sqrt(size)
        few = copy.copy(self)
        few.y = self.y @ self._put(signs)
        return few

    def fit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`; coefficients are computed by `refit` only."""
        variances = self._put(np.exp(-log_penalties))
        kernel = self.xp.tensordot(variances, self.kernels, axes=1)
        fits = [self._fit(kernel, weight, self.y) for weight in weights]
        predictors = [
            self._join(fit, self.y[fit.rows] - fit.noise * fit.a, self._predict(kernel, fit, fit.a, fit.b))
            for fit in fits
        ]
        empty = np.zeros((len(fits), 0))
        return Fits(empty[..., None], empty, self.xp.stack(predictors), KernelFits(variances, kernel, fits))

    def _fit(self, kernel: Any, weight: Array, y: Any) -> FoldFit:
        linalg, rows, others = self.linalg, np.flatnonzero(weight), np.flatnonzero(weight == 0)
        noise = 1 / weight[rows]
        jitter = float(np.finfo(self.dtype).eps) * kernel.trace() / len(kernel)
        system = kernel[rows][:, rows] + self.xp.diag(self._put(noise) + 10 * jitter)
        factor = linalg.cho_factor(system, lower=True, check_finite=False)
        free = self.free[rows]
        solved = linalg.cho_solve(factor, free, check_finite=False) if free.shape[1] else free
        border = free.T @ solved + self._put(FREE_RIDGE * np.eye(free.shape[1]))
        border = linalg.cho_factor(border, lower=True) if free.shape[1] else None
        fit = FoldFit(rows, others, self._put(noise[:, None]), factor, free, solved, border)
        a, b = self._solve(fit, y[rows], 0.0)
        return fit._replace(a=a, b=b)

    def _solve(self, fit: FoldFit, right: Any, border: Any) -> tuple[Any, Any]:
        """Solve the bordered system of a fit for a and b."""
        x = self.linalg.cho_solve(fit.factor, right, check_finite=False)
        if fit.border is None:
            return x, self.free[:0].T @ x[:0]
        b = self.linalg.cho_solve(fit.border, fit.free.T @ x - border)
        return x - fit.solved_free @ b, b

    def _predict(self, kernel: Any, fit: FoldFit, a: Any, b: Any) -> Any:
        """Return the predictions of the other rows."""
        return kernel[fit.others][:, fit.rows] @ a + self.free[fit.others] @ b

    def _join(self, fit: FoldFit, fitted: Any, others: Any) -> Any:
        """Return values of all rows in their order."""
        order = np.argsort(np.concatenate([fit.rows, fit.others]))
        return self.xp.concatenate([fitted, others])[order]

    def vjp(self, fits: Fits, cotangent: Any) -> Array:
        state: KernelFits = fits.state
        each = [self._vjp(state, fit, part) for fit, part in zip(state.fits, cotangent, strict=True)]
        return np.array([np.asarray(part, float) for part in each])

    def _vjp(self, state: KernelFits, fit: FoldFit, cotangent: Any) -> Any:
        """Return -exp(-l_g) <β α', K_g>, where β is the cotangent less its effect through the solution."""
        cotangent = self.xp.asarray(cotangent, self.y.dtype)
        held = cotangent[fit.others]
        right = state.kernel[fit.rows][:, fit.others] @ held
        if bool(cotangent[fit.rows].any()):
            right = right + state.kernel[fit.rows][:, fit.rows] @ cotangent[fit.rows]
        v, _ = self._solve(fit, right, self.free.T @ cotangent)
        beta = self._join(fit, cotangent[fit.rows] - v, held)
        alpha = self._join(fit, fit.a, self.xp.zeros_like(held))
        return -state.variances * (self.kernels.reshape(self.n_penalties, -1) @ (beta @ alpha.T).ravel())

    def jvp(self, fits: Fits, move: Array) -> Array:
        state: KernelFits = fits.state
        rate = self.xp.tensordot(-state.variances * self._put(move), self.kernels, axes=1)
        out = []
        for fit in state.fits:
            change = rate[:, fit.rows] @ fit.a
            a, b = self._solve(fit, -change[fit.rows], 0.0)
            others = change[fit.others] + self._predict(state.kernel, fit, a, b)
            out.append(np.asarray(self._join(fit, -fit.noise * a, others)))
        return np.array(out)

    def estimate_flops(self, n_fits: int) -> float:
        rows, columns = self.y.shape
        return n_fits * (rows**3 / 6 + 4 * rows**2 * columns) / self._speedup

    def refit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> tuple[Array, Array]:
        """Fit all targets; return coefficients, (features, targets), and intercepts."""
        variances = np.exp(-log_penalties)
        kernel = self.xp.tensordot(self._put(variances), self.kernels, axes=1)
        fit = self._fit(kernel, weights, self._put(self.targets))
        coef = np.empty((self.X.shape[1], self.targets.shape[1]))
        penalized, scale = self.groups.penalized, variances[self.groups.numbers]
        a = np.asarray(fit.a) if sp.issparse(self.X) else fit.a
        for at in range(0, len(penalized), _CHUNK):
            part = self.X[:, penalized[at : at + _CHUNK]][fit.rows] * scale[at : at + _CHUNK]
            product = part.T @ a if sp.issparse(part) else self._put(part).T @ a
            coef[penalized[at : at + _CHUNK]] = np.asarray(product)
        b = np.asarray(fit.b, float)
        free = np.setdiff1d(np.arange(self.X.shape[1]), penalized)
        coef[free] = b[: len(free)]
        return coef, b[len(free) :].sum(axis=0)


class GPUKernelRidge(KernelRidge):
    """The same computation by JAX on a GPU; the caller sets the precision of JAX."""

    _speedup = 2000.0

    @staticmethod
    def _libraries() -> tuple[Any, Any]:
        import jax

        return jax.numpy, jax.scipy.linalg

    def _put(self, x: Array) -> Any:
        import jax

        return jax.device_put(np.asarray(x, self.dtype), find_gpu())


def reduce_targets(y: Array) -> Array:
    """Return targets with the same Y Y' and at most one column per row."""
    if y.shape[1] <= y.shape[0]:
        return y
    values, vectors = np.linalg.eigh(y @ y.T)
    return vectors * np.sqrt(np.maximum(values, 0.0))
