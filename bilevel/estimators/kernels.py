"""Ridge regression of many targets through kernels of groups of features, on the processor or on a device of JAX.

With K = sum_g exp(-l_g) X_g X_g' the fit to rows S of weights ω has a and b that solve

    (K_SS + 1 / ω) a + U_S b = y_S,    U_S' a = 0,

where U are the columns without a penalty, and predicts K_RS a + U_R b. One Cholesky factor serves every target. The sum
of squared errors depends on targets Y by Y Y' alone: more targets than rows are replaced by as many as rows.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse as sp

from bilevel.estimators.groups import Groups
from bilevel.estimators.losses import Loss, Squared
from bilevel.estimators.selection import Fits

DEVICES, DTYPES = ("cpu", "gpu"), ("float64", "float32")
FREE_RIDGE = 1e-9  # the ridge of what is not penalized: it keeps a fit unique where rows do not
_CHUNK = 4096  # features whose coefficients are made at once
_QUICK = {"cpu": 8.0, "gpu": 2000.0}  # as many multiplications of large matrices take the time of one of small ones


class Arrays(NamedTuple):
    """Where arrays are: a namespace like NumPy's, one like scipy.linalg, and how to put an array there."""

    xp: Any
    linalg: Any
    put: Callable[[np.ndarray], Any]
    scope: Callable[[], AbstractContextManager[None]]
    quick: float
    epsilon: float


def find_arrays(device: str, dtype: str) -> Arrays:
    """Return NumPy's arrays, or those of JAX on a GPU."""
    epsilon = float(np.finfo(dtype).eps)
    if device == "cpu":
        linalg = scipy.linalg
        return Arrays(np, linalg, lambda x: np.asarray(x, dtype), nullcontext, _QUICK[device], epsilon)
    import jax

    from bilevel._precision import arithmetic

    place = find_gpu()
    numpy, linalg = jax.numpy, jax.scipy.linalg

    def put(x: np.ndarray) -> Any:
        return jax.device_put(np.asarray(x, dtype), place)

    return Arrays(numpy, linalg, put, lambda: arithmetic(dtype), _QUICK[device], epsilon)


def find_gpu() -> Any:
    """Return the first GPU that JAX sees."""
    import jax

    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        raise ValueError(
            "`device='gpu'`: JAX sees no GPU. Install JAX with CUDA (pip install 'jax[cuda12]'), or take device='cpu'."
        ) from None


class Solved(NamedTuple):
    """The fit without some rows: its rows and the others, its system, and the weights of its rows."""

    rows: np.ndarray
    others: np.ndarray
    noise: Any  # 1 / ω, (rows, 1)
    factor: Any
    free: Any  # the columns without a penalty
    solved_free: Any
    border: Any
    a: Any = None
    b: Any = None


class State(NamedTuple):
    """The kernel and the fits with it."""

    variances: Any
    kernel: Any
    fits: list[Solved]


