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
    curved,
    probabilities,
    products,
    residuals,
)
from bilevel.types import Array, InnerPass, Point, Rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "regularisation"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class CleaningOracles(SoftmaxOracles):
    """Labelled rows on each level; ``regularisation`` is C, in the dtype of the rows."""

    regularisation: Array

    def _inner(self, point: Point, data: Labelled, weights: Array) -> InnerPass:
        z, x, v = point
        rows, ridge = data.features, 2 * self.regularisation
        grad_rows, hvp_rows, slopes = _row_terms(rows @ z, rows @ v, sigmoid(x[data.index]), data.labels)
        return InnerPass(
            grad=rows.T @ (weights[:, None] * grad_rows) + ridge * z,
            hvp=rows.T @ (weights[:, None] * hvp_rows) + ridge * v,
            cross=_placed(weights * slopes, data.index, x),
        )

    def _inner_grad_outer(self, point: Point, data: Labelled, weights: Array) -> Array:
        trust = sigmoid(point.outer_var[data.index])
        losses = cross_entropies(data.features @ point.inner_var, data.labels)
        return _placed(weights * trust * (1 - trust) * losses, data.index, point.outer_var)

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous): each level is read once for both points, and once to multiply back."""
        train, weights = self.inner_samples.take(rows.inner)
        validation, outer_weights = self.outer_samples.take(rows.outer)
        (z, x, v), (z0, x0, v0) = point, previous
        scores, scores0, tangents, tangents0 = products(train.features, z, z0, v, v0)
        grad_rows, hvp_rows, slopes = _row_terms(scores, tangents, sigmoid(x[train.index]), train.labels)
        grad_rows0, hvp_rows0, slopes0 = _row_terms(scores0, tangents0, sigmoid(x0[train.index]), train.labels)
        changes = grad_rows - grad_rows0, hvp_rows - hvp_rows0
        grad, hvp = products(train.features.T, *(weights[:, None] * change for change in changes))
        chances, chances0 = map(probabilities, products(validation.features, z, z0))
        outer_grad = validation.features.T @ (outer_weights[:, None] * (chances - chances0))
        ridge = 2 * self.regularisation
        return Point(
            inner_var=grad + ridge * (z - z0),
            outer_var=_placed(weights * (slopes - slopes0), train.index, x),
            v=hvp + ridge * (v - v0) + outer_grad,
        )

    def _inner_value(self, point: Point, data: Labelled, weights: Array) -> Array:
        losses = cross_entropies(data.features @ point.inner_var, data.labels)
        fit = jnp.sum(weights * sigmoid(point.outer_var[data.index]) * losses)
        return fit + self.regularisation * jnp.sum(point.inner_var**2)


def _row_terms(scores: Array, tangents: Array, trust: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Return what each row adds to the gradient, the Hessian-vector product and the cross product."""
    chances = probabilities(scores)
    missed = residuals(chances, labels)
    slopes = trust * (1 - trust) * jnp.sum(missed * tangents, axis=1)
    return trust[:, None] * missed, trust[:, None] * curved(chances, tangents), slopes


def _placed(values: Array, index: Array, like: Array) -> Array:
    """Return zeros but for the values of the rows at ``index``."""
    return jnp.zeros_like(like).at[index].add(values)
