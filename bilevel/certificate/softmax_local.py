"""Softmax selection in the metric of its Hessian, M = H = mean dd' ⊗ S + P with S = diag(p) - pp' at z.

Within t of z the scores of a row move by u with range(u) <= w = 2 t max_c ||d||_c, where ||d||_c² = d'N_c d and N_c is
the diagonal block of H⁻¹ of class c. As a third cumulant κ(u, s, s) is at most range(u) S(s, s), S stays between
exp(-w) and exp(w) times what it is at z. So δ and μ come from mean exp(-w) dd' ⊗ S + P
(:mod:`bilevel.certificate.ball`), and with w at t = δ

    a = λ_max(M⁻¹ mean range(d'v) exp(w) dd' ⊗ S)     b = λ_max(M⁻¹ mean exp(w) dd' ⊗ S) on outer rows
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.certificate.ball import ball
from bilevel.certificate.metric import Metric
from bilevel.certificate.rows import summed
from bilevel.oracles import Labelled, Samples, SoftmaxSelectionOracles
from bilevel.oracles.softmax import probabilities
from bilevel.types import Array, Point


class Local:
    """The metric of the Hessian at a point; LinAlgError where it is not positive definite."""

    def __init__(self, oracles: SoftmaxSelectionOracles, point: Point, penalties: np.ndarray) -> None:
        self._oracles, self._point, self._penalties = oracles, point, penalties
        n_features, n_classes = point.inner_var.shape
        self._roots = np.zeros((n_classes, n_features, n_features))
        self.metric = Metric.dense(self._least_hessian(0.0))
        blocks = self.metric.inverse_root.reshape(-1, n_features, n_classes).transpose(2, 0, 1)
        self._roots = np.stack([np.linalg.cholesky(block.T @ block).T for block in blocks])

    def moves(self, direction: Point) -> tuple[float, float, float, float]:
        """Return a, b, δ and μ; LinAlgError where no ball is known to hold z*."""
        found = ball(self.metric, self.metric.dual_norm(direction.inner_var.ravel()), self._least_hessian)
        if found is None:
            raise np.linalg.LinAlgError("no ball")
        a, b = (self.metric.largest(self._curvature(kind, found[0])) for kind in ("bend", "slope"))
        return a, b, *found

    def _least_hessian(self, radius: float) -> np.ndarray:
        return self._curvature("least", radius) + np.diag(self._penalties)

    def _curvature(self, kind: str, radius: float) -> np.ndarray:
        samples = self._oracles.outer_samples if kind == "slope" else self._oracles.inner_samples
        return np.asarray(_curvature(samples, self._point, self._roots, np.float64(radius), kind))


@partial(jax.jit, static_argnames="kind")
def _curvature(samples: Samples, point: Point, roots: Array, radius: Array, kind: str) -> Array:
    """Return mean exp(-w) dd' ⊗ S ("least"), exp(w) for it ("slope") or range(d'v) exp(w) ("bend")."""
    z, _, v = point
    same_class = jnp.eye(z.shape[1], dtype=z.dtype)[None, :, None, :]

    def factors(data: Labelled) -> Array:
        lengths = jnp.sqrt(jnp.max(jnp.sum((roots @ data.features.T) ** 2, axis=1), axis=0))
        if kind == "least":
            return jnp.exp(-2 * radius * lengths)
        grown = jnp.exp(2 * radius * lengths)
        return grown * jnp.ptp(data.features @ v, axis=1) if kind == "bend" else grown

    def of_piece(data: Labelled, weights: Array) -> Array:
        rows, chances = data.features, probabilities(data.features @ z)
        scaled = weights * factors(data)
        joint = (rows[:, :, None] * chances[:, None, :]).reshape(len(rows), -1)
        weighted = (joint * scaled[:, None]).T
        own = (weighted @ rows).reshape(*z.shape, len(z), 1)
        return (own * same_class).reshape(z.size, z.size) - weighted @ joint

    return summed(of_piece, samples)
