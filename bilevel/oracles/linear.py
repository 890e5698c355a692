"""Closed-form oracles of penalty selection for linear models.

    G = mean l(d'z) + ½ sum_k exp(x_g(k)) z_k²        F = mean l(d'z)

with one outer variable per feature, or per group g of features. On rows D, features first,

    ∇z G = D l' + exp(x) z      (∇²zz G) v = D (l'' D'v) + exp(x) v      (∇²xz G) v = exp(x) z v, summed by group
"""

from abc import abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bilevel.oracles.rowwise import RowwiseOracles
from bilevel.types import Array, InnerPass, OuterPass, Point, PyTree

# Beside curvatures of data near 1, a penalty below the lower one is as good as none, and one above the upper as good
# as leaving the feature out.
LOG_PENALTIES = (-20.0, 20.0)


def ungrouped(per_group: Array, groups: Array | None) -> Array:
    """Return what each member has from its group."""
    return per_group if groups is None else per_group[groups]


def grouped(per_member: Array, groups: Array | None, n_groups: int) -> Array:
    """Return the sum over the members of each group."""
    return per_member if groups is None else jax.ops.segment_sum(per_member, groups, num_segments=n_groups)


@dataclass(frozen=True)
class LinearOracles(RowwiseOracles):
    """A loss of one score per row; ``groups`` holds the group of each feature, None for one each."""

    groups: Array | None = None

    diagonal_passes = 1

    @abstractmethod
    def _features(self, data: PyTree) -> Array:
        """Return the rows, (features, samples)."""

    @abstractmethod
    def _losses(self, scores: Array, data: PyTree) -> Array:
        """Return l of each score."""

    @abstractmethod
    def _slopes(self, scores: Array, data: PyTree) -> tuple[Array, Array]:
        """Return l' and l'' of each score."""

    @property
    def wide_bounds(self) -> tuple[float, float]:
        """Bounds of the logarithm of a penalty."""
        return LOG_PENALTIES

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, cautious: bool) -> Array:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        if cautious:
            curvatures = self._cautious(slopes, curvatures)
        return features ** (2 * power) @ (weights * curvatures**power)

    def _cautious(self, slopes: Array, curvatures: Array) -> Array:
        """Return the curvatures, or what they may become where the loss is flat for being large."""
        return curvatures

    def _diagonal_rest(self, point: Point) -> Array:
        return self.penalties(point.outer_var)

    def penalties(self, outer_var: Array) -> Array:
        """Return the penalty of each feature."""
        return ungrouped(jnp.exp(outer_var), self.groups)

    def grouped(self, per_feature: Array, outer_var: Array) -> Array:
        """Return the sum over the features of each group."""
        return grouped(per_feature, self.groups, outer_var.size)

    def _inner_terms(self, point: Point, data: PyTree) -> tuple[Array, Array]:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        return slopes, curvatures * (point.v @ features)

    def _inner_sum(self, terms: tuple[Array, Array], data: PyTree, weights: Array, like: Point) -> InnerPass:
        features, (slopes, curved) = self._features(data), terms
        return InnerPass(features @ (weights * slopes), features @ (weights * curved), jnp.zeros_like(like.outer_var))

    def _inner_rest(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.penalties(x)
        return InnerPass(penalties * z, penalties * v, self.grouped(penalties * z * v, x))

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self.grouped(self.penalties(point.outer_var) * point.inner_var**2 / 2, point.outer_var)

    def _outer_terms(self, point: Point, data: PyTree) -> Array:
        return self._slopes(point.inner_var @ self._features(data), data)[0]

    def _outer_sum(self, terms: Array, data: PyTree, weights: Array, like: Point) -> OuterPass:
        return OuterPass(self._features(data) @ (weights * terms), jnp.zeros_like(like.outer_var))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return jnp.sum(weights * self._losses(point.inner_var @ self._features(data), data))
