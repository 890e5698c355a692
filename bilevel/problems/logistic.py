"""Closed-form oracles of logistic penalty selection: l = log(1 + exp(-y d'z)).

The rows held are y d: the label is part of the data.

Selection of penalties for logistic regression, one per feature or group of features, on a validation set.

Constants of logistic selection: proved on a ball of z and a box of x.
"""

from dataclasses import dataclass
from functools import partial
from math import exp, log, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._precision import arithmetic, as_float_dtype
from bilevel._types import Array, Point
from bilevel.oracles import Samples
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import (
    check_same_features,
    checked_bounds,
    checked_groups,
    checked_signs,
    checked_start,
    checked_table,
)
from bilevel.problems.constants import SIGMOID, Found, Moments, Region, Values, box_of, holding_start, largest_on_circle
from bilevel.problems.exact import ExactSolution
from bilevel.problems.linear import LOGISTIC, LinearBounds, LinearOracles
from bilevel.problems.losses import logistic, sigmoid


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "groups"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LogisticOracles(LinearOracles):
    """One array per level: signed rows, (features, samples)."""

    curve = LOGISTIC

    def _features(self, data: Array) -> Array:
        return data

    def _losses(self, scores: Array, data: Array) -> Array:
        return logistic(scores)

    def _slopes(self, scores: Array, data: Array) -> tuple[Array, Array]:
        missed = sigmoid(-scores)
        return -missed, missed * (1 - missed)

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        # Both are alike in the mean where the model is right; where a row is missed by far only the first is not 0.
        return jnp.maximum(slopes**2, curvatures)


_SMALL = 1e-10  # a gradient this small is in the region of quadratic convergence
_EVERY_WIDTH = 2**62  # the closed form wants features first, however many there are