class KernelRidge:
    """Minimizes sum weight_i ½ error_i² + ½ sum_g exp(log_penalties_g) ||coef_g||², over all targets.

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, targets)
    groups : of the features
    intercept : whether there is one, without penalty
    arrays : where to compute
    """

    def __init__(self, X: Any, y: np.ndarray, groups: Groups, *, intercept: bool, arrays: Arrays) -> None:
        self.X, self.targets, self.groups, self.arrays = X, y, groups, arrays
        self.n_rows, self.n_penalties, self.intercept = X.shape[0], len(groups.labels), intercept
        self.loss: Loss = Squared(y.shape[1])
        self.y = arrays.put(reduce_targets(y))
        free = X[:, np.setdiff1d(np.arange(X.shape[1]), groups.penalized)]
        free = free.toarray() if sp.issparse(free) else free
        self.free = arrays.put(np.hstack([free, np.ones((self.n_rows, int(intercept)))]))
        members = [groups.penalized[groups.numbers == group] for group in range(self.n_penalties)]
        self.kernels = arrays.xp.stack([self._outer(X[:, of]) for of in members])

    def _outer(self, X: Any) -> Any:
        if sp.issparse(X):
            return self.arrays.put((X @ X.T).toarray())
        X = self.arrays.put(X)
        return X @ X.T

    def sketch(self, size: int) -> "KernelRidge":
        """Return the model of a few random combinations of targets, whose squared errors have the same mean."""
        if self.y.shape[1] <= 2 * size:
            return self
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (self.y.shape[1], size)) / np.sqrt(size)
        few = copy.copy(self)
        few.y = self.y @ self.arrays.put(signs)
        return few

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`; coefficients are left to `refit`."""
        xp = self.arrays.xp
        variances = self.arrays.put(np.exp(-log_penalties))
        kernel = xp.tensordot(variances, self.kernels, axes=1)
        fits = [self._fit(kernel, weight, self.y) for weight in weights]
        predictor = xp.stack(
            [
                self._join(fit, self.y[fit.rows] - fit.noise * fit.a, self._predict(kernel, fit, fit.a, fit.b))
                for fit in fits
            ]
        )
        return Fits(np.zeros((len(fits), 0, 0)), np.zeros((len(fits), 0)), predictor, State(variances, kernel, fits))

    def _fit(self, kernel: Any, weight: np.ndarray, y: Any) -> Solved:
        linalg, rows, others = self.arrays.linalg, np.flatnonzero(weight), np.flatnonzero(weight == 0)
        noise = 1 / weight[rows]
        level = self.arrays.epsilon * kernel.trace() / len(kernel)
        system = kernel[rows][:, rows] + self.arrays.xp.diag(self.arrays.put(noise) + 10 * level)
        factor = linalg.cho_factor(system, lower=True, check_finite=False)
        free = self.free[rows]
        solved = linalg.cho_solve(factor, free, check_finite=False) if free.shape[1] else free
        border = free.T @ solved + self.arrays.put(FREE_RIDGE * np.eye(free.shape[1]))
        border = linalg.cho_factor(border, lower=True) if free.shape[1] else None
        fit = Solved(rows, others, self.arrays.put(noise[:, None]), factor, free, solved, border)
        a, b = self._solve(fit, y[rows], 0.0)
        return fit._replace(a=a, b=b)

    def _solve(self, fit: Solved, right: Any, border: Any) -> tuple[Any, Any]:
        """Solve with the system of a fit and its border."""
        x = self.arrays.linalg.cho_solve(fit.factor, right, check_finite=False)
        if fit.border is None:
            return x, self.free[:0].T @ x[:0]
        b = self.arrays.linalg.cho_solve(fit.border, fit.free.T @ x - border)
        return x - fit.solved_free @ b, b

    def _predict(self, kernel: Any, fit: Solved, a: Any, b: Any) -> Any:
        """Return what the other rows are predicted to be."""
        return kernel[fit.others][:, fit.rows] @ a + self.free[fit.others] @ b

    def _join(self, fit: Solved, fitted: Any, others: Any) -> Any:
        order = np.argsort(np.concatenate([fit.rows, fit.others]))
        return self.arrays.xp.concatenate([fitted, others])[order]

    def pull_back(self, fits: Fits, cotangent: Any) -> np.ndarray:
        state: State = fits.state
        each = [self._pull_back(state, fit, part) for fit, part in zip(state.fits, cotangent, strict=True)]
        return np.array([np.asarray(part, float) for part in each])

    def _pull_back(self, state: State, fit: Solved, cotangent: Any) -> Any:
        """Return -exp(-l_g) <β α', K_g> of a fit: β are the cotangents less what they move the weights of rows by."""
        xp = self.arrays.xp
        cotangent = xp.asarray(cotangent, self.y.dtype)
        held = cotangent[fit.others]
        right = state.kernel[fit.rows][:, fit.others] @ held
        if bool(cotangent[fit.rows].any()):
            right = right + state.kernel[fit.rows][:, fit.rows] @ cotangent[fit.rows]
        v, _ = self._solve(fit, right, self.free.T @ cotangent)
        beta = self._join(fit, cotangent[fit.rows] - v, held)
        alpha = self._join(fit, fit.a, xp.zeros_like(held))
        return -state.variances * (self.kernels.reshape(self.n_penalties, -1) @ (beta @ alpha.T).ravel())

    def push_forward(self, fits: Fits, move: np.ndarray) -> np.ndarray:
        state: State = fits.state
        rate = self.arrays.xp.tensordot(-state.variances * self.arrays.put(move), self.kernels, axes=1)
        out = []
        for fit in state.fits:
            change = rate[:, fit.rows] @ fit.a
            a, b = self._solve(fit, -change[fit.rows], 0.0)
            others = change[fit.others] + self._predict(state.kernel, fit, a, b)
            out.append(np.asarray(self._join(fit, -fit.noise * a, others)))
        return np.array(out)

    def work(self, n_fits: int) -> float:
        """Return about how many multiplications the fits of one evaluation take, as if of small matrices."""
        rows, columns = self.y.shape
        return n_fits * (rows**3 / 6 + 4 * rows**2 * columns) / self.arrays.quick

    def refit(self, weights: np.ndarray, log_penalties: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fit all targets; return coefficients, (features, targets), and intercepts."""
        variances = np.exp(-log_penalties)
        kernel = self.arrays.xp.tensordot(self.arrays.put(variances), self.kernels, axes=1)
        fit = self._fit(kernel, weights, self.arrays.put(self.targets))
        coef = np.empty((self.X.shape[1], self.targets.shape[1]))
        penalized, scale = self.groups.penalized, variances[self.groups.numbers]
        a = np.asarray(fit.a) if sp.issparse(self.X) else fit.a
        for at in range(0, len(penalized), _CHUNK):
            part = self.X[:, penalized[at : at + _CHUNK]][fit.rows] * scale[at : at + _CHUNK]
            product = part.T @ a if sp.issparse(part) else self.arrays.put(part).T @ a
            coef[penalized[at : at + _CHUNK]] = np.asarray(product)
        b = np.asarray(fit.b, float)
        free = np.setdiff1d(np.arange(self.X.shape[1]), penalized)
        coef[free] = b[: len(free)]
        return coef, b[len(free) :].sum(axis=0)


def find_model(device: str) -> type[KernelRidge]:
    """Return the class that computes folds one by one, or, on a GPU, together."""
    if device == "cpu":
        return KernelRidge
    from bilevel.estimators.device_kernels import DeviceKernelRidge

    return DeviceKernelRidge


def reduce_targets(y: np.ndarray) -> np.ndarray:
    """Return targets with the same Y Y', at most as many as rows."""
    if y.shape[1] <= y.shape[0]:
        return y
    values, vectors = np.linalg.eigh(y @ y.T)
    return vectors * np.sqrt(np.maximum(values, 0.0))
