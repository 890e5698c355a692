"""Certificates of quadratics and of the worst case, whose inner Hessians are constant.

Quadratics, with the mean matrices A_z and B of each level: M = A_z^G, so that μ = 1, δ = ||D_z||' and a = 0,

    b = ||A_z^F||  from the metric to its dual      c = ||B^F||      e = ||B^G||

The worst case: M = I, δ = ||D_z||/μ, a = c = 0, b = L1_F, e = μ.
"""

import numpy as np

from bilevel.certificate.base import Bounds
from bilevel.certificate.metric import Metric
from bilevel.oracles import WorstCaseOracles
from bilevel.problems import BilevelProblem
from bilevel.problems.quadratic import Means
from bilevel.types import Point


class QuadraticBounds:
    """Bounds at points of a quadratic; the matrices are those of all rows, computed once."""

    why = "The mean Hessians are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles = problem.oracles
        inner, outer = Means.of(oracles.inner_samples.leaves), Means.of(oracles.outer_samples.leaves)
        self._metric = Metric.dense(inner.a_inner)
        root = self._metric.inverse_root
        self._b = self._metric.operator_norm(root @ outer.a_inner)
        self._c, self._e = self._metric.operator_norm(outer.b), self._metric.operator_norm(inner.b)

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds in the metric of the inner Hessian."""
        delta, v_residual = self._metric.dual_norm(direction.inner_var), self._metric.dual_norm(direction.v)
        return Bounds(delta, 1.0, v_residual, 0.0, self._b, self._c, self._e, self._metric.least)


class WorstCaseBounds:
    """Bounds at points of the worst case."""

    why = "All constants are known."

    def __init__(self, problem: BilevelProblem) -> None:
        assert isinstance(problem.oracles, WorstCaseOracles)
        self._mu, self._smoothness = problem.oracles.curvature, problem.constants["outer_smoothness"]

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds in the Euclidean metric."""
        delta = float(np.linalg.norm(direction.inner_var)) / self._mu
        return Bounds(delta, self._mu, float(np.linalg.norm(direction.v)), 0.0, self._smoothness, 0.0, self._mu)
