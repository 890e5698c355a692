"""Selection of one penalty per feature for logistic regression, on a validation set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel.losses import logistic, sigmoid
from bilevel.oracles import LogisticOracles, Samples
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import checked_bounds, checked_data, checked_labels, checked_variable
from bilevel.problems.reference import Reference
from bilevel.types import Array, Point

_SMALL = 1e-10  # a gradient this small is in the region of quadratic convergence
_EVERY_WIDTH = 2**62  # the closed form wants features first, however many there are


def logistic_selection(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike = "float32",
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of the best-fitting penalised model.

        G = mean log(1 + exp(-y d'z)) + ½ sum_k exp(x_k) z_k²  on training rows
        F = mean log(1 + exp(-y d'z))                          on validation rows

    Parameters
    ----------
    X_train, X_val : (samples, features)
    y_train, y_val : labels -1 and 1
    inner_var : start of z; N(0, I) by default
    outer_var : start of x, the logarithms of the penalties; log U(0, 1) by default
    outer_bounds : (lower, upper) for x, each None, a number or one per feature
    dtype : "float32" or "float64"
    seed : of the default start and of the one shuffle of the rows
    """
    dtype = as_float_dtype(dtype)
    inner_rows = _signed_rows(X_train, y_train, "X_train", "y_train")
    outer_rows = _signed_rows(X_val, y_val, "X_val", "y_val")
    if inner_rows.shape[1] != outer_rows.shape[1]:
        raise ValueError(
            f"`X_train` has {inner_rows.shape[1]} features and `X_val` {outer_rows.shape[1]}; they must agree."
        )
    rng = np.random.default_rng(seed)
    dim = inner_rows.shape[1]
    normal, uniform = rng.standard_normal(dim), rng.uniform(size=dim)
    z = checked_variable("inner_var", normal if inner_var is None else inner_var, dtype)
    x = checked_variable("outer_var", np.log(uniform) if outer_var is None else outer_var, dtype)
    for name, start in (("inner_var", z), ("outer_var", x)):
        if np.shape(start) != (dim,):
            raise ValueError(f"`{name}` has shape {np.shape(start)}; there are {dim} features.")
    bounds = checked_bounds(outer_bounds, x)
    with arithmetic(dtype):
        oracles = LogisticOracles(
            Samples.shuffled(inner_rows, dtype, rng, _EVERY_WIDTH),
            Samples.shuffled(outer_rows, dtype, rng, _EVERY_WIDTH),
            bounds,
        )
    start = Point(z, x, np.zeros_like(z))
    return BilevelProblem(oracles, start, NewtonReferee(oracles), "logistic_selection")


def _signed_rows(features: Any, labels: Any, features_name: str, labels_name: str) -> np.ndarray:
    rows = checked_data(features_name, features)
    signs = checked_labels(labels_name, labels)
    if rows.ndim != 2:
        raise ValueError(f"`{features_name}` must have two axes, (samples, features), got shape {rows.shape}.")
    if len(rows) != len(signs):
        raise ValueError(f"`{features_name}` has {len(rows)} rows and `{labels_name}` {len(signs)} labels.")
    return rows * signs[:, None]


class NewtonReferee:
    """References by damped Newton steps with a dense Hessian, in float64 on the rows that runs use.

    The passes over rows are JAX's and not NumPy's: threads of a BLAS go on spinning after a call, and would
    slow down the steps that follow an evaluation.
    """

    max_steps = 100

    def __init__(self, oracles: LogisticOracles) -> None:
        self._oracles = oracles
        self._rows: tuple[Array, Array] | None = None

    def __call__(self, outer_var: np.ndarray, guess: Reference | None = None) -> Reference:
        """Return the solution at ``outer_var``, from the last one or from zero."""
        with arithmetic(np.float64):
            return self._solve(np.exp(np.asarray(outer_var, np.float64)), guess)

    def _solve(self, penalty: np.ndarray, guess: Reference | None) -> Reference:
        train, validation = self._float64_rows()
        z = self._minimiser(train, penalty, np.zeros_like(penalty) if guess is None else guess.inner_var)
        grad, hessian = _to_numpy(_gradient_and_hessian(train, penalty, z))
        value, outer_grad = _to_numpy(_mean_loss_and_gradient(validation, z))
        v = -_cholesky_solve(hessian, outer_grad)
        return Reference(
            inner_var=z,
            v=v,
            value=float(value),
            hypergrad=penalty * z * v,
            inner_residual=float(np.linalg.norm(grad)),
            v_residual=float(np.linalg.norm(hessian @ v + outer_grad)),
        )

    def _float64_rows(self) -> tuple[Array, Array]:
        if self._rows is None:
            samples = self._oracles.inner_samples, self._oracles.outer_samples
            inner, outer = (level.leaves.astype(np.float64) for level in samples)
            self._rows = inner, outer
        return self._rows

    def _minimiser(self, rows: Array, penalty: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Take Newton steps, halved where the gradient does not fall, until rounding stops it."""
        grad, hessian = _to_numpy(_gradient_and_hessian(rows, penalty, z))
        damping = 1.0
        for _ in range(self.max_steps):
            trial = z - damping * _cholesky_solve(hessian, grad)
            trial_grad, trial_hessian = _to_numpy(_gradient_and_hessian(rows, penalty, trial))
            fell = np.linalg.norm(trial_grad) / np.linalg.norm(grad)
            if fell < 1:
                z, grad, hessian = trial, trial_grad, trial_hessian
            # Newton's method squares a small gradient; one that falls no further is at rounding.
            if not fell < 0.5 and np.linalg.norm(grad) < _SMALL:
                break
            damping = min(1.0, 2 * damping) if fell < 1 else damping / 2
        return z


@jax.jit
def _gradient_and_hessian(rows: Array, penalty: Array, z: Array) -> tuple[Array, Array]:
    n = rows.shape[1]
    missed = sigmoid(-(z @ rows))
    hessian = (rows * (missed * (1 - missed))) @ rows.T / n + jnp.diag(penalty)
    return -(rows @ missed) / n + penalty * z, hessian


@jax.jit
def _mean_loss_and_gradient(rows: Array, z: Array) -> tuple[Array, Array]:
    margins = z @ rows
    return jnp.mean(logistic(margins)), -(rows @ sigmoid(-margins)) / rows.shape[1]


def _to_numpy(arrays: tuple[Array, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array) for array in arrays)


def _cholesky_solve(matrix: np.ndarray, right_side: np.ndarray) -> np.ndarray:
    from scipy.linalg import cho_factor, cho_solve

    return cho_solve(cho_factor(matrix), right_side)
