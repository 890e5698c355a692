"""Certificates of data cleaning: G = mean σ(x_i) CE_i(z) + C_r ||z||², F = mean CE.

M = I: H >= 2 C_r everywhere, so μ = 2 C_r and δ = ||D_z||/μ. With s = σ(x), and with C and k of
:mod:`bilevel.certificate.softmax` within ||d|| δ of the scores:

    a = λ_max(mean s k dd')                        b = λ_max(mean C dd') on outer rows
    c² = λ_max(sum q² C² ||t - mean t||² dd')      t = d'v and q = s (1 - s)/n: the factor of row i in D_x
    e² = λ_max(sum q² ρ² dd')                      ρ = min(√2, ||p - e_label|| + C ||d|| δ) >= the residual at z*
"""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.certificate.base import Bounds
from bilevel.certificate.metric import largest
from bilevel.certificate.rows import norms, spread, summed
from bilevel.certificate.softmax import bends, centred_norms, largest_curvatures
from bilevel.losses import sigmoid
from bilevel.oracles import CleaningOracles, Labelled
from bilevel.oracles.softmax import probabilities, residuals
from bilevel.problems import BilevelProblem
from bilevel.types import Array, Point


class CleaningBounds:
    """Bounds at points of data cleaning."""

    why = "The regularisation and the curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles = problem.oracles
        assert isinstance(oracles, CleaningOracles)
        self._oracles, self._mu = oracles.widened(), 2 * float(oracles.regularisation)

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds in the Euclidean metric."""
        delta = float(np.linalg.norm(direction.inner_var)) / self._mu
        a, b, c_sq, e_sq = (largest(matrix) for matrix in _moves(self._oracles, point, np.float64(delta)))
        v_residual = float(np.linalg.norm(direction.v))
        return Bounds(delta, self._mu, v_residual, a, b, sqrt(c_sq), sqrt(e_sq))


@jax.jit
def _moves(oracles: CleaningOracles, point: Point, delta: Array) -> tuple[Array, ...]:
    """Return the matrices whose largest eigenvalues are a, b, c² and e²."""
    z, x, v = point

    def inner(data: Labelled, weights: Array) -> tuple[Array, ...]:
        rows, tangents = data.features.T, data.features @ v
        reach, chances = norms(rows) * delta, probabilities(data.features @ z)
        curvatures, trust = largest_curvatures(chances, reach), sigmoid(x[data.index])
        missed = jnp.sqrt(jnp.sum(residuals(chances, data.labels) ** 2, axis=1))
        missed = jnp.minimum(missed + curvatures * reach, sqrt(2))
        factors = (trust * (1 - trust)) ** 2 / oracles.n_inner
        return (
            spread(rows, weights * trust * bends(tangents, curvatures)),
            spread(rows, weights * factors * (curvatures * centred_norms(tangents)) ** 2),
            spread(rows, weights * factors * missed**2),
        )

    def outer(data: Labelled, weights: Array) -> Array:
        rows = data.features.T
        return spread(rows, weights * largest_curvatures(probabilities(data.features @ z), norms(rows) * delta))

    a, c_sq, e_sq = summed(inner, oracles.inner_samples)
    return a, summed(outer, oracles.outer_samples), c_sq, e_sq
