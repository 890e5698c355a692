"""Closed-form oracles of penalty selection for softmax regression.

    G = mean CE(d'z) + ½ sum_kc exp(x) z_kc²        F = mean CE(d'z)        z: features × classes

with one x per class or one per feature. With the residual r = softmax(d'z) - e_label of each row and its curvature
S t = p (t - p't), on rows D: ∇z G = D'r + exp(x) z, (∇²zz G) v = D'S(Dv) + exp(x) v, (∇²xz G) v = sum exp(x) z v.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from bilevel.oracles.softmax import (
    Labelled,
    SoftmaxOracles,
    curved,
    probabilities,
    products,
    residuals,
)
from bilevel.types import Array, InnerPass, Point, Rows

PENALTIES = ("class", "feature")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds"],
    meta_fields=["per"],
)
@dataclass(frozen=True)
class SoftmaxSelectionOracles(SoftmaxOracles):
    """Labelled rows on each level; one penalty per ``"class"`` or per ``"feature"``."""

    per: str = "class"

    @property
    def _shared_axis(self) -> int:
        return PENALTIES.index(self.per)

    def penalties(self, outer_var: Array) -> Array:
        """Return the penalties in a shape that broadcasts to that of z."""
        return jnp.expand_dims(jnp.exp(outer_var), self._shared_axis)

    def _inner(self, point: Point, data: Labelled, weights: Array) -> InnerPass:
        z, x, v = point
        rows, penalties = data.features, self.penalties(x)
        chances = probabilities(rows @ z)
        return InnerPass(
            grad=rows.T @ (weights[:, None] * residuals(chances, data.labels)) + penalties * z,
            hvp=rows.T @ (weights[:, None] * curved(chances, rows @ v)) + penalties * v,
            cross=jnp.sum(penalties * z * v, axis=self._shared_axis),
        )

    def _inner_grad_outer(self, point: Point, data: Labelled, weights: Array) -> Array:
        return jnp.sum(self.penalties(point.outer_var) * point.inner_var**2, axis=self._shared_axis) / 2

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous): each level is read once for both points, and once to multiply back."""
        train, weights = self.inner_samples.take(rows.inner)
        validation, outer_weights = self.outer_samples.take(rows.outer)
        (z, x, v), (z0, x0, v0) = point, previous
        penalties, penalties0 = self.penalties(x), self.penalties(x0)
        scores, scores0, tangents, tangents0 = products(train.features, z, z0, v, v0)
        chances, chances0 = probabilities(scores), probabilities(scores0)
        changes = chances - chances0, curved(chances, tangents) - curved(chances0, tangents0)
        grad, hvp = products(train.features.T, *(weights[:, None] * change for change in changes))
        outer_chances, outer_chances0 = map(probabilities, products(validation.features, z, z0))
        outer_grad = validation.features.T @ (outer_weights[:, None] * (outer_chances - outer_chances0))
        return Point(
            inner_var=grad + penalties * z - penalties0 * z0,
            outer_var=jnp.sum(penalties * z * v - penalties0 * z0 * v0, axis=self._shared_axis),
            v=hvp + penalties * v - penalties0 * v0 + outer_grad,
        )

    def _inner_value(self, point: Point, data: Labelled, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty
