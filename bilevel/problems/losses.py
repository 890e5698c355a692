"""Losses of one score, with derivatives that XLA turns into short loops, and bounds of their curvature near a score."""

from math import log, sqrt

import jax
import jax.numpy as jnp

from bilevel._types import Array


@jax.custom_jvp
def softplus(margin: Array) -> Array:
    """Return log(1 + exp(margin)) without overflow."""
    # jax.nn.softplus carries guards for infinite input through both derivatives: a quarter of a step of SRBA.
    return jnp.maximum(margin, 0) + jnp.log1p(jnp.exp(-jnp.abs(margin)))


@jax.custom_jvp
def sigmoid(margin: Array) -> Array:
    """Return 1 / (1 + exp(-margin))."""
    return 1 / (1 + jnp.exp(-margin))


def sigmoid_and_slope(margin: Array) -> tuple[Array, Array]:
    """Return σ(margin) and σ'(margin) = σ(margin) σ(-margin); 1 - σ(margin) would cancel at large margins."""
    value = sigmoid(margin)
    return value, value * sigmoid(-margin)


softplus.defjvps(lambda tangent, _, margin: sigmoid(margin) * tangent)
sigmoid.defjvps(lambda tangent, _, margin: sigmoid_and_slope(margin)[1] * tangent)


def logistic(margin: Array) -> Array:
    """Return log(1 + exp(-margin)), the loss of a label ±1 times its score."""
    return softplus(-margin)


# Suprema of |σ|, |σ'|, …: of the derivatives of log(1 + exp(s)) from the first on.
_ROOT = sqrt(0.5 - sqrt(105) / 30)
SIGMOID = (1.0, 1 / 4, 1 / (6 * sqrt(3)), 1 / 8, _ROOT * (1 - _ROOT**2) * (2 - 3 * _ROOT**2) / 4)
STEEPEST = log(2 + sqrt(3))  # the score where |l'''| of the logistic loss is largest


def logistic_curvature(scores: Array, reach: Array) -> tuple[Array, Array, Array]:
    """Return infimum and supremum of l'' and supremum of |l'''| of the logistic loss within ``reach`` of each score."""
    sizes = jnp.abs(scores)
    nearest, farthest = jnp.maximum(sizes - reach, 0), sizes + reach
    steepest = jnp.clip(STEEPEST, nearest, farthest)  # |l'''| is even, rises up to its peak and falls beyond it
    third = _logistic_second(steepest) * (1 - 2 * sigmoid(-steepest))
    return _logistic_second(farthest), _logistic_second(nearest), third


def _logistic_second(sizes: Array) -> Array:
    """Return l'' of scores with these absolute values: it is even, and falls with them."""
    return sigmoid_and_slope(sizes)[1]