def logistic_selection(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    groups: Any = None,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike = "float32",
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of the best-fitting penalized model.

        G = mean log(1 + exp(-y d'z)) + ½ sum_k exp(x_g(k)) z_k²  on training rows
        F = mean log(1 + exp(-y d'z))                             on validation rows

    Parameters
    ----------
    X_train, X_val : (samples, features)
    y_train, y_val : labels -1 and 1
    groups : the group of each feature, 0, 1, …; features of a group share a penalty; one each by default
    inner_var : start of z; N(0, I) by default
    outer_var : start of x, the logarithms of the penalties; log U(0, 1) by default
    outer_bounds : (lower, upper) for x, each None, a number or like x
    dtype : "float32" or "float64"
    seed : of the default start and of the one shuffle of the rows
    """
    dtype = as_float_dtype(dtype)
    inner_rows = _signed_rows("X_train", X_train, "y_train", y_train)
    outer_rows = _signed_rows("X_val", X_val, "y_val", y_val)
    check_same_features(("X_train", "X_val"), (inner_rows, outer_rows))
    dim = inner_rows.shape[1]
    groups = checked_groups(groups, dim)
    rng = np.random.default_rng(seed)
    n_penalties = dim if groups is None else int(groups.max()) + 1
    z = checked_start("inner_var", inner_var, rng.standard_normal((dim,)), dtype)
    x = checked_start("outer_var", outer_var, np.log(rng.uniform(size=(n_penalties,))), dtype)
    bounds = checked_bounds(outer_bounds, x)
    with arithmetic(dtype):
        oracles = LogisticOracles(
            Samples.shuffled(inner_rows, dtype, rng, _EVERY_WIDTH),
            Samples.shuffled(outer_rows, dtype, rng, _EVERY_WIDTH),
            bounds,
            None if groups is None else jnp.asarray(groups),
        )
    start = Point(z, x, np.zeros_like(z))
    return BilevelProblem(
        oracles,
        start,
        LogisticExactSolver(oracles),
        "logistic_selection",
        find_constants=logistic_constants,
        certificate_bounds=LinearBounds,
    )


def _signed_rows(features_name: str, features: Any, labels_name: str, labels: Any) -> np.ndarray:
    rows, labels = checked_table(features_name, features, labels_name, labels)
    return rows * checked_signs(labels_name, labels)[:, None]


class LogisticExactSolver:
    """References by damped Newton steps with a dense Hessian, in float64 on the rows that runs use.

    The passes over rows are JAX's and not NumPy's: threads of a BLAS go on spinning after a call, and would
    slow down the steps that follow an evaluation.
    """

    max_steps = 100

    def __init__(self, oracles: LogisticOracles) -> None:
        self._oracles = oracles
        self._rows: tuple[Array, Array] | None = None

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        """Return the solution at ``outer_var``, from the last one or from zero."""
        with arithmetic(np.float64):
            return self._solve(jnp.asarray(outer_var, np.float64), guess)

    def _solve(self, outer_var: Array, guess: ExactSolution | None) -> ExactSolution:
        train, validation = self._float64_rows()
        penalty = np.asarray(self._oracles.penalties(outer_var))
        z = self._minimizer(train, penalty, np.zeros_like(penalty) if guess is None else guess.inner_var)
        grad, hessian = _to_numpy(_gradient_and_hessian(train, penalty, z))
        value, outer_grad = _to_numpy(_mean_loss_and_gradient(validation, z))
        v = -_cholesky_solve(hessian, outer_grad)
        return ExactSolution(
            inner_var=z,
            v=v,
            value=float(value),
            hypergrad=np.asarray(self._oracles.grouped(penalty * z * v, outer_var)),
            inner_residual=float(np.linalg.norm(grad)),
            v_residual=float(np.linalg.norm(hessian @ v + outer_grad)),
        )

    def _float64_rows(self) -> tuple[Array, Array]:
        if self._rows is None:
            samples = self._oracles.inner_samples, self._oracles.outer_samples
            inner, outer = (level.leaves.astype(np.float64) for level in samples)
            self._rows = inner, outer
        return self._rows

    def _minimizer(self, rows: Array, penalty: np.ndarray, z: np.ndarray) -> np.ndarray:
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


def logistic_constants(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """Bound l(d'z) + ½ sum_k exp(x_g(k)) z_k² on a ball of z and a box of x."""
    lower, upper = box_of(problem, box)
    weakest, strongest = float(np.exp(lower.min())), float(np.exp(upper.max()))
    radius = radius or holding_start(problem, sqrt(2 * log(2) / weakest))
    train, validation = (_rows_of(level) for level in (problem.oracles.inner_samples, problem.oracles.outer_samples))
    longest, outer_longest = (float(np.linalg.norm(rows, axis=1).max()) for rows in (train, validation))
    values: Values = {
        "mu_G": weakest + _least_fit_curvature(train, radius),
        "L0_F": outer_longest / (1 + exp(-radius * outer_longest)),
        "L1_F": outer_longest**2 * SIGMOID[1],
        "L2_F": outer_longest**3 * _steepest_curvature(radius * outer_longest),
    }
    steepest = SIGMOID[1], _steepest_curvature(radius * longest), SIGMOID[3]
    for order, slope in zip((2, 3, 4), steepest, strict=True):
        terms = strongest * _penalty_terms(order, radius)
        terms[0] += longest**order * slope
        values[f"L{order - 1}_G"] = largest_on_circle(terms)
    exact = dict.fromkeys(("L0_F", "L1_F", "L2_F"), "exact")
    fitted = min(sqrt(2 * log(2)), sqrt(strongest) * radius)
    values |= _logistic_solution(values["mu_G"], fitted, Moments.of(train), Moments.of(validation))
    return values, dict.fromkeys(values, "bound") | exact, Region(radius, lower, upper)


def _logistic_solution(mu: Any, fitted: float, train: "Moments", validation: "Moments") -> Values:
    """Bound z*, v* and ∇²h with P = diag(exp(x)) <= H = ∇²zz G, and ||√P z*|| <= ``fitted`` as G(z*) <= G(0).

    J = -H^-1 P diag(z*) and √P v* = -√P H^-1 ∇F, where ||H^-1 √P|| <= 1/√μ.
    """
    L_z_star, slope = fitted / sqrt(mu), sqrt(validation.second)
    curvature = validation.second * SIGMOID[1] + train.third * SIGMOID[2] * slope / mu
    return {
        "L_z_star": L_z_star,
        "L_v_star": (curvature * L_z_star + slope) / mu,
        "L_h": curvature * L_z_star**2 + 3 * fitted * slope / sqrt(mu),
    }


def _rows_of(samples: Samples) -> np.ndarray:
    return np.asarray(samples.leaves, np.float64).T


def _least_fit_curvature(rows: np.ndarray, radius: float) -> float:
    """Return a lower bound of the eigenvalues of mean l''(d'z) dd' over ||z|| <= radius: l'' falls with |d'z|."""
    missed = 1 / (1 + np.exp(radius * np.linalg.norm(rows, axis=1)))
    return max(0.0, float(np.linalg.eigvalsh((rows.T * (missed * (1 - missed))) @ rows / len(rows))[0]))


def _steepest_curvature(margin: float) -> float:
    """Return max |l'''| over scores up to ``margin``."""
    if margin >= log(2 + sqrt(3)):
        return SIGMOID[2]
    missed = 1 / (1 + exp(margin))
    return missed * (1 - missed) * (1 - 2 * missed)


def _penalty_terms(order: int, radius: float) -> np.ndarray:
    """Return t_j: along (a, b), ½ sum exp(x) z² has derivatives up to sum_j t_j |b|^j |a|^(order - j) at x = 0."""
    terms = np.zeros(order + 1)
    terms[-3:] = order * (order - 1) / 2, order * radius, radius**2 / 2
    return terms
