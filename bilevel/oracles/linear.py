"""Closed-form oracles of penalty selection for linear models.

    G = mean l(d'z) + ½ sum_k exp(x_g(k)) z_k²        F = mean l(d'z)

with one outer variable per feature, or per group g of features. On rows D, features first,

    ∇z G = D l' + exp(x) z      (∇²zz G) v = D (l'' D'v) + exp(x) v      (∇²xz G) v = exp(x) z v, summed by group
"""

from abc import abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bilevel.oracles.base import Oracles
from bilevel.types import Array, InnerPass, OuterPass, Point, PyTree, Rows


@dataclass(frozen=True)
class LinearOracles(Oracles):
    """A loss of one score per row; ``groups`` holds the group of each feature, None for one each."""

    groups: Array | None = None

    @abstractmethod
    def _features(self, data: PyTree) -> Array:
        """Return the rows, (features, samples)."""

    @abstractmethod
    def _losses(self, scores: Array, data: PyTree) -> Array:
        """Return l of each score."""

    @abstractmethod
    def _slopes(self, scores: Array, data: PyTree) -> tuple[Array, Array]:
        """Return l' and l'' of each score."""

    def penalties(self, outer_var: Array) -> Array:
        """Return the penalty of each feature."""
        penalties = jnp.exp(outer_var)
        return penalties if self.groups is None else penalties[self.groups]

    def grouped(self, per_feature: Array, outer_var: Array) -> Array:
        """Return the sum over the features of each group."""
        if self.groups is None:
            return per_feature
        return jax.ops.segment_sum(per_feature, self.groups, num_segments=outer_var.size)

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        z, x, v = point
        features, penalties = self._features(data), self.penalties(x)
        slopes, curvatures = self._slopes(z @ features, data)
        return InnerPass(
            grad=features @ (weights * slopes) + penalties * z,
            hvp=features @ (weights * curvatures * (v @ features)) + penalties * v,
            cross=self.grouped(penalties * z * v, x),
        )

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self.grouped(self.penalties(point.outer_var) * point.inner_var**2 / 2, point.outer_var)

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        features = self._features(data)
        slopes, _ = self._slopes(point.inner_var @ features, data)
        return OuterPass(features @ (weights * slopes), jnp.zeros_like(point.outer_var))

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous): subtracted per row, so that each level is multiplied back once."""
        train, weights = self.inner_samples.take(rows.inner)
        validation, outer_weights = self.outer_samples.take(rows.outer)
        (z, x, v), (z0, x0, v0) = point, previous
        penalties, penalties0 = self.penalties(x), self.penalties(x0)
        features, outer_features = self._features(train), self._features(validation)
        slopes, curvatures = self._slopes(z @ features, train)
        slopes0, curvatures0 = self._slopes(z0 @ features, train)
        outer_slopes, _ = self._slopes(z @ outer_features, validation)
        outer_slopes0, _ = self._slopes(z0 @ outer_features, validation)
        curved = curvatures * (v @ features) - curvatures0 * (v0 @ features)
        hvp = features @ (weights * curved) + penalties * v - penalties0 * v0
        return Point(
            inner_var=features @ (weights * (slopes - slopes0)) + penalties * z - penalties0 * z0,
            outer_var=self.grouped(penalties * z * v - penalties0 * z0 * v0, x),
            v=hvp + outer_features @ (outer_weights * (outer_slopes - outer_slopes0)),
        )

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return jnp.sum(weights * self._losses(point.inner_var @ self._features(data), data))
