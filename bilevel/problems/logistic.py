"""Selection of penalties for logistic regression: l = log(1 + exp(-y d'z)) in :mod:`bilevel.problems.linear`.

The rows held are y d: the label is part of the data. Constants are proved on a ball of z and a box of x.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from math import exp, log, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _tree as trees
from bilevel._precision import resolve_dtype
from bilevel._programs import Compiled
from bilevel._types import Array
from bilevel.oracles import HostData
from bilevel.oracles.host_samples import head
from bilevel.problems.base import BilevelProblem, lay_out
from bilevel.problems.checks import check_groups, check_signs, check_tables, make_rng
from bilevel.problems.constants import Found, Moments, Region, Values, box_around, largest_on_circle, radius_with_start
from bilevel.problems.exact import InnerSolution, System, newton
from bilevel.problems.linear import EVERY_WIDTH, LinearBounds, LinearExactSolver, LinearOracles
from bilevel.problems.losses import SIGMOID, STEEPEST, logistic, logistic_curvature, sigmoid, sigmoid_and_slope


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
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of the best-fitting penalized model.

        G = mean log(1 + exp(-y d'z)) + ½ sum_k exp(x_g(k)) z_k²  on training rows
        F = mean log(1 + exp(-y d'z))                             on validation rows

    Parameters
    ----------
    X_train, X_val : (samples, features); a :class:`bilevel.HostData` stays on the host, and nothing is solved exactly
    y_train, y_val : labels -1 and 1
    groups : the group of each feature, 0, 1, …; features of a group share a penalty; one each by default
    inner_var : start of z; N(0, I) by default
    outer_var : start of x, the logarithms of the penalties; log U(0, 1) by default
    outer_bounds : (lower, upper) for x, each None, a number or like x
    dtype : "float32" or "float64"; by default what JAX makes of the features
    seed : of the default start and of the one shuffle of the rows
    """
    dtype = resolve_dtype(dtype, X_train=head(X_train), X_val=head(X_val))
    tables = check_tables(X_train, y_train, X_val, y_val, on_host=True)
    train, validation = (_sign(name, *table) for name, table in zip(("y_train", "y_val"), tables, strict=True))
    rng, dim, starts = make_rng(seed), head(train).shape[1], (inner_var, outer_var)
    groups, n_penalties = check_groups(groups, dim)
    defaults = rng.standard_normal((dim,)), np.log(rng.uniform(size=(n_penalties,)))
    parts, start = lay_out((train, validation), starts, defaults, outer_bounds, dtype, rng, narrow=EVERY_WIDTH)
    oracles = LogisticOracles(**parts, groups=groups)
    if oracles.is_on_host:
        return BilevelProblem(oracles, start, name="logistic_selection")
    return BilevelProblem(
        oracles,
        start,
        LogisticExactSolver(oracles),
        "logistic_selection",
        find_constants=logistic_constants,
        certificate_bounds=LinearBounds,
    )


