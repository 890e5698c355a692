"""Closed-form oracles of penalty selection for least squares: l = ½ (d'z - t)².

Selection of penalties for least squares, one per feature or group of features, on a validation set.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._precision import arithmetic, as_float_dtype
from bilevel._types import AnyArray, Array, Point
from bilevel.oracles import Samples
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import (
    check_same_features,
    checked_bounds,
    checked_data,
    checked_groups,
    checked_start,
    checked_table,
)
from bilevel.problems.exact import ExactSolution
from bilevel.problems.linear import SQUARED, LinearBounds, LinearOracles


class Regression(NamedTuple):
    """Features, (features, samples), and one target per sample."""

    features: AnyArray
    targets: AnyArray


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "groups"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RidgeOracles(LinearOracles):
    """Features and targets on each level."""

    curve = SQUARED

    def _features(self, data: Regression) -> Array:
        return data.features

    def _losses(self, scores: Array, data: Regression) -> Array:
        return (scores - data.targets) ** 2 / 2

    def _slopes(self, scores: Array, data: Regression) -> tuple[Array, Array]:
        return scores - data.targets, jnp.ones_like(scores)


_EVERY_WIDTH = 2**62  # the closed form wants features first, however many there are


def ridge_selection(
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
    """Build the problem min over x of the validation error of ridge regression with penalties exp(x).

        G = mean ½ (d'z - y)² + ½ sum_k exp(x_g(k)) z_k²  on training rows
        F = mean ½ (d'z - y)²                             on validation rows

    There is no intercept: center features and targets, or add a column of ones.

    Parameters
    ----------
    X_train, X_val : (samples, features)
    y_train, y_val : real targets
    groups : the group of each feature, 0, 1, …; features of a group share a penalty; one each by default
    inner_var : start of z; 0 by default
    outer_var : start of x, the logarithms of the penalties; -2 by default
    outer_bounds : (lower, upper) for x, each None, a number or like x
    dtype : "float32" or "float64"
    seed : of the one shuffle of the rows
    """
    dtype = as_float_dtype(dtype)
    train = _regression("X_train", X_train, "y_train", y_train)
    validation = _regression("X_val", X_val, "y_val", y_val)
    check_same_features(("X_train", "X_val"), (train.features, validation.features))
    dim = train.features.shape[1]
    groups = checked_groups(groups, dim)
    z = checked_start("inner_var", inner_var, np.zeros(dim), dtype)
    n_penalties = dim if groups is None else groups.max() + 1
    x = checked_start("outer_var", outer_var, np.full(n_penalties, -2.0), dtype)
    rng = np.random.default_rng(seed)
    with arithmetic(dtype):
        oracles = RidgeOracles(
            Samples.shuffled(train, dtype, rng, _EVERY_WIDTH),
            Samples.shuffled(validation, dtype, rng, _EVERY_WIDTH),
            checked_bounds(outer_bounds, x),
            None if groups is None else jnp.asarray(groups),
        )
    return BilevelProblem(
        oracles,
        Point(z, x, np.zeros_like(z)),
        RidgeExactSolver(oracles),
        "ridge_selection",
        certificate_bounds=LinearBounds,
    )


def _regression(features_name: str, features: Any, targets_name: str, targets: Any) -> Regression:
    rows, values = checked_table(features_name, features, targets_name, checked_data(targets_name, targets))
    return Regression(rows.astype(np.float64, copy=False), values.astype(np.float64, copy=False))


class RidgeExactSolver:
    """References from the moments of both levels: one p×p solve, however many rows there are."""

    def __init__(self, oracles: RidgeOracles) -> None:
        self._oracles = oracles
        self.gram, self.right_side, _ = _moments(oracles.inner_samples)
        self.outer_gram, self.outer_right_side, self.outer_square = _moments(oracles.outer_samples)

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        """Return the solution at ``outer_var``; no guess is needed."""
        with arithmetic(np.float64):
            x = jnp.asarray(outer_var, np.float64)
            penalties = np.asarray(self._oracles.penalties(x))
            return self._solve(x, penalties)

    def _solve(self, x: Any, penalties: np.ndarray) -> ExactSolution:
        from scipy.linalg import cho_factor, cho_solve

        hessian = self.gram + np.diag(penalties)
        factor = cho_factor(hessian)
        z = cho_solve(factor, self.right_side)
        outer_grad = self.outer_gram @ z - self.outer_right_side
        v = -cho_solve(factor, outer_grad)
        return ExactSolution(
            inner_var=z,
            v=v,
            value=float(z @ self.outer_gram @ z / 2 - self.outer_right_side @ z + self.outer_square / 2),
            hypergrad=np.asarray(self._oracles.grouped(jnp.asarray(penalties * z * v), x)),
            inner_residual=float(np.linalg.norm(hessian @ z - self.right_side)),
            v_residual=float(np.linalg.norm(hessian @ v + outer_grad)),
        )


def _moments(samples: Samples) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the means of d d', d y and y², in float64 on the rows that runs use."""
    features, targets = (np.asarray(leaf, np.float64) for leaf in samples.leaves)
    return features @ features.T / samples.n, features @ targets / samples.n, float(targets @ targets / samples.n)
