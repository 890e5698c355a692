"""What linear softmax regression has in common at both levels: rows, probabilities, curvature."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel.oracles.base import Oracles
from bilevel.types import AnyArray, Array, OuterPass, Point


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


def products(features: Array, *matrices: Array) -> list[Array]:
    """Return features @ matrix for each matrix, reading the features once; none can be left uncomputed."""
    return jnp.split(features @ jnp.concatenate(matrices, axis=1), len(matrices), axis=1)


@dataclass(frozen=True)
class SoftmaxOracles(Oracles):
    """F = mean CE(d'z), whatever the inner problem is."""

    def _outer(self, point: Point, data: Labelled, weights: Array) -> OuterPass:
        chances = probabilities(data.features @ point.inner_var)
        grad = data.features.T @ (weights[:, None] * residuals(chances, data.labels))
        return OuterPass(grad, jnp.zeros_like(point.outer_var))

    def _outer_value(self, point: Point, data: Labelled, weights: Array) -> Array:
        return weights @ cross_entropies(data.features @ point.inner_var, data.labels)
