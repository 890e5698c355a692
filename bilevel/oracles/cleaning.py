"""Closed-form oracles of data cleaning: softmax regression with one weight per training row.

    G = mean_i sigmoid(x_i) CE_i(z) + C ||z||²        F = mean CE(z)        z: features × classes

With the residual r_i = softmax(d_i'z) - e_label and S_i t = p (t - p't), where s = sigmoid(x):

    ∇z G = D'(s r) + 2C z     (∇²zz G) v = D'(s S(Dv)) + 2C v     ((∇²xz G) v)_i = s_i (1 - s_i) r_i'(d_i'v) / n

so that the cross product of a batch is zero outside the rows of the batch.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from bilevel.losses import sigmoid
from bilevel.oracles.softmax import (
    Labelled,
    SoftmaxOracles,
    cross_entropies,
    curvatures,
    curved,
    probabilities,
    residuals,
    row_diagonals,
)
from bilevel.types import Array, InnerPass, Point

LOGITS = (-8.0, 8.0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "regularisation"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class CleaningOracles(SoftmaxOracles):
    """Labelled rows on each level; ``regularisation`` is C, in the dtype of the rows."""

    regularisation: Array

    @property
    def wide_bounds(self) -> tuple[float, float]:
        """Bounds of the logit of a weight: beyond, a row counts fully or not at all."""
        return LOGITS

    def _inner_terms_of(self, scores: Array, tangents: Array, point: Point, data: Labelled) -> tuple[Array, ...]:
        trust, chances = sigmoid(point.outer_var[data.index]), probabilities(scores)
        missed = residuals(chances, data.labels)
        slopes = trust * (1 - trust) * jnp.sum(missed * tangents, axis=1)
        return trust[:, None] * missed, trust[:, None] * curved(chances, tangents), slopes

    def _inner_bundle(
        self, grad: Array, hvp: Array, terms: tuple[Array, ...], data: Labelled, like: Point
    ) -> InnerPass:
        return InnerPass(grad, hvp, _placed(terms[2], data.index, like.outer_var))

    def _inner_rest(self, point: Point) -> InnerPass:
        ridge = 2 * self.regularisation
        return InnerPass(ridge * point.inner_var, ridge * point.v, jnp.zeros_like(point.outer_var))

    def _row_diagonals(self, point: Point, data: Labelled, weights: Array, *, power: int, cautious: bool) -> Array:
        trust, chances = sigmoid(point.outer_var[data.index]), probabilities(data.features @ point.inner_var)
        return row_diagonals(data.features, trust[:, None] * curvatures(data, chances, cautious), weights, power)

    def _diagonal_rest(self, point: Point) -> Array:
        return jnp.full_like(point.inner_var, 2 * self.regularisation)

    def _inner_grad_outer(self, point: Point, data: Labelled, weights: Array) -> Array:
        trust = sigmoid(point.outer_var[data.index])
        losses = cross_entropies(data.features @ point.inner_var, data.labels)
        return _placed(weights * trust * (1 - trust) * losses, data.index, point.outer_var)

    def _inner_value(self, point: Point, data: Labelled, weights: Array) -> Array:
        losses = cross_entropies(data.features @ point.inner_var, data.labels)
        fit = jnp.sum(weights * sigmoid(point.outer_var[data.index]) * losses)
        return fit + self.regularisation * jnp.sum(point.inner_var**2)


def _placed(values: Array, index: Array, like: Array) -> Array:
    """Return zeros but for the values of the rows at ``index``."""
    return jnp.zeros_like(like).at[index].add(values)