def _sign(name: str, rows: Any, labels: np.ndarray) -> Any:
    """Return each row times its label."""
    if isinstance(rows, HostData):
        return rows.with_column(labels, partial(_sign, name))
    return rows * check_signs(name, labels)[:, None].astype(np.result_type(rows, np.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogisticOracles(LinearOracles):
    """One array per level: signed rows, (features, samples)."""

    curvature_near = staticmethod(logistic_curvature)

    def _losses(self, scores: Array, data: Array) -> Array:
        return logistic(scores)

    def _slopes(self, scores: Array, data: Array) -> tuple[Array, Array]:
        residuals, curvatures = sigmoid_and_slope(-scores)
        return -residuals, curvatures

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        # Both are alike in the mean where the model is right; where a row is fitted badly only the first is not 0.
        return jnp.maximum(slopes**2, curvatures)


class LogisticExactSolver(LinearExactSolver):
    """Exact solutions by damped Newton steps, from the last one or from zero.

    Passes over rows are JAX's: threads of NumPy's BLAS go on spinning after a call, and would slow down later steps.
    """

    @cached_property
    def _rows(self) -> list[Array]:
        levels = self._oracles.inner_samples, self._oracles.outer_samples
        return [trees.cast(level.leaves, np.float64) for level in levels]

    def _fit(self, penalties: np.ndarray, start: np.ndarray) -> tuple[InnerSolution, float, np.ndarray]:
        train, validation = self._rows

        def system_at(z: np.ndarray) -> System:
            return System.dense(np.asarray(_hessian(train, penalties, z)))

        found = newton(lambda z: np.asarray(_gradient(train, penalties, z)), system_at, start)
        value, outer_grad = _mean_loss_and_gradient(validation, found.z)
        return found, float(value), np.asarray(outer_grad)


@Compiled
def _gradient(rows: Array, penalty: Array, z: Array) -> Array:
    return penalty * z - (rows @ sigmoid(-(z @ rows))) / rows.shape[1]


@Compiled
def _hessian(rows: Array, penalty: Array, z: Array) -> Array:
    return (rows * sigmoid_and_slope(z @ rows)[1]) @ rows.T / rows.shape[1] + jnp.diag(penalty)


@Compiled
def _mean_loss_and_gradient(rows: Array, z: Array) -> tuple[Array, Array]:
    margins = z @ rows
    return jnp.mean(logistic(margins)), -(rows @ sigmoid(-margins)) / rows.shape[1]


def logistic_constants(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """Bound l(d'z) + ½ sum_k exp(x_g(k)) z_k² on a ball of z and a box of x."""
    lower, upper = box_around(problem, box)
    weakest, strongest = float(np.exp(lower.min())), float(np.exp(upper.max()))
    radius = radius or radius_with_start(problem, sqrt(2 * log(2) / weakest))
    levels = problem.oracles.inner_samples, problem.oracles.outer_samples
    train, validation = (np.asarray(level.leaves, np.float64).T for level in levels)
    longest, outer_longest = (float(np.linalg.norm(rows, axis=1).max()) for rows in (train, validation))
    values: Values = {
        "mu_G": weakest + _least_fit_curvature(train, radius),
        "L0_F": outer_longest / (1 + exp(-radius * outer_longest)),
        "L1_F": outer_longest**2 * SIGMOID[1],
        "L2_F": outer_longest**3 * _steepest_curvature(radius * outer_longest),
    }
    steepest = SIGMOID[1], _steepest_curvature(radius * longest), SIGMOID[3]
    for order, slope in zip((2, 3, 4), steepest, strict=True):
        # Along (a, b), ½ sum exp(x) z² has derivatives up to sum_j t_j |b|^j |a|^(order - j) at x = 0.
        terms = np.zeros(order + 1)
        terms[-3:] = order * (order - 1) / 2, order * radius, radius**2 / 2
        terms *= strongest
        terms[0] += longest**order * slope
        values[f"L{order - 1}_G"] = largest_on_circle(terms)
    fitted = min(sqrt(2 * log(2)), sqrt(strongest) * radius)
    values |= _constants_of_solution(values["mu_G"], fitted, Moments.of(train), Moments.of(validation))
    how = dict.fromkeys(values, "bound") | dict.fromkeys(("L0_F", "L1_F", "L2_F"), "exact")
    return values, how, Region(radius, lower, upper)


def _constants_of_solution(mu: Any, fitted: float, train: Moments, validation: Moments) -> Values:
    """Bound z*, v* and ∇²h with P = diag(exp(x)) <= H = ∇²zz G, and ||√P z*|| <= ``fitted`` as G(z*) <= G(0).

    J = -H^-1 P diag(z*) and √P v* = -√P H^-1 ∇F, where ||H^-1 √P|| <= 1/√μ.
    """
    L_z_star, slope = fitted / sqrt(mu), sqrt(validation.second)
    curvature = validation.second * SIGMOID[1] + train.third * SIGMOID[2] * slope / mu
    L_v_star = (curvature * L_z_star + slope) / mu
    return {"L_z_star": L_z_star, "L_v_star": L_v_star, "L_h": curvature * L_z_star**2 + 3 * fitted * slope / sqrt(mu)}


def _least_fit_curvature(rows: np.ndarray, radius: float) -> float:
    """Return a lower bound of the eigenvalues of mean l''(d'z) dd' over ||z|| <= radius: l'' falls with |d'z|."""
    small = np.exp(-radius * np.linalg.norm(rows, axis=1))
    return max(0.0, float(np.linalg.eigvalsh((rows.T * (small / (1 + small) ** 2)) @ rows / len(rows))[0]))


def _steepest_curvature(margin: float) -> float:
    """Return max |l'''| over scores up to ``margin``."""
    if margin >= STEEPEST:
        return SIGMOID[2]
    slope = 1 / (1 + exp(margin))
    return slope * (1 - slope) * (1 - 2 * slope)
