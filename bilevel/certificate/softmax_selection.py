"""Certificates of penalty selection for softmax regression: G = mean CE(d'z) + ½ sum exp(x) z², F = mean CE(d'z).

As for linear models (:mod:`bilevel.certificate.linear`), but that a row acts through one score per class: two metrics
are tried, and the smaller error is kept; c and e are the same. In M = P, μ = 1 and δ = ||D_z||', and a row is measured
as d̃ = d / √exp(x) with one penalty per feature, d / √exp(min x) with one per class, so that ||d'w||_2 <= ||d̃|| ||w||.
With C and k of :mod:`bilevel.certificate.softmax` within ||d̃|| δ of the scores,

    a = λ_max(mean k d̃d̃')     b = λ_max(mean C d̃d̃') on outer rows

M = H is :mod:`bilevel.certificate.softmax_local`.
"""

import jax
import numpy as np

from bilevel.certificate.base import Bounds
from bilevel.certificate.metric import DENSE, Metric, largest
from bilevel.certificate.rows import norms, spread, summed, whitened
from bilevel.certificate.softmax import bends, largest_curvatures
from bilevel.certificate.softmax_local import Local
from bilevel.oracles import PENALTIES, Labelled, SoftmaxSelectionOracles
from bilevel.oracles.softmax import probabilities
from bilevel.problems import BilevelProblem
from bilevel.types import Array, Point

_MOST_WORK = 2e10  # multiplications in one pass that makes a matrix like H


class SoftmaxSelectionBounds:
    """Bounds at points of softmax selection."""

    why = "Penalties and curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles = problem.oracles
        assert isinstance(oracles, SoftmaxSelectionOracles)
        self._oracles = oracles.widened()
        # Of each number of z: which penalty it has.
        members = np.indices(problem.start.inner_var.shape)[1 - PENALTIES.index(oracles.per)].ravel()
        self._groups = members if oracles.groups is None else np.asarray(oracles.groups)[members]
        size = problem.start.inner_var.size
        self._dense = size <= DENSE and max(oracles.n_inner, oracles.n_outer) * size**2 <= _MOST_WORK

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds in the better of the two metrics."""
        found = self._among_penalties(point, direction)
        if not self._dense:
            return found
        try:
            local = Local(self._oracles, point, np.exp(point.outer_var)[self._groups])
            a, b, delta, mu = local.moves(direction)
        except np.linalg.LinAlgError:
            return found
        return min(
            found,
            self._bounds(local.metric, point, direction, delta, mu, a, b),
            key=lambda bounds: bounds.error,
        )

    def _among_penalties(self, point: Point, direction: Point) -> Bounds:
        penalties = np.exp(point.outer_var)[self._groups]
        weakest = penalties.reshape(point.inner_var.shape).min(axis=1)
        metric = Metric.diagonal(penalties)
        delta = metric.dual_norm(direction.inner_var.ravel())
        a, b = (largest(matrix) for matrix in _moves(self._oracles, point, 1 / np.sqrt(weakest), np.float64(delta)))
        return self._bounds(metric, point, direction, delta, 1.0, a, b)

    def _bounds(
        self, metric: Metric, point: Point, direction: Point, delta: float, mu: float, a: float, b: float
    ) -> Bounds:
        penalties = np.exp(point.outer_var)[self._groups]
        return Bounds(
            delta=delta,
            mu=mu,
            v_residual=metric.dual_norm(direction.v.ravel()),
            a=a,
            b=b,
            c=metric.grouped_norm(penalties * point.v.ravel(), self._groups),
            e=metric.grouped_norm(penalties * point.inner_var.ravel(), self._groups) + delta,
            least=metric.least,
        )


@jax.jit
def _moves(oracles: SoftmaxSelectionOracles, point: Point, inverse_root: Array, delta: Array) -> tuple[Array, Array]:
    """Return the matrices whose largest eigenvalues are a and b."""

    def curvatures(data: Labelled, measured: Array) -> Array:
        return largest_curvatures(probabilities(data.features @ point.inner_var), norms(measured) * delta)

    def bend(data: Labelled, weights: Array) -> Array:
        measured = whitened(data.features.T, inverse_root)
        return spread(measured, weights * bends(data.features @ point.v, curvatures(data, measured)))

    def slope(data: Labelled, weights: Array) -> Array:
        measured = whitened(data.features.T, inverse_root)
        return spread(measured, weights * curvatures(data, measured))

    return summed(bend, oracles.inner_samples), summed(slope, oracles.outer_samples)
