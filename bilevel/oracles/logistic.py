"""Closed-form oracles of logistic hyper-parameter selection.

    G = mean log(1 + exp(-y d'z)) + ½ sum_k exp(x_k) z_k²        F = mean log(1 + exp(-y d'z))

The rows held are y d, features first: the label is part of the data. With s = sigmoid(-y d'z), on rows D,

    ∇z G = -D s + exp(x) z      (∇²zz G) v = D (s (1 - s) D'v) + exp(x) v      (∇²xz G) v = exp(x) z v
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from bilevel.losses import logistic, sigmoid
from bilevel.oracles.base import Oracles
from bilevel.types import Array, InnerPass, OuterPass, Point, Rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LogisticOracles(Oracles):
    """One array per level: signed rows, (features, samples)."""

    def _inner(self, point: Point, data: Array, weights: Array) -> InnerPass:
        z, v, penalty = point.inner_var, point.v, jnp.exp(point.outer_var)
        missed = sigmoid(-(z @ data))
        grad = data @ (-weights * missed) + penalty * z
        hvp = data @ (weights * missed * (1 - missed) * (v @ data)) + penalty * v
        return InnerPass(grad, hvp, penalty * z * v)

    def _inner_grad_outer(self, point: Point, data: Array, weights: Array) -> Array:
        return jnp.exp(point.outer_var) * point.inner_var**2 / 2

    def _outer(self, point: Point, data: Array, weights: Array) -> OuterPass:
        grad = data @ (-weights * sigmoid(-(point.inner_var @ data)))
        return OuterPass(grad, jnp.zeros_like(point.outer_var))

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous): subtracted per row, so that each level is multiplied back once."""
        train, weights = self.inner_samples.take(rows.inner)
        z, x, v = point
        z0, x0, v0 = previous
        penalty, penalty0 = jnp.exp(x), jnp.exp(x0)
        missed, missed0 = sigmoid(-(z @ train)), sigmoid(-(z0 @ train))
        curved = missed * (1 - missed) * (v @ train) - missed0 * (1 - missed0) * (v0 @ train)
        validation, outer_weights = self.outer_samples.take(rows.outer)
        outer_change = sigmoid(-(z0 @ validation)) - sigmoid(-(z @ validation))
        return Point(
            inner_var=train @ (weights * (missed0 - missed)) + penalty * z - penalty0 * z0,
            outer_var=penalty * z * v - penalty0 * z0 * v0,
            v=train @ (weights * curved) + penalty * v - penalty0 * v0 + validation @ (outer_weights * outer_change),
        )

    def _inner_value(self, point: Point, data: Array, weights: Array) -> Array:
        penalty = jnp.sum(jnp.exp(point.outer_var) * point.inner_var**2) / 2
        return jnp.sum(weights * logistic(point.inner_var @ data)) + penalty

    def _outer_value(self, point: Point, data: Array, weights: Array) -> Array:
        return jnp.sum(weights * logistic(point.inner_var @ data))
