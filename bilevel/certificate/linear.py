"""Certificates of penalty selection for linear models: G = mean l(d'z) + ½ sum exp(x) z², F = mean l(d'z).

With P = diag exp(x), H = mean l'' dd' + P. Rows are measured in the metric, d̃ = L⁻¹d, so that within t of z a score
stays within ||d̃|| t. Two metrics are tried, and the smaller error is kept:

    M = P     H >= P everywhere, so μ = 1 and δ = ||D_z||'
    M = H     of z; δ and μ from the least l'' near z, as in :mod:`bilevel.certificate.ball`

    a = λ_max(mean k |d'v| d̃d̃')    k the supremum of |l'''| over scores within ||d̃|| δ of d'z
    b = λ_max(mean l'' d̃d̃')        on outer rows, l'' the supremum over the same scores
    c = ||S diag(P v)||             S sums over the features of a group
    e = ||S diag(P z)|| + δ         as ||S P (z* - z) w||_2 <= sum P |z* - z| |w| <= ||z - z*|| ||w||, for M >= P
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from bilevel.certificate.ball import ball
from bilevel.certificate.base import NOTHING, Bounds
from bilevel.certificate.curves import LOGISTIC, SQUARED, Curve
from bilevel.certificate.metric import DENSE, Metric, largest
from bilevel.certificate.rows import norms, spread, summed, whitened
from bilevel.oracles import LinearOracles, LogisticOracles, Regression
from bilevel.problems import BilevelProblem
from bilevel.types import Array, Point


class LinearBounds:
    """Bounds at points of logistic or ridge selection."""

    why = "Penalties and curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles = problem.oracles
        assert isinstance(oracles, LinearOracles)
        self._oracles = oracles.widened()
        self._curve = LOGISTIC if isinstance(oracles, LogisticOracles) else SQUARED
        size = problem.start.inner_var.size
        self._groups = np.arange(size) if oracles.groups is None else np.asarray(oracles.groups)

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds in the better of the two metrics."""
        penalties = np.exp(point.outer_var)[self._groups]
        plain = Metric.diagonal(penalties)
        found = self._bounds(plain, point, direction, plain.dual_norm(direction.inner_var), 1.0)
        if penalties.size > DENSE:
            return found
        try:
            local = self._local(point, direction, penalties)
        except np.linalg.LinAlgError:
            return found
        return min(found, local, key=lambda bounds: bounds.error)

    def _local(self, point: Point, direction: Point, penalties: np.ndarray) -> Bounds:
        metric = Metric.dense(self._least_hessian(point.inner_var, penalties, np.ones(len(penalties)), 0.0))
        within = partial(self._least_hessian, point.inner_var, penalties, metric.inverse_root)
        found = ball(metric, metric.dual_norm(direction.inner_var), within)
        return NOTHING if found is None else self._bounds(metric, point, direction, *found)

    def _least_hessian(
        self, z: np.ndarray, penalties: np.ndarray, inverse_root: np.ndarray, radius: float
    ) -> np.ndarray:
        fit = _least_fit_curvature(self._oracles, self._curve, z, inverse_root, np.float64(radius))
        return np.asarray(fit) + np.diag(penalties)

    def _bounds(self, metric: Metric, point: Point, direction: Point, delta: float, mu: float) -> Bounds:
        z, x, v = point
        penalties = np.exp(x)[self._groups]
        moves = _moves(self._oracles, self._curve, z, v, metric.inverse_root, np.float64(delta))
        return Bounds(
            delta=delta,
            mu=mu,
            v_residual=metric.dual_norm(direction.v),
            a=largest(moves[0]),
            b=largest(moves[1]),
            c=metric.grouped_norm(penalties * v, self._groups),
            e=metric.grouped_norm(penalties * z, self._groups) + delta,
            least=metric.least,
        )


def _features(data: Any) -> Array:
    return data.features if isinstance(data, Regression) else data


@partial(jax.jit, static_argnames="curve")
def _least_fit_curvature(oracles: LinearOracles, curve: Curve, z: Array, inverse_root: Array, radius: Array) -> Array:
    """Return mean l'' dd' with the least l'' of each row within a radius of z."""

    def of_piece(data: Any, weights: Array) -> Array:
        rows = _features(data)
        reach = norms(whitened(rows, inverse_root)) * radius
        return (rows * (weights * curve.least_second(z @ rows, reach))) @ rows.T

    return summed(of_piece, oracles.inner_samples)


@partial(jax.jit, static_argnames="curve")
def _moves(
    oracles: LinearOracles, curve: Curve, z: Array, v: Array, inverse_root: Array, delta: Array
) -> tuple[Array, Array]:
    """Return the matrices whose largest eigenvalues are a and b."""

    def bend(data: Any, weights: Array) -> Array:
        rows = _features(data)
        measured = whitened(rows, inverse_root)
        third = curve.largest_third(z @ rows, norms(measured) * delta)
        return spread(measured, weights * third * abs(v @ rows))

    def slope(data: Any, weights: Array) -> Array:
        rows = _features(data)
        measured = whitened(rows, inverse_root)
        return spread(measured, weights * curve.largest_second(z @ rows, norms(measured) * delta))

    return summed(bend, oracles.inner_samples), summed(slope, oracles.outer_samples)
