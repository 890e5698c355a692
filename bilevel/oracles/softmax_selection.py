"""Closed-form oracles of penalty selection for softmax regression.

    G = mean CE(d'z) + ½ sum_kc exp(x) z_kc²        F = mean CE(d'z)        z: features × classes

with one x per class, per feature or per group of them. With the residual r = softmax(d'z) - e_label of each row and its
curvature S t = p (t - p't), on rows D:

    ∇z G = D'r + exp(x) z     (∇²zz G) v = D'S(Dv) + exp(x) v     (∇²xz G) v = sum exp(x) z v
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from bilevel.oracles.linear import LOG_PENALTIES, grouped, ungrouped
from bilevel.oracles.softmax import (
    Labelled,
    SoftmaxOracles,
    curvatures,
    curved,
    probabilities,
    residuals,
    row_diagonals,
)
from bilevel.types import Array, InnerPass, Point

PENALTIES = ("class", "feature")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "groups"],
    meta_fields=["per"],
)
@dataclass(frozen=True)
class SoftmaxSelectionOracles(SoftmaxOracles):
    """Labelled rows on each level; one penalty per ``"class"`` or ``"feature"``, or per group of them."""

    per: str = "class"
    groups: Array | None = None

    @property
    def _shared_axis(self) -> int:
        return PENALTIES.index(self.per)

    @property
    def wide_bounds(self) -> tuple[float, float]:
        """Bounds of the logarithm of a penalty."""
        return LOG_PENALTIES

    def penalties(self, outer_var: Array) -> Array:
        """Return the penalties in a shape that broadcasts to that of z."""
        return jnp.expand_dims(ungrouped(jnp.exp(outer_var), self.groups), self._shared_axis)

    def _shared(self, per_entry: Array, outer_var: Array) -> Array:
        """Return the sum over the entries of z that share a penalty."""
        return grouped(jnp.sum(per_entry, axis=self._shared_axis), self.groups, outer_var.size)

    def _inner_terms_of(self, scores: Array, tangents: Array, point: Point, data: Labelled) -> tuple[Array, ...]:
        chances = probabilities(scores)
        return residuals(chances, data.labels), curved(chances, tangents)

    def _inner_bundle(
        self, grad: Array, hvp: Array, terms: tuple[Array, ...], data: Labelled, like: Point
    ) -> InnerPass:
        return InnerPass(grad, hvp, jnp.zeros_like(like.outer_var))

    def _inner_rest(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.penalties(x)
        return InnerPass(penalties * z, penalties * v, self._shared(penalties * z * v, x))

    def _row_diagonals(self, point: Point, data: Labelled, weights: Array, *, power: int, cautious: bool) -> Array:
        curved_by = curvatures(data, probabilities(data.features @ point.inner_var), cautious)
        return row_diagonals(data.features, curved_by, weights, power)

    def _diagonal_rest(self, point: Point) -> Array:
        return jnp.broadcast_to(self.penalties(point.outer_var), point.inner_var.shape)

    def _inner_grad_outer(self, point: Point, data: Labelled, weights: Array) -> Array:
        return self._shared(self.penalties(point.outer_var) * point.inner_var**2 / 2, point.outer_var)

    def _inner_value(self, point: Point, data: Labelled, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty
