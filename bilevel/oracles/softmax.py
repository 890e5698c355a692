"""What linear softmax regression has in common at both levels: rows, probabilities, curvature."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel import trees
from bilevel.oracles.base import estimated
from bilevel.oracles.rowwise import RowwiseOracles
from bilevel.types import AnyArray, Array, InnerPass, OuterPass, Point


class Labelled(NamedTuple):
    """Features, (samples, features), classes 0, 1, … and the place of each row in the user's order."""

    features: AnyArray
    labels: AnyArray
    index: AnyArray


def cross_entropies(scores: Array, labels: Array) -> Array:
    """Return log(sum exp(s)) - s_label of each row of scores."""
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def probabilities(scores: Array) -> Array:
    """Return softmax of each row of scores."""
    raised = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    return raised / jnp.sum(raised, axis=1, keepdims=True)


def residuals(chances: Array, labels: Array) -> Array:
    """Return the gradient of each cross-entropy with respect to its scores."""
    return chances - jax.nn.one_hot(labels, chances.shape[1], dtype=chances.dtype)


def curved(chances: Array, tangents: Array) -> Array:
    """Return the Hessian of each cross-entropy with respect to its scores, times a tangent."""
    return chances * (tangents - jnp.sum(chances * tangents, axis=1, keepdims=True))


def curvatures(data: Labelled, chances: Array, cautious: bool) -> Array:
    """Return p (1 - p) of each row and class; cautiously, at least the squared residual, which is alike in the mean.

    Where a row is missed by far, only the residual is not 0.
    """
    plain = chances * (1 - chances)
    return jnp.maximum(plain, residuals(chances, data.labels) ** 2) if cautious else plain


def row_diagonals(features: Array, curvatures: Array, weights: Array, power: int) -> Array:
    """Return sum(weights * h_i**power) with h_i the squared features times the curvatures of a row."""
    return (features ** (2 * power)).T @ (weights[:, None] * curvatures**power)


def products(features: Array, *matrices: Array) -> list[Array]:
    """Return features @ matrix for each matrix, reading the features once; none can be left uncomputed."""
    return jnp.split(features @ jnp.concatenate(matrices, axis=1), len(matrices), axis=1)


def weighted(terms: tuple[Array, ...], weights: Array) -> tuple[Array, ...]:
    """Return each term times the weight of its row."""
    return tuple(weights[:, None] * term if term.ndim == 2 else weights * term for term in terms)


@dataclass(frozen=True)
class SoftmaxOracles(RowwiseOracles):
    """F = mean CE(d'z), whatever the inner problem is.

    The first two terms of a row are numbers per class, for ∇z G and (∇²zz G) v. Rows are long, so that they are
    multiplied by all that is asked for at once; a derivative that is asked for alone has products of its own.
    """

    diagonal_passes = 1

    @abstractmethod
    def _inner_terms_of(self, scores: Array, tangents: Array, point: Point, data: Labelled) -> tuple[Array, ...]:
        """Return the terms of each row from its products with z and v."""

    @abstractmethod
    def _inner_bundle(
        self, grad: Array, hvp: Array, terms: tuple[Array, ...], data: Labelled, like: Point
    ) -> InnerPass:
        """Return the sums over rows, two of which are given; the terms are weighted."""

    def _inner_terms(self, point: Point, data: Labelled) -> tuple[Array, ...]:
        scores, tangents = products(data.features, point.inner_var, point.v)
        return self._inner_terms_of(scores, tangents, point, data)

    def _inner_changes(self, point: Point, previous: Point, data: Labelled) -> tuple[Array, ...]:
        (z, _, v), (z0, _, v0) = point, previous
        scores, tangents, scores0, tangents0 = products(data.features, z, v, z0, v0)
        new = self._inner_terms_of(scores, tangents, point, data)
        return trees.subtract(new, self._inner_terms_of(scores0, tangents0, previous, data))

    def _inner_sum(self, terms: tuple[Array, ...], data: Labelled, weights: Array, like: Point) -> InnerPass:
        terms = weighted(terms, weights)
        grad, hvp = products(data.features.T, *terms[:2])
        return self._inner_bundle(grad, hvp, terms, data, like)

    def _inner_apart(self, point: Point, data: Labelled, weights: Array) -> InnerPass:
        rows = data.features
        terms = weighted(self._inner_terms_of(rows @ point.inner_var, rows @ point.v, point, data), weights)
        total = self._inner_bundle(rows.T @ terms[0], rows.T @ terms[1], terms, data, point)
        return trees.add(total, self._inner_rest(point))

    def inner_grad(self, point: Point, rows: Any = None) -> Array:
        """Return ∇z G."""
        return estimated(self._inner_apart, point, self.inner_samples, rows).grad

    def hvp(self, point: Point, rows: Any = None) -> Array:
        """Return (∇²zz G) v."""
        return estimated(self._inner_apart, point, self.inner_samples, rows).hvp

    def cross(self, point: Point, rows: Any = None) -> Array:
        """Return (∇²xz G) v."""
        return estimated(self._inner_apart, point, self.inner_samples, rows).cross

    def _outer_terms(self, point: Point, data: Labelled) -> Array:
        return residuals(probabilities(data.features @ point.inner_var), data.labels)

    def _outer_changes(self, point: Point, previous: Point, data: Labelled) -> Array:
        scores, scores0 = products(data.features, point.inner_var, previous.inner_var)
        return probabilities(scores) - probabilities(scores0)

    def _outer_sum(self, terms: Array, data: Labelled, weights: Array, like: Point) -> OuterPass:
        return OuterPass(data.features.T @ (weights[:, None] * terms), jnp.zeros_like(like.outer_var))

    def _outer_value(self, point: Point, data: Labelled, weights: Array) -> Array:
        return weights @ cross_entropies(data.features @ point.inner_var, data.labels)
