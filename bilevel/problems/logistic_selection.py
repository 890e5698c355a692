"""Selection of one penalty per feature for logistic regression, on a validation set."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from bilevel.oracles import LogisticOracles, Samples
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import checked_bounds, checked_data, checked_labels, checked_variable
from bilevel.problems.reference import Reference
from bilevel.types import Array, Point

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
    return BilevelProblem(oracles, start, NewtonReferee(oracles, start), "logistic_selection")


def _signed_rows(features: Any, labels: Any, features_name: str, labels_name: str) -> np.ndarray:
    rows = checked_data(features_name, features)
    signs = checked_labels(labels_name, labels)
    if rows.ndim != 2:
        raise ValueError(f"`{features_name}` must have two axes, (samples, features), got shape {rows.shape}.")
    if len(rows) != len(signs):
        raise ValueError(f"`{features_name}` has {len(rows)} rows and `{labels_name}` {len(signs)} labels.")
    return rows * signs[:, None]


class NewtonReferee:
    """References by damped Newton steps with a dense Hessian, in float64 on the rows that runs use."""

    max_steps = 100

    def __init__(self, oracles: LogisticOracles, start: Point) -> None:
        self._oracles, self._start = oracles, start
        self._rows: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(self, outer_var: np.ndarray, guess: Reference | None = None) -> Reference:
        """Return the solution at ``outer_var``, from the last one or from zero."""
        from scipy.linalg import cho_factor, cho_solve
        from scipy.special import expit

        train, validation = self._float64_rows()
        penalty = np.exp(np.asarray(outer_var, np.float64))
        z = self._minimiser(train, penalty, np.zeros_like(penalty) if guess is None else guess.inner_var)
        grad, hessian = _gradient(train, penalty, z), _hessian(train, penalty, z)
        margins = z @ validation
        outer_grad = -(validation @ expit(-margins)) / validation.shape[1]
        v = -cho_solve(cho_factor(hessian), outer_grad)
        return Reference(
            inner_var=z,
            v=v,
            value=float(np.mean(np.logaddexp(0, -margins))),
            hypergrad=penalty * z * v,
            inner_residual=float(np.linalg.norm(grad)),
            v_residual=float(np.linalg.norm(hessian @ v + outer_grad)),
        )

    def _float64_rows(self) -> tuple[np.ndarray, np.ndarray]:
        if self._rows is None:
            inner, outer = self._oracles.inner_samples.leaves, self._oracles.outer_samples.leaves
            self._rows = np.asarray(inner, np.float64), np.asarray(outer, np.float64)
        return self._rows

    def _minimiser(self, rows: np.ndarray, penalty: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Take Newton steps, halved while the gradient does not fall, until rounding stops it."""
        from scipy.linalg import cho_factor, cho_solve

        size = np.linalg.norm(_gradient(rows, penalty, z))
        for _ in range(self.max_steps):
            move = cho_solve(cho_factor(_hessian(rows, penalty, z)), _gradient(rows, penalty, z))
            for _ in range(30):
                trial_size = np.linalg.norm(_gradient(rows, penalty, z - move))
                if trial_size < size:
                    break
                move = move / 2
            else:
                break
            z, size = z - move, trial_size
        return z


def _gradient(rows: Array | np.ndarray, penalty: np.ndarray, z: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return -(rows @ expit(-(z @ rows))) / rows.shape[1] + penalty * z


def _hessian(rows: np.ndarray, penalty: np.ndarray, z: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    missed = expit(-(z @ rows))
    return (rows * (missed * (1 - missed))) @ rows.T / rows.shape[1] + np.diag(penalty)
